"""One attention block of a checkpoint as a PyTorch module, ready to run or to train.

from mla_convert.attention import load_attention

block = load_attention("DeepSeek-V3.2-split", layer=3, device="cuda")
output, indices = block(x)  # [s, b, hidden], bfloat16
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar, cast

import torch

from mla_convert.errors import CannotError
from mla_convert.geometry import AttentionBlock, find_blocks
from mla_convert.megatron.eras import IndexerRows
from mla_convert.runtime.block import MultiLatentAttention
from mla_convert.runtime.dispatch import Backend, Requested
from mla_convert.runtime.module import AbsorbedMLA
from mla_convert.runtime.parallel import Parallel
from mla_convert.verification.readers import reader_of
from mla_convert.verification.weights import block_spec, load_block
from mla_convert.whole import open_whole

Block = TypeVar("Block", bound=MultiLatentAttention)


def load_attention(
    path: str | Path,
    layer: int | str,
    *,
    kind: type[Block] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    parallel: Parallel | None = None,
    backend: Requested | Backend = "auto",
    reduce_gradients: bool = True,
    trust_shapes: bool = False,
    indexer_from: IndexerRows | None = None,
) -> Block:
    """Read a block of a checkpoint, combined or split, with its scales applied.

    Args:
        path: A checkpoint in any format that ``verify`` reads: a Hugging Face folder, or one ``.safetensors`` file with
            ``config.json`` beside it; ranks, which are put together; or a checkpoint of Megatron.
        layer: Its number, also as text, or, where a layer has several blocks, the block's prefix.
        kind: ``AbsorbedMLA`` (also for None) or ``StandardMLA``.
        dtype: Of all parameters: the product of codes and scales is taken in float64 and rounded once.
        device: Where the parameters go.
        parallel, backend, reduce_gradients: As ``AbsorbedMLA`` takes them.
        trust_shapes: Let tensor shapes win where ``config.json`` contradicts them.
        indexer_from: The order of a Megatron checkpoint's indexer rows, where it does not tell.

    Raises:
        BadInputError: The checkpoint cannot be read, or a part of the block is missing.
        CannotError: There is no such block, or several; nothing tells the order of its indexer's rows; or parameters
            cannot be of that dtype.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise CannotError(
            f"Parameters cannot be {str(dtype).removeprefix('torch.')}.",
            hint="Give bfloat16, float16, float32 or float64.",
        )
    whole = open_whole(Path(path), indexer_from)
    block = _chosen(find_blocks(whole.logical, trust_shapes=trust_shapes), layer)
    if whole.megatron and whole.megatron.unresolved and block.has_indexer:
        raise whole.megatron.unresolved
    spec = block_spec(whole.logical, block)
    loaded = load_block(reader_of(whole), block, spec, torch.device(device)).to(dtype)
    made = cast("type[Block]", AbsorbedMLA) if kind is None else kind
    return made(
        spec,
        loaded.weights,
        (loaded.w_uk, loaded.w_uv) if made.layout == "split" else loaded.w_kv_b,
        parallel=parallel,
        backend=backend,
        reduce_gradients=reduce_gradients,
    )


def _chosen(blocks: tuple[AttentionBlock, ...], layer: int | str) -> AttentionBlock:
    layer = int(layer) if isinstance(layer, str) and layer.isdecimal() else layer
    wanted = layer if isinstance(layer, int) else f"{layer.rstrip('.')}."
    found = [block for block in blocks if wanted in (block.layer, block.prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(block.prefix.rstrip(".") for block in found)
        raise CannotError(f"Layer {layer} has {len(found)} attention blocks.", hint=f"Name one: {several}.")
    known = sorted({block.layer for block in blocks if block.layer is not None})
    raise CannotError(
        f"There is no MLA block {layer!r}.", hint=f"Layers with MLA: {', '.join(map(str, known))}."
    )
