"""One of Megatron's own attention modules, saved or loaded as torch_dist, and run.

Run as ``python megatron_attention.py REQUEST`` with megatron-core on PYTHONPATH. The request is a JSON file:
``module`` (``standard``: MLASelfAttention, or ``absorbed``: AbsorbedMLASelfAttention), ``load`` (a checkpoint that the
module's own sharded state dict is loaded from), ``save`` (where to save it) and ``output`` (a safetensors file for what
the module gives for a fixed input). On a CPU there is no Transformer Engine, so the local spec is used, with a core
attention for heads of two widths, which that lacks. Everything is float64.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import megatron_process as base  # replaces Triton
import torch

PREFIX = "decoder.layers.0.self_attention."


def core(absorbed: bool, rank: int) -> type:
    """Causal softmax attention; where the latent is both key and value, its first ``rank`` channels are the value."""
    from megatron.core.transformer.module import MegatronModule

    class Core(MegatronModule):
        def __init__(self, config: Any, *_: Any, softmax_scale: float, **__: Any) -> None:
            super().__init__(config)
            self.scale = softmax_scale

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: Any, *_: Any, **__: Any) -> torch.Tensor:
            v = k[..., :rank] if absorbed else v
            k, v = (t.expand(-1, -1, q.shape[2], -1) for t in (k, v))
            scores = torch.einsum("sbhd,tbhd->bhst", q, k) * self.scale
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            return torch.einsum("bhst,tbhv->sbhv", weights, v).flatten(2)

    return Core


def build(kind: str) -> Any:
    """The module, in float64."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=base.D,
        num_attention_heads=base.H,
        q_lora_rank=base.Q,
        kv_lora_rank=base.R,
        qk_head_dim=base.N,
        qk_pos_emb_head_dim=base.P,
        v_head_dim=base.V,
        rope_type="rope",
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = absorbed_mla.TELinear = type("Absent", (), {})
    layer = gpt_layer_specs.get_gpt_layer_local_spec(
        multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm"
    )
    spec = layer.submodules.self_attention
    parts = spec.submodules
    parts.core_attention = core(kind == "absorbed", base.R)
    if kind == "absorbed":
        up = parts.linear_kv_up_proj
        fields = {name: getattr(parts, name) for name in vars(parts) if name != "linear_kv_up_proj"}
        known = absorbed_mla.AbsorbedMLASelfAttentionSubmodules.__dataclass_fields__
        fields = {name: value for name, value in fields.items() if name in known}
        split = absorbed_mla.AbsorbedMLASelfAttentionSubmodules(
            linear_k_up_proj=up, linear_v_up_proj=up, **fields
        )
        spec = ModuleSpec(absorbed_mla.AbsorbedMLASelfAttention, params=spec.params, submodules=split)
    torch.manual_seed(1 if kind == "standard" else 2)
    module = build_module(spec, config=config, layer_number=1).double().eval()
    for name, parameter in module.named_parameters():
        if "layernorm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    os.dup2(2, 1)
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import dist_checkpointing, parallel_state
    from safetensors.torch import save_file

    parallel_state.initialize_model_parallel()
    module = build(request["module"])
    sharded = module.sharded_state_dict(prefix=PREFIX)
    if request.get("load"):
        loaded = dist_checkpointing.load(sharded, request["load"])
        state = {
            name.removeprefix(PREFIX): value for name, value in loaded.items() if name.startswith(PREFIX)
        }
        module.load_state_dict(state)
    if request.get("save"):
        Path(request["save"]).mkdir(parents=True)
        common = {"args": base.arguments(num_layers=1), "iteration": 1}
        dist_checkpointing.save({**module.sharded_state_dict(prefix=PREFIX), **common}, request["save"])
    x = torch.randn(9, 2, base.D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        output, _ = module(x, None)
    save_file({"output": output.contiguous()}, request["output"])


if __name__ == "__main__":
    main()
