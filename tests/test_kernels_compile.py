"""Every kernel program compiles for Hopper without a GPU, and holds no barrier that only some threads reach."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed (it is for Linux only)")
pytestmark = pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on PATH to compile kernels with")


def instructions(kernel: object, *names: str) -> None:
    source = kernel.get_kernel_source()
    for name in names:
        assert name in source, f"{name} is missing from the generated code"


def test_list_lengths() -> None:
    from mla_convert.runtime.kernels.sparse_mla import lengths_kernel

    instructions(lengths_kernel(), "sparse_mla_lengths_kernel")


def test_combine() -> None:
    from mla_convert.runtime.kernels.sparse_mla import combine_kernel

    instructions(combine_kernel(512, torch.bfloat16), "sparse_mla_combine_kernel", "make_float4")


def test_few_heads() -> None:
    """32 heads: the variant with the most registers, and the one that TileLang's own layout makes hang."""
    from mla_convert.runtime.kernels.sparse_mla import compile_for

    kernel = compile_for(32, 512, 64, torch.bfloat16)
    instructions(kernel, "64, 32, 16, true", "cp_async_gs_conditional<16>", "warpgroup_reg_alloc<216>")


def test_many_heads() -> None:
    from mla_convert.runtime.kernels.sparse_mla import compile_for

    kernel = compile_for(128, 512, 64, torch.bfloat16, split=True)
    instructions(
        kernel, "wgmma_rs<", "64, 256, 16", "cp_async_gs_conditional<16>", "warpgroup_reg_alloc<216>"
    )


def test_parts_fill_the_gpu() -> None:
    from mla_convert.runtime.kernels.sparse_mla import _parts

    assert [_parts(rows, 32, 132) for rows in (4096, 528)] == [1, 1]
    assert _parts(64, 32, 132) == 2
    assert 11 <= _parts(1, 32, 132) <= 32
    assert all(1 <= _parts(rows, blocks, 132) <= blocks for rows in range(1, 600) for blocks in (1, 2, 7, 32))


def test_indexer_logits() -> None:
    from mla_convert.runtime.kernels.indexer_logits import compile_for

    instructions(compile_for(64, 128, torch.bfloat16), "64, 128, 16", "cp_async_gs_conditional<16>")


def test_a_barrier_in_a_divergent_branch_is_found() -> None:
    from mla_convert.runtime.kernels._common import divergent_barriers

    sync = "tl::__sync_thread_partial(3, 128);"

    def roles(first: str, second: str) -> str:
        return f"if (((int)threadIdx.x) < 128) {{\n{first}\n}} else {{\n{second}\n}}\n"

    assert divergent_barriers(roles(sync, sync)) == []
    assert divergent_barriers(f"for (int i = 0; i < length; ++i) {{\n{sync}\n}}\n__syncthreads();") == []
    branch = f"if ((((int)threadIdx.x) >> 5) == 4) {{\n{sync}\n}}"
    assert len(divergent_barriers(roles(branch, sync))) == 1
    assert len(divergent_barriers(branch.replace(sync, "x = tl::AllReduce<tl::MaxOp, 128, 1>::run(x);"))) == 1
    assert divergent_barriers(branch.replace(sync, "x = tl::AllReduce<tl::MaxOp, 8, 1>::run(x);")) == []
