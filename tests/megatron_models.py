"""Genuine Megatron models for tests: one that loads and saves by itself, and several that are ranks of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from megatron_releases import release_folder

_SCRIPT = Path(__file__).with_name("megatron_gpt.py")
#: Megatron's arguments of a small model with everything: dense and MoE layers, a shared expert, MTP.
ARGUMENTS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "multi_latent_attention": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_topk": 2,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "rope_type": "rope",
    "rotary_base": 10000,
    "mtp_num_layers": 1,
    "vocab_size": 250,
    "padded_vocab_size": 256,
    "make_vocab_size_divisible_by": 64,
    "untie_embeddings_and_output_weights": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
}
#: What makes it a sparse one, from 0.19 on.
SPARSE: dict[str, Any] = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 8,
    "dsa_indexer_rope_interleaved": False,
}


class Model:
    """A release whose GPTModel loads and saves, in a process of its own."""

    def __init__(self, version: str, folder: Path, scratch: Path) -> None:
        self.version, self._scratch, self._count = version, scratch, 0
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(scratch / "stderr").open("w"),
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(timeout=60)

    def _file(self) -> Path:
        self._count += 1
        return self._scratch / f"{self._count}.safetensors"

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError((self._scratch / "stderr").read_text()[-4000:])
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"megatron-core {self.version}: {answer['error']}")
        return answer

    def load_model(self, *, tokens: list[int] | None = None, **where: Path) -> tuple[dict[str, Any], Any]:
        """Load ``path``, an iteration of torch_dist, or ``file``, a rank's; its state dict, and logits if asked."""
        tensors = self._file()
        request: dict[str, Any] = {
            "do": "load",
            "tensors": str(tensors),
            **{k: str(v) for k, v in where.items()},
        }
        answer = self._ask({**request, **({"tokens": tokens} if tokens else {})})
        from safetensors.torch import load_file

        return dict(load_file(tensors)), answer.get("logits")

    def save_model(self, out: Path, arguments: dict[str, Any]) -> dict[str, Any]:
        """Save a random model below ``out``, as ``dist`` and as ``torch``; its state dict."""
        tensors = self._file()
        self._ask({"do": "save", "args": arguments, "out": str(out), "tensors": str(tensors)})
        from safetensors.torch import load_file

        return dict(load_file(tensors))


@contextmanager
def megatron_model(version: str, scratch: Path) -> Iterator[Model]:
    """A release, for as long as the ``with`` statement lasts; skips where it is not there."""
    folder = release_folder(version)
    if folder is None:
        pytest.skip(f"megatron-core {version} is not there; `make test` unpacks it")
    release = Model(version, folder, scratch)
    try:
        yield release
    finally:
        release.close()


def run_ranks(version: str, arguments: dict[str, Any], out: Path, load: Path | None = None) -> None:
    """A model over ranks, which saves itself below ``out`` in both formats.

    It has random weights, or those of ``load``, an iteration in the older format.
    """
    folder = release_folder(version)
    if folder is None:
        pytest.skip(f"megatron-core {version} is not there; `make test` unpacks it")
    tp, pp, ep = (arguments[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline", "expert"))
    count = pp * max(tp, ep * arguments.get("expert_tensor_parallel_size", tp))
    with tempfile.TemporaryDirectory() as scratch:
        request = Path(scratch) / "request.json"
        request.write_text(
            json.dumps({"args": arguments, "out": str(out), **({"load": str(load)} if load else {})})
        )
        words = [sys.executable, "-W", "ignore", str(_SCRIPT), str(request)]
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [*words, str(rank), str(count), f"{scratch}/store"],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        try:
            said = [rank.communicate(timeout=240)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        failed = [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]
        if failed:
            raise AssertionError("\n".join(text[-3000:] for text in failed))
