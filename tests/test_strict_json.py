"""JSON is read with one meaning or refused with a line and a column; odd paths never block."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_convert.errors import BadInputError, LocalIOError
from mla_convert.strict_json import (
    MAX_DEPTH,
    MAX_DIGITS,
    dump_json,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_up_to,
    shown,
)

# A loaded machine is not a fault: hypothesis must not judge by the clock.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

DEEPEST = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH

ACCEPTED = {
    "object": (b'{"b": 1, "a": [true, false, null]}', {"b": 1, "a": [True, False, None]}),
    "bare-string": (b'"kv_b_proj"', "kv_b_proj"),
    "byte-order-mark": (b"\xef\xbb\xbf[1]", [1]),
    "surrogate-pair": (rb'"\ud83d\ude00"', "\N{GRINNING FACE}"),
    "escaped-backslash-before-u": (rb'"\\ud83d"', r"\ud83d"),
    "brackets-in-a-string": (json.dumps("[" * 1000).encode(), "[" * 1000),
    "quotes-in-a-string": (rb'["\"[[", "\\"]', ['"[[', "\\"]),
    "same-key-in-two-objects": (b'[{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]),
    "same-key-inside": (b'{"a": {"a": {"a": 1}}}', {"a": {"a": {"a": 1}}}),
    "longest-integer": (b"9" * MAX_DIGITS, int("9" * MAX_DIGITS)),
    "NaN-as-a-string": (b'["NaN", "Infinity"]', ["NaN", "Infinity"]),
    "small-float": (b"1e-999", 0.0),
    "deepest": (DEEPEST, json.loads(DEEPEST)),
}


@pytest.mark.parametrize(("text", "value"), ACCEPTED.values(), ids=ACCEPTED)
def test_accepts(text: bytes, value: Any) -> None:
    assert parse_json(text, where="config.json") == value


def test_keeps_the_order_of_keys() -> None:
    assert list(parse_json(b'{"b": 1, "a": 2, "c": 3}', where="x")) == ["b", "a", "c"]


def test_minus_zero_keeps_its_sign() -> None:
    assert repr(parse_json(b"[-0, -0.0, 0]", where="x")) == "[-0.0, -0.0, 0]"


# id: text, line, column, words of the message
REFUSED: dict[str, tuple[bytes, int, int, str]] = {
    "empty": (b"", 1, 1, "expecting value"),
    "blank": (b" \n\n ", 3, 2, "expecting value"),
    "two-values": (b"{} {}", 1, 4, "extra data"),
    "trailing-comma": (b'{"a": 1,\n}', 2, 1, "expecting property name"),
    "comment": (b"[1, // one\n2]", 1, 5, "expecting value"),
    "single-quotes": (b"{'a': 1}", 1, 2, "expecting property name"),
    "unclosed-object": (b'{"a":\n  {"b": 1}', 2, 11, "expecting ',' delimiter"),
    "unclosed-string": (b'["a', 1, 2, "unterminated string"),
    "lone-backslash-at-the-end": (b'["a\\', 1, 2, "unterminated string"),
    "raw-newline-in-a-string": (b'["a\nb"]', 1, 4, "invalid control character"),
    "bad-escape": (rb'["\x41"]', 1, 3, "invalid \\escape"),
    "leading-zero": (b"[01]", 1, 3, "expecting ',' delimiter"),
    "key-twice": (b'{\n  "heads": 1,\n  "heads": 1\n}', 3, 3, "the key 'heads' is given twice"),
    "key-twice-by-escape": (rb'{"a": 1, "\u0061": 2}', 1, 10, "the key 'a' is given twice"),
    "key-twice-deep": (b'{"a": [{"b": 1, "b": 2}], "c": 3}', 1, 17, "the key 'b' is given twice"),
    "key-twice-after-inner": (b'{"a": {"x": 1}, "a": 2}', 1, 17, "the key 'a' is given twice"),
    "empty-key-twice": (b'{"": 1, "": 2}', 1, 9, "the key '' is given twice"),
    "first-of-two-faults": (b'{"a": NaN, "b": {"c": 1, "c": 2}}', 1, 7, "NaN is not a JSON number"),
    "NaN": (b'{"a": NaN}', 1, 7, "NaN is not a JSON number"),
    "Infinity": (b"[1,\n Infinity]", 2, 2, "Infinity is not a JSON number"),
    "minus-Infinity": (b"-Infinity", 1, 1, "-Infinity is not a JSON number"),
    "float-overflow": (b"[1.0, -1e999]", 1, 7, "'-1e999' is too large for a float64"),
    "long-integer": (b"[" + b"9" * 301 + b"]", 1, 2, "an integer of 301 digits, more than 300"),
    "huge-integer": (b"[1, " + b"9" * 100_000 + b"]", 1, 5, "an integer of 100000 digits"),
    "lone-high-surrogate": (rb'{"a": "x\ud800"}', 1, 7, "half a surrogate pair"),
    "lone-low-surrogate-key": (rb'{"\uDC00": 1}', 1, 2, "half a surrogate pair"),
    "swapped-surrogates": (rb'["\ude00\ud83d"]', 1, 2, "half a surrogate pair"),
    "surrogate-in-UTF-8": (b'["\xed\xa0\x80"]', 1, 3, "byte 0xed is not UTF-8"),
    "latin-1": ("\n\n [1, 'caf\xe9']".encode("latin-1"), 3, 10, "byte 0xe9 is not UTF-8"),
    "column-counts-characters": ('{"é": 1, "é": 2}'.encode(), 1, 10, "the key 'é' is given twice"),
    "UTF-16": ("[1]".encode("utf-16"), 1, 1, "byte 0xff is not UTF-8"),
    "overlong-UTF-8": (b'["\xc0\xaf"]', 1, 3, "byte 0xc0 is not UTF-8"),
    "two-byte-order-marks": (b"\xef\xbb\xbf\xef\xbb\xbf[1]", 1, 1, "BOM"),
    "too-deep": (b"[" + DEEPEST + b"]", 1, MAX_DEPTH + 1, "nested more than 64 levels deep"),
    "too-deep-objects": (b'{"a":' * 65 + b"1" + b"}" * 65, 1, 64 * 5 + 1, "nested more than 64 levels"),
    "far-too-deep-and-open": (b"[" * 1_000_000, 1, MAX_DEPTH + 1, "nested more than 64 levels deep"),
    "deep-behind-brackets-in-strings": (b'["]",' * 100, 1, 64 * 5 + 1, "nested more than 64 levels"),
    "deep-after-a-syntax-error": (b"[1 2 " + b"[" * 100_000, 1, 69, "nested more than 64 levels"),
    "deep-after-closing-brackets": (b"]" * 99 + b"[" * 100_000, 1, 164, "nested more than 64 levels"),
    "word": (b"[nil]", 1, 2, "expecting value"),
}


@pytest.mark.parametrize(("text", "line", "column", "words"), REFUSED.values(), ids=REFUSED)
def test_refuses(text: bytes, line: int, column: int, words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        parse_json(text, where="dir/config.json")
    assert caught.value.message.startswith(f"dir/config.json: line {line}, column {column}: ")
    assert words.lower() in caught.value.message.lower()
    assert len(caught.value.message) < 400
    assert caught.value.hint == "Correct the file, or download it again."


def test_exact_message() -> None:
    with pytest.raises(BadInputError) as caught:
        parse_json(b'{"rank": 512,\n "rank": 256}', where="config.json", hint="Edit it.")
    assert str(caught.value) == "config.json: line 2, column 2: the key 'rank' is given twice in one object"
    assert caught.value.hint == "Edit it."


def test_an_unclosed_string_of_escaped_quotes_is_scanned_once() -> None:
    # One scan from each quote would be 10**12 steps: this test would not come back.
    with pytest.raises(BadInputError, match="unterminated string"):
        parse_json(rb'["\ud83d\ude00' + rb"\"" * 1_000_000, where="x")


def test_size_is_capped() -> None:
    assert parse_json(b"[1]", where="x", max_bytes=3) == [1]
    with pytest.raises(BadInputError, match="x: larger than the 2 bytes"):
        parse_json(b"[1]", where="x", max_bytes=2)


def test_depth_is_an_argument() -> None:
    assert parse_json(b"[[]]", where="x", max_depth=2) == [[]]
    with pytest.raises(BadInputError, match="column 2: nested more than 1 levels deep"):
        parse_json(b"[[]]", where="x", max_depth=1)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@UNTIMED
@given(json_values)
def test_dump_then_parse_is_the_identity(value: Any) -> None:
    assert repr(parse_json(dump_json(value), where="x")) == repr(value)


@UNTIMED
@given(json_values, st.data())
def test_a_damaged_text_is_refused_or_means_what_the_standard_parser_says(
    value: Any, data: st.DataObject
) -> None:
    text = bytearray(json.dumps(value).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(
            st.sampled_from(b'{}[]",:\\-0189eEu dNI\xff\n')
        )
    try:
        parsed = parse_json(bytes(text), where="x")
    except BadInputError as error:
        assert error.message.startswith("x: line ")
    else:
        assert parsed == json.loads(text)


def test_dump_exact_bytes() -> None:
    value = {"b": [1, 2.5], "a": {"é": None}, "c": []}
    assert (
        dump_json(value)
        == '{\n  "b": [\n    1,\n    2.5\n  ],\n  "a": {\n    "é": null\n  },\n  "c": []\n}\n'.encode()
    )


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "\ud800"], ids=["nan", "inf", "half-surrogate"]
)
def test_dump_refuses_what_parse_would(value: Any) -> None:
    with pytest.raises(ValueError):
        dump_json(value)


# ---- paths ----


def count_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_reads_a_file_and_a_link_to_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf{}")
    (tmp_path / "link").symlink_to("config.json")
    assert read_json(tmp_path / "config.json") == {}
    assert read_json(str(tmp_path / "link")) == {}
    assert read_bytes(tmp_path / "link") == b"\xef\xbb\xbf{}"


def test_a_fault_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{")
    with pytest.raises(BadInputError) as caught:
        read_json(path)
    assert caught.value.message.startswith(f"{path}: line 1, column 2: ")


def test_a_large_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it whole would exhaust memory
    with pytest.raises(BadInputError, match=f"{path}: larger than the 1000 bytes"):
        read_json(path, max_bytes=1000)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_dangling_link(path: Path) -> None:
    path.symlink_to("blobs/gone")


def make_link_loop(path: Path) -> None:
    path.symlink_to(path.with_name("other"))
    path.with_name("other").symlink_to(path)


def make_self_link(path: Path) -> None:
    path.symlink_to(path)


def make_link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


def make_nothing(path: Path) -> None:
    pass


BAD_PATHS = {
    "directory": (make_directory, "a directory, not a regular file"),
    "fifo": (make_fifo, "a FIFO, not a regular file"),
    "link-to-fifo": (make_link_to_fifo, "a FIFO, not a regular file"),
    "device": (make_device, "a character device, not a regular file"),
    "dangling-link": (make_dangling_link, "a symbolic link to blobs/gone, which does not exist"),
    "link-loop": (make_link_loop, "its symbolic links form a loop"),
    "self-link": (make_self_link, "its symbolic links form a loop"),
    "missing": (make_nothing, "no such file"),
}


@pytest.mark.parametrize(("make", "words"), BAD_PATHS.values(), ids=BAD_PATHS)
def test_odd_paths_are_refused_without_blocking(tmp_path: Path, make: Any, words: str) -> None:
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(BadInputError) as caught:
        read_json(path)
    assert caught.value.message == f"{path}: {words}"
    assert caught.value.hint


def test_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.json")
        with pytest.raises(BadInputError, match=r"s\.json: a socket, not a regular file"):
            open_regular("s.json")


def test_a_file_used_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match="Not a directory"):
        read_json(tmp_path / "file" / "config.json")


def test_impossible_paths() -> None:
    with pytest.raises(BadInputError, match=r"'a\\x00b': not a possible path: it contains a NUL character"):
        read_json("a\0b")
    with pytest.raises(BadInputError, match="File name too long"):
        read_json("a" * 5000)


@pytest.mark.parametrize(("make", "kind"), [(make_fifo, "a FIFO"), (make_directory, "a directory")])
def test_what_takes_the_place_of_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, kind: str
) -> None:
    path = tmp_path / "config.json"
    path.touch()
    regular = path.stat()
    path.unlink()
    make(path)
    open_files = count_descriptors()
    monkeypatch.setattr(Path, "stat", lambda self: regular)  # the first look came before the exchange
    with pytest.raises(BadInputError, match=f"{kind}, not a regular file"):
        open_regular(path)
    assert count_descriptors() == open_files


def test_permission_is_a_local_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.touch()

    def refuse(*args: Any) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(LocalIOError) as caught:
        read_json(path)
    assert caught.value.message == f"{path}: cannot be opened: Permission denied"


def test_a_device_error_names_the_offset(tmp_path: Path) -> None:
    class BadSector:
        def tell(self) -> int:
            return 4096

        def read(self, count: int) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(LocalIOError) as caught:
        read_up_to(BadSector(), 8, where="x.safetensors")  # type: ignore[arg-type]
    assert caught.value.message == "x.safetensors: reading 8 bytes at offset 4096 failed: Input/output error"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{")
    before = count_descriptors()
    for _ in range(5):
        with pytest.raises(BadInputError):
            read_json(path)
        with pytest.raises(BadInputError):
            read_json(tmp_path)
    assert count_descriptors() == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.weight", "'a.weight'"),
        ("[bold]\n\x1b[31m", "'[bold]\\n\\x1b[31m'"),
        ("a" * 200 + "b" * 200, "'" + "a" * 57 + "..." + "b" * 57 + "' (400 characters)"),
    ],
    ids=["plain", "control", "long"],
)
def test_shown(name: str, text: str) -> None:
    assert shown(name) == text
