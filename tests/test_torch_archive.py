"""Archives around whole dictionaries of tensors: read by PyTorch, by zipfile, and by our own reader."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from mla_convert.errors import CannotError
from mla_convert.formats.pickles import Global, Instance
from mla_convert.formats.torch_archive import archive, tensor_value
from mla_convert.formats.torch_save import TENSOR_GLOBALS, open_archive
from mla_convert.tensors import TensorSpec


def write(path: Path, specs: list[TensorSpec], data: list[bytes | None]) -> None:
    """The archive of a dictionary of tensors; one whose bytes are None is a hole in the file, and zero."""
    value = {"model": {spec.name: tensor_value(spec, str(n)) for n, spec in enumerate(specs)}, "iteration": 3}
    beginning, envelopes, directory = archive(value, [spec.nbytes for spec in specs], "test")
    crcs = []
    with path.open("wb") as file:
        file.write(beginning)
        for spec, envelope, values in zip(specs, envelopes, data, strict=True):
            file.write(envelope.before)
            assert file.tell() % 64 == 0
            if values is None:
                file.truncate(file.seek(spec.nbytes, os.SEEK_CUR))
            else:
                file.write(values)
            crcs.append(zlib.crc32(values) if values is not None else 0)
            file.write(envelope.closing(crcs[-1]))
        end = directory.closing(crcs)
        assert len(end) == directory.size
        file.write(end)


def test_pytorch_and_zipfile_read_it(tmp_path: Path) -> None:
    tensors = [
        torch.randn(5, 7).bfloat16(),
        torch.arange(4),
        torch.zeros(0, dtype=torch.uint8),
        torch.tensor(2.5),
    ]
    dtypes = {torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8", torch.float32: "F32"}
    specs = [TensorSpec(f"t{n}", dtypes[t.dtype], tuple(t.shape)) for n, t in enumerate(tensors)]
    write(tmp_path / "x.pt", specs, [bytes(t.reshape(-1).view(torch.uint8).tolist()) for t in tensors])
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["iteration"] == 3
    for spec, tensor in zip(specs, tensors, strict=True):
        assert found["model"][spec.name].dtype == tensor.dtype
        assert torch.equal(found["model"][spec.name], tensor)
    with zipfile.ZipFile(tmp_path / "x.pt") as read:
        assert read.testzip() is None


def test_an_archive_without_tensors_is_whole(tmp_path: Path) -> None:
    write(tmp_path / "x.pt", [], [])
    assert torch.load(tmp_path / "x.pt", weights_only=True) == {"model": {}, "iteration": 3}


def test_tensors_and_places_beyond_4_gib(tmp_path: Path) -> None:
    size = (1 << 32) + 64
    last = bytes(range(16))
    specs = [TensorSpec("large", "U8", (size,)), TensorSpec("last", "U8", (16,))]
    write(tmp_path / "x.pt", specs, [None, last])
    found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)["model"]
    assert found["large"].shape == (size,)
    assert bytes(found["last"].tolist()) == last
    with zipfile.ZipFile(tmp_path / "x.pt") as read:
        assert read.getinfo("archive/data/0").file_size == size
        assert read.read("archive/data/1") == last
    fd = os.open(tmp_path / "x.pt", os.O_RDONLY)
    try:
        opened = open_archive(fd, 0, os.fstat(fd).st_size, "x")
        stored = opened.tensor(opened.value(TENSOR_GLOBALS)["model"]["last"], "last")
        assert os.pread(fd, 16, stored.start) == last
    finally:
        os.close(fd)


def test_values_of_every_kind_survive_protocol_2(tmp_path: Path) -> None:
    value = {
        "args": Instance(
            Global("argparse", "Namespace"), state={"dtype": Global("torch", "bfloat16"), "text": "x" * 300}
        ),
        "numbers": [1, -5, 70_000, 1 << 70, 1.5, None, True],
        "bytes": b"ab\xff",
        "nested": {"t": (1, (2, "y"))},
    }
    beginning, _, directory = archive(value, [], "test")
    (tmp_path / "x.pt").write_bytes(beginning + directory.closing([]))
    import argparse

    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert vars(found["args"]) == {"dtype": torch.bfloat16, "text": "x" * 300}
    assert (found["numbers"], found["bytes"], found["nested"]) == (
        value["numbers"],
        b"ab\xff",
        value["nested"],
    )


def test_a_dtype_without_a_storage_is_refused() -> None:
    with pytest.raises(CannotError, match="F8_E4M3"):
        tensor_value(TensorSpec("w", "F8_E4M3", (2,)), "0")
