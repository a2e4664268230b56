"""A run that was killed: nothing half-done is visible, and the next run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conversions import REWRITTEN, contents, leftovers
from killing import PARTIAL, Convert, Killer, finish, in_killed_child, killed

from mla_convert import api, engine, sharing, staging
from mla_convert.engine import RunOptions
from mla_convert.errors import CannotError, LocalIOError
from mla_convert.journal import line as journal_line
from mla_convert.splitting import SplitOptions

#: What a run of one worker on the small checkpoint goes through: 3 rewritten files and 5 carried ones.
STEPS = 1 + 3 * 2 + 5 + 2


@pytest.fixture(params=["split", "combine"])
def work(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path
) -> tuple[Convert, Path, dict[str, bytes]]:
    """A conversion, its source, and what it gives undisturbed."""
    split = api.split(model, tmp_path / "reference").output
    if request.param == "split":
        return api.split, model, contents(split)
    return api.combine, split, contents(api.combine(split, tmp_path / "whole").output)


def test_the_steps_are_those_that_the_tests_kill_at(model: Path, out: Path) -> None:
    steps: list[str] = []
    api.split(model, out, run=RunOptions(workers=1, on_step=steps.append))
    assert len(steps) == STEPS
    assert (steps[0], steps[-2:]) == ("staged", ["finalised", "published"])
    assert (steps.count("written"), steps.count("recorded")) == (3, 8)


def test_killed_at_every_step(work: tuple[Convert, Path, dict[str, bytes]], out: Path) -> None:
    convert, source, expected = work
    resumed = []
    for step in range(1, STEPS + 1):
        assert killed(convert, source, out, steps=step)
        assert out.exists() == (step == STEPS), f"step {step}"
        report = finish(convert, source, out)
        assert report.already_done == (step == STEPS)
        assert contents(out) == expected, f"step {step}"
        resumed.append(report.resumed_files)
        shutil.rmtree(out)
    # staged, then the largest first: each rewritten file has two steps, each carried one has one
    assert resumed == [0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8, 0]


@pytest.mark.parametrize("pieces", [1, 2, 3, 5, 8, 11, 14, 17, 20, 23])
def test_killed_halfway_through_a_file(
    work: tuple[Convert, Path, dict[str, bytes]], out: Path, pieces: int
) -> None:
    convert, source, expected = work
    assert killed(convert, source, out, pieces=pieces)
    assert not out.exists()
    finish(convert, source, out)
    assert contents(out) == expected


def test_a_half_written_file_is_swept(model: Path, out: Path, expected: dict[str, bytes]) -> None:
    assert killed(api.split, model, out, pieces=2)
    half = out.parent / PARTIAL / "files" / REWRITTEN[0]
    assert half.exists()
    (half.parent / "stray").write_text("left by a killed run")
    assert finish(api.split, model, out).resumed_files == 0
    assert contents(out) == expected


def test_killed_again_while_resuming(model: Path, out: Path, expected: dict[str, bytes]) -> None:
    times = 0
    while killed(api.split, model, out, steps=4):  # each run gets one or two files further
        times += 1
        assert not out.exists() or contents(out) == expected
    assert times >= 3
    assert contents(out) == expected
    assert leftovers(out.parent) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_between_publishing_and_cleaning_up(
    model: Path, out: Path, expected: dict[str, bytes], overwrite: bool
) -> None:
    if overwrite:
        api.split(model, out, SplitOptions(keep_combined=True))

    def die(folder: Path) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    def work() -> None:
        staging._removed = die
        api.split(model, out, run=RunOptions(overwrite=overwrite))

    assert in_killed_child(work)
    assert contents(out) == expected
    assert PARTIAL in leftovers(out.parent)
    assert finish(api.split, model, out).already_done
    assert contents(out) == expected


def test_a_leftover_does_not_block_the_next_conversion(model: Path, out: Path) -> None:
    def work() -> None:
        staging._removed = lambda folder: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
        api.split(model, out)

    assert in_killed_child(work)
    options = SplitOptions(keep_combined=True)
    api.split(model, out, options, run=RunOptions(overwrite=True))
    assert leftovers(out.parent) == []


def test_cleaning_up_spares_the_unfinished_run_of_another_plan(model: Path, out: Path) -> None:
    api.split(model, out)
    killer = Killer(steps=5)
    run = RunOptions(workers=1, overwrite=True, on_step=killer.step)
    assert in_killed_child(lambda: api.split(model, out, SplitOptions(keep_combined=True), run=run))
    again = api.split(model, out).report
    assert again is not None
    assert again.already_done
    assert leftovers(out.parent) == [PARTIAL]
    last = api.split(model, out, SplitOptions(keep_combined=True), run=RunOptions(overwrite=True)).report
    assert last is not None
    assert last.resumed_files == 2


# What an earlier run left is believed only as far as it can be


def interrupted(model: Path, out: Path) -> Path:
    """A run killed with three rewritten files finished; its staging folder."""
    assert killed(api.split, model, out, steps=7)
    return out.parent / PARTIAL


def cut(data: bytes, lines: int, then: bytes = b"") -> bytes:
    return b"".join(data.splitlines(keepends=True)[:lines]) + then


@pytest.mark.parametrize(
    ("damage", "resumed"),
    [
        (lambda data: data, 3),
        (lambda data: data + b"\0\xff garbage", 3),
        (lambda data: data[:-1], 2),
        (lambda data: data[:-30], 2),
        (lambda data: cut(data, 2, b"{}\n"), 1),
        (lambda data: cut(data, 1), 0),
        (lambda data: data.replace(b'"way":"rewrite"', b'"way":"written"', 1), 0),
        (lambda data: data.replace(b'"sha256":null', b'"sha256":"00"'), 0),
        (lambda data: data[::-1], 0),
        (lambda data: b"", 0),
        (lambda data: b"\x80\n\n\n", 0),
        (lambda data: b"[]\n" * 5, 0),
    ],
)
def test_a_damaged_journal_counts_up_to_the_damage(
    model: Path,
    out: Path,
    expected: dict[str, bytes],
    damage: Callable[[bytes], bytes],
    resumed: int,
) -> None:
    journal = interrupted(model, out) / "journal"
    journal.write_bytes(damage(journal.read_bytes()))
    assert finish(api.split, model, out).resumed_files == resumed
    assert contents(out) == expected


def test_what_is_journalled_after_a_torn_line_can_be_read(model: Path, out: Path) -> None:
    journal = interrupted(model, out) / "journal"
    journal.write_bytes(journal.read_bytes()[:-30])
    assert killed(api.split, model, out, steps=5)  # the torn file again, and two more
    assert finish(api.split, model, out).resumed_files == 5


def test_no_journal_means_a_new_start(model: Path, out: Path, expected: dict[str, bytes]) -> None:
    (interrupted(model, out) / "journal").unlink()
    assert finish(api.split, model, out).resumed_files == 0
    assert contents(out) == expected


@pytest.mark.parametrize("change", ["size", "time", "content", "gone"])
def test_a_staged_file_that_changed_is_made_again(
    model: Path, out: Path, expected: dict[str, bytes], change: str
) -> None:
    file = interrupted(model, out) / "files" / REWRITTEN[1]
    before, data = file.stat(), file.read_bytes()
    if change == "size":
        file.write_bytes(data[:-1])
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "time":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif change == "content":
        file.write_bytes(data[::-1])
    else:
        file.unlink()
    assert finish(api.split, model, out).resumed_files == 2
    assert contents(out) == expected


def test_a_journalled_file_that_is_not_planned_is_swept(
    model: Path, out: Path, expected: dict[str, bytes]
) -> None:
    root = interrupted(model, out)
    (root / "files" / "evil.safetensors").write_bytes(b"x")
    modified = (root / "files" / "evil.safetensors").stat().st_mtime_ns
    entry = {"file": "evil.safetensors", "mtime_ns": modified, "way": "rewrite", "sha256": None}
    with (root / "journal").open("ab") as journal:
        journal.write(journal_line(entry))
    assert finish(api.split, model, out).resumed_files == 3
    assert contents(out) == expected


def test_checksums_are_added_to_what_was_finished_without(
    model: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LINK_THRESHOLD", 1)  # no file is small enough to be hashed anyway
    api.split(model, tmp_path / "hashed", run=RunOptions(checksum=True))
    interrupted(model, out)
    assert finish(api.split, model, out, checksum=True).resumed_files == 3
    assert contents(out) == contents(tmp_path / "hashed")


# Another plan's leftovers are not touched


def refused(message: str, *arguments: object, **options: object) -> None:
    with pytest.raises(CannotError, match=message) as caught:
        api.split(*arguments, **options)  # type: ignore[arg-type]
    assert caught.value.exit_code == 4
    assert "--restart discards it" in (caught.value.hint or "")


def test_other_options_are_refused(model: Path, out: Path) -> None:
    root = interrupted(model, out)
    before = contents(root)
    refused(
        r'options: was {"keep_combined": false.*now {"keep_combined": true', model, out, SplitOptions(True)
    )
    assert contents(root) == before
    assert not out.exists()
    assert finish(api.split, model, out).resumed_files == 3


def test_a_changed_source_is_refused_by_name(model: Path, out: Path) -> None:
    interrupted(model, out)
    os.utime(model / "tokenizer.json", ns=(0, 0))
    (model / "new.txt").write_text("new")
    refused(r"\(source: new.txt, tokenizer.json changed\)", model, out)


def test_another_version_is_refused(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(model, out)
    monkeypatch.setattr(staging, "__version__", "9.9")
    refused('version: was "[^"]+", now "9.9"', model, out)


def test_another_operation_is_refused(model: Path, out: Path, tmp_path: Path) -> None:
    interrupted(model, out)
    split = api.split(model, tmp_path / "split").output
    with pytest.raises(CannotError, match='operation: was "split", now "combine"'):
        api.combine(split, out)


def test_restart_discards(model: Path, out: Path) -> None:
    root = interrupted(model, out)
    (root / "files" / "stray").write_text("x")
    report = api.split(model, out, SplitOptions(True), run=RunOptions(restart=True)).report
    assert report is not None
    assert report.resumed_files == 0
    assert not (out / "stray").exists()
    assert leftovers(out.parent) == []


def test_a_second_process_is_told_who_is_at_it(model: Path, out: Path, expected: dict[str, bytes]) -> None:
    has_begun, may_end = os.pipe(), os.pipe()

    def hold(step: str) -> None:
        if step == "staged":
            os.write(has_begun[1], b"x")
            os.read(may_end[0], 1)

    pid = os.fork()
    if pid == 0:
        try:
            api.split(model, out, run=RunOptions(on_step=hold))
        finally:
            os._exit(0)
    os.read(has_begun[0], 1)
    try:
        with pytest.raises(LocalIOError, match=f"is being written by process {pid} on") as caught:
            api.split(model, out)
        assert caught.value.exit_code == 5
    finally:
        os.write(may_end[1], b"x")
        os.waitpid(pid, 0)
    assert contents(out) == expected


# What is of no use to a later run does not stay


def test_a_run_that_finished_nothing_leaves_nothing(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise LocalIOError("full")

    monkeypatch.setattr(engine.output_folder, "preflight", full)
    with pytest.raises(LocalIOError, match="full"):
        api.split(model, out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["model"]


def test_the_journal_says_what_is_finished(model: Path, out: Path) -> None:
    root = interrupted(model, out)
    lines = [json.loads(line.partition(" ")[2]) for line in (root / "journal").read_text().splitlines()]
    assert lines[0]["operation"] == "split"
    assert [line["file"] for line in lines[1:]] == list(REWRITTEN)
