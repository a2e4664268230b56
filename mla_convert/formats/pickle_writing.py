"""Writes pickles of what ``pickles`` reads: no class is imported, and equal values give equal bytes."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

from mla_convert.errors import BadInputError
from mla_convert.formats.pickles import Global, Instance, Persistent

_MAX_DEPTH = 200
_ENCODE = Global("_codecs", "encode")


def write_pickle(value: Any, where: str = "value", *, protocol: int = 4) -> bytes:
    """The pickle of a value.

    Args:
        value: As ``read_pickle`` gives it.
        where: What it is, for messages.
        protocol: 4, or 2: the only one that PyTorch reads with ``weights_only``.

    Raises:
        BadInputError: It is nested too deeply, or holds something that cannot be written.
    """
    writer = _Writer(where, protocol)
    writer.write(value, 0)
    return b"\x80" + bytes([protocol]) + writer.out.getvalue() + b"."


class _Writer:
    """Writes strings and globals once, and objects that are met again by reference."""

    __slots__ = ("is_old", "kept", "memo", "out", "where")

    def __init__(self, where: str, protocol: int) -> None:
        self.out = io.BytesIO()
        self.memo: dict[Any, int] = {}
        self.kept: list[Any] = []  # what the memo knows by identity must not go away
        self.where = where
        self.is_old = protocol < 4

    def write(self, value: Any, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise BadInputError(f"{self.where}: nested more than {_MAX_DEPTH} deep")
        kind = type(value)
        if value is None or kind is bool:
            self.out.write(b"N" if value is None else b"\x88" if value else b"\x89")
        elif kind is int:
            self.out.write(_integer(value))
        elif kind is float:
            self.out.write(b"G" + struct.pack(">d", value))
        elif kind is str:
            self._remembered(("text", value), lambda: self._text(value))
        elif kind is bytes:
            self._bytes(value, depth)
        elif kind is Global:
            self._remembered(value, lambda: self._global(value, depth))
        elif kind is Instance:
            self._instance(value, depth)
        elif kind is Persistent:
            self.write(value.id, depth + 1)
            self.out.write(b"Q")
        elif kind in (tuple, list, dict, set, frozenset):
            self._container(value, depth)
        else:
            raise BadInputError(f"{self.where}: cannot write {kind.__name__}")

    def _remembered(self, key: Any, write: Callable[[], None]) -> None:
        place = self.memo.get(key)
        if place is None:
            write()
            self._remember(key)
        else:
            self.out.write(_numbered(b"hj", place))

    def _remember(self, key: Any) -> None:
        place = self.memo[key] = len(self.memo)
        self.out.write(_numbered(b"qr", place) if self.is_old else b"\x94")

    def _text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        if len(data) < 256 and not self.is_old:
            self.out.write(b"\x8c" + bytes([len(data)]) + data)
        else:
            self.out.write(b"X" + len(data).to_bytes(4, "little") + data)

    def _bytes(self, value: bytes, depth: int) -> None:
        if self.is_old:  # protocol 2 has no bytes
            self.write(Instance(_ENCODE, (value.decode("latin-1"), "latin1"), is_call=True), depth + 1)
        else:
            self.out.write(b"B" + len(value).to_bytes(4, "little") + value)

    def _global(self, value: Global, depth: int) -> None:
        if self.is_old:
            self.out.write(f"c{value.module}\n{value.name}\n".encode())
            return
        self.write(value.module, depth + 1)
        self.write(value.name, depth + 1)
        self.out.write(b"\x93")

    def _instance(self, value: Instance, depth: int) -> None:
        key = ("object", id(value))
        if key in self.memo:
            self.out.write(_numbered(b"hj", self.memo[key]))
            return
        self.kept.append(value)
        self.write(value.of, depth + 1)
        self.write(value.args, depth + 1)
        self.out.write(b"R" if value.is_call else b"\x81")
        self._remember(key)
        if value.state is not None:
            self.write(value.state, depth + 1)
            self.out.write(b"b")

    def _container(self, value: Any, depth: int) -> None:
        kind: Any = type(value)
        if kind in (set, frozenset):
            items = sorted(value, key=repr)
            of = Global("__builtin__" if self.is_old else "builtins", kind.__name__)
            self.write(Instance(of, (items,), is_call=True), depth + 1)
            return
        is_short = kind is tuple and len(value) < 4
        self.out.write(b"" if is_short else {list: b"](", dict: b"}("}.get(kind, b"("))
        for item in [part for pair in value.items() for part in pair] if kind is dict else value:
            self.write(item, depth + 1)
        if is_short:
            self.out.write((b")", b"\x85", b"\x86", b"\x87")[len(value)])
        else:
            self.out.write({list: b"e", dict: b"u"}.get(kind, b"t"))


def _numbered(codes: bytes, place: int) -> bytes:
    """A memo operation: the first code takes a byte, the second four."""
    return codes[:1] + bytes([place]) if place < 256 else codes[1:] + place.to_bytes(4, "little")


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
