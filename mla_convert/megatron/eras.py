"""What Megatron changed between releases without changing how a tensor looks, and how to go from one to the other.

**Norms of the latents.** Standard MLA fuses them with the projection behind (``linear_kv_up_proj.layer_norm_weight``);
absorbed attention, and sparse attention from 0.19, have modules of their own (``kv_layernorm.weight``). The numbers are
the same, only the keys differ.

**Rows of the indexer.** Each of its heads has P rotary channels among W. To 0.18 they come last, the two of a pair side
by side; from 0.19 they come first, the two of a pair P/2 apart, unless ``--dsa-indexer-rope-interleaved`` keeps pairs
side by side. Names and shapes are the same, so a checkpoint of the other era loads without an error and selects other
keys. The rows of ``linear_wq_b``, ``linear_wk`` and both fields of ``k_norm`` are permuted alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mla_convert.errors import CannotError

#: The argument that came with the new order of rows.
INTERLEAVED = "dsa_indexer_rope_interleaved"


class Norms(StrEnum):
    """Where the norms of the latents are."""

    FUSED = "fused"
    STANDALONE = "standalone"


class IndexerRows(StrEnum):
    """The order of the indexer's rows within a head."""

    ROPE_LAST = "rope-last"  # to 0.18: nope, then rotary pairs side by side
    ROPE_FIRST = "rope-first"  # from 0.19: the first of each rotary pair, the second of each, then nope
    ROPE_FIRST_INTERLEAVED = "rope-first-interleaved"  # from 0.19: rotary pairs side by side, then nope


#: The keys of the norms, as modules and fields: fused, standalone.
NORM_KEYS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("linear_kv_up_proj", "layer_norm_weight"): ("kv_layernorm", "weight"),
    ("linear_kv_up_proj", "layer_norm_bias"): ("kv_layernorm", "bias"),
    ("linear_q_up_proj", "layer_norm_weight"): ("q_layernorm", "weight"),
    ("linear_q_up_proj", "layer_norm_bias"): ("q_layernorm", "bias"),
}
#: The indexer's modules whose rows (or elements) are ordered by head.
INDEXER_MODULES = ("linear_wq_b", "linear_wk", "k_norm")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a checkpoint says about the order of its indexer's rows; ``why`` in words."""

    rows: IndexerRows
    why: str


def indexer_evidence(
    arguments: Mapping[str, Any], *, has_common_file: bool, has_common_item: bool, has_fused_query_norm: bool
) -> list[Evidence]:
    """Everything that tells the order of the indexer's rows.

    Args:
        arguments: Megatron's arguments.
        has_common_file: The common state is in ``common.pt``.
        has_common_item: It is an item of the checkpoint, as from 0.19.
        has_fused_query_norm: A layer with an indexer has its query norm fused, which 0.19 refuses.
    """
    found = []
    if INTERLEAVED in arguments:
        interleaved = arguments[INTERLEAVED] is True
        rows = IndexerRows.ROPE_FIRST_INTERLEAVED if interleaved else IndexerRows.ROPE_FIRST
        found.append(Evidence(rows, f"the arguments have {INTERLEAVED} {interleaved}"))
    elif has_common_item and not has_common_file and arguments:
        why = f"the common state is inside the checkpoint, and its arguments have no {INTERLEAVED}"
        found.append(Evidence(IndexerRows.ROPE_FIRST, why))
    elif has_common_file and "dsa_indexer_n_heads" in arguments:
        found.append(Evidence(IndexerRows.ROPE_LAST, f"common.pt has arguments, without {INTERLEAVED}"))
    if has_fused_query_norm:
        found.append(Evidence(IndexerRows.ROPE_LAST, "the query norm is fused"))
    return found


def indexer_rows(evidence: list[Evidence], stated: IndexerRows | None) -> IndexerRows:
    """The order of the indexer's rows as it is: what the user states, or what all evidence agrees on.

    Raises:
        CannotError: Nothing tells, or the evidence is at odds with itself.
    """
    if stated is not None:
        return stated
    rows = {one.rows for one in evidence}
    if len(rows) == 1:
        return rows.pop()
    found = "; ".join(f"{one.rows}: {one.why}" for one in evidence)
    raise CannotError(
        f"nothing in the checkpoint tells the order of the indexer's rows, and shapes do not show it ({found})"
        if rows
        else "nothing in the checkpoint tells the order of the indexer's rows, and shapes do not show it",
        hint="say which release trained it: --indexer-from rope-last (to 0.18), rope-first (from 0.19) or "
        "rope-first-interleaved (from 0.19 with --dsa-indexer-rope-interleaved)",
    )


def row_order(rows: IndexerRows, width: int, rope: int) -> list[int]:
    """For each row of a head, the channel it belongs to: rotary ones are 0 to ``rope`` in pairs, then nope."""
    pairs, nope = list(range(rope)), list(range(rope, width))
    if rows is IndexerRows.ROPE_LAST:
        return nope + pairs
    if rows is IndexerRows.ROPE_FIRST:
        return pairs[::2] + pairs[1::2] + nope
    return pairs + nope


def row_moves(
    before: IndexerRows, after: IndexerRows, width: int, rope: int
) -> Iterator[tuple[int, int, int]]:
    """(row before, row after, count) of every run of a head's rows that moves as one."""
    place = {channel: row for row, channel in enumerate(row_order(before, width, rope))}
    sources = [place[channel] for channel in row_order(after, width, rope)]
    start = 0
    for row in range(1, width + 1):
        if row == width or sources[row] != sources[row - 1] + 1:
            yield sources[start], start, row - start
            start = row
