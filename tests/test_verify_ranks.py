"""``verify`` of checkpoints that lie on ranks: each rank runs what its own files hold, against the unsharded model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sharded_models import FORMATS, Model, tensors_of, write_model

from mla_convert import api
from mla_convert.demo_model import write_demo_checkpoint
from mla_convert.engine import RunOptions
from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.geometry import Layout, find_blocks
from mla_convert.sharding import ReshardOptions
from mla_convert.verification.result import VerifyReport
from mla_convert.verification.sharded import ShardedReader, load, load_one_rank
from mla_convert.verification.weights import TensorReader, block_spec
from mla_convert.verify import VerifyOptions, verify
from mla_convert.whole import Format, open_whole

QUICK = VerifyOptions(layers=(0,), tokens=96, record=False)
RANKS = 4


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DSA checkpoint with FP8 weights and an MTP layer."""
    folder = tmp_path_factory.mktemp("ranks") / "demo"
    write_demo_checkpoint(folder)
    return folder


def reshard(source: Path, target: Path, ranks: int = RANKS, **options: Any) -> Path:
    """Reshard, and nothing else."""
    options = {"reblock": not options.get("dequantize"), "pad_vocabulary": True, **options}
    return api.reshard(source, target, ReshardOptions(ranks, **options), run=RunOptions(workers=1)).output


@pytest.fixture(scope="module")
def sharded(original: Path) -> Path:
    return reshard(original, original.parent / "sharded", to=Format.DEEPSEEK, layout=Layout.SPLIT)


@pytest.fixture
def corrupted(sharded: Path, tmp_path: Path) -> Path:
    """A copy without its manifest, to be corrupted."""
    copy = tmp_path / "corrupted"
    shutil.copytree(sharded, copy)
    (copy / MANIFEST_NAME).unlink()
    return copy


def check(report: VerifyReport, name: str) -> bool | None:
    return next(check.passed for check in report.checks if check.name == name)


def change(path: Path, name: str, how: Any) -> None:
    """Replace one tensor of a file by what ``how`` makes of it."""
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    tensors[name] = how(tensors[name].clone()).contiguous()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("layout", [Layout.SPLIT, Layout.COMBINED])
@pytest.mark.parametrize("format", FORMATS)
def test_as_it_lies(format: Format, layout: Layout, original: Path, tmp_path: Path) -> None:
    target = reshard(original, tmp_path / "t", to=format, layout=layout)
    report = verify(target, options=QUICK)
    assert report.passed, report.failures
    assert report.settings["tp"] == RANKS
    assert report.against == str(original.resolve())
    assert [layer.kind for layer in report.layers] == ["sparse"]
    for name in ("tensors", "ranks", "K and V rows", "carried tensors", "negative control"):
        assert check(report, name), name


def test_without_the_original(corrupted: Path) -> None:
    """Standard MLA then runs with the weights of all ranks put together."""
    report = verify(corrupted, options=QUICK)
    assert report.passed, report.failures
    assert "compared with itself" in report.against_note
    assert check(report, "ranks")


def test_without_the_original_but_with_the_manifest(original: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(original, moved)
    target = reshard(moved, tmp_path / "t", to=Format.DEEPSEEK)
    shutil.rmtree(moved)
    report = verify(target, options=VerifyOptions(layers=(0,), tokens=96))
    assert report.passed, report.failures
    assert report.recorded


@pytest.mark.parametrize("name", ["deepseek_v3_bias", "glm_moe_dsa", "longcat_flash"])
def test_families(name: str, tmp_path: Path) -> None:
    source = tiny_models.save(name, tmp_path / name)
    target = reshard(
        source, tmp_path / "t", 2, to=Format.HUGGINGFACE, layout=Layout.SPLIT, pad_vocabulary=True
    )
    report = verify(target, source, VerifyOptions(tokens=96, dtype="float64", record=False))
    assert report.passed, report.failures
    assert report.settings["tp"] == 2
    assert len(report.layers) > 1


def test_bias_is_added_once(tmp_path: Path) -> None:
    """It lies on every rank; added on each, the sum would be off by the bias."""
    source = tiny_models.save("deepseek_v3_bias", tmp_path / "m")
    whole = open_whole(reshard(source, tmp_path / "t", 2, to=Format.DEEPSEEK))
    block = find_blocks(whole.logical)[0]
    reader = ShardedReader(whole)
    loaded = load(reader, block, block_spec(whole.logical, block), torch.device("cpu"))
    first, second = loaded.by_rank
    assert first is not None and second is not None
    assert first.weights.o_bias is not None and loaded.weights.o_bias is not None
    assert torch.equal(first.weights.o_bias, loaded.weights.o_bias)
    assert second.weights.o_bias is None


# Ranks that hold something else


def test_two_ranks_that_changed_places(corrupted: Path, original: Path) -> None:
    first, second = (corrupted / f"model{rank}-mp4.safetensors" for rank in (1, 2))
    other = corrupted / "other"
    first.rename(other)
    second.rename(first)
    other.rename(second)
    report = verify(corrupted, original, QUICK)
    assert not report.passed
    assert check(report, "K and V rows") is False
    assert [layer.passed for layer in report.layers] == [False]


@pytest.mark.parametrize(
    ("name", "rank", "failing"),
    [
        ("layers.0.attn.wk_b.weight", 3, "K and V rows"),
        ("layers.0.attn.wo.weight", 2, "carried tensors"),
        ("layers.0.attn.q_norm.weight", 1, "ranks"),
        ("layers.0.attn.q_norm.weight", 0, "carried tensors"),
    ],
)
def test_one_rank_is_wrong(name: str, rank: int, failing: str, corrupted: Path, original: Path) -> None:
    """What one rank loads is its own: a fault in a copy that the whole is not made of shows in the numbers, too."""

    def flipped(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.view(torch.uint8)
        return (whole ^ 0x80 if tensor.element_size() == 1 else whole.flip(0)).view(tensor.dtype)

    change(corrupted / f"model{rank}-mp4.safetensors", name, flipped)
    report = verify(corrupted, original, QUICK)
    assert check(report, failing) is False, [(c.name, c.passed) for c in report.checks]
    assert [layer.passed for layer in report.layers] == [False]


# FP8 blocks that ranks would cut


@pytest.fixture
def fine(tmp_path: Path) -> Path:
    """Blocks of which borders between four ranks cut some."""
    model = Model(heads=4, nope=16, v=24, rank=64, fp8=(16, 16), hidden=160, layers=1, vocabulary=46)
    tensors = tensors_of(model)
    generator = torch.Generator().manual_seed(0)
    for name, stored in tensors.items():
        dtype = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}[stored.dtype]
        drawn = torch.randn(stored.shape, generator=generator)
        drawn = drawn.abs() * 0.05 + 0.01 if "scale" in name else drawn
        data = drawn.to(dtype).reshape(-1).view(torch.uint8).numpy().tobytes()
        tensors[name] = type(stored)(stored.dtype, stored.shape, data)
    folder = write_model(tmp_path / "fine", model, tensors)
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_padding_that_is_not_zero(fine: Path, tmp_path: Path) -> None:
    target = reshard(fine, tmp_path / "t", to=Format.DEEPSEEK)
    assert verify(target, fine, QUICK).passed
    change(target / "model3-mp4.safetensors", "embed.weight", lambda t: torch.cat([t[:-1], t[-1:] + 1]))
    report = verify(target, fine, QUICK)
    assert check(report, "ranks") is False
    assert check(report, "carried tensors")  # what was added is no part of the model


@pytest.mark.parametrize("layout", [Layout.SPLIT, Layout.COMBINED])
@pytest.mark.parametrize("way", ["reblock", "dequantize"])
def test_cut_blocks(way: str, layout: Layout, fine: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        target = tmp_path / f"{way}-{dtype}"
        reshard(fine, target, to=Format.DEEPSEEK, layout=layout, **{way: True})
        report = verify(target, options=VerifyOptions(tokens=64, dtype=dtype, record=False))
        assert report.passed, report.failures
        assert report.against == str(fine.resolve())


def test_a_wrong_value_among_dequantised_ones(fine: Path, tmp_path: Path) -> None:
    target = reshard(fine, tmp_path / "t", to=Format.DEEPSEEK, dequantize=True)
    change(target / "model2-mp4.safetensors", "layers.0.ffn.w2.weight", lambda t: t * 1.0078125)
    report = verify(target, options=VerifyOptions(tokens=64, record=False))
    assert check(report, "carried tensors") is False
    details = next(found.details for found in report.checks if found.name == "carried tensors")
    assert details == ("model.layers.0.mlp.down_proj.weight: not the dequantised original",)


def test_finer_scales_that_differ(fine: Path, tmp_path: Path) -> None:
    target = reshard(fine, tmp_path / "t", to=Format.DEEPSEEK, reblock=True)
    name = "layers.0.attn.wo.scale"
    change(target / "model1-mp4.safetensors", name, lambda t: torch.cat([t[:, :-1], 2 * t[:, -1:]], 1))
    report = verify(target, options=VerifyOptions(tokens=64, record=False))
    assert check(report, "ranks") is False
    assert [layer.passed for layer in report.layers] == [False]


# Which ranks, and whose files


def test_another_number_is_refused(sharded: Path) -> None:
    with pytest.raises(CannotError, match=r"--tp 2: .* lies on 4 ranks, and is verified as it lies"):
        verify(sharded, options=VerifyOptions(tp=2))
    assert verify(sharded, options=VerifyOptions(tp=4, layers=(0,), tokens=96, record=False)).passed


def test_a_rank_that_is_missing(corrupted: Path, original: Path) -> None:
    (corrupted / "model3-mp4.safetensors").unlink()
    with pytest.raises(BadInputError, match="1 of 4 ranks are missing"):
        verify(corrupted, options=QUICK)
    assert not verify(corrupted, original, QUICK).passed


def test_a_rank_reads_its_own_files(sharded: Path) -> None:
    whole = open_whole(sharded)
    block = find_blocks(whole.logical)[0]
    spec, cpu = block_spec(whole.logical, block), torch.device("cpu")
    reader = ShardedReader(whole)
    alone = load_one_rank(reader, block, spec, 2, cpu)
    assert list(reader._ranks) == [2]
    assert list(reader._ranks[2]._open) == ["model2-mp4.safetensors"]
    mine = alone.part(2, RANKS)
    reference = load(ShardedReader(whole), block, spec, cpu)
    cut = type(reference)(*(getattr(reference, f) for f in ("block", "spec", "weights", "w_kv_b", "w_uk", "w_uv")),
                          reference.stored).part(2, RANKS)  # fmt: skip
    assert torch.equal(mine.w_uk, cut.w_uk)
    assert torch.equal(mine.weights.o, cut.weights.o)
    assert alone.weights.o.shape == reference.weights.o.shape
    assert alone.w_uk.shape == reference.w_uk.shape
    with pytest.raises(ValueError, match="part of rank 1 was not read"):
        alone.part(1, RANKS)


def test_whole_tensors_are_those_of_the_original(sharded: Path, original: Path) -> None:
    ours, theirs = ShardedReader(open_whole(sharded)), TensorReader(open_whole(original).logical)
    names = ours.names & theirs.names
    assert len(names) > 40
    for name in names:
        mine, other = ours.get(name), theirs.get(name)
        assert mine.dtype == other.dtype
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)) if mine.dim() else mine == other


def test_real_ranks(sharded: Path) -> None:
    words = ["verify", str(sharded), "--tp", "4", "--launch", "--layers", "0", "--seq", "96", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "mla_convert", *words, "--no-record", "--device", "cpu", "--backward"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["passed"]
    assert (document["settings"]["processes"], document["settings"]["tp"]) == (4, 4)
