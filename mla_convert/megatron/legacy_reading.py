"""Puts the ranks of an older-format Megatron checkpoint together: what each whole weight is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mla_convert.catalogue import SourceTensor
from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.torch_dist import TRACKER
from mla_convert.formats.torch_legacy import RankModel, TorchCheckpoint
from mla_convert.megatron.eras import IndexerRows, indexer_evidence
from mla_convert.megatron.layout import RankLayout
from mla_convert.megatron.names import Entry, place_of
from mla_convert.megatron.reading import MegatronSource, as_huggingface, inventory
from mla_convert.megatron.weights import MegatronWeights
from mla_convert.names import Sharding
from mla_convert.pieces import side_by_side
from mla_convert.plan import Copy, Replicas, whole
from mla_convert.tensors import TensorSpec, rows

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)", re.DOTALL)
_GROUPED = re.compile(r"(.+\.mlp\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)", re.DOTALL)
_SEQUENTIAL = re.compile(r"(.+\.mlp\.experts\.)local_experts\.(\d+)\.(.+)", re.DOTALL)
_INNER = re.compile(r"(mtp\.layers\.\d+\.)(mtp_model_layer|transformer_layer)\.(.+)", re.DOTALL)
_FUSED_DOWN = re.compile(r"(.+\.)self_attention\.linear_qkv_down_proj\.(weight|layer_norm_weight)", re.DOTALL)
_TRANSPOSED = re.compile(r".+\.mlp\.experts\.weight[12]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Held:
    """A slice of a weight: the rank it lies on, its key, and what it is there."""

    rank: RankModel
    key: str
    tensor: SourceTensor


def read_torch_source(found: TorchCheckpoint, indexer_from: IndexerRows | None = None) -> MegatronSource:
    """The inventory of a checkpoint in the older format.

    Args:
        found: The checkpoint.
        indexer_from: The order of its indexer's rows, where it does not tell.

    Raises:
        CannotError: A weight has no Hugging Face name, or is stored in a way this version does not read.
        BadInputError: Ranks are missing, or contradict each other.
    """
    _require_all(found)
    own = {other.name for other in found.others if other.name.startswith(f"{found.prefix}mp_rank_")} | {
        TRACKER
    }
    source = inventory(found.root, found.folder, found.files, found.others, own, found.warnings, found.origin)
    first = found.ranks[0]
    weights = MegatronWeights(source, arguments=found.arguments, common=first.rest)
    weights.left_behind = sum(rank.has_optimizer for rank in found.ranks)
    stored: dict[str, SourceTensor] = {}
    slices: dict[str, list[_Held]] = {}
    homes: dict[str, dict[tuple[int, int], None]] = {}
    offsets = _offsets(found.ranks)
    for rank in found.ranks:
        for number, chunk in enumerate(rank.chunks):
            experts = _expert_counts(chunk)
            for name, tensor in _unfused(chunk, found):
                key = f"{rank.label}:{number}:{name}"
                stored[key] = SourceTensor(
                    replace(tensor.spec, name=key), tensor.file, tensor.start, tensor.stop
                )
                full = _global_name(name, offsets[rank.pp, number], rank.ep, experts)
                slices.setdefault(full, []).append(_Held(rank, key, tensor))
                homes.setdefault(full, {})[rank.pp, number] = None
    weights.source = replace(source, tensors=stored)
    merger = _Merger(weights, {rank.tp for rank in found.ranks}, slices)
    for name in slices:
        merger.add(name)
    evidence = indexer_evidence(
        found.arguments,
        has_common_file=True,
        has_common_item=False,
        has_fused_query_norm=any(
            name.endswith("linear_q_up_proj.layer_norm_weight") for name in weights.specs
        ),
    )
    layout = RankLayout(
        tp=len({rank.tp for rank in found.ranks}),
        pp=len({rank.pp for rank in found.ranks}),
        ep=len({rank.ep for rank in found.ranks}),
        chunks=len(first.chunks),
        homes={name: tuple(places) for name, places in homes.items()},
        offsets=offsets,
        states=_states(found.ranks, offsets),
        inner=_inner_name(found.ranks),
        is_grouped=not any(_SEQUENTIAL.fullmatch(name) for chunk in first.chunks for name in chunk),
        cuts_down_projections=merger.cuts_down_projections,
        fuses_input_norms=any(
            name.endswith(".linear_qkv_down_proj.layer_norm_weight") for c in first.chunks for name in c
        ),
        folder=found.prefix.rstrip("/"),
    )
    return as_huggingface(weights, evidence, indexer_from, ranks=layout.tp, layout=layout)


def rank_facts(source: MegatronSource) -> dict[str, Any]:
    """What ``inspect`` says about a checkpoint in the older format besides."""
    weights, layout = source.weights, source.layout or RankLayout()
    iteration = weights.common.get("iteration")
    norms = {
        "fused" if name.endswith("layer_norm_weight") else "standalone"
        for name in weights.specs
        if _is_norm(name)
    }
    return {
        "iteration": iteration if type(iteration) is int else None,
        "folder": layout.folder or None,
        "common_state": "in every rank's file",
        "ranks": f"{layout.pp} pipeline ranks of {layout.chunks} stages, {layout.ep} expert ranks",
        "layers": "counted from each stage's first",
        "norms": " and ".join(sorted(norms)) or None,
        "indexer": {"rows": str(source.rows) if source.rows else None, "evidence": []}
        if any(".indexer." in name for name in weights.specs)
        else None,
        "optimizer": {"bytes": None, "states": [], "by_name": False} if weights.left_behind else None,
    }


def _is_norm(name: str) -> bool:
    return name.endswith((".kv_layernorm.weight", ".linear_kv_up_proj.layer_norm_weight"))


def _require_all(found: TorchCheckpoint) -> None:
    ranks = found.ranks
    sizes = [max(getattr(rank, axis) for rank in ranks) + 1 for axis in ("tp", "pp", "ep")]
    missing = [
        f"tensor rank {tp}, pipeline rank {pp}"
        for tp in range(sizes[0])
        for pp in range(sizes[1])
        if not any((rank.tp, rank.pp) == (tp, pp) for rank in ranks)
    ]
    missing += [f"expert rank {ep}" for ep in range(sizes[2]) if not any(rank.ep == ep for rank in ranks)]
    stated = [found.arguments.get(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline", "expert")]
    for axis, size, said in zip(("tensor", "pipeline", "expert"), sizes, stated, strict=True):
        if type(said) is int and said > size:
            missing.append(f"{axis} ranks {size} to {said - 1}")
    if missing:
        raise BadInputError(
            f"{found.folder}: {len(missing)} of the checkpoint's ranks are missing",
            hint="every rank holds a part of every layer; copy the missing ones here",
            details=missing,
        )


def _offsets(ranks: Sequence[RankModel]) -> dict[tuple[int, int], tuple[int, int]]:
    """For each pipeline rank and virtual stage: how many layers of the decoder and MTP layers come before it.

    Virtual stages go round all ranks before the next begins.
    """
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks):
            layers: dict[str, set[int]] = {"decoder": set(), "mtp": set()}
            for name in chunk:
                found = _LAYER.fullmatch(name)
                if found:
                    layers[found[1]].add(int(found[2]))
            counts.setdefault((rank.pp, number), (len(layers["decoder"]), len(layers["mtp"])))
    offsets, decoder, mtp = {}, 0, 0
    for place in sorted(counts, key=lambda place: (place[1], place[0])):
        offsets[place] = decoder, mtp
        decoder, mtp = decoder + counts[place][0], mtp + counts[place][1]
    return offsets


def _unfused(chunk: Mapping[str, SourceTensor], found: TorchCheckpoint) -> Iterator[tuple[str, SourceTensor]]:
    """A rank's tensors, with a fused down-projection (``mla_down_proj_fusion``) as the two that it is made of.

    Its rows are those of the query's latent, then those of the keys and values, or a rank's share of each. A norm that
    is fused with it is the layer's input norm. Megatron puts the two together again when it loads them.
    """
    ranks = len({rank.tp for rank in found.ranks})
    for name, tensor in chunk.items():
        fused = _FUSED_DOWN.fullmatch(name)
        if fused is None:
            yield name, tensor
            continue
        base = f"{fused[1]}self_attention."
        if fused[2] == "layer_norm_weight":
            yield f"{fused[1]}input_layernorm.weight", tensor
            continue
        ups = [chunk.get(f"{base}{up}.weight") for up in ("linear_q_up_proj", "linear_kv_up_proj")]
        rope = found.arguments.get("qk_pos_emb_head_dim")
        if ups[0] is None or ups[1] is None or type(rope) is not int:
            raise CannotError(f"{name}: nothing says how many of its rows belong to the query")
        query, total = ups[0].spec.shape[1], ups[0].spec.shape[1] + ups[1].spec.shape[1] + rope
        rows_here = tensor.spec.shape[0]
        if rows_here != total:
            query //= ranks
        if rows_here not in (total, total // ranks):
            raise BadInputError(f"{name} has {rows_here} rows; {total} over {ranks} ranks are needed")
        middle = tensor.start + query * tensor.spec.row_nbytes
        for leaf, count, start, stop in (
            ("linear_q_down_proj", query, tensor.start, middle),
            ("linear_kv_down_proj", rows_here - query, middle, tensor.stop),
        ):
            spec = TensorSpec(f"{base}{leaf}.weight", tensor.spec.dtype, (count, *tensor.spec.shape[1:]))
            yield spec.name, SourceTensor(spec, tensor.file, start, stop)


def _expert_counts(chunk: Mapping[str, SourceTensor]) -> dict[str, int]:
    """How many experts each module of experts has here."""
    counts: dict[str, int] = {}
    for name in chunk:
        found = _GROUPED.fullmatch(name) or _SEQUENTIAL.fullmatch(name)
        if found:
            number = int(found[4] if found.re is _GROUPED else found[2])
            counts[found[1]] = max(counts.get(found[1], 0), number + 1)
    return counts


def _global_name(name: str, offsets: tuple[int, int], ep: int, experts: Mapping[str, int]) -> str:
    """The weight that a rank's tensor is a slice of."""
    if _TRANSPOSED.fullmatch(name):
        raise CannotError(
            f"{name} holds all experts transposed, as Megatron's former grouped GEMM stored them",
            hint="load it in Megatron up to 0.14 and save it with --ckpt-format torch_dist",
        )
    grouped, sequential = _GROUPED.fullmatch(name), _SEQUENTIAL.fullmatch(name)
    if grouped:
        number = ep * experts[grouped[1]] + int(grouped[4])
        name = f"{grouped[1]}{number}.{grouped[2]}.{grouped[3]}"
    elif sequential:
        number = ep * experts[sequential[1]] + int(sequential[2])
        name = f"{sequential[1]}{number}.{sequential[3]}"
    inner = _INNER.fullmatch(name)
    if inner:
        name = f"{inner[1]}transformer_layer.{inner[3]}"
    layer = _LAYER.fullmatch(name)
    if layer:
        name = f"{layer[1]}.layers.{int(layer[2]) + offsets[layer[1] == 'mtp']}.{layer[3]}"
    return name


def _states(ranks: Sequence[RankModel], offsets: Mapping[tuple[int, int], tuple[int, int]]) -> frozenset[str]:
    """Modules with an extra state, by their full names; experts as number 0."""
    found = set()
    for rank in ranks:
        for number, (states, chunk) in enumerate(zip(rank.states, rank.chunks, strict=True)):
            for name in states:
                module = _global_name(name + ".", offsets[rank.pp, number], 0, _expert_counts(chunk))
                module = re.sub(r"\.mlp\.experts\.(?:\d+\.)?", ".mlp.experts.0.", module)
                found.add(module.rstrip("."))
    return frozenset(found)


def _inner_name(ranks: Sequence[RankModel]) -> str:
    names = (name for rank in ranks for chunk in rank.chunks for name in chunk)
    return next((found[2] for name in names if (found := _INNER.fullmatch(name))), "mtp_model_layer")


class _Merger:
    """Puts the slices of weights together."""

    def __init__(self, weights: MegatronWeights, tps: set[int], slices: Mapping[str, list[_Held]]) -> None:
        self.weights, self.tps, self.slices = weights, sorted(tps), slices
        self.cuts_down_projections = False

    def add(self, name: str) -> None:
        """Merge one weight.

        Raises:
            BadInputError: It is missing on a rank, or its slices do not fit together.
            CannotError: No rule says how it is cut.
        """
        by_rank: dict[int, list[_Held]] = {}
        for held in self.slices[name]:
            by_rank.setdefault(held.rank.tp, []).append(held)
        for copies in by_rank.values():
            self._require_same(name, copies)
        firsts = [by_rank[tp][0] for tp in sorted(by_rank)]
        place = place_of(name)
        is_expert = place is not None and place.expert is not None
        if len(firsts) < len(self.tps) and not (is_expert and len(firsts) == 1):
            missing = [str(tp) for tp in self.tps if tp not in by_rank]
            raise BadInputError(f"{name} is missing on tensor rank {', '.join(missing)} of {len(self.tps)}")
        if len(firsts) == 1:
            self._set(name, firsts[0].tensor.spec, (self._whole(firsts[0]),))
        elif place is None:
            raise CannotError(
                f"{name} lies on {len(firsts)} tensor ranks, and no rule says how it is cut",
                hint="known are the parts of DeepSeek-V2/V3, Kimi and GLM-5",
            )
        elif self._is_whole(name, place.entry, firsts, is_expert):
            self._require_same(name, firsts)
            self._set(name, firsts[0].tensor.spec, (self._whole(firsts[0]),))
        else:
            self._join(name, place.entry, firsts)

    def _is_whole(self, name: str, entry: Entry, held: Sequence[_Held], is_expert: bool) -> bool:
        """True if every rank has all of a weight."""
        if entry.sharding is Sharding.REPLICATED:
            return True
        spec = held[0].tensor.spec
        if entry.sharding is Sharding.UNKNOWN:
            full = self._down_rows(name)
            if full is None:
                raise CannotError(f"{name}: nothing says how many rows it has, so nothing says how it is cut")
            whole_rows = spec.shape[0] == full
            if not whole_rows and spec.shape[0] * len(held) != full:
                raise BadInputError(
                    f"{name} has {spec.shape[0]} rows on {len(held)} ranks; {full} are needed"
                )
            self.cuts_down_projections |= not whole_rows
            return whole_rows
        if is_expert:
            width = self.weights.arguments.get("moe_ffn_hidden_size")
            along = 1 if entry.sharding is Sharding.ROW else 0
            return type(width) is int and spec.shape[along] == width * len(entry.huggingface)
        return False

    def _down_rows(self, name: str) -> int | None:
        """Rows of a down-projection: the width that the projection behind it takes, and the rotary channels."""
        base, _, leaf = name.removesuffix(".weight").rpartition(".")
        ups = (
            ("linear_q_up_proj",)
            if leaf == "linear_q_down_proj"
            else ("linear_kv_up_proj", "linear_k_up_proj")
        )
        found = [self.slices[up][0].tensor.spec for m in ups if (up := f"{base}.{m}.weight") in self.slices]
        rank = found[0].shape[1] if found else None
        if leaf == "linear_q_down_proj" or rank is None:
            return rank
        rope = self.weights.arguments.get("qk_pos_emb_head_dim")
        if type(rope) is int:
            return rank + rope
        held = self.slices[name][0].tensor.spec.shape[0]
        return held if held > rank else held * len(self.tps)

    def _join(self, name: str, entry: Entry, held: Sequence[_Held]) -> None:
        along = 1 if entry.sharding in (Sharding.ROW, Sharding.HEADS_IN) else 0
        specs = [one.tensor.spec for one in held]
        rest = {(s.dtype, len(s.shape), s.shape[:along], s.shape[along + 1 :]) for s in specs}
        parts = len(entry.huggingface)
        if len(rest) > 1 or len(specs[0].shape) <= along or any(spec.shape[along] % parts for spec in specs):
            raise BadInputError(
                f"the ranks hold {name} in shapes that do not fit together",
                hint="the ranks are of different checkpoints",
                details=[
                    f"rank {h.rank.label}: {s.dtype} {list(s.shape)}"
                    for h, s in zip(held, specs, strict=True)
                ],
            )
        shape = list(specs[0].shape)
        shape[along] = sum(spec.shape[along] for spec in specs)
        pieces: Iterator[Copy] | tuple[Copy, ...]
        if parts > 1:
            pieces = _interleaved([(h.key, s) for h, s in zip(held, specs, strict=True)], parts)
        else:
            pieces = side_by_side([(h.key, s) for h, s in zip(held, specs, strict=True)], along)
        self._set(name, replace(specs[0], shape=tuple(shape)), tuple(pieces))

    def _set(self, name: str, spec: TensorSpec, pieces: tuple[Copy, ...]) -> None:
        self.weights.specs[name] = replace(spec, name=name)
        self.weights.made_of[name] = pieces

    def _whole(self, held: _Held) -> Copy:
        return replace(whole(held.tensor.spec), source=held.key)

    def _require_same(self, name: str, held: Sequence[_Held]) -> None:
        """Copies of one tensor on several ranks: their bytes are compared before anything is written."""
        if len(held) < 2:
            return
        if len({(one.tensor.spec.dtype, one.tensor.spec.shape) for one in held}) > 1:
            raise BadInputError(
                f"the ranks hold {name} in different shapes, though each should have all of it",
                hint="the ranks are of different checkpoints",
                details=[f"rank {one.rank.label}: {list(one.tensor.spec.shape)}" for one in held],
            )
        self.weights.replicas.append(Replicas(name, tuple(one.key for one in held)))


def _interleaved(held: Sequence[tuple[str, TensorSpec]], parts: int) -> Iterator[Copy]:
    """Each rank has its slice of every part, one below the other; the whole has all of each part together."""
    at = 0
    for part in range(parts):
        for key, spec in held:
            count = spec.shape[0] // parts
            box = rows(spec, part * count, (part + 1) * count)
            yield Copy(key, box, (at, *(0,) * (len(spec.shape) - 1)))
            at += count
