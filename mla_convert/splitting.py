"""``split``: a pure function from a catalogue to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_convert.catalogue import Catalogue
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
    weight_moves,
)
from mla_convert.errors import CannotError
from mla_convert.formats.huggingface_edit import mark_layout, rename_skipped, set_module_blocks, skip_modules
from mla_convert.geometry import AttentionBlock, Layout, find_blocks
from mla_convert.names import Part
from mla_convert.plan import Dequantise, GeneratedFile, Piece, Plan, TargetTensor, whole
from mla_convert.quant import Quantisation, Scheme, require_dequantisable
from mla_convert.split_kv import scale_block_rows
from mla_convert.strict_json import dump_json
from mla_convert.tensors import TensorSpec, rows


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """What ``split`` may be asked for."""

    keep_combined: bool = False
    dequantize: bool = False
    trust_shapes: bool = False

    def described(self) -> dict[str, Any]:
        """The options that change bytes."""
        return {"keep_combined": self.keep_combined, "dequantize": "bf16" if self.dequantize else None}


def plan_split(catalogue: Catalogue, options: SplitOptions) -> Plan:
    """Plan the split of every combined KV up-projection in a checkpoint.

    Raises:
        CannotError: Not an MLA checkpoint, split already, or stored in a way that cannot be split.
        BadInputError: The checkpoint contradicts itself.
    """
    blocks = find_blocks(catalogue, trust_shapes=options.trust_shapes)
    refuse_layout(blocks, (Layout.SPLIT, Layout.BOTH), "split", "combine")
    quantised = [block for block in blocks if block.quantisation[Part.KV_B].scheme is not Scheme.PLAIN]
    if options.dequantize and not quantised:
        raise CannotError(
            "--dequantize: the KV up-projections are not quantised "
            f"({catalogue.tensors[blocks[0].tensor(Part.KV_B)].spec.dtype})",
            hint="run split without it",
        )
    replaced: dict[str, tuple[TargetTensor, ...]] = {}
    module_blocks: dict[str, tuple[int, int]] = {}
    lost: list[str] = []
    for block in blocks:
        specs = fields_of(catalogue, block, Part.KV_B)
        quantisation = block.quantisation[Part.KV_B]
        if options.dequantize and quantisation.scheme is not Scheme.PLAIN:
            replaced |= _dequantised(block, specs, quantisation)
            lost += [spec.name for name, spec in specs.items() if name != "weight"]
            continue
        split_block = None
        if quantisation.block:
            split_block = (scale_block_rows(block.kv, quantisation.block[0]), quantisation.block[1])
            if split_block != quantisation.block:
                module_blocks |= {block.module(part): split_block for part in HALVES}
        block_rows = (quantisation.block[0], split_block[0]) if quantisation.block and split_block else (1, 1)
        for field in up_projection_fields(block, specs, quantisation, block_rows):
            replaced[field.combined.name] = tuple(
                split_field(field, specs[field.name], part) for part in HALVES
            )
    layout = Layout.BOTH if options.keep_combined else Layout.SPLIT
    renamed = {block.module(Part.KV_B): [block.module(part) for part in HALVES] for block in blocks}
    rewritten = rewrite_files(catalogue, replaced, append=options.keep_combined)
    generated = []
    if catalogue.config:
        config = mark_layout(catalogue.config.value, layout)
        leaves = {b.dialect.module(Part.KV_B): [b.dialect.module(p) for p in HALVES] for b in blocks}
        rename_skipped(config, renamed, keep=options.keep_combined, leaf_renamed=leaves)
        set_module_blocks(config, module_blocks)
        if options.dequantize:
            skip_modules(config, [name for block in quantised for name in renamed[block.module(Part.KV_B)]])
        generated.append(GeneratedFile(catalogue.config.name, dump_json(config)))
    return finish_plan(
        catalogue,
        operation="split",
        options=options.described(),
        layout=layout,
        blocks=blocks,
        rewritten=rewritten,
        generated=generated,
        replaced={name: [new.spec.name for new in targets] for name, targets in replaced.items()},
        hashed=sorted(replaced),
        restore_tensors=lost if not options.keep_combined else [],
    )


def split_field(field: Field, source: TensorSpec, part: Part) -> TargetTensor:
    """One half of a field, out of the combined tensor ``source``."""
    target = field.split[part]
    if field.moves is None:
        return TargetTensor(target, (whole(source),))
    pieces = tuple(
        move_rows(source, len(target.shape), move.combined, move.split, move.count)
        for move in field.moves[part]
    )
    return TargetTensor(target, pieces)


def _dequantised(
    block: AttentionBlock, specs: Mapping[str, TensorSpec], quantisation: Quantisation
) -> dict[str, tuple[TargetTensor, ...]]:
    """K and V in BF16; the scale and every other companion of the weight goes away."""
    weight, scale = specs["weight"], specs[quantisation.scale_field or "weight"]
    require_dequantisable(weight, scale if quantisation.scale_field else None)
    per_scale, columns = scale_extent(quantisation, weight)
    targets = []
    for part, moves in weight_moves(block).items():
        count = block.kv.k_rows if part is Part.K_B else block.kv.v_rows
        spec = TensorSpec(block.tensor(part), "BF16", (count, block.rank))
        pieces: list[Piece] = []
        for move in moves:
            for offset, length in cut_rows(move.combined, move.count, per_scale):
                row = move.combined + offset
                scale_row = row // per_scale if scale.numel > 1 else 0
                box, at = rows(weight, row, row + length), (move.split + offset, 0)
                pieces.append(Dequantise(weight.name, scale.name, box, at, (scale_row, 0), columns))
        targets.append(TargetTensor(spec, tuple(pieces)))
    gone: dict[str, tuple[TargetTensor, ...]] = {spec.name: () for spec in specs.values()}
    return gone | {weight.name: tuple(targets)}
