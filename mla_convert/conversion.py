"""What ``split`` and ``combine`` share: fields in both layouts, rewritten files, the parts of a finished plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mla_convert.catalogue import Catalogue, JsonFile, SourceFile
from mla_convert.errors import CannotError
from mla_convert.formats.huggingface_edit import edit_index
from mla_convert.formats.safetensors import build_header
from mla_convert.geometry import AttentionBlock, Layout
from mla_convert.manifest import pack
from mla_convert.names import Part
from mla_convert.plan import (
    CarriedFile,
    Copy,
    EqualRows,
    GeneratedFile,
    Plan,
    RewrittenFile,
    TargetTensor,
)
from mla_convert.quant import Quantisation, Scheme
from mla_convert.split_kv import RowMove, k_moves, scale_moves, v_moves
from mla_convert.strict_json import dump_json
from mla_convert.tensors import DTYPE_BITS, TensorSpec, rows

HALVES = (Part.K_B, Part.V_B)


@dataclass(frozen=True, slots=True)
class Field:
    """One stored field of an up-projection in both layouts, and how its rows move between them.

    ``moves`` is None for a field that both halves hold in full, such as a per-tensor scale.
    """

    name: str
    combined: TensorSpec
    split: Mapping[Part, TensorSpec]
    moves: Mapping[Part, tuple[RowMove, ...]] | None


def weight_moves(block: AttentionBlock) -> dict[Part, tuple[RowMove, ...]]:
    """Where the weight rows of each half stand in the combined tensor."""
    return {Part.K_B: tuple(k_moves(block.kv)), Part.V_B: tuple(v_moves(block.kv))}


def up_projection_fields(
    block: AttentionBlock,
    specs: Mapping[str, TensorSpec],
    quantisation: Quantisation,
    block_rows: tuple[int, int],
) -> Iterator[Field]:
    """The fields of a block's up-projection in both layouts.

    Args:
        block: The attention block.
        specs: Fields as stored in one of the layouts (their shapes are recomputed for the other).
        quantisation: How the weight is stored.
        block_rows: Weight rows a block scale covers: in the combined tensor, in the split ones.
    """
    by_row = weight_moves(block)
    halves = {Part.K_B: block.kv.k_rows, Part.V_B: block.kv.v_rows}

    def field(
        name: str,
        combined_rows: int,
        split_rows: Mapping[Part, int],
        moves: Mapping[Part, tuple[RowMove, ...]],
    ) -> Field:
        spec = specs[name]
        tail = spec.shape[1:]
        return Field(
            name,
            TensorSpec(block.tensor(Part.KV_B, name), spec.dtype, (combined_rows, *tail)),
            {
                p: TensorSpec(block.tensor(p, name), spec.dtype, (count, *tail))
                for p, count in split_rows.items()
            },
            moves,
        )

    yield field("weight", block.kv.combined_rows, halves, by_row)
    scale = quantisation.scale_field
    shared = list(quantisation.shared_fields)
    if scale and quantisation.scheme is Scheme.CHANNEL:
        yield field(scale, block.kv.combined_rows, halves, by_row)
    elif scale and quantisation.scheme is Scheme.BLOCK:
        combined_rows, split_rows = block_rows
        yield field(
            scale,
            -(-block.kv.combined_rows // combined_rows),
            {part: -(-count // split_rows) for part, count in halves.items()},
            {
                part: tuple(scale_moves(iter(moves), combined_rows, split_rows))
                for part, moves in by_row.items()
            },
        )
    elif scale:
        shared.append(scale)
    for name in shared:
        spec = specs[name]
        yield Field(
            name,
            replace(spec, name=block.tensor(Part.KV_B, name)),
            {part: replace(spec, name=block.tensor(part, name)) for part in HALVES},
            None,
        )


def fields_of(catalogue: Catalogue, block: AttentionBlock, part: Part) -> dict[str, TensorSpec]:
    """The stored fields of one part of a block, by field name."""
    prefix = block.module(part) + "."
    found: dict[str, TensorSpec] = {}
    quantisation = block.quantisation[part]
    names = (
        "weight",
        *quantisation.shared_fields,
        *([quantisation.scale_field] if quantisation.scale_field else []),
    )
    for name in names:
        spec = catalogue.spec(prefix + name)
        if spec is not None:
            found[name] = spec
    return found


def move_rows(source: TensorSpec, target_rank: int, source_row: int, target_row: int, count: int) -> Copy:
    """The piece that copies ``count`` rows."""
    return Copy(
        source.name, rows(source, source_row, source_row + count), (target_row, *(0,) * (target_rank - 1))
    )


def refuse_layout(blocks: Iterable[AttentionBlock], layouts: Sequence[Layout], verb: str, other: str) -> None:
    """Raise CannotError if a block already is in one of ``layouts``; ``other`` is the command that fits."""
    blocks = list(blocks)
    wrong = [block for block in blocks if block.layout in layouts]
    if not wrong:
        return
    found = "in both layouts" if wrong[0].layout is Layout.BOTH else str(wrong[0].layout)
    among = f"stored {found} already, {wrong[0].prefix.rstrip('.')} among them"
    details = [block.prefix for block in wrong]
    if len(wrong) < len(blocks):
        raise CannotError(
            f"cannot {verb}: {len(wrong)} of {len(blocks)} attention blocks are {among}",
            hint="the checkpoint is half converted; start from the original",
            details=details,
        )
    raise CannotError(
        f"nothing to {verb}: all {len(wrong)} attention blocks are {among}",
        hint=f"use `mla-convert {other}` for the other direction",
        details=details,
    )


def scale_extent(quantisation: Quantisation, weight: TensorSpec) -> tuple[int, int]:
    """Rows and columns of the weight that one scale value covers."""
    if quantisation.scheme is Scheme.BLOCK and quantisation.block:
        return quantisation.block
    return (1 if quantisation.scheme is Scheme.CHANNEL else weight.shape[0], weight.shape[1])


def cut_rows(start: int, count: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut ``count`` rows from ``start`` at multiples of ``size``: (offset from start, length)."""
    offset = 0
    while offset < count:
        length = min(size - (start + offset) % size, count - offset)
        yield offset, length
        offset += length


# Files


def rewrite_files(
    catalogue: Catalogue, replaced: Mapping[str, tuple[TargetTensor, ...]], *, append: bool
) -> list[RewrittenFile]:
    """Rewrite the files that hold a replaced tensor; the new tensors stand in its place, or at the file's end."""
    by_file: dict[str, SourceFile] = {}
    for name in replaced:
        for file in (catalogue.tensors[name].file, *catalogue.copies.get(name, ())):
            by_file[file] = catalogue.files[file]
    return [_rewrite(file, replaced, append) for _, file in sorted(by_file.items())]


def _rewrite(
    file: SourceFile, replaced: Mapping[str, tuple[TargetTensor, ...]], append: bool
) -> RewrittenFile:
    targets: list[TargetTensor] = []
    added: list[TargetTensor] = []
    for stored in file.header.tensors:
        new = replaced.get(stored.spec.name)
        if new is None or append:
            targets.append(TargetTensor.carried(stored.spec))
        if new is not None:
            (added if append else targets).extend(new)
    return rewritten_file(file.name, [*targets, *added], file.header.metadata, file.header.data_start)


def rewritten_file(
    name: str, targets: Sequence[TargetTensor], metadata: Mapping[str, str] | None, congruent_to: int
) -> RewrittenFile:
    """A file that holds ``targets`` in this order, or, where that would misalign one, widest dtypes first.

    Readers map tensors into memory, so each must start at a multiple of its element size. The header is padded
    so that data lies at the same offset modulo a disk block as in the source: then reflinks can share it.
    """
    offset = 0
    for target in targets:
        width = max(1, DTYPE_BITS[target.spec.dtype] // 8)
        if offset % width:
            targets = sorted(targets, key=lambda t: -DTYPE_BITS[t.spec.dtype])
            break
        offset += target.spec.nbytes
    header = build_header([t.spec for t in targets], metadata, congruent_to=congruent_to)
    return RewrittenFile(name, header, tuple(targets))


def finish_plan(
    catalogue: Catalogue,
    *,
    operation: str,
    options: Mapping[str, Any],
    layout: Layout,
    blocks: Sequence[AttentionBlock],
    rewritten: Sequence[RewrittenFile],
    generated: Sequence[GeneratedFile],
    replaced: Mapping[str, Sequence[str]],
    hashed: Sequence[str],
    restore_tensors: Sequence[str] = (),
    guards: Sequence[EqualRows] = (),
    warnings: Sequence[str] = (),
    index: GeneratedFile | None = None,
) -> Plan:
    """Add what follows from the rewritten files: the index, carried files and the manifest's fixed part."""
    rewritten_names = {file.name for file in rewritten}
    generated = list(generated)
    if catalogue.index:
        generated.append(index or _new_index(catalogue.index, catalogue, rewritten, replaced))
    generated_names = {file.name for file in generated}
    carried = [
        CarriedFile(file.name, file.path, file.identity.size, is_weights=True)
        for file in catalogue.files.values()
        if file.name not in rewritten_names
    ]
    carried += [
        CarriedFile(file.name, file.path, file.identity.size, is_weights=file.name.endswith(".safetensors"))
        for file in catalogue.others
        if file.name not in generated_names
    ]
    originals = [
        json for json in (catalogue.config, catalogue.index) if json and json.name in generated_names
    ]
    manifest = {
        "layout": str(layout),
        "blocks": [describe_block(block) for block in blocks],
        "restore": {
            "headers": {name: pack(catalogue.files[name].header.raw) for name in sorted(rewritten_names)},
            "files": {json.name: pack(json.data) for json in originals},
        },
        "restore_tensors": list(restore_tensors),
    }
    return Plan(
        operation=operation,
        options=options,
        catalogue=catalogue,
        rewritten=tuple(rewritten),
        carried=tuple(carried),
        generated=tuple(sorted(generated, key=lambda file: file.name)),
        guards=tuple(guards),
        hashed=tuple(hashed),
        manifest=manifest,
        warnings=(*catalogue.warnings, *warnings),
    )


def describe_block(block: AttentionBlock) -> dict[str, Any]:
    """A block as plain data, for the manifest and ``--json``."""
    return {
        "prefix": block.prefix,
        "layer": block.layer,
        "heads": block.heads,
        "nope": block.nope,
        "rope": block.rope,
        "v": block.v,
        "rank": block.rank,
    }


def _new_index(
    index: JsonFile,
    catalogue: Catalogue,
    rewritten: Sequence[RewrittenFile],
    replaced: Mapping[str, Sequence[str]],
) -> GeneratedFile:
    placed: dict[str, str] = {}
    total = 0
    new = {file.name: [target.spec for target in file.tensors] for file in rewritten}
    for file in catalogue.files.values():
        for spec in new.get(file.name, [each.spec for each in file.header.tensors]):
            stored = catalogue.tensors.get(spec.name)
            home = stored.file if stored else placed.get(spec.name, file.name)
            if home != file.name:
                continue  # it is a copy of what counts
            placed[spec.name] = file.name
            total += spec.nbytes
    value = edit_index(index.value, placed, replaced, total)
    return GeneratedFile(index.name, dump_json(value))
