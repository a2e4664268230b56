"""Running a block compiles nothing that ``warmup`` does not list, on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_module_gpu import SPARSE, SPECS, block, inputs

from mla_convert.runtime.dispatch import available
from mla_convert.runtime.module import AbsorbedMLA, LatentCache

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]


@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("name", SPECS)
def test_nothing_else_is_compiled(name: str, heads: int) -> None:
    from mla_convert.runtime.kernels import _common
    from mla_convert.runtime.kernels.variants import variants

    spec = replace(SPECS[name], heads=heads)
    for variant in variants(spec, torch.bfloat16):
        variant.build()
    listed = set(_common._cache)
    absorbed = block(AbsorbedMLA, spec, torch.bfloat16, backend="tilelang")
    for shape in ("sbhd", "packed"):
        x, given = inputs(shape)
        absorbed(x, **given)[0].sum().backward()
        with torch.no_grad():
            absorbed(x, **given)
    with torch.no_grad():
        x, _ = inputs("sbhd")
        cache = LatentCache(spec, 2, 1024, dtype=torch.bfloat16, device="cuda")
        for part in x.split((1000, 1, 2, 4, 17)):
            absorbed(part, cache=cache)
    assert set(_common._cache) <= listed
    assert (spec.indexer is None) == (name != "sparse") and SPARSE.indexer is not None
