"""Crafted checkpoints: ``.metadata``, ``common.pt`` and items that would run code, fill the memory or leave the folder.

Every attack goes through the whole command and must end in exit code 3, with a canary file untouched and no output.
``FIRES`` are shown to work against Python's own pickle first: a payload that never fires proves nothing.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import run
from dist_checkpoints import UP, state, write

from mla_convert.formats.torch_dist import open_torch_dist
from mla_convert.formats.torch_dist_metadata import read_metadata
from mla_convert.formats.torch_save_writing import write_archive

Payload = Callable[[str], bytes]


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def call(module: str, name: str, *arguments: str) -> bytes:
    """A program that calls a function with texts, in protocol 2."""
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(map(text, arguments)) + b"tR"


def touch(canary: str) -> str:
    return f"touch {canary}"


def _reduced(canary: str) -> bytes:
    class Exploit:
        def __reduce__(self) -> Any:
            return os.system, (touch(canary),)

    return pickle.dumps({"state_dict_metadata": {"x": Exploit()}, "storage_data": {}})


def _built(canary: str) -> bytes:
    """An allowed class, and a call hidden in its state."""
    return (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(X\x13\x00\x00\x00state_dict_metadata"
        + call("posix", "system", touch(canary))
        + b"ub."
    )


def _nested(canary: str) -> bytes:
    """torch.storage reads a pickle out of bytes: code in data in code."""
    inner = b"\x80\x02" + call("posix", "system", touch(canary)) + b"."
    return b"\x80\x04ctorch.storage\n_load_from_bytes\nC" + bytes([len(inner)]) + inner + b"\x85R."


FIRES: dict[str, Payload] = {
    "os.system by __reduce__": _reduced,
    "posix.system": lambda c: b"\x80\x02" + call("posix", "system", touch(c)) + b".",
    "builtins.eval": lambda c: b"\x80\x02" + call("builtins", "eval", f"open({c!r}, 'w')") + b".",
    "builtins.exec": lambda c: b"\x80\x02" + call("builtins", "exec", f"open({c!r}, 'w')") + b".",
    "subprocess": lambda c: b"\x80\x02" + call("subprocess", "getoutput", touch(c)) + b".",
    "runpy, by a module of the standard library": lambda c: (
        b"\x80\x02" + call("timeit", "timeit", "pass", f"open({c!r}, 'w')") + b"."
    ),
    "a dotted name": lambda c: (
        b"\x80\x04\x8c\x07pathlib\x8c\x0aPath.touch\x93cpathlib\nPosixPath\n(" + text(c) + b"tR\x85R."
    ),
    "INST": lambda c: b"(" + text(touch(c)) + b"iposix\nsystem\n.",
    "OBJ": lambda c: b"(cposix\nsystem\n" + text(touch(c)) + b"o.",
    "a call inside a state": _built,
    "a call that is thrown away": lambda c: b"\x80\x02" + call("posix", "system", touch(c)) + b"0}.",
}
QUIET: dict[str, bytes] = {
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"Pos.system\n.",
    "BINPERSID": b"\x80\x02K\x01Q.",
    "memo of 4 billion": b"\x80\x02K\x01r\xff\xff\xff\xff.",
    "text of 4 billion": b"\x80\x02X\xff\xff\xff\xff.",
    "bytes of 2**63": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    "a key that hashes for ever": b"\x80\x04}(K\x01" + b"2\x86" * 40 + b"K\x01u.",
    "nested a million times": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "an endless number": b"I" + b"9" * 100_000 + b"\n.",
    "no program": b"",
    "NEWOBJ of another class": b"\x80\x02cio\nFileIO\n(X\x01\x00\x00\x00xX\x01\x00\x00\x00wt\x81.",
    "NEWOBJ_EX of another class": b"\x80\x04cio\nFileIO\n)}\x92.",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "model")
    return tmp_path / "model"


def refused(folder: Path, *words: str) -> str:
    """Split must end in exit code 3, without an output and without the canary."""
    done = run("split", folder, *words)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert not canary(folder).exists()
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
    return done.stderr


def canary(folder: Path) -> Path:
    return folder.parent / "canary"


@pytest.mark.parametrize("name", FIRES)
def test_payloads_fire_where_pickles_are_run(tmp_path: Path, name: str) -> None:
    path = tmp_path / "canary"
    try:
        pickle.loads(FIRES[name](str(path)))
    except Exception as error:
        assert path.exists(), error
    assert path.exists()


@pytest.mark.parametrize("name", FIRES)
def test_metadata_runs_nothing(folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(FIRES[name](str(canary(folder))))
    refused(folder)


@pytest.mark.parametrize("name", QUIET)
def test_metadata_that_exhausts_or_confuses(folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(QUIET[name])
    refused(folder)


@pytest.mark.parametrize("name", FIRES)
def test_common_state_runs_nothing(folder: Path, name: str) -> None:
    (folder / "common.pt").write_bytes(write_archive(FIRES[name](str(canary(folder))), {}))
    refused(folder)


@pytest.mark.parametrize("name", FIRES)
def test_items_run_nothing(folder: Path, name: str) -> None:
    """The pickle of the very tensor that is split."""
    replace_item(folder, lambda _: FIRES[name](str(canary(folder))))
    refused(folder)


@pytest.mark.parametrize("kind", ["in a tensor of bytes", "in the pickle itself"])
def test_extra_states_run_nothing(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    payload = b"\x80\x02" + call("posix", "system", touch(str(canary(folder)))) + b"."
    key = UP.format(0).replace(".weight", "._extra_state/shard_0_1")
    if kind == "in a tensor of bytes":
        write(folder, {**state(), key: [torch.frombuffer(bytearray(payload), dtype=torch.uint8)]})
    else:
        write(folder, {**state(), key: [torch.zeros(2000, dtype=torch.uint8)]})
        replace_item(folder, lambda _: payload, key)
    refused(folder)


def replace_item(folder: Path, change: Callable[[dict[str, bytes]], bytes], key: str = UP.format(0)) -> None:
    """Put another pickle into the archive of an item, at the same offset and of the same length."""
    metadata = read_metadata(folder / ".metadata")
    item = metadata.objects[key] if key in metadata.objects else metadata.tensors[key].chunks[0].item
    path = folder / item.file
    data = bytearray(path.read_bytes())
    inside = bytes(data[item.offset : item.offset + item.length])
    records = {n.partition("/")[2]: b for n, b in zip_records(inside).items()}
    crafted = write_archive(change(records), {"data/0": records["data/0"]})
    assert len(crafted) <= item.length
    padded = crafted.rjust(item.length, b"\0")  # a zip is read from its end
    data[item.offset : item.offset + item.length] = shifted(padded, item.length - len(crafted))
    path.write_bytes(data)


def shifted(data: bytes, by: int) -> bytes:
    """A zip behind ``by`` bytes of padding, its offsets corrected."""
    moved = bytearray(data)
    end = data.rindex(b"PK\x05\x06")
    start = int.from_bytes(data[end + 16 : end + 20], "little") + by
    moved[end + 16 : end + 20] = start.to_bytes(4, "little")
    at = start
    while data[at : at + 4] == b"PK\x01\x02":
        local = int.from_bytes(data[at + 42 : at + 46], "little") + by
        moved[at + 42 : at + 46] = local.to_bytes(4, "little")
        at += 46 + sum(int.from_bytes(data[at + n : at + n + 2], "little") for n in (28, 30, 32))
    return bytes(moved)


def zip_records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_attack_on_items_reaches_the_pickle(folder: Path) -> None:
    """The crafted archive is one that is read: with the honest pickle, the checkpoint splits."""
    replace_item(folder, lambda records: records["data.pkl"])
    done = run("split", folder)
    assert done.returncode == 0, done.stderr


# Names, places and sizes


def edited(folder: Path, change: Callable[[Any], None]) -> None:
    """Change what ``.metadata`` says, by PyTorch's own classes."""
    path = folder / ".metadata"
    value = pickle.loads(path.read_bytes())
    change(value)
    path.write_bytes(pickle.dumps(value))


def first_place(value: Any) -> Any:
    return next(info for index, info in value.storage_data.items() if index.fqn == UP.format(0))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", ".", "..", "a\0b", "a\\b", "sub/x.distcp"])
def test_items_stay_in_their_folder(folder: Path, name: str) -> None:
    (folder.parent / "model" / "sub").mkdir()

    def change(value: Any) -> None:
        first_place(value).relative_path = name

    edited(folder, change)
    assert "unsafe file name" in refused(folder)


@pytest.mark.parametrize(("offset", "length"), [(0, 1 << 40), (1 << 62, 10), (-5, 10), (0, -1)])
def test_items_stay_in_their_file(folder: Path, offset: int, length: int) -> None:
    def change(value: Any) -> None:
        first_place(value).offset, first_place(value).length = offset, length

    edited(folder, change)
    refused(folder)


def test_a_length_that_lies_about_the_archive(folder: Path) -> None:
    def change(value: Any) -> None:
        first_place(value).length -= 7

    edited(folder, change)
    assert "not an archive of torch.save" in refused(folder)


def test_a_shape_that_lies_about_the_bytes(folder: Path) -> None:
    def change(value: Any) -> None:
        value.state_dict_metadata[UP.format(0)].size = torch.Size([80, 32])
        value.state_dict_metadata[UP.format(0)].chunks[0].sizes = torch.Size([80, 32])

    edited(folder, change)
    refused(folder, "--trust-shapes")


def test_chunks_that_do_not_make_up_the_tensor(folder: Path) -> None:
    def change(value: Any) -> None:
        value.state_dict_metadata[UP.format(0)].chunks[0].sizes = torch.Size([40, 16])

    edited(folder, change)
    assert "do not make up" in refused(folder)


def test_two_chunks_in_one_place(folder: Path) -> None:
    """Half of the tensor twice: the count of elements is right, and half of it is missing."""

    def change(value: Any) -> None:
        chunk = value.state_dict_metadata[UP.format(0)].chunks[0]
        chunk.sizes = torch.Size([40, 16])
        value.state_dict_metadata[UP.format(0)].chunks.append(chunk)

    edited(folder, change)
    assert "overlap" in refused(folder)


def test_compressed_records(folder: Path) -> None:
    """A record of a gigabyte of zeros in a few kilobytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"N" * (64 << 20) + b".")
    (folder / "common.pt").write_bytes(buffer.getvalue())
    assert "compressed" in refused(folder)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_what_is_no_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder)


def test_the_folder_is_sound_without_an_attack(folder: Path) -> None:
    assert open_torch_dist(folder).arguments["kv_lora_rank"] == 16
    done = run("split", folder)
    assert done.returncode == 0, done.stderr
