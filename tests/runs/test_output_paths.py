"""Where an output may go: what is refused before any work, what is replaced, and what is never touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from conversions import CARRIED_WEIGHTS, INDEX, contents, leftovers, snapshot, write_checkpoint
from filesystems import bind, in_child, public_folder, remount_read_only, tmpfs

from mla_convert import api, staging
from mla_convert.engine import RunOptions, RunReport
from mla_convert.errors import BadInputError, LocalIOError, MlaConvertError, UsageError
from mla_convert.splitting import SplitOptions


def split(source: Path, target: Path | None, *options: Any, **run: Any) -> RunReport:
    report = api.split(source, target, *options, run=RunOptions(**run)).report
    assert report is not None
    return report


def refused(
    error: type[MlaConvertError], source: Path, target: Path | None, *options: Any, **run: Any
) -> MlaConvertError:
    """The error of a split that must fail before it has written anything, planned or not."""
    errors = []
    for dry_run in (True, False):
        before = snapshot(source.parent)
        with pytest.raises(error) as caught:
            api.split(source, target, *options, run=RunOptions(**run), dry_run=dry_run)
        after = snapshot(source.parent)
        if not dry_run:
            before.pop("."), after.pop(".")  # a lock file may have come and gone
        assert after == before
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    return errors[0]


# The input


def test_the_output_is_never_the_input_nor_in_it_nor_around_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "up").symlink_to(tmp_path)
    for target, relation in {
        model: "is the input",
        model / "deep" / "out": "lies inside the input",
        tmp_path: "contains the input",
        tmp_path / "link" / "out": "lies inside the input",
        tmp_path / "up" / "model": "is the input",
        tmp_path / "up": "contains the input",
        tmp_path / "x" / ".." / "model" / "out": "lies inside the input",
    }.items():
        assert relation in str(refused(UsageError, model, target)), target
    assert "is the input" in str(refused(UsageError, tmp_path / "link", model))
    assert "lies inside the input" in str(refused(UsageError, tmp_path / "link", model / "out"))


def test_a_bind_mount_does_not_hide_the_input(model: Path) -> None:
    with bind(model) as other, pytest.raises(UsageError, match="lies inside the input"):
        api.split(model, other / "out")


def test_the_folder_of_one_file_may_hold_its_output(model: Path) -> None:
    file = model / "model-1.safetensors"
    assert split(file, None).output == model / "model-1-split"
    assert "contains the input" in str(refused(UsageError, file, model))


def test_an_index_stands_for_its_folder(model: Path, tmp_path: Path) -> None:
    assert "lies inside the input" in str(refused(UsageError, model / INDEX, model / "out"))
    assert split(model / INDEX, None).output == tmp_path / "model-split"


def test_a_missing_input_comes_before_everything_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for source in (tmp_path / "absent", Path("/nonexistent/model"), tmp_path / "file" / "model"):
        with pytest.raises(UsageError, match=f"{source} does not exist"):
            api.split(source, tmp_path / "file" / "out")


# What is at the output already


def test_an_empty_folder_is_fine(model: Path, out: Path) -> None:
    out.mkdir()
    split(model, out)
    assert leftovers(out.parent) == []
    assert (out / "mla-convert.json").exists()


def test_missing_parents_are_made(model: Path, tmp_path: Path) -> None:
    split(model, tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / INDEX).exists()


def test_dots_are_names_too(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.mkdir()
    monkeypatch.chdir(out)
    try:
        split(model, Path())
    finally:
        monkeypatch.chdir("/")
    assert (out / INDEX).exists()
    assert sorted(path.name for path in out.parent.iterdir()) == ["model", "out"]


def test_the_same_again_is_already_done(model: Path, out: Path) -> None:
    split(model, out)
    before = snapshot(out.parent)
    for run in ({}, {"overwrite": True}, {"restart": True}, {"workers": 1}):
        assert split(model, out, **run).already_done
    after = snapshot(out.parent)
    before.pop("."), after.pop(".")  # the lock file came and went
    assert after == before


@pytest.mark.parametrize("damage", ["size", "gone", "manifest", "other manifest"])
def test_an_output_that_was_changed_is_not_done(model: Path, out: Path, damage: str) -> None:
    split(model, out)
    whole = contents(out)
    if damage == "size":
        (out / "tokenizer.json").write_text("edited")
    elif damage == "gone":
        (out / "tokenizer.json").unlink()
    elif damage == "manifest":
        (out / "mla-convert.json").write_text("{")
    else:
        text = (out / "mla-convert.json").read_text()
        (out / "mla-convert.json").write_text(text.replace('"plan": "', '"plan": "0'))
    error = refused(UsageError, model, out)
    if damage == "manifest":
        assert "this tool did not make what is in it" in str(error)
        assert "this tool did not make" in str(refused(UsageError, model, out, overwrite=True))
    else:
        assert not split(model, out, overwrite=True).already_done
        assert contents(out) == whole


def test_an_existing_output_names_the_ways_on(model: Path, out: Path) -> None:
    split(model, out)
    error = refused(UsageError, model, out, SplitOptions(keep_combined=True))
    assert str(error) == f"{out} exists: it is the output of another `split`, or was changed since"
    assert error.hint == "choose another output with -o, replace it with --overwrite, or remove it"
    assert error.exit_code == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_someone_else_is_never_replaced(model: Path, out: Path, overwrite: bool) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    error = refused(UsageError, model, out, overwrite=overwrite)
    assert "nothing will be overwritten" in str(error)
    assert error.hint == "choose another output with -o, or remove the folder yourself"


def test_overwriting_spares_files_that_were_added(model: Path, out: Path) -> None:
    split(model, out)
    (out / "notes").mkdir()
    (out / "notes" / "results.txt").write_text("mine")
    error = refused(UsageError, model, out, SplitOptions(keep_combined=True), overwrite=True)
    assert "also holds files that this tool did not make (1)" in str(error)
    assert error.details == ("notes/results.txt",)


def test_overwriting_is_atomic(model: Path, out: Path, tmp_path: Path) -> None:
    split(model, out)
    old = contents(out)
    seen = []

    def look(step: str) -> None:
        if step != "published":
            seen.append(contents(out) == old)

    split(model, out, SplitOptions(keep_combined=True), overwrite=True, on_step=look)
    split(model, tmp_path / "reference", SplitOptions(keep_combined=True))
    assert all(seen)
    assert len(seen) > 10
    assert contents(out) == contents(tmp_path / "reference")
    assert leftovers(tmp_path) == []


def test_a_failed_overwrite_leaves_the_old_output(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(model, out)
    before = contents(out)

    def fail(*_: object, **__: object) -> None:
        raise LocalIOError("no")

    monkeypatch.setattr(staging.output_folder, "publish_directory", fail)
    with pytest.raises(LocalIOError, match="no"):
        split(model, out, SplitOptions(keep_combined=True), overwrite=True)
    assert contents(out) == before


def test_what_appears_at_the_output_meanwhile_is_not_replaced(model: Path, out: Path) -> None:
    def intrude(step: str) -> None:
        if step == "finalised":
            out.mkdir()
            (out / "theirs").write_text("")

    for overwrite in (False, True):
        with pytest.raises(UsageError, match="this tool did not make"):
            split(model, out, overwrite=overwrite, on_step=intrude)
        assert contents(out) == {"theirs": b""}
        (out / "theirs").unlink()
        out.rmdir()
    assert split(model, out).resumed_files == 8


def test_a_cleanup_that_fails_is_a_warning(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_removed", lambda folder: False)
    report = split(model, out)
    assert "could not be removed" in report.warnings[0]
    assert (out / INDEX).exists()


def test_what_is_no_folder_is_refused(model: Path, out: Path, tmp_path: Path) -> None:
    out.write_text("a file")
    assert "is not a folder" in str(refused(UsageError, model, out))
    (tmp_path / "elsewhere").mkdir()
    for link, target in (("a", "elsewhere"), ("b", "nowhere")):
        (tmp_path / link).symlink_to(target)
        assert "is a symbolic link" in str(refused(UsageError, model, tmp_path / link))


def test_a_mount_point_is_refused_before_the_work(model: Path) -> None:
    with tmpfs() as root:
        error = refused(UsageError, model, root)
        assert "is a mount point" in str(error)
        assert error.hint == f"choose a folder inside it, such as -o {root}/model"


# What the file system refuses: known before a byte of input is read


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    """A checkpoint that would be refused if it were looked at."""
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(BadInputError):
        api.split(tmp_path / "damaged", tmp_path / "out", dry_run=True)
    return tmp_path / "damaged"


def test_a_read_only_file_system(unreadable: Path) -> None:
    with tmpfs() as root:
        remount_read_only(root)
        for target in (root / "out", root / "a" / "b"):
            error = refused(LocalIOError, unreadable, target)
            assert "the file system is mounted read-only (EROFS)" in str(error)
            assert error.exit_code == 5


def test_a_path_through_a_file(unreadable: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refused(LocalIOError, unreadable, tmp_path / "file" / "out")
    assert f"{tmp_path / 'file'} is a file, not a folder" in str(error)


def test_a_name_that_is_too_long(unreadable: Path, tmp_path: Path) -> None:
    assert "too long" in str(refused(LocalIOError, unreadable, tmp_path / ("x" * 300)))


def test_no_permission() -> None:
    with public_folder() as folder:
        (folder / "damaged").mkdir()
        (folder / "damaged" / "model.safetensors").write_bytes(b"garbage")
        (folder / "closed").mkdir(mode=0o700)

        def work() -> list[str]:
            targets = (folder / "out", folder / "closed" / "out", None)
            return [str(refused(LocalIOError, folder / "damaged", target)) for target in targets]

        for message in in_child(work, nobody=True, seconds=60):
            assert "permission is denied (EACCES)" in message


def test_an_input_that_may_not_be_read() -> None:
    with public_folder() as folder:
        source = write_checkpoint(folder / "model")
        (source / CARRIED_WEIGHTS[0]).chmod(0o600)
        (folder / "free").mkdir()
        (folder / "free").chmod(0o777)
        target = folder / "free" / "out"

        def work() -> str:
            with pytest.raises(LocalIOError) as caught:
                api.split(source, target)
            return str(caught.value)

        assert CARRIED_WEIGHTS[0] in in_child(work, nobody=True, seconds=60)
        assert list((folder / "free").iterdir()) == []


def test_a_file_name_that_no_manifest_can_hold(model: Path, out: Path) -> None:
    Path(os.fsdecode(os.fsencode(model) + b"/bad\xff.txt")).write_text("")
    error = refused(BadInputError, model, out)
    assert r"bad\udcff.txt: the name is not UTF-8" in str(error)


def test_a_folder_name_that_is_not_utf8(tmp_path: Path, out: Path) -> None:
    source = write_checkpoint(Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff")))
    split(source, out)
    whole = api.combine(out).output
    assert {**contents(whole), "mla-convert.json": b""} == {**contents(source), "mla-convert.json": b""}


def test_the_longest_shard_name_there_can_be(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    other = write_checkpoint(tmp_path / "other")
    name = "m" * (255 - len(".safetensors")) + ".safetensors"
    (source / name).write_bytes((other / "model-1.safetensors").read_bytes())
    split(source, out)
    assert contents(out).keys() == {name, "mla-convert.json"}
