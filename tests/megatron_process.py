"""A process in which real megatron-core saves and loads torch_dist checkpoints, on a CPU.

Run as ``python megatron_process.py RANK RANKS STORE`` with megatron-core on PYTHONPATH; the ranks are data-parallel,
and each of them has to be given the same requests. Each line on stdin is a JSON request, each line
on stdout its answer. Requests: ``save`` (a model described by `Recipe`), ``load`` (every tensor, object and the common
state of a folder, through Megatron's own loader), ``indexer`` (scores of Megatron's own indexer). Tensors travel as
safetensors files.

Three things of a GPU machine are replaced: Triton, which Megatron imports but a CPU never calls; the device that its
writer asks for; and a call of torch.cuda.synchronize. numpy.product, which numpy 2 dropped, is what releases before
0.16 call.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import json
import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy
import torch

warnings.simplefilter("ignore")


class _Absent:
    """Stands for Triton: any attribute, any call, any decorator."""

    __version__ = "0"

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not keywords else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


_import = builtins.__import__


def _without_triton(name: str, globals: Any = None, *rest: Any, **keywords: Any) -> Any:
    is_megatron = str((globals or {}).get("__name__")).startswith("megatron.")
    if name.partition(".")[0] == "triton" and is_megatron:
        return _Absent()
    return _import(name, globals, *rest, **keywords)


builtins.__import__ = _without_triton

#: Small dims: H heads, N nope, P rope, V value, R rank, Q query rank, D hidden; J index heads of width W.
H, N, P, V, R, Q, D, J, W = 4, 8, 4, 12, 16, 24, 32, 2, 8
EXPERTS, FFN = 2, 10


def arguments(**more: Any) -> Namespace:
    """Megatron's arguments, as far as they matter here, with an enumeration and dtypes among them."""
    from megatron.core.transformer.enums import AttnBackend

    return Namespace(
        num_attention_heads=H,
        qk_head_dim=N,
        qk_pos_emb_head_dim=P,
        v_head_dim=V,
        kv_lora_rank=R,
        q_lora_rank=Q,
        hidden_size=D,
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.auto,
        tensor_model_parallel_size=2,
        **more,
    )


def layer_tensors(
    recipe: dict[str, Any], *, indexer: bool, moe: bool
) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Shape and tensor-parallel axis of every tensor of a layer, by its name inside it."""
    a = "self_attention."
    up = {f"{a}linear_kv_up_proj.weight": ((H * (N + V), R), 0)}
    if recipe["layout"] == "split":
        up = {f"{a}linear_k_up_proj.weight": ((H * N, R), 0), f"{a}linear_v_up_proj.weight": ((H * V, R), 0)}
    norms = {f"{a}q_layernorm.weight": ((Q,), None), f"{a}kv_layernorm.weight": ((R,), None)}
    if recipe["norms"] == "fused":
        norms = {
            f"{a}linear_q_up_proj.layer_norm_weight": ((Q,), None),
            f"{a}linear_kv_up_proj.layer_norm_weight": ((R,), None),
        }
    index = {
        f"{a}core_attention.indexer.linear_wq_b.weight": ((J * W, Q), None),
        f"{a}core_attention.indexer.linear_wk.weight": ((W, D), None),
        f"{a}core_attention.indexer.k_norm.weight": ((W,), None),
        f"{a}core_attention.indexer.k_norm.bias": ((W,), None),
        f"{a}core_attention.indexer.linear_weights_proj.weight": ((J, D), None),
    }
    mlp = {
        "mlp.linear_fc1.layer_norm_weight": ((D,), None),
        "mlp.linear_fc1.weight": ((2 * FFN, D), 0),
        "mlp.linear_fc2.weight": ((D, FFN), 1),
    }
    if moe:
        mlp = {
            "pre_mlp_layernorm.weight": ((D,), None),
            "mlp.router.weight": ((EXPERTS, D), None),
            "mlp.router.expert_bias": ((EXPERTS,), None),
        }
    return {
        "input_layernorm.weight": ((D,), None),
        f"{a}linear_q_down_proj.weight": ((Q, D), None),
        f"{a}linear_q_up_proj.weight": ((H * (N + P), Q), 0),
        f"{a}linear_kv_down_proj.weight": ((R + P, D), None),
        f"{a}linear_proj.weight": ((D, H * V), 1),
        **up,
        **norms,
        **(index if indexer else {}),
        **mlp,
    }


def build(recipe: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A sharded state dict, and the same tensors whole, by key."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    me, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(recipe["seed"])
    state: dict[str, Any] = {}
    whole: dict[str, torch.Tensor] = {}
    tp, layers = recipe["tp"], recipe["layers"]

    def add(key: str, tensor: torch.Tensor, axis: int | None, layer: int | None = None) -> None:
        first = [] if layer is None else [(0, layer, layers)]
        prepended = len(first)
        if layer is None:
            whole[key] = tensor
        else:
            whole.setdefault(key, torch.empty(layers, *tensor.shape, dtype=tensor.dtype))[layer] = tensor
        is_cut = axis is not None and tensor.shape[axis] % tp == 0
        parts = list(tensor.chunk(tp, axis)) if is_cut else [tensor]
        for rank, part in enumerate(parts):
            along = [] if len(parts) == 1 else [(axis + prepended, rank, tp)]
            if recipe["optimizer"] == "model_space" and key.startswith("optimizer."):
                # The first data-parallel rank ends anywhere, also inside a row.
                middle = part.numel() // 3 if world > 1 else part.numel()
                extent = slice(0, middle) if me == 0 else slice(middle, part.numel())
                state[f"{key}|{layer}|{rank}"] = ShardedTensor.from_rank_offsets_flat(
                    key,
                    part.reshape(-1)[extent].clone(),
                    tuple(part.shape),
                    *first,
                    *along,
                    prepend_axis_num=prepended,
                    flattened_range=extent,
                    replica_id=0,
                )
                continue
            state[f"{key}|{layer}|{rank}"] = ShardedTensor.from_rank_offsets(
                key, part.contiguous(), *first, *along, prepend_axis_num=prepended, replica_id=me
            )

    def add_parameter(key: str, shape: tuple[int, ...], axis: int | None, layer: int | None = None) -> None:
        values = torch.randn(shape, generator=generator)
        is_float = key.endswith("expert_bias")
        add(key, values if is_float else values.bfloat16(), axis, layer)
        names = {
            "fully_reshardable": ("param", "exp_avg", "exp_avg_sq"),
            "whole": ("fp32_param", "exp_avg"),
            "model_space": ("fp32_param", "exp_avg"),
        }
        for name in names.get(recipe["optimizer"], ()):
            add(f"optimizer.state.{name}.{key}", torch.randn(shape, generator=generator), axis, layer)

    def add_state(key: str, number: int = 0, count: int = 1) -> None:
        value = torch.empty(0, dtype=torch.uint8)
        if recipe["extra"] == "delayed":
            value = delayed_scaling()
        state[f"{key}|{number}"] = ShardedObject(
            f"{key}._extra_state", value, (count,), (number,), replica_id=me
        )

    def add_layer(prefix: str, layer: int, stacked: bool, *, indexer: bool, moe: bool) -> None:
        base = prefix if stacked else f"{prefix}{layer}."
        for name, (shape, axis) in layer_tensors(recipe, indexer=indexer, moe=moe).items():
            add_parameter(base + name, shape, axis, layer if stacked else None)
        if moe:
            add_parameter(f"{base}mlp.experts.experts.linear_fc1.weight", (EXPERTS, 2 * FFN, D), None)
        if recipe["extra"] != "none":
            for name in (
                n for n in layer_tensors(recipe, indexer=False, moe=moe) if n.endswith("_proj.weight")
            ):
                add_state(base + name.removesuffix(".weight"), *((layer, layers) if stacked else (0, 1)))

    add_parameter("embedding.word_embeddings.weight", (64, D), 0)
    for layer in range(layers):
        has_indexer = recipe["dsa"] and layer != 1  # as where layers share one
        add_layer(
            "decoder.layers.", layer, recipe["stacked"], indexer=has_indexer, moe=recipe["moe"] and layer > 0
        )
    if recipe["mtp"]:
        add_parameter("mtp.layers.0.eh_proj.weight", (D, 2 * D), 0)
        for name, (shape, axis) in layer_tensors(recipe, indexer=recipe["dsa"], moe=False).items():
            add_parameter(f"mtp.layers.0.transformer_layer.{name}", shape, axis)
    add_parameter("decoder.final_layernorm.weight", (D,), None)
    add_parameter("output_layer.weight", (64, D), 0)
    state["rng"] = ShardedObject("rng_state", [{"random": 1}], (1, 1), (0, 0), replica_id=me)
    if recipe["optimizer"] == "dp_reshardable":
        key = "optimizer.distributed.dp_group_idx_0"
        bucket = f"{key}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
        for name in ("param", "exp_avg", "exp_avg_sq"):
            add(f"{bucket}.{name}", torch.randn(512, generator=generator), None)
        state["groups"] = ShardedObject(f"{key}.optimizer", {"param_groups": []}, (1,), (0,), replica_id=me)
    return state, whole


def delayed_scaling() -> torch.Tensor:
    """What Transformer Engine 2 saves for a linear layer with delayed scaling."""
    import pickle

    payload = {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(16, 3), "extra_fp8_variables": {}}
    return torch.frombuffer(bytearray(pickle.dumps(payload)), dtype=torch.uint8)


def save(request: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from safetensors.torch import save_file

    recipe = request["recipe"]
    state, whole = build(recipe)
    common: dict[str, Any] = {"iteration": 7, "checkpoint_version": 3.0}
    if recipe["arguments"] is not None:
        common["args"] = arguments(**recipe["arguments"])
    if recipe["optimizer"] != "none":
        common["optimizer"] = {"param_groups": [{"lr": 1e-3, "step": 5, "betas": (0.9, 0.95)}]}
    out = Path(request["out"])
    out.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({**state, **common}, request["out"])
    save_file(whole, request["tensors"])
    return {}


def load(request: dict[str, Any]) -> dict[str, Any]:
    """Everything in a folder, by Megatron's own reading of what is there."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from safetensors.torch import save_file

    folder, me = request["path"], torch.distributed.get_rank()
    listed = (
        dist_checkpointing.load_sharded_metadata(folder)
        if hasattr(dist_checkpointing, "load_sharded_metadata")
        else None
    )
    if listed is None:
        from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

        listed = load_sharded_metadata(folder)
    wanted: dict[str, Any] = {}
    for key, entry in listed.items():
        if isinstance(entry, ShardedObject):
            if entry.key != "common_state":
                wanted[key] = ShardedObject(
                    entry.key, None, entry.global_shape, entry.global_offset, replica_id=me
                )
        elif getattr(entry, "flattened_range", None) is not None:
            flat = torch.zeros(entry.flattened_range.stop, dtype=entry.dtype)
            wanted[key] = ShardedTensor.from_rank_offsets_flat(
                key, flat, entry.global_shape, flattened_range=entry.flattened_range, replica_id=me
            )
        else:
            tensor = torch.zeros(entry.global_shape, dtype=entry.dtype)
            wanted[key] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=me)
    keys = list(wanted)
    loaded = dist_checkpointing.load(wanted, folder, strict=StrictHandling.RAISE_ALL)
    tensors = {key: loaded.pop(key) for key in keys if not isinstance(listed[key], ShardedObject)}
    objects = {key: describe(loaded.pop(key)) for key in keys if isinstance(listed[key], ShardedObject)}
    shaped = {key: tensor.reshape(listed[key].global_shape).contiguous() for key, tensor in tensors.items()}
    save_file(shaped, request["tensors"])
    return {"objects": objects, "common": describe(loaded)}


def indexer(request: dict[str, Any]) -> dict[str, Any]:
    """Scores of Megatron's own indexer, in float64, with the weights of a layer.

    Its linear layers and its norm are PyTorch's (Megatron's default ones need a GPU), and the Hadamard rotation, which
    is orthogonal and so leaves scores alone, is left out.
    """
    from types import SimpleNamespace

    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from safetensors.torch import load_file, save_file

    class Linear(torch.nn.Linear):
        def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
            super().__init__(inputs, outputs, bias=False, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), None

    class Norm(torch.nn.LayerNorm):
        def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
            super().__init__(hidden_size, eps, dtype=torch.float64)

    more = {} if request["interleaved"] is None else {"dsa_indexer_rope_interleaved": request["interleaved"]}
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=H,
        q_lora_rank=Q,
        kv_lora_rank=R,
        qk_head_dim=N,
        qk_pos_emb_head_dim=P,
        v_head_dim=V,
        rope_type="rope",
        dsa_indexer_n_heads=J,
        dsa_indexer_head_dim=W,
        dsa_indexer_topk=4,
        **more,
    )
    dsa.rotate_activation = lambda x: x
    world = torch.distributed.group.WORLD
    linear = ModuleSpec(module=Linear)
    module = dsa.DSAIndexer(
        config,
        dsa.DSAIndexerSubmodules(
            linear_wq_b=linear, linear_wk=linear, k_norm=ModuleSpec(module=Norm), linear_weights_proj=linear
        ),
        SimpleNamespace(tp=world, cp=world),
    )
    weights = load_file(request["weights"])
    module.load_state_dict({name: tensor.double() for name, tensor in weights.items()})
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(24, 1, D, generator=generator, dtype=torch.float64)
    query = torch.randn(24, 1, Q, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        scores, chosen = module.forward_with_scores(x, query)
    save_file({"scores": scores.contiguous(), "chosen": chosen.contiguous()}, request["tensors"])
    return {}


def describe(value: Any) -> str:
    """A value as text that says all about it."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"tensor {value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    if isinstance(value, Namespace):
        return f"Namespace {describe(vars(value))}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} [" + ", ".join(describe(item) for item in value) + "]"
    if isinstance(value, io.BytesIO):
        return f"BytesIO {value.getvalue()!r}"
    return repr(value)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    numpy.product = numpy.prod
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = torch.distributed.FileStore(path, world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"save": save, "load": load, "indexer": indexer}[request["do"]](request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
