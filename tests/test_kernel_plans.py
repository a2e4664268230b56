"""What the kernels' entry points keep of a call: found once for equal signatures, and never an error."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed (it is for Linux only)")


def test_one_plan_for_equal_signatures() -> None:
    from mla_convert.runtime.kernels._common import arguments, planned, signature

    seen = []

    @planned
    def plan(known: tuple, option: int) -> int:
        seen.append(arguments(known))
        return len(seen)

    x = torch.zeros(3, 4)
    assert plan(signature(x, None), 1) == 1
    assert plan(signature(torch.ones(4, 3).t(), None), 1) == 1, "neither strides nor contents are part of it"
    ((argument, nothing),) = seen
    assert (argument.shape, argument.dtype, argument.device, argument.ndim) == (x.shape, x.dtype, x.device, 2)
    assert nothing is None
    others = [x[:2], x.double(), x.to("meta"), x[None], None]
    assert [plan(signature(other, None), 1) for other in others] == [2, 3, 4, 5, 6]
    assert plan(signature(x, x), 1) == 7
    assert plan(signature(x, None), 2) == 8
    assert plan(signature(x, None), 1) == 1


def test_errors_are_not_kept() -> None:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    q, kv, lists = torch.zeros(3, 2, 64), torch.zeros(5, 64), torch.zeros(2, 4, dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(ValueError, match="3 queries and 2 lists"):
            sparse_mla(q, kv, lists, 1.0, d_v=64)


def test_nothing_to_attend_to_needs_no_kernel() -> None:
    from mla_convert.runtime.kernels.dense_mla import dense_mla
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla
    from mla_convert.runtime.kernels.topk import select_topk

    q, kv = (torch.zeros(*shape, 96, dtype=torch.bfloat16) for shape in ((3, 2), (0,)))
    lists = torch.zeros(3, 4, dtype=torch.int32)
    for out, lse in (sparse_mla(q, kv, lists, 1.0, d_v=64), dense_mla(q, kv, 1.0, d_v=64)):
        assert out.shape == (3, 2, 64) and not out.any()
        assert lse.shape == (3, 2) and lse.isneginf().all()
    assert select_topk(torch.zeros(3, 0), 5).shape == (3, 0)
