"""``verify``: proves a conversion by structure, by bytes and by running it.

The levels are those of docs/architecture.md. Weights are read by the official safetensors library, rows are found
by reshaping in torch, and the truth is float64 with the original's combined weights and configuration. Nothing
falls back in silence: the report names the backend that ran for each part.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mla_convert import __version__, storage
from mla_convert.catalogue import Catalogue, JsonFile
from mla_convert.errors import BadInputError, CannotError, LocalIOError, MlaConvertError, UsageError
from mla_convert.geometry import AttentionBlock, find_blocks, layer_config
from mla_convert.hub_source import HubId, cached_snapshot, downloaded, hub_id
from mla_convert.manifest import Manifest, read_manifest
from mla_convert.progress import Progress, SilentProgress
from mla_convert.strict_json import dump_json
from mla_convert.tensors import TensorSpec
from mla_convert.verification import numbers, rows, structure
from mla_convert.verification.numbers import NumbersSettings
from mla_convert.verification.processes import RealRanks
from mla_convert.verification.readers import reader_of
from mla_convert.verification.result import Check, VerifyReport
from mla_convert.verification.settings import (
    Pair,
    VerifyOptions,
    choose_blocks,
    describe_settings,
    largest_topk,
    make_settings,
)
from mla_convert.verification.sharded import ShardedReader, check_ranks, is_sharded, load
from mla_convert.verification.weights import LoadedBlock, TensorReader, block_spec, load_block
from mla_convert.whole import Whole, open_whole

__all__ = ["ControlFailedError", "VerifyOptions", "verify"]


class ControlFailedError(MlaConvertError):
    """The negative control was not caught: the check itself is broken, and nothing was proved."""


def verify(
    path: str | Path,
    against: str | Path | None = None,
    options: VerifyOptions | None = None,
    progress: Progress | None = None,
    ranks: RealRanks | None = None,
) -> VerifyReport:
    """Verify a checkpoint, against its original where there is one.

    Args:
        path: The checkpoint, combined or split, whole or on ranks; ``hf://org/name[@revision]`` is downloaded into
            the Hub's cache.
        against: The original, named likewise. If None, the manifest's source is used if it is still there and
            unchanged; nothing is downloaded for that.
        options: What to check and how.
        progress: Who is told about progress.
        ranks: The processes that run the ranks, seen from rank 0 (``processes.real_ranks``); None folds all ranks
            into this process.

    Returns:
        The report; ``report.passed`` says whether it holds.

    Raises:
        CannotError: It is no MLA checkpoint, or ``tp``, ``cp`` or ``backend`` cannot be.
        BadInputError: The checkpoint cannot be read, and there is nothing to compare it with.
        ControlFailedError: The check failed to notice a planted corruption.
        RankError: A rank failed, or the ranks lost each other.
    """
    started = time.monotonic()
    options, progress = options or VerifyOptions(), progress or SilentProgress()
    asked = [source if source is None else hub_id(source) or Path(source) for source in (path, against)]
    names: dict[Path, str] = {}
    folders: list[Path | None] = []
    for source in asked:
        if isinstance(source, HubId):
            checkpoint = downloaded(source, progress)
            names[checkpoint.root] = checkpoint.origin
            source = checkpoint.root
        folders.append(source)
    if isinstance(asked[0], HubId):
        options = replace(options, record=False)  # that manifest is the cache's, which must stay as it is
    report = _Verification(folders[0] or Path(path), folders[1], options, progress, names, ranks).execute()
    report.seconds = time.monotonic() - started
    return report


@dataclass(frozen=True, slots=True)
class _Side:
    """A checkpoint that could be opened, and its blocks by prefix. ``whole`` has its ranks, if it lies on ranks."""

    catalogue: Catalogue
    blocks: dict[str, AttentionBlock]
    whole: Whole

    def reader(self) -> TensorReader:
        """Reads its tensors, whole."""
        return reader_of(self.whole)


def _specs_of(side: _Side) -> dict[str, TensorSpec]:
    """Every tensor's spec by name."""
    return {name: tensor.spec for name, tensor in side.catalogue.tensors.items()}


class _Verification:
    def __init__(
        self,
        path: Path,
        against: Path | None,
        options: VerifyOptions,
        progress: Progress,
        names: Mapping[Path, str],
        ranks: RealRanks | None,
    ) -> None:
        self.ranks = ranks
        self.path, self.against, self.options, self.progress = path, against, options, progress
        self.names = dict(names)  # what to call folders in the Hub's cache
        self.manifest: Manifest | None = None
        self.report = VerifyReport(names.get(path, str(path)), None, "", {})

    def execute(self) -> VerifyReport:
        """Every level in turn; a checkpoint that cannot even be opened fails the first one."""
        report = self.report
        original = self._original()
        if self.against is not None and self.path.exists() and self.path.samefile(self.against):
            raise UsageError(f"--against names the checkpoint itself: {self.against}")
        ours = self._open_ours(comparing=original is not None or self.manifest is not None)
        if ours is None:
            return report
        self._as_it_lies(ours.whole)
        baseline = original or self._self_baseline(ours)
        chosen = choose_blocks(self.options, ours.catalogue, ours.blocks, baseline.blocks)
        settings = self._settings(ours, [block for block, _ in chosen])  # refuses a request before any work
        self._structure(ours, original)
        if any(check.passed is False and check.name == "tensors" for check in report.checks):
            report.checks.append(Check("numbers", "attention", None, "not run: the structure is wrong"))
            return report
        self._bytes(ours, original)
        self._numbers(ours, original, baseline.catalogue, chosen, settings)
        if self.options.record and self.manifest:
            self._record()
        return report

    # What to compare with

    def _original(self) -> _Side | None:
        folder = self.path if self.path.is_dir() else self.path.parent
        self.manifest = read_manifest(folder) if folder.is_dir() else None
        where = self.against
        if where is not None:
            self.report.against_note = "as asked"
        elif self.manifest is not None:
            where, self.report.against_note = self._recorded_source(self.manifest)
        else:
            self.report.against_note = "no original: the checkpoint is compared with itself"
        if where is None:
            return None
        self.report.against = self.names.get(where, str(where))
        return self._side(where)

    def _recorded_source(self, manifest: Manifest) -> tuple[Path | None, str]:
        """Where the manifest says the original is, if it still is there; and a note on it."""
        origin = manifest.source_origin
        cached = cached_snapshot(origin) if origin else None
        found = manifest.source_folder(at=cached) if cached or not origin else None
        if found is not None:
            self.names |= {found: origin} if origin else {}
            where = (
                "the manifest's source, in the Hub's cache" if origin else "the manifest's source, unchanged"
            )
            return found, where
        if origin is not None:
            how = f"--against {origin} downloads it and compares with it"
            return None, f"the original is not here: compared with the manifest; {how}"
        return None, "the original is not there: compared with the manifest"

    def _side(self, path: Path) -> _Side:
        whole = open_whole(path)
        blocks = find_blocks(whole.logical, trust_shapes=self.options.trust_shapes)
        return _Side(whole.logical, {block.prefix: block for block in blocks}, whole)

    def _open_ours(self, *, comparing: bool) -> _Side | None:
        try:
            return self._side(self.path)
        except (BadInputError, CannotError) as error:
            if not comparing:
                raise
            self.report.checks.append(Check("structure", "checkpoint", False, error.message, error.details))
            return None

    def _as_it_lies(self, whole: Whole) -> None:
        """A checkpoint that lies on ranks is run on as many, each with its own files.

        Raises:
            CannotError: Another number was asked for.
        """
        asked = self.options.tp if self.ranks is None else self.ranks.grid.tp
        if not is_sharded(whole) or asked == whole.ranks:
            return
        if asked != 1 or self.ranks is not None:
            raise CannotError(
                f"--tp {asked}: {self.path} lies on {whole.ranks} ranks, and is verified as it lies",
                hint=f"--tp {whole.ranks}, or make another of it with `mla-convert reshard --tp {asked}`",
            )
        self.options = replace(self.options, tp=whole.ranks)

    # Levels

    def _structure(self, ours: _Side, original: _Side | None) -> None:

        add = self.report.checks.append
        add(structure.check_index(ours.catalogue))
        if not ours.whole.format.is_megatron:  # its keys say it, and nothing else could
            add(structure.check_layout_mark(ours.catalogue, ours.blocks.values()))
        if self.manifest is not None and self.manifest.path.parent.samefile(ours.catalogue.root):
            add(structure.check_files(ours.catalogue, self.manifest))
        config = ours.catalogue.config
        if original is not None:
            specs = structure.without_scales(_specs_of(original), self._dequantised(ours, original))
            add(structure.check_inventory(ours.catalogue, ours.blocks.values(), specs, "the original"))
            theirs = original.catalogue.config
            add(
                structure.check_config(
                    config.value if config else None,
                    theirs.value if theirs else None,
                    "the original",
                    dequantised=structure.lost_all_scales(ours.catalogue.tensors, original.catalogue.tensors),
                )
            )
        elif self.manifest is not None and self._knows_original(ours):
            specs = structure.expected_specs(self.manifest, ours.catalogue)
            add(structure.check_inventory(ours.catalogue, ours.blocks.values(), specs, "the manifest"))
            if config:
                before = structure.original_config(self.manifest, config.name)
                lost = structure.lost_all_scales(ours.catalogue.tensors, specs)
                add(structure.check_config(config.value, before, "the manifest", dequantised=lost))

    def _knows_original(self, ours: _Side) -> bool:
        """The manifest has the original's headers and configuration, as it has where those are Hugging Face's."""
        is_edited = self.manifest is not None and self.manifest.operation != "reshard"
        return is_edited and not ours.whole.format.is_megatron

    def _dequantised(self, ours: _Side, original: _Side) -> set[str]:
        """The weights that ``reshard --dequantize`` made BF16, if that is what made this checkpoint."""
        made = self.manifest.value if self.manifest else {}
        if made.get("operation") != "reshard" or made.get("options", {}).get("dequantize") is None:
            return set()
        return structure.dequantised_weights(ours.catalogue, _specs_of(original))

    def _bytes(self, ours: _Side, original: _Side | None) -> None:

        add = self.report.checks.append
        reader = ours.reader()
        if isinstance(reader, ShardedReader) and (is_sharded(ours.whole) or ours.whole.replicas):
            add(check_ranks(reader))
        if original is not None:
            theirs = original.reader()
            add(rows.check_rows(reader, theirs, ours.blocks, original.blocks))
            if self.options.carried:
                add(rows.check_carried(reader, theirs, self.progress, self._dequantised(ours, original)))
            else:
                add(Check("bytes", "carried tensors", None, "not compared (--skip-carried)"))
        elif self.manifest is not None and self.manifest.operation == "split":
            add(rows.check_hashes(reader, ours.blocks, self.manifest))

    def _numbers(
        self,
        ours: _Side,
        original: _Side | None,
        baseline: Catalogue,
        chosen: Sequence[Pair],
        settings: NumbersSettings,
    ) -> None:

        reader = ours.reader()
        theirs = original.reader() if original else reader
        self.progress.start("run attention", len(chosen), "items")
        try:
            self._run_blocks(chosen, settings, (reader, theirs), baseline)
        finally:
            self.progress.finish()
        self.report.ran |= _by_operation(settings.ranks.ran())

    def _run_blocks(
        self,
        chosen: Sequence[Pair],
        settings: NumbersSettings,
        readers: tuple[TensorReader, TensorReader],
        baseline: Catalogue,
    ) -> None:

        device = settings.devices[0]
        shared: torch.Tensor | None = None
        for number, (block, theirs) in enumerate(chosen):
            try:
                converted = load(readers[0], block, block_spec(readers[0].catalogue, block), device)
                original = load_block(readers[1], theirs, block_spec(baseline, theirs), device)
                settings.ranks.load(converted)
            except BadInputError as error:
                self.report.checks.append(Check("numbers", block.prefix, False, error.message))
                continue
            topk = layer_config(baseline.config.value if baseline.config else None, theirs.layer).get(
                "index_topk"
            )
            inherited = shared if topk is not None and original.spec.indexer is None else None
            result, used = numbers.check_layer(original, converted, settings, inherited)
            shared = used if used is not None else shared
            self.report.layers.append(result)
            if number == 0:
                self._extra_checks(original, converted, settings, inherited)
            self.progress.advance(1)

    def _extra_checks(
        self,
        original: LoadedBlock,
        converted: LoadedBlock,
        settings: NumbersSettings,
        indices: torch.Tensor | None,
    ) -> None:

        if original.spec.indexer is not None:
            self.report.checks.append(numbers.check_sparse_equals_dense(converted, settings))
        if self.options.control and self.report.layers[-1].passed:
            control = numbers.check_control(original, converted, settings, indices)
            if control.passed is False:
                raise ControlFailedError(
                    f"the check itself is broken: {control.summary}",
                    hint="nothing was proved; please report this with the command line",
                )
            self.report.checks.append(control)

    def _self_baseline(self, ours: _Side) -> _Side:
        """Without an original: the checkpoint's own weights, with the configuration from before the conversion."""

        config = ours.catalogue.config
        before = structure.original_config(self.manifest, config.name) if self.manifest and config else None
        if before is None or config is None:
            return ours
        return replace(ours, catalogue=replace(ours.catalogue, config=JsonFile(config.name, b"", before)))

    def _settings(self, ours: _Side, blocks: Sequence[AttentionBlock]) -> NumbersSettings:
        settings = make_settings(self.options, ours.catalogue, blocks, self.ranks)
        total = len(ours.blocks)
        self.report.settings = describe_settings(settings, ours.catalogue, blocks, total, self.ranks)
        topk = largest_topk(ours.catalogue, blocks)
        if topk and settings.tokens <= topk:
            summary = f"{settings.tokens} tokens do not exceed top-k {topk}: all are selected"
            self.report.checks.append(Check("sparse", "selection", None, summary))
        return settings

    # Afterwards

    def _record(self) -> None:
        """Put the outcome into the manifest, which is ours: nothing else in the folder is touched."""
        manifest, report = self.manifest, self.report
        if manifest is None:
            return
        record = {
            "passed": report.passed,
            "version": __version__,
            "against": report.against_note,
            "settings": {key: value for key, value in report.settings.items() if key != "tolerances"},
            "ran": dict(sorted(report.ran.items())),
            "checks": [[c.level, c.name, c.passed, c.summary] for c in report.checks],
            "worst": _worst(report),
        }
        try:
            storage.write_file_atomic(manifest.path, dump_json({**manifest.value, "verification": record}))
            report.recorded = True
        except LocalIOError as error:
            report.checks.append(Check("record", "manifest", None, f"not recorded: {error.message}"))


def _by_operation(ran: Mapping[str, int]) -> dict[str, str]:
    """Operation -> what ran it, e.g. ``sparse_mla`` -> ``tilelang``, with the reason where a kernel could not."""
    served: dict[str, list[str]] = {}
    for entry in sorted(ran):
        operation, _, by = entry.partition(": ")
        served.setdefault(operation, []).append(by)
    return {operation: "; ".join(by) for operation, by in served.items()}


def _worst(report: VerifyReport) -> dict[str, Any] | None:
    if not report.layers:
        return None
    worst = max(report.layers, key=lambda layer: layer.absorbed.relative)
    return {
        "prefix": worst.prefix,
        "cosine": min(layer.cosine for layer in report.layers),
        "absorbed": worst.absorbed.relative,
        "standard": worst.standard.relative,
    }
