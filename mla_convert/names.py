"""How each dialect names the parts of an attention block. Data, plus the two lookups that read it.

Blocks are found by the suffix of a tensor's name, never by a list of model types: a new family that follows one
of these dialects needs no change here. A block's *prefix* is everything up to the projection's own module, for
example ``model.layers.3.self_attn.``; a tensor's *field* is what follows it (``weight``, ``weight_scale_inv``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Part(StrEnum):
    """A part of a Multi-head Latent Attention block, in DeepSeek's vocabulary."""

    KV_B = "kv_b"  # combined up-projection [H*(nope+v), rank]
    K_B = "k_b"  # split K up-projection [H*nope, rank]
    V_B = "v_b"  # split V up-projection [H*v, rank]
    Q = "q"  # query projection without a query LoRA [H*(nope+rope), hidden]
    Q_A = "q_a"
    Q_A_NORM = "q_a_norm"
    Q_B = "q_b"  # [H*(nope+rope), q_rank]
    KV_A = "kv_a"  # [rank+rope, hidden]
    KV_A_NORM = "kv_a_norm"
    O = "o"  # noqa: E741 - the projection's name  [hidden, H*v]
    INDEX_Q = "index_q"
    INDEX_K = "index_k"
    INDEX_K_NORM = "index_k_norm"
    INDEX_WEIGHTS = "index_weights"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One naming scheme. ``modules`` lists every spelling of a part; the first one is the one we write."""

    name: str
    modules: Mapping[Part, tuple[str, ...]]

    def module(self, part: Part) -> str:
        """The spelling used when a part is written."""
        return self.modules[part][0]


_INDEXER = {
    Part.INDEX_Q: ("indexer.wq_b",),
    Part.INDEX_K: ("indexer.wk",),
    Part.INDEX_K_NORM: ("indexer.k_norm",),
    Part.INDEX_WEIGHTS: ("indexer.weights_proj",),
}

HUGGINGFACE = Dialect(
    "huggingface",
    MappingProxyType(
        {
            Part.KV_B: ("kv_b_proj",),
            Part.K_B: ("k_b_proj",),
            Part.V_B: ("v_b_proj",),
            Part.Q: ("q_proj",),
            Part.Q_A: ("q_a_proj",),
            Part.Q_A_NORM: ("q_a_layernorm",),
            Part.Q_B: ("q_b_proj",),
            Part.KV_A: ("kv_a_proj_with_mqa",),
            Part.KV_A_NORM: ("kv_a_layernorm",),
            Part.O: ("o_proj", "dense"),
            **_INDEXER,
        }
    ),
)

#: DeepSeek's inference code, Mistral's native files and Motif: the same words but for the norms.
NATIVE = Dialect(
    "native",
    MappingProxyType(
        {
            Part.KV_B: ("wkv_b",),
            Part.K_B: ("wk_b",),
            Part.V_B: ("wv_b",),
            Part.Q: ("wq",),
            Part.Q_A: ("wq_a",),
            Part.Q_A_NORM: ("q_a_norm", "q_norm"),
            Part.Q_B: ("wq_b",),
            Part.KV_A: ("wkv_a_with_mqa", "wkv_a"),
            Part.KV_A_NORM: ("kv_a_norm", "kv_norm"),
            Part.O: ("wo",),
            **_INDEXER,
        }
    ),
)

DIALECTS = (HUGGINGFACE, NATIVE)

#: The parts that split and combine move; a block exists where one of these does.
UP_PROJECTIONS = (Part.KV_B, Part.K_B, Part.V_B)

_UP_PROJECTION_NAMES = {
    dialect.module(part): (dialect, part) for dialect in DIALECTS for part in UP_PROJECTIONS
}
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|mtp_layers|mtp)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class UpProjectionName:
    """The parsed name of one tensor of a KV up-projection."""

    prefix: str
    dialect: Dialect
    part: Part
    field: str


def parse_up_projection(name: str) -> UpProjectionName | None:
    """Split ``…self_attn.kv_b_proj.weight`` into prefix, part and field; None for any other tensor."""
    module, _, field = name.rpartition(".")
    prefix, _, leaf = module.rpartition(".")
    found = _UP_PROJECTION_NAMES.get(leaf)
    if found is None:
        return None
    dialect, part = found
    return UpProjectionName(prefix + "." if prefix else "", dialect, part, field)


def layer_number(prefix: str) -> int | None:
    """The layer a block's prefix belongs to (``model.layers.3.self_attn.`` -> 3); None if the name has none."""
    found = _LAYER.search(prefix)
    return int(found.group(1)) if found else None
