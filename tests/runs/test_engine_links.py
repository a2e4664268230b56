"""Links in an output: hard links and reflinks of what is carried over, and copies."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conversions import (
    CARRIED_WEIGHTS,
    INDEX,
    OTHERS,
    REWRITTEN,
    attention,
    contents,
    leftovers,
    write_checkpoint,
    write_shard,
)
from filesystems import in_child, shared_bytes, tmpfs
from splits import inode, refused, split

from mla_convert import api, sharing, storage
from mla_convert.engine import RunOptions
from mla_convert.storage import LinkMode
from mla_convert.tensors import TensorSpec


def test_hard_links_are_for_weights_only(model: Path, out: Path) -> None:
    report = split(model, out, link=LinkMode.HARD)
    for name in CARRIED_WEIGHTS:
        assert inode(out / name) == inode(model / name)
    for name in (*OTHERS, *REWRITTEN, INDEX, "config.json", "mla-convert.json"):
        assert (out / name).stat().st_nlink == 1
    assert set(report.bytes_by_way) - {"reflink"} == {"copy", "hard", "rewrite"}


def test_auto_links_hard_where_blocks_cannot_be_shared(model: Path, out: Path) -> None:
    split(model, out)
    assert inode(out / CARRIED_WEIGHTS[0]) == inode(model / CARRIED_WEIGHTS[0])


def test_a_large_companion_is_linked_and_a_small_one_is_not(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LINK_THRESHOLD", 1000)
    assert (
        (model / "generation_config.json").stat().st_size > 1000 > (model / "tokenizer.json").stat().st_size
    )
    split(model, out, link=LinkMode.HARD)
    assert inode(out / "generation_config.json") == inode(model / "generation_config.json")
    assert inode(out / "tokenizer.json") != inode(model / "tokenizer.json")


def test_copies_are_files_of_their_own(model: Path, out: Path, expected: dict[str, bytes]) -> None:
    report = split(model, out, link=LinkMode.COPY)
    assert all(path.stat().st_nlink == 1 for path in out.rglob("*") if path.is_file())
    assert contents(out) == expected
    assert "hard" not in report.bytes_by_way


def test_a_reflink_that_cannot_be_is_refused(model: Path, out: Path) -> None:
    message = refused(model, out, link=LinkMode.REFLINK)
    assert "cannot reflink" in message
    assert leftovers(out.parent) == []


def test_a_reflink_that_cannot_be_is_refused_though_every_file_is_rewritten(
    tmp_path: Path, out: Path
) -> None:
    write_shard(tmp_path / "one.safetensors", attention(0))
    assert "cannot reflink" in refused(tmp_path / "one.safetensors", out, link=LinkMode.REFLINK)


def test_a_hard_link_across_file_systems_is_refused(model: Path) -> None:
    with tmpfs() as root:
        assert "cannot hard-link" in refused(model, root / "out", link=LinkMode.HARD)


@pytest.mark.parametrize("mode", list(LinkMode))
def test_every_mode_gives_the_same_bytes(xfs_root: Path, tmp_path: Path, mode: LinkMode) -> None:
    write_checkpoint(tmp_path / "model")
    source = xfs_root / f"model-{mode}"
    subprocess.run(["cp", "-a", tmp_path / "model", source], check=True)
    api.split(source, source.parent / f"out-{mode}", run=RunOptions(link=mode))
    api.split(tmp_path / "model", tmp_path / f"out-{mode}", run=RunOptions(link=LinkMode.COPY))
    ours, plain = contents(source.parent / f"out-{mode}"), contents(tmp_path / f"out-{mode}")
    del ours["mla-convert.json"], plain["mla-convert.json"]  # the one names the folder of the other
    assert ours == plain


@pytest.mark.parametrize("mode", [LinkMode.AUTO, LinkMode.REFLINK])
def test_reflinks_share_almost_everything(xfs_root: Path, mode: LinkMode) -> None:
    source = xfs_root / f"large-{mode}"
    source.mkdir()
    other = TensorSpec("model.embed_tokens.weight", "BF16", (4096, 1024))
    write_shard(source / "a.safetensors", [other, *attention(0)])
    write_shard(source / "b.safetensors", [TensorSpec("lm_head.weight", "BF16", (4096, 1024))])
    os.sync()
    before = os.statvfs(xfs_root).f_bfree
    report = api.split(source, xfs_root / f"large-out-{mode}", run=RunOptions(link=mode)).report
    os.sync()
    used = (before - os.statvfs(xfs_root).f_bfree) * os.statvfs(xfs_root).f_frsize
    sizes = sum(path.stat().st_size for path in source.iterdir())
    assert sizes > 16 << 20
    assert used < 1 << 20
    for name in ("a.safetensors", "b.safetensors"):
        file = xfs_root / f"large-out-{mode}" / name
        assert shared_bytes(file) >= other.nbytes - 4096
        assert inode(file) != inode(source / name)
    assert report is not None
    assert report.bytes_by_way["reflink"] > 0.99 * sizes


def test_a_probe_left_by_a_killed_run_does_not_switch_reflinks_off(xfs_root: Path) -> None:
    source, target = write_checkpoint(xfs_root / "probed"), xfs_root / "probed-out"
    left = xfs_root / ".probed-out.mla-convert-partial" / "files"
    left.mkdir(parents=True)
    (left / f"{storage.TEMPORARY_PREFIX}probe").write_text("left")
    assert split(source, target, link=LinkMode.REFLINK).bytes_by_way["reflink"] > 0


def test_modes_follow_the_umask(model: Path, out: Path) -> None:
    (model / CARRIED_WEIGHTS[0]).chmod(0o444)

    def work() -> None:
        os.umask(0o027)
        api.split(model, out)

    in_child(work, seconds=60)
    for path in (out, *out.rglob("*")):
        linked = path.name in CARRIED_WEIGHTS  # such a file is the source's, its mode too
        assert linked or path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path
    assert (out / CARRIED_WEIGHTS[0]).stat().st_mode & 0o777 == 0o444
