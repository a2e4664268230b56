"""verify on Megatron's older format: every level runs on the tensors as they lie, and a fault is found.

Genuine ranks of megatron-core write the checkpoints; the numbers are those of the same model as torch_dist.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_checkpoints as made
import numpy
import pytest
import torch
from conversions import run
from megatron_models import ARGUMENTS, SPARSE, run_ranks
from test_megatron_ranks import ranks

from mla_convert import api
from mla_convert.demo_model import write_demo_checkpoint
from mla_convert.errors import BadInputError
from mla_convert.formats import torch_legacy as torch_legacy_format
from mla_convert.formats import torch_save
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.geometry import find_blocks
from mla_convert.sharding import ReshardOptions
from mla_convert.verification import torch_legacy
from mla_convert.verification.readers import reader_of
from mla_convert.verification.result import VerifyReport
from mla_convert.verification.sharded import load_one_rank
from mla_convert.verification.torch_legacy import TorchReader, load_models
from mla_convert.verification.weights import block_spec
from mla_convert.verify import VerifyOptions, verify
from mla_convert.whole import Format, open_whole

QUICK = VerifyOptions(layers=(0, 1), tokens=48, record=False)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pp2 in two virtual stages": (
        "0.16.1",
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "tp2, ep2, whole experts, sparse": (
        "0.19.2",
        {
            **SPARSE,
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def genuine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """What genuine ranks saved, below ``torch`` and ``dist``; over how many tensor-parallel ranks."""
    version, more = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("genuine")
    run_ranks(version, {**ARGUMENTS, **more}, folder)
    return folder, more.get("tensor_model_parallel_size", 1)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A checkpoint over two tensor-parallel ranks, cut by hand."""
    ranks(tmp_path / "torch", 2)
    return tmp_path / "torch"


def found(report: VerifyReport, name: str) -> bool | None:
    return next(check.passed for check in report.checks if check.name == name)


def file_of(folder: Path, rank: str = "00") -> Path:
    return next(folder.glob(f"*/mp_rank_{rank}/model_optim_rng.pt"))


def change(path: Path, name: str, how: Callable[[torch.Tensor], Any]) -> None:
    """Change a tensor of a rank's file in its place."""
    state = torch.load(path, weights_only=False)
    how(state["model"][name])
    path.unlink()  # the file may be a hard link
    torch.save(state, path)


def flip(tensor: torch.Tensor) -> None:
    """Change the last bit of one element."""
    tensor.view(torch.int16).view(-1)[tensor.numel() // 2] ^= 1


UP = "decoder.layers.1.self_attention.linear_{}_up_proj.weight"


# What genuine ranks wrote


def test_genuine_ranks_against_torch_dist(genuine: tuple[Path, int]) -> None:
    """PyTorch's view of the ranks is that of the same model which Megatron wrote as torch_dist."""
    folder, tp = genuine
    report = verify(folder / "torch", folder / "dist", QUICK)
    assert report.passed, report.failures
    assert report.settings["tp"] == tp
    assert all(found(report, name) for name in ("tensors", "config", "K and V rows", "carried tensors"))
    assert found(report, "negative control")
    assert len(report.layers) == 2


def test_split_genuine_ranks_against_the_manifests_source(genuine: tuple[Path, int], tmp_path: Path) -> None:
    folder, _ = genuine
    api.split(folder / "torch", tmp_path / "split")
    report = verify(tmp_path / "split", options=QUICK)
    assert report.passed, report.failures
    assert report.against == str((folder / "torch").resolve())
    assert all(found(report, name) for name in ("files", "tensors", "K and V rows", "negative control"))
    assert verify(folder / "torch", tmp_path / "split", QUICK).passed


# From other formats


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_against_the_hugging_face_original(tmp_path: Path, family: str, tp: int) -> None:
    made.write(tmp_path / "hf", *made.make(family))
    api.reshard(tmp_path / "hf", tmp_path / "torch", ReshardOptions(tp, to=Format.TORCH))
    done = run("verify", tmp_path / "torch", "--seq", "48", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["against"] == str((tmp_path / "hf").resolve())
    assert report["settings"]["tp"] == tp


def test_one_rank_runs_on_as_many_as_asked(tmp_path: Path) -> None:
    ranks(tmp_path / "torch", 1)
    report = verify(tmp_path / "torch", options=VerifyOptions(layers=(0,), tokens=48, tp=2, record=False))
    assert report.passed, report.failures
    assert report.settings["tp"] == 2


def test_another_number_of_ranks_is_refused(two: Path) -> None:
    done = run("verify", two, "--tp", "4")
    assert done.returncode == 4
    assert "lies on 2 ranks" in done.stderr


def test_ranks_put_together_are_the_tensors_they_were_cut_from(tmp_path: Path) -> None:
    tensors = ranks(tmp_path / "torch", 2)
    reader = reader_of(open_whole(tmp_path / "torch"))
    assert isinstance(reader, TorchReader)
    made.require_equal({name: reader.get(name) for name in reader.names}, tensors)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert torch.equal(reader.rank(1).get(name), tensors[name].chunk(2)[1])


@pytest.mark.parametrize("is_cut", [False, True])
def test_fused_down_projections_come_apart(two: Path, tmp_path: Path, is_cut: bool) -> None:
    shutil.copytree(two, tmp_path / "before")
    for rank in range(2):
        path = file_of(two, f"0{rank}")
        state = torch.load(path, weights_only=False)
        model = state["model"]
        for name in [name for name in model if name.endswith("linear_q_down_proj.weight")]:
            base = name.removesuffix("linear_q_down_proj.weight")
            matrices = [model.pop(f"{base}linear_{x}_down_proj.weight") for x in ("q", "kv")]
            matrices = [matrix.chunk(2)[rank] for matrix in matrices] if is_cut else matrices
            model[f"{base}linear_qkv_down_proj.weight"] = torch.cat(matrices)
            norm = model.pop(base.removesuffix("self_attention.") + "input_layernorm.weight")
            model[f"{base}linear_qkv_down_proj.layer_norm_weight"] = norm
        torch.save(state, path)
    report = verify(two, tmp_path / "before", QUICK)
    assert report.passed, report.failures


def test_an_indexer_of_an_older_release(tmp_path: Path) -> None:
    """Its rows are in another order, which a conversion to Hugging Face turns; here torch does."""
    made.write(tmp_path / "hf", *made.make("deepseek_v32"))
    api.reshard(tmp_path / "hf", tmp_path / "torch", ReshardOptions(2, to=Format.TORCH))
    for path in (tmp_path / "torch").rglob("*.pt"):
        state = torch.load(path, weights_only=False)
        del state["args"].dsa_indexer_rope_interleaved
        torch.save(state, path)
    (tmp_path / "torch" / MANIFEST_NAME).unlink()
    assert open_whole(tmp_path / "torch").megatron.indexer_change is not None  # type: ignore[union-attr]
    api.reshard(tmp_path / "torch", tmp_path / "back", ReshardOptions(1, to=Format.HUGGINGFACE))
    name = "model.layers.0.self_attn.indexer.wk.weight"
    assert not torch.equal(made.read(tmp_path / "back")[name], made.read(tmp_path / "hf")[name])
    report = verify(tmp_path / "torch", tmp_path / "back", QUICK)
    assert report.passed, report.failures


@pytest.mark.parametrize(("format", "tp"), [(Format.TORCH, 1), (Format.TORCH, 2), (Format.TORCH_DIST, 1)])
def test_dequantised_on_the_way(tmp_path: Path, format: Format, tp: int) -> None:
    """Also the indexer's weights, whose selection then is that of rounded ones."""
    write_demo_checkpoint(tmp_path / "fp8")
    options = ReshardOptions(tp, to=format, dequantize="bf16")
    api.reshard(tmp_path / "fp8", tmp_path / "megatron", options)
    report = verify(tmp_path / "megatron", options=VerifyOptions(layers=(0,), tokens=96, record=False))
    assert report.passed, report.failures
    rows, carried = (
        next(c for c in report.checks if c.name == n) for n in ("K and V rows", "carried tensors")
    )
    assert "equal to the dequantised original" in rows.summary
    assert "60 equal to the dequantised original" in carried.summary


def test_without_the_original(two: Path, tmp_path: Path) -> None:
    api.split(two, tmp_path / "split")
    two.rename(tmp_path / "moved")
    report = verify(tmp_path / "split", options=VerifyOptions(layers=(0,), tokens=48))
    assert report.passed, report.failures
    assert report.recorded
    assert "compared with the manifest" in report.against_note


def test_a_real_rank_opens_its_own_file(two: Path) -> None:
    whole = open_whole(two)
    block = next(block for block in find_blocks(whole.logical) if block.layer == 1)
    spec, device = block_spec(whole.logical, block), torch.device("cpu")
    file_of(two, "00").write_bytes(b"")
    one = load_one_rank(TorchReader(whole), block, spec, 1, device).by_rank[1]
    assert one is not None
    own = torch.load(file_of(two, "01"), weights_only=False)["model"][UP.format("kv")]
    assert torch.equal(one.w_kv_b, own.double())


# Faults


@pytest.mark.parametrize("half", ["k", "v"])
def test_one_wrong_bit_in_a_row_is_found(two: Path, tmp_path: Path, half: str) -> None:
    api.split(two, tmp_path / "split")
    change(file_of(tmp_path / "split", "01"), UP.format(half), flip)
    done = run("verify", tmp_path / "split", "--seq", "48", "--json")
    assert done.returncode == 10, done.stdout + done.stderr
    checks = {check["name"]: check["passed"] for check in json.loads(done.stdout)["checks"]}
    assert checks["K and V rows"] is False
    assert checks["carried tensors"] is True


@pytest.mark.parametrize(
    ("name", "rank", "failing"),
    [
        ("embedding.word_embeddings.weight", "01", "carried tensors"),
        ("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", "01", "carried tensors"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", "00", "carried tensors"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", "01", "ranks"),
    ],
)
def test_another_tensor_that_changed_is_found(
    two: Path, tmp_path: Path, name: str, rank: str, failing: str
) -> None:
    shutil.copytree(two, tmp_path / "changed")
    change(file_of(tmp_path / "changed", rank), name, flip)
    done = run("verify", tmp_path / "changed", "--against", two, "--seq", "48", "--json")
    assert done.returncode == 10, done.stdout + done.stderr
    checks = {check["name"]: check["passed"] for check in json.loads(done.stdout)["checks"]}
    assert checks[failing] is False


def test_expert_ranks_hold_copies_of_the_attention(tmp_path: Path) -> None:
    ranks(tmp_path / "one", 1)
    state = torch.load(file_of(tmp_path / "one"), weights_only=False)
    state["args"].expert_model_parallel_size = 2
    for rank in range(2):
        model = {}
        for name, value in state["model"].items():
            before, is_expert, after = name.partition(".local_experts.")
            number, _, field = after.partition(".")
            if not is_expert:
                model[name] = value
            elif int(number) // 2 == rank:
                model[f"{before}.local_experts.{int(number) % 2}.{field}"] = value
        path = tmp_path / "two" / "iter_0000005" / f"mp_rank_00_00{rank}"
        path.mkdir(parents=True)
        torch.save({**state, "model": model}, path / "model_optim_rng.pt")
    (tmp_path / "two" / "latest_checkpointed_iteration.txt").write_text("5")
    report = verify(tmp_path / "two", tmp_path / "one", QUICK)
    assert report.passed, report.failures
    assert found(report, "ranks")
    name = "decoder.layers.2.self_attention.linear_kv_up_proj.weight"
    change(file_of(tmp_path / "two", "00_001"), name, flip)
    report = verify(tmp_path / "two", tmp_path / "one", QUICK)
    assert found(report, "ranks") is False
    details = next(check.details for check in report.checks if check.name == "ranks")
    assert details == ("model.layers.2.self_attn.kv_b_proj.weight: rank 0.0.1 differs from rank 0.0.0",)


def test_each_rank_runs_what_it_holds(two: Path, tmp_path: Path) -> None:
    """A norm that is wrong on rank 1 alone, which the tensors put together do not show, shows in the numbers."""
    shutil.copytree(two, tmp_path / "changed")
    name = "decoder.layers.0.self_attention.kv_layernorm.weight"
    change(file_of(tmp_path / "changed", "01"), name, lambda norm: norm.mul_(3))
    report = verify(tmp_path / "changed", two, QUICK)
    assert found(report, "carried tensors") is True
    assert [layer.passed for layer in report.layers] == [False, True]


def test_a_file_that_pytorch_cannot_read_is_said(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader that verifies is not the one that converts."""
    source = open_whole(two)
    for module in (torch_save, torch_legacy_format):
        monkeypatch.setattr(module, "open_archive", lambda *_: pytest.fail("by the reader that converts"))
    name = "model.layers.0.self_attn.o_proj.weight"
    assert TorchReader(source).get(name).shape == source.logical.tensors[name].spec.shape
    path = file_of(two, "01")
    data = bytearray(path.read_bytes())
    data[60:100] = bytes(40)  # in data.pkl, of an archive whose directory is sound
    path.write_bytes(data)
    with pytest.raises(BadInputError, match="PyTorch cannot read it"):
        TorchReader(source).get(name)


# Opening


def test_what_else_a_file_holds_is_never_made(two: Path) -> None:
    """Arguments, an optimizer's and NumPy's random states name classes, each of which becomes an empty one."""
    path = file_of(two)
    state = torch.load(path, weights_only=False)
    state |= {
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}},
        "rng_state": [{"np": numpy.random.get_state(), "devices": {1, 2}}],
    }
    torch.save(state, path)
    assert "argparse.Namespace" in torch.serialization.get_unsafe_globals_in_checkpoint(path)
    models = load_models(path)
    assert torch.equal(models[0][UP.format("kv")], state["model"][UP.format("kv")])
    assert not isinstance(torch_legacy._stand_in("argparse.Namespace")(a=1), argparse.Namespace)


def test_a_name_that_the_format_does_not_need_is_refused(tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> Any:
            return shutil.rmtree, (str(tmp_path),)

    torch.save({"model": {}, "other": Canary()}, tmp_path / "model_optim_rng.pt")
    with pytest.raises(BadInputError, match=r"shutil\.rmtree, which this format does not need"):
        load_models(tmp_path / "model_optim_rng.pt")
    assert tmp_path.exists()
