"""A tensor that lies in two shards: equal copies are one tensor, and stay two copies where they lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Stored, digests, load, unflushed, write_checkpoint, write_file  # noqa: F401
from conversions import contents
from fake_hub import FakeHub, running_hub
from safetensors import safe_open

from mla_convert import api
from mla_convert.comparing import compare
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.sharding import ReshardOptions

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
KV_B, EMBEDDING = "model.layers.0.self_attn.kv_b_proj.weight", "model.embed_tokens.weight"
K_B, V_B = KV_B.replace("kv_b", "k_b"), KV_B.replace("kv_b", "v_b")


def with_copies(source: Path, **changed: bytes) -> Path:
    """Give the second shard a copy of two tensors of the first, with other bytes where some are given."""
    catalogue, every = open_checkpoint(source), load(source)
    own = {name: stored for name, stored in every.items() if catalogue.tensors[name].file == SECOND}
    copies = {
        name: Stored(every[name].dtype, every[name].shape, changed.get(key, every[name].data))
        for key, name in (("kv_b", KV_B), ("embedding", EMBEDDING))
    }
    write_file(source / SECOND, {**copies, **own})
    return source


def names_in(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "plain", shards=2)


@pytest.fixture
def source(plain: Path, tmp_path: Path) -> Path:
    return with_copies(write_checkpoint(tmp_path / "source", shards=2))


@pytest.mark.parametrize("home", [FIRST, SECOND, None])
def test_copies_are_split_and_combined_where_they_lie(source: Path, plain: Path, home: str | None) -> None:
    if home is None:
        (source / INDEX).unlink()
    else:
        index = json.loads((source / INDEX).read_text())
        index["weight_map"] |= {KV_B: home, EMBEDDING: home}
        (source / INDEX).write_text(json.dumps(index))
    result = api.split(source)
    (warning,) = result.plan.warnings
    assert warning.startswith(f"2 tensors are in two shards ({KV_B} in ")
    for shard in (FIRST, SECOND):
        names = names_in(result.output / shard)
        assert {K_B, V_B, EMBEDDING} <= names
        assert KV_B not in names
    found, expected = open_checkpoint(result.output), open_checkpoint(api.split(plain).output)
    assert {name: t.spec for name, t in found.tensors.items()} == {
        name: t.spec for name, t in expected.tensors.items()
    }
    if home:
        index = json.loads((result.output / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.spec.nbytes for t in found.tensors.values())
        assert index["weight_map"][EMBEDDING] == home
    back = api.combine(result.output).output
    assert digests(back) == digests(source)


def test_other_commands_see_one_tensor(source: Path, plain: Path, tmp_path: Path) -> None:
    assert compare(source, plain).is_same
    _, document = api.inspect(source)
    assert document["tensors"] == len(load(plain))
    assert any("in two shards" in warning for warning in document["warnings"])
    outputs = [
        api.reshard(one, tmp_path / f"{one.name}-2", ReshardOptions(2)).output for one in (source, plain)
    ]
    tensors = [api.reshard(one, tmp_path / f"{one.name}-1").output for one in outputs]
    assert load(tensors[0]) == load(tensors[1])


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    source = with_copies(write_checkpoint(tmp_path / "equal", shards=2))
    size = len(load(write_checkpoint(tmp_path / "for-size", shards=2))[EMBEDDING].data)
    other = with_copies(write_checkpoint(tmp_path / "other", shards=2), embedding=bytes(size))
    with running_hub(tmp_path / "hub") as hub:
        for folder in (source, other):
            hub.add_repository(f"org/{folder.name}", contents(folder))
        yield hub


def test_copies_on_the_hub_are_compared_once_they_are_here(run: Callable[..., Any], hub: FakeHub) -> None:
    planned = run("split", "hf://org/other", "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    (warning,) = [w for w in json.loads(planned.stdout)["warnings"] if "in two shards" in w]
    assert warning.endswith("their bytes are compared once they are downloaded")
    assert not hub.called("GET", f"/org/other/resolve/.*{SECOND}.*")[
        2:
    ]  # its header's length, and its header
    done = run("split", "hf://org/other")
    assert done.returncode == 3, done.stderr
    assert f"tensor {EMBEDDING} is in two shards, and not the same: {FIRST} and {SECOND}" in done.stderr
    done = run("split", "hf://org/equal", "--json")
    assert done.returncode == 0, done.stderr
    assert any(w.endswith("the copies are equal") for w in json.loads(done.stdout)["warnings"])
