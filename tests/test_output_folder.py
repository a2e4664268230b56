"""Publishing a folder, locks, and looking before leaping."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from filesystems import (
    BLOCK,
    MIB,
    bind,
    fails,
    file_of,
    in_child,
    meanwhile,
    public_folder,
)

from mla_convert import linux, output_folder
from mla_convert.errors import ExitCode, LocalIOError
from mla_convert.storage import FileSystemError

# Publishing


@pytest.fixture(params=["kernel", "fallback"])
def renames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing with renameat2, and as on a file system that has no flags for it."""
    if request.param == "fallback":

        def refuse(source: Path, target: Path, flags: int) -> None:
            raise OSError(errno.EINVAL, "no rename flags")

        monkeypatch.setattr(linux, "_renameat2", refuse)


def tree(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "marker").write_text(text)
    return path


def test_publish_gives_the_final_name(tmp_path: Path, renames: None) -> None:
    for replace in (False, True):
        staged, final = tree(tmp_path / "staged", "new"), tmp_path / f"final-{replace}"
        assert output_folder.publish_directory(staged, final, replace=replace) is None
        assert (final / "marker").read_text() == "new"
        assert not staged.exists()


def test_publish_never_overwrites(tmp_path: Path, renames: None) -> None:
    staged = tree(tmp_path / "staged", "new")
    (tmp_path / "empty").mkdir()
    file_of(tmp_path / "file", b"old")
    (tmp_path / "dangling").symlink_to("nowhere")
    tree(tmp_path / "full", "old")
    for name in ("empty", "file", "dangling", "full"):
        before = (tmp_path / name).lstat().st_ino
        fails(
            errno.EEXIST, lambda n=name: output_folder.publish_directory(staged, tmp_path / n, replace=False)
        )
        assert (tmp_path / name).lstat().st_ino == before
    assert (staged / "marker").read_text() == "new"
    assert (tmp_path / "full" / "marker").read_text() == "old"


def test_publish_replaces_a_folder_and_says_where_the_old_one_is(tmp_path: Path, renames: None) -> None:
    staged, final = tree(tmp_path / "staged", "new"), tree(tmp_path / "final", "old")
    old = output_folder.publish_directory(staged, final, replace=True)
    assert old is not None and old.parent == tmp_path
    assert (final / "marker").read_text() == "new"
    assert (old / "marker").read_text() == "old"
    assert sorted(tmp_path.iterdir()) == sorted([final, old])


@pytest.mark.parametrize("kind", ["file", "link"])
def test_publish_replaces_folders_only(tmp_path: Path, renames: None, kind: str) -> None:
    staged, final = tree(tmp_path / "staged", "new"), tmp_path / "final"
    other = tree(tmp_path / "other", "old")
    if kind == "file":
        file_of(final, b"old")
    else:
        final.symlink_to(other)
    fails(errno.EEXIST, lambda: output_folder.publish_directory(staged, final, replace=True))
    assert (staged / "marker").read_text() == "new"
    assert final.is_symlink() == (kind == "link")
    assert (other / "marker").read_text() == "old"


def test_a_failed_publish_changes_nothing(tmp_path: Path, renames: None) -> None:
    final = tree(tmp_path / "final", "old")
    fails(errno.ENOENT, lambda: output_folder.publish_directory(tmp_path / "gone", final, replace=True))
    fails(
        errno.ENOENT,
        lambda: output_folder.publish_directory(tmp_path / "gone", tmp_path / "new", replace=False),
    )
    assert (final / "marker").read_text() == "old"
    assert list(tmp_path.iterdir()) == [final]


def test_publish_across_file_systems_is_refused(tmp_path: Path, tiny: Path) -> None:
    staged = tree(tiny / "staged", "new")
    fails(errno.EXDEV, lambda: output_folder.publish_directory(staged, tmp_path / "final", replace=False))
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_publishers_wins(tmp_path: Path, renames: None) -> None:
    final = tmp_path / "final"
    staged = [tree(tmp_path / f"staged-{index}", str(index)) for index in range(8)]
    start, won = threading.Barrier(len(staged)), []

    def publish(index: int) -> None:
        start.wait()
        try:
            output_folder.publish_directory(staged[index], final, replace=False)
            won.append(index)
        except FileSystemError as error:
            assert error.errno == errno.EEXIST

    threads = [threading.Thread(target=publish, args=(index,)) for index in range(len(staged))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert (final / "marker").read_text() == str(won[0])
    assert len(list(tmp_path.iterdir())) == len(staged)


def test_a_reader_never_misses_a_folder_that_is_being_replaced(tmp_path: Path) -> None:
    staged, final = tree(tmp_path / "staged", "a"), tree(tmp_path / "final", "b")
    missed = []

    def look() -> None:
        if not final.exists():
            missed.append(time.monotonic())

    with meanwhile(look):
        for _ in range(100):
            assert output_folder.publish_directory(staged, final, replace=True) == staged
    assert not missed


# Locks


def hold(path: Path, seconds: float = 60) -> int:
    """Fork a process that takes the lock and holds it; returns its id once it has it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with output_folder.Lock(path):
            os.write(writer, b"1")
            time.sleep(seconds)
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    return pid


def test_a_lock_held_elsewhere_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / ".out.lock"
    pid = hold(path)
    try:
        with pytest.raises(LocalIOError) as caught:
            output_folder.Lock(path, subject=tmp_path / "out").__enter__()
        who = f"process {pid} on {socket.gethostname()}"
        assert caught.value.message == f"{tmp_path / 'out'} is being written by {who}"
        assert caught.value.exit_code == ExitCode.LOCAL_IO
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert path.exists()
    with output_folder.Lock(path) as lock:
        assert lock.supported
        assert path.read_text() == f"{os.getpid()} {socket.gethostname()}\n"
    assert not path.exists()


def test_a_lock_is_exclusive_within_a_process_and_free_after_an_exception(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(KeyError), output_folder.Lock(path):
        with pytest.raises(LocalIOError, match=f"process {os.getpid()} on"):
            output_folder.Lock(path).__enter__()
        raise KeyError
    with output_folder.Lock(path), pytest.raises(LocalIOError):
        output_folder.Lock(path).__enter__()


def test_a_lock_file_of_unknown_content_still_explains(tmp_path: Path) -> None:
    path = file_of(tmp_path / "lock", b"\xff\x1b[31m")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LocalIOError, match="is being written by another process"):
            output_folder.Lock(path).__enter__()


def test_removing_the_file_never_lets_two_in(tmp_path: Path) -> None:
    """Each process adds to a counter that only the lock protects."""
    counter, rounds, processes = file_of(tmp_path / "counter", b"0"), 40, 4
    pids = []
    for _ in range(processes):
        pid = os.fork()
        if pid == 0:
            done = 0
            while done < rounds:
                try:
                    with output_folder.Lock(tmp_path / "lock"):
                        value = int(counter.read_text())
                        time.sleep(0.0002)
                        counter.write_text(str(value + 1))
                        done += 1
                except LocalIOError:
                    time.sleep(0.0001)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0
    assert int(counter.read_text()) == rounds * processes
    assert not (tmp_path / "lock").exists()


def test_a_file_system_without_locks_is_told_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with output_folder.Lock(tmp_path / "lock") as lock:
        assert not lock.supported


# Looking before leaping


def test_free_space_is_that_of_the_nearest_folder(tiny: Path) -> None:
    assert output_folder.free_bytes(tiny / "not" / "yet") == output_folder.free_bytes(tiny) == MIB
    file_of(tiny / "a", bytes(100 * BLOCK))
    assert output_folder.free_bytes(tiny) == MIB - 100 * BLOCK
    output_folder.preflight(tiny / "out", MIB - 100 * BLOCK)
    with pytest.raises(LocalIOError) as caught:
        output_folder.preflight(tiny, MIB)
    assert caught.value.message == (
        f"{tiny} has 638.98 kB (638 976 bytes) free; the output needs 1.05 MB (1 048 576 bytes)"
    )
    assert caught.value.hint is not None and "409.60 kB (409 600 bytes)" in caught.value.hint


def test_a_file_system_that_tells_no_size_stops_nobody() -> None:
    assert output_folder.free_bytes(Path("/proc")) is None
    output_folder.preflight(Path("/proc"), 1 << 60)


def test_ensure_writable_leaves_no_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = folder.stat().st_mtime_ns
    output_folder.ensure_writable(folder)
    output_folder.ensure_writable(folder / "not" / "yet")
    assert folder.stat().st_mtime_ns == before
    monkeypatch.delattr(os, "O_TMPFILE")  # and by a named file where unnamed ones cannot be
    output_folder.ensure_writable(folder)
    assert list(folder.iterdir()) == []


def test_ensure_writable_refuses_a_path_through_a_file_or_a_dead_link(tmp_path: Path) -> None:
    file_of(tmp_path / "file", b"")
    for path in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / "file" / "a" / "b"):
        error = fails(errno.ENOTDIR, lambda p=path: output_folder.ensure_writable(p))
        assert f"{tmp_path / 'file'} is a file" in error.message
    (tmp_path / "dead").symlink_to("nowhere")
    for path in (tmp_path / "dead", tmp_path / "dead" / "out"):
        assert "symbolic link" in fails(errno.ENOENT, lambda p=path: output_folder.ensure_writable(p)).message
    (tmp_path / "circle").symlink_to("circle")
    fails(errno.ELOOP, lambda: output_folder.ensure_writable(tmp_path / "circle" / "out"))


def test_ensure_writable_on_a_folder_that_may_not_be_entered() -> None:
    with public_folder() as root:
        (root / "closed").mkdir(mode=0o700)
        if os.geteuid() != 0:
            (root / "closed").chmod(0)
        closed = root / "closed" / "out"
        fails(errno.EACCES, lambda: in_child(lambda: output_folder.ensure_writable(closed), nobody=True))
        (root / "closed").chmod(0o700)


def test_same_or_nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model-split").mkdir()
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "model" / "back").symlink_to("../model-split")
    os.link(file_of(tmp_path / "model" / "w", b"x"), tmp_path / "twin")
    monkeypatch.chdir(tmp_path / "model")
    for a, b, relation in (
        ("model", "model", "same"),
        ("link", "model", "same"),
        ("model/../link/.", "model", "same"),
        ("twin", "model/w", "same"),
        ("model/new/deep", "model", "inside"),
        ("link/new", "model", "inside"),
        ("model", "link/sub", "around"),
        (".", "model/w", "around"),
        ("model-split", "model", None),
        ("model/back/new", "model", None),
        ("new", "model", None),
    ):
        assert output_folder.same_or_nested(tmp_path / a, tmp_path / b) == relation, (a, b)
    assert output_folder.same_or_nested(Path("sub/out"), Path()) == "inside"
    assert output_folder.same_or_nested(Path("../out"), Path()) is None


def test_same_or_nested_sees_through_a_bind_mount(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with bind(tmp_path / "model") as other:
        assert output_folder.same_or_nested(other, tmp_path / "model") == "same"
        assert output_folder.same_or_nested(other / "out", tmp_path / "model") == "inside"
        assert output_folder.same_or_nested(tmp_path / "model", other / "out") == "around"
