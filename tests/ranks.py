"""Runs a function of a test module in several processes that form a process group, over gloo or over NCCL."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def run_ranks(
    module: str, function: str, world: int, *arguments: Any, timeout: float = 120, backend: str = "gloo"
) -> list[Any]:
    """What ``module.function(*arguments)`` returns on each of ``world`` ranks; an error of one is an error here."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "call").write_bytes(pickle.dumps((module, function, arguments)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        words = [sys.executable, __file__, folder, backend, str(world)]
        ranks = [
            subprocess.Popen([*words, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        try:
            said = [rank.communicate(timeout=timeout)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        failed = [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]
        if failed:
            raise AssertionError("\n".join(failed))
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world)]


def _main(folder: Path, backend: str, world: int, rank: int) -> None:
    import torch.distributed as dist

    module, function, arguments = pickle.loads((folder / "call").read_bytes())
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        world_size=world,
        rank=rank,
        timeout=timedelta(seconds=60),
    )
    result = getattr(importlib.import_module(module), function)(*arguments)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
