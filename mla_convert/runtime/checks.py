"""Whether the tensors that an operation is given belong together: one set of checks for kernels and references.

Each function raises ValueError, which says what does not fit, with the numbers. A tensor of one head of keys or lists
([T, 1, E], [S, 1, K]) has lost that dim before.

Shapes: S queries, T tokens or keys, H heads, E = d_v + rope (one cached token), K entries of a list, I indexer heads, J
indexer dims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Like(Protocol):
    """What is looked at: a tensor, or what is known of one."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds: the caller passed tensors that do not belong together."""
    if not condition:
        raise ValueError(message)


def check_sparse(
    q_SHE: Like,
    kv_TE: Like,
    indices_SK: Like,
    topk_length: Like | None,
    attn_sink: Like | None,
    d_v: int,
) -> None:
    """Arguments of ``sparse_mla``."""
    require(
        _dims(q_SHE, kv_TE, indices_SK) == (3, 2, 2),
        f"q {list(q_SHE.shape)}, kv {list(kv_TE.shape)}, indices {list(indices_SK.shape)}:"
        " expected [S, H, E], [T, E] or [T, 1, E], [S, K] or [S, 1, K]",
    )
    queries = q_SHE.shape[0]
    _check_attention(q_SHE, kv_TE, attn_sink, d_v)
    require(indices_SK.shape[0] == queries, f"{queries} queries and {indices_SK.shape[0]} lists")
    _check_integers(q_SHE, {"indices": indices_SK, "topk_length": topk_length})
    if topk_length is not None:
        shape = list(topk_length.shape)
        require(shape == [queries], f"topk_length {shape} for {queries} queries")


def check_dense(
    q_SHE: Like,
    kv_TE: Like,
    rows_S: Like | None,
    starts: Like | None,
    ends: Like | None,
    attn_sink: Like | None,
    d_v: int,
) -> None:
    """Arguments of ``dense_mla``."""
    require(
        _dims(q_SHE, kv_TE) == (3, 2),
        f"q {list(q_SHE.shape)}, kv {list(kv_TE.shape)}: expected [S, H, E], [T, E] or [T, 1, E]",
    )
    _check_attention(q_SHE, kv_TE, attn_sink, d_v)
    require(rows_S is None or ends is None, "rows_S and ends say the same thing: pass one of them")
    _check_spans(q_SHE, {"rows_S": rows_S, "starts": starts, "ends": ends})


def check_sparse_backward(
    q_SHE: Like,
    kv_TE: Like,
    indices_SK: Like,
    out_SHR: Like,
    lse_SH: Like,
    d_out_SHR: Like,
    topk_length: Like | None,
    attn_sink: Like | None,
    d_v: int,
    d_lse: Like | None,
) -> None:
    """Arguments of ``sparse_mla_backward``."""
    check_sparse(q_SHE, kv_TE, indices_SK, topk_length, attn_sink, d_v)
    queries, heads, _ = q_SHE.shape
    _check_shapes(
        q_SHE,
        ("out", out_SHR, [queries, heads, d_v]),
        ("d_out", d_out_SHR, [queries, heads, d_v]),
        ("lse", lse_SH, [queries, heads]),
        ("d_lse", d_lse, [queries, heads]),
    )


def check_indexer(
    q_SIJ: Like,
    k_TJ: Like,
    weights_SI: Like,
    starts: Like | None,
    ends: Like | None,
    q_scale: Like | None,
    k_scale: Like | None,
) -> None:
    """Arguments of ``indexer_logits``."""
    require(
        _dims(q_SIJ, k_TJ) == (3, 2),
        f"q {list(q_SIJ.shape)}, k {list(k_TJ.shape)}: expected [S, I, J], [T, J]",
    )
    queries, heads, dim = q_SIJ.shape
    require(k_TJ.shape[1] == dim, f"q has {dim} dims a head and k {k_TJ.shape[1]} a key")
    require(k_TJ.dtype == q_SIJ.dtype, f"q is {q_SIJ.dtype} and k {k_TJ.dtype}")
    require(weights_SI.shape == (queries, heads), f"weights {list(weights_SI.shape)} for {queries} x {heads}")
    _check_spans(q_SIJ, {"starts": starts, "ends": ends})
    fits = q_scale is None or q_scale.shape == (queries, heads)
    require(fits, f"q_scale needs one entry for each of {queries} queries and {heads} heads")
    fits = k_scale is None or k_scale.shape == (k_TJ.shape[0],)
    require(fits, f"k_scale needs one entry for each of {k_TJ.shape[0]} keys")
    _check_devices(q_SIJ, {"k": k_TJ, "weights": weights_SI, "q_scale": q_scale, "k_scale": k_scale})


def check_topk(logits_ST: Like, k: int, starts: Like | None, ends: Like | None) -> None:
    """Arguments of ``select_topk``."""
    require(_dims(logits_ST) == (2,), f"logits {list(logits_ST.shape)}: expected [S, T]")
    require(k >= 1, f"top-k of {k} keys")
    _check_spans(logits_ST, {"starts": starts, "ends": ends})


def check_loss(
    q_SIJ: Like,
    k_TJ: Like,
    weights_SI: Like,
    q_SHE: Like,
    kv_TE: Like,
    indices_SK: Like | None,
    topk_length: Like | None,
    starts: Like | None,
    ends: Like | None,
    lse_SH: Like | None,
) -> None:
    """Arguments of ``indexer_loss``."""
    require(
        _dims(q_SIJ, k_TJ, q_SHE, kv_TE) == (3, 2, 3, 2),
        f"the indexer's q {list(q_SIJ.shape)} and k {list(k_TJ.shape)}, the attention's q {list(q_SHE.shape)} and "
        f"kv {list(kv_TE.shape)}: expected [S, I, J], [T, J], [S, H, E], [T, E] or [T, 1, E]",
    )
    queries, index_heads, dim = q_SIJ.shape
    tokens, heads, width = k_TJ.shape[0], q_SHE.shape[1], q_SHE.shape[2]
    entries = 0 if indices_SK is None else indices_SK.shape[-1]
    integers = {"indices": indices_SK, "topk_length": topk_length, "starts": starts, "ends": ends}
    _check_shapes(
        q_SIJ,
        ("k", k_TJ, [tokens, dim]),
        ("weights", weights_SI, [queries, index_heads]),
        ("the attention's q", q_SHE, [queries, heads, width]),
        ("the attention's kv", kv_TE, [tokens, width]),
        ("lse", lse_SH, [queries, heads]),
        *((name, tensor, [queries]) for name, tensor in integers.items() if name != "indices"),
        ("indices", indices_SK, [queries, entries]),
    )
    require(
        indices_SK is None or (starts is None and ends is None),
        "starts and ends are for a loss without indices",
    )
    require(indices_SK is not None or topk_length is None, "topk_length needs indices")
    _check_integers(q_SIJ, integers)


def _dims(*tensors: Like) -> tuple[int, ...]:
    return tuple(len(tensor.shape) for tensor in tensors)


def _check_shapes(beside: Like, *expected: tuple[str, Like | None, list[int]]) -> None:
    for name, tensor, shape in expected:
        if tensor is not None:
            require(list(tensor.shape) == shape, f"{name} is {list(tensor.shape)}, expected {shape}")
    _check_devices(beside, {name: tensor for name, tensor, _ in expected})


def _check_attention(q_SHE: Like, kv_TE: Like, attn_sink: Like | None, d_v: int) -> None:
    _, heads, width = q_SHE.shape
    require(kv_TE.shape[1] == width, f"q has {width} dims a head and kv {kv_TE.shape[1]} a token")
    require(kv_TE.dtype == q_SHE.dtype, f"q is {q_SHE.dtype} and kv {kv_TE.dtype}")
    require(q_SHE.dtype.is_floating_point, f"q is {q_SHE.dtype}, no floating-point dtype")
    require(0 < d_v <= width, f"d_v is {d_v} and a token has {width} dims")
    if attn_sink is not None:
        require(attn_sink.shape == (heads,), f"attn_sink {list(attn_sink.shape)} for {heads} heads")
    _check_devices(q_SHE, {"kv": kv_TE, "attn_sink": attn_sink})


def _check_spans(beside: Like, spans: dict[str, Like | None]) -> None:
    queries = beside.shape[0]
    for name, span in spans.items():
        if span is not None:
            shape = list(span.shape)
            require(shape == [queries], f"{name} {shape}: it needs one entry for each of {queries} queries")
    _check_integers(beside, spans)


def _check_integers(beside: Like, tensors: dict[str, Like | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            whole = str(tensor.dtype) in ("torch.int32", "torch.int64")
            require(whole, f"{name} is {tensor.dtype}, expected int32 or int64")
    _check_devices(beside, tensors)


def _check_devices(beside: Like, tensors: dict[str, Like | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            same = tensor.device == beside.device
            require(same, f"{name} is on {tensor.device}, and not on {beside.device}")
