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
from typing import TYPE_CHECKING, Any, Literal

from mla_convert import __version__, storage
from mla_convert.catalogue import Catalogue, JsonFile
from mla_convert.errors import BadInputError, CannotError, LocalIOError, MlaConvertError, UsageError
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.geometry import AttentionBlock, find_blocks, layer_config
from mla_convert.inspection import group_blocks, tensor_parallel_sizes
from mla_convert.manifest import Manifest, read_manifest
from mla_convert.progress import Progress, SilentProgress
from mla_convert.strict_json import dump_json
from mla_convert.verification.result import Check, VerifyReport

if TYPE_CHECKING:
    import torch

    from mla_convert.verification.numbers import NumbersSettings
    from mla_convert.verification.weights import LoadedBlock, TensorReader

BackendName = Literal["auto", "reference", "tilelang"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32", "float64"]
#: On a CPU, every layer is run if all of them together stay below this many weights; else a few of each kind.
_ALL_LAYERS_WEIGHTS = 50_000_000
#: On a CPU, this many queries are checked at most when nothing else is asked for.
_CPU_ROWS = 256


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to verify and how.

    Attributes:
        tp: Tensor-parallel ranks, folded on the devices there are.
        layers: Layer numbers to run; None chooses (all on a GPU or if the model is small).
        tokens: Sequence length; None chooses (past the top-k of a sparse model).
        dtype: Compute dtype; auto is bfloat16 on a GPU, float32 on a CPU.
        backend: What runs the absorbed path; an explicit one that cannot run is an error.
        device: ``cpu``, ``cuda`` or None for the GPU if there is one.
        carried: Compare the bytes of carried tensors too.
        control: Run the negative control.
        record: Write the outcome into the manifest beside the weights.
        trust_shapes: Let tensor shapes win over config.json.
        seed: Seed of the hidden states.
    """

    tp: int = 1
    layers: tuple[int, ...] | None = None
    tokens: int | None = None
    dtype: DtypeName = "auto"
    backend: BackendName = "auto"
    device: str | None = None
    carried: bool = True
    control: bool = True
    record: bool = True
    trust_shapes: bool = False
    seed: int = 0


class ControlFailedError(MlaConvertError):
    """The negative control was not caught: the check itself is broken, and nothing was proved."""


def verify(
    path: Path,
    against: Path | None = None,
    options: VerifyOptions | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a checkpoint, against its original where there is one.

    Args:
        path: The checkpoint, combined or split.
        against: The original. If None, the manifest's source is used if it is still there and unchanged.
        options: What to check and how.
        progress: Who is told about progress.

    Returns:
        The report; ``report.passed`` says whether it holds.

    Raises:
        CannotError: It is no MLA checkpoint, or ``tp`` or ``backend`` cannot be.
        BadInputError: The checkpoint cannot be read, and there is nothing to compare it with.
        ControlFailedError: The check failed to notice a planted corruption.
    """
    started = time.monotonic()
    run = _Verification(path, against, options or VerifyOptions(), progress or SilentProgress())
    report = run.execute()
    report.seconds = time.monotonic() - started
    return report


@dataclass(frozen=True, slots=True)
class _Side:
    """A checkpoint that could be opened, and its blocks by prefix."""

    catalogue: Catalogue
    blocks: dict[str, AttentionBlock]


#: A block of the checkpoint under test and the original's block of the same prefix.
_Pair = tuple[AttentionBlock, AttentionBlock]


class _Verification:
    def __init__(self, path: Path, against: Path | None, options: VerifyOptions, progress: Progress) -> None:
        self.path, self.against, self.options, self.progress = path, against, options, progress
        self.manifest: Manifest | None = None
        self.report = VerifyReport(str(path), None, "", {})

    def execute(self) -> VerifyReport:
        """Every level in turn; a checkpoint that cannot even be opened fails the first one."""
        report = self.report
        original = self._original()
        if self.against is not None and self.path.exists() and self.path.samefile(self.against):
            raise UsageError(f"--against names the checkpoint itself: {self.against}")
        ours = self._open_ours(comparing=original is not None or self.manifest is not None)
        if ours is None:
            return report
        baseline = original or self._self_baseline(ours)
        chosen = self._chosen_blocks(ours, baseline)
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
            where = self.manifest.source_folder()
            self.report.against_note = (
                "the manifest's source, unchanged"
                if where
                else "the original is not there: compared with the manifest"
            )
        else:
            self.report.against_note = "no original: the checkpoint is compared with itself"
        if where is None:
            return None
        self.report.against = str(where)
        return self._side(where)

    def _side(self, path: Path) -> _Side:
        catalogue = open_checkpoint(path)
        blocks = find_blocks(catalogue, trust_shapes=self.options.trust_shapes)
        return _Side(catalogue, {block.prefix: block for block in blocks})

    def _open_ours(self, *, comparing: bool) -> _Side | None:
        try:
            return self._side(self.path)
        except (BadInputError, CannotError) as error:
            if not comparing:
                raise
            self.report.checks.append(Check("structure", "checkpoint", False, error.message, error.details))
            return None

    # Levels

    def _structure(self, ours: _Side, original: _Side | None) -> None:
        from mla_convert.verification import structure

        add = self.report.checks.append
        add(structure.check_index(ours.catalogue))
        add(structure.check_layout_mark(ours.catalogue, ours.blocks.values()))
        if self.manifest is not None and self.manifest.path.parent.samefile(ours.catalogue.root):
            add(structure.check_files(ours.catalogue, self.manifest))
        config = ours.catalogue.config
        if original is not None:
            specs = {name: tensor.spec for name, tensor in original.catalogue.tensors.items()}
            add(structure.check_inventory(ours.catalogue, ours.blocks.values(), specs, "the original"))
            theirs = original.catalogue.config
            add(
                structure.check_config(
                    config.value if config else None, theirs.value if theirs else None, "the original"
                )
            )
        elif self.manifest is not None:
            specs = structure.expected_specs(self.manifest, ours.catalogue)
            add(structure.check_inventory(ours.catalogue, ours.blocks.values(), specs, "the manifest"))
            if config:
                before = structure.original_config(self.manifest, config.name)
                add(structure.check_config(config.value, before, "the manifest"))

    def _bytes(self, ours: _Side, original: _Side | None) -> None:
        from mla_convert.verification import rows
        from mla_convert.verification.weights import TensorReader

        add = self.report.checks.append
        reader = TensorReader(ours.catalogue)
        if original is not None:
            theirs = TensorReader(original.catalogue)
            add(rows.check_rows(reader, theirs, ours.blocks, original.blocks))
            if self.options.carried:
                add(rows.check_carried(reader, theirs, self.progress))
            else:
                add(Check("bytes", "carried tensors", None, "not compared (--skip-carried)"))
        elif self.manifest is not None and self.manifest.operation == "split":
            add(rows.check_hashes(reader, ours.blocks, self.manifest))

    def _numbers(
        self,
        ours: _Side,
        original: _Side | None,
        baseline: Catalogue,
        chosen: Sequence[_Pair],
        settings: NumbersSettings,
    ) -> None:
        from mla_convert.verification.weights import TensorReader

        reader = TensorReader(ours.catalogue)
        theirs = TensorReader(original.catalogue) if original else reader
        self.progress.start("run attention", len(chosen), "items")
        try:
            self._run_blocks(chosen, settings, (reader, theirs), baseline)
        finally:
            self.progress.finish()
        self.report.ran |= _by_operation(settings.backend.ran)

    def _run_blocks(
        self,
        chosen: Sequence[_Pair],
        settings: NumbersSettings,
        readers: tuple[TensorReader, TensorReader],
        baseline: Catalogue,
    ) -> None:
        from mla_convert.verification import numbers
        from mla_convert.verification.weights import block_spec, load_block

        device = settings.devices[0]
        shared: torch.Tensor | None = None
        for number, (block, theirs) in enumerate(chosen):
            try:
                converted = load_block(readers[0], block, block_spec(readers[0].catalogue, block), device)
                original = load_block(readers[1], theirs, block_spec(baseline, theirs), device)
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
        from mla_convert.verification import numbers

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
        from mla_convert.verification.structure import original_config

        config = ours.catalogue.config
        before = original_config(self.manifest, config.name) if self.manifest and config else None
        if before is None or config is None:
            return ours
        return replace(ours, catalogue=replace(ours.catalogue, config=JsonFile(config.name, b"", before)))

    # Choices

    def _chosen_blocks(self, ours: _Side, baseline: _Side) -> list[_Pair]:
        pairs = [
            (block, baseline.blocks[prefix])
            for prefix, block in ours.blocks.items()
            if prefix in baseline.blocks
        ]
        if self.options.layers is not None:
            known = {block.layer for block, _ in pairs}
            absent = sorted(set(self.options.layers) - known)
            if absent:
                raise CannotError(
                    f"--layers: no MLA block in layer {', '.join(map(str, absent))}",
                    hint=f"layers with MLA: {', '.join(sorted({str(layer) for layer in known}, key=_as_number))}",
                )
            return [pair for pair in pairs if pair[0].layer in self.options.layers]
        weights = (
            sum(
                tensor.spec.numel
                for name, tensor in ours.catalogue.tensors.items()
                if any(name.startswith(block.prefix) for block in ours.blocks.values())
            )
            if len(pairs) <= 256
            else _ALL_LAYERS_WEIGHTS
        )
        if self._on_gpu() or weights < _ALL_LAYERS_WEIGHTS:
            return pairs
        sample: set[str] = set()
        for group in group_blocks(ours.catalogue, ours.blocks.values()):
            members = group.blocks
            sample |= {members[at].prefix for at in (0, len(members) // 2, -1)}
        return [pair for pair in pairs if pair[0].prefix in sample]

    def _on_gpu(self) -> bool:
        import torch

        return self.options.device != "cpu" and torch.cuda.is_available()

    def _settings(self, ours: _Side, blocks: Sequence[AttentionBlock]) -> NumbersSettings:
        import torch

        from mla_convert.runtime.dispatch import resolve_backend
        from mla_convert.verification.numbers import NumbersSettings

        self._check_tp(ours, blocks)
        devices = self._devices()
        gpu = devices[0].type == "cuda"
        dtype = {
            "auto": torch.bfloat16 if gpu else torch.float32,
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
            "float32": torch.float32,
            "float64": torch.float64,
        }[self.options.dtype]
        backend = resolve_backend(self.options.backend, devices[0])
        config = ours.catalogue.config.value if ours.catalogue.config else None
        topks = [layer_config(config, block.layer).get("index_topk") for block in blocks]
        topk = max((found for found in topks if type(found) is int), default=0)
        tokens = self.options.tokens or _default_tokens(topk, gpu=gpu)
        settings = NumbersSettings(
            tokens=tokens,
            rows=tokens if gpu or self.options.tokens else min(tokens, _CPU_ROWS),
            dtype=dtype,
            world=self.options.tp,
            devices=devices,
            backend=backend,
            seed=self.options.seed,
        )
        if topk and tokens <= topk:
            self.report.checks.append(
                Check(
                    "sparse",
                    "selection",
                    None,
                    f"{tokens} tokens do not exceed top-k {topk}: all are selected",
                )
            )
        self.report.settings = {
            "version": __version__,
            "tp": self.options.tp,
            "tokens": tokens,
            "rows": settings.rows,
            "topk": topk or None,
            "dtype": str(dtype).removeprefix("torch."),
            "backend": backend.name,
            "backend_reason": backend.reason,
            "devices": [_device_name(device) for device in devices],
            "seed": self.options.seed,
            "layers": sorted({block.layer for block in blocks if block.layer is not None}),
            "blocks": len(blocks),
            "blocks_in_checkpoint": len(ours.blocks),
            "tolerances": _tolerances(dtype),
        }
        return settings

    def _check_tp(self, ours: _Side, blocks: Sequence[AttentionBlock]) -> None:
        bad = [block for block in blocks if block.heads % self.options.tp]
        if bad:
            sizes = tensor_parallel_sizes(ours.catalogue, blocks)
            legal = [size.size for size in sizes if all(block.heads % size.size == 0 for block in blocks)]
            raise CannotError(
                f"--tp {self.options.tp}: {bad[0].heads} heads of {bad[0].prefix.rstrip('.')} do not divide by "
                f"{self.options.tp}",
                hint=f"sizes that fit: {', '.join(map(str, legal))}",
            )

    def _devices(self) -> tuple[torch.device, ...]:
        import torch

        if self.options.device not in (None, "cpu", "cuda"):
            raise UsageError(f"--device {self.options.device}: expected cpu or cuda")
        if self.options.device == "cuda" and not torch.cuda.is_available():
            raise CannotError(
                "--device cuda: PyTorch finds no CUDA device", hint="leave --device out to use the CPU"
            )
        if not self._on_gpu():
            return (torch.device("cpu"),)
        count = min(torch.cuda.device_count(), self.options.tp)
        return tuple(torch.device("cuda", number) for number in range(count))

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


def _default_tokens(topk: int, *, gpu: bool) -> int:
    """Past the top-k, where a wrong selection shows; 4096 on a GPU at least."""
    past = max(2 * topk, 64) if topk <= 1024 else topk + topk // 4
    return max(past, 4096) if gpu else max(past, 128)


def _by_operation(ran: Mapping[str, int]) -> dict[str, str]:
    """Operation -> what ran it, e.g. ``sparse_mla`` -> ``tilelang``, with the reason where a kernel could not."""
    served: dict[str, list[str]] = {}
    for entry in sorted(ran):
        operation, _, by = entry.partition(": ")
        served.setdefault(operation, []).append(by)
    return {operation: "; ".join(by) for operation, by in served.items()}


def _tolerances(dtype: torch.dtype) -> dict[str, float]:
    from mla_convert.verification.numbers import FACTOR, FLOORS, MIN_COSINE, SELECTION_TOLERANCE

    return {
        "cosine": MIN_COSINE,
        "factor": FACTOR,
        "floor": FLOORS[dtype],
        "selection": SELECTION_TOLERANCE[dtype],
    }


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


def _device_name(device: torch.device) -> str:
    import torch

    if device.type != "cuda":
        return "CPU"
    return f"{device} {torch.cuda.get_device_name(device)}"


def _as_number(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (1 << 30, text)


def by_level(checks: Sequence[Check]) -> Mapping[str, list[Check]]:
    """Checks grouped by level, in order."""
    grouped: dict[str, list[Check]] = {}
    for check in checks:
        grouped.setdefault(check.level, []).append(check)
    return grouped
