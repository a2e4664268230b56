"""What reading a Hugging Face folder refuses, in which words, before anything is written."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Recipe, Stored, digests, fingerprint, load, unflushed, write_checkpoint, write_file  # noqa: F401

from mla_convert import api
from mla_convert.errors import BadInputError, CannotError, MlaConvertError, UsageError
from mla_convert.formats.huggingface import open_checkpoint

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A sound checkpoint of two shards."""
    return write_checkpoint(tmp_path / "in" / "source", shards=2)


def refused(source: Path, kind: type[MlaConvertError], *fragments: str) -> MlaConvertError:
    """Split must fail with this class and these words, and leave no trace on either side."""
    folder = source.parent / "out"
    folder.mkdir(exist_ok=True)
    before = sorted(path.name for path in source.iterdir()) if source.is_dir() else []
    for operation in (api.split, api.combine):
        with pytest.raises(MlaConvertError) as caught:
            operation(source, folder / "target")
        assert type(caught.value) is kind, caught.value
        text = "\n".join([caught.value.message, caught.value.hint or "", *caught.value.details])
        for fragment in fragments:
            assert fragment in text
        assert list(folder.iterdir()) == []
    assert before == (sorted(path.name for path in source.iterdir()) if source.is_dir() else [])
    return caught.value


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def weight_file(path: Path, header: str | bytes, data: bytes = b"") -> None:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


# Damaged files


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def spans(
    data: bytes, *ranges: tuple[int, int], names: str = "ab", dtype: str = "U8"
) -> Callable[[Path], None]:
    """Writes a file of tensors of two bytes that claim these ranges."""
    entries = (
        f'"{name}":{{"dtype":"{dtype}","shape":[2],"data_offsets":[{start},{stop}]}}'
        for name, (start, stop) in zip(names, ranges, strict=False)
    )
    return lambda path: weight_file(path, f"{{{','.join(entries)}}}", data)


DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "truncated": (truncated, ("ends early", "expected", "found", "download")),
    "trailing": (lengthened, ("1 bytes follow the data",)),
    "empty": (lambda p: p.write_bytes(b""), ("expected 8 bytes",)),
    "length 0": (lambda p: p.write_bytes(bytes(8)), ("0 bytes",)),
    "length lies": (lambda p: p.write_bytes(b"\xff" * 8 + b"{}"), ("18446744073709551615",)),
    "length beyond the file": (lambda p: p.write_bytes((99).to_bytes(8, "little") + b"{}"), ("107", "10")),
    "overlap": (spans(b"123", (0, 2), (1, 3)), ("'a'", "'b'", "overlap")),
    "gap": (spans(b"12345", (0, 2), (3, 5)), ("'a'", "'b'", "unused")),
    "reversed": (spans(b"12", (2, 0)), ("'a'", "reversed")),
    "out of range": (spans(b"1", (0, 2)), ("ends early", "download")),
    "twice": (spans(b"12", (0, 2), (0, 2), names="aa"), ("'a'", "twice")),
    "dtype": (spans(b"12", (0, 2), dtype="F5"), ("'F5'", "known are", "BF16")),
    "not UTF-8": (lambda p: weight_file(p, b'{"\xff":{}}'), ("UTF-8",)),
    "no JSON": (lambda p: weight_file(p, "{nonsense}"), ("line 1, column 2",)),
    "LFS pointer": (
        lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        ("git lfs pull",),
    ),
}


@pytest.mark.parametrize(("damage", "fragments"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_shards(damage: Callable[[Path], object], fragments: tuple[str, ...], source: Path) -> None:
    damage(source / SECOND)
    refused(source, BadInputError, SECOND, *fragments)


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def bound_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has a short limit
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


ODD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "dangling": (lambda p: p.symlink_to("nowhere"), "nowhere"),
    "loop": (lambda p: p.symlink_to(p.name), "loop"),
    "FIFO": (os.mkfifo, "FIFO"),
    "folder": (Path.mkdir, "directory"),
    "device": (lambda p: p.symlink_to("/dev/zero"), "device"),
    "socket": (bound_socket, "socket"),
}


@pytest.mark.parametrize(("make", "word"), ODD_FILES.values(), ids=ODD_FILES)
def test_shards_that_are_no_files(make: Callable[[Path], object], word: str, source: Path) -> None:
    replaced_by(make)(source / SECOND)
    refused(source, BadInputError, SECOND, word)


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda p: p.symlink_to("nowhere")], ids=["FIFO", "folder", "dangling"]
)
def test_json_that_is_no_file(make: Callable[[Path], object], name: str, source: Path) -> None:
    replaced_by(make)(source / name)
    refused(source, BadInputError, name)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (os.mkfifo, "FIFO"),
        (lambda p: p.symlink_to("nowhere"), "link"),
        (lambda p: p.symlink_to("assets"), "folder"),
    ],
    ids=["FIFO", "dangling", "linked folder"],
)
def test_other_files_that_cannot_be_carried(make: Callable[[Path], object], word: str, source: Path) -> None:
    make(source / "zzz")
    refused(source, BadInputError, "zzz", word)


# An index or a configuration


BAD_JSON: dict[str, tuple[bytes, str]] = {
    "cut": (b'{"a": ', "line 1, column"),
    "second line": (b'{\n "a": 1,\n "b": nope}', "line 3, column 7"),
    "encoding": (b'{"a": "\xe9"}', "line 1, column 8"),
    "twice": (b'{"a": 1, "a": 2}', "given twice"),
    "NaN": (b'{"a": NaN}', "NaN is not a JSON number"),
    "list": (b"[]", "expected a JSON object"),
    "deep": (b'{"a":' * 100 + b"1" + b"}" * 100, "nested more than"),
    "empty": (b"", "line 1, column 1"),
}


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(("data", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_bad_json(name: str, data: bytes, message: str, source: Path) -> None:
    (source / name).write_bytes(data)
    refused(source, BadInputError, name, message)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_huge_json(name: str, source: Path) -> None:
    with (source / name).open("wb") as file:
        file.truncate(1 << 40)  # sparse
    refused(source, BadInputError, name, "larger than")


UNSAFE = ["/etc/x.safetensors", "../x.safetensors", "sub/x.safetensors", "x\0.safetensors", "", ".safetensors",
          "a\\b.safetensors", "model.bin", "..", 7, None, ["x.safetensors"]]  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE, ids=map(repr, UNSAFE))
def test_unsafe_names_in_the_index(name: object, source: Path) -> None:
    edit(source / INDEX, lambda index: index["weight_map"].update({KV_B: name}))
    refused(source, BadInputError, INDEX, f"unsafe file name {name!r}", KV_B)


@pytest.mark.parametrize("value", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_an_index_without_a_weight_map(value: object, source: Path) -> None:
    (source / INDEX).write_text(json.dumps(value))
    refused(source, BadInputError, INDEX, "no weight_map")


def test_an_index_with_odd_metadata(source: Path) -> None:
    edit(source / INDEX, lambda index: index.update(metadata=[]))
    refused(source, BadInputError, INDEX, "metadata is not an object")


def test_missing_shards(source: Path) -> None:
    (source / SECOND).unlink()
    count = sum(name == SECOND for name in json.loads((source / INDEX).read_text())["weight_map"].values())
    refused(source, BadInputError, f"1 of 2 shards named by {INDEX} are missing ({count} tensors)", SECOND)


@pytest.mark.parametrize(
    "pattern", ["model-{number:05d}-of-{count:06d}.safetensors", "model-{number}-of-{count}.safetensors"]
)
def test_missing_shards_without_an_index(pattern: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", shards=3, index=False, shard_name=pattern)
    (source / pattern.format(number=2, count=3)).unlink()
    refused(source, BadInputError, "2 shards of 3", "no index", "shard 1", "shard 3")


def test_a_stale_index(source: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        del index["weight_map"]["model.norm.weight"]
        index["weight_map"] |= {"ghost": FIRST, "model.embed_tokens.weight": SECOND}

    edit(source / INDEX, change)
    refused(
        source, BadInputError, INDEX,
        "1 tensors it lists are in none of them, 1 are not listed, 1 lie in another shard",
        "listed only: ghost", "not listed: model.norm.weight",
        f"model.embed_tokens.weight: listed in {SECOND}, found in {FIRST}",
    )  # fmt: skip


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("what", ["bytes", "dtype"])
def test_two_copies_of_a_tensor_that_differ(source: Path, what: str, index: bool) -> None:
    tensors = {
        name: t for name, t in load(source).items() if open_checkpoint(source).tensors[name].file == SECOND
    }
    copy = load(source)[KV_B]
    data = copy.data[:-1] + bytes([copy.data[-1] ^ 1])  # the last bit of the last value
    other = Stored(copy.dtype, copy.shape, data) if what == "bytes" else Stored("F16", copy.shape, copy.data)
    write_file(source / SECOND, {**tensors, KV_B: other})
    if not index:
        (source / INDEX).unlink()
    refused(
        source, BadInputError, f"tensor {KV_B} is in two shards, and not the same: {FIRST} and {SECOND}",
        f"{SECOND}: {other.dtype} {list(copy.shape)}",
    )  # fmt: skip


def test_a_left_over_shard_with_attention_weights(source: Path) -> None:
    write_file(source / "old.safetensors", {KV_B: load(source)[KV_B]})
    refused(source, BadInputError, "old.safetensors", "not in", KV_B)


def test_two_indexes(source: Path) -> None:
    for name in ("a", "b"):
        (source / f"{name}.safetensors.index.json").write_text((source / INDEX).read_text())
    assert len(open_checkpoint(source).warnings) == 2
    (source / INDEX).unlink()
    refused(source, BadInputError, "2 indexes and none is model.safetensors.index.json")


def test_no_tensors_at_all(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write_file(tmp_path / "source" / "model.safetensors", {})
    refused(tmp_path / "source", BadInputError, "none of the 1 weight files holds a tensor")


# Other kinds of checkpoint


@pytest.mark.parametrize(
    ("names", "kind", "fragment"),
    [
        ((), BadInputError, "no .safetensors files (0 entries)"),
        (("README.md",), BadInputError, "no .safetensors files (1 entries)"),
        (("pytorch_model.bin", "config.json"), CannotError, "PyTorch pickle"),
        (("model.pt",), CannotError, "PyTorch pickle"),
        (("model-Q4.gguf",), CannotError, "GGUF"),
        ((".metadata", "common.pt", "__0_0.distcp"), CannotError, "Megatron"),
        (
            ("latest_checkpointed_iteration.txt", "iter_0000001"),
            BadInputError,
            "neither a number nor release",
        ),
        (("mp_rank_00",), CannotError, "Megatron"),
        (("iter_0000001",), CannotError, "Megatron"),
        (
            ("model0-mp2.safetensors", "model1-mp2.safetensors"),
            CannotError,
            "is a checkpoint in DeepSeek's rank files, which",
        ),
    ],
)
def test_folders_of_another_kind(
    names: tuple[str, ...], kind: type[MlaConvertError], fragment: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    for name in names:
        (tmp_path / "source" / name).write_bytes(b"\x80\x04.")
    refused(tmp_path / "source", kind, fragment)


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "model.pth", "weights"])
def test_files_of_another_kind(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    refused(tmp_path / name, CannotError, name, "not a .safetensors file")


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", UsageError, "does not exist")


@pytest.mark.parametrize(
    "config", [{"model_type": "llama", "num_key_value_heads": 8}, {"model_type": "deepseek_v4"}]
)
def test_models_without_latent_attention(config: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_file(
        source / "model.safetensors", {"model.layers.0.self_attn.k_proj.weight": Stored("U8", (1,), b"1")}
    )
    (source / "config.json").write_text(json.dumps(config))
    refused(source, CannotError, config["model_type"])


def test_configurations_that_contradict_the_weights(tmp_path: Path) -> None:
    recipe = Recipe(nope=16, v=24, config={"qk_nope_head_dim": 24, "v_head_dim": 16})
    refused(
        write_checkpoint(tmp_path / "source", recipe),
        BadInputError,
        "model.layers.0.self_attn.",
        "nope 16",
        "qk_nope_head_dim 24",
    )


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (None, ("kv_b_proj.weight is F8_E4M3 and needs exactly one scale; found none",)),
        (Stored("F32", (3, 2), bytes(24)), ("kv_b_proj.weight_scale_inv has shape [3, 2]", "[4, 2]")),
        (Stored("F32", (2, 4), bytes(32)), ("[2, 4]", "[4, 2]")),
    ],
    ids=["missing", "short", "transposed"],
)
def test_scales_that_do_not_fit(change: Stored | None, fragments: tuple[str, ...], tmp_path: Path) -> None:
    recipe = Recipe(heads=2, nope=128, v=128, rank=256, dtype="F8_E4M3", scales="block", index=False)
    source = write_checkpoint(tmp_path / "source", recipe)
    name = "model.layers.1.self_attn.kv_b_proj.weight_scale_inv"
    tensors = load(source)
    del tensors[name]
    write_file(source / "model.safetensors", tensors | ({name: change} if change else {}))
    refused(source, BadInputError, *fragments)
