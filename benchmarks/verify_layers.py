"""Splits (or reshards) and verifies one full-size layer of each model family, and prints the table of errors.

    python -m benchmarks.verify_layers [--families deepseek_v32,deepseek_v3,glm_5] [--tp 1,8] [--cp 1] [--tokens 4096]
                                       [--backend tilelang] [--backward] [--reshard] [--launch] [--results FILE.md]

Weights are random, with the shapes, the FP8 format and the configuration of the published model. Everything runs
through the commands a user has: ``mla-convert split``, then ``mla-convert verify``; with ``--reshard`` instead
``mla-convert reshard --tp N --layout split``, and each rank verifies from its own files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Family:
    """The attention of one published model."""

    title: str
    model_type: str
    hidden: int
    heads: int
    q_rank: int
    rank: int
    nope: int
    rope: int
    v: int
    index_heads: int | None
    extra: dict[str, Any]
    layers: int = 1  # only the first has an indexer of its own; the others attend to the keys it selects


FAMILIES = {
    "deepseek_v32": Family(
        "DeepSeek-V3.2", "deepseek_v32", 7168, 128, 1536, 512, 128, 64, 128, 64,
        {"rope_theta": 10000.0, "rope_scaling": _YARN},
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3", "deepseek_v3", 7168, 128, 1536, 512, 128, 64, 128, None,
        {"rope_theta": 10000.0, "rope_scaling": _YARN},
    ),
    "glm_5": Family(
        "GLM-5", "glm_moe_dsa", 6144, 64, 2048, 512, 192, 64, 256, 32,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    ),
    "glm_5_2": Family(
        "GLM-5.2", "glm_moe_dsa", 6144, 64, 2048, 512, 192, 64, 256, 32,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "indexer_types": ["full", "shared"]},
        layers=2,
    ),
}  # fmt: skip


def write_layer(folder: Path, family: Family, device: str) -> None:
    """One layer (or a few) in FP8 with 128x128 block scales, as a checkpoint of its own."""
    generator = torch.Generator(device).manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    prefix = ""

    def fp8(name: str, rows: int, columns: int) -> None:
        weight = torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, device=device)
        padded[:rows, :columns] = weight
        blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).view_as(padded)[:rows, :columns]
        tensors[f"{prefix}{name}.weight"] = codes.to(torch.float8_e4m3fn).cpu().contiguous()
        tensors[f"{prefix}{name}.weight_scale_inv"] = scale.cpu()

    def norm(name: str, size: int, dtype: torch.dtype = torch.bfloat16) -> None:
        weight = 1 + 0.1 * torch.randn(size, generator=generator, device=device)
        tensors[prefix + name] = weight.to(dtype).cpu()

    for layer in range(family.layers):
        prefix = f"model.layers.{layer}.self_attn."
        fp8("q_a_proj", family.q_rank, family.hidden)
        norm("q_a_layernorm.weight", family.q_rank)
        fp8("q_b_proj", family.heads * (family.nope + family.rope), family.q_rank)
        fp8("kv_a_proj_with_mqa", family.rank + family.rope, family.hidden)
        norm("kv_a_layernorm.weight", family.rank)
        fp8("kv_b_proj", family.heads * (family.nope + family.v), family.rank)
        fp8("o_proj", family.hidden, family.heads * family.v)
        if family.index_heads and layer == 0:
            fp8("indexer.wq_b", family.index_heads * 128, family.q_rank)
            fp8("indexer.wk", 128, family.hidden)
            norm("indexer.k_norm.weight", 128, torch.float32)
            bias = 0.1 * torch.randn(128, generator=generator, device=device)
            tensors[prefix + "indexer.k_norm.bias"] = bias.cpu()
            weights = torch.randn(family.index_heads, family.hidden, generator=generator, device=device)
            tensors[prefix + "indexer.weights_proj.weight"] = (weights * family.hidden**-0.5).bfloat16().cpu()
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "hidden_size": family.hidden,
        "num_hidden_layers": family.layers,
        "num_attention_heads": family.heads,
        "q_lora_rank": family.q_rank,
        "kv_lora_rank": family.rank,
        "qk_nope_head_dim": family.nope,
        "qk_rope_head_dim": family.rope,
        "v_head_dim": family.v,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        **family.extra,
    }
    if family.index_heads:
        config |= {"index_topk": 2048, "index_n_heads": family.index_heads, "index_head_dim": 128}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def command(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Run ``mla-convert`` with ``--json``; its exit code and its document."""
    run = subprocess.run(
        [sys.executable, "-m", "mla_convert", *arguments, "--json", "-q"], stdout=subprocess.PIPE, text=True
    )
    return run.returncode, json.loads(run.stdout) if run.stdout else {}


def convert(source: Path, target: Path, tp: int) -> int:
    """Split, or split and reshard in one go; the exit code."""
    how = ["reshard", "--tp", str(tp), "--layout", "split"] if tp > 1 else ["split"]
    code, _ = command(*how, str(source), "-o", str(target))
    return code


COLUMNS = (
    "model", "tp", "heads a rank", "attention", "cosine", "standard error", "absorbed error", "worst head",
    "worst row", "selection differs", "gradients", "control", "absorbed seconds", "seconds", "passed",
)  # fmt: skip


def lines(family: Family, tp: int, code: int, report: dict[str, Any]) -> list[list[str]]:
    """A line of the table for each layer."""
    if not report.get("layers"):
        return [[family.title, str(tp), *["-"] * (len(COLUMNS) - 3), f"exit {code}"]]
    return [line(family, tp, code, report, layer) for layer in report["layers"]]


def line(family: Family, tp: int, code: int, report: dict[str, Any], layer: dict[str, Any]) -> list[str]:
    """One line of the table."""
    selection, absorbed = layer["selection"], layer["absorbed"]
    control = next((check["passed"] for check in report["checks"] if check["level"] == "control"), None)
    return [
        family.title,
        str(tp),
        str(family.heads // tp),
        layer["kind"],
        f"{layer['cosine']:.7f}",
        f"{layer['standard']['relative']:.2e}",
        f"{absorbed['relative']:.2e}",
        f"{absorbed['worst_head']['relative']:.2e}",
        f"{absorbed['worst_row']['relative']:.2e}",
        _selection(selection) if selection else "-",
        _gradients(layer["gradients"]),
        "caught" if control else "-",
        f"{layer['absorbed_seconds']:.2f}",
        f"{layer['seconds']:.1f}",
        "yes" if report["passed"] and code == 0 else f"NO (exit {code})",
    ]


def _gradients(gradients: list[dict[str, Any]]) -> str:
    """How many are right, the lowest cosine with float64, and the largest error over its limit."""
    if not gradients:
        return "-"
    passed = sum(gradient["passed"] for gradient in gradients)
    lowest = min(gradient["absorbed"]["cosine"] for gradient in gradients)
    strain = max(gradient["absorbed"]["relative"] / gradient["limit"]["relative"] for gradient in gradients)
    return f"{passed} of {len(gradients)}, cosine {lowest:.6f}, error {strain:.2f} of its limit"


def _selection(selection: dict[str, Any]) -> str:
    """Keys that differ from the float64 selection, and the largest gap of their scores over its limit."""
    return (
        f"{selection['differing']} of {selection['selected']} (limit {selection['differing_limit']}), "
        f"gap {selection['worst_gap']:.3f} (limit {selection['tolerance']:.3f})"
    )


def markdown(rows: list[list[str]], settings: dict[str, Any], ran: dict[str, str], tokens: int) -> str:
    """The table with how it was made."""
    parts = ", ".join(f"{part}: {by}" for part, by in sorted(ran.items()))
    device = ", ".join(settings.get("devices", ["-"]))
    if settings.get("process_group"):
        parts += f"; {settings['processes']} processes over {settings['process_group']}"
    lines = [
        f"# Full-size layers, {date.today().isoformat()}",
        "",
        f"`python -m benchmarks.verify_layers {' '.join(sys.argv[1:])}`".replace(" `", "`"),
        "",
        f"{device}, {settings.get('dtype')}, {tokens} tokens, {parts}. Errors are relative to float64 "
        "(the norm of the difference over the norm of the reference); cosine is of the absorbed output with float64. "
        "The gap is between the scores of keys that only one selection holds, as a share of the spread of all scores.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(cells) + " |" for cells in rows),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Every family at every size; the exit code is 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--tp", default="1,8")
    parser.add_argument("--cp", default="1")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--reshard", action="store_true")
    parser.add_argument("--launch", action="store_true")
    parser.add_argument("--backend", default="tilelang")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    rows: list[list[str]] = []
    settings: dict[str, Any] = {}
    ran: dict[str, str] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in options.families.split(","):
        family = FAMILIES[name]
        with TemporaryDirectory() as folder:
            source = Path(folder) / name
            write_layer(source, family, device)
            for tp in map(int, options.tp.split(",")):
                converted = Path(folder) / f"converted-{tp}"
                code = convert(source, converted, tp if options.reshard else 1)
                if code:
                    print(f"{name}: the conversion failed with {code}", file=sys.stderr)
                    return 1
                wanted = ["--backward"] if options.backward else []
                wanted += ["--launch"] if options.launch and tp * int(options.cp) > 1 else []
                code, report = command(
                    "verify", str(converted), "--tp", str(tp), "--cp", options.cp, "--seq", str(options.tokens),
                    "--backend", options.backend, *wanted,
                )  # fmt: skip
                rows += (found := lines(family, tp, code, report))
                settings, ran = report.get("settings", settings), {**ran, **report.get("ran", {})}
                for cells in found:
                    print(" | ".join(cells), flush=True)
                for check in report.get("checks", []):
                    if check["passed"] is False:
                        print(f"  failed: {check['name']}: {check['summary']}", flush=True)
    text = markdown(rows, settings, ran, options.tokens)
    print(text)
    if options.results:
        options.results.write_text(text)
    return int(any(cells[-1] != "yes" for cells in rows))


if __name__ == "__main__":
    sys.exit(main())
