"""The benchmarks run, and the checkpoint that they measure is what it says it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import memory_folder

from mla_convert import api
from mla_convert.formats.safetensors import read_header

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # the benchmarks are not installed

from benchmarks import checkpoint  # noqa: E402
from benchmarks import split as benchmark  # noqa: E402

SIZE = 4_000_000


@pytest.fixture(scope="module")
def small() -> Iterator[Path]:
    """A checkpoint of 4 MB."""
    with memory_folder() as folder:
        checkpoint.write(folder / "model", SIZE)
        yield folder / "model"


def shard_names(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*.safetensors"))


def tensors_of(path: Path) -> dict[str, str]:
    """The shard of each tensor."""
    return {t.spec.name: name for name in shard_names(path) for t in read_header(path / name).tensors}


def test_full_size_is_the_published_model() -> None:
    dims = checkpoint.Dims.scaled(1.0, checkpoint.EXPERTS)
    plan = checkpoint.shards(dims)
    assert dims == checkpoint.Dims(7168, 18432, 2048, 1536, 512, 128, 129280, 256)
    assert len(plan) == 163
    assert sum(map(len, plan)) == 91_991
    assert sum(tensor.nbytes for shard in plan for tensor in shard) == checkpoint.FULL_PAYLOAD
    assert checkpoint.weight_bytes(dims) == checkpoint.FULL_PAYLOAD
    touched = [shard for shard in plan if any(".kv_b_proj." in tensor.name for tensor in shard)]
    assert len(touched) / len(plan) == pytest.approx(0.37, abs=0.01)


@pytest.mark.parametrize("size", [4_000_000, 100_000_000, 8_000_000_000])
def test_size_is_close_and_share_of_kv_b_is_kept(size: int) -> None:
    dims = checkpoint.fit(size)
    assert checkpoint.weight_bytes(dims) == pytest.approx(size, rel=0.15)
    if size >= 1_000_000_000:
        share = 62 * dims.heads * 256 * dims.kv_rank / size
        assert share == pytest.approx(0.0015, rel=0.15)


@pytest.mark.parametrize("size", [40_000_000, 8_000_000_000])
def test_dimensions_that_divide_by_ranks(size: int) -> None:
    dims = checkpoint.fit(size, 8, 8)
    assert checkpoint.weight_bytes(dims) == pytest.approx(size, rel=0.25)
    rows = (dims.dense, dims.moe, dims.heads * 192, dims.heads * 256, dims.heads * 128)
    assert all(count % (8 * 128) == 0 for count in rows)
    assert dims.heads % 8 == dims.vocabulary % 8 == 0


def test_headers_and_index_are_sound(small: Path) -> None:
    names = shard_names(small)
    assert names[0] == "model-00001-of-000163.safetensors"
    assert len(names) == 163
    held = tensors_of(small)
    index = json.loads((small / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == held
    total = sum(t.spec.nbytes for name in names for t in read_header(small / name).tensors)
    assert index["metadata"]["total_size"] == 2 * total
    stray = f"model.layers.{checkpoint.STRAY_SCALE_LAYER}.self_attn.kv_b_proj.weight"
    assert held[stray] != held[stray + "_scale_inv"]


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float8_e4m3fn, 1), (torch.bfloat16, 2), (torch.float32, 4)], ids=str
)
def test_weights_are_finite_and_not_zero(dtype: torch.dtype, width: int) -> None:
    spelled = {1: "F8_E4M3", 2: "BF16", 4: "F32"}[width]
    data = b"".join(checkpoint.Bytes(1 << 20).take(spelled, 1 << 20))
    values = torch.frombuffer(bytearray(data), dtype=dtype).float()
    assert values.isfinite().all()
    assert values.count_nonzero() == values.numel() == (1 << 20) // width
    assert values.unique().numel() > 200


def test_same_bytes_each_time(small: Path, tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "again", SIZE)
    for path in small.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_checkpoint_splits_and_combines(small: Path) -> None:
    split, combined = small.with_name("split"), small.with_name("combined")
    api.split(small, split)
    held = tensors_of(split)
    assert sum(name.endswith(".k_b_proj.weight") for name in held) == 62
    assert not any("kv_b_proj" in name for name in held)
    api.combine(split, combined)
    for path in small.iterdir():
        assert (combined / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_folder_with_files_is_left_alone(small: Path) -> None:
    with pytest.raises(ValueError, match="not empty"):
        checkpoint.write(small, SIZE)


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8_000_000_000), ("1.5 MB", 1_500_000), ("12kb", 12_000), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert checkpoint.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "8 GiB", "-1GB", "many"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        checkpoint.parse_size(text)


def test_split_benchmark_end_to_end(tmp_path: Path) -> None:
    with memory_folder() as folder:
        options = ["--size", "4MB", "--rounds", "1", "--keep-cache", "--json"]
        found = subprocess.run(
            [sys.executable, "-m", "benchmarks.split", *options, "--dir", folder, "--results", tmp_path],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stderr
        assert list(folder.iterdir()) == []
    document: dict[str, Any] = json.loads(found.stdout)
    assert document["checkpoint"]["files"] == 163
    assert document["different"] == []
    assert set(document["compared"].values()) == {169}
    assert ("xfs" in document["compared"]) == (document["skipped"] is None)
    assert all(0 < row["peak"] < 200e6 for row in document["memory"])
    (report,) = tmp_path.iterdir()
    text = report.read_text()
    assert "| `mla-convert split` |" in text
    assert str(folder) not in text


def test_reshard_benchmark_end_to_end(tmp_path: Path) -> None:
    with memory_folder() as folder:
        options = ["--size", "40MB", "--rounds", "1", "--keep-cache", "--json", "--workers", "2"]
        found = subprocess.run(
            [sys.executable, "-m", "benchmarks.reshard", *options, "--dir", folder, "--results", tmp_path],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stderr
        assert list(folder.iterdir()) == []
    document: dict[str, Any] = json.loads(found.stdout)
    assert document["diff"] == 0
    assert len(document["outcome"]["series"]) == 4
    assert 0.02 < document["shares"]["row_parallel"] < 0.5
    (report,) = tmp_path.iterdir()
    text = report.read_text()
    assert "| `mla-convert reshard --tp 8 --to deepseek --workers 2` |" in text
    assert "the tensors equal the original's" in text
    assert str(folder) not in text


def test_a_difference_is_reported(tmp_path: Path) -> None:
    outcome = benchmark.Outcome({}, True)
    for name in ("model", "combined"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same").write_bytes(b"1")
        (tmp_path / name / "other").write_bytes(name.encode())
    (tmp_path / "model" / "missing").touch()
    benchmark._compare(tmp_path, outcome)
    assert outcome.different == ["missing", "other"]
    assert "DIFFER" in benchmark._comparison(outcome)


def test_ratios_are_to_the_first_command_of_each_file_system() -> None:
    def series(kind: str, command: str, seconds: float) -> benchmark.Series:
        return benchmark.Series(kind, command, [benchmark.Sample(seconds, 2 * seconds, 0.5, 10_000_000)])

    rows = list(benchmark._rows([series("ext4", "cp", 2), series("xfs", "cp", 4), series("xfs", "split", 1)]))
    assert (
        rows[2]
        == "| xfs | `split` | 1.00 (1.00 to 1.00) | 0.25 | 2.00 (2.00 to 2.00) | 0.25 | 0.50 | 10 MB |"
    )
