"""What decoding keeps of the tokens before: the latent of every token, and the indexer's key where there is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mla_convert.errors import BadInputError, CannotError
from mla_convert.runtime.spec import AttentionSpec


class LatentCache:
    """The latents of a batch of sequences for one block, contiguous: ``capacity`` rows a sequence.

    ``kv_TE`` [B * capacity, R + P] holds normed latent and rotated key, ``index_TJ`` [B * capacity, J] the indexer's
    keys (None without an indexer); of sequence b the first ``lengths[b]`` rows from b * capacity count. Every
    tensor-parallel rank has a whole one. Lengths are kept on the host, so a block's step cannot be captured in a CUDA
    graph (``decode_mla`` can, with lengths on the device).

    Raises:
        BadInputError: fewer than one sequence or token.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        sequences: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if sequences < 1 or capacity < 1:
            raise BadInputError(f"A cache of {sequences} sequences of {capacity} tokens holds nothing.")
        self.capacity = capacity
        self.lengths = [0] * sequences
        rows = sequences * capacity
        with torch.inference_mode(False):  # else nothing but inference mode could write to it
            self.kv_TE = torch.zeros(rows, spec.kv_dim, dtype=dtype, device=device)
            self.index_TJ = None
            if spec.indexer is not None:
                self.index_TJ = torch.zeros(rows, spec.indexer.dim, dtype=dtype, device=device)

    def check(self, counts: Sequence[int]) -> None:
        """Whether so many more tokens of each sequence fit.

        Raises:
            BadInputError: another number of sequences.
            CannotError: more tokens than there is room for.
        """
        if len(counts) != len(self.lengths):
            raise BadInputError(f"{len(counts)} sequences for a cache of {len(self.lengths)}.")
        for number, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if length + count > self.capacity:
                raise CannotError(
                    f"Sequence {number} has {length} tokens in the cache and {count} more would exceed its "
                    f"capacity of {self.capacity}.",
                    hint="Make the cache larger.",
                )

    def check_block(self, spec: AttentionSpec, device: torch.device) -> None:
        """Whether it is a cache for such a block, whose hidden states are on ``device``.

        Raises:
            BadInputError: its rows have another width, it has no place for the indexer's keys, or another device.
        """
        held = (self.kv_TE.shape[1], 0 if self.index_TJ is None else self.index_TJ.shape[1])
        needs = (spec.kv_dim, held[1] if spec.indexer is None else spec.indexer.dim)
        if held != needs:
            raise BadInputError(
                f"The cache holds {held[0]} dims a token and {held[1]} of an indexer; the block needs {needs[0]} "
                f"and {needs[1]}.",
                hint="Make it of the block's own spec: LatentCache(block.spec, ...).",
            )
        if self.kv_TE.device != device:
            raise BadInputError(f"The cache is on {self.kv_TE.device} and x on {device}.")

    def grow(self, counts: Sequence[int]) -> None:
        """Count tokens that have been written."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
