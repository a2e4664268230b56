"""``verify`` passes what is right and fails, with exit code 10, what is not: one corruption at a time.

The corruptions are made with the official safetensors library on a split of the demo checkpoint (FP8, DSA, MTP)
and on tiny transformers models. The manifest is removed unless a case is about it, so that every check has to
find its fault on its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mla_convert import api
from mla_convert.cli import app
from mla_convert.demo_model import HEADS, INDEX_TOPK, KV_RANK, NOPE, V, write_demo_checkpoint
from mla_convert.errors import BadInputError, CannotError, UsageError
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.verification import numbers
from mla_convert.verification.result import VerifyReport
from mla_convert.verify import ControlFailedError, VerifyOptions, verify

ATTENTION = "model.layers.0.self_attn."
QUICK = VerifyOptions(layers=(0,), tokens=96, record=False)
FAMILIES = (
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v3_yarn",
    "deepseek_v3_bias",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm_moe_dsa_shared",
    "glm4_moe_lite",
)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo checkpoint and its split."""
    original = tmp_path_factory.mktemp("verify") / "demo"
    write_demo_checkpoint(original)
    return original, api.split(original).output


@pytest.fixture
def corrupted(demo: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the split without its manifest, to be corrupted."""
    copy = tmp_path / "corrupted"
    shutil.copytree(demo[1], copy)
    (copy / MANIFEST_NAME).unlink()
    return copy


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], holding: str) -> None:
    """Apply ``change`` to the tensors of the shard that holds one, as any user of the library would."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][holding]
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})


def edit_json(folder: Path, name: str, change: Callable[[dict], None]) -> None:
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value, indent=2))


def failed_levels(report: VerifyReport) -> set[str]:
    levels = {check.level for check in report.checks if check.passed is False}
    return levels | {"numbers" for layer in report.layers if not layer.passed}


def heads_of(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """A view by head, of bytes: 8-bit floats know few operations."""
    return weight.view(torch.uint8).view(HEADS, dim, -1)


def swap_two_heads(tensors: dict[str, torch.Tensor]) -> None:
    weight = heads_of(tensors[ATTENTION + "k_b_proj.weight"], NOPE)
    weight[[2, 5]] = weight[[5, 2]]


def exchange_k_and_v(tensors: dict[str, torch.Tensor]) -> None:
    for field in ("weight", "weight_scale_inv"):
        k, v = f"{ATTENTION}k_b_proj.{field}", f"{ATTENTION}v_b_proj.{field}"
        if k in tensors:
            tensors[k], tensors[v] = tensors[v], tensors[k]


def shift_one_row(tensors: dict[str, torch.Tensor]) -> None:
    weight = tensors[ATTENTION + "v_b_proj.weight"].view(torch.uint8)
    weight.copy_(weight.roll(1, 0))


def transpose_k(tensors: dict[str, torch.Tensor]) -> None:
    """Head by head, as engines keep it in memory; the shape stays legal because nope is half the rank."""
    name = ATTENTION + "k_b_proj.weight"
    by_head = heads_of(tensors[name], NOPE)
    turned = by_head.transpose(1, 2).contiguous().view(HEADS * NOPE, KV_RANK)
    tensors[name] = turned.view(torch.float8_e4m3fn)


def scale_off(tensors: dict[str, torch.Tensor]) -> None:
    tensors[ATTENTION + "k_b_proj.weight_scale_inv"][1, 0] *= 1.25


def wrong_split_of_heads(tensors: dict[str, torch.Tensor]) -> None:
    """K and V cut at the wrong row of each head: nope 64 and v 192 instead of 128 and 128."""
    k, v = (tensors[f"{ATTENTION}{half}_b_proj.weight"] for half in "kv")
    combined = torch.cat([heads_of(k, NOPE), heads_of(v, V)], 1)
    for half, rows in (("k", combined[:, :64]), ("v", combined[:, 64:])):
        cut = rows.reshape(-1, KV_RANK).contiguous().view(torch.float8_e4m3fn)
        tensors[f"{ATTENTION}{half}_b_proj.weight"] = cut


WEIGHTS = {
    "two heads swapped": (swap_two_heads, "k_b_proj.weight", {"bytes", "numbers"}),
    "K and V exchanged": (exchange_k_and_v, "k_b_proj.weight", {"bytes", "numbers"}),
    "one row off": (shift_one_row, "v_b_proj.weight", {"bytes", "numbers"}),
    "one scale off": (scale_off, "k_b_proj.weight_scale_inv", {"bytes", "numbers"}),
    "K transposed": (transpose_k, "k_b_proj.weight", {"bytes", "numbers"}),
    "wrong nope and v": (wrong_split_of_heads, "k_b_proj.weight", {"structure"}),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_corrupted_weight_fails_on_each_level(name: str, demo: tuple[Path, Path], corrupted: Path) -> None:
    change, holding, levels = WEIGHTS[name]
    edit_tensors(corrupted, change, ATTENTION + holding)
    report = verify(corrupted, demo[0], QUICK)
    assert not report.passed
    assert failed_levels(report) >= levels, report.document()


def drop_tensor(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    edit_tensors(folder, lambda tensors: tensors.pop(name), name)
    edit_json(folder, "model.safetensors.index.json", lambda index: index["weight_map"].pop(name))


def stale_index(folder: Path) -> None:
    def move(index: dict) -> None:
        index["weight_map"][ATTENTION + "k_b_proj.weight"] = "model-00003-of-00003.safetensors"

    edit_json(folder, "model.safetensors.index.json", move)


def lying_total_size(folder: Path) -> None:
    edit_json(folder, "model.safetensors.index.json", lambda index: index["metadata"].update(total_size=1))


def drop_v(folder: Path) -> None:
    name = ATTENTION + "v_b_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.pop(name), name)
    edit_json(folder, "model.safetensors.index.json", lambda index: index["weight_map"].pop(name))


def other_dtype(folder: Path) -> None:
    name = "model.layers.0.input_layernorm.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].bfloat16()}), name)


def one_bit_of_a_carried_tensor(folder: Path) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.uint8)[7, 11] ^= 1

    edit_tensors(folder, flip, name)


def wrong_indexer_rope(folder: Path) -> None:
    edit_json(folder, "config.json", lambda config: config.update(indexer_rope_interleave=True))


def wrong_softmax_scale(folder: Path) -> None:
    edit_json(folder, "config.json", lambda config: config["rope_scaling"].update(mscale_all_dim=0.0))


def wrong_layout_mark(folder: Path) -> None:
    edit_json(folder, "config.json", lambda config: config["mla_convert"].update(layout="combined"))


def wrong_heads(folder: Path) -> None:
    edit_json(folder, "config.json", lambda config: config.update(num_attention_heads=4))


FILES = {
    "a dropped tensor": (drop_tensor, {"structure"}),
    "V missing": (drop_v, {"structure"}),
    "a stale index": (stale_index, {"structure"}),
    "a lying total_size": (lying_total_size, {"structure"}),
    "another dtype": (other_dtype, {"structure"}),
    "one bit of a carried tensor": (one_bit_of_a_carried_tensor, {"bytes"}),
    "wrong rope layout in the indexer": (wrong_indexer_rope, {"structure", "numbers"}),
    "wrong softmax scale": (wrong_softmax_scale, {"structure", "numbers"}),
    "wrong layout mark": (wrong_layout_mark, {"structure"}),
    "wrong heads in the config": (wrong_heads, {"structure"}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_corrupted_checkpoint_fails(name: str, demo: tuple[Path, Path], corrupted: Path) -> None:
    change, levels = FILES[name]
    change(corrupted)
    result = CliRunner().invoke(
        app,
        ["verify", str(corrupted), "--against", str(demo[0]), "--json", "--layers", "0", "--seq", "96"],
    )
    assert result.exit_code == 10, result.output
    document = json.loads(result.stdout)
    assert document["passed"] is False
    failed = {check["level"] for check in document["checks"] if check["passed"] is False}
    failed |= {"numbers" for layer in document["layers"] if not layer["passed"]}
    assert failed >= levels, document


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 4])
def test_every_family_verifies(family: str, tp: int, tmp_path: Path) -> None:
    original = tiny_models.save(family, tmp_path / family)
    converted = api.split(original).output
    report = verify(converted, original, VerifyOptions(tp=tp, dtype="float64", tokens=40))
    assert report.passed, report.document()
    assert all(layer.absorbed.relative < 1e-12 for layer in report.layers)
    whole = api.combine(converted).output
    for file in original.iterdir():
        assert file.read_bytes() == (whole / file.name).read_bytes()


@pytest.mark.parametrize("family", ["longcat_flash", "kimi_linear", "bailing_hybrid", "minicpm3", "mistral4"])
def test_other_families_verify(family: str, tmp_path: Path) -> None:
    original = tiny_models.save(family, tmp_path / family)
    report = verify(api.split(original).output, None, VerifyOptions(tokens=40))
    assert report.passed, report.document()
    assert report.against == str(original)


def test_two_heads_swapped_in_a_transformers_model(tmp_path: Path) -> None:
    original = tiny_models.save("deepseek_v3", tmp_path / "model")
    converted = api.split(original).output
    (converted / MANIFEST_NAME).unlink()
    shard = converted / "model.safetensors"
    tensors = load_file(shard)
    weight = tensors[ATTENTION + "k_b_proj.weight"].view(4, 16, 32)
    weight[[0, 3]] = weight[[3, 0]]
    save_file(tensors, shard)
    report = verify(converted, original, VerifyOptions(tokens=40))
    assert failed_levels(report) == {"bytes", "numbers"}
    broken = [layer.layer for layer in report.layers if not layer.passed]
    assert broken == [0]
    assert report.layers[0].absorbed.worst_head in (0, 3)


def test_wrong_indexer_rope_shows_only_past_the_topk(demo: tuple[Path, Path], corrupted: Path) -> None:
    wrong_indexer_rope(corrupted)
    past = verify(corrupted, demo[0], QUICK)
    assert past.layers[0].selection is not None
    assert not past.layers[0].selection.passed
    below = verify(corrupted, demo[0], VerifyOptions(layers=(0,), tokens=INDEX_TOPK, record=False))
    assert below.layers[0].selection is not None
    assert below.layers[0].selection.passed
    assert any("do not exceed top-k" in check.summary for check in below.checks)


def test_the_manifest_stands_in_for_a_lost_original(demo: tuple[Path, Path], tmp_path: Path) -> None:
    alone = tmp_path / "moved" / "deeper" / "split"
    shutil.copytree(demo[1], alone)
    report = verify(alone, None, QUICK)
    assert report.passed
    assert report.against is None
    assert any("recorded sha256" in check.summary for check in report.checks)

    edit_tensors(alone, swap_two_heads, ATTENTION + "k_b_proj.weight")
    report = verify(alone, None, QUICK)
    assert failed_levels(report) >= {"structure", "bytes"}


def test_the_outcome_is_recorded_in_the_manifest(demo: tuple[Path, Path], tmp_path: Path) -> None:
    copy = tmp_path / "split"
    shutil.copytree(demo[1], copy)
    report = verify(copy, demo[0], VerifyOptions(layers=(0,), tokens=96, tp=2))
    assert report.recorded
    recorded = json.loads((copy / MANIFEST_NAME).read_text())["verification"]
    assert recorded["passed"] is True
    assert recorded["settings"]["tp"] == 2
    assert recorded["ran"] == {"indexer_select": "reference", "sparse_mla": "reference"}
    again = api.combine(copy, tmp_path / "again").output  # the record does not get in the way
    assert (again / "model-00001-of-00003.safetensors").read_bytes() == (
        demo[0] / "model-00001-of-00003.safetensors"
    ).read_bytes()


def test_a_combined_checkpoint_is_compared_with_itself(demo: tuple[Path, Path]) -> None:
    report = verify(demo[0], None, QUICK)
    assert report.passed
    assert "with itself" in report.against_note


@pytest.mark.parametrize("options", ["dequantize", "keep_combined"])
def test_other_outputs_of_split_verify(options: str, demo: tuple[Path, Path], tmp_path: Path) -> None:
    from mla_convert.splitting import SplitOptions

    output = api.split(demo[0], tmp_path / "out", SplitOptions(**{options: True})).output
    report = verify(output, demo[0], QUICK)
    assert report.passed, report.document()


def test_a_broken_check_is_not_a_pass(demo: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "_within", lambda errors, limit: True)
    with pytest.raises(ControlFailedError, match="the check itself is broken"):
        verify(demo[1], demo[0], QUICK)


def test_not_a_number_is_an_infinite_error() -> None:
    truth = torch.ones(3, 2, 4, dtype=torch.float64)
    out = torch.ones(3, 5, dtype=torch.float64)
    head = truth.clone()
    head[1, 1, 2] = torch.nan
    errors = numbers.measure(head, out, truth, out)
    assert errors.head == float("inf")
    assert errors.worst_head == 1


def test_explicit_tilelang_without_a_gpu_is_an_error(demo: tuple[Path, Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(app, ["verify", str(demo[1]), "--backend", "tilelang", "--json"])
    assert result.exit_code == 4
    assert "cannot run" in result.stderr


def test_heads_must_divide(demo: tuple[Path, Path]) -> None:
    with pytest.raises(
        CannotError, match=r"8 heads of model\.layers\.0\.self_attn do not divide by 3"
    ) as caught:
        verify(demo[1], None, VerifyOptions(tp=3))
    assert caught.value.hint == "sizes that fit: 1, 2, 4, 8"


def test_unknown_layers_are_named(demo: tuple[Path, Path]) -> None:
    with pytest.raises(CannotError, match="no MLA block in layer 7, 9") as caught:
        verify(demo[1], None, VerifyOptions(layers=(0, 7, 9)))
    assert caught.value.hint == "layers with MLA: 0, 1, 2, 3"


def test_bad_requests(demo: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        verify(tmp_path / "nothing")
    with pytest.raises(UsageError, match="the checkpoint itself"):
        verify(demo[1], demo[1])
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(BadInputError):
        verify(damaged)


def test_without_a_path_it_says_what_it_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["verify", "--tp", "8", "--layers", "3", "--seq", "80"])
    assert result.exit_code == 0, result.output
    assert "verifying the built-in demo model" in result.stderr
    assert "✓ verified" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_without_a_path_the_current_folder_comes_first(
    demo: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(demo[1])
    result = CliRunner().invoke(app, ["verify", "--layers", "0", "--seq", "80", "--no-record", "-q"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "passed\n"


def test_the_demo_model_is_the_same_everywhere(demo: tuple[Path, Path]) -> None:
    """Its bytes are part of the documentation: they do not depend on any library's version."""
    from hashlib import sha256

    digest = sha256(b"".join(path.read_bytes() for path in sorted(demo[0].iterdir())))
    assert digest.hexdigest()[:16] == "05a4ee254a117e0b"


@pytest.mark.parametrize(
    ("tokens", "cp", "expected"),
    [(100, 1, 100), (4096, 1, 256), (4096, 3, 252), (4200, 150, 300), (600, 300, 600)],
)
def test_tokens_of_the_dense_check_divide_over_the_ranks(tokens: int, cp: int, expected: int) -> None:
    """More than 128 context-parallel ranks once left none."""
    assert numbers.few_tokens(tokens, cp) == expected
