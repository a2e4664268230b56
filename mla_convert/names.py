"""How each dialect names the parts of an attention block. Data, plus the two lookups that read it.

Blocks are found by the suffix of a tensor's name, never by a list of model types: a new family that follows one
of these dialects needs no change here. A block's *prefix* is everything up to the projection's own module, for
example ``model.layers.3.self_attn.``; a tensor's *field* is what follows it (``weight``, ``weight_scale_inv``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
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


class Sharding(StrEnum):
    """How a module's weight is dealt out to tensor-parallel ranks."""

    HEADS_OUT = "heads out"  # rows, whole heads of them
    HEADS_IN = "heads in"  # columns, whole heads of them; every rank gives a part of the sum
    COLUMN = "column"  # rows (outputs)
    ROW = "row"  # columns (inputs); every rank gives a part of the sum
    VOCABULARY = "vocabulary"  # rows, one a token
    STACKED = "stacked"  # one tensor of all experts, along its first dimension
    REPLICATED = "replicated"  # whole on every rank
    UNKNOWN = "unknown"  # no rule names it: whole on every rank, and the report says so

    @property
    def dimension(self) -> int | None:
        """The dimension of the weight that is cut; None if it stays whole."""
        if self in (Sharding.REPLICATED, Sharding.UNKNOWN):
            return None
        return 1 if self in (Sharding.HEADS_IN, Sharding.ROW) else 0


#: How each part of an attention block is dealt out. The indexer stays whole: every rank selects for all heads.
PART_SHARDING: Mapping[Part, Sharding] = MappingProxyType(
    {
        **dict.fromkeys((Part.KV_B, Part.K_B, Part.V_B, Part.Q, Part.Q_B), Sharding.HEADS_OUT),
        Part.O: Sharding.HEADS_IN,
        **dict.fromkeys((Part.Q_A, Part.Q_A_NORM, Part.KV_A, Part.KV_A_NORM), Sharding.REPLICATED),
        **dict.fromkeys(
            (Part.INDEX_Q, Part.INDEX_K, Part.INDEX_K_NORM, Part.INDEX_WEIGHTS), Sharding.REPLICATED
        ),
    }
)

_DECODER = r"(?:layers|blocks|mtp_layers|mtp)\."
#: How the other modules of the language model are dealt out: the first pattern that its whole name matches. Names
#: are relative to the language model (``layers.3.mlp.up_proj``), dialects side by side; an MTP layer has its own
#: embedding and head.
MODULE_SHARDING: tuple[tuple[re.Pattern[str], Sharding], ...] = (
    (
        re.compile(rf"(?:{_DECODER}(?:.*\.)?)?(?:embed_tokens|embed|word_embeddings|tok_embeddings)"),
        Sharding.VOCABULARY,
    ),
    (re.compile(rf"lm_head|head|output|{_DECODER}(?:.*\.)?shared_head\.head"), Sharding.VOCABULARY),
    (re.compile(rf"{_DECODER}.*\.experts"), Sharding.STACKED),
    (re.compile(rf"{_DECODER}.*\.(?:gate_proj|up_proj|w1|w3)"), Sharding.COLUMN),
    (re.compile(rf"{_DECODER}.*\.(?:down_proj|w2)"), Sharding.ROW),
    (re.compile(r"(?:.*\.)?(?:\w*norm|enorm|hnorm)(?:\.\d+)?"), Sharding.REPLICATED),
    (re.compile(rf"{_DECODER}.*\.(?:gate|router|router\.classifier|eh_proj)"), Sharding.REPLICATED),
)


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

#: Megatron. A norm may also be a field of the projection behind it: ``linear_kv_up_proj.layer_norm_weight``.
MEGATRON = Dialect(
    "megatron",
    MappingProxyType(
        {
            Part.KV_B: ("linear_kv_up_proj",),
            Part.K_B: ("linear_k_up_proj",),
            Part.V_B: ("linear_v_up_proj",),
            Part.Q: ("linear_q_proj",),
            Part.Q_A: ("linear_q_down_proj",),
            Part.Q_A_NORM: ("q_layernorm",),
            Part.Q_B: ("linear_q_up_proj",),
            Part.KV_A: ("linear_kv_down_proj",),
            Part.KV_A_NORM: ("kv_layernorm",),
            Part.O: ("linear_proj",),
            Part.INDEX_Q: ("core_attention.indexer.linear_wq_b",),
            Part.INDEX_K: ("core_attention.indexer.linear_wk",),
            Part.INDEX_K_NORM: ("core_attention.indexer.k_norm",),
            Part.INDEX_WEIGHTS: ("core_attention.indexer.linear_weights_proj",),
        }
    ),
)

DIALECTS = (HUGGINGFACE, NATIVE, MEGATRON)

#: The parts that split and combine move; a block exists where one of these does.
UP_PROJECTIONS = (Part.KV_B, Part.K_B, Part.V_B)

_UP_PROJECTION_NAMES = {
    dialect.module(part): (dialect, part) for dialect in DIALECTS for part in UP_PROJECTIONS
}
_PARTS = {
    spelling: part
    for dialect in DIALECTS
    for part, spellings in dialect.modules.items()
    for spelling in spellings
}
_STEM = re.compile(rf"(.*?){_DECODER}")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
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


# Tensor parallelism


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor belongs, by its name.

    Attributes:
        module: Full name of its module.
        field: What it is of the module: ``weight``, ``bias``, ``weight_scale_inv``.
        sharding: How the module's weight is dealt out.
        block: Prefix of the attention block it belongs to, if it does.
        expert: Number of the routed expert it belongs to, if it does.
    """

    module: str
    field: str
    sharding: Sharding
    block: str | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Naming:
    """What the names of one checkpoint have in common.

    Attributes:
        blocks: Prefix of every latent attention block.
        stems: What stands before ``layers.`` in the language model, such as ``model.``.
    """

    blocks: frozenset[str]
    stems: tuple[str, ...]

    @classmethod
    def of(cls, names: Collection[str]) -> Naming:
        """Found by the KV up-projections among ``names``."""
        blocks = frozenset(parsed.prefix for name in names if (parsed := parse_up_projection(name)))
        stems = {found.group(1) for prefix in blocks if (found := _STEM.match(prefix))}
        return cls(blocks, tuple(sorted(stems)))

    def place(self, name: str) -> Place:
        """Where the tensor ``name`` belongs."""
        module, _, field = name.rpartition(".")
        expert = _EXPERT.search(name)
        number = int(expert.group(1)) if expert else None
        prefix, _, leaf = module.rpartition(".")
        outer, _, inner = prefix.rpartition(".")
        for block, spelling in ((prefix + ".", leaf), (outer + ".", f"{inner}.{leaf}")):
            if block in self.blocks and spelling in _PARTS:
                return Place(module, field, PART_SHARDING[_PARTS[spelling]], block)
        for inside in self._inside(module):
            for pattern, sharding in MODULE_SHARDING:
                if pattern.fullmatch(inside):
                    return Place(module, field, sharding, None, number)
        return Place(module, field, Sharding.UNKNOWN, None, number)

    def _inside(self, module: str) -> Iterator[str]:
        """The module's name relative to the language model, or to what holds its head."""
        for stem in self.stems:
            for base in dict.fromkeys((stem, stem.removesuffix("model."))):
                if module.startswith(base):
                    yield module[len(base) :]
