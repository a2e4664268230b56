"""A checkpoint's tensors as they would be in another layout: what each is made of, in terms of the stored ones.

``split`` and ``combine`` plan whole files; here the same rules give tensors, so that ``reshard`` can cut the result
further and ``diff`` can compare checkpoints of different layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mla_convert.catalogue import Catalogue
from mla_convert.combining import combined_fields
from mla_convert.conversion import HALVES, fields_of, up_projection_fields
from mla_convert.errors import BadInputError
from mla_convert.formats.huggingface_edit import rename_skipped, set_module_blocks
from mla_convert.geometry import AttentionBlock, Layout
from mla_convert.names import Part
from mla_convert.pieces import MadeOf, compose
from mla_convert.plan import Copy, EqualRows, EqualTensors, TargetTensor, whole
from mla_convert.split_kv import scale_block_rows
from mla_convert.splitting import split_field
from mla_convert.tensors import TensorSpec, rows


@dataclass(slots=True)
class LaidOut:
    """The tensors of a checkpoint in some layout.

    Attributes:
        tensors: Every tensor and its pieces of stored tensors.
        came_from: For tensors that were not there before, one that was and stands in their place.
        guards: What must hold of the stored tensors for nothing to be lost.
        module_blocks: FP8 scale blocks of modules that differ from what the configuration states for all.
    """

    tensors: dict[str, TargetTensor]
    came_from: dict[str, str] = field(default_factory=dict)
    guards: list[EqualTensors] = field(default_factory=list)
    module_blocks: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Specs by name."""
        return {name: target.spec for name, target in self.tensors.items()}

    def copies(self, name: str) -> tuple[Copy, ...]:
        """What one tensor is made of; layouts only ever copy."""
        return tuple(piece for piece in self.tensors[name].pieces if isinstance(piece, Copy))


def lay_out(
    logical: Catalogue, made_of: MadeOf, blocks: Sequence[AttentionBlock], layout: Layout | None
) -> LaidOut:
    """Every tensor of a checkpoint in ``layout``; None leaves it as it is.

    Args:
        logical: The checkpoint's inventory, with full shapes.
        made_of: What each of its tensors is made of.
        blocks: Its attention blocks.
        layout: ``COMBINED``, ``SPLIT`` or None.

    Raises:
        CannotError: Something in it cannot be split or combined.
        BadInputError: It contradicts itself.
    """
    new: dict[str, tuple[TargetTensor, ...]] = {}
    guards: list[EqualRows] = []
    module_blocks: dict[str, tuple[int, int]] = {}
    for block in blocks:
        if layout is Layout.SPLIT and block.layout is Layout.COMBINED:
            new |= _split(logical, block)
        elif layout is not None and block.layout not in (layout, Layout.COMBINED):
            replaced, conditions = _joined(logical, block, keep=layout)
            new |= replaced
            guards += conditions
        module_blocks |= _own_blocks(block, layout or block.layout)
    found = LaidOut({}, module_blocks=module_blocks)
    for name, tensor in logical.tensors.items():
        for target in new.get(name, (TargetTensor(tensor.spec, (whole(tensor.spec),)),)):
            copies = [piece for piece in target.pieces if isinstance(piece, Copy)]
            found.tensors[target.spec.name] = TargetTensor(target.spec, tuple(compose(copies, made_of)))
            if target.spec.name != name:
                found.came_from[target.spec.name] = name
    found.guards = [_lowered(guard, logical, made_of) for guard in guards]
    return found


def _split(logical: Catalogue, block: AttentionBlock) -> dict[str, tuple[TargetTensor, ...]]:
    specs, quantisation = fields_of(logical, block, Part.KV_B), block.quantisation[Part.KV_B]
    block_rows = (1, 1)
    if quantisation.block:
        block_rows = (quantisation.block[0], scale_block_rows(block.kv, quantisation.block[0]))
    fields = up_projection_fields(block, specs, quantisation, block_rows)
    return {f.combined.name: tuple(split_field(f, specs[f.name], part) for part in HALVES) for f in fields}


def _joined(
    logical: Catalogue, block: AttentionBlock, *, keep: Layout
) -> tuple[dict[str, tuple[TargetTensor, ...]], list[EqualRows]]:
    """What stands in the place of the tensors of the other layout, or layouts where both are stored."""
    targets, guards = combined_fields(logical, block)
    halves = {part: fields_of(logical, block, part) for part in HALVES}
    gone: dict[str, tuple[TargetTensor, ...]] = {}
    if block.layout is Layout.BOTH:
        dropped = [fields_of(logical, block, Part.KV_B)] if keep is Layout.SPLIT else halves.values()
        return {spec.name: () for fields in dropped for spec in fields.values()}, guards
    combined = {target.spec.name: target for target in targets}
    for part, fields in halves.items():
        for name, spec in fields.items():
            gone[spec.name] = (combined[block.tensor(Part.KV_B, name)],) if part is Part.K_B else ()
    return gone, guards


def _own_blocks(block: AttentionBlock, layout: Layout) -> dict[str, tuple[int, int]]:
    """Scale blocks of K and V, which may be finer than those of all else."""
    stored = block.quantisation.get(Part.K_B) or block.quantisation.get(Part.KV_B)
    if layout is Layout.COMBINED or stored is None or not stored.block:
        return {}
    size = (scale_block_rows(block.kv, stored.block[0]), stored.block[1])
    if Part.K_B in block.quantisation:
        size = stored.block
    return {block.module(part): size for part in HALVES}


def _lowered(guard: EqualRows, logical: Catalogue, made_of: MadeOf) -> EqualTensors:
    def side(name: str, row: int) -> TargetTensor:
        spec = logical.tensors[name].spec
        box = rows(spec, row, row + guard.count) if spec.shape else ()
        part = TensorSpec(name, spec.dtype, (guard.count, *spec.shape[1:]) if spec.shape else ())
        return TargetTensor(part, tuple(compose([Copy(name, box, (0,) * len(spec.shape))], made_of)))

    left, right = side(guard.left, guard.left_row), side(guard.right, guard.right_row)
    if (left.spec.dtype, left.spec.shape) != (right.spec.dtype, right.spec.shape):
        raise BadInputError(guard.otherwise)
    return EqualTensors(left, right, guard.otherwise)


def edit_layout(
    config: dict[str, Any],
    blocks: Sequence[AttentionBlock],
    layout: Layout | None,
    module_blocks: Mapping[str, tuple[int, int]],
) -> None:
    """Follow a change of layout in the configuration's lists of modules. Edits ``config`` in place."""
    for olds, news, is_changed in _renames(blocks, layout):
        if is_changed:
            modules = {b.module(old): [b.module(new) for new in news] for b in blocks for old in olds}
            leaves = {
                b.dialect.module(old): [b.dialect.module(new) for new in news] for b in blocks for old in olds
            }
            rename_skipped(config, modules, keep=False, leaf_renamed=leaves)
    set_module_blocks(config, module_blocks)


def _renames(
    blocks: Sequence[AttentionBlock], layout: Layout | None
) -> Iterator[tuple[tuple[Part, ...], tuple[Part, ...], bool]]:
    layouts = {block.layout for block in blocks}
    yield (Part.KV_B,), HALVES, layout is Layout.SPLIT and bool(layouts & {Layout.COMBINED})
    yield HALVES, (Part.KV_B,), layout is Layout.COMBINED and bool(layouts & {Layout.SPLIT})
