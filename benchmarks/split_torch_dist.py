"""Times ``mla-convert split`` and ``combine`` of a torch_dist checkpoint against ``cp -r``, and measures its memory.

    python -m benchmarks.split_torch_dist --size 4GB --dir /scratch

The checkpoint is written by PyTorch, as Megatron's strategy writes it: attention with the dimensions of DeepSeek-V3,
the rest experts. Commands take turns; before each the last output is removed, everything is flushed and, where
permitted, the page cache is dropped. Needs two and a half times ``--size`` of space, and removes all of it afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from datetime import date
from pathlib import Path

from benchmarks import split as benchmark
from benchmarks.checkpoint import size_argument

H, N, P, V, R, Q, D, F = 128, 128, 64, 128, 512, 1536, 7168, 2048
ATTENTION = {
    "linear_q_down_proj": (Q, D),
    "linear_q_up_proj": (H * (N + P), Q),
    "linear_kv_down_proj": (R + P, D),
    "linear_kv_up_proj": (H * (N + V), R),
    "linear_proj": (D, H * V),
}
#: Bytes of the attention of one layer, and of one expert.
LAYER = 2 * sum(rows * columns for rows, columns in ATTENTION.values())
EXPERT = 2 * 3 * F * D


def make(folder: Path, size: int) -> None:
    """Write a checkpoint of about ``size`` bytes: a layer for each 11 GB, as in the model, the rest of it experts."""
    import torch
    import torch.distributed.checkpoint as dcp

    layers = max(1, round(size / 11e9))
    experts = max(1, (size // layers - LAYER) // EXPERT)
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(
            torch.bfloat16
        )

    state = {}
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}"
        for name, shape in ATTENTION.items():
            state[f"{prefix}.self_attention.{name}.weight"] = weight(*shape)
        state[f"{prefix}.mlp.experts.experts.linear_fc1.weight"] = weight(experts, 2 * F, D)
        state[f"{prefix}.mlp.experts.experts.linear_fc2.weight"] = weight(experts, D, F)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    args = Namespace(
        num_attention_heads=H, qk_head_dim=N, qk_pos_emb_head_dim=P, v_head_dim=V, kv_lora_rank=R
    )
    torch.save({"args": args, "iteration": 1}, folder / "common.pt")


def run(size: int, directory: Path, rounds: int) -> str:
    """Measure, and say what was found as a table."""
    with tempfile.TemporaryDirectory(prefix="mla-benchmark-", dir=directory) as name:
        root = Path(name)
        made = [
            sys.executable,
            "-m",
            "benchmarks.split_torch_dist",
            "--make",
            str(root / "model"),
            "--size",
            str(size),
        ]
        subprocess.run(made, check=True, cwd=Path(__file__).parent.parent)
        load = os.getloadavg()[0]
        outcome = benchmark.Outcome({}, benchmark._drop_caches())
        copy = root / "copy"
        contenders = [
            benchmark.Contender("cp -r", ("cp", "-r", root / "model", copy), copy),
            benchmark._tool("split", root / "model", root / "split"),
            benchmark._tool("combine", root / "split", root / "back"),
        ]
        benchmark._alternate(root, contenders, rounds, outcome)
        outcome.load = (load, os.getloadavg()[0])
        files = list((root / "model").iterdir())
        size = sum(path.stat().st_size for path in files)
        same = sum(benchmark._sha256(path) == benchmark._sha256(root / "back" / path.name) for path in files)
        up = json.loads(
            subprocess.run(
                [sys.executable, "-m", "mla_convert", "inspect", str(root / "model"), "--json"],
                check=True,
                capture_output=True,
            ).stdout
        )["bytes"]["up_projections"]
    peak = statistics.median(sample.peak for sample in outcome.series[1].samples)
    return "\n".join(
        [
            f"# Split of torch_dist against copying, {date.today().isoformat()}",
            "",
            f"    python -m benchmarks.split_torch_dist --size {size / 1e9:.1f}GB --rounds {rounds}",
            "",
            f"{benchmark._machine()}. Load average {outcome.load[0]:.1f} before and {outcome.load[1]:.1f} after.",
            "",
            f"{size / 1e9:.2f} GB in {len(files)} files, of which {up / size:.2%} are KV up-projections. Median of "
            f"{rounds} (lowest to highest), page cache {'dropped' if outcome.caches_dropped else 'kept'} before each.",
            "",
            "| file system | command | seconds | ratio | seconds, synced | ratio | CPU seconds | peak memory |",
            "|---|---|--:|--:|--:|--:|--:|--:|",
            *benchmark._rows(outcome.series),
            "",
            f"Peak memory of split: {peak / 1e6:.0f} MB. Split and combined again: {same} of {len(files)} files equal "
            "the original (SHA-256).",
            "",
        ]
    )


def main() -> None:
    """Entry point of ``python -m benchmarks.split_torch_dist``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split_torch_dist", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--size", type=size_argument, default="4GB", help="bytes of weights (default 4GB)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where to work")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default 3)")
    parser.add_argument("--results", type=Path, default=benchmark.RESULTS, help="folder for the table")
    parser.add_argument("--make", type=Path, help="only write the checkpoint, there")
    options = parser.parse_args()
    if options.make:
        make(options.make, options.size)
        return
    text = run(options.size, options.dir, options.rounds)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"split-torch-dist-{options.size / 1e9:g}GB-{date.today().isoformat()}.md").write_text(
        text
    )
    print(text, end="")


if __name__ == "__main__":
    main()
