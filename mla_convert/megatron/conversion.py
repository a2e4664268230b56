"""``reshard`` into one of Megatron's formats: a pure function from a checkpoint in any format to a plan."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mla_convert.catalogue import SourceTensor
from mla_convert.conversion import describe_block, refuse_layout
from mla_convert.errors import CannotError, UsageError
from mla_convert.formats.huggingface_edit import MARK, mark_layout
from mla_convert.formats.pickles import Instance, Persistent
from mla_convert.geometry import AttentionBlock, Layout, find_blocks
from mla_convert.layouts import lay_out
from mla_convert.megatron.arguments import namespace, to_arguments
from mla_convert.megatron.dist_writing import RELEASE, DistWriter, extra_state_keys
from mla_convert.megatron.eras import INTERLEAVED, NORM_KEYS, IndexerRows
from mla_convert.megatron.layout import RankLayout
from mla_convert.megatron.legacy_writing import RankWriter, padded
from mla_convert.megatron.names import Dictionary, count_layers, place_of
from mla_convert.megatron.reading import MegatronMark, MegatronSource
from mla_convert.megatron.translation import Blocks, LayerSpec, to_megatron
from mla_convert.plan import CarriedFile, EqualTensors, GeneratedFile, Plan, RewrittenFile, TargetTensor
from mla_convert.sharding import ReshardOptions
from mla_convert.strict_json import dump_json
from mla_convert.whole import Format, Whole

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
#: Megatron's default of --make-vocab-size-divisible-by.
_DIVISOR = 128
_QUANTISATION = ("quantization_config", "compression_config")


@dataclass(slots=True)
class _Model:
    """A checkpoint's weights in Megatron's terms, and what is written beside them."""

    tensors: dict[str, TargetTensor]
    arguments: dict[str, Any]
    common: dict[str, Any]
    mark: MegatronMark
    guards: list[EqualTensors] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    layout: RankLayout = field(default_factory=RankLayout)
    has_arguments: bool = True


def plan_to_megatron(whole: Whole, options: ReshardOptions) -> Plan:
    """Plan a checkpoint in the format ``options.to``, one of Megatron's.

    Raises:
        CannotError: A tensor has no place in Megatron's model, the numbers of ranks do not divide, or Megatron itself
            does what is asked for.
        BadInputError: The checkpoint contradicts itself.
    """
    format = options.to or whole.format
    if options.reblock:
        raise UsageError("--reblock: Megatron's checkpoints have no scale blocks", hint="--dequantize bf16")
    blocks = find_blocks(whole.logical, trust_shapes=options.trust_shapes)
    _refuse_idle(whole, blocks, options, format)
    model = _kept(whole, whole.megatron, options) if whole.megatron else _translated(whole, blocks, options)
    _fit_vocabulary(model, options)
    layouts = {options.layout} if options.layout else {block.layout for block in blocks}
    layout = str(next(iter(layouts))) if len(layouts) == 1 else "mixed"
    files, generated = _written(model, options, format, blocks)
    config = _config(whole, model, None if layouts == {Layout.COMBINED} else layout)
    if config:
        generated.append(config)
    taken = {file.name for file in generated}
    return Plan(
        operation="reshard",
        options={
            **options.described(format),
            "experts": "tp",
            "spec": str(options.spec) if options.spec else None,
        },
        catalogue=whole.source,
        rewritten=tuple(files),
        carried=tuple(
            CarriedFile(other.name, other.path, other.identity.size, is_weights=False)
            for other in whole.source.others
            if other.name not in taken
        ),
        generated=tuple(sorted(generated, key=lambda file: file.name)),
        guards=(*whole.guards, *model.guards),
        replicas=whole.replicas,
        manifest={
            "layout": layout,
            "blocks": [describe_block(block) for block in blocks],
            "restore": {"headers": {}, "files": {}},
        },
        warnings=(*whole.logical.warnings, *model.warnings),
    )


def plan_in_place(whole: Whole, options: ReshardOptions) -> Plan:
    """Plan the split or the recombination of an older-format checkpoint on the ranks it has.

    Raises:
        CannotError: It is laid out so already; else as :func:`plan_to_megatron`.
    """
    blocks = find_blocks(whole.logical, trust_shapes=options.trust_shapes)
    is_split = options.layout is Layout.SPLIT
    verb, other = ("split", "combine") if is_split else ("combine", "split")
    refuse_layout(blocks, (Layout.SPLIT, Layout.BOTH) if is_split else (Layout.COMBINED,), verb, other)
    return replace(plan_to_megatron(whole, options), operation=verb)


def _refuse_idle(
    whole: Whole, blocks: Sequence[AttentionBlock], options: ReshardOptions, format: Format
) -> None:
    """Refuse what changes nothing, and say what does."""
    changes_layout = options.layout is not None and {block.layout for block in blocks} != {options.layout}
    if whole.format is not format or changes_layout or options.pad_vocabulary:
        return
    if format is Format.TORCH_DIST:
        raise CannotError(
            "nothing to do: a torch_dist checkpoint knows no ranks, Megatron deals it out to any number of them when "
            "it loads it",
            hint="what helps: --pad-vocabulary for another vocabulary size, --to torch for a file for each rank, --to "
            "huggingface; split and combine for another layout",
        )
    if options.tp == whole.ranks:
        raise CannotError(
            f"nothing to do: {whole.source.root} lies on {whole.ranks} tensor-parallel ranks already",
            hint="--tp, --to and --layout choose another",
        )


# The weights


def _translated(whole: Whole, blocks: Sequence[AttentionBlock], options: ReshardOptions) -> _Model:
    """Weights of a checkpoint in another format."""
    laid_out = lay_out(whole.logical, whole.made_of, blocks, options.layout)
    stem = whole.mark.stem
    dictionary = Dictionary(count_layers(laid_out.tensors, stem), stem)
    scales = Blocks(whole.block, laid_out.module_blocks) if options.dequantize else None
    spec = options.spec or LayerSpec.TE
    found = to_megatron(laid_out.tensors, dictionary, spec, scales)
    names = found.tensors
    moe = {
        p.layer
        for name in names
        if (p := place_of(name)) and not p.is_mtp and p.entry.megatron == "mlp.router.weight"
    }
    mtp = {p.layer for name in names if (p := place_of(name)) and p.is_mtp}
    embedding = names.get(_VOCABULARY[0])
    arguments = to_arguments(
        whole.config,
        moe_layers=tuple(layer in moe for layer in range(dictionary.layers)),
        mtp_layers=len(mtp),
        has_indexer=any(".indexer." in name for name in names),
        has_expert_bias=any(name.endswith(".expert_bias") for name in names),
        vocabulary=embedding.spec.shape[0] if embedding else 0,
        tensor_parallel=options.tp,
        dtype=_usual_dtype(names.values()),
    )
    warnings = []
    if found.dequantised:
        warnings.append(f"{found.dequantised} FP8 weights are multiplied out to BF16")
    if any(block.q_rank is None for block in blocks) and spec is LayerSpec.TE:
        warnings.append(
            "the query has no low rank: Megatron's Transformer Engine spec may give linear_q_proj a norm of its own, "
            "which no published checkpoint has; use a spec without it"
        )
    return _Model(
        names,
        arguments,
        {"iteration": 0, "checkpoint_version": 3.0},
        MegatronMark(stem, tuple(found.shared)),
        [*laid_out.guards, *found.guards],
        warnings,
        RankLayout(
            tp=options.tp,
            states=_local_states(names) if spec is LayerSpec.LOCAL else None,
            is_grouped=spec is LayerSpec.TE,
            cuts_down_projections=spec is LayerSpec.LOCAL,
        ),
    )


def _usual_dtype(tensors: Any) -> str:
    sizes: dict[str, int] = {}
    for target in tensors:
        sizes[target.spec.dtype] = sizes.get(target.spec.dtype, 0) + target.spec.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="")


def _local_states(names: Mapping[str, TargetTensor]) -> frozenset[str]:
    """Megatron's own linear layers, which have an extra state as Transformer Engine's do; experts as number 0."""
    return frozenset(
        name.rpartition(".")[0]
        for name in names
        if (place := place_of(name))
        and place.layer is not None
        and place.expert in (None, 0)
        and (".linear_" in name or name.endswith(".eh_proj.weight"))
        and ".indexer." not in name
    )


def _kept(whole: Whole, source: MegatronSource, options: ReshardOptions) -> _Model:
    """Weights that are in Megatron's terms already."""
    if source.unresolved and source.rows is None:
        raise source.unresolved
    weights = source.weights
    if weights.left_behind and not options.drop_optimizer:
        raise CannotError(
            "the optimizer's state does not follow: in the older format it is numbered, not named, and between formats "
            "its layout changes",
            hint="give --drop-optimizer, and go on in Megatron with --no-load-optim",
        )
    names = dict(_norm_names(weights.specs))
    back = {new: old for old, new in names.items()}
    specs = {names.get(name, name): spec for name, spec in weights.specs.items()}
    logical = replace(
        whole.logical,
        tensors={n: SourceTensor(replace(s, name=n), "", 0, s.nbytes) for n, s in specs.items()},
    )
    made_of = {names.get(name, name): pieces for name, pieces in weights.made_of.items()}
    blocks = find_blocks(logical, trust_shapes=options.trust_shapes)
    laid_out = lay_out(logical, made_of, blocks, options.layout)
    is_split = any(name.endswith(".linear_k_up_proj.weight") for name in laid_out.tensors)
    tensors = {
        (name if is_split else back.get(name, name)): target for name, target in laid_out.tensors.items()
    }
    tensors = {name: replace(t, spec=replace(t.spec, name=name)) for name, t in tensors.items()}
    arguments = dict(weights.arguments)
    if source.rows is not None:
        arguments.pop(INTERLEAVED, None)
        if source.rows is not IndexerRows.ROPE_LAST:
            arguments[INTERLEAVED] = source.rows is IndexerRows.ROPE_FIRST_INTERLEAVED
    is_local = (options.spec or _spec_of(weights.specs)) is LayerSpec.LOCAL
    layout = source.layout or RankLayout(
        folder=source.folder,
        states=_local_states(tensors) if is_local else None,
        is_grouped=not is_local,
    )
    if layout.tp == 1:  # one rank does not show how several would hold them
        layout = replace(layout, cuts_down_projections=is_local)
    given = whole.source.root.name  # the iteration's own folder may be what was given
    folder = layout.folder or (given if given.startswith("iter_") else RELEASE)
    homes = {
        back.get(name, name) if not is_split else name: places
        for old, places in layout.homes.items()
        for name in (names.get(old, old),)
    }
    common = {
        name: value
        for name, value in weights.common.items()
        if name not in ("args", "optimizer", "rng_state", "content_metadata") and _is_plain(value)
    }
    warnings = []
    if is_split and names:
        warnings.append(
            f"{len(names)} fused norms get modules of their own, as absorbed attention needs them"
        )
    return _Model(
        tensors,
        arguments,
        {"iteration": 0, "checkpoint_version": 3.0, **common},
        MegatronMark.read(whole.source.config) or MegatronMark(),
        list(laid_out.guards),
        warnings,
        replace(layout, tp=options.tp, homes=homes, folder=folder),
        bool(weights.arguments),
    )


def _spec_of(names: Iterable[str]) -> LayerSpec:
    """The layer spec that a model's norms tell of; Transformer Engine's where no dense layer tells."""
    found = set(names)
    if any(name.endswith(".layer_norm_weight") for name in found):
        return LayerSpec.TE
    dense = [n for n in found if n.endswith(".mlp.linear_fc1.weight")]
    return LayerSpec.LOCAL if dense else LayerSpec.TE


def _norm_names(names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """For each fused norm of a latent: its name, and the one that it has as a module."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        base, _, projection = module.rpartition(".")
        found = NORM_KEYS.get((projection, leaf))
        if found and base.endswith("self_attention"):
            yield name, f"{base}.{found[0]}.{found[1]}"


def _is_plain(value: Any) -> bool:
    """True if a value holds no tensor, whose bytes would have to come along."""
    if isinstance(value, Persistent):
        return False
    if isinstance(value, Instance):
        return _is_plain(value.args) and _is_plain(value.state)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return all(_is_plain(item) for item in value) if isinstance(value, list | tuple) else True


# The vocabulary


def _fit_vocabulary(model: _Model, options: ReshardOptions) -> None:
    """Pad the vocabulary, or take padding away, for the ranks of the output."""
    held = [name for name in _VOCABULARY if name in model.tensors]
    if not held:
        return
    rows = model.tensors[held[0]].spec.shape[0]
    wanted = _vocabulary_rows(rows, model.arguments, options)
    if wanted == rows:
        return
    for name in held:
        model.tensors[name] = padded(model.tensors[name], wanted)
    if wanted > rows:
        model.warnings.append(f"the vocabulary of {rows} rows is padded with zeros to {wanted}")
        if model.mark.vocabulary is None:
            model.mark = replace(model.mark, vocabulary=rows)
    else:
        model.warnings.append(f"the padding of the vocabulary shrinks from {rows} to {wanted} rows")


def _vocabulary_rows(rows: int, arguments: Mapping[str, Any], options: ReshardOptions) -> int:
    """Rows for the output: as Megatron would pad, where the source was padded so; as they are otherwise."""
    names = ("vocab_size", "make_vocab_size_divisible_by", "tensor_model_parallel_size")
    found = [arguments.get(name) for name in names]
    true, divisor, before = (number if type(number) is int and number > 0 else 0 for number in found)
    if options.to in (None, Format.TORCH) and true and divisor and before:
        padded_for = [-(-true // (divisor * ranks)) * divisor * ranks for ranks in (before, options.tp)]
        if padded_for[0] == rows:
            return padded_for[1]
    multiple = _DIVISOR * options.tp
    return -(-rows // multiple) * multiple if options.pad_vocabulary else rows


# The files


def _written(
    model: _Model, options: ReshardOptions, format: Format, blocks: Sequence[AttentionBlock]
) -> tuple[list[RewrittenFile], list[GeneratedFile]]:
    embedding = model.tensors.get(_VOCABULARY[0])
    arguments = {**model.arguments, "ckpt_format": str(format)}
    if embedding:
        rows = embedding.spec.shape[0]
        arguments["padded_vocab_size"] = rows
        if rows % ((arguments.get("make_vocab_size_divisible_by") or _DIVISOR) * options.tp):
            arguments["make_vocab_size_divisible_by"] = max(1, rows // options.tp)
    arguments |= {"tensor_model_parallel_size": options.tp}
    if format is Format.TORCH:
        arguments |= {
            "pipeline_model_parallel_size": model.layout.pp,
            "expert_model_parallel_size": model.layout.ep,
            "expert_tensor_parallel_size": options.tp,
        }
        if model.layout.chunks == 1:
            arguments |= {
                "virtual_pipeline_model_parallel_size": None,
                "num_layers_per_virtual_pipeline_stage": None,
            }
    common = {**model.common, "args": namespace(arguments)}
    if not model.has_arguments:
        del common["args"]
        model.warnings.append("there are no arguments to note the number of ranks in")
    if format is Format.TORCH:
        if model.layout.fuses_input_norms:
            raise CannotError(
                "the input norms are fused with the down-projections (mla_down_proj_fusion), which this version reads "
                "and does not write",
                hint="--to torch_dist: Megatron's fused modules load that by their unfused names",
            )
        writer = RankWriter(model.tensors, model.layout, {block.prefix: block.heads for block in blocks})
        writer.require_legal()
        return list(writer.files(common)), [writer.tracker()]
    is_stacked = not any(place.expert is not None for name in model.tensors if (place := place_of(name)))
    dist = DistWriter(model.layout.folder + "/")
    dist.add_all(model.tensors, stacked=is_stacked)
    dist.add_empty_states(extra_state_keys(model.tensors, stacked=is_stacked))
    return list(dist.files()), list(dist.generated(common))


def _config(whole: Whole, model: _Model, layout: str | None) -> GeneratedFile | None:
    """The model's ``config.json``, with what Megatron's names do not tell; its weights are no longer quantised."""
    if whole.source.config is None:
        return None
    edited = mark_layout(copy.deepcopy(dict(whole.config)), layout)
    for level in (edited, *(value for value in edited.values() if isinstance(value, dict))):
        for key in _QUANTISATION:
            level.pop(key, None)
    edited[MARK] = {**edited.get(MARK, {}), "megatron": model.mark.to_json()}
    return GeneratedFile(whole.source.config.name.rpartition("/")[2], dump_json(edited))
