"""A torch_dist checkpoint seen as a model: layers, attention blocks, and the optimizer states that follow a weight.

A key of the checkpoint is a weight's name, with ``optimizer.state.NAME.`` before it for an optimizer state, and, for
models whose layers are all alike, without the layer's number: the tensor then has the layers as a first dimension.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_convert.catalogue import Catalogue, JsonFile, SourceTensor
from mla_convert.errors import CannotError
from mla_convert.formats.torch_dist import TorchDist
from mla_convert.tensors import TensorSpec

_STATE = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.[^.]+\.)(.+)", re.DOTALL)
_STACK = re.compile(r"((?:.*?\.)?layers\.)(?!\d+\.)(.+)", re.DOTALL)
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
#: Fields of a norm that is fused with the projection behind it.
FUSED_NORM_FIELDS = ("layer_norm_weight", "layer_norm_bias")
#: Megatron's argument -> what a Hugging Face configuration calls it, which ``geometry`` reads.
_ARGUMENTS: Mapping[str, str] = {
    "num_attention_heads": "num_attention_heads",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
}


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the checkpoint, taken apart.

    Attributes:
        text: The key itself.
        state: ``optimizer.state.NAME.`` of an optimizer state; empty for a weight.
        name: The weight's name.
        is_stacked: True if the tensor holds all layers.
    """

    text: str
    state: str
    name: str
    is_stacked: bool

    @property
    def module(self) -> str:
        """The weight's module."""
        return self.name.rpartition(".")[0]

    @property
    def field(self) -> str:
        """What the weight is of its module."""
        return self.name.rpartition(".")[2]

    @property
    def row_axis(self) -> int:
        """The dimension of the tensor that counts the weight's rows."""
        return 1 if self.is_stacked else 0

    def renamed(self, module: str, field: str | None = None) -> str:
        """The key of a field of another module, for the same layers and the same state."""
        return f"{self.state}{module}.{field or self.field}"


def parse_key(text: str) -> Key:
    """Take a key apart."""
    found = _STATE.fullmatch(text)
    state, name = (found[1], found[2]) if found else ("", text)
    return Key(text, state, name, _STACK.fullmatch(name) is not None)


def is_optimizer_key(text: str) -> bool:
    """True for anything that belongs to the optimizer."""
    return _OPTIMIZER.match(text) is not None


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A checkpoint and its inventory.

    Attributes:
        source: The checkpoint.
        logical: Its weights by name, one layer at a time; they have no place in a file.
        keys: Every key, taken apart.
    """

    source: TorchDist
    logical: Catalogue
    keys: Mapping[str, Key]

    @property
    def optimizer_keys(self) -> tuple[str, ...]:
        """Keys of tensors and objects that belong to the optimizer."""
        return tuple(key for key in self.keys if is_optimizer_key(key))

    @property
    def is_optimizer_by_name(self) -> bool:
        """False if optimizer states lie in buckets, whose place says which weight they belong to."""
        return not any(_BUCKETS.match(key) for key in self.keys)

    @property
    def states(self) -> tuple[str, ...]:
        """The optimizer states that follow a weight, such as ``exp_avg``."""
        prefixes = dict.fromkeys(key.state for key in self.keys.values() if key.state)
        return tuple(prefix.rstrip(".").rpartition(".")[2] for prefix in prefixes)


def read_model(source: TorchDist) -> MegatronModel:
    """The inventory of a checkpoint as a model."""
    metadata = source.metadata
    keys = {text: parse_key(text) for text in (*metadata.tensors, *metadata.objects)}
    tensors: dict[str, SourceTensor] = {}
    for text, tensor in metadata.tensors.items():
        key = keys[text]
        if is_optimizer_key(text) or key.field in FUSED_NORM_FIELDS:
            continue
        for name, shape in layer_names(key, tensor.spec.shape):
            spec = TensorSpec(name, tensor.spec.dtype, shape)
            tensors[name] = SourceTensor(spec, "", 0, spec.nbytes)
    config = configuration(source.arguments)
    logical = Catalogue(
        root=source.root,
        single_file=False,
        files=source.files,
        tensors=tensors,
        config=JsonFile("args", b"", config) if config else None,
        index=None,
        others=source.others,
        warnings=source.warnings,
        origin=source.origin,
    )
    return MegatronModel(source, logical, keys)


def layer_names(key: Key, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The weight's name and shape in each of the layers that a tensor holds."""
    found = _STACK.fullmatch(key.name)
    if found is None or not shape:
        return [(key.name, shape)]
    return [(f"{found[1]}{layer}.{found[2]}", shape[1:]) for layer in range(shape[0])]


def configuration(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments in the words of a Hugging Face configuration; empty unless they describe MLA."""
    if type(arguments.get("kv_lora_rank")) is not int:
        return {}
    return {
        name: arguments[argument]
        for argument, name in _ARGUMENTS.items()
        if type(arguments.get(argument)) is int
    }


def refuse_buckets(model: MegatronModel) -> None:
    """Raise CannotError if the optimizer's states cannot be told apart by name."""
    if model.is_optimizer_by_name:
        return
    keys = [key for key in model.keys if _BUCKETS.match(key)]
    raise CannotError(
        f"the optimizer's state lies in {len(keys)} flat buckets (dp_reshardable): where a weight's state is in them "
        "depends on the order of all weights, which changes when a projection is split or combined",
        hint="save once more in Megatron with --dist-ckpt-optim-fully-reshardable, or give --drop-optimizer and go on "
        "with --no-load-optim",
        details=keys,
    )
