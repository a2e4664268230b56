"""Megatron's tensors and Hugging Face's: which is which, and how tensor parallelism cuts each. Data and its look-ups.

A Megatron tensor's *weight name* here is its key in a torch_dist checkpoint whose layers are stored one by one, with
a routed expert's number where the checkpoint has a dimension: ``decoder.layers.3.mlp.experts.7.linear_fc1.weight``.
What lies on disk (stacked layers, one tensor of all experts, layers counted from a pipeline stage's first) is turned
into weight names by the readers. Checked against the state dicts that megatron-core 0.16 and 0.19 give their models.

Rows are in the same order on both sides for every tensor, with two exceptions that the table shows: a gated
``linear_fc1`` holds the rows of two matrices, gate first, and the indexer's rows before megatron-core 0.19, which
``eras`` turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mla_convert.megatron.eras import Norms
from mla_convert.names import Sharding


@dataclass(frozen=True, slots=True)
class Entry:
    """One kind of tensor of a layer, below the layer's name; ``{}`` stands for an expert's number.

    Attributes:
        megatron: Megatron's name.
        huggingface: The tensors whose rows make it up, in order and equally many each.
        sharding: How tensor parallelism cuts it; a gated one is cut part by part.
        placement: For a norm, which of its two places this is.
    """

    megatron: str
    huggingface: tuple[str, ...]
    sharding: Sharding = Sharding.REPLICATED
    placement: Norms | None = None


def _attention() -> Iterator[Entry]:
    ours, theirs = "self_attention.", "self_attn."
    for megatron, huggingface, sharding in (
        ("linear_q_proj", "q_proj", Sharding.HEADS_OUT),
        ("linear_q_down_proj", "q_a_proj", Sharding.UNKNOWN),  # whole or cut by rows: the layer spec decides
        ("linear_q_up_proj", "q_b_proj", Sharding.HEADS_OUT),
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", Sharding.UNKNOWN),
        ("linear_kv_up_proj", "kv_b_proj", Sharding.HEADS_OUT),
        ("linear_k_up_proj", "k_b_proj", Sharding.HEADS_OUT),
        ("linear_v_up_proj", "v_b_proj", Sharding.HEADS_OUT),
        ("linear_proj", "o_proj", Sharding.HEADS_IN),
    ):
        yield Entry(f"{ours}{megatron}.weight", (f"{theirs}{huggingface}.weight",), sharding)
    for norm, before, huggingface in (
        ("q_layernorm", "linear_q_up_proj", "q_a_layernorm"),
        ("kv_layernorm", "linear_kv_up_proj", "kv_a_layernorm"),
    ):
        names = (f"{theirs}{huggingface}.weight",)
        yield Entry(f"{ours}{norm}.weight", names, placement=Norms.STANDALONE)
        yield Entry(f"{ours}{before}.layer_norm_weight", names, placement=Norms.FUSED)
    for megatron, huggingface in (
        ("linear_wq_b.weight", "wq_b.weight"),
        ("linear_wk.weight", "wk.weight"),
        ("k_norm.weight", "k_norm.weight"),
        ("k_norm.bias", "k_norm.bias"),
        ("linear_weights_proj.weight", "weights_proj.weight"),
    ):
        yield Entry(f"{ours}core_attention.indexer.{megatron}", (f"{theirs}indexer.{huggingface}",))


def _feed_forward() -> Iterator[Entry]:
    for where in ("mlp.", "mlp.shared_experts.", "mlp.experts.{}."):
        gated = tuple(f"{where}{part}.weight" for part in ("gate_proj", "up_proj"))
        yield Entry(f"{where}linear_fc1.weight", gated, Sharding.COLUMN)
        yield Entry(f"{where}linear_fc2.weight", (f"{where}down_proj.weight",), Sharding.ROW)
    yield Entry("mlp.router.weight", ("mlp.gate.weight",))
    yield Entry("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",))


#: Every tensor of a transformer layer, in Megatron's decoder and in its MTP layers.
LAYER: tuple[Entry, ...] = (
    Entry("input_layernorm.weight", ("input_layernorm.weight",)),
    *_attention(),
    Entry("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), placement=Norms.STANDALONE),
    Entry("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), placement=Norms.FUSED),
    *_feed_forward(),
)
#: What an MTP layer has besides a transformer layer.
MTP: tuple[Entry, ...] = (
    Entry("enorm.weight", ("enorm.weight",)),
    Entry("hnorm.weight", ("hnorm.weight",)),
    Entry("eh_proj.weight", ("eh_proj.weight",), Sharding.COLUMN),
    Entry("final_layernorm.weight", ("shared_head.norm.weight",)),
)
#: What stands outside of all layers. ``{stem}`` is what the checkpoint has before ``layers.``, and ``{outer}`` the same
#: without a last ``model.``.
OUTER: tuple[Entry, ...] = (
    Entry("embedding.word_embeddings.weight", ("{stem}embed_tokens.weight",), Sharding.VOCABULARY),
    Entry("decoder.final_layernorm.weight", ("{stem}norm.weight",)),
    Entry("output_layer.weight", ("{outer}lm_head.weight",), Sharding.VOCABULARY),
)
#: Copies that published MTP layers hold of the model's own embedding and head, which Megatron's share.
SHARED: Mapping[str, str] = MappingProxyType(
    {
        "embed_tokens.weight": "embedding.word_embeddings.weight",
        "shared_head.head.weight": "output_layer.weight",
    }
)

_BY_MEGATRON = {entry.megatron: entry for entry in LAYER}
_MTP_BY_MEGATRON = {entry.megatron: entry for entry in MTP}
_OUTER_BY_MEGATRON = {entry.megatron: entry for entry in OUTER}
_NORMS = frozenset(name for entry in LAYER if entry.placement for name in entry.huggingface)


def _by_huggingface(entries: Iterable[Entry]) -> dict[tuple[str, Norms | None], tuple[Entry, int]]:
    return {
        (name, entry.placement): (entry, index)
        for entry in entries
        for index, name in enumerate(entry.huggingface)
    }


_BY_HUGGINGFACE = _by_huggingface(LAYER)
_MTP_BY_HUGGINGFACE = _by_huggingface(MTP)
_LAYER_NAME = re.compile(r"(decoder\.layers\.(\d+)\.|mtp\.layers\.(\d+)\.transformer_layer\.)(.+)", re.DOTALL)
_MTP_NAME = re.compile(r"mtp\.layers\.(\d+)\.(.+)", re.DOTALL)
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class MegatronPlace:
    """Where a weight belongs.

    Attributes:
        entry: What kind of tensor it is.
        layer: Its layer of the decoder, or of the MTP layers; None outside of layers.
        is_mtp: True for a tensor of an MTP layer.
        is_inner: True for a tensor of the transformer layer inside it.
        expert: The number of the routed expert it belongs to, if it does.
    """

    entry: Entry
    layer: int | None = None
    is_mtp: bool = False
    is_inner: bool = False
    expert: int | None = None


def place_of(name: str) -> MegatronPlace | None:
    """Where the weight ``name`` belongs; None if the table does not know it."""
    if name in _OUTER_BY_MEGATRON:
        return MegatronPlace(_OUTER_BY_MEGATRON[name])
    found = _LAYER_NAME.fullmatch(name)
    if found:
        expert = _EXPERT.match(found[4])
        below = _EXPERT.sub("mlp.experts.{}.", found[4], count=1)
        entry = _BY_MEGATRON.get(below)
        is_mtp = found[2] is None
        layer = int(found[3] if is_mtp else found[2])
        if entry is None:
            return None
        return MegatronPlace(entry, layer, is_mtp, is_mtp, int(expert[1]) if expert else None)
    outside = _MTP_NAME.fullmatch(name)
    entry = _MTP_BY_MEGATRON.get(outside[2]) if outside else None
    return MegatronPlace(entry, int(outside[1]), is_mtp=True) if outside and entry else None


@dataclass(frozen=True, slots=True)
class Dictionary:
    """Translates names of one model.

    Attributes:
        layers: Layers of the decoder; Hugging Face counts MTP layers on from there.
        stem: What its Hugging Face names have before ``layers.``.
    """

    layers: int
    stem: str = "model."

    @property
    def outer(self) -> str:
        """What names outside of the language model's body begin with."""
        return self.stem.removesuffix("model.")

    def to_huggingface(self, name: str) -> tuple[str, ...] | None:
        """The tensors whose rows make up a Megatron weight, in order; None if the table does not know it."""
        place = place_of(name)
        if place is None:
            return None
        if place.layer is None:
            return tuple(n.format(stem=self.stem, outer=self.outer) for n in place.entry.huggingface)
        number = place.layer + self.layers if place.is_mtp else place.layer
        return tuple(
            f"{self.stem}layers.{number}.{below.format(place.expert)}" for below in place.entry.huggingface
        )

    def to_megatron(self, name: str, norms: Mapping[str, Norms]) -> tuple[str, int, int] | None:
        """The Megatron weight that a Hugging Face tensor is a part of: (name, which part, of how many parts).

        Args:
            name: The tensor's name.
            norms: For each norm below a layer that has two places, the one to use.
        """
        for entry in OUTER:
            if name == entry.huggingface[0].format(stem=self.stem, outer=self.outer):
                return entry.megatron, 0, 1
        layer, below = self.layer_of(name)
        if layer is None:
            return None
        is_mtp = layer >= self.layers
        prefix = f"mtp.layers.{layer - self.layers}." if is_mtp else f"decoder.layers.{layer}."
        if is_mtp and (below, None) in _MTP_BY_HUGGINGFACE:
            return prefix + _MTP_BY_HUGGINGFACE[below, None][0].megatron, 0, 1
        expert = _EXPERT.match(below)
        pattern = _EXPERT.sub("mlp.experts.{}.", below, count=1)
        found = _BY_HUGGINGFACE.get((pattern, norms.get(pattern) if pattern in _NORMS else None))
        if found is None:
            return None
        entry, part = found
        inner = "transformer_layer." if is_mtp else ""
        megatron = entry.megatron.format(expert[1] if expert else "")
        return f"{prefix}{inner}{megatron}", part, len(entry.huggingface)

    def layer_of(self, name: str) -> tuple[int | None, str]:
        """The number in a Hugging Face name, and what is below it; None for a tensor outside of layers."""
        number, dot, below = name.removeprefix(self.stem + "layers.").partition(".")
        if not name.startswith(self.stem + "layers.") or not dot or not number.isdecimal():
            return None, name
        return int(number), below

    def shared_with(self, name: str) -> str | None:
        """The weight that Megatron has in the place of an MTP layer's copy; None for anything else."""
        layer, below = self.layer_of(name)
        return SHARED.get(below) if layer is not None and layer >= self.layers else None


def count_layers(names: Iterable[str], stem: str) -> int:
    """How many layers the decoder has by Hugging Face names: those before the first with an MTP projection."""
    dictionary = Dictionary(0, stem)
    found = [dictionary.layer_of(name) for name in names]
    mtp = [layer for layer, below in found if layer is not None and below == "eh_proj.weight"]
    return min(mtp) if mtp else max((layer + 1 for layer, _ in found if layer is not None), default=0)
