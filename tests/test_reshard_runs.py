"""How ``reshard`` runs: the command, dry runs, killed runs, bounded memory; and how strided pieces are gathered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import RUN, Stored, digests, load, random_bytes, randomness, unflushed, write_file  # noqa: F401
from conversions import contents, environment, fails, leftovers, memory_folder, run
from killing import Killer, in_killed_child
from sharded_models import FORMATS, MODELS, V3, Model, write_model

from mla_convert import api, engine, gathering, journal
from mla_convert.engine import RunOptions
from mla_convert.errors import BadInputError
from mla_convert.formats.deepseek import from_deepseek, to_deepseek
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.formats.safetensors import build_header
from mla_convert.gathering import Gatherer, is_strided
from mla_convert.plan import Copy, TargetTensor, Zeros
from mla_convert.sharding import ReshardOptions
from mla_convert.tensors import TensorSpec
from mla_convert.whole import Format

EIGHT = ReshardOptions(8, to=Format.DEEPSEEK)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source", MODELS["deepseek_v3-fp8"])


# The command


def test_the_command(source: Path, tmp_path: Path) -> None:
    done = run("reshard", source, "--tp", "8", "--to", "deepseek", "--layout", "split", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["command"] == "reshard"
    assert document["layout"] == "split"
    assert document["options"]["tp"] == 8
    assert document["files"] == {"rewritten": 8, "carried": 1, "generated": 1}
    target = Path(document["output"])
    assert target == tmp_path / "source-tp8"
    sizes = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    assert document["bytes"]["rewritten"] == document["bytes"]["by_way"]["rewrite"] == sizes
    shown = run("reshard", target, "--tp", "1", "--to", "huggingface", "-o", tmp_path / "back").stdout
    assert "written as 1 rank, Hugging Face safetensors" in " ".join(shown.split())
    again = run("reshard", target, "--tp", "1", "--to", "huggingface", "-o", tmp_path / "back").stdout
    assert "already done" in again
    assert leftovers(tmp_path) == []


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    done = run("reshard", source, "--tp", "4", "--dry-run", "--json")
    document = json.loads(done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    api.reshard(source, tmp_path / "source-tp4", ReshardOptions(4), run=RUN)
    assert json.loads((tmp_path / "source-tp4" / "mla-convert.json").read_bytes())["plan"] == document["plan"]
    assert {file["name"].partition("/")[0] for file in document["steps"]["rewritten"]} == {
        f"rank{rank}-of-4" for rank in range(4)
    }


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--tp", "3"), 4, "8 heads of model.layers.0.self_attn do not divide by 3"),
        (("--tp", "3"), 4, "legal here: --tp 1, 2, 4, 8"),
        (("--tp", "0"), 2, "--tp"),
        ((), 2, "--tp"),
        (("--tp", "1"), 4, "nothing to do"),
        (("--tp", "2", "-o", "source/inside"), 2, "lies inside the input"),
    ],
)
def test_refusals(words: tuple[str, ...], code: int, message: str, source: Path, tmp_path: Path) -> None:
    assert message in " ".join(fails(code, "reshard", source, *words, cwd=tmp_path).split())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# Killed runs


@pytest.mark.parametrize("format", FORMATS)
def test_a_killed_run_resumes(format: Format, source: Path, tmp_path: Path) -> None:
    options = ReshardOptions(4, to=format)
    api.reshard(source, tmp_path / "reference", options, run=RUN)
    expected = contents(tmp_path / "reference")
    out = tmp_path / "out"
    for steps in (1, 4, 7, 2):
        killer = Killer(steps=steps)
        kill = RunOptions(workers=1, on_step=killer.step)
        assert in_killed_child(lambda: api.reshard(source, out, options, run=kill, progress=killer))  # noqa: B023
        assert not out.exists()
    report = api.reshard(source, out, options, run=RUN).report
    assert report is not None
    assert report.resumed_files >= 3
    assert contents(out) == expected
    assert leftovers(tmp_path) == []


def test_a_source_that_changes_meanwhile(source: Path, tmp_path: Path) -> None:
    sharded = api.reshard(source, tmp_path / "sharded", EIGHT, run=RUN).output

    def change(step: str) -> None:
        if step == "staged":
            path = sharded / "model3-mp8.safetensors"
            os.utime(path, (1, 1))

    with pytest.raises(BadInputError, match="changed while it was being read"):
        api.reshard(sharded, tmp_path / "out", run=RunOptions(workers=1, on_step=change))
    assert not (tmp_path / "out").exists()


# Memory

MEASURE = """
import sys
from pathlib import Path
from mla_convert import api
from mla_convert.sharding import ReshardOptions
from mla_convert.engine import RunOptions
for source, target, tp in ((1, 2, 8), (2, 3, 1)):
    api.reshard(Path(sys.argv[source]), Path(sys.argv[target]), ReshardOptions(tp), run=RunOptions(workers=1))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak(folder: Path, columns: int) -> int:
    """Largest resident memory in bytes of a process that deals out 1024 rows of these many columns, and back."""
    model = Model(layers=1, hidden=64)
    write_model(folder / "source", model)
    spec = TensorSpec("model.layers.0.mlp.extra.down_proj.weight", "BF16", (1024, columns))
    header = build_header([spec])
    with (folder / "source" / "model-00001-of-000003.safetensors").open("rb") as file:
        first = file.read()
    (folder / "large").mkdir()
    tensors = load(folder / "source")
    write_file(folder / "large" / "a.safetensors", tensors)
    (folder / "large" / "config.json").write_bytes((folder / "source" / "config.json").read_bytes())
    with (folder / "large" / "b.safetensors").open("wb") as out:
        out.write(header + first)
        out.truncate(len(header) + spec.nbytes)
    words = [sys.executable, "-c", MEASURE, *(str(folder / name) for name in ("large", "eight", "one"))]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    assert load(folder / "one")[spec.name] == load(folder / "large")[spec.name]
    return int(done.stdout) * 1024


def test_memory_does_not_grow_with_row_parallel_tensors(tmp_path: Path) -> None:
    peaks = []
    for name, columns in (("small", 8_192), ("large", 65_536)):
        (tmp_path / name).mkdir()
        peaks.append(peak(tmp_path / name, columns))
    assert max(peaks) < 100e6
    assert peaks[1] - peaks[0] < 16e6


# Gathering


@pytest.mark.parametrize("band", [1, 100, 1 << 20])
@pytest.mark.parametrize("skip", [0, 1 << 20])
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32"])
def test_gathering(dtype: str, skip: int, band: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of two matrices, rows of one, zeros below: as torch puts them together."""
    monkeypatch.setattr(gathering, "BAND", band)
    monkeypatch.setattr(gathering, "READ", 2 * band)
    monkeypatch.setattr(gathering, "_SKIP", skip)
    rng = randomness()
    a, b = random_bytes(rng, dtype, (13, 9)), random_bytes(rng, dtype, (11, 7))
    write_file(tmp_path / "model.safetensors", {"a": a, "b": b})
    pieces = (
        Copy("a", ((2, 12), (3, 8)), (0, 0)),
        Copy("b", ((1, 11), (0, 7)), (0, 5)),
        Copy("a", ((0, 1), (0, 9)), (10, 0)),
        Copy("b", ((0, 1), (4, 7)), (10, 9)),
        Zeros(11, 2),
    )
    target = TargetTensor(TensorSpec("t", dtype, (13, 12)), pieces)
    catalogue = open_checkpoint(tmp_path)
    with Gatherer(catalogue) as gatherer:
        found = b"".join(bytes(data) for _, data in gatherer.bands(target))
    x, y = a.bytes_by_element(), b.bytes_by_element()
    rows = [torch.cat([x[2:12, 3:8], y[1:11]], 1), torch.cat([x[0:1], y[0:1, 4:7]], 1)]
    wanted = torch.cat([*rows, torch.zeros(2, 12, x.shape[2], dtype=torch.uint8)])
    assert torch.equal(Stored(dtype, (13, 12), found).bytes_by_element(), wanted)
    assert [is_strided(p, catalogue.tensors[p.source], target) for p in pieces[:4]] == [
        True,
        True,
        False,
        False,
    ]


def test_a_source_that_ends_early(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"a": random_bytes(randomness(), "U8", (64, 64))})
    catalogue = open_checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(3000)
    target = TargetTensor(TensorSpec("t", "U8", (64, 8)), (Copy("a", ((0, 64), (8, 16)), (0, 0)),))
    with Gatherer(catalogue) as gatherer, pytest.raises(BadInputError, match="ends early, at byte 3000"):
        list(gatherer.bands(target))


# Many small files


def test_small_files_are_hashed_as_far_as_that_is_cheap(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "HASHED_BYTES", 100_000)
    out = api.reshard(source, tmp_path / "out", ReshardOptions(8), run=RUN).output
    files = json.loads((out / "mla-convert.json").read_bytes())["files"]
    hashed = {name: entry["size"] for name, entry in files.items() if entry["sha256"]}
    left = {name: entry["size"] for name, entry in files.items() if not entry["sha256"]}
    assert sum(hashed.values()) > 50_000
    assert max(hashed.values()) <= min(left.values())
    assert {"config.json", "tokenizer.json"} <= hashed.keys()


def test_the_journal_is_flushed_for_what_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr("mla_convert.storage.fsync_fd", lambda fd: flushed.append(written[-1]))
    written = [0]
    found = journal.Journal(tmp_path / "journal")
    for number, worth in enumerate((0, 40 << 20, 30 << 20, 1, 0, 64 << 20), 1):
        written.append(number)
        found.append({"file": str(number)}, worth=worth)
    found.close()
    assert flushed == [3, 6]
    assert [entry["file"] for entry in journal.read_journal(tmp_path / "journal")[0]] == list("123456")


# Names


@pytest.mark.parametrize(
    ("ours", "theirs", "stem"),
    [
        ("model.embed_tokens.weight", "embed.weight", "model."),
        ("lm_head.weight", "head.weight", "model."),
        ("model.norm.weight", "norm.weight", "model."),
        ("model.layers.3.self_attn.q_b_proj.weight_scale_inv", "layers.3.attn.wq_b.scale", "model."),
        ("model.layers.3.self_attn.indexer.wq_b.weight", "layers.3.attn.indexer.wq_b.weight", "model."),
        ("model.layers.3.self_attn.indexer.k_norm.bias", "layers.3.attn.indexer.k_norm.bias", "model."),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias", "model."),
        ("model.layers.3.self_attn.o_proj.bias", "layers.3.attn.wo.bias", "model."),
        ("model.layers.61.shared_head.head.weight", "layers.61.shared_head.head.weight", "model."),
        ("model.layers.61.eh_proj.weight", "layers.61.eh_proj.weight", "model."),
        ("model.layers.0.self_attn.1.kv_b_proj.weight", "layers.0.attn.1.wkv_b.weight", "model."),
        ("model.layers.0.self_attn.k_b_proj.weight", "layers.0.attn.wk_b.weight", "model."),
        (
            "language_model.model.layers.0.mlp.up_proj.weight",
            "layers.0.ffn.w3.weight",
            "language_model.model.",
        ),
        ("language_model.lm_head.weight", "head.weight", "language_model.model."),
        ("vision_tower.blocks.0.mlp.fc1.bias", "vision_tower.blocks.0.mlp.fc1.bias", "language_model.model."),
    ],
)
def test_names(ours: str, theirs: str, stem: str) -> None:
    assert to_deepseek(ours, stem) == theirs
    assert from_deepseek(theirs, stem) == ours


def test_digests_do_not_depend_on_workers(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", V3)
    for workers in (1, 4):
        api.reshard(source, tmp_path / f"w{workers}", EIGHT, run=RunOptions(workers=workers))
    assert digests(tmp_path / "w1", without=()) == digests(tmp_path / "w4", without=())
