"""A torch_dist conversion that is killed at any moment ends, when it is run again, as if nothing had happened."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from conversions import contents, memory_folder
from dist_checkpoints import state, write
from killing import PARTIAL, Convert, finish, killed

from mla_convert import api


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as found:
        tensors = state()
        states = {f"optimizer.state.exp_avg.{key}": tensor.float() for key, tensor in tensors.items()}
        write(found / "model", tensors | states)
        api.split(found / "model", found / "split")
        yield found


@pytest.mark.parametrize(("convert", "source"), [(api.split, "model"), (api.combine, "split")])
@pytest.mark.parametrize("unit", ["steps", "pieces"])
def test_killed_at_any_moment(folder: Path, convert: Convert, source: str, unit: str) -> None:
    finish(convert, folder / source, folder / "clean")
    expected = contents(folder / "clean")
    for moment in itertools.count(1):
        out = folder / f"out-{moment}"
        if not killed(convert, folder / source, out, **{unit: moment}):
            break
        assert not out.exists() or contents(out) == expected
        finish(convert, folder / source, out)
        assert contents(out) == expected
    assert moment >= 5
    assert not (folder / PARTIAL).exists()


def test_a_source_that_changes_meanwhile_leaves_no_output(folder: Path) -> None:
    from mla_convert.engine import RunOptions
    from mla_convert.errors import BadInputError

    path = folder / "model" / ".metadata"

    def change(step: str) -> None:
        if step == "recorded":
            path.write_bytes(path.read_bytes() + b"x")

    with pytest.raises(BadInputError, match="changed while it was being read"):
        api.split(folder / "model", folder / "out", run=RunOptions(on_step=change))
    assert not (folder / "out").exists()
