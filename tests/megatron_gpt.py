"""A process in which a genuine Megatron GPTModel loads and saves checkpoints, on a CPU and one rank.

Run as ``python megatron_gpt.py`` with megatron-core on PYTHONPATH. Each line on stdin is a JSON request, each line on
stdout its answer. The model is built from the arguments in the checkpoint, with Megatron's local layer specs.

- ``load``: a torch_dist checkpoint into the model, by its own sharded state dict, strictly; or a rank's file of the
  older format, by ``load_state_dict``. The model's state dict goes to a safetensors file.
- ``save``: the model with random weights, as torch_dist and as the older format.
- ``logits``: what the model says about some tokens.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import megatron_process  # replaces Triton  # noqa: F401
import torch


def build(args: Namespace, stage: int | None = None) -> Any:
    """The model that a checkpoint's arguments describe, or what this rank holds of it (in one virtual stage)."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    values = vars(args)
    names = {field: field for field in MLATransformerConfig.__dataclass_fields__}
    names |= {"layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts"}
    fields = {
        field: values[name]
        for field, name in names.items()
        if name in values and field not in ("params_dtype", "bf16", "fp16", "num_query_groups", "kv_channels")
    }
    fields |= {
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "gated_linear_unit": values["swiglu"],
        "activation_func": torch.nn.functional.silu,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "sequence_parallel": values.get("tensor_model_parallel_size", 1) > 1,
        "pipeline_dtype": torch.float32,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }
    fields = {
        name: value for name, value in fields.items() if name in MLATransformerConfig.__dataclass_fields__
    }
    config = MLATransformerConfig(**fields)
    is_sparse = values.get("experimental_attention_variant") == "dsa"
    block, backend = _sparse_block(config, stage) if is_sparse else (_dense_block(config, stage), None)
    mtp = None
    if config.mtp_num_layers:
        if backend is not None:
            mtp = gpt_layer_specs.get_gpt_mtp_block_spec_for_backend(config, block, backend, vp_stage=stage)
        else:
            mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
                config, block, use_transformer_engine=False, vp_stage=stage
            )
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    torch.manual_seed(0)
    model = GPTModel(
        config,
        block,
        vocab_size=values["padded_vocab_size"],
        max_sequence_length=values["max_position_embeddings"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=not values["untie_embeddings_and_output_weights"],
        pre_process=is_first,
        post_process=is_last,
        mtp_block_spec=mtp,
        vp_stage=stage,
    )
    return model.eval()


def _dense_block(config: Any, stage: int | None) -> Any:
    """Megatron's local spec of latent attention, with a core attention for heads of two widths, which it lacks."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.module import MegatronModule

    class Core(MegatronModule):
        def __init__(self, config: Any, *_: Any, softmax_scale: float, **__: Any) -> None:
            super().__init__(config)
            self.scale = softmax_scale

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
        ) -> torch.Tensor:
            scores = torch.einsum("sbhd,tbhd->bhst", q, k) * self.scale
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            return torch.einsum("bhst,tbhv->sbhv", weights, v).flatten(2)

    if not isinstance(multi_latent_attention.TELinear, type):  # 0.16 asks for its type where there is none
        multi_latent_attention.TELinear = type("Absent", (), {})
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    for layer in block.layer_specs:
        parts = layer.submodules.self_attention.submodules
        parts.core_attention = Core
        if config.q_lora_rank is None:  # 0.19 refuses a norm that nothing uses
            parts.q_layernorm = IdentityOp
    return block


def _sparse_block(config: Any, stage: int | None) -> tuple[Any, Any]:
    """The spec of sparse attention, with a plain layer where Transformer Engine's would be: it is not on a CPU."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule

    class Whole(MegatronModule):
        def __init__(self, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) * 0.05)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return torch.nn.functional.linear(x, self.weight), None

    class Backend(LocalSpecProvider):
        def linear(self) -> type:
            return Whole

    backend = Backend()
    spec = specs.get_dsa_module_spec_for_backend(config, backend)
    spec.submodules.linear_q_down_proj = ColumnParallelLinear
    spec.submodules.linear_kv_down_proj = ColumnParallelLinear
    specs.get_dsa_module_spec_for_backend = lambda config, backend=None: spec
    specs._get_backend_spec_provider = lambda config: backend
    return specs.get_transformer_block_with_experimental_attention_variant_spec(config, stage), backend


def _allow_sequence_parallel() -> None:
    """PyTorch's norms know nothing of sequence parallelism, and Megatron refuses them with it; none is run here."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def new(kind: type, config: Any, *args: Any, **more: Any) -> Any:
        config = copy.copy(config)
        config.sequence_parallel = False
        return make(kind, config, *args, **more)

    WrappedTorchNorm.__new__ = new


def _common(folder: str) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_common_state_dict(folder)


def load(request: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    if "file" in request:
        held = torch.load(request["file"], weights_only=False)
        model = build(held["args"])
        model.load_state_dict(held["model"], strict=True)
    else:
        model = build(_common(request["path"])["args"])
        wanted = {"model": model.sharded_state_dict()}
        found = dist_checkpointing.load(wanted, request["path"], strict=StrictHandling.RAISE_UNEXPECTED)
        model.load_state_dict(found["model"], strict=True)
    _dump(model, request["tensors"])
    answer: dict[str, Any] = {}
    if "tokens" in request:
        answer["logits"] = logits(model, request["tokens"])
    return answer


def logits(model: Any, tokens: list[int]) -> list[list[float]]:
    ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    mask = torch.triu(torch.ones(len(tokens), len(tokens), dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        found = model(ids, positions, mask)
    return found[0].double().tolist()


def save(request: dict[str, Any]) -> dict[str, Any]:
    """The model with random weights: as torch_dist, and as the older format's one rank."""
    from megatron.core import dist_checkpointing

    args = Namespace(**request["args"])
    model = build(args)
    for number, (name, parameter) in enumerate((*model.named_parameters(), *model.named_buffers())):
        generator = torch.Generator().manual_seed(number)
        parameter.data.copy_(
            torch.randn(parameter.shape, generator=generator) * 0.05 + (parameter.dim() == 1)
        )
        del name
    common = {"args": args, "iteration": 3, "checkpoint_version": 3.0}
    folder = Path(request["out"]) / "dist" / "iter_0000003"
    folder.mkdir(parents=True)
    dist_checkpointing.save({**model.sharded_state_dict(), **common}, str(folder))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("3")
    rank = Path(request["out"]) / "torch" / "iter_0000003" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save({**common, "model": model.state_dict_for_save_checkpoint()}, rank / "model_optim_rng.pt")
    (rank.parent.parent / "latest_checkpointed_iteration.txt").write_text("3")
    _dump(model, request["tensors"])
    return {}


def ranks(request: dict[str, Any], rank: int) -> None:
    """One of several ranks: fills or loads its part of the model, and saves it in both formats.

    ``request`` has the arguments, and ``load``, an iteration in the older format, unless weights shall be random. The
    model is saved below ``out``: as torch_dist by all ranks together, and as this rank's file.
    """
    from megatron.core import dist_checkpointing, parallel_state

    _allow_sequence_parallel()
    args = Namespace(**request["args"])
    tp, pp, ep = (getattr(args, f"{n}_model_parallel_size") for n in ("tensor", "pipeline", "expert"))
    stages = args.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=stages,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=getattr(args, "expert_tensor_parallel_size", None),
    )
    mine = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    folder = (
        f"mp_rank_{mine[0]:02d}"
        + (f"_{mine[1]:03d}" if pp > 1 else "")
        + (f"_{mine[2]:03d}" if ep > 1 else "")
    )
    models = [build(args, stage) for stage in range(stages)] if stages else [build(args)]
    names = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
    if "load" in request:
        held = torch.load(f"{request['load']}/{folder}/model_optim_rng.pt", weights_only=False)
        for name, model in zip(names, models, strict=True):
            model.load_state_dict(held[name], strict=True)
    else:
        for number, model in enumerate(models):
            _fill(model, number, *mine)
    common = {"args": args, "iteration": 3, "checkpoint_version": 3.0}
    out = Path(request["out"])
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {n: m.sharded_state_dict(metadata=metadata) for n, m in zip(names, models, strict=True)}
    folders = out / "dist" / "iter_0000003", out / "torch" / "iter_0000003" / folder
    for path in folders:
        path.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save({**state, **common}, str(folders[0]))
    states = {n: m.state_dict_for_save_checkpoint() for n, m in zip(names, models, strict=True)}
    torch.save({**common, **states}, folders[1] / "model_optim_rng.pt")
    if rank == 0:
        for kind in ("dist", "torch"):
            (out / kind / "latest_checkpointed_iteration.txt").write_text("3")
    torch.distributed.barrier()


def _fill(model: Any, stage: int, tp: int, pp: int, ep: int) -> None:
    """Random weights: the same where ranks share a parameter, and different where each has its own part."""
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        is_expert = ".experts." in name
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        is_shared = name.startswith("embedding.")  # the first stage has it, and the one with the MTP layers
        place = (
            tp if is_cut else 0,
            0 if is_shared else pp,
            ep if is_expert else 0,
            0 if is_shared else stage,
        )
        seed = zlib.crc32(repr((name, place)).encode())
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(values * 0.05 + (parameter.dim() == 1))


def _dump(model: Any, path: str) -> None:
    from safetensors.torch import save_file

    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    save_file({name: value.contiguous() for name, value in state.items()}, path)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.Stream = lambda *_, **__: None  # type: ignore[assignment,misc]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    if len(sys.argv) > 1:
        file, rank, count, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(store, count), rank=rank, world_size=count
        )
        ranks(json.loads(Path(file).read_text()), rank)
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"save": save, "load": load}[request["do"]](request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
