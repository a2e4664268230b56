"""How bytes reach an output: workers, checksums, full disks, a source that changes, and bounded memory."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conversions import (
    CARRIED_WEIGHTS,
    INDEX,
    REWRITTEN,
    attention,
    contents,
    environment,
    leftovers,
    manifest,
    write_checkpoint,
    write_large,
    write_shard,
)
from filesystems import in_child, tmpfs
from killing import PARTIAL
from splits import refused, split

from mla_convert import api, engine, filling, sharing, storage
from mla_convert.engine import RunOptions
from mla_convert.errors import BadInputError, DifferenceError, LocalIOError
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.progress import SilentProgress
from mla_convert.storage import LinkMode
from mla_convert.tensors import TensorSpec

# Workers and hashes


@pytest.mark.parametrize("workers", [1, 8])
def test_any_number_of_workers_gives_the_same_bytes(
    model: Path, out: Path, expected: dict[str, bytes], workers: int
) -> None:
    split(model, out, workers=workers)
    assert contents(out) == expected


def test_checksum_records_the_sha256_of_every_file(model: Path, out: Path) -> None:
    split(model, out, checksum=True)
    files = contents(out)
    del files["mla-convert.json"]
    assert manifest(out)["files"] == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }


def test_without_checksum_only_large_files_go_unread(
    model: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LINK_THRESHOLD", 20_000)
    split(model, out)
    entries = manifest(out)["files"]
    unread = {name for name, entry in entries.items() if entry["sha256"] is None}
    assert unread == {*REWRITTEN, CARRIED_WEIGHTS[0]}
    for name in entries.keys() - unread:
        assert entries[name]["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()


def test_checksum_completes_an_output_that_is_already_done(
    model: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(model, tmp_path / "hashed", checksum=True)
    monkeypatch.setattr(sharing, "LINK_THRESHOLD", 1)
    split(model, out)
    assert manifest(out)["files"][REWRITTEN[0]]["sha256"] is None
    assert split(model, out, checksum=True).already_done
    assert contents(out) == contents(tmp_path / "hashed")


def test_writes_that_the_kernel_cuts_short_are_continued(
    model: Path, out: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, bytes(data)[:100], offset))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:10]))
    split(model, out)
    assert contents(out) == expected


def test_untouched_stretches_move_in_one_call(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [TensorSpec(f"layer.{n}.weight", "BF16", (8, 8)) for n in range(40)]
    write_shard(tmp_path / "one.safetensors", [*others[:20], *attention(0), *others[20:]])
    lengths = []
    copy_range = storage.copy_range

    def count(*arguments: Any, **options: Any) -> int:
        lengths.append(arguments[4])
        return copy_range(*arguments, **options)

    monkeypatch.setattr(storage, "copy_range", count)
    split(tmp_path / "one.safetensors", out)
    head = 16 * 32 * 2  # bytes of one head of K or of V
    before, after = 20 * 128 + 40 * 64 * 2, (64 * 64 + 96 * 64) * 2 + 20 * 128
    # The first head of K follows what stands before it, and the last of V is followed by what comes after.
    assert lengths == [before + head, *[head] * 6, head + after]


# A disk that is full, or refuses


def test_too_little_space_is_known_beforehand(model: Path) -> None:
    with tmpfs("100k") as root:
        message = refused(model, root / "out")
        assert re.search(
            r"has 9\d\.\d\d kB \(9\d \d{3} bytes\) free; the output needs 192\.51 kB \(", message
        )
        assert list(root.iterdir()) == []


def test_what_is_linked_needs_no_space(tmp_path: Path) -> None:
    with tmpfs("400k") as root:
        source = write_checkpoint(root / "model")
        status = os.statvfs(root)
        (root / "ballast").write_bytes(bytes(status.f_bavail * status.f_frsize - (176 << 10)))
        assert "needs" in refused(source, root / "out", link=LinkMode.COPY)
        split(source, root / "out")


def test_a_disk_that_fills_up_halfway_keeps_what_is_finished(model: Path, expected: dict[str, bytes]) -> None:
    with tmpfs("400k") as root:
        ballast = root / "ballast"

        def fill(step: str) -> None:
            if step == "recorded" and not ballast.exists():
                with ballast.open("wb", buffering=0) as file:
                    try:
                        while file.write(bytes(1024)):
                            pass
                    except OSError as error:
                        assert error.errno == errno.ENOSPC

        message = refused(model, root / "out", workers=1, on_step=fill)
        assert "no space is left on the device (ENOSPC)" in message
        assert PARTIAL in leftovers(root)
        assert "needs" in refused(model, root / "out")  # still full: now it is known beforehand
        ballast.unlink()
        status = os.statvfs(root)
        ballast.write_bytes(bytes(status.f_bavail * status.f_frsize - (176 << 10)))  # room for the rest only
        assert split(model, root / "out").resumed_files == 1
        found = contents(root / "out")
        assert {**found, "mla-convert.json": b""} == {**expected, "mla-convert.json": b""}


def test_the_file_size_limit(model: Path, out: Path) -> None:
    def work() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        return refused(model, out, workers=1)

    message = in_child(work, seconds=60)
    assert "the file would be larger than is allowed (EFBIG)" in message
    assert leftovers(out.parent) == []


def test_one_failing_file_ends_the_run(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []

    def fail(fd: int, file: Any, *arguments: Any, **options: Any) -> int:
        filled.append(file.name)
        raise LocalIOError(f"{file.name} failed")

    monkeypatch.setattr(engine, "fill", fail)
    assert "model-1.safetensors failed" in refused(model, out, workers=1)
    assert filled == ["model-1.safetensors"]


# A source that changes


@pytest.mark.parametrize("name", [REWRITTEN[1], CARRIED_WEIGHTS[0], "tokenizer.json", "config.json", INDEX])
@pytest.mark.parametrize("change", ["edit", "replace", "remove"])
def test_a_source_that_changes_meanwhile_gives_no_output(
    model: Path, out: Path, name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = model / name
    data = file.read_bytes()
    check = engine._Run._check_source_unchanged

    def disturb(run: engine._Run) -> None:
        if change == "edit":
            file.write_bytes(data[:-1] + b" ")
            os.utime(file, ns=(1, 1))
        else:
            file.unlink()
        if change == "replace":
            file.write_bytes(data[::-1])
        check(run)

    monkeypatch.setattr(engine._Run, "_check_source_unchanged", disturb)
    message = refused(model, out, BadInputError)
    assert "changed while it was being read; there is no output" in message
    assert leftovers(out.parent) == []


def test_a_source_that_is_cut_short_meanwhile(model: Path, out: Path) -> None:
    def cut(step: str) -> None:
        if step == "staged":
            os.truncate(model / REWRITTEN[2], 9000)

    with pytest.raises((BadInputError, LocalIOError), match=r"ended at byte 9000|ends early, at byte 9000"):
        api.split(model, out, run=RunOptions(on_step=cut))
    assert not out.exists()


def test_a_restored_tensor_that_differs(model: Path, out: Path, tmp_path: Path) -> None:
    parted = api.split(model, tmp_path / "parted", run=RunOptions(link=LinkMode.COPY)).output
    name = "model.layers.1.self_attn.v_b_proj.weight"
    stored = open_checkpoint(parted).tensors[name]
    with (parted / stored.file).open("r+b") as file:
        file.seek(stored.start)
        file.write(b"\x55" * 8)
    with pytest.raises(DifferenceError, match=r"kv_b_proj\.weight does not come back as it was") as caught:
        api.combine(parted, out, run=RunOptions(workers=1))  # another file is finished by then
    assert caught.value.exit_code == 10
    assert leftovers(tmp_path) == []  # so that what the hint proposes is not refused
    assert "--ignore-manifest" in (caught.value.hint or "")


# Memory


MEASURE = """
import sys
from pathlib import Path
from mla_convert import api
api.split(Path(sys.argv[1]), Path(sys.argv[2]))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak(source: Path, target: Path) -> int:
    """Largest resident memory in bytes of a process that splits ``source``; unlike ru_maxrss, its own alone."""
    words = [sys.executable, "-c", MEASURE, str(source), str(target)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Across file systems, so that every byte passes through the process: the worst case."""
    small = write_large(tmp_path / "small.safetensors", 150 << 20)
    large = write_large(tmp_path / "large.safetensors", 600 << 20)
    with tmpfs("1200m") as root:
        peaks = [peak(source, root / source.stem) for source in (small, large)]
        assert (root / "large" / "large.safetensors").stat().st_size > 590 << 20
    assert max(peaks) < 200e6
    assert peaks[1] - peaks[0] < 16e6


def test_hashing_does_not_read_a_tensor_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    read_at = filling.read_at
    monkeypatch.setattr(
        filling, "read_at", lambda fd, count, *rest: sizes.append(count) or read_at(fd, count, *rest)
    )
    path = tmp_path / "data"
    path.write_bytes(bytes(9 << 20))
    fd = os.open(path, os.O_RDONLY)
    found = filling.sha256_of_range(fd, 1, (9 << 20) - 1, "data", lambda _: None)
    os.close(fd)
    assert found == hashlib.sha256(bytes((9 << 20) - 1)).hexdigest()
    assert max(sizes) <= filling.BUFFER


def test_progress_adds_up(model: Path, out: Path) -> None:
    class Counter(SilentProgress):
        total = done = 0

        def start(self, label: str, total: int, unit: str) -> None:
            self.total = total

        def advance(self, n: int) -> None:
            self.done += n

    counter = Counter()
    api.split(model, out, run=RunOptions(workers=1), progress=counter)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert counter.done == counter.total == size - (out / "mla-convert.json").stat().st_size
    assert json.loads((out / INDEX).read_bytes())["metadata"]["total_size"] > 0
