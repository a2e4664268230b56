"""How the ranks of an older-format Megatron checkpoint are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Which rank holds what, besides the slices that tensor parallelism cuts.

    Attributes:
        tp, pp, ep: Tensor, pipeline and expert ranks.
        chunks: Virtual pipeline stages on each rank.
        homes: The (pipeline rank, virtual stage) of each weight; the first of all where a weight is not listed.
        offsets: For each of those, the layers of the decoder and the MTP layers that come before it.
        states: Modules with an extra state, by full name, experts as number 0; None where the layer spec tells.
        inner: What the module calls the transformer layer inside an MTP layer.
        is_grouped: Experts are one grouped layer, not a list of modules.
        cuts_down_projections: Down-projections are cut by rows, not whole on every rank.
        fuses_input_norms: Input norms are fields of fused down-projections.
        folder: The iteration's folder.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    chunks: int = 1
    homes: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    offsets: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    states: frozenset[str] | None = None
    inner: str = "mtp_model_layer"
    is_grouped: bool = True
    cuts_down_projections: bool = False
    fuses_input_norms: bool = False
    folder: str = "release"
