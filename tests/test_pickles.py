"""Pickles read as data, against Python's own pickle; and written, against Python's and PyTorch's readers."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import math
import pickle
from pathlib import PosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_convert.errors import BadInputError
from mla_convert.formats.pickle_writing import write_pickle
from mla_convert.formats.pickles import Global, Instance, Persistent, read_pickle

UNTIMED = settings(deadline=None)
ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=300)
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner)
        | st.sets(st.integers()).map(set)
    ),
    max_leaves=20,
)


@UNTIMED
@given(VALUES, st.sampled_from([4, 5]))
def test_plain_data_reads_as_python_reads_it(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), {}, "x") == value


@UNTIMED
@given(st.recursive(ATOMS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_older_protocols_too(value: Any) -> None:
    for protocol in (1, 2, 3):
        assert read_pickle(pickle.dumps(value, protocol), {}, "x") == value


@UNTIMED
@given(VALUES, st.sampled_from([2, 4]))
def test_written_data_reads_as_it_was_by_python(value: Any, protocol: int) -> None:
    data = write_pickle(value, protocol=protocol)
    assert pickle.loads(data) == value
    assert write_pickle(value, protocol=protocol) == data


def test_bytes_come_back_in_both_protocols() -> None:
    for protocol in (2, 4):
        assert pickle.loads(write_pickle([b"\x00\xff" * 300, b""], protocol=protocol)) == [
            b"\x00\xff" * 300,
            b"",
        ]


def test_a_negative_zero_and_nan_keep_their_bits() -> None:
    zero, nan = read_pickle(write_pickle([-0.0, math.nan]), {}, "x")
    assert math.copysign(1, zero) == -1
    assert math.isnan(nan)


def test_objects_are_described_and_never_made() -> None:
    value = {"args": argparse.Namespace(a=1, path=PosixPath("/x")), "rest": collections.OrderedDict(b=2)}
    allowed = {
        "argparse": frozenset({"Namespace"}),
        "pathlib": frozenset({"*"}),
        "collections": frozenset({"OrderedDict"}),
    }
    found = read_pickle(pickle.dumps(value), allowed, "x")
    args = found["args"]
    assert (type(args), args.of, args.get("a"), args.is_call) == (
        Instance,
        Global("argparse", "Namespace"),
        1,
        False,
    )
    assert found["rest"] == {"b": 2}
    assert pickle.loads(write_pickle(found)) == {**value, "rest": {"b": 2}}


def test_pytorch_reads_what_is_written_with_weights_only(tmp_path: Any) -> None:
    from mla_convert.formats.torch_save_writing import write_archive

    value = {
        "args": argparse.Namespace(n=300, text="x", pair=(1, 2, 3, 4)),
        "dtype": torch.bfloat16,
        "raw": b"\x00\xff",
        "number": 2**40,
    }
    buffer = io.BytesIO()
    torch.save(value, buffer)
    allowed = {
        "argparse": frozenset({"Namespace"}),
        "torch": frozenset({"bfloat16"}),
        "_codecs": frozenset({"*"}),
    }
    import zipfile

    data = zipfile.ZipFile(buffer).read("archive/data.pkl")
    described = read_pickle(data, allowed, "x")
    path = tmp_path / "x.pt"
    path.write_bytes(write_archive(write_pickle(described, protocol=2), {}))
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(path, weights_only=True) == value


def test_shared_objects_stay_shared_and_output_is_short() -> None:
    one = Instance(Global("torch", "Size"), ((1, 2),), is_call=True)
    data = write_pickle([one] * 100)
    found = read_pickle(data, {"torch": frozenset({"Size"})}, "x")
    assert len(data) < 400
    assert all(each is found[0] for each in found)


def test_a_reference_beside_the_pickle_is_kept() -> None:
    found = read_pickle(write_pickle(Persistent(("storage", "0"))), {}, "x")
    assert isinstance(found, Persistent)
    assert found.id == ("storage", "0")


def test_an_unlisted_name_is_refused_with_the_name() -> None:
    with pytest.raises(BadInputError, match=r"'os'\.'system'"):
        read_pickle(b"cos\nsystem\n.", {"os": frozenset({"path"})}, "evil")


def _deep(count: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(count):
        value = [value]
    return value


def test_writing_stops_at_a_depth_instead_of_the_interpreter() -> None:
    with pytest.raises(BadInputError, match="nested more than"):
        write_pickle(_deep(5000))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b".",
        b"(.",
        b"]a.",
        b"}(K\x01u.",
        b"h\x00.",
        b"j\xff\xff\xff\xff.",
        b"X\xff\xff\xff\x7fabc.",
        b"\x8e" + b"\xff" * 8 + b".",
        b"\x8b\xff\xff\xff\x7f.",
        b"K\x01K\x02R.",
        b"K\x01b.",
        b"K\x01s.",
        b"0.",
        b"\x93.",
        b"(i__main__\nX\n.",
        b"\x82\x01.",
        b"Pabc\n.",
        b"]]s.",
        b"K\x01]]u.",
        b"c\xff\xfe\nx\n.",
        b"I" + b"9" * 5000 + b"\n.",
    ],
)
def test_broken_programs_are_bad_input(data: bytes) -> None:
    with pytest.raises(BadInputError):
        read_pickle(data, {}, "x")


@UNTIMED
@given(st.binary(max_size=80))
def test_any_bytes_are_data_or_bad_input(data: bytes) -> None:
    with contextlib.suppress(BadInputError):
        read_pickle(b"\x80\x04" + data, {}, "x")


@UNTIMED
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_byte_never_breaks_the_reader(place: int, value: int) -> None:
    data = bytearray(pickle.dumps({f"key{n}": [n, (n, str(n)), {"x": 1.5}] for n in range(20)}))
    data[place % len(data)] = value
    with contextlib.suppress(BadInputError):
        read_pickle(bytes(data), {}, "x")


def test_a_dictionary_key_that_takes_for_ever_to_hash_is_refused() -> None:
    # Thirty-two tuples, each holding the one before it twice: nothing to store, 2**32 steps to hash.
    data = b"\x80\x04}(K\x01" + b"2\x86" * 32 + b"K\x01u."
    with pytest.raises(BadInputError):
        read_pickle(data, {}, "x")
