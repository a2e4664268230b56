"""Reading Hugging Face folders: folders, caches and single files, odd names, and what is carried along."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import Recipe, Stored, digests, fingerprint, load, unflushed, write_checkpoint, write_file  # noqa: F401

from mla_convert import api
from mla_convert.errors import UsageError
from mla_convert.formats.huggingface import open_checkpoint

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A sound checkpoint of two shards."""
    return write_checkpoint(tmp_path / "in" / "source", shards=2)


def test_everything_in_a_folder(source: Path) -> None:
    found = open_checkpoint(source)
    assert list(found.files) == [FIRST, SECOND]
    assert set(found.tensors) == set(load(source))
    assert [other.name for other in found.others] == [
        "assets/chat.jinja",
        "config.json",
        "modeling_deepseek.py",
        "tokenizer.json",
    ]
    assert (found.root, found.single_file, found.warnings) == (source, False, ())
    assert found.nbytes == sum((source / name).stat().st_size for name in (FIRST, SECOND))
    for name, tensor in found.tensors.items():
        data = (source / tensor.file).read_bytes()[tensor.start : tensor.stop]
        assert data == load(source)[name].data


def test_an_index_stands_for_its_folder(source: Path) -> None:
    assert open_checkpoint(source / INDEX).tensors == open_checkpoint(source).tensors


def test_one_file_of_a_folder(source: Path) -> None:
    found = open_checkpoint(source / SECOND)
    assert (list(found.files), found.single_file, found.others, found.index) == ([SECOND], True, (), None)
    assert found.config is not None


def test_one_file_converts_alone(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", index=False)
    target = tmp_path / "target"
    before = fingerprint(source)
    api.split(source / "model.safetensors", target)
    assert fingerprint(source) == before
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "mla-convert.json",
        "model.safetensors",
    ]
    api.combine(target, tmp_path / "back")
    names = ("config.json", "model.safetensors")
    assert all((tmp_path / "back" / n).read_bytes() == (source / n).read_bytes() for n in names)


def hub_cache(folder: Path, source: Path, revision: str = "abc123", *, refs: str | None = None) -> Path:
    """Lay a checkpoint out as the Hub's cache does: files in ``blobs``, links to them in a snapshot."""
    root = folder / "models--org--name"
    snapshot = root / "snapshots" / revision
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    for path in (path for path in sorted(source.rglob("*")) if path.is_file()):
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = root / "blobs" / digests(path.parent)[path.name]
        blob.write_bytes(path.read_bytes())
        link.symlink_to(os.path.relpath(blob, link.parent))
    if refs:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text(refs)
    return root


@pytest.mark.parametrize("whole", [True, False], ids=["cache", "snapshot"])
def test_a_hub_cache(whole: bool, source: Path, tmp_path: Path) -> None:
    root = hub_cache(tmp_path / "hub", source, refs="abc123")
    before = fingerprint(root)
    api.split(root if whole else root / "snapshots" / "abc123", tmp_path / "target")
    assert fingerprint(root) == before
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))
    api.combine(tmp_path / "target", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source)


@pytest.mark.parametrize("inside", ["", "snapshots/abc123", "snapshots/abc123/" + INDEX])
def test_nothing_is_written_into_a_hub_cache(inside: str, source: Path, tmp_path: Path) -> None:
    root = hub_cache(tmp_path / "hub", source)
    before = fingerprint(tmp_path / "hub")
    with pytest.raises(UsageError, match="lies in the Hub's cache") as caught:
        api.split(root / inside)
    assert "-o" in (caught.value.hint or "")
    assert fingerprint(tmp_path / "hub") == before


def test_a_hub_cache_of_two_snapshots(source: Path, tmp_path: Path) -> None:
    root = hub_cache(tmp_path / "hub", source, "one")
    hub_cache(tmp_path / "hub", source, "two")
    with pytest.raises(UsageError, match="Hub cache with 2 snapshots") as caught:
        open_checkpoint(root)
    assert [Path(line).name for line in caught.value.details] == ["one", "two"]
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("two\n")
    assert open_checkpoint(root).root == root / "snapshots" / "two"


@pytest.mark.parametrize(
    "name",
    [
        "model-{number}-of-{count}.safetensors",
        "foo{number}.safetensors",
        "a b [{number}].safetensors",
        "é{number}.safetensors",
    ],
)
@pytest.mark.parametrize("index", [True, False])
def test_any_name_of_a_shard(name: str, index: bool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", shards=3, shard_name=name, index=index)
    assert set(open_checkpoint(folder).tensors) == set(load(folder))


def test_weights_that_the_index_leaves_out(source: Path) -> None:
    """Mistral ships its weights twice; a stray file without attention weights is no part of the model either."""
    write_file(source / "consolidated.safetensors", {"layers.0.attention.wkv_b.weight": load(source)[KV_B]})
    write_file(source / "stray.safetensors", {"x": Stored("U8", (1,), b"1")})
    found = open_checkpoint(source)
    assert list(found.files) == [FIRST, SECOND]
    assert {"consolidated.safetensors", "stray.safetensors"} <= {other.name for other in found.others}
    assert [warning.split()[0] for warning in found.warnings] == [
        "consolidated.safetensors",
        "stray.safetensors",
    ]


def test_a_shard_without_tensors(source: Path) -> None:
    write_file(source / "empty.safetensors", {}, {"format": "pt"})
    found = open_checkpoint(source)
    assert "empty.safetensors" in found.files and found.warnings == ()


def test_folders_of_tools_are_left_out(source: Path) -> None:
    for name in (".git", ".cache", "__pycache__"):
        (source / name).mkdir()
        (source / name / "x").write_text("x")
    (source / "mla-convert.json").write_text("not read here")
    (source / "sub").mkdir()
    (source / "sub" / "mla-convert.json").write_text("of another model")
    names = [other.name for other in open_checkpoint(source).others]
    assert "sub/mla-convert.json" in names and len(names) == 5


@pytest.mark.parametrize(
    "odd",
    ["a\nb.weight", "[bold]x[/bold]", "\x1b[31mred", "x" * 10_000, "ünï.wéight", "..", "/etc/passwd", " "],
)
def test_odd_names_of_tensors(odd: str, tmp_path: Path) -> None:
    """Names are data: they come through as they are, and no message prints them raw."""
    source = write_checkpoint(tmp_path / "source", index=False)
    tensors = load(source) | {odd: Stored("U8", (3,), b"abc")}
    write_file(source / "model.safetensors", tensors)
    api.split(source, tmp_path / "target")
    assert load(tmp_path / "target")[odd] == tensors[odd]
    api.combine(tmp_path / "target", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source)
