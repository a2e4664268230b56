"""Every kernel program compiles for Hopper without a GPU, and holds no barrier that only some threads reach.

One variant of each, since a compilation takes up to a minute: the tests on a GPU compile the others.
"""

from __future__ import annotations

import re
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


def test_pair_heads() -> None:
    from mla_convert.runtime.kernels.sparse_mla import pairs_kernel

    kernel = pairs_kernel(512, 64, torch.bfloat16)
    instructions(kernel, "mma_sync<", "ptx_ldmatrix_x4_trans", "cp_async_gs_conditional<16>", "__any_sync")


def test_many_heads() -> None:
    from mla_convert.runtime.kernels.sparse_mla import compile_for

    kernel = compile_for(128, 512, 64, torch.bfloat16, split=True)
    instructions(
        kernel, "mla_many::run<512, 64, false, true>", "wgmma_rs<", "cp.async.bulk", "__launch_bounds__(384"
    )


def test_parts_fill_the_gpu() -> None:
    from mla_convert.runtime.kernels.sparse_mla import _parts

    assert [_parts(rows, 32, 132) for rows in (4096, 528)] == [1, 1]
    assert _parts(64, 32, 132) == 2
    assert 11 <= _parts(1, 32, 132) <= 32
    assert all(1 <= _parts(rows, blocks, 132) <= blocks for rows in range(1, 600) for blocks in (1, 2, 7, 32))


def test_the_queries_left_over_share_lists() -> None:
    from mla_convert.runtime.kernels.sparse_mla import _division

    assert _division(4096, 64, 32, 132) == (4092, 1, 32)
    assert _division(4096, 128, 32, 132) == (4092, 1, 16)
    assert _division(4092, 64, 32, 132) == (4092, 1, 1)
    assert _division(4096, 16, 32, 132) == (4092, 1, 32)
    assert _division(4096, 64, 8, 132) == (4096, 1, 1), "short lists are no longer than what a launch costs"
    assert _division(64, 64, 32, 132)[0] == 64
    assert _division(160, 64, 32, 132) == (132, 1, 4), "whole lists go first where few are left"
    assert _division(80, 128, 32, 132) == (66, 1, 4)
    assert _division(100, 128, 32, 132) == (100, 1, 1), "a part costs more beside its keys than a list does"
    for queries in range(1, 1400):
        whole, parts, rest_parts = _division(queries, 128, 32, 132)
        assert whole == queries or (whole * 2 % 132 == 0 and parts == 1 and rest_parts > 1)


def test_indexer_logits() -> None:
    """32 heads: what TileLang's own layout search does not come to the end of."""
    from mla_convert.runtime.kernels.indexer_logits import compile_for

    kernel = compile_for(32, 128, torch.bfloat16)
    instructions(kernel, "64, 128, 16", "cp_async_gs_conditional<16>", "head_sums<32, 128>")


def test_indexer_loss_target() -> None:
    from mla_convert.runtime.kernels.indexer_loss import target_kernel

    kernel = target_kernel(128, 576, torch.bfloat16)
    instructions(kernel, "64, 64, 16", "cp_async_gs_conditional<16>", "collect<64>", "sum_probabilities<64>")


def test_indexer_loss() -> None:
    from mla_convert.runtime.kernels.indexer_loss import compile_for

    kernel = compile_for(64, 128, torch.bfloat16, slots=False)
    instructions(kernel, "64, 64, 16, true", "cp_async_gs_conditional<16>")
    instructions(kernel, "warpgroup_reg_alloc<168>", "mla_scatter<true>")


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


def test_a_barrier_number_of_two_roles_is_found() -> None:
    from mla_convert.runtime.kernels._common import shared_barriers

    def kernel(first: str, second: str, third: str) -> str:
        role = "if (((int)threadIdx.x) < {}) {{"
        return (
            f"{role.format(128)}\nfor (int i = 0; i < 3; ++i) {{\n{first}\n}}\n}} else {{\n"
            f"{role.format(256)}\n{second}\n}} else {{\n{third}\n}}\n}}\n"
        )

    own = "tl::__sync_thread_partial({}, 128);".format
    assert shared_barriers(kernel(own(3) + "\n" + own(3), own(4), own(5))) == []
    assert len(shared_barriers(kernel(own(3), own(4), own(3)))) == 1
    assert len(shared_barriers(kernel(own(3), own(4), own(4)))) == 1
    both = "tl::__sync_thread_partial(10, 256);"
    assert shared_barriers(kernel(both, both, own(5))) == []


def test_dense_plan_and_combine() -> None:
    from mla_convert.runtime.kernels.dense_mla import combine_kernel, plan_kernel

    instructions(plan_kernel(), "dense_mla_plan_kernel")
    instructions(combine_kernel(64, 512, torch.bfloat16, "many"), "dense_mla_combine_kernel", "float4")


def test_dense_few_rows() -> None:
    from mla_convert.runtime.kernels.dense_mla import compile_for

    kernel = compile_for(32, 512, 64, torch.bfloat16)
    instructions(kernel, "64, 32, 16, true", "cp_async_gs_conditional<16>", "warpgroup_reg_alloc<216>")
    fences = kernel.get_kernel_source().count("tl::fence_proxy_async()")
    assert fences == 10, "TileLang has added some: they wait for all copies under way"


def test_dense_few_fp8_rows() -> None:
    from mla_convert.runtime.kernels.dense_mla import compile_for

    kernel = compile_for(16, 512, 64, torch.bfloat16, fp8=True)
    instructions(kernel, "64, 16, 16, true", "mla_store_values(", "cudaGridDependencySynchronize")


def test_dense_many_rows_by_blocks() -> None:
    from mla_convert.runtime.kernels.dense_mla import compile_for

    kernel = compile_for(64, 512, 64, torch.bfloat16, blocks=True)
    instructions(kernel, "wgmma_rs<", "64, 256, 16", "tl::tma_load(KV_desc", "tl::tma_load(Q_desc")
    numbers = set(re.findall(r"__sync_thread_partial\((\d+), 128\)", kernel.get_kernel_source()))
    assert numbers == {"8", "9"}, "each consumer has a barrier of its own, and TileLang has added none"


@pytest.mark.parametrize(
    ("fp8", "how"), [(False, "cp_async_gs_conditional<16>"), (True, "mla_store_half<1, true>(")]
)
def test_dense_many_rows_gathered(fp8: bool, how: str) -> None:
    from mla_convert.runtime.kernels.dense_mla import compile_for

    kernel = compile_for(64, 512, 64, torch.bfloat16, fp8, pair=fp8)
    instructions(kernel, "wgmma_rs<", "64, 256, 16", how)
    numbers = set(re.findall(r"__sync_thread_partial\((\d+), 128\)", kernel.get_kernel_source()))
    assert numbers == {"8", "9"}, "each consumer has a barrier of its own, and TileLang has added none"


def test_sparse_backward() -> None:
    from mla_convert.runtime.kernels.sparse_mla_backward import compile_for

    for slots in (False, True):
        kernel = compile_for(512, 64, torch.bfloat16, slots)
        add = f"mla_add<{'false' if slots else 'true'}, 576, 2, 5, false>"
        instructions(kernel, "wgmma_ss<", "wgmma_rs<", "mla_gather<5, 576>", "mla_weigh(", add)


def test_sparse_backward_rows_and_sums() -> None:
    from mla_convert.runtime.kernels.sparse_mla_backward import (
        blocks_kernel,
        parts_kernel,
        prepare_kernel,
        sum_kernel,
        unite_kernel,
    )

    for rank in (512, 192):  # 192 is no power of two
        instructions(prepare_kernel(rank, torch.bfloat16), "sparse_mla_backward_prepare_kernel")
    instructions(sum_kernel(576, "bfloat16"), "sparse_mla_backward_sum_slots_kernel", "float4")
    instructions(parts_kernel(576, torch.bfloat16), "sparse_mla_backward_sum_parts_kernel", "float4")
    instructions(unite_kernel(), "sparse_mla_backward_unite_kernel", "mla_union(")
    instructions(blocks_kernel(), "sparse_mla_blocks_kernel", "find_blocks(")


def test_parts_of_a_list_fill_the_gpu() -> None:
    from mla_convert.runtime.kernels.sparse_mla_backward import _parts

    assert [_parts(lists, 64 * lists, 32, 132) for lists in (4096, 1056)] == [1, 1]
    assert [_parts(lists, 64 * lists, 32, 132) for lists in (1, 64)] == [32, 2] and _parts(
        133, 8512, 32, 132
    ) > 1
    for lists in range(1, 1200):
        assert all(1 <= _parts(lists, lists, blocks, 132) <= blocks for blocks in (1, 2, 7, 32))


def test_indexer_logits_in_fp8() -> None:
    from mla_convert.runtime.kernels.indexer_logits import compile_for

    kernel = compile_for(64, 128, torch.float8_e4m3fn, scaled=True)
    instructions(kernel, "kFloat8_e4m3, tl::DataType::kFloat32, 64, 128, 32", "cp_async_gs_conditional<4>")


def test_topk() -> None:
    from mla_convert.runtime.kernels.topk import compile_for

    kernel = compile_for("whole")
    instructions(kernel, "__launch_bounds__(512, 4)", "add.rn.f32", "__ballot_sync", "count_one(")
    instructions(compile_for("merge"), "Map[")


def test_parts_of_a_row_fit_the_gpu() -> None:
    from mla_convert.runtime.kernels.topk import parts_of

    assert parts_of(1, 131072, 2048) == 8
    assert parts_of(4096, 131072, 2048) == parts_of(1, 32768, 2048) == parts_of(1, 131072, 100_000) == 1
    for queries, keys, k in ((1, 10**6, 2048), (16, 131072, 2048), (5, 200_000, 64)):
        parts = parts_of(queries, keys, k)
        assert parts > 1 and queries * parts <= 132 and keys / parts + parts * k <= keys / 2 + 1
