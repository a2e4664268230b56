"""The manifest: what it records, that it restores, and that a false or damaged one never does harm."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Recipe, Stored, digests, load, unflushed, write_checkpoint, write_file  # noqa: F401

from mla_convert import api
from mla_convert.combining import CombineOptions
from mla_convert.engine import RunOptions
from mla_convert.errors import BadInputError
from mla_convert.manifest import pack, read_manifest, unpack
from mla_convert.splitting import SplitOptions

NAME = "mla-convert.json"
FP8 = Recipe(heads=2, nope=128, v=128, rank=256, dtype="F8_E4M3", scales="block", shards=2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", shards=2)


@pytest.fixture
def target(source: Path) -> Path:
    """A split checkpoint with its manifest."""
    api.split(source, source.with_name("target"))
    return source.with_name("target")


def combined(target: Path, **options: bool) -> Path:
    api.combine(target, target.with_name("back"), CombineOptions(**options))
    return target.with_name("back")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads((folder / NAME).read_text())
    change(value)
    (folder / NAME).write_text(json.dumps(value))


def test_what_it_records(source: Path, target: Path) -> None:
    manifest = read_manifest(target)
    assert manifest is not None
    value = manifest.value
    assert (manifest.operation, value["layout"], value["source"]["path"]) == ("split", "split", "../source")
    found = digests(target)
    assert {name: entry["sha256"] for name, entry in manifest.files.items()} == found
    assert all(entry["size"] == (target / name).stat().st_size for name, entry in manifest.files.items())
    tensors = load(source)
    assert manifest.tensor_sha256 == {
        name: hashlib.sha256(tensor.data).hexdigest() for name, tensor in tensors.items() if "kv_b" in name
    }
    assert value["blocks"][1] == {
        "prefix": "model.layers.1.self_attn.", "layer": 1, "heads": 4, "nope": 16, "rope": 8, "v": 16, "rank": 32,
    }  # fmt: skip
    assert manifest.restore_files == {
        name: (source / name).read_bytes() for name in ("config.json", "model.safetensors.index.json")
    }
    for name, header in manifest.restore_headers.items():
        assert (source / name).read_bytes().startswith(header)
    assert manifest.source_folder() == source


def test_equal_conversions_have_equal_manifests(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        api.split(source, tmp_path / name, run=RunOptions(workers=3 if name == "one" else 1))
    assert (tmp_path / "one" / NAME).read_bytes() == (tmp_path / "two" / NAME).read_bytes()


def test_scales_that_are_gone_are_kept_in_it(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", FP8)
    api.split(source, tmp_path / "target", SplitOptions(dequantize=True))
    manifest = read_manifest(tmp_path / "target")
    assert manifest is not None
    scales = {name: tensor.data for name, tensor in load(source).items() if "scale" in name}
    assert manifest.restore_tensors == scales and len(scales) == 2


@pytest.mark.parametrize("gone", ["moved", "changed"])
def test_the_source_may_be_gone(gone: str, source: Path, target: Path) -> None:
    if gone == "moved":
        before = digests(source)
        shutil.move(source, source.with_name("elsewhere"))
    else:
        before = digests(source)
        (source / "tokenizer.json").write_bytes(b"longer than before, by far")
    manifest = read_manifest(target)
    assert manifest is not None and manifest.source_folder() is None
    assert digests(combined(target)) == before


def test_a_copy_of_the_output_restores_as_well(source: Path, target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(target, copy)
    shutil.rmtree(target)
    assert digests(combined(copy)) == digests(source)


def test_no_manifest(source: Path) -> None:
    assert read_manifest(source) is None


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 100, b"a" * 5000])
def test_packing(data: bytes) -> None:
    assert unpack(pack(data), "m") == data


@pytest.mark.parametrize(
    "text", ["", "!", "AAAA", pack(b"x" * 100)[:-8], None, 7, pack(b"x" * 100)[:8] + "===="]
)
def test_damaged_packing(text: object) -> None:
    with pytest.raises(BadInputError, match="m: damaged restore data"):
        unpack(text, "m")


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_convert.manifest._MAX_RESTORED", 1000)
    assert unpack(pack(bytes(999)), "m") == bytes(999)
    with pytest.raises(BadInputError, match="damaged"):
        unpack(pack(bytes(1_000_000)), "m")


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no number": (lambda v: v.pop("manifest"), "not a manifest of this tool"),
    "newer": (lambda v: v.update(manifest=99), "format 99; this version reads up to 1"),
    "operation": (lambda v: v.update(operation=1), "operation is missing or not str"),
    "plan": (lambda v: v.pop("plan"), "plan is missing"),
    "files": (lambda v: v.update(files=[]), "files is missing or not dict"),
    "a file": (lambda v: v["files"].update(x=1), "files is damaged"),
    "restore": (lambda v: v["restore"].pop("tensors"), "restore is incomplete"),
    "source": (lambda v: v["source"].pop("path"), "source is damaged"),
    "a size": (lambda v: v["source"]["files"].update({"config.json": 7}), "source is damaged"),
    "a time": (lambda v: v["source"]["files"].update({"config.json": [7]}), "source is damaged"),
    "a hash": (lambda v: v["tensor_sha256"].update(x=1), "tensor_sha256 is damaged"),
    "a header": (
        lambda v: v["restore"]["headers"].update({"model-00001-of-000002.safetensors": "!"}),
        "restore data",
    ),
    "another header": (
        lambda v: v["restore"]["headers"].update({"model-00001-of-000002.safetensors": pack(b"12345678")}),
        "original header of model-00001",
    ),
}


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage(change: Callable[[dict[str, Any]], object], message: str, source: Path, target: Path) -> None:
    edit(target, change)
    with pytest.raises(BadInputError, match=message) as caught:
        combined(target)
    assert NAME in caught.value.message
    assert not target.with_name("back").exists()
    assert load(combined(target, ignore_manifest=True)) == load(source)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"manifest": 1, "manifest": 1}'])
def test_no_json(text: str, target: Path) -> None:
    (target / NAME).write_text(text)
    with pytest.raises(BadInputError, match=NAME):
        combined(target)


@pytest.mark.parametrize("name", ["../escape.safetensors", "/tmp/escape.safetensors", "sub/x.safetensors"])
def test_names_that_lead_elsewhere(name: str, target: Path) -> None:
    header = json.loads((target / NAME).read_text())["restore"]["headers"][
        "model-00001-of-000002.safetensors"
    ]
    edit(target, lambda value: value["restore"]["headers"].update({name: header}))
    with pytest.raises(BadInputError, match="is gone"):
        combined(target)
    assert not (target.parent / "escape.safetensors").exists()


def rewrite(
    folder: Path, change: Callable[[dict[str, Stored]], dict[str, Stored]], *, shard: int = 1
) -> None:
    """Change the tensors of one shard, as another tool would; the index is dropped."""
    path = folder / f"model-0000{shard}-of-000002.safetensors"
    copy = folder / "one"
    copy.mkdir()
    shutil.move(path, copy / path.name)
    write_file(path, change(load(copy)))
    shutil.rmtree(copy)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def test_a_tensor_that_was_added_is_not_lost(target: Path) -> None:
    rewrite(target, lambda tensors: tensors | {"lora": Stored("U8", (1,), b"1")})
    with pytest.raises(BadInputError, match=r"lora was added to model-00001-of-000002\.safetensors"):
        combined(target)
    assert "lora" in load(combined(target, ignore_manifest=True))


def test_a_tensor_that_is_missing_is_noticed(target: Path) -> None:
    rewrite(target, lambda tensors: {n: t for n, t in tensors.items() if "embed" not in n})
    with pytest.raises(BadInputError, match=r"model\.embed_tokens\.weight BF16 \[10, 24\] is not in"):
        combined(target)


@pytest.mark.parametrize("what", ["k_b_proj", "embed_tokens"])
def test_a_tensor_that_was_moved_is_noticed(what: str, source: Path, target: Path) -> None:
    moved = {n: t for n, t in load(target).items() if what in n and "layers.1" not in n}
    rewrite(target, lambda tensors: {n: t for n, t in tensors.items() if n not in moved})
    write_file(target / "other.safetensors", moved)
    with pytest.raises(BadInputError, match=r"does not describe .* other\.safetensors"):
        combined(target)
    assert load(combined(target, ignore_manifest=True)) == load(source)


def test_a_shard_that_is_gone_is_noticed(target: Path) -> None:
    (target / "model.safetensors.index.json").unlink()
    shutil.move(target / "model-00001-of-000002.safetensors", target / "renamed.safetensors")
    shutil.move(target / "model-00002-of-000002.safetensors", target / "renamed2.safetensors")
    with pytest.raises(BadInputError, match=r"model-00001-of-000002\.safetensors is gone"):
        combined(target)


def test_edits_of_the_configuration_survive(source: Path, target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"note": "mine"}))
    result = api.combine(target, target.with_name("back"))
    assert any("config.json was changed since the split" in warning for warning in result.plan.warnings)
    back = json.loads((target.with_name("back") / "config.json").read_text())
    assert back == json.loads((source / "config.json").read_text()) | {"note": "mine"}
    assert digests(target.with_name("back")) | {"config.json": ""} == digests(source) | {"config.json": ""}


def test_other_files_that_changed_are_carried(source: Path, target: Path) -> None:
    (target / "tokenizer.json").write_bytes(b"new")
    assert (combined(target) / "tokenizer.json").read_bytes() == b"new"


def test_a_kept_scale_of_a_wrong_size(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", FP8)
    api.split(source, tmp_path / "target", SplitOptions(dequantize=True))
    name = "model.layers.0.self_attn.kv_b_proj.weight_scale_inv"
    edit(tmp_path / "target", lambda value: value["restore"]["tensors"].update({name: pack(bytes(30))}))
    with pytest.raises(BadInputError, match=r"weight_scale_inv has 30 bytes, not 32"):
        combined(tmp_path / "target")


def test_dequantised_weights_under_another_manifest(tmp_path: Path) -> None:
    """BF16 halves beside a manifest of a lossless split: the headers would lie about the bytes."""
    source = write_checkpoint(tmp_path / "source", FP8)
    api.split(source, tmp_path / "target", SplitOptions(dequantize=True))
    api.split(source, tmp_path / "lossless")
    shutil.copy(tmp_path / "lossless" / NAME, tmp_path / "target" / NAME)
    with pytest.raises(BadInputError, match="does not describe the checkpoint beside it"):
        combined(tmp_path / "target")


def test_the_manifest_of_a_combination_is_no_hindrance(source: Path, target: Path) -> None:
    """What was combined can be split, and split outputs can be made of combined ones, over and over."""
    back = combined(target)
    manifest = read_manifest(back)
    assert manifest is not None and manifest.operation == "combine"
    api.split(back, back.with_name("again"))
    assert digests(back.with_name("again")) == digests(target)
