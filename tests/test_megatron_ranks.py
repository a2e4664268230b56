"""Megatron's older format over tensor, pipeline and expert ranks, as genuine ranks write and read it."""

from __future__ import annotations

import argparse
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import megatron_checkpoints as made
import pytest
import torch
from conversions import run
from megatron_models import ARGUMENTS, SPARSE, run_ranks
from test_torch_dist_attacks import FIRES, QUIET

from mla_convert import api
from mla_convert.comparing import compare
from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.torch_save_writing import write_archive
from mla_convert.megatron.changes import MegatronOptions
from mla_convert.megatron.translation import LayerSpec
from mla_convert.sharding import ReshardOptions
from mla_convert.whole import Format

BACK = ReshardOptions(1, to=Format.HUGGINGFACE)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("0.16.1", {"tensor_model_parallel_size": 2, "padded_vocab_size": 256}),
    "tp2, sparse": ("0.19.2", {**SPARSE, "tensor_model_parallel_size": 2}),
    "pp2 in two virtual stages": (
        "0.16.1",
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "ep2": ("0.19.2", {"expert_model_parallel_size": 2}),
    "tp2, ep2, whole experts": (
        "0.19.2",
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
}


def ranks(folder: Path, tp: int, *, inner: str = "mtp_model_layer", **fields: Any) -> dict[str, torch.Tensor]:
    """A checkpoint in the older format over ``tp`` ranks, cut here with torch; the tensors it is made of."""
    tensors, _ = made.make("deepseek_v3", shared=False, **fields)
    whole = made.in_megatron(tensors, inner=inner)
    for rank in range(tp):
        model = {name: cut(name, value, rank, tp) for name, value in whole.items()}
        model |= {f"{n.rpartition('.')[0]}._extra_state": None for n in whole if n.endswith("_proj.weight")}
        path = folder / "iter_0000005" / f"mp_rank_{rank:02d}"
        path.mkdir(parents=True)
        args = argparse.Namespace(**{**arguments(tp), "padded_vocab_size": len(tensors["lm_head.weight"])})
        state = {"args": args, "checkpoint_version": 3.0, "iteration": 5, "model": model}
        torch.save(state, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return tensors


def arguments(tp: int) -> dict[str, Any]:
    return {**ARGUMENTS, "num_layers": 3, "moe_layer_freq": [0, 1, 1], "tensor_model_parallel_size": tp}


def cut(name: str, value: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """A rank's part of a Megatron weight: by hand, from Megatron's parallel layers."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module == "linear_fc1":
        return torch.cat([half.chunk(tp)[rank] for half in value.chunk(2)])
    if module in ("linear_proj", "linear_fc2"):
        return value.chunk(tp, 1)[rank].contiguous()
    rows = ("linear_q_up_proj", "linear_kv_up_proj", "word_embeddings", "output_layer", "eh_proj")
    return value.chunk(tp)[rank].clone() if module in rows else value


def load(folder: Path, rank: int = 0) -> dict[str, Any]:
    path = next(folder.glob(f"*/mp_rank_{rank:02d}")) / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        return dict(torch.load(path, weights_only=True))


# By hand


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_become_one_checkpoint(tmp_path: Path, tp: int) -> None:
    tensors = ranks(tmp_path / "torch", tp)
    api.reshard(tmp_path / "torch", tmp_path / "hf", BACK)
    made.require_equal(made.read(tmp_path / "hf"), tensors)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_every_rank_gets_what_megatron_would_cut(tmp_path: Path, before: int, after: int) -> None:
    ranks(tmp_path / "torch", before)
    ranks(tmp_path / "wanted", after)
    spec = LayerSpec.TE if before == 1 else None  # one rank does not show that down-projections stay whole
    api.reshard(tmp_path / "torch", tmp_path / "found", ReshardOptions(after, spec=spec))
    for rank in range(after):
        found, wanted = load(tmp_path / "found", rank), load(tmp_path / "wanted", rank)
        assert found["model"].keys() == wanted["model"].keys()
        made.require_equal(*({n: t for n, t in m["model"].items() if t is not None} for m in (found, wanted)))
        assert found["args"].tensor_model_parallel_size == after
        assert found["args"].hidden_size == made.HIDDEN
        assert (found["iteration"], found["checkpoint_version"]) == (5, 3.0)
    assert (tmp_path / "found" / "latest_checkpointed_iteration.txt").read_text() == "5"


@pytest.mark.parametrize("is_cut", [False, True])
def test_fused_down_projections_come_apart(tmp_path: Path, is_cut: bool) -> None:
    """``linear_qkv_down_proj``: the two one below the other, whole on each rank or a share of each."""
    tensors = ranks(tmp_path / "torch", 2)
    for rank, path in enumerate(sorted((tmp_path / "torch").rglob("*.pt"))):
        state = torch.load(path, weights_only=False)
        model = state["model"]
        for name in [name for name in model if name.endswith("linear_q_down_proj.weight")]:
            base = name.removesuffix("linear_q_down_proj.weight")
            two = [model.pop(f"{base}linear_{x}_down_proj.weight") for x in ("q", "kv")]
            two = [matrix.chunk(2)[rank] for matrix in two] if is_cut else two
            model[f"{base}linear_qkv_down_proj.weight"] = torch.cat(two)
            norm = model.pop(base.removesuffix("self_attention.") + "input_layernorm.weight")
            model[f"{base}linear_qkv_down_proj.layer_norm_weight"] = norm
        torch.save(state, path)
    api.reshard(tmp_path / "torch", tmp_path / "hf", BACK)
    made.require_equal(made.read(tmp_path / "hf"), tensors)
    with pytest.raises(CannotError, match="input norms are fused"):
        api.reshard(tmp_path / "torch", tmp_path / "one", ReshardOptions(1))


def test_a_rank_is_a_sound_archive(tmp_path: Path) -> None:
    ranks(tmp_path / "torch", 1)
    api.reshard(tmp_path / "torch", tmp_path / "found", ReshardOptions(2))
    for path in (tmp_path / "found").rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


def test_split_and_combined_again(tmp_path: Path) -> None:
    tensors = ranks(tmp_path / "torch", 2)
    api.split(tmp_path / "torch", tmp_path / "split")
    api.combine(tmp_path / "split", tmp_path / "combined")
    kv = tensors["model.layers.1.self_attn.kv_b_proj.weight"].view(made.HEADS, 32, made.RANK)
    for rank in range(2):
        model = load(tmp_path / "split", rank)["model"]
        half = kv.chunk(2)[rank]
        base = "decoder.layers.1.self_attention."
        assert torch.equal(model[base + "linear_k_up_proj.weight"], half[:, :16].reshape(-1, made.RANK))
        assert torch.equal(model[base + "linear_v_up_proj.weight"], half[:, 16:].reshape(-1, made.RANK))
        assert base + "linear_k_up_proj._extra_state" in model
        assert base + "linear_kv_up_proj.weight" not in model
        before, after = load(tmp_path / "torch", rank)["model"], load(tmp_path / "combined", rank)["model"]
        assert before.keys() == after.keys()
        made.require_equal(*({n: t for n, t in m.items() if t is not None} for m in (after, before)))


def test_the_vocabulary_is_padded_anew_for_the_ranks(tmp_path: Path) -> None:
    """Megatron pads 250 tokens to whole multiples of 50 rows for each rank: 250 rows for one, 300 for two."""
    tensors = ranks(tmp_path / "torch", 1, vocabulary=250)
    path = next((tmp_path / "torch").rglob("*.pt"))
    state = torch.load(path, weights_only=False)
    state["args"].make_vocab_size_divisible_by = 50
    torch.save(state, path)
    api.reshard(tmp_path / "torch", tmp_path / "two", ReshardOptions(2))
    found = [load(tmp_path / "two", rank) for rank in range(2)]
    padded = torch.cat([tensors["lm_head.weight"], torch.zeros(50, made.HIDDEN, dtype=torch.bfloat16)])
    assert torch.equal(torch.cat([one["model"]["output_layer.weight"] for one in found]), padded)
    assert found[1]["args"].padded_vocab_size == 300
    api.reshard(tmp_path / "two", tmp_path / "one", ReshardOptions(1))
    made.require_equal(
        {n: t for n, t in load(tmp_path / "one")["model"].items() if t is not None},
        {n: t for n, t in state["model"].items() if t is not None},
    )


def test_copies_that_differ_are_refused(tmp_path: Path) -> None:
    ranks(tmp_path / "torch", 2)
    path = tmp_path / "torch" / "iter_0000005" / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["decoder.final_layernorm.weight"][0] += 1
    torch.save(state, path)
    with pytest.raises(BadInputError, match="not the same on all ranks") as refused:
        api.reshard(tmp_path / "torch", tmp_path / "hf", BACK)
    assert "norm.weight" in refused.value.details[0]
    assert not compare(tmp_path / "torch", tmp_path / "torch").is_same


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    ranks(tmp_path / "torch", 2)
    shutil.rmtree(tmp_path / "torch" / "iter_0000005" / "mp_rank_01")
    with pytest.raises(BadInputError, match="ranks are missing"):
        api.reshard(tmp_path / "torch", tmp_path / "hf", BACK)


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    ranks(tmp_path / "torch", 1)
    done = run("reshard", str(tmp_path / "torch"), "--tp", "3")
    assert done.returncode == 4
    assert "4 heads of model.layers.0.self_attn do not divide by 3" in done.stderr


def test_the_optimizer_is_left_out_on_request_alone(tmp_path: Path) -> None:
    ranks(tmp_path / "torch", 1)
    path = tmp_path / "torch" / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state |= {"optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}, "rng_state": [{"a": torch.zeros(3)}]}
    torch.save(state, path)
    with pytest.raises(CannotError, match="optimizer"):
        api.split(tmp_path / "torch", tmp_path / "split")
    options = MegatronOptions(drop_optimizer=True)
    api.split(tmp_path / "torch", tmp_path / "split", megatron=options)
    assert load(tmp_path / "split").keys() == {"args", "checkpoint_version", "iteration", "model"}


def test_inspect_says_how_it_is_laid_out(tmp_path: Path) -> None:
    ranks(tmp_path / "torch", 2)
    done = run("inspect", str(tmp_path / "torch"), "--json")
    document = json.loads(done.stdout)
    assert (document["format"], document["ranks"], document["layout"]) == ("torch", 2, "combined")
    assert document["megatron"]["iteration"] == 5
    assert document["tensor_parallel"]["legal"] == [1, 2, 4]


# Attacks


@pytest.mark.parametrize("name", [*FIRES, *QUIET])
def test_a_crafted_file_runs_nothing(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    data = FIRES[name](str(canary)) if name in FIRES else QUIET[name]
    ranks(tmp_path / "torch", 1)
    path = next((tmp_path / "torch").rglob("*.pt"))
    with zipfile.ZipFile(path) as old:
        records = {n.partition("/")[2]: old.read(n) for n in old.namelist() if "/data/" in n}
    path.write_bytes(write_archive(data, records))
    for words in (["inspect"], ["split"], ["reshard", "--to", "huggingface"]):
        done = run(words[0], str(tmp_path / "torch"), *words[1:])
        assert done.returncode == 3, done.stderr
        assert "Traceback" not in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["torch"]


# Genuine ranks


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_genuine_ranks_write_in_both_formats_is_the_same(tmp_path: Path, name: str) -> None:
    version, more = LAYOUTS[name]
    run_ranks(version, {**ARGUMENTS, **more}, tmp_path)
    assert compare(tmp_path / "dist", tmp_path / "torch").is_same
    if "whole experts" in name:
        return  # they come out sliced
    api.split(tmp_path / "torch", tmp_path / "split")
    api.combine(tmp_path / "split", tmp_path / "combined")
    for path in sorted((tmp_path / "torch").rglob("*.pt")):
        before = torch.load(path, weights_only=False)
        after = torch.load(tmp_path / "combined" / path.relative_to(tmp_path / "torch"), weights_only=False)
        for model in (key for key in before if key.startswith("model")):
            assert before[model].keys() == after[model].keys()
            made.require_equal(
                *({n: t for n, t in m[model].items() if t is not None} for m in (after, before))
            )


def test_genuine_ranks_load_what_was_resharded_for_them(tmp_path: Path) -> None:
    version, more = "0.19.2", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    run_ranks(version, ARGUMENTS, tmp_path / "one")
    api.reshard(tmp_path / "one" / "torch", tmp_path / "two", ReshardOptions(2))
    iteration = tmp_path / "two" / "iter_0000003"
    run_ranks(version, {**ARGUMENTS, **more}, tmp_path / "again", load=iteration)
    assert compare(tmp_path / "one" / "dist", tmp_path / "again" / "dist").is_same
    assert compare(tmp_path / "one" / "dist", tmp_path / "again" / "torch").is_same
