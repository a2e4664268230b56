"""Archives of torch.save: read without PyTorch where it wrote them, and written so that it reads them."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.torch_save import STORAGES, TENSOR_GLOBALS, TORCH_DTYPES, open_archive
from mla_convert.formats.torch_save_writing import envelope, write_archive

UNTIMED = settings(deadline=None)
DTYPES = {spelling: getattr(torch, name) for name, spelling in TORCH_DTYPES.items() if hasattr(torch, name)}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def saved(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def found(path: Path, data: bytes, before: bytes = b"junk") -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of a tensor out of an archive that lies somewhere in a file."""
    path.write_bytes(before + data + b"behind")
    fd = os.open(path, os.O_RDONLY)
    try:
        archive = open_archive(fd, len(before), len(data), "x")
        tensor = archive.tensor(archive.value(TENSOR_GLOBALS), "t")
        return tensor.spec.dtype, tensor.spec.shape, os.pread(fd, tensor.stop - tensor.start, tensor.start)
    finally:
        os.close(fd)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read(tmp_path: Path, dtype: str) -> None:
    tensor = torch.arange(24, dtype=torch.uint8).reshape(3, 8).view(DTYPES[dtype])
    assert found(tmp_path / "x", saved(tensor)) == (dtype, tuple(tensor.shape), raw(tensor))


@UNTIMED
@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    dtype=st.sampled_from(sorted(set(STORAGES.values()) - {"BOOL"})),
    in_list=st.booleans(),
)
def test_what_is_written_is_read_by_pytorch_and_zip(
    shape: tuple[int, ...], dtype: str, in_list: bool
) -> None:
    count = 1
    for size in shape:
        count *= size
    width = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    data = os.urandom(count * width)
    around = envelope(dtype, shape, in_list=in_list)
    assert len(around.before) % 64 == 0
    archive = around.before + data + around.closing(zlib.crc32(data))
    assert len(archive) == len(around) + len(data)
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
    value = torch.load(io.BytesIO(archive), weights_only=True)
    tensor = value[0] if in_list else value
    assert (tensor.dtype, tuple(tensor.shape), raw(tensor)) == (DTYPES[dtype], shape, data)
    assert tensor.is_contiguous()


def test_a_view_is_read_where_it_is_one_piece(tmp_path: Path) -> None:
    base = torch.arange(40, dtype=torch.int32).reshape(8, 5)
    assert found(tmp_path / "x", saved(base[2:4])) == ("I32", (2, 5), raw(base[2:4]))
    with pytest.raises(CannotError, match="saved as a view"):
        found(tmp_path / "x", saved(base[:, 1:3]))


def test_a_parameter_is_a_tensor(tmp_path: Path) -> None:
    tensor = torch.nn.Parameter(torch.randn(3, 4))
    assert found(tmp_path / "x", saved(tensor)) == ("F32", (3, 4), raw(tensor.detach()))


def test_large_archives_have_64_bit_directories(tmp_path: Path) -> None:
    """PyTorch always writes the 64-bit end; here with more records than a block is long."""
    tensors = [torch.full((3,), n, dtype=torch.int16) for n in range(2000)]
    path = tmp_path / "x.pt"
    torch.save(tensors, path)
    fd = os.open(path, os.O_RDONLY)
    try:
        archive = open_archive(fd, 0, path.stat().st_size, "x")
        for n, value in enumerate(archive.value(TENSOR_GLOBALS)):
            tensor = archive.tensor(value, str(n))
            assert os.pread(fd, 6, tensor.start) == raw(tensors[n])
    finally:
        os.close(fd)


def test_a_whole_archive(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "x.pt"
    path.write_bytes(write_archive(pickle.dumps([1, "two"], 2), {}))
    assert torch.load(path, weights_only=True) == [1, "two"]


def test_what_pytorch_has_no_storage_for() -> None:
    with pytest.raises(CannotError):
        envelope("F8_E4M3", (2, 2))
    with pytest.raises(CannotError):
        envelope("F32", (1 << 15, 1 << 15))


@UNTIMED
@given(place=st.integers(0, 4000), value=st.integers(0, 255))
def test_a_damaged_byte_never_breaks_the_reader(place: int, value: int) -> None:
    data = bytearray(saved(torch.arange(6)))
    data[place % len(data)] = value
    fd = os.memfd_create("archive")
    try:
        os.write(fd, data)
        archive = open_archive(fd, 0, len(data), "x")
        archive.tensor(archive.value(TENSOR_GLOBALS), "t")
    except (BadInputError, CannotError):
        pass
    finally:
        os.close(fd)


@pytest.mark.parametrize("length", [0, 1, 21, 22, 100])
def test_short_files(tmp_path: Path, length: int) -> None:
    with pytest.raises(BadInputError):
        found(tmp_path / "x", saved(torch.arange(6))[:length])
