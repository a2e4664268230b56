"""``reshard``: a pure function from a checkpoint, sharded or not, to the plan of it over any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mla_convert.conversion import describe_block, rewritten_file
from mla_convert.errors import CannotError, UsageError
from mla_convert.formats.deepseek import rank_file, to_deepseek
from mla_convert.formats.huggingface import INDEX_SUFFIX, rank_folder
from mla_convert.formats.huggingface_edit import MARK, drop_quantization, mark_layout, skip_modules
from mla_convert.geometry import AttentionBlock, Layout, find_blocks
from mla_convert.layouts import LaidOut, edit_layout, lay_out
from mla_convert.megatron.conversion import plan_to_megatron
from mla_convert.merging import ShardingMark
from mla_convert.plan import (
    CarriedFile,
    GeneratedFile,
    Plan,
    RewrittenFile,
    TargetTensor,
)
from mla_convert.sharding import ReshardOptions, Sharder, count_ranks, natural_order
from mla_convert.strict_json import dump_json
from mla_convert.whole import Format, Whole

#: Weights in one file of an output whose source does not tell which file they belong in.
FILE_BYTES = 5_000_000_000
_METADATA = {"format": "pt"}


def plan_reshard(whole: Whole, options: ReshardOptions) -> Plan:
    """Plan a checkpoint's tensors over ``options.tp`` ranks.

    Raises:
        CannotError: Not an MLA checkpoint, nothing to do, or a number of ranks that would cut through a head, an
            expert or a scale block; the message has the legal ones.
        BadInputError: The checkpoint contradicts itself.
    """
    format = options.to or whole.format
    if format.is_megatron:
        return plan_to_megatron(whole, options)
    if options.spec:
        raise UsageError("--spec is for Megatron's formats", hint="--to torch_dist or --to torch")
    if whole.megatron and whole.megatron.unresolved:
        raise whole.megatron.unresolved
    blocks = find_blocks(whole.logical, trust_shapes=options.trust_shapes)
    layouts = {block.layout for block in blocks}
    experts = options.experts if whole.experts and options.tp > 1 else whole.experts
    is_there = (options.tp, format, experts) == (whole.ranks, whole.format, whole.experts)
    is_laid_out = options.layout is None or layouts == {options.layout}
    if is_there and is_laid_out and not (options.dequantize and whole.mark.reblocked):
        raise CannotError(
            f"nothing to do: {whole.source.root} lies in {format} format on {count_ranks(whole.ranks)} already",
            hint="--tp, --to, --layout and --experts choose another",
        )
    laid_out = lay_out(whole.logical, whole.made_of, blocks, options.layout)
    sharder = Sharder.of(whole, laid_out, options, {block.prefix: block.heads for block in blocks})
    sharder.require_legal()
    files = list(_files(whole, laid_out, sharder, format))
    generated = [*_indexes(files, format, options.tp)]
    config = _config(whole, blocks, laid_out, sharder, format)
    if config:
        generated.append(
            GeneratedFile(whole.source.config.name if whole.source.config else "config.json", config)
        )
    taken = {file.name for file in generated}
    if whole.source.config:
        taken.add(whole.source.config.name)
    return Plan(
        operation="reshard",
        options=options.described(format),
        catalogue=whole.source,
        rewritten=tuple(files),
        carried=tuple(
            CarriedFile(other.name, other.path, other.identity.size, other.name.endswith(".safetensors"))
            for other in whole.source.others
            if other.name not in taken
        ),
        generated=tuple(sorted(generated, key=lambda file: file.name)),
        guards=(*whole.guards, *laid_out.guards),
        replicas=whole.replicas,
        hashed=tuple(sharder.lost),
        manifest={
            "layout": str(options.layout) if options.layout else _layout_name(layouts),
            "blocks": [describe_block(block) for block in blocks],
            "restore": {"headers": {}, "files": {}},
            "restore_tensors": [
                key for key in sharder.lost if key.rpartition(".")[2] not in ("weight", "bias")
            ],
        },
        warnings=(*whole.logical.warnings, *sharder.warnings()),
    )


def _layout_name(layouts: set[Layout]) -> str:
    return str(next(iter(layouts))) if len(layouts) == 1 else "mixed"


# Files


def _files(whole: Whole, laid_out: LaidOut, sharder: Sharder, format: Format) -> Iterator[RewrittenFile]:
    """The weight files, tensors in the order of the model whatever way they came."""
    names = sorted(laid_out.tensors, key=natural_order)
    ranks = sharder.options.tp
    homes = {} if format is Format.DEEPSEEK else _homes(whole, laid_out, names)
    ours = _deepseek_names(names, whole.mark.stem) if format is Format.DEEPSEEK else {}
    for rank in range(ranks):
        contents: dict[str, list[TargetTensor]] = {}
        for name in names:
            target = sharder.on_rank(rank, name)
            if target is None:
                continue
            if format is Format.DEEPSEEK:
                target = replace(target, spec=replace(target.spec, name=ours[name]))
                file = rank_file(rank, ranks)
            else:
                file = homes[name] if ranks == 1 else f"{rank_folder(rank, ranks)}/{homes[name]}"
            contents.setdefault(file, []).append(target)
        for file, targets in sorted(contents.items()):
            yield rewritten_file(file, targets, _METADATA, 0)


def _deepseek_names(names: Sequence[str], stem: str) -> dict[str, str]:
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        found[name] = new = to_deepseek(name, stem)
        if taken.setdefault(new, name) != name:
            raise CannotError(f"{name} and {taken[new]} would both be called {new} in DeepSeek's format")
    return found


def _homes(whole: Whole, laid_out: LaidOut, names: Sequence[str]) -> dict[str, str]:
    """The file of each tensor: where it came from, or files of a handy size."""
    if whole.homes:
        return {name: whole.homes[laid_out.came_from.get(name, name)] for name in names}
    groups: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size = laid_out.tensors[name].spec.nbytes
        if groups[-1] and filled + size > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return dict.fromkeys(names, "model.safetensors")
    return {
        name: f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number, group in enumerate(groups, 1)
        for name in group
    }


def _indexes(files: Sequence[RewrittenFile], format: Format, ranks: int) -> Iterator[GeneratedFile]:
    """An index beside the files of each folder that has more than one."""
    if format is Format.DEEPSEEK:
        return
    folders: dict[str, list[RewrittenFile]] = {}
    for file in files:
        folders.setdefault(file.name.rpartition("/")[0], []).append(file)
    for folder, held in folders.items():
        if len(held) == 1 and held[0].name.rpartition("/")[2] == "model.safetensors":
            continue
        weight_map = {t.spec.name: f.name.rpartition("/")[2] for f in held for t in f.tensors}
        total = sum(target.spec.nbytes for file in held for target in file.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        name = f"{folder}/model{INDEX_SUFFIX}" if folder else f"model{INDEX_SUFFIX}"
        yield GeneratedFile(name, dump_json(index))


# Configuration


def _config(
    whole: Whole, blocks: Sequence[AttentionBlock], laid_out: LaidOut, sharder: Sharder, format: Format
) -> bytes | None:
    """``config.json`` of the output; None if it has none. The source's own bytes if nothing changes."""
    options = sharder.options
    layouts = {options.layout} if options.layout else {block.layout for block in blocks}
    is_plain = layouts == {Layout.COMBINED}
    layout = None if is_plain else str(next(iter(layouts))) if len(layouts) == 1 else "mixed"
    edited = mark_layout(whole.config, layout)
    own = {name: size for name, size in laid_out.module_blocks.items() if size != sharder.block}
    own |= {name: blocks[2:] for name, blocks in sharder.reblocked.items()}
    own = {name: size for name, size in own.items() if name not in sharder.dequantised}
    edit_layout(edited, blocks, options.layout, own)
    if sharder.dequantised:
        skip_modules(edited, sorted(sharder.dequantised, key=natural_order))
        if all(m.scale_field is None or m.name in sharder.dequantised for m in sharder.modules.values()):
            drop_quantization(edited)
    if options.tp > 1 or format is Format.DEEPSEEK:
        mark = ShardingMark(whole.mark.stem, sharder.vocabulary, sharder.reblocked)
        edited[MARK] = {
            **edited.get(MARK, {}),
            "tensor_parallel": {
                "format": str(format),
                "ranks": options.tp,
                "experts": str(options.experts),
                **mark.to_json(),
            },
        }
    if whole.source.config and edited == whole.source.config.value:
        return whole.source.config.data
    return dump_json(edited) if edited else None
