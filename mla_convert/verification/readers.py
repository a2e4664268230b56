"""Which reader reads which format, for checking."""

from __future__ import annotations

from mla_convert.verification.sharded import ShardedReader, is_sharded
from mla_convert.verification.torch_dist import TorchDistReader
from mla_convert.verification.torch_legacy import TorchReader
from mla_convert.verification.weights import TensorReader
from mla_convert.whole import Format, Whole


def reader_of(whole: Whole) -> TensorReader:
    """The reader of a checkpoint in any format."""
    if whole.format is Format.TORCH_DIST:
        return TorchDistReader(whole)
    if whole.format is Format.TORCH:
        return TorchReader(whole)
    return ShardedReader(whole) if is_sharded(whole) else TensorReader(whole.logical)
