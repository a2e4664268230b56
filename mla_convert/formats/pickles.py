"""Pickles as data: a reader that calls nothing and imports nothing. ``pickle_writing`` writes what it reads.

A pickle is a program for a small stack machine, and Python's own machine calls whatever the program names. This one
has no such instruction: a global stays a name (`Global`), and a call, or an object to be made, stays a description of
it (`Instance`). Names must be on the caller's list all the same, so that a file which asks for more than its format
needs is refused instead of half understood.

Nothing in a program can make this machine allocate more than a constant for each of its bytes: lengths are checked
against the data, the memo is a dictionary, and dictionary keys are atoms (hashing nested tuples can take for ever).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mla_convert.errors import BadInputError

#: Module -> the names in it that a format needs; "*" stands for every plain name of that module and those below it.
Allowed = Mapping[str, frozenset[str]]

_HINT = "nothing of it was run; do not open the file with other tools unless you trust where it comes from"
_MAX_INTEGER = 256


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names. It is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Instance:
    """An object that a pickle describes: ``of(*args)`` if ``is_call``, else a new ``of``; then its state."""

    of: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    is_call: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, where the state is a dictionary of them."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to something beside the pickle, such as the bytes of a tensor."""

    id: Any


def read_pickle(data: bytes, allowed: Allowed, where: str) -> Any:
    """The value that a pickle describes.

    Lists, tuples, sets, dictionaries and atoms are Python's own; ``collections.OrderedDict`` is a dictionary.
    Everything else is an `Instance`, `Global` or `Persistent`.

    Args:
        data: The pickle, of any protocol.
        allowed: The globals that it may name.
        where: What it is, for messages.

    Raises:
        BadInputError: It is damaged, or names something that is not allowed.
    """
    return _Machine(data, allowed, where).run()


_ATOMS = (str, int, float, bool, bytes, type(None))
_MARK = object()
_ORDERED = Global("collections", "OrderedDict")


class _Machine:
    __slots__ = ("allowed", "data", "globals", "marks", "memo", "position", "stack", "where")

    def __init__(self, data: bytes, allowed: Allowed, where: str) -> None:
        self.data, self.allowed, self.where = data, allowed, where
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}

    def run(self) -> Any:
        data, operations, memo, push = self.data, _OPERATIONS, self.memo, self.stack.append
        try:
            while True:
                code = data[self.position]
                self.position += 1
                if code == 0x68:  # BINGET, one operation in three
                    push(memo[data[self.position]])
                    self.position += 1
                elif code == 0x94:  # MEMOIZE, one in four
                    memo[len(memo)] = self.top()
                elif code == 0x2E:  # STOP
                    return self.pop()
                else:
                    operations[code](self)
        except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
            if self.position > len(data) or not isinstance(error, KeyError):
                raise self.damaged(type(error).__name__) from error
            raise self.damaged(f"operation {data[self.position - 1 : self.position]!r}") from error

    def damaged(self, what: str) -> BadInputError:
        return BadInputError(
            f"{self.where}: not a pickle of plain data: {what} near byte {self.position} of {len(self.data)}",
            hint=_HINT,
        )

    # Reading the program

    def take(self, count: int) -> bytes:
        start = self.position
        if count < 0 or start + count > len(self.data):
            self.position = len(self.data) + 1
            raise ValueError
        self.position = start + count
        return self.data[start : start + count]

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.position)
        return self.take(end + 1 - self.position)[:-1]

    # The stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if self.marks and self.marks[-1] >= len(self.stack):
            raise ValueError
        return self.stack.pop()

    def top(self) -> Any:
        if self.marks and self.marks[-1] >= len(self.stack):
            raise ValueError
        return self.stack[-1]

    def marked(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    # What needs a closer look

    def find_global(self, module: str, name: str) -> None:
        found = self.globals.get((module, name))
        if found is None:
            if not is_allowed(self.allowed, module, name):
                raise BadInputError(
                    f"{self.where}: refused: it asks for {module[:80]!r}.{name[:80]!r}, which no checkpoint needs",
                    hint=_HINT,
                )
            found = self.globals[module, name] = Global(module, name)
        self.push(found)

    def new(self, *, is_call: bool) -> None:
        args, of = self.pop(), self.pop()
        if not isinstance(of, Global) or type(args) is not tuple:
            raise ValueError
        if of == _ORDERED and is_call:
            self.push(dict(self.pairs(args[0])) if args else {})
            return
        self.push(Instance(of, args, is_call=is_call))

    def pairs(self, items: list[Any]) -> list[tuple[Any, Any]]:
        found = []
        for item in items:
            key, value = item
            found.append((self.key(key), value))
        return found

    def key(self, key: Any) -> Any:
        atoms = key if type(key) is tuple else (key,)
        if (
            type(key) is not Global
            and type(key) is not Instance
            and not all(type(a) in _ATOMS for a in atoms)
        ):
            raise ValueError
        return key

    def add_items(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) is not dict or len(items) % 2:
            raise ValueError
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self.key(key)] = value

    def extend(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            raise ValueError
        target.extend(items)

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if type(target) is dict:
            return  # attributes of an OrderedDict: torch puts _metadata on a module's state
        if type(target) is not Instance:
            raise ValueError
        target.state = state

    def integer(self, data: bytes) -> int:
        if len(data) > _MAX_INTEGER:
            raise ValueError
        return int.from_bytes(data, "little", signed=True)


def is_allowed(allowed: Allowed, module: str, name: str) -> bool:
    """True if a list of names has this one."""
    if name in allowed.get(module, ()):
        return True
    while module and "." not in name:
        if "*" in allowed.get(module, ()):
            return True
        module = module.rpartition(".")[0]
    return False


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _decimal(machine: _Machine) -> int | bool:
    line = machine.line()
    if line in (b"00", b"01"):
        return line == b"01"
    if len(line) > _MAX_INTEGER:
        raise ValueError
    return int(line.removesuffix(b"L"))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        raise ValueError
    machine.find_global(module, name)


def _tuple(count: int) -> Callable[[_Machine], None]:
    def operation(machine: _Machine) -> None:
        items = [machine.pop() for _ in range(count)]
        machine.push(tuple(reversed(items)))

    return operation


def _set(machine: _Machine) -> None:
    items = machine.marked()
    target = machine.top()
    if type(target) is not set:
        raise ValueError
    target.update(machine.key(item) for item in items)


def _pop_any(machine: _Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _new_with_keywords(machine: _Machine) -> None:
    if machine.pop() != {}:
        raise ValueError
    machine.new(is_call=False)


def _pair(machine: _Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.add_items([key, value])


def _put(size: int) -> Callable[[_Machine], None]:
    def operation(machine: _Machine) -> None:
        machine.memo[machine.number(size)] = machine.top()

    return operation


def _get(size: int) -> Callable[[_Machine], None]:
    def operation(machine: _Machine) -> None:
        machine.push(machine.memo[machine.number(size)])

    return operation


def _dict(machine: _Machine) -> None:
    items = machine.marked()
    machine.push({})
    machine.add_items(items)


# INST, OBJ, PERSID and the extension registry are left out: nothing that writes checkpoints has used them since 2003.
_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    ord(code): operation
    for code, operation in {
        b"\x80": lambda m: m.take(1) and None,
        b"\x95": lambda m: m.take(8) and None,
        b"(": lambda m: m.marks.append(len(m.stack)),
        b"0": _pop_any,
        b"1": lambda m: m.marked() and None,
        b"2": lambda m: m.push(m.top()),
        b"N": lambda m: m.push(None),
        b"\x88": lambda m: m.push(True),
        b"\x89": lambda m: m.push(False),
        b"I": lambda m: m.push(_decimal(m)),
        b"L": lambda m: m.push(_decimal(m)),
        b"F": lambda m: m.push(float(m.line())),
        b"J": lambda m: m.push(m.number(4, signed=True)),
        b"K": lambda m: m.push(m.number(1)),
        b"M": lambda m: m.push(m.number(2)),
        b"\x8a": lambda m: m.push(m.integer(m.take(m.number(1)))),
        b"\x8b": lambda m: m.push(m.integer(m.take(m.number(4)))),
        b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
        b"X": lambda m: m.push(_text(m.take(m.number(4)))),
        b"\x8c": lambda m: m.push(_text(m.take(m.number(1)))),
        b"\x8d": lambda m: m.push(_text(m.take(m.number(8)))),
        b"B": lambda m: m.push(m.take(m.number(4))),
        b"C": lambda m: m.push(m.take(m.number(1))),
        b"\x8e": lambda m: m.push(m.take(m.number(8))),
        b"\x96": lambda m: m.push(m.take(m.number(8))),
        b"T": lambda m: m.push(m.take(m.number(4))),
        b"U": lambda m: m.push(m.take(m.number(1))),
        b"]": lambda m: m.push([]),
        b")": lambda m: m.push(()),
        b"}": lambda m: m.push({}),
        b"\x8f": lambda m: m.push(set()),
        b"\x91": lambda m: m.push(frozenset(m.key(item) for item in m.marked())),
        b"\x90": _set,
        b"l": lambda m: m.push(m.marked()),
        b"t": lambda m: m.push(tuple(m.marked())),
        b"d": _dict,
        b"\x85": _tuple(1),
        b"\x86": _tuple(2),
        b"\x87": _tuple(3),
        b"a": lambda m: m.extend([m.pop()]),
        b"e": lambda m: m.extend(m.marked()),
        b"s": _pair,
        b"u": lambda m: m.add_items(m.marked()),
        b"q": _put(1),
        b"r": _put(4),
        b"j": _get(4),
        b"c": lambda m: m.find_global(_text(m.line()), _text(m.line())),
        b"\x93": _stack_global,
        b"R": lambda m: m.new(is_call=True),
        b"\x81": lambda m: m.new(is_call=False),
        b"\x92": _new_with_keywords,
        b"b": lambda m: m.build(),
        b"Q": lambda m: m.push(Persistent(m.pop())),
    }.items()
}
