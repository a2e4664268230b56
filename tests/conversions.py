"""Small checkpoints written by hand, and the real command run on them: what the tests of whole runs share.

Nothing here loads torch or transformers, so a child process starts in a quarter of a second.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from mla_convert.cli import app, main
from mla_convert.formats.safetensors import build_header
from mla_convert.tensors import TensorSpec

HEADS, NOPE, ROPE, V, RANK, HIDDEN = 4, 16, 8, 16, 32, 64
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "kv_lora_rank": RANK,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 3,
    "q_lora_rank": None,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": V,
}
#: File names of ``write_checkpoint``: three shards with attention, two without, and companions.
REWRITTEN = tuple(f"model-{n}.safetensors" for n in range(1, 4))
CARRIED_WEIGHTS = ("model-4.safetensors", "model-5.safetensors")
OTHERS = ("code/modeling.py", "generation_config.json", "tokenizer.json")
INDEX = "model.safetensors.index.json"
_ENVIRONMENT = (
    "NO_COLOR",
    "FORCE_COLOR",
    "COLUMNS",
    "TERM",
    "PYTHONIOENCODING",
    "LC_ALL",
    "MLA_CONVERT_DEBUG",
)


def attention(layer: int) -> list[TensorSpec]:
    """The tensors of one attention block."""
    prefix = f"model.layers.{layer}.self_attn."
    shapes = {
        "kv_a_proj_with_mqa": (RANK + ROPE, HIDDEN),
        "kv_b_proj": (HEADS * (NOPE + V), RANK),
        "o_proj": (HIDDEN, HEADS * V),
        "q_proj": (HEADS * (NOPE + ROPE), HIDDEN),
    }
    return [TensorSpec(f"{prefix}{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def write_shard(path: Path, specs: Sequence[TensorSpec], seed: int = 0) -> None:
    """A safetensors file of random bytes, the same each time."""
    data = random.Random(f"{path.name} {seed}").randbytes(sum(spec.nbytes for spec in specs))
    path.write_bytes(build_header(specs, {"format": "pt"}) + data)


def write_checkpoint(folder: Path, extra: Sequence[str] = (), seed: int = 0) -> Path:
    """Three layers, one a shard; two shards of other tensors (one named by ``extra``); index and companions."""
    folder.mkdir(parents=True)
    shards: dict[str, list[TensorSpec]] = {name: attention(n) for n, name in enumerate(REWRITTEN)}
    shards[CARRIED_WEIGHTS[0]] = [TensorSpec("model.embed_tokens.weight", "BF16", (256, HIDDEN))]
    names = ["lm_head.weight", *extra]
    shards[CARRIED_WEIGHTS[1]] = [TensorSpec(name, "BF16", (64, HIDDEN)) for name in names]
    for name, specs in shards.items():
        write_shard(folder / name, specs, seed)
    weight_map = {spec.name: name for name, specs in shards.items() for spec in specs}
    total = sum(spec.nbytes for specs in shards.values() for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    for name in OTHERS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{name}\n" * 50)
    return folder


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A temporary folder in memory, where hundreds of fsyncs cost nothing; on disk if there is no such place."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mla-convert-", dir=memory) as folder:
        yield Path(folder)


def write_large(path: Path, size: int) -> Path:
    """One file of about ``size`` bytes with one small block; the rest is a hole that reads as zeros."""
    rows = (size - (1 << 20)) // 8192
    specs = [*attention(0), TensorSpec("model.embed_tokens.weight", "BF16", (rows, 4096))]
    header = build_header(specs)
    with path.open("wb") as file:
        file.write(header + random.Random(0).randbytes(1 << 16))
        file.truncate(len(header) + sum(spec.nbytes for spec in specs))
    return path


def snapshot(folder: Path) -> dict[str, tuple[bytes | None, int, int, int]]:
    """Every path below ``folder``: content, mode, mtime and inode. The folder's own entry is ``.``."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (data, status.st_mode, status.st_mtime_ns, status.st_ino)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``, by relative name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def leftovers(folder: Path) -> list[str]:
    """What a conversion into ``folder`` left behind: staging folders, locks, temporary files."""
    return sorted(path.name for path in folder.iterdir() if ".mla-convert-" in path.name)


def manifest(output: Path) -> dict[str, Any]:
    """The manifest of an output."""
    value: dict[str, Any] = json.loads((output / "mla-convert.json").read_bytes())
    return value


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what changes how output looks."""
    return {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT} | changes


def command(*arguments: str | Path) -> list[str]:
    """The real command, as installed."""
    return [str(Path(sys.executable).with_name("mla-convert")), *map(str, arguments)]


def run_process(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own, from the start of the interpreter."""
    options = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 120} | options
    return subprocess.run(command(*arguments), cwd=cwd, env=environment(**(env or {})), **options)


@functools.cache
def _import_everything() -> None:
    """Let the command meet every lazy import once, so that its forked children need not."""
    with memory_folder() as folder:
        write_checkpoint(folder / "model")
        CliRunner().invoke(app, ["inspect", str(folder / "model")])
        CliRunner().invoke(app, ["split", str(folder / "model"), "--dry-run"])


def run(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As ``run_process``, but forked from this process, which has imported everything: twenty times quicker."""
    _import_everything()
    words = list(map(str, arguments))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
                sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
                sys.argv = ["mla-convert", *words]
                os.environ.clear()
                os.environ.update(environment(**(env or {})))
                os.chdir(cwd or ".")
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8"))
    return subprocess.CompletedProcess(words, code, *texts)


def fails(code: int, *arguments: str | Path, real: bool = False, **options: Any) -> str:
    """Run the command, which must exit with ``code``, print no result and no traceback; its stderr."""
    done = (run_process if real else run)(*arguments, **options)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr
