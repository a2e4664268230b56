"""``combine``: a pure function from a catalogue, and the manifest that ``split`` left, to a plan.

With a manifest the original files come back byte for byte, headers included. Without one, every combined tensor
does: K and V rows interleave by head again, and replicated scales collapse if they are still equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mla_convert.catalogue import Catalogue, JsonFile
from mla_convert.conversion import (
    HALVES,
    Field,
    cut_rows,
    fields_of,
    finish_plan,
    move_rows,
    refuse_layout,
    rewrite_files,
    scale_extent,
    up_projection_fields,
)
from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.huggingface_edit import mark_layout, rename_skipped, set_module_blocks
from mla_convert.formats.safetensors import SafetensorsHeader, parse_header
from mla_convert.geometry import AttentionBlock, Layout, find_blocks, quantization_config
from mla_convert.manifest import Manifest, sha256_of
from mla_convert.names import Part, parse_up_projection
from mla_convert.plan import (
    Copy,
    EqualRows,
    GeneratedFile,
    Inline,
    Piece,
    Plan,
    Requantise,
    RewrittenFile,
    TargetTensor,
    whole,
)
from mla_convert.quant import SCALE_FIELDS, SHARED_FIELDS, Quantisation, config_block, read_quantisation
from mla_convert.split_kv import RowMove, scale_block_rows
from mla_convert.strict_json import dump_json
from mla_convert.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class CombineOptions:
    """What ``combine`` may be asked for."""

    ignore_manifest: bool = False
    trust_shapes: bool = False

    def described(self) -> dict[str, Any]:
        """The options that change bytes."""
        return {"ignore_manifest": self.ignore_manifest}


def plan_combine(catalogue: Catalogue, manifest: Manifest | None, options: CombineOptions) -> Plan:
    """Plan the recombination of every split KV up-projection in a checkpoint.

    Raises:
        CannotError: Not an MLA checkpoint, combined already, or scales that cannot be merged.
        BadInputError: The checkpoint contradicts itself or its manifest.
    """
    blocks = find_blocks(catalogue, trust_shapes=options.trust_shapes)
    refuse_layout(blocks, (Layout.COMBINED,), "combine", "split")
    combined: dict[str, TargetTensor] = {}
    guards: list[EqualRows] = []
    for block in blocks:
        targets, conditions = combined_fields(catalogue, block)
        combined |= {target.spec.name: target for target in targets}
        guards += conditions
    original = (
        manifest if manifest and manifest.operation == "split" and not options.ignore_manifest else None
    )
    replaced = _replacements(catalogue, blocks, combined)
    if original:
        rewritten, hashed = _restored_files(catalogue, original, combined)
    else:
        rewritten, hashed = rewrite_files(catalogue, replaced, append=False), sorted(replaced)
    index = _restored(catalogue.index, original)
    config = _restored(catalogue.config, original) or _combined_config(catalogue, blocks)
    warnings = _not_compared(catalogue, blocks)
    if original and catalogue.config and _restored(catalogue.config, original) is None:
        warnings.append(f"{catalogue.config.name} was changed since the split; its own edits are kept")
    return finish_plan(
        catalogue,
        operation="combine",
        options={**options.described(), "restored": original is not None},
        layout=Layout.COMBINED,
        blocks=blocks,
        rewritten=rewritten,
        generated=[config] if config else [],
        replaced={name: [new.spec.name for new in targets] for name, targets in replaced.items()},
        hashed=hashed,
        guards=guards,
        warnings=warnings,
        index=index,
    )


def _not_compared(catalogue: Catalogue, blocks: Sequence[AttentionBlock]) -> list[str]:
    dropped = [
        block
        for block in blocks
        if block.layout is Layout.BOTH
        and is_dequantised(*(catalogue.tensors[block.tensor(p)].spec.dtype for p in (Part.KV_B, Part.K_B)))
    ]
    if not dropped:
        return []
    return [
        f"K and V of {len(dropped)} blocks are dequantised copies; they are dropped without comparing them"
    ]


def combined_fields(
    catalogue: Catalogue, block: AttentionBlock
) -> tuple[list[TargetTensor], list[EqualRows]]:
    """The combined tensors of one block, and what must hold for them to be right."""
    k_quantisation, v_quantisation = (block.quantisation[part] for part in HALVES)
    sources = {part: fields_of(catalogue, block, part) for part in HALVES}
    if k_quantisation != v_quantisation or len({fields["weight"].dtype for fields in sources.values()}) != 1:
        k, v = (block.quantisation[part].describe(sources[part]["weight"].dtype) for part in HALVES)
        raise CannotError(f"{block.prefix}: K and V are stored differently: {k}; {v}")
    block_rows = _block_rows(catalogue, block, k_quantisation)
    fields = list(up_projection_fields(block, sources[Part.K_B], k_quantisation, block_rows))
    if block.layout is Layout.BOTH:
        stored = fields_of(catalogue, block, Part.KV_B)
        return [TargetTensor.carried(spec) for spec in stored.values()], _equal_layouts(fields, stored)
    targets, guards = [], []
    for field in fields:
        _require_like_halves(catalogue, field)
        target, conditions = _combine_field(field)
        targets.append(target)
        guards += conditions
    return targets, guards


def _block_rows(catalogue: Catalogue, block: AttentionBlock, quantisation: Quantisation) -> tuple[int, int]:
    """Weight rows that a block scale covers: in the combined tensor, in K and V."""
    if not quantisation.block:
        return (1, 1)
    config = catalogue.config.value if catalogue.config else None
    stated = config_block(quantization_config(config))[0]
    finer = scale_block_rows(block.kv, stated)
    if quantisation.block[0] != finer:
        raise CannotError(
            f"{block.prefix}: K and V have one scale for {quantisation.block[0]} rows; with nope {block.nope} and "
            f"v {block.v} some of these span two heads, and a combined tensor cannot hold them",
            hint=f"only scales of {finer} rows can be combined; quantise the combined BF16 weights instead",
        )
    return stated, finer


def _require_like_halves(catalogue: Catalogue, field: Field) -> None:
    """Both halves must hold a field alike; its spec was derived from K's."""
    v = field.split[Part.V_B]
    found = catalogue.tensors[v.name].spec
    if found != v:
        raise CannotError(
            f"{v.name} is {found.dtype} {list(found.shape)}; beside {field.split[Part.K_B].name} it would have to be "
            f"{v.dtype} {list(v.shape)}"
        )


def _combine_field(field: Field) -> tuple[TargetTensor, list[EqualRows]]:
    k, v = (field.split[part] for part in HALVES)
    if field.moves is None:
        same = EqualRows(
            k.name, 0, v.name, 0, 1, f"{k.name} and {v.name} differ, so one tensor cannot hold both"
        )
        return TargetTensor(field.combined, (whole(k),)), [same]
    pieces: dict[int, Piece] = {}
    first: dict[int, tuple[str, int]] = {}
    guards = []
    for part, moves in field.moves.items():
        source = field.split[part]
        for move in moves:
            if move.combined in first:
                name, row = first[move.combined]
                otherwise = (
                    f"{name} row {row} and {source.name} row {move.split} belong to one block of "
                    f"{field.combined.name} but hold different scales"
                )
                guards.append(EqualRows(name, row, source.name, move.split, move.count, otherwise))
                continue
            first[move.combined] = (source.name, move.split)
            pieces[move.combined] = move_rows(
                source, len(field.combined.shape), move.split, move.combined, move.count
            )
    return TargetTensor(field.combined, tuple(pieces[at] for at in sorted(pieces))), guards


def _equal_layouts(fields: Sequence[Field], stored: Mapping[str, TensorSpec]) -> list[EqualRows]:
    """Both layouts are there: every row of K and V must equal its row of the combined tensor."""
    if is_dequantised(stored["weight"].dtype, fields[0].combined.dtype):
        return []  # no bytes to compare; plan_combine says so
    conditions = []
    for field in fields:
        combined = stored.get(field.name)
        if combined != field.combined:
            found = f"{combined.dtype} {list(combined.shape)}" if combined else "missing"
            raise BadInputError(
                f"both layouts are stored, and they do not agree: {field.combined.name} is {found}; K and V need "
                f"{field.combined.dtype} {list(field.combined.shape)}",
                hint="remove the layout that is wrong",
            )
        for part, split in field.split.items():
            for move in field.moves[part] if field.moves else (RowMove(0, 0, 1),):
                otherwise = f"{split.name} row {move.split} differs from {combined.name} row {move.combined}"
                conditions.append(
                    EqualRows(split.name, move.split, combined.name, move.combined, move.count, otherwise)
                )
    return conditions


def is_dequantised(combined: str, split: str) -> bool:
    """True if the halves of a weight of dtype ``combined`` are what ``--dequantize`` makes of it."""
    return (combined, split) == ("F8_E4M3", "BF16")


def _replacements(
    catalogue: Catalogue, blocks: tuple[AttentionBlock, ...], combined: Mapping[str, TargetTensor]
) -> dict[str, tuple[TargetTensor, ...]]:
    """What stands in the place of each K and V tensor: the combined one for K, nothing for V."""
    replaced: dict[str, tuple[TargetTensor, ...]] = {}
    for block in blocks:
        for part in HALVES:
            for name, spec in fields_of(catalogue, block, part).items():
                target = combined.get(block.tensor(Part.KV_B, name))
                keeps = part is Part.K_B and block.layout is Layout.SPLIT and target
                replaced[spec.name] = (target,) if keeps and target else ()
    return replaced


# With the manifest


def _restored_files(
    catalogue: Catalogue, manifest: Manifest, combined: Mapping[str, TargetTensor]
) -> tuple[list[RewrittenFile], list[str]]:
    """The original files from their original headers, and the K and V tensors that go into them."""
    sizes = manifest.value["source"]["files"]
    headers: dict[str, SafetensorsHeader] = {}
    for name, raw in manifest.restore_headers.items():
        if name not in catalogue.files:
            raise _does_not_fit(manifest, f"{name} is gone")
        headers[name] = parse_header(
            raw, sizes.get(name, [0])[0], f"{manifest.path}: original header of {name}"
        )
    original = {stored.spec.name: stored.spec for header in headers.values() for stored in header.tensors}
    halves = sorted(
        name for name in catalogue.tensors if (p := parse_up_projection(name)) and p.part in HALVES
    )
    _require_same_places(catalogue, manifest, headers, original, halves)
    restorer = _Restorer(catalogue, manifest, combined, original, manifest.restore_tensors)
    files = [
        RewrittenFile(name, header.raw, tuple(restorer.tensor(stored.spec) for stored in header.tensors))
        for name, header in headers.items()
    ]
    return files, halves


def _require_same_places(
    catalogue: Catalogue,
    manifest: Manifest,
    headers: Mapping[str, SafetensorsHeader],
    original: Mapping[str, TensorSpec],
    halves: Sequence[str],
) -> None:
    """Refuse to lose a tensor that was added or moved since the split: the original headers know nothing of it."""
    for name in halves:
        if catalogue.tensors[name].file not in headers:
            raise _does_not_fit(manifest, f"{name} lies in {catalogue.tensors[name].file}")
    expected = {*original, *halves}
    for name, tensor in catalogue.tensors.items():
        if tensor.file in headers and name not in expected:
            raise _does_not_fit(manifest, f"{name} was added to {tensor.file}")
        if tensor.file not in headers and name in original:
            raise _does_not_fit(manifest, f"{name} was moved to {tensor.file}")


@dataclass(frozen=True, slots=True)
class _Restorer:
    """Finds, for each tensor of the original files, what it is made of now."""

    catalogue: Catalogue
    manifest: Manifest
    combined: Mapping[str, TargetTensor]
    original: Mapping[str, TensorSpec]
    kept: Mapping[str, bytes]

    def tensor(self, spec: TensorSpec) -> TargetTensor:
        """The target that brings ``spec`` back.

        Raises:
            BadInputError: The checkpoint no longer holds what the manifest says it was made from.
        """
        sha256 = self.manifest.tensor_sha256.get(spec.name)
        target = self.combined.get(spec.name)
        if spec.name in self.kept:
            data = self.kept[spec.name]
            if len(data) != spec.nbytes:
                raise _does_not_fit(self.manifest, f"{spec.name} has {len(data)} bytes, not {spec.nbytes}")
            return TargetTensor(spec, (Inline(data),), sha256)
        if target is not None and target.spec == spec:
            return replace(target, sha256=sha256)
        if target is not None:
            return self._requantised(spec, target, sha256)
        if self.catalogue.spec(spec.name) == spec:
            return TargetTensor.carried(spec)
        raise _does_not_fit(
            self.manifest, f"{spec.name} {spec.dtype} {list(spec.shape)} is not in the checkpoint"
        )

    def _requantised(self, spec: TensorSpec, target: TargetTensor, sha256: str | None) -> TargetTensor:
        """An FP8 weight out of the BF16 halves that ``--dequantize`` made, by its original scales."""
        if not is_dequantised(spec.dtype, target.spec.dtype) or spec.shape != target.spec.shape:
            was, now = (f"{s.dtype} {list(s.shape)}" for s in (spec, target.spec))
            raise _does_not_fit(self.manifest, f"{spec.name} was {was}; its halves make {now}")
        module = spec.name.removesuffix(".weight")
        names = ("weight", *SCALE_FIELDS, *SHARED_FIELDS)
        fields = {name: found for name in names if (found := self.original.get(f"{module}.{name}"))}
        config = self.catalogue.config.value if self.catalogue.config else None
        quantisation = read_quantisation(fields, config_block(quantization_config(config)), module)
        scale = fields.get(quantisation.scale_field or "")
        if scale is None or scale.name not in self.kept:
            raise _does_not_fit(self.manifest, f"the scales of {spec.name} are not in it")
        copies = [piece for piece in target.pieces if isinstance(piece, Copy)]
        data = self.kept[scale.name]
        per_scale, columns = scale_extent(quantisation, spec)
        pieces: list[Piece] = []
        for piece in copies:
            (start, stop), at = piece.box[0], piece.at[0]
            for offset, length in cut_rows(at, stop - start, per_scale):
                row = (at + offset) // per_scale * scale.row_nbytes
                scales = data[row : row + scale.row_nbytes]
                pieces.append(
                    Requantise(
                        piece.source, start + offset, length, at + offset, scales, scale.dtype, columns
                    )
                )
        return TargetTensor(spec, tuple(pieces), sha256)


def _does_not_fit(manifest: Manifest, why: str) -> BadInputError:
    return BadInputError(
        f"{manifest.path} does not describe the checkpoint beside it: {why}",
        hint="--ignore-manifest combines by structure alone; the tensors are the same, headers may differ",
    )


def _restored(file: JsonFile | None, manifest: Manifest | None) -> GeneratedFile | None:
    """The original bytes of the index or configuration, if the file is still as the split wrote it."""
    if file is None or manifest is None:
        return None
    original = manifest.restore_files.get(file.name)
    unchanged = manifest.files.get(file.name, {}).get("sha256") == sha256_of(file.data)
    return GeneratedFile(file.name, original) if original is not None and unchanged else None


def _combined_config(catalogue: Catalogue, blocks: tuple[AttentionBlock, ...]) -> GeneratedFile | None:
    if catalogue.config is None:
        return None
    config = mark_layout(catalogue.config.value, None)
    renamed = {block.module(part): [block.module(Part.KV_B)] for block in blocks for part in HALVES}
    leaves = {b.dialect.module(part): [b.dialect.module(Part.KV_B)] for b in blocks for part in HALVES}
    rename_skipped(config, renamed, keep=False, leaf_renamed=leaves)
    set_module_blocks(config, {})
    return GeneratedFile(catalogue.config.name, dump_json(config))
