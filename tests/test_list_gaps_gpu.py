"""Lists with gaps, on a Hopper GPU: what the programs of the sparse forward skip, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gapped_lists import BLOCK, TILE, WINDOW, invalid_like, patterns
from test_kernels_gpu import force_pairs, force_parts, run_sparse, sparse_case
from test_list_walk import TOKENS, UNUSED, WALKS, cases, check, room
from torch import Tensor

from mla_convert.runtime.dispatch import available

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

# Each program: its heads, and how many thread blocks share a list; 0 for pairs of warps.
PROGRAMS = [(8, 0), *((heads, parts) for heads in (8, 16, 32, 64, 128) for parts in (1, 3))]
programs = pytest.mark.parametrize(("heads", "parts"), PROGRAMS)


def force(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    if parts:
        force_parts(monkeypatch, parts)
    else:
        force_pairs(monkeypatch)


def case_with_gaps(
    heads: int, topk: int, repeats: int = 1, **options: Any
) -> tuple[Tensor, Tensor, Tensor, float]:
    valid = patterns(topk, "cuda").repeat(repeats, 1)
    q, kv, indices, scale = sparse_case(queries=len(valid), heads=heads, topk=topk, invalid=0, **options)
    return q, kv, torch.where(valid, indices, invalid_like(indices, len(kv))), scale


@programs
@pytest.mark.parametrize("topk", [1, 63, 65, 200, 2048, 2049, 5000])
def test_gaps_of_every_kind(heads: int, parts: int, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, parts)
    q, kv, indices, scale = case_with_gaps(heads, topk)
    run_sparse(q, kv, indices, scale)
    length = torch.randint(-1, topk + 2, (len(q),), device="cuda", dtype=torch.int32)
    sink = torch.randn(heads, device="cuda")
    run_sparse(q, kv, indices, scale, length=length, sink=sink)


@programs
def test_gaps_in_many_lists_of_float16(heads: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that a thread block has one after another."""
    force(monkeypatch, parts)
    run_sparse(*case_with_gaps(heads, 300, repeats=40, dtype=torch.float16))


@programs
def test_long_lists_with_long_gaps(heads: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, parts)
    topk = 70_000
    q, kv, indices, scale = sparse_case(queries=6, heads=heads, topk=topk, invalid=0)
    at = torch.arange(topk, device="cuda")
    valid = torch.stack(
        [at == topk - 1, at < 1, at % 9000 < 70, at % 6401 == 6400, (at // BLOCK) % 101 == 100, at > 69_000]
    )
    run_sparse(q, kv, torch.where(valid, indices, invalid_like(indices, len(kv))), scale)


@pytest.mark.parametrize(("heads", "parts"), [(heads, parts) for heads in (16, 32, 64) for parts in (1, 3)])
def test_empty_blocks_change_no_bit(heads: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of the same lists without them, which it is not if they are computed.

    Two consumers take the blocks in turn, so that one block more in front of others moves those to the other
    consumer, and what is added up first changes.
    """
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    force(monkeypatch, parts)
    for blocks in (12, 40):
        q, kv, packed, scale = sparse_case(queries=100, heads=heads, topk=blocks * BLOCK)
        want = sparse_mla(q, kv, packed, scale, d_v=512)
        for where in ([0], [1], [3, 3, 3], [0, 2, 7, 7, 9], list(range(blocks)), [5] * 40):
            if parts > 1 and blocks + len(where) > WINDOW // BLOCK:
                continue  # parts of a long list have equally many entries, so other blocks
            pieces = list(packed.split(BLOCK, dim=1))
            for at in reversed(where):
                pieces.insert(at, invalid_like(pieces[0], len(kv)))
            got = sparse_mla(q, kv, torch.cat(pieces, dim=1), scale, d_v=512)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (blocks, where)
        # Had it been computed as before, it would differ: an invalid entry of each block is moved into one more.
        moved = torch.cat([packed[:, :1], invalid_like(packed[:, :63], len(kv)), packed], dim=1)
        moved[:, 64] = -1
        assert not torch.equal(sparse_mla(q, kv, moved, scale, d_v=512)[0], want[0])


# The walk itself, which test_list_walk runs on the CPU


def walk_kernel(function: str) -> Any:
    import tilelang
    import tilelang.language as T  # noqa: N812

    from mla_convert.runtime.kernels._common import TARGET
    from mla_convert.runtime.kernels._list_walk_cuda import SOURCE

    lists, entries, parts, room = T.dynamic("lists, entries, parts, room")

    @T.prim_func
    def walk_lists(
        Lists: T.Tensor([lists, entries], "int32"),
        Limits: T.Tensor([lists], "int32"),
        tokens: T.int32,
        Places: T.Tensor([lists, parts, 4, room], "int32"),
    ):
        with T.Kernel(lists, parts, threads=128) as (row, part):
            T.import_source(SOURCE + WALKS)
            T.evaluate(
                T.call_extern(
                    "handle", function, T.access_ptr(Lists[0, 0], "r", entries), T.access_ptr(Limits[0], "r", lists),
                    row, entries, tokens, part, parts, room, T.access_ptr(Places[row, part, 0, 0], "w", room),
                )
            )  # fmt: skip

    return tilelang.compile(walk_lists, target=TARGET)


@pytest.mark.parametrize(("function", "size"), [("write_walk", BLOCK), ("write_tiles", TILE)])
def test_walks(function: str, size: int) -> None:
    kernel = walk_kernel(function)
    for entries in (1, 64, 65, 2000, 2048, 2049, 4096, 9001):
        indices, limits, valid = cases(entries)
        for parts in (1, 2, 5, 32):
            found = torch.full(
                (len(valid), parts, 4, room(entries)), UNUSED, device="cuda", dtype=torch.int32
            )
            kernel(indices.cuda(), limits.cuda(), TOKENS, found)
            check(found.cpu(), valid, limits, parts, size)
