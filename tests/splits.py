"""A split whose leftovers are looked for, and one that must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conversions import (
    leftovers,
)

from mla_convert import api
from mla_convert.engine import RunOptions, RunReport
from mla_convert.errors import LocalIOError


def split(source: Path, target: Path, **options: Any) -> RunReport:
    report = api.split(source, target, run=RunOptions(**options)).report
    assert report is not None
    assert leftovers(target.parent) == []
    return report


def refused(source: Path, target: Path, error: type[Exception] = LocalIOError, **options: Any) -> str:
    """The message of a split that must fail, and leave no output."""
    with pytest.raises(error) as caught:
        api.split(source, target, run=RunOptions(**options))
    assert not target.exists()
    return str(caught.value)


def inode(path: Path) -> int:
    return path.stat().st_ino
