"""Crafted headers: each is refused, and the message says where and why.

``theirs`` is what safetensors 0.8 does with the same bytes; where it accepts, two programs may see two
different models in one file, or a file may carry a stowaway.

| attempt | what it could do | theirs |
|---|---|---|
| length that lies | read or allocate beyond the file | refuses |
| deep nesting, huge numbers, many escapes | exhaust the stack, memory or time of the parser | refuses |
| overlap | a small file that inflates to terabytes | refuses |
| gap, bytes after the data | hide content that no tensor covers | refuses |
| a key twice | one reader takes the first, another the last | accepts |
| unknown field, ``null`` metadata, a tensor given as an array | meaning depends on the reader | accepts |
| whitespace before ``{``, line breaks after ``}`` | a polyglot file | accepts |
| empty name, NUL in a name | truncated names in C programs | accepts |
| overflow hidden by a dimension of 0 | strides that don't fit 63 bits | accepts |
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from mla_convert.errors import BadInputError
from mla_convert.formats.safetensors import build_header, parse_header, read_header
from mla_convert.tensors import TensorSpec

# A loaded machine is not a fault: hypothesis must not judge by the clock.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

WHERE = "model-00001-of-00002.safetensors"


def file_of(text: str | bytes, payload: int = 0, *, length: int | None = None) -> bytes:
    """A file with this JSON text, ``payload`` bytes of data, and a length field that may lie."""
    text = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(payload)


def tensor(
    dtype: str = '"U8"', shape: str = "[4]", offsets: str = "[0,4]", *, name: str = '"w"', more: str = ""
) -> str:
    """JSON of one member; the arguments are JSON too, so that they can be anything."""
    return f'{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}'


def one(*args: str, payload: int = 4, **kwargs: str) -> bytes:
    """A file that holds only the tensor described."""
    return file_of("{" + tensor(*args, **kwargs) + "}", payload)


def two(first: str, second: str, payload: int, sizes: tuple[int, int] = (4, 4)) -> bytes:
    a = tensor(shape=f"[{sizes[0]}]", offsets=first, name='"a"')
    b = tensor(shape=f"[{sizes[1]}]", offsets=second, name='"b"')
    return file_of(f"{{{a},{b}}}", payload)


GOOD = one()
HALF = "\\ud800"

# id: file, words of the message. Every id that ends in "*" is taken by the official library (see test below).
ATTACKS: dict[str, tuple[bytes, str]] = {
    # ---- the length ----
    "empty-file": (b"", "too short for a safetensors file: expected 8 bytes or more, found 0"),
    "seven-bytes": (b"\x02\0\0\0\0\0\0", "expected 8 bytes or more, found 7"),
    "length-0": (file_of("", 4), "the header claims 0 bytes"),
    "length-0-before-json": (file_of("{}", length=0), "the header claims 0 bytes"),
    "length-1": (file_of("{}", length=1), "the header ends with b'{'"),
    "length-beyond-the-file": (file_of("{}", length=3), "expected 11 bytes or more, found 10"),
    "length-over-the-limit": (
        file_of("{}", length=100_000_001),
        "the header claims 100000001 bytes; at most",
    ),
    "length-at-the-limit": (file_of("{}", length=100_000_000), "expected 100000008 bytes or more, found 10"),
    "length-2**63": (file_of("{}", length=2**63), "the header claims 9223372036854775808 bytes"),
    "length-2**64-1": (file_of("{}", length=2**64 - 1), "the header claims 18446744073709551615 bytes"),
    "length-big-endian": (b"\0\0\0\0\0\0\0\x02{}", "the header claims 144115188075855872 bytes"),
    "length-short-of-the-brace": (file_of('{"__metadata__":{}}', length=17), "ends with b'{'"),
    "length-short-of-one-brace": (file_of('{"__metadata__":{}}', length=18), "expecting ',' delimiter"),
    "git-lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer of 43 bytes"),
    "zip-file": (b"PK\x03\x04\0\0\0\0\0\0archive/data.pkl", "expected 67324760 bytes or more, found 26"),
    "html-error-page": (b"<!DOCTYPE html><html>404</html>", "the header claims"),
    # ---- not the JSON object it should be ----
    "not-json": (file_of("{tensors}"), "header: line 1, column 2: expecting property name"),
    "array-root": (file_of("[]"), "the header begins with b'[', expected b'{'"),
    "string-root": (file_of('"{}"'), "the header begins with b'\"'"),
    "only-padding": (file_of("        "), "the header begins with b''"),
    "space-before-brace*": (file_of(" {}"), "the header begins with b' '"),
    "newline-before-brace*": (file_of("\n{}"), "the header begins with b'\\n'"),
    "byte-order-mark": (file_of(b"\xef\xbb\xbf{}"), "the header begins with b'\\xef'"),
    "newline-after-brace*": (file_of("{}\n"), "the header ends with b'\\n'"),
    "tab-in-the-padding*": (file_of("{} \t  "), "the header ends with b'\\t'"),
    "NUL-padding": (file_of("{}\0\0\0"), "the header ends with b'\\x00'"),
    "code-after-brace": (file_of("{} <?php"), "the header ends with b'p'"),
    "second-object": (file_of("{}{}"), "column 3: extra data"),
    "unclosed": (file_of('{"a":{}'), "column 8: expecting ',' delimiter"),
    "utf-16": (file_of("{}".encode("utf-16-le")), "the header ends with b'\\x00'"),
    "not-utf-8": (file_of(b'{"\xff":1}'), "column 3: byte 0xff is not UTF-8"),
    "surrogate-in-utf-8": (one(name='"\ud800"'), "byte 0xed is not UTF-8"),
    "deep-arrays": (one(shape="[" * 100_000 + "]" * 100_000), "nested more than 3 levels deep"),
    "deep-objects": (file_of('{"a":' * 1000 + "1" + "}" * 1000), "nested more than 3 levels deep"),
    "deep-in-unknown-field*": (one(more=',"x":[[]]'), "nested more than 3 levels deep"),
    "NaN": (one(offsets="[0,NaN]"), "NaN is not a JSON number"),
    "comment": (file_of("{/* */}"), "column 2: expecting property name"),
    # ---- keys ----
    "tensor-twice*": (file_of(f"{{{tensor()},{tensor()}}}", 4), "the key 'w' is given twice"),
    "tensor-twice-other-dtype*": (
        file_of("{" + tensor('"F32"', "[1]") + "," + tensor() + "}", 4),
        "the key 'w' is given twice",
    ),
    "tensor-twice-by-escape*": (
        file_of("{" + tensor() + "," + tensor(name='"\\u0077"') + "}", 4),
        "the key 'w' is given twice",
    ),
    "metadata-twice": (
        file_of('{"__metadata__":{},"__metadata__":{}}'),
        "the key '__metadata__' is given twice",
    ),
    "metadata-key-twice*": (file_of('{"__metadata__":{"a":"1","a":"2"}}'), "the key 'a' is given twice"),
    "dtype-twice": (one(more=',"dtype":"I8"'), "the key 'dtype' is given twice"),
    "offsets-twice": (one(more=',"data_offsets":[0,4]'), "the key 'data_offsets' is given twice"),
    "unknown-field*": (one(more=',"strides":[1]'), "tensor 'w': unknown field 'strides'"),
    "unknown-field-null*": (one(more=',"":null'), "tensor 'w': unknown field ''"),
    "field-in-capitals": (file_of(one()[8:-4].replace(b"shape", b"Shape"), 4), "the field shape is missing"),
    "no-dtype": (file_of('{"w":{"shape":[4],"data_offsets":[0,4]}}', 4), "the field dtype is missing"),
    "no-shape": (file_of('{"w":{"dtype":"U8","data_offsets":[0,4]}}', 4), "the field shape is missing"),
    "no-offsets": (file_of('{"w":{"dtype":"U8","shape":[4]}}', 4), "the field data_offsets is missing"),
    "empty-tensor-object": (file_of('{"w":{}}'), "tensor 'w': the field dtype is missing"),
    # ---- kinds of values ----
    "tensor-as-array*": (file_of('{"w":["U8",[4],[0,4]]}', 4), "tensor 'w': described by an array"),
    "tensor-null": (file_of('{"w":null}'), "tensor 'w': described by null"),
    "tensor-as-string": (file_of('{"w":"U8"}'), "tensor 'w': described by a string"),
    "metadata-null*": (
        file_of('{"__metadata__":null}'),
        "__metadata__ is null, expected an object of strings",
    ),
    "metadata-array": (file_of('{"__metadata__":[]}'), "__metadata__ is an array"),
    "metadata-number": (file_of('{"__metadata__":{"step":1}}'), "__metadata__ 'step' is a number"),
    "metadata-null-value": (file_of('{"__metadata__":{"step":null}}'), "__metadata__ 'step' is null"),
    "metadata-nested": (file_of('{"__metadata__":{"a":{}}}'), "__metadata__ 'a' is an object"),
    "metadata-is-a-tensor": (one(name='"__metadata__"'), "__metadata__ 'shape' is an array"),
    "metadata-half-surrogate": (file_of(f'{{"__metadata__":{{"a":"{HALF}"}}}}'), "half a surrogate pair"),
    # ---- names ----
    "empty-name*": (one(name='""'), "tensor '': the name is empty"),
    "NUL-in-name*": (
        one(name='"w\\u0000.weight"'),
        "tensor 'w\\x00.weight': the name contains a NUL character",
    ),
    "half-surrogate-in-name": (one(name=f'"{HALF}"'), "half a surrogate pair"),
    "raw-control-character": (one(name='"\x1b[31m"'), "invalid control character"),
    # ---- dtype ----
    "unknown-dtype": (one('"F128"'), "unknown dtype 'F128'; known are BOOL, U8, I8, F8_E4M3"),
    "dtype-lower-case": (one('"u8"'), "unknown dtype 'u8'"),
    "dtype-with-space": (one('"U8 "'), "unknown dtype 'U8 '"),
    "dtype-number": (one("8"), "dtype is a number, expected a string"),
    "dtype-array": (one("[]"), "dtype is an array, expected a string"),
    "dtype-megabytes": (one(f'"{"F" * 1_000_000}"'), "(1000000 characters); known are"),
    # ---- shape ----
    "shape-number": (one(shape="4"), "shape is a number, expected an array"),
    "shape-null": (one(shape="null"), "shape is null, expected an array"),
    "shape-string": (one(shape='"4"'), "shape is a string, expected an array"),
    "shape-true": (one(shape="[true,4]"), "shape holds True"),
    "shape-float": (one(shape="[4.0]"), "shape holds 4.0"),
    "shape-exponent": (one(shape="[4e0]"), "shape holds 4.0"),
    "shape-minus-zero": (one(shape="[-0]", offsets="[0,0]", payload=0), "shape holds -0.0"),
    "shape-text": (one(shape='["4"]'), "shape holds '4'"),
    "shape-negative": (one(shape="[-4]"), "shape holds -4; expected integers from 0 to 2**63 - 1"),
    "shape-two-negatives": (one(shape="[-2,-2]"), "shape holds -2"),
    "shape-2**63": (one(shape=f"[{2**63},0]"), "shape holds 9223372036854775808"),
    "shape-2**64+4": (one(shape=f"[{2**64 + 4}]"), "shape holds 18446744073709551620"),
    "shape-wraps-to-4": (one(shape=f"[{2**62 + 1},4]"), "overflows 63 bits"),
    "shape-bits-wrap": (one('"F64"', f"[{2**58}]"), "shape [288230376151711744] of F64 overflows 63 bits"),
    "shape-overflow-then-0": (one(shape=f"[{2**62},{2**62},0]", offsets="[0,0]"), "overflows 63 bits"),
    "shape-0-then-overflow*": (
        file_of("{" + tensor(shape=f"[0,{2**62},{2**62}]", offsets="[0,0]") + "}"),
        "overflows 63 bits",
    ),
    "shape-of-9s": (one(shape=f"[{'9' * 300}]"), "shape holds 999999"),
    "shape-of-a-million-9s": (one(shape=f"[{'9' * 1_000_000}]"), "an integer of 1000000 digits"),
    "shape-of-100000-ones": (one(shape="[" + "1," * 100_000 + "5]"), "... is 5 bytes, but data_offsets"),
    "shape-too-small": (one(shape="[3]"), "U8 of shape [3] is 3 bytes, but data_offsets 0 to 4 hold 4"),
    "shape-too-large": (one('"BF16"', "[4]"), "BF16 of shape [4] is 8 bytes, but data_offsets 0 to 4 hold 4"),
    "scalar-of-4-bytes": (one(shape="[]"), "U8 of shape [] is 1 bytes, but data_offsets 0 to 4 hold 4"),
    "zero-size-with-bytes": (one(shape="[0,7]"), "U8 of shape [0, 7] is 0 bytes"),
    "F4-half-a-byte": (one('"F4"', "[7]"), "shape [7] of F4 is 28 bits, not a whole number of bytes"),
    "F6-part-of-a-byte": (one('"F6_E2M3"', "[5]"), "30 bits, not a whole number of bytes"),
    # ---- offsets ----
    "offsets-number": (one(offsets="4"), "data_offsets is a number, expected an array"),
    "offsets-object": (one(offsets="{}"), "data_offsets is an object, expected an array"),
    "offsets-none": (one(offsets="[]"), "data_offsets holds 0 numbers, expected 2"),
    "offsets-one": (one(offsets="[4]"), "data_offsets holds 1 numbers, expected 2"),
    "offsets-three": (one(offsets="[0,4,4]"), "data_offsets holds 3 numbers, expected 2"),
    "offsets-bools": (one(shape="[1]", offsets="[false,true]"), "data_offsets holds False"),
    "offsets-float": (one(offsets="[0,4.0]"), "data_offsets holds 4.0"),
    "offsets-minus-zero": (one(offsets="[-0,4]"), "data_offsets holds -0.0"),
    "offsets-text": (one(offsets='["0","4"]'), "data_offsets holds '0'"),
    "offsets-null": (one(offsets="[null,4]"), "data_offsets holds None"),
    "offsets-nested": (one(offsets="[[0],4]"), "nested more than 3 levels deep"),
    "offsets-negative": (one(offsets="[-4,0]"), "data_offsets holds -4"),
    "offsets-reversed": (one(offsets="[4,0]"), "data_offsets are reversed: 4 to 0"),
    "offsets-2**64-wrap": (one(offsets=f"[{2**64 - 4},{2**64}]"), "data_offsets holds 18446744073709551612"),
    "offsets-huge": (one(offsets=f"[{2**62},{2**62 + 4}]"), "4611686018427387904 bytes are unused"),
    "offsets-300-digits": (one(offsets=f"[0,{'9' * 300}]"), "data_offsets holds 999999"),
    # ---- layout ----
    "overlap": (
        two("[0,4]", "[2,6]", 6),
        "tensor 'a' ends at byte 117, but tensor 'b' begins at byte 115: 2 bytes",
    ),
    "overlap-same-bytes": (two("[0,4]", "[0,4]", 4), "4 bytes overlap"),
    "overlap-inside": (two("[0,4]", "[1,3]", 4, (4, 2)), "3 bytes overlap"),
    "overlap-zero-size-inside": (two("[0,4]", "[2,2]", 4, (4, 0)), "2 bytes overlap"),
    "overlap-bomb": (
        file_of("{" + ",".join(tensor(name=f'"w{i}"') for i in range(1000)) + "}", 4),
        "4 bytes overlap",
    ),
    "gap": (two("[0,4]", "[5,9]", 9), "tensor 'b' begins at byte 118: 1 bytes are unused"),
    "gap-at-the-start": (one(offsets="[1,5]", payload=5), "the header ends at byte"),
    "gap-before-zero-size": (two("[0,4]", "[9,9]", 9, (4, 0)), "5 bytes are unused"),
    "truncated": (GOOD[:-1], f"the file ends early: expected {len(GOOD)} bytes, found {len(GOOD) - 1}"),
    "truncated-to-the-header": (GOOD[:-4], f"expected {len(GOOD)} bytes, found {len(GOOD) - 4}"),
    "truncated-in-the-header": (GOOD[:20], f"expected {len(GOOD) - 4} bytes or more, found 20"),
    "truncated-shard": (two("[0,4]", "[4,8]", 5), "the file ends early: expected 121 bytes, found 118"),
    "trailing-byte": (
        GOOD + b"\0",
        f"1 bytes follow the data: expected {len(GOOD)} bytes, found {len(GOOD) + 1}",
    ),
    "trailing-zip": (GOOD + b"PK\x03\x04", "4 bytes follow the data"),
    "data-without-tensors": (file_of("{}", 4), "4 bytes follow the data: expected 10 bytes, found 14"),
    "zero-size-beyond-the-end": (one(shape="[0]", offsets="[8,8]"), "8 bytes are unused"),
}


def official(content: bytes) -> bool:
    """Whether the official library takes these bytes."""
    try:
        deserialize(content)
    except SafetensorError:
        return False
    return True


@pytest.mark.parametrize(("content", "words"), ATTACKS.values(), ids=ATTACKS)
def test_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / WHERE
    path.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        read_header(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert words in caught.value.message
    assert len(caught.value.message) < len(str(path)) + 500  # whatever the file says, a message can be read
    assert caught.value.hint is not None


@pytest.mark.parametrize("attack", ATTACKS)
def test_only_the_marked_ones_are_taken_by_the_official_library(attack: str) -> None:
    if official(ATTACKS[attack][0]):
        assert attack.endswith("*")


def test_the_template_of_the_attacks_is_sound() -> None:
    # Without this, a fault in the template would make every attack pass for the wrong reason.
    assert official(GOOD)
    assert [stored.spec for stored in parse_header(GOOD, len(GOOD), WHERE).tensors] == [
        TensorSpec("w", "U8", (4,))
    ]
    content = two("[0,4]", "[4,8]", 8)
    assert len(parse_header(content, len(content), WHERE).tensors) == 2


def test_exact_message() -> None:
    with pytest.raises(BadInputError) as caught:
        parse_header(GOOD[:-4], len(GOOD) - 3, WHERE)
    assert (
        str(caught.value)
        == f"{WHERE}: the file ends early: expected {len(GOOD)} bytes, found {len(GOOD) - 3}"
    )
    assert caught.value.hint == "The file is incomplete or damaged; download it again."


def test_fewer_bytes_than_the_header_says() -> None:
    with pytest.raises(
        BadInputError, match=f"the header ends early: expected {len(GOOD) - 4} bytes, found 30"
    ):
        parse_header(GOOD[:30], len(GOOD), WHERE)


def test_a_long_name_is_cut_in_the_message() -> None:
    content = one(name=json.dumps("n" * 100_000), shape="[3]")
    with pytest.raises(BadInputError, match=r"nnn\.\.\.nnn.*\(100000 characters\)") as caught:
        parse_header(content, len(content), WHERE)
    assert len(caught.value.message) < 300


# ---- random damage ----

VALID = build_header(
    [
        TensorSpec("layers.0.kv_b_proj.weight", "BF16", (2, 3)),
        TensorSpec("é\n", "F4", (2, 0)),
        TensorSpec("scale", "F32", ()),
    ],
    {"format": "pt"},
) + bytes(16)
HEADER_SIZE = len(VALID) - 16


def check(content: bytes) -> None:
    """Ours refuses with BadInputError, or the official library sees the same tensors."""
    try:
        header = parse_header(content, len(content), WHERE)
    except BadInputError as error:
        assert error.message.startswith(f"{WHERE}: ")
        return
    theirs = {
        name: (found["dtype"], tuple(found["shape"]), len(found["data"]))
        for name, found in deserialize(content)
    }
    assert theirs == {t.spec.name: (t.spec.dtype, t.spec.shape, t.stop - t.start) for t in header.tensors}


@settings(UNTIMED, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, HEADER_SIZE - 1), st.integers(0, 255)), min_size=1, max_size=4))
@example([(0, 0)])
def test_changed_bytes(changes: list[tuple[int, int]]) -> None:
    content = bytearray(VALID)
    for position, value in changes:
        content[position] = value
    check(bytes(content))


FRAGMENTS = [
    *b'{}[]",:\\ 0123456789-.eE\n\x00\xff',
    *(
        f.encode()
        for f in ("true", "null", "NaN", "-0", "1e3", "[0,0]", '"U8"', '"F4"', '"shape":[', "\\ud800")
    ),
    b'"__metadata__":{},',
    b'"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},',
    b'"x":{"dtype":"U8","shape":[0],"data_offsets":[16,16]},',
]


@settings(UNTIMED, max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(8, HEADER_SIZE), st.integers(0, 12), st.sampled_from(FRAGMENTS)),
        min_size=1,
        max_size=3,
    )
)
def test_replaced_fragments(changes: list[tuple[int, int, bytes | int]]) -> None:
    text = VALID[8:HEADER_SIZE]
    for position, removed, fragment in changes:
        new = bytes([fragment]) if isinstance(fragment, int) else fragment
        text = text[: position - 8] + new + text[position - 8 + removed :]
    check(file_of(text, 16))


@settings(UNTIMED, max_examples=100)
@given(st.binary(max_size=200))
def test_random_bytes(content: bytes) -> None:
    check(content)
    check(file_of(content))


def test_every_truncation_is_refused() -> None:
    for size in range(len(VALID)):
        with pytest.raises(BadInputError, match=r"expected \d+ bytes|too short"):
            parse_header(VALID[:size], size, WHERE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
sizes = st.integers(0, 4) | st.sampled_from([8, 16, 2**31, 2**62, 2**63, 2**64])
members = st.dictionaries(
    st.sampled_from(["a", "b", "c", "", "../x", "__metadata__"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["U8", "F4", "BF16", "F64", "X"]) | json_values,
            "shape": st.lists(sizes, max_size=3) | json_values,
            "data_offsets": st.tuples(sizes, sizes) | json_values,
        }
    )
    | json_values,
    max_size=3,
)


@settings(UNTIMED, max_examples=150)
@given(members, st.integers(0, 16))
def test_random_objects(header: dict[str, object], payload: int) -> None:
    check(file_of(json.dumps(header), payload))
