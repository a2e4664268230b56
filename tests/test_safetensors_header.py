"""Headers are read and written as the official library does it, byte for byte; that library is the oracle."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize, safe_open
from safetensors.torch import load_file, save_file

from mla_convert.errors import BadInputError
from mla_convert.formats import safetensors
from mla_convert.formats.safetensors import (
    SafetensorsHeader,
    StoredTensor,
    build_header,
    parse_header,
    read_header,
)
from mla_convert.tensors import DTYPE_BITS, TensorSpec

# A loaded machine is not a fault: hypothesis must not judge by the clock.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

# Names that look dangerous and are only data.
ODD_NAMES = [
    "../../etc/passwd",
    "/absolute",
    "C:\\windows",
    "[bold red]x[/]",
    "line\nbreak\ttab\r\x1b[31m\x7f\x01",
    'quote"back\\slash/',
    "é\N{GRINNING FACE}\N{RIGHT-TO-LEFT OVERRIDE}\N{ZERO WIDTH SPACE}",
    " ",
    "n" * 10_000,
    "__metadata__ ",
    "dtype",
]


def write(path: Path, header: bytes, payload: bytes) -> Path:
    path.write_bytes(header + payload)
    return path


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def special_bytes(dtype: str, count: int) -> bytes:
    """Bytes of ``count`` elements that a careless copy changes: NaN payloads, -0.0, infinities, denormals."""
    if dtype == "BOOL":
        return bytes(index % 2 for index in range(count))
    size = DTYPE_BITS[dtype] // 8
    patterns = [
        0,
        1,
        1 << (8 * size - 1),
        (1 << 8 * size) - 1,
        0x7F << 8 * (size - 1),
        0x7FC1 << 8 * max(size - 2, 0),
    ]
    mask = (1 << 8 * size) - 1
    return b"".join(
        (patterns[index % len(patterns)] + index & mask).to_bytes(size, "little") for index in range(count)
    )


# ---- the writer, byte by byte ----


def test_header_exact_bytes() -> None:
    header = build_header(
        [TensorSpec("w_k", "BF16", (2, 3)), TensorSpec("scale", "F32", ())], {"format": "pt", "é": "\n"}
    )
    assert header == (
        b"\xa0\x00\x00\x00\x00\x00\x00\x00"  # 160 = 42 + 59 + 58 + 1
        b'{"__metadata__":{"format":"pt","\xc3\xa9":"\\n"},'
        b'"w_k":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        b'"scale":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}'
        b" "
    )


def test_shortest_header_exact_bytes() -> None:
    assert build_header([]) == b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "
    assert build_header([], {}) == b'\x18\x00\x00\x00\x00\x00\x00\x00{"__metadata__":{}}     '


@pytest.mark.parametrize(
    "metadata", [None, {"format": "pt"}, {"é": '\x00\x1f"\\'}], ids=["none", "one", "odd"]
)
def test_header_is_the_official_one(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    # The official writer orders tensors itself (by dtype, then name): in its order, our bytes are its bytes.
    tensors = {name: torch.zeros(index, 2) for index, name in enumerate(ODD_NAMES)}
    tensors |= {dtype: torch.zeros(3, dtype=torch_dtype) for dtype, torch_dtype in TORCH_DTYPES.items()}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata)
    header = read_header(tmp_path / "theirs.safetensors")
    assert build_header([tensor.spec for tensor in header.tensors], header.metadata) == header.raw
    assert header.metadata == metadata


@pytest.mark.parametrize("modulus", [8, 512, 4096, 65536])
@pytest.mark.parametrize("congruent_to", [0, 8, 13, 4095, 4096, 70_001])
@pytest.mark.parametrize("name_length", [1, 7, 4096])
def test_padding_makes_the_data_congruent(modulus: int, congruent_to: int, name_length: int) -> None:
    specs = [TensorSpec("n" * name_length, "U8", (1,))]
    plain = build_header(specs)
    header = build_header(specs, congruent_to=congruent_to, modulus=modulus)
    assert len(header) % modulus == congruent_to % modulus
    assert len(header) < len(plain.rstrip(b" ")) + modulus
    assert header.rstrip(b" ")[8:] == plain.rstrip(b" ")[8:]
    assert parse_header(header, len(header) + 1, "x").data_start == len(header)
    assert [name for name, _ in deserialize(header + b"\x2a")] == ["n" * name_length]


def test_header_is_aligned_to_8_bytes() -> None:
    for length in range(1, 17):
        assert len(build_header([TensorSpec("n" * length, "U8", ())])) % 8 == 0


U8 = TensorSpec("a", "U8", (1,))
UNBUILDABLE: dict[str, tuple[list[TensorSpec], Any, str]] = {
    "name-twice": ([U8, TensorSpec("b", "U8", ()), U8], None, "tensor 'a': the name is given twice"),
    "empty-name": ([TensorSpec("", "U8", ())], None, "the name is empty"),
    "reserved-name": ([TensorSpec("__metadata__", "U8", ())], None, "the name is reserved"),
    "reserved-name-beside-metadata": ([TensorSpec("__metadata__", "U8", ())], {}, "the name is reserved"),
    "NUL-in-name": ([TensorSpec("a\0", "U8", ())], None, "NUL"),
    "half-surrogate": ([TensorSpec("a\ud800", "U8", ())], None, "half a surrogate pair"),
    "unknown-dtype": ([TensorSpec("a", "float32", ())], None, "unknown dtype 'float32'; known are BOOL, U8"),
    "negative-size": ([TensorSpec("a", "U8", (2, -1))], None, "negative size"),
    "overflow": ([TensorSpec("a", "F32", (2**31, 2**31))], None, "overflows 63 bits"),
    "half-a-byte": ([TensorSpec("a", "F4", (3,))], None, "12 bits, not a whole number of bytes"),
    "metadata-number": ([U8], {"a": 1}, "metadata must map strings to strings"),
    "metadata-half-surrogate": ([U8], {"a": "\ud800"}, "surrogates not allowed"),
}


@pytest.mark.parametrize(("specs", "metadata", "words"), UNBUILDABLE.values(), ids=UNBUILDABLE)
def test_what_cannot_be_built(specs: list[TensorSpec], metadata: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_header(specs, metadata)


def test_too_long_a_header_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert safetensors.MAX_HEADER_LENGTH == 100_000_000
    monkeypatch.setattr(safetensors, "MAX_HEADER_LENGTH", 56)
    assert len(build_header([U8])) == 64
    with pytest.raises(ValueError, match="the header would be 64 bytes long, more than 56"):
        build_header([TensorSpec("abcde", "U8", (1,))])


# ---- ours written, theirs read ----


@pytest.mark.parametrize("congruent_to", [None, 4096, 13], ids=["plain", "congruent", "unaligned"])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_loads_our_file_bit_for_bit(tmp_path: Path, dtype: str, congruent_to: int | None) -> None:
    shapes = {"matrix": (5, 7), "scalar": (), "none": (0,), "none.3d": (4, 0, 3), "cube": (2, 3, 4)}
    specs = [TensorSpec(name, dtype, shape) for name, shape in shapes.items()]
    payloads = {spec.name: special_bytes(dtype, spec.numel) for spec in specs}
    header = build_header(specs, {"format": "pt"}, congruent_to=congruent_to)
    path = write(tmp_path / "ours.safetensors", header, b"".join(payloads.values()))

    loaded = load_file(path)
    assert set(loaded) == set(shapes)
    for spec in specs:
        tensor = loaded[spec.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_DTYPES[dtype], spec.shape)
        assert bytes_of(tensor) == payloads[spec.name]
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_is_known_to_the_official_library(dtype: str) -> None:
    spec = TensorSpec("a", dtype, (3, 8))
    [(name, found)] = deserialize(build_header([spec]) + bytes(spec.nbytes))
    assert (name, found["dtype"], found["shape"], len(found["data"])) == ("a", dtype, [3, 8], spec.nbytes)


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: ascii(name[:20]))
def test_odd_names_are_kept_exactly(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.safetensors", build_header([TensorSpec(name, "U8", (1,))]), b"\x2a")
    assert [tensor.spec.name for tensor in read_header(path).tensors] == [name]
    assert load_file(path)[name].tolist() == [42]


# ---- theirs written, ours read ----


def test_reads_what_torch_saved(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    tensors = {
        "layers.0.kv_b_proj.weight": torch.randn(6, 4, generator=generator).bfloat16(),
        "layers.0.kv_b_proj.weight_scale_inv": torch.randn(2, 1, generator=generator),
        "fp8": torch.randn(3, 5, generator=generator).to(torch.float8_e4m3fn),
        "e8m0": torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "nan": torch.tensor([0x7F800001, 0xFFC01234 - 2**32, -(2**31)], dtype=torch.int32).view(
            torch.float32
        ),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "empty.2": torch.zeros(2, 0, dtype=torch.int8),
    }
    path = tmp_path / "theirs.safetensors"
    save_file(tensors, path, {"format": "pt", "b": "2", "a": "1"})
    header = read_header(path)

    content = path.read_bytes()
    assert header.raw == content[: header.data_start]
    assert header.file_size == len(content)
    assert header.metadata == {"format": "pt", "b": "2", "a": "1"}
    assert {tensor.spec.name for tensor in header.tensors} == set(tensors)
    for tensor in header.tensors:
        spec, expected = tensor.spec, tensors[tensor.spec.name]
        assert (TORCH_DTYPES[spec.dtype], spec.shape) == (expected.dtype, tuple(expected.shape))
        assert content[tensor.start : tensor.stop] == bytes_of(expected)
    # A file is its header and its tensors in order, nothing else.
    assert header.raw + b"".join(content[t.start : t.stop] for t in header.tensors) == content


def header_of(members: dict[str, Any], padding: bytes = b"") -> bytes:
    text = json.dumps(members).encode() + padding
    return len(text).to_bytes(8, "little") + text


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"data_offsets": [start, stop], "shape": shape, "dtype": dtype}


def test_tensors_come_in_data_order_and_ties_in_header_order() -> None:
    raw = header_of(
        {
            "last": entry("U8", [2], 6, 8),
            "none.b": entry("F32", [0], 4, 4),
            "first": entry("F32", [], 0, 4),
            "none.c": entry("U8", [0, 5], 8, 8),
            "__metadata__": {},
            "none.a": entry("F64", [3, 0], 4, 4),
            "middle": entry("BF16", [1], 4, 6),
        }
    )
    header = parse_header(raw, len(raw) + 8, "x")
    names = [tensor.spec.name for tensor in header.tensors]
    assert names == ["first", "none.b", "none.a", "middle", "last", "none.c"]
    assert header.metadata == {}
    starts = [tensor.start - header.data_start for tensor in header.tensors]
    assert starts == [0, 4, 4, 4, 6, 8]


def test_a_header_without_tensors_or_padding() -> None:
    header = parse_header(b"\x02\0\0\0\0\0\0\0{}", 10, "x")
    assert header == SafetensorsHeader(b"\x02\0\0\0\0\0\0\0{}", None, (), 10, 10)


def test_an_unaligned_header_and_any_amount_of_padding_are_legal() -> None:
    for spaces in (0, 1, 7, 5000):
        raw = header_of({"a": entry("F64", [1], 0, 8)}, b" " * spaces)
        header = parse_header(raw, len(raw) + 8, "x")
        assert (header.raw, header.data_start) == (raw, len(raw))
        assert len(deserialize(raw + bytes(8))) == 1


def test_bytes_after_the_header_are_ignored() -> None:
    raw = header_of({"a": entry("U8", [3], 0, 3)})
    assert parse_header(raw + b"{}abc", len(raw) + 3, "x").raw == raw


def test_only_the_header_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", build_header([TensorSpec("a", "U8", (1 << 40,))]), b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (1 << 40))  # sparse: a terabyte that could not be read
    [tensor] = read_header(path).tensors
    assert tensor.stop - tensor.start == 1 << 40


def test_links_are_followed(tmp_path: Path) -> None:
    target = write(tmp_path / "blob", build_header([U8]), b"\1")
    (tmp_path / "x.safetensors").symlink_to("blob")
    assert read_header(tmp_path / "x.safetensors") == read_header(str(target))


def test_odd_paths_are_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "gone.safetensors").symlink_to("blobs/gone")
    for name, words in {
        "fifo": "a FIFO, not a regular file",
        "folder": "a directory, not a regular file",
        "gone": "a symbolic link to blobs/gone, which does not exist",
        "missing": "no such file",
    }.items():
        with pytest.raises(BadInputError) as caught:
            read_header(tmp_path / f"{name}.safetensors")
        assert caught.value.message == f"{tmp_path}/{name}.safetensors: {words}"


def test_records_are_frozen_and_survive_pickling() -> None:
    raw = build_header([U8], {"a": "b"})
    header = parse_header(raw, len(raw) + 1, "x")
    with pytest.raises(FrozenInstanceError):
        header.file_size = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        header.tensors[0].start = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(header)) == header


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys, mla_convert.formats.safetensors; "
        "print(sorted({'torch', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


# ---- round trip ----

names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
).filter(lambda name: name != "__metadata__")


@st.composite
def spec_lists(draw: st.DrawFn) -> list[TensorSpec]:
    specs = []
    for name in draw(st.lists(names, unique=True, max_size=6)):
        dtype = draw(st.sampled_from(list(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        if DTYPE_BITS[dtype] % 8:
            shape.append(8)
        specs.append(TensorSpec(name, dtype, tuple(shape)))
    return specs


@settings(UNTIMED, max_examples=60)
@given(
    spec_lists(),
    st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8)),
    st.none() | st.integers(0, 9999),
)
def test_build_then_parse_is_the_identity(
    specs: list[TensorSpec], metadata: dict[str, str] | None, congruent_to: int | None
) -> None:
    raw = build_header(specs, metadata, congruent_to=congruent_to)
    ends = list(accumulate((spec.nbytes for spec in specs), initial=len(raw)))
    placed = tuple(StoredTensor(spec, *place) for spec, place in zip(specs, pairwise(ends), strict=True))
    header = parse_header(raw, ends[-1], "x")
    assert header == SafetensorsHeader(raw, metadata, placed, len(raw), ends[-1])
    assert list(header.metadata or {}) == list(metadata or {})
    assert build_header(specs, metadata, congruent_to=congruent_to) == raw
    official = dict(deserialize(raw + bytes(ends[-1] - len(raw))))
    assert {name: (found["dtype"], tuple(found["shape"])) for name, found in official.items()} == {
        spec.name: (spec.dtype, spec.shape) for spec in specs
    }
