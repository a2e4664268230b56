"""Kernels compiled ahead: which ones, by how many processes at once, and what stops it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conversions import run, run_process
from test_module_gpu import SPARSE

pytest.importorskip("tilelang", reason="TileLang is not installed (it is for Linux only)")

from mla_convert.demo_model import write_demo_checkpoint
from mla_convert.errors import CannotError, LocalIOError
from mla_convert.progress import SilentProgress
from mla_convert.runtime import kernels as kernel_modules
from mla_convert.runtime.kernels import (
    _common,
    dense_mla,
    indexer_logits,
    indexer_loss,
    sparse_mla,
    sparse_mla_backward,
    topk,
)
from mla_convert.runtime.kernels.variants import Variant, variants
from mla_convert.warmup import build, warmup

needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on PATH to compile kernels with")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warmup") / "demo"
    write_demo_checkpoint(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, for the processes that a test starts."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"


def compiled_keys(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[Any]:
    """What the listed kernels would compile, by the keys that ``compiled`` gets."""
    keys = set()

    def record(key: Any, build: Any, **configs: Any) -> None:
        keys.add(key)

    for module in (dense_mla, indexer_logits, indexer_loss, sparse_mla, sparse_mla_backward, topk):
        monkeypatch.setattr(module, "compiled", record)

    def build_here(wanted: Any, workers: Any, progress: Any) -> dict[str, float]:
        for variant in wanted:
            variant.build()
        return {variant.name: 0.0 for variant in wanted}

    monkeypatch.setattr("mla_convert.warmup.build", build_here)
    monkeypatch.setattr("mla_convert.warmup._cache_folder", lambda **_: Path())
    warmup(checkpoint, **options)
    return keys


def test_every_kind_of_kernel_is_listed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of all calls of ``compiled`` in the sources begin with a kind, and every kind is among the keys."""
    keys = compiled_keys(checkpoint, monkeypatch)
    for variant in variants(
        replace(SPARSE, heads=64), torch.bfloat16
    ):  # more heads, and dims that FP8 rows have
        variant.build()
    kinds = {key[0] if isinstance(key, tuple) else key for key in keys}
    sources = [path.read_text() for path in Path(*kernel_modules.__path__).glob("*.py")]
    assert len(sources) > 10
    missing = [kind for kind in kinds if not any(f'"{kind}"' in source for source in sources)]
    assert not missing
    builders = sum(source.count("return compiled(") for source in sources)
    assert builders >= 10
    assert len(kinds) >= builders - 3  # some builders have two branches under one kind


def test_ranks_and_dtype_choose_the_programs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = compiled_keys(checkpoint, monkeypatch, tp=1, dtype="float16")
    assert ("few", 8, 256, 64, "float16") in keys
    assert ("indexer_logits", 8, 128, "float16", True, False) in keys
    assert {key[1] for key in keys if key[0] == "select_topk"} == {"whole", "few", "part", "merge"}
    assert not any("bfloat16" in key for key in keys if isinstance(key, tuple))


@pytest.mark.parametrize(
    ("heads", "tiles"),
    [(2, [8, 16, 32, 64]), (8, [8, 16, 32, 64]), (16, [16, 32, 64]), (20, [32, 64]), (64, [64])],
)
def test_steps_of_several_tokens_have_their_tiles(heads: int, tiles: list[int]) -> None:
    """A request's rows are its new tokens times the heads: 4 tokens of 8 heads fill a tile of 32."""
    names = [v.name for v in variants(replace(SPARSE, heads=heads), torch.bfloat16)]
    found = {
        int(name.split(":")[1].split()[0])
        for name in names
        if name.startswith("dense attention: ") and " rows, " in name and "merge" not in name
    }
    assert sorted(found) == tiles


def test_dry_run_names_them_and_compiles_none(checkpoint: Path) -> None:
    result = run("warmup", checkpoint, "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["cache"] and len(document["kernels"]) > 15
    assert all(kernel["seconds"] is None for kernel in document["kernels"])


def test_ranks_that_do_not_fit(checkpoint: Path) -> None:
    result = run("warmup", checkpoint, "--tp", "3", "--dry-run")
    assert result.returncode == 4 and "8 heads cannot be divided over 3" in result.stderr
    assert "1, 2, 4, 8" in result.stderr


def test_without_a_compiler(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilelang.contrib.nvcc.find_cuda_path", lambda: str(tmp_path))
    with pytest.raises(CannotError, match="no nvcc") as caught:
        warmup(checkpoint)
    assert "CUDA_HOME" in (caught.value.hint or "")


def test_a_kernel_that_does_not_compile_is_named() -> None:
    broken: Any = SimpleNamespace(name="broken", build=partial(json.loads, "no such instruction"))
    with pytest.raises(CannotError, match=r"'broken' does not compile: Expecting value"):
        build([broken], 1, SilentProgress())


def test_a_compiler_that_is_killed() -> None:
    dies: Any = SimpleNamespace(name="dies", build=partial(os._exit, 9))
    with pytest.raises(CannotError, match="memory") as caught:
        build([dies], 1, SilentProgress())
    assert "workers" in (caught.value.hint or "")


@needs_nvcc
def test_kernels_land_in_the_cache(cache: Path) -> None:
    merge = partial(sparse_mla.combine_kernel, 64, torch.float16)
    wanted = [Variant("lengths", sparse_mla.lengths_kernel), Variant("merge", merge)]
    assert list(build(wanted, 2, SilentProgress())) == ["lengths", "merge"]
    libraries = {path: path.stat().st_mtime_ns for path in cache.rglob("*.so")}
    assert len(libraries) == 2
    build(wanted, 1, SilentProgress())
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.so")} == libraries


@needs_nvcc
def test_processes_that_start_together_compile_once(cache: Path, tmp_path: Path) -> None:
    nvcc = Path(str(shutil.which("nvcc"))).resolve()
    toolkit = tmp_path / "toolkit"
    (toolkit / "bin").mkdir(parents=True)
    for path in nvcc.parent.parent.iterdir():
        if path.name != "bin":
            (toolkit / path.name).symlink_to(path)
    for path in nvcc.parent.iterdir():
        if path.name != "nvcc":
            (toolkit / "bin" / path.name).symlink_to(path)
    shim, log = toolkit / "bin/nvcc", tmp_path / "log"
    shim.write_text(f'#!/bin/sh\ncase "$*" in *.cu*) echo compiled >> {log};; esac\nexec {nvcc} "$@"\n')
    shim.chmod(0o755)
    code = "from mla_convert.runtime.kernels.sparse_mla import lengths_kernel; lengths_kernel()"
    environment = {**os.environ, "CUDA_HOME": str(toolkit), "PATH": f"{shim.parent}:{os.environ['PATH']}"}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(8)]
    assert [process.wait(300) for process in processes] == [0] * 8
    assert log.read_text().splitlines() == ["compiled"]
    assert len(list(cache.rglob("*.so"))) == 1


@needs_nvcc
def test_a_cache_that_cannot_be_written_still_compiles(cache: Path) -> None:
    code = (
        "import os; from mla_convert.runtime.kernels.sparse_mla import lengths_kernel;"
        "os.environ['TILELANG_CACHE_DIR'] = '/proc/nowhere'; print('sparse' in lengths_kernel().get_kernel_source())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "True\n"), found.stderr
    assert (
        found.stderr.count("/proc/nowhere cannot be written: kernels are compiled for this process alone")
        == 1
    )


def test_kernels_that_cannot_be_kept_are_no_warmup(checkpoint: Path) -> None:
    build_alone = partial(warnings.warn, "the cache cannot be written", _common.KernelNotKeptWarning)
    lost: Any = SimpleNamespace(name="lost", build=build_alone)
    with pytest.raises(LocalIOError, match="'lost' cannot be kept: the cache cannot be written") as caught:
        build([lost], 1, SilentProgress())
    assert "TILELANG_CACHE_DIR" in (caught.value.hint or "")
    found = run_process("warmup", checkpoint, "--dry-run", env={"TILELANG_CACHE_DIR": "/proc/nowhere"})
    assert found.returncode == 5 and "TileLang cannot make its cache" in found.stderr


def test_a_program_that_does_not_compile_is_an_error_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Traceback\n  a line\n\nno layout for 192\n")

    monkeypatch.setattr(_common.tilelang, "compile", fail)
    with pytest.raises(
        CannotError, match=r"cannot compile the kernel \('a', 1\): no layout for 192"
    ) as caught:
        _common.compiled(("a", 1), lambda: None)
    assert "nvcc" in (caught.value.hint or "")


@pytest.mark.parametrize("after", [0.3, 3.0])
def test_an_interrupt_ends_compilers_without_a_word(after: float, checkpoint: Path, cache: Path) -> None:
    """^C comes to every process of the terminal."""
    words = [sys.executable, "-m", "mla_convert", "warmup", str(checkpoint), "--workers", "2"]
    command = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(processes_of(command.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(after)
    os.killpg(command.pid, signal.SIGINT)
    said = command.communicate(timeout=60)[1]
    assert command.returncode == 130, said
    assert "Traceback" not in said and "KeyboardInterrupt" not in said
    assert said.splitlines()[-2:] == [
        "error: interrupted",
        f"hint: run it again: mla-convert {shlex.join(words[3:])}",
    ]


def processes_of(group: int) -> list[str]:
    """The processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            text = stat.read_text()
            if text.rpartition(")")[2].split()[2] == str(group):
                found.append(text)
    return found
