"""``split``, ``combine`` and ``migrate`` for torch_dist: pure functions from a checkpoint's inventory to a plan.

Files stay as they are. What changes goes to new files, and ``.metadata`` is written anew. The old bytes stay in the
old files, where nothing refers to them any more: that is how ``combine`` brings the original back, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mla_convert.conversion import describe_block, refuse_layout
from mla_convert.errors import BadInputError, CannotError, UsageError
from mla_convert.formats.torch_dist import INTEGRITY, METADATA
from mla_convert.formats.torch_dist_edit import Edits, edit_metadata, referenced_files
from mla_convert.formats.torch_dist_metadata import parse_metadata
from mla_convert.geometry import Layout, find_blocks
from mla_convert.manifest import Manifest, pack, sha256_of
from mla_convert.megatron.changes import Changes, MegatronOptions
from mla_convert.megatron.migration import migrate
from mla_convert.megatron.model import MegatronModel
from mla_convert.megatron.rearranging import Rearranger
from mla_convert.megatron.up_projections import combine_up_projections, split_pairs, split_up_projections
from mla_convert.plan import CarriedFile, EqualTensors, GeneratedFile, Plan
from mla_convert.strict_json import dump_json, parse_json, read_bytes


def plan_megatron_split(
    model: MegatronModel, options: MegatronOptions, *, keep_combined: bool = False, trust_shapes: bool = False
) -> Plan:
    """Plan the split of every combined KV up-projection, and of the optimizer states that follow it.

    Raises:
        CannotError: Not MLA, split already, or something in it cannot be split.
        BadInputError: The checkpoint contradicts itself.
    """
    blocks = find_blocks(model.logical, trust_shapes=trust_shapes)
    refuse_layout(blocks, (Layout.SPLIT, Layout.BOTH), "split", "combine")
    changes = Changes(model, blocks, options, Layout.BOTH if keep_combined else Layout.SPLIT)
    split_up_projections(changes, keep=keep_combined)
    migrate(changes)
    return _plan(changes, "split", {**options.described(), "keep_combined": keep_combined})


def plan_megatron_combine(
    model: MegatronModel,
    manifest: Manifest | None,
    options: MegatronOptions,
    *,
    ignore_manifest: bool = False,
    trust_shapes: bool = False,
) -> Plan:
    """Plan the recombination of every split KV up-projection, and of the optimizer states that follow it.

    Raises:
        CannotError: Not MLA, combined already, or something in it cannot be combined.
        BadInputError: The checkpoint contradicts itself.
    """
    blocks = find_blocks(model.logical, trust_shapes=trust_shapes)
    refuse_layout(blocks, (Layout.COMBINED,), "combine", "split")
    changes = Changes(model, blocks, options, Layout.COMBINED)
    described = {**options.described(), "ignore_manifest": ignore_manifest}
    if manifest and manifest.operation == "split" and options == MegatronOptions() and not ignore_manifest:
        original = _original_metadata(model, manifest)
        if original is not None:
            return _restoring_plan(changes, manifest, original, described)
        changes.warn(
            "the checkpoint is not as split wrote it, or not all of the original is left, so it is combined by "
            "structure: the tensors are the same, files are not"
        )
    combine_up_projections(changes)
    migrate(changes)
    return _plan(changes, "combine", {**described, "restored": False})


def plan_migrate(model: MegatronModel, options: MegatronOptions, *, trust_shapes: bool = False) -> Plan:
    """Plan a change from one release's conventions to another's, with the up-projections as they are.

    Raises:
        UsageError: Nothing is asked for.
        CannotError: The checkpoint is as wanted already, or does not tell how it is.
    """
    if options.norms is None and options.indexer is None:
        raise UsageError("migrate needs something to change", hint="give --norms, --indexer, or both")
    blocks = find_blocks(model.logical, trust_shapes=trust_shapes)
    layouts = {block.layout for block in blocks}
    changes = Changes(model, blocks, options, layouts.pop() if len(layouts) == 1 else None)
    migrate(changes)
    if not changes.edits.renamed and not changes.edits.tensors:
        raise CannotError("nothing to migrate: norms and indexer are as they are wanted already")
    return _plan(changes, "migrate", options.described())


def _plan(changes: Changes, operation: str, options: Mapping[str, Any]) -> Plan:
    """What was collected, as a plan."""
    source, metadata = changes.model.source, changes.metadata
    data = edit_metadata(metadata, changes.edits, str(source.folder / METADATA))
    written = [GeneratedFile(source.prefix + METADATA, data), *changes.generated]
    generated = [*written, *_integrity(changes, written)]
    if operation == "combine" or changes.options.drop_optimizer:
        unused = set(referenced_files(metadata, Edits())) - set(referenced_files(metadata, changes.edits))
        changes.absent |= {source.prefix + name for name in unused}
    return Plan(
        operation=operation,
        options=options,
        catalogue=replace(changes.model.logical, tensors=changes.rearranger.tensors, config=None),
        rewritten=tuple(changes.rearranger.files()),
        carried=tuple(_carried(changes.model, changes.absent | {file.name for file in generated})),
        generated=tuple(sorted(generated, key=lambda file: file.name)),
        guards=tuple(changes.guards),
        hashed=tuple(dict.fromkeys(changes.hashed)),
        manifest=_manifest(changes, [file.name for file in generated]),
        warnings=(*source.warnings, *changes.warnings),
    )


def _carried(model: MegatronModel, left_out: set[str]) -> Iterator[CarriedFile]:
    for file in model.source.files.values():
        if file.name not in left_out:
            yield CarriedFile(file.name, file.path, file.identity.size, is_weights=True)
    for other in model.source.others:
        if other.name not in left_out:
            yield CarriedFile(other.name, other.path, other.identity.size, is_weights=False)


def _manifest(changes: Changes, replaced: Sequence[str]) -> dict[str, Any]:
    """The manifest's fixed part. Of files that were replaced, it keeps the original bytes."""
    source = changes.model.source
    known = {other.name for other in source.others}
    originals = {
        name: read_bytes(source.root / name, max_bytes=1 << 32) for name in replaced if name in known
    }
    absent = {name for name in changes.absent if name in known}
    originals |= {name: read_bytes(source.root / name, max_bytes=1 << 32) for name in absent}
    return {
        "layout": str(changes.layout or "mixed"),
        "blocks": [describe_block(block) for block in changes.blocks],
        "restore": {"headers": {}, "files": {name: pack(data) for name, data in sorted(originals.items())}},
        "restore_tensors": [],
    }


def _integrity(changes: Changes, written: Sequence[GeneratedFile]) -> list[GeneratedFile]:
    """Megatron's list of hashes, where there is one, with those of the files that are written anew."""
    source = changes.model.source
    path = source.folder / INTEGRITY
    if not path.exists():
        return []
    value = parse_json(read_bytes(path), where=str(path))
    files = value.get("files") if isinstance(value, dict) else None
    if not isinstance(files, dict) or value.get("algorithm") != "sha256":
        raise BadInputError(f"{path} is no list of sha256 hashes", hint="remove it to go on without it")
    hashes = {file.name.removeprefix(source.prefix): sha256_of(file.data) for file in written}
    kept = {name: digest for name, digest in files.items() if source.prefix + name not in changes.absent}
    changes.warn(f"{INTEGRITY} does not list the new .distcp files")
    return [GeneratedFile(source.prefix + INTEGRITY, dump_json({**value, "files": kept | hashes}))]


# With the manifest


def _original_metadata(model: MegatronModel, manifest: Manifest) -> bytes | None:
    """``.metadata`` as it was before the split, if all that it refers to is still here, untouched."""
    source = model.source
    name = source.prefix + METADATA
    if manifest.files.get(name, {}).get("sha256") != sha256_of(source.metadata.raw):
        return None
    here = {file.name: file.identity.size for file in source.files.values()}
    here |= {file.name: file.identity.size for file in source.others}
    restored = manifest.restore_files
    for file, (size, _) in manifest.value["source"]["files"].items():
        if file not in restored and here.get(file) != size:
            return None
    return restored.get(name)


def _restoring_plan(
    changes: Changes, manifest: Manifest, original: bytes, options: Mapping[str, Any]
) -> Plan:
    """The original files as they were; K and V must still be equal to what they were made from."""
    source = changes.model.source
    before = parse_metadata(original, f"{manifest.path}: original {METADATA}")
    both = replace(changes.metadata, tensors={**changes.metadata.tensors, **before.tensors})
    old = Rearranger(replace(source, metadata=both))
    guards: list[EqualTensors] = []
    for k, v, combined, moves in split_pairs(changes):
        if combined not in before.tensors:
            raise BadInputError(
                f"{manifest.path} does not describe the checkpoint beside it: it knows no {combined}",
                hint="--ignore-manifest combines by structure alone",
            )
        otherwise = f"{k.key} or {v.key} was changed since the split: they no longer make up {combined}"
        guards += old.equal(combined, moves, k.axis, otherwise)
    originals = {
        name: data
        for name, data in manifest.restore_files.items()
        if name in manifest.value["source"]["files"]
    }
    new = {name for name in source.files if name not in manifest.value["source"]["files"]}
    return Plan(
        operation="combine",
        options={**options, "restored": True},
        catalogue=replace(changes.model.logical, tensors=old.tensors, config=None),
        rewritten=(),
        carried=tuple(_carried(changes.model, new | set(originals))),
        generated=tuple(GeneratedFile(name, data) for name, data in sorted(originals.items())),
        guards=tuple(guards),
        manifest=_manifest(changes, list(originals)),
        warnings=source.warnings,
    )
