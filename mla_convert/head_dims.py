"""Solves for the dimensions of a head: from tensor shapes, from what a configuration states, or from both.

With H heads, N nope, P rope, V value dims and rank R the stored shapes are

    kv_b [H*(N+V), R]    kv_a [R+P, hidden]    q_b or q [H*(N+P), …]    o [hidden, H*V]

so that H*N = rows(kv_b) - cols(o), H*P = rows(q) - H*N, P = rows(kv_a) - R and H = H*P / P: the shapes alone
determine everything unless P is 0 or a part is missing. ``num_key_value_heads`` and ``head_dim`` mean nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mla_convert.errors import BadInputError, CannotError

#: Prefixes of the field names that describe other kinds of layers in the same model (dots3: sliding window).
FIELD_PREFIXES = ("", "swa_")
#: Where a config states the number of heads; the second spelling is that of native checkpoints.
_HEADS = ("num_attention_heads", "n_heads")


@dataclass(frozen=True, slots=True)
class HeadDims:
    """Heads of one attention block and the width of each part of a head."""

    heads: int
    nope: int
    rope: int
    v: int

    def __str__(self) -> str:
        return f"{self.heads} heads, nope {self.nope}, rope {self.rope}, v {self.v}"


def solve_head_dims(
    prefix: str,
    *,
    kv_rows: int,
    rope: int | None,
    q_rows: int | None,
    o_columns: int | None,
    text: Mapping[str, Any],
    trust_shapes: bool,
) -> tuple[HeadDims, str | None]:
    """Dimensions of one block, and a sentence on anything that was inferred rather than read.

    Args:
        prefix: The block's name, for messages.
        kv_rows: Rows of the combined up-projection.
        rope: Rotary dims by the shape of kv_a; None if it is absent.
        q_rows: Rows of the query projection; None if it is absent.
        o_columns: Columns of the output projection; None if it is absent.
        text: The language model's configuration, as it holds for this layer.
        trust_shapes: Let shapes win where the configuration contradicts them.

    Raises:
        BadInputError: Shapes contradict each other or the configuration.
        CannotError: Neither of them fixes the dimensions.
    """
    candidates = list(_solve_from_config(kv_rows, rope, o_columns, text))
    exact = [dims for dims in candidates if q_rows in (None, dims.heads * (dims.nope + dims.rope))]
    if exact:
        return exact[0], None
    if candidates and q_rows is not None:
        fused = candidates[0]
        if q_rows == fused.heads * (fused.nope + fused.rope + fused.v):
            return fused, "the query projection also holds a gate"
    solved = _solve_from_shapes(kv_rows, rope, q_rows, o_columns)
    if solved and not any(True for _ in _stated_dims(text)):
        return solved, "dimensions from tensor shapes alone: no configuration states them"
    if solved and trust_shapes:
        return solved, "dimensions from tensor shapes alone: the configuration contradicts them"
    shapes = f"kv_b {kv_rows} rows, q {q_rows}, rope {rope}, o {o_columns} columns"
    if solved:
        raise contradiction(prefix, str(solved) + " by its tensors", _stated(text))
    if not text:
        raise CannotError(
            f"{prefix}: shapes alone do not fix the head dimensions ({shapes}) and there is no config.json",
            hint="put the model's config.json beside the weights",
        )
    raise contradiction(prefix, shapes, _stated(text), is_solved=False)


def _solve_from_shapes(
    kv_rows: int, rope: int | None, q_rows: int | None, o_columns: int | None
) -> HeadDims | None:
    if not rope or q_rows is None or o_columns is None:
        return None
    k_rows = kv_rows - o_columns
    heads, rest = divmod(q_rows - k_rows, rope)
    if k_rows <= 0 or heads <= 0 or rest or k_rows % heads or o_columns % heads:
        return None
    return HeadDims(heads, k_rows // heads, rope, o_columns // heads)


def _stated_dims(text: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int | None]]:
    """(nope, rope, v, heads if stated) of every kind of layer that the configuration describes."""
    dims = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for prefix in FIELD_PREFIXES:
        if prefix and not any(prefix + name in text for name in dims):
            continue
        nope, rope, v = (text.get(prefix + name, text.get(name)) for name in dims)
        heads = next((text[prefix + name] for name in _HEADS if text.get(prefix + name) is not None), None)
        if v is None and _is_positive(text.get("hidden_size")) and _is_positive(heads):
            v = text["hidden_size"] // heads
        if _is_positive(nope) and _is_positive(v) and (rope == 0 or _is_positive(rope)):
            yield nope, rope, v, heads
            if rope:
                yield nope + rope, 0, v, heads  # layers without rotary dims grow by them


def _is_positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _solve_from_config(
    kv_rows: int, rope: int | None, o_columns: int | None, text: Mapping[str, Any]
) -> Iterator[HeadDims]:
    for nope, stated_rope, v, stated_heads in _stated_dims(text):
        heads, rest = divmod(kv_rows, nope + v)
        if rest or not heads or rope not in (None, stated_rope) or o_columns not in (None, heads * v):
            continue
        if stated_heads in (None, heads):
            yield HeadDims(heads, nope, stated_rope, v)


def _stated(text: Mapping[str, Any]) -> str:
    names = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return ", ".join(f"{name} {text.get(name)}" for name in names)


def contradiction(prefix: str, shapes: str, stated: str, *, is_solved: bool = True) -> BadInputError:
    """The error for a configuration that does not belong to the weights; ``is_solved`` if shapes alone would do."""
    trust = "; --trust-shapes lets the tensor shapes win" if is_solved else ""
    return BadInputError(
        f"{prefix}: config.json contradicts the weights: {shapes}; config.json says {stated}",
        hint=f"check that config.json belongs to these weights{trust}",
    )
