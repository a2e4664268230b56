"""A Megatron checkpoint seen as a Hugging Face one: the input of ``reshard``, ``diff`` and ``inspect``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mla_convert.catalogue import Catalogue, JsonFile, OtherFile, SourceTensor
from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.huggingface import CONFIG_NAMES, read_config
from mla_convert.formats.huggingface_edit import MARK
from mla_convert.formats.torch_dist import BACKEND, COMMON, INTEGRITY, METADATA, TRACKER, TorchDist
from mla_convert.geometry import text_config
from mla_convert.megatron.arguments import indexer_is_interleaved, to_config
from mla_convert.megatron.eras import Evidence, IndexerRows, indexer_evidence, indexer_rows
from mla_convert.megatron.layout import RankLayout
from mla_convert.megatron.names import Dictionary, place_of
from mla_convert.megatron.translation import IndexerChange, to_huggingface
from mla_convert.megatron.weights import MegatronWeights, read_dist_weights
from mla_convert.merging import ShardingMark
from mla_convert.tensors import TensorSpec

#: Files of a checkpoint that mean nothing in another format.
_OWN_FILES = frozenset({METADATA, BACKEND, COMMON, INTEGRITY, TRACKER})
_EMBEDDING = "embedding.word_embeddings.weight"
_FUSED_QUERY_NORM = "linear_q_up_proj.layer_norm_weight"


@dataclass(frozen=True, slots=True)
class MegatronMark:
    """What ``config.json`` beside a Megatron checkpoint notes, so that the Hugging Face names come back as they were.

    Attributes:
        stem: What stood before ``layers.`` in the names of the original.
        shared: Copies of the embedding and the head that its MTP layers held.
        vocabulary: Rows of the embedding before padding; None if none were added.
    """

    stem: str = "model."
    shared: tuple[str, ...] = ()
    vocabulary: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in ``config.json``."""
        return {"stem": self.stem, "shared": list(self.shared), "vocabulary": self.vocabulary}

    @classmethod
    def read(cls, config: JsonFile | None) -> MegatronMark | None:
        """Out of ``config.json``; None if it notes nothing.

        Raises:
            BadInputError: The note is damaged.
        """
        mark = config.value.get(MARK) if config else None
        found = mark.get("megatron") if isinstance(mark, dict) else None
        if config is None or found is None:
            return None
        stem, shared, rows = (
            found.get(n) if isinstance(found, dict) else None for n in ("stem", "shared", "vocabulary")
        )
        are_names = isinstance(shared, list) and all(isinstance(name, str) for name in shared)
        if (
            not isinstance(stem, str)
            or not are_names
            or not (rows is None or (type(rows) is int and rows > 0))
        ):
            raise BadInputError(
                f"{config.name}: {MARK}.megatron is damaged", hint="convert the original again"
            )
        return cls(stem, tuple(shared or ()), rows)


@dataclass(frozen=True, slots=True)
class MegatronSource:
    """A Megatron checkpoint and what it is in Hugging Face's terms.

    Attributes:
        weights: Its weights by Megatron's names.
        logical: The same by Hugging Face's, with the configuration; without a place in a file.
        made_of: For each of those, the pieces of stored tensors it is made of.
        mark: What the names of the original were like.
        ranks: Over how many tensor-parallel ranks its files lie; 1 for torch_dist, whose files know no ranks.
        unresolved: Why the indexer's rows could not be brought in Hugging Face's order; None if they are.
        layout: How its ranks are laid out, in the older format.
        rows: The order of its indexer's rows, if it has one and tells.
        indexer_change: How those come into Hugging Face's order; None if they are in it, or nothing tells.
        folder: The iteration's folder below the save folder; empty if the iteration itself was given.
    """

    weights: MegatronWeights
    logical: Catalogue
    made_of: Mapping[str, tuple[Any, ...]]
    mark: ShardingMark
    ranks: int = 1
    unresolved: CannotError | None = None
    layout: RankLayout | None = None
    rows: IndexerRows | None = None
    indexer_change: IndexerChange | None = None
    folder: str = ""


def read_dist_source(dist: TorchDist, indexer_from: IndexerRows | None = None) -> MegatronSource:
    """The inventory of a torch_dist checkpoint.

    Args:
        dist: The checkpoint.
        indexer_from: The order of its indexer's rows, where it does not tell.

    Raises:
        CannotError: A weight has no Hugging Face name.
        BadInputError: It is damaged or contradicts itself.
    """
    own = {f"{dist.prefix}{name}" for name in _OWN_FILES} | {TRACKER}
    source = inventory(dist.root, dist.folder, dist.files, dist.others, own, dist.warnings, dist.origin)
    weights = read_dist_weights(dist, source)
    evidence = indexer_evidence(
        dist.arguments,
        has_common_file=dist.has_common_file,
        has_common_item=bool(dist.common) and not dist.has_common_file,
        has_fused_query_norm=any(name.endswith(_FUSED_QUERY_NORM) for name in weights.specs),
    )
    return replace(as_huggingface(weights, evidence, indexer_from), folder=dist.prefix.rstrip("/"))


def inventory(
    root: Path,
    folder: Path,
    files: Mapping[str, Any],
    others: Iterable[OtherFile],
    own: set[str],
    warnings: tuple[str, ...],
    origin: str | None,
) -> Catalogue:
    """The files of a checkpoint as a catalogue that has no tensors yet.

    Args:
        root: The folder their names are relative to.
        folder: The iteration's folder.
        files: Files with weights.
        others: All other files.
        own: Those that mean nothing in another format.
        warnings: What there is to say.
        origin: What it is on the Hub, if it comes from there.
    """
    config = read_config(root) or (read_config(folder) if folder != root else None)
    kept = tuple(
        other
        for other in others
        if other.name not in own and other.name.rpartition("/")[2] not in CONFIG_NAMES
    )
    if config and config.name and not (root / config.name).exists():
        config = replace(config, name=f"{folder.relative_to(root).as_posix()}/{config.name}")
    return Catalogue(
        root=root,
        single_file=False,
        files=files,
        tensors={},
        config=config,
        index=None,
        others=kept,
        warnings=warnings,
        origin=origin,
    )


def as_huggingface(
    weights: MegatronWeights,
    evidence: list[Evidence],
    indexer_from: IndexerRows | None,
    *,
    ranks: int = 1,
    layout: RankLayout | None = None,
) -> MegatronSource:
    """Megatron's weights in Hugging Face's terms.

    Args:
        weights: The weights, whole.
        evidence: What tells the order of the indexer's rows.
        indexer_from: That order, where nothing tells.
        ranks: Over how many ranks they lie.
        layout: How those are laid out.
    """
    source = weights.source
    noted = MegatronMark.read(source.config)
    places = [place for name in weights.specs if (place := place_of(name))]
    layers = max((p.layer + 1 for p in places if p.layer is not None and not p.is_mtp), default=0)
    has_indexer = any(".core_attention.indexer." in name for name in weights.specs)
    rows = weights.specs[_EMBEDDING].shape[0] if _EMBEDDING in weights.specs else 0
    config = source.config.value if source.config else {}
    warnings = list(source.warnings)
    if not source.config:
        config = to_config(weights.arguments, has_indexer=has_indexer, vocabulary=rows)
        warnings.append(
            "there is no config.json: one is made up from Megatron's arguments; the model's own, put beside the "
            "checkpoint, would be used as it is"
            if config
            else "there is no config.json, and no arguments that one could be made up from"
        )
    vocabulary = noted.vocabulary if noted and noted.vocabulary else _vocabulary(config, weights.arguments)
    if vocabulary and rows > vocabulary and not (noted and noted.vocabulary):
        warnings.append(
            f"the vocabulary has {rows} rows, {rows - vocabulary} of them padding, which is left out"
        )
    if weights.left_behind:
        warnings.append(
            f"{weights.left_behind} tensors of the optimizer's state are no weights and stay behind"
        )
    change, unresolved, rows_now = None, None, None
    if has_indexer:
        try:
            rows_now = indexer_rows(evidence, indexer_from)
            change = _indexer_change(config, weights.specs, rows_now)
        except CannotError as error:
            unresolved = error
    dictionary = Dictionary(layers, noted.stem if noted else "model.")
    found = to_huggingface(
        weights.specs,
        weights.made_of,
        dictionary,
        indexer=change,
        vocabulary=vocabulary,
        shared=noted.shared if noted else (),
    )
    tensors = {name: SourceTensor(spec, "", 0, spec.nbytes) for name, spec in found.specs.items()}
    logical = replace(
        source,
        tensors=tensors,
        config=source.config or (JsonFile("config.json", b"", config) if config else None),
        warnings=tuple(warnings),
    )
    weights.source = replace(source, warnings=tuple(warnings))
    weights.replicas = [
        replace(one, name=names[0]) if (names := dictionary.to_huggingface(one.name)) else one
        for one in weights.replicas
    ]
    return MegatronSource(
        weights,
        logical,
        found.made_of,
        ShardingMark(stem=dictionary.stem),
        ranks,
        unresolved,
        layout,
        rows_now,
        change,
    )


def _vocabulary(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> int | None:
    for value in (text_config(config).get("vocab_size"), arguments.get("vocab_size")):
        if type(value) is int and value > 0:
            return value
    return None


def _indexer_change(
    config: Mapping[str, Any], specs: Mapping[str, TensorSpec], before: IndexerRows
) -> IndexerChange | None:
    """How the indexer's rows come into the order that the configuration stands for; None if they are in it."""
    is_interleaved = indexer_is_interleaved(config)
    after = IndexerRows.ROPE_FIRST_INTERLEAVED if is_interleaved else IndexerRows.ROPE_FIRST
    if before is after:
        return None
    rope = text_config(config).get("qk_rope_head_dim", _rotary_rows(specs))
    if type(rope) is not int:
        raise CannotError(
            "the indexer's rows are in another order than Hugging Face's, and nothing says how many of them are rotary",
            hint="put the model's config.json beside the checkpoint",
        )
    return IndexerChange(before, after, rope)


def _rotary_rows(specs: Mapping[str, TensorSpec]) -> int | None:
    """Rows of a down-projection of keys and values that are no latent: what the projection behind it does not take."""
    for name, spec in specs.items():
        if name.endswith(".linear_kv_down_proj.weight"):
            base = name.removesuffix("linear_kv_down_proj.weight")
            for up in ("linear_kv_up_proj", "linear_k_up_proj"):
                if f"{base}{up}.weight" in specs:
                    return spec.shape[0] - specs[f"{base}{up}.weight"].shape[1]
    return None
