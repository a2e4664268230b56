"""Plans: pure, the same every time, complete, and made without PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Recipe, digests, fingerprint, load, unflushed, write_checkpoint  # noqa: F401

from mla_convert import api
from mla_convert.combining import CombineOptions, plan_combine
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.formats.huggingface_edit import (
    edit_index,
    mark_layout,
    rename_skipped,
    set_module_blocks,
    skip_modules,
)
from mla_convert.formats.safetensors import parse_header
from mla_convert.manifest import read_manifest
from mla_convert.plan import Copy, Dequantise, Inline, Plan, Requantise, TargetTensor
from mla_convert.splitting import SplitOptions, plan_split

GLM = Recipe(heads=3, nope=192, v=256, rank=256, dtype="F8_E4M3", scales="block", shards=2, mtp=True)
LONGCAT = Recipe(attentions=("self_attn.0", "self_attn.1"), shards=3)
OPTIONS = {
    "split": SplitOptions(),
    "both": SplitOptions(keep_combined=True),
    "dequantized": SplitOptions(dequantize=True),
}
PLANS = [(GLM, name) for name in OPTIONS] + [(LONGCAT, "split"), (LONGCAT, "both")]
every_plan = pytest.mark.parametrize(("recipe", "options"), PLANS)


def plans(folder: Path, recipe: Recipe, options: str) -> tuple[Plan, Plan]:
    """The plan of a split, and of the combination of what it gives."""
    source = write_checkpoint(folder / "source", recipe)
    split = plan_split(open_checkpoint(source), OPTIONS[options])
    target = folder / "target"
    if not target.exists():
        api.split(source, target, OPTIONS[options])
    return split, plan_combine(open_checkpoint(target), read_manifest(target), CombineOptions())


def rows_of(piece: object, target: TargetTensor) -> tuple[int, int]:
    """The rows of the target that a piece fills."""
    if isinstance(piece, Inline):
        assert len(piece.data) == target.spec.nbytes
        return 0, target.spec.shape[0] if target.spec.shape else 1
    if isinstance(piece, Copy):
        assert [stop - start for start, stop in piece.box[1:]] == list(target.spec.shape[1:])
        start, stop = piece.box[0] if piece.box else (0, 1)
        at = piece.at[0] if piece.at else 0
        return at, at + stop - start
    if isinstance(piece, Dequantise):
        assert [stop - start for start, stop in piece.box[1:]] == list(target.spec.shape[1:])
        return piece.at[0], piece.at[0] + piece.box[0][1] - piece.box[0][0]
    assert isinstance(piece, Requantise)
    return piece.at, piece.at + piece.count


@every_plan
def test_every_byte_is_filled_once(recipe: Recipe, options: str, tmp_path: Path) -> None:
    for plan in plans(tmp_path, recipe, options):
        for file in plan.rewritten:
            for target in file.tensors:
                end = 0
                for start, stop in sorted(rows_of(piece, target) for piece in target.pieces):
                    assert start == end, target
                    end = stop
                assert end == (target.spec.shape[0] if target.spec.shape else 1), target


@every_plan
def test_the_files_are_those_of_the_source(recipe: Recipe, options: str, tmp_path: Path) -> None:
    for plan in plans(tmp_path, recipe, options):
        planned = [file.name for file in (*plan.rewritten, *plan.carried, *plan.generated)]
        assert len(planned) == len(set(planned))
        there = {path.relative_to(plan.catalogue.root).as_posix() for path in plan.catalogue.root.rglob("*")}
        assert set(planned) == {n for n in there if (plan.catalogue.root / n).is_file()} - {
            "mla-convert.json"
        }


@every_plan
def test_headers_describe_their_files(recipe: Recipe, options: str, tmp_path: Path) -> None:
    for plan in plans(tmp_path, recipe, options):
        for file in plan.rewritten:
            header = parse_header(file.header, file.size, file.name)
            assert [(stored.spec, stored.start) for stored in header.tensors] == [
                (target.spec, offset) for target, offset in file.placed()
            ]
            source = plan.catalogue.files[file.name].header
            assert header.metadata == source.metadata
            if plan.operation == "split":
                assert (header.data_start - source.data_start) % 4096 == 0


@every_plan
def test_planning_is_pure(recipe: Recipe, options: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", recipe)
    catalogue = open_checkpoint(source)
    config = json.dumps(catalogue.config.value) if catalogue.config else ""
    before = fingerprint(tmp_path)
    first, second = (plan_split(catalogue, OPTIONS[options]) for _ in range(2))
    assert first == second and first.digest() == second.digest()
    assert plan_split(open_checkpoint(source), OPTIONS[options]).digest() == first.digest()
    assert catalogue.config and json.dumps(catalogue.config.value) == config
    assert fingerprint(tmp_path) == before


def test_the_digest_tells_plans_apart(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", GLM)
    found = {plan_split(open_checkpoint(source), options).digest() for options in OPTIONS.values()}
    assert len(found) == 3
    os.utime(source / "tokenizer.json", ns=(1, 1))
    assert plan_split(open_checkpoint(source), SplitOptions()).digest() not in found


def test_the_digest_covers_every_piece(tmp_path: Path) -> None:
    split, combine = plans(tmp_path, GLM, "dequantized")
    seen = set()
    for plan in (split, combine):
        for number, file in enumerate(plan.rewritten):
            for at, target in enumerate(file.tensors):
                for piece in target.pieces if not target.is_carried else ():
                    fields = {name: getattr(piece, name) for name in piece.__slots__}
                    for name, value in fields.items():
                        if (type(piece), name) in seen:
                            continue
                        seen.add((type(piece), name))
                        other = replace(piece, **{name: changed(value)})
                        tensors = list(file.tensors)
                        tensors[at] = replace(target, pieces=(other, *target.pieces[1:]))
                        files = list(plan.rewritten)
                        files[number] = replace(file, tensors=tuple(tensors))
                        assert replace(plan, rewritten=tuple(files)).digest() != plan.digest(), (piece, name)
                    break
    assert {kind for kind, _ in seen} >= {Dequantise, Requantise, Inline}


def changed(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, bytes):
        return value + b"x"
    return ((7, 9), *value[1:]) if value and isinstance(value[0], tuple) else (value[0] + 1, *value[1:])


def python(code: str, *arguments: object, hash_seed: str = "0") -> str:
    """What a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


DIGEST = """
import sys
from pathlib import Path
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.splitting import SplitOptions, plan_split
plan = plan_split(open_checkpoint(Path(sys.argv[1])), SplitOptions(dequantize=True))
print(plan.digest(), [file.data for file in plan.generated])
"""


def test_hash_seeds_change_nothing(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "a", "b"]}
    recipe = replace(GLM, config={"quantization_config": quantization}, scales_apart=True)
    source = write_checkpoint(tmp_path / "source", recipe)
    assert python(DIGEST, source, hash_seed="1") == python(DIGEST, source, hash_seed="2")


LOADED = """
import sys
from mla_convert.cli import app
for arguments in (["split", sys.argv[1], "-o", sys.argv[2], "-qq"], ["combine", sys.argv[2], "-o", sys.argv[3], "-qq"],
                  ["inspect", sys.argv[1], "-qq"]):
    try:
        app(arguments)
    except SystemExit as stopped:
        assert not stopped.code, stopped.code
print(sorted({"torch", "transformers", "safetensors", "numpy", "huggingface_hub", "tilelang"} & set(sys.modules)))
"""


def test_conversions_never_load_torch(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", GLM)
    assert python(LOADED, source, tmp_path / "split", tmp_path / "back").strip().endswith("[]")
    assert digests(tmp_path / "back") == digests(source)


@every_plan
def test_sizes_come_true(recipe: Recipe, options: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", recipe)
    result = api.split(source, tmp_path / "target", OPTIONS[options])
    files = [path for path in (tmp_path / "target").rglob("*") if path.is_file()]
    manifest = (tmp_path / "target" / "mla-convert.json").stat().st_size
    assert result.plan.bytes_total == sum(path.stat().st_size for path in files) - manifest
    changed_names = {target.spec.name for target in result.plan.changed}
    assert changed_names == set(load(tmp_path / "target")) - set(load(source))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", GLM)
    before = fingerprint(tmp_path)
    result = api.split(source, tmp_path / "target", dry_run=True)
    assert result.report is None and fingerprint(tmp_path) == before
    steps = result.document()["steps"]
    assert json.loads(json.dumps(steps)) == steps
    weight = next(
        t for f in steps["rewritten"] for t in f["tensors"] if t["name"].endswith("k_b_proj.weight")
    )
    assert weight["pieces"][0] == [
        "copy",
        "model.layers.0.self_attn.kv_b_proj.weight",
        [[0, 192], [0, 256]],
        [0, 0],
    ]


# Edits of the configuration


def config_after(
    folder: Path, recipe: Recipe, quantization: dict[str, Any], **options: bool
) -> dict[str, Any]:
    before = {"quantization_config": quantization}
    source = write_checkpoint(folder / "source", replace(recipe, config=before))
    api.split(source, folder / "split", SplitOptions(**options))
    (folder / "split" / "mla-convert.json").unlink()
    api.combine(folder / "split", folder / "back", CombineOptions())
    config: dict[str, Any] = json.loads((folder / "split" / "config.json").read_text())
    assert list(config)[:-1] == list(json.loads((source / "config.json").read_text())), (
        "keys keep their order"
    )
    if not options.get("dequantize"):
        back = json.loads((folder / "back" / "config.json").read_text())
        assert back == json.loads((source / "config.json").read_text())
    found: dict[str, Any] = config["quantization_config"]
    return found


ONE = replace(GLM, layers=1, mtp=False)
KV = "model.layers.0.self_attn.kv_b_proj"
K, V = KV.replace("kv_b", "k_b"), KV.replace("kv_b", "v_b")


def test_reblocked_modules_state_their_blocks(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = config_after(tmp_path, ONE, quantization)
    assert found["module_weight_block_size"] == {K: [64, 128], V: [64, 128]}
    assert found["weight_block_size"] == [128, 128]


def test_aligned_modules_need_no_statement(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = config_after(tmp_path, replace(ONE, nope=128, v=128), quantization)
    assert found == quantization


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("modules_to_not_convert", ["lm_head", KV, "x"], ["lm_head", K, V, "x"]),
        ("ignored_layers", [KV], [K, V]),
        ("ignore", ["re:.*kv_b_proj$", "lm_head"], ["re:.*k_b_proj$", "re:.*v_b_proj$", "lm_head"]),
        ("exclude_modules", ["*kv_b_proj*"], ["*k_b_proj*", "*v_b_proj*"]),
        ("exclude", ["self_attn.kv_b_proj"], ["self_attn.k_b_proj", "self_attn.v_b_proj"]),
        ("ignore", ["kv_b_projection", "qkv_b_proj", "l.0"], ["kv_b_projection", "qkv_b_proj", "l.0"]),
        ("modules_to_not_convert", None, None),
    ],
)
def test_lists_of_unquantised_modules_follow(key: str, before: Any, after: Any, tmp_path: Path) -> None:
    recipe = replace(ONE, dtype="BF16", scales=None)
    assert config_after(tmp_path, recipe, {"quant_method": "fp8", key: before})[key] == after


def test_both_layouts_are_both_listed(tmp_path: Path) -> None:
    recipe = replace(ONE, dtype="BF16", scales=None)
    found = config_after(tmp_path, recipe, {"ignore": [KV, "re:kv_b_proj"]}, keep_combined=True)
    assert found["ignore"] == [KV, K, V, "re:kv_b_proj", "re:k_b_proj", "re:v_b_proj"]


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("fp8", "modules_to_not_convert"),
        ("compressed-tensors", "ignore"),
        ("modelopt", "exclude_modules"),
        ("quark", "exclude"),
    ],
)
def test_dequantised_modules_are_listed(method: str, key: str, tmp_path: Path) -> None:
    for number, listed in enumerate((None, ["lm_head"])):
        before = {"quant_method": method, "weight_block_size": [128, 128]} | ({key: listed} if listed else {})
        found = config_after(tmp_path / str(number), ONE, before, dequantize=True)
        assert found[key] == [*(listed or []), K, V]
        assert "module_weight_block_size" not in found


def test_nested_configurations_are_edited_too() -> None:
    config = {"text_config": {"quantization_config": {"ignore": [KV]}}, "compression_config": {}}
    edited = mark_layout(config, "split")
    rename_skipped(edited, {KV: [K, V]}, keep=False, leaf_renamed={})
    skip_modules(edited, ["y"])
    set_module_blocks(edited, {K: (64, 128)})
    assert edited == {
        "text_config": {
            "quantization_config": {"ignore": [K, V, "y"], "module_weight_block_size": {K: [64, 128]}}
        },
        "compression_config": {"modules_to_not_convert": ["y"], "module_weight_block_size": {K: [64, 128]}},
        "mla_convert": {"layout": "split"},
    }
    assert config == {"text_config": {"quantization_config": {"ignore": [KV]}}, "compression_config": {}}
    set_module_blocks(edited, {})
    assert "module_weight_block_size" not in json.dumps(edited)
    assert "mla_convert" not in mark_layout(edited, None)


# Edits of the index


def test_an_index_keeps_its_order_and_its_keys() -> None:
    index = {"weight_map": {"c": "1", "a": "2", "b": "1"}, "note": 1, "metadata": {"x": "y", "total_size": 9}}
    edited = edit_index(index, {"b": "1", "a2": "1", "a1": "1", "c": "1", "z": "1"}, {"a": ["a1", "a2"]}, 7)
    assert list(edited) == ["weight_map", "note", "metadata"]
    assert list(edited["weight_map"]) == ["c", "a1", "a2", "b", "z"]
    assert edited["metadata"] == {"x": "y", "total_size": 7}


def test_an_index_without_metadata_gets_some() -> None:
    edited = edit_index({"weight_map": {"a": "1"}}, {"a": "1"}, {}, 7)
    assert edited == {"metadata": {"total_size": 7}, "weight_map": {"a": "1"}}
