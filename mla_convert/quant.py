"""How a KV up-projection is quantised, and the little arithmetic that its scales need.

Splitting never recomputes a scale. Scales are copied, or replicated to smaller blocks (``split_kv``); only
``--dequantize`` does arithmetic, element by element: codes are multiplied in PyTorch, which is imported for that
alone; the way back looks words up in tables small enough for plain Python.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mla_convert.errors import BadInputError, CannotError
from mla_convert.tensors import TensorSpec

FLOAT_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})
FP8_DTYPES = frozenset({"F8_E4M3", "F8_E5M2"})
#: Fields that hold the multiplier of an FP8 weight ("inv" is a multiplier too).
SCALE_FIELDS = ("weight_scale_inv", "weight_scale", "scale")
#: Per-tensor companions that belong to both halves and are copied to each.
SHARED_FIELDS = frozenset({"input_scale", "activation_scale", "qscale_act", "qscale_weight"})
DEFAULT_BLOCK = (128, 128)
#: Dtypes of scales that can be multiplied with (splitting only copies them, whatever they are).
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")


class Scheme(StrEnum):
    """What one scale value covers."""

    PLAIN = "plain"
    BLOCK = "block"
    CHANNEL = "channel"
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How one weight is stored.

    Attributes:
        scheme: What a scale covers; ``PLAIN`` has none.
        scale_field: Field name of the scale, as ``weight_scale_inv``.
        block: Rows and columns a scale covers, for ``BLOCK``.
        shared_fields: Companions that are copied to K and to V as they are.
    """

    scheme: Scheme
    scale_field: str | None = None
    block: tuple[int, int] | None = None
    shared_fields: tuple[str, ...] = ()

    def describe(self, dtype: str) -> str:
        """One phrase for reports, e.g. ``F8_E4M3, scales 128x128``."""
        if self.scheme is Scheme.PLAIN:
            return dtype
        if self.block:
            return f"{dtype}, scales {self.block[0]}x{self.block[1]}"
        return f"{dtype}, one scale a {self.scheme}"


def plain_weight(fields: Mapping[str, TensorSpec], where: str) -> TensorSpec:
    """The weight of a projection, if it is stored in a way whose rows are the projection's rows.

    Args:
        fields: The module's tensors by field name.
        where: The module's name, for messages.

    Raises:
        CannotError: A packed format, or a field that is unknown here.
        BadInputError: The weight is not a matrix.
    """
    weight = fields.get("weight")
    if weight is None:
        raise CannotError(
            f"{where} has no plain weight, only {', '.join(sorted(fields))}",
            hint="packed low-bit formats are not supported; start from a BF16 or FP8 release of the model",
        )
    if len(weight.shape) != 2:
        raise BadInputError(f"{weight.name} has shape {list(weight.shape)}; a projection has two dimensions")
    unknown = sorted(set(fields) - {"weight"} - set(SCALE_FIELDS) - SHARED_FIELDS)
    if weight.dtype not in FLOAT_DTYPES | FP8_DTYPES or unknown:
        raise CannotError(
            f"{where} is stored as {weight.dtype}"
            + (f" with {', '.join(unknown)}" if unknown else "")
            + ", which cannot be split here",
            hint="supported: BF16, F16, F32, F64, and FP8 with block, channel or tensor scales",
        )
    return weight


def read_quantisation(
    fields: Mapping[str, TensorSpec],
    block: tuple[int, int],
    where: str,
    *,
    split_rows: int | None = None,
    is_blocked: bool = False,
) -> Quantisation:
    """Decide how a projection is stored from the tensors under its module.

    Args:
        fields: The module's tensors by field name; must contain ``weight``.
        block: Block size the configuration states, or the default.
        where: The module's name, for messages.
        split_rows: For K and V, the rows that a block of theirs has after a split (``scale_block_rows``).
        is_blocked: The configuration states block scales. It decides where the shapes fit both blocks of one
            row and one scale a row.

    Raises:
        CannotError: A storage format that cannot be split by rows here.
        BadInputError: A scale is missing, or its shape does not fit the weight.
    """
    weight = plain_weight(fields, where)
    companions = {field: spec for field, spec in fields.items() if field != "weight"}
    scales = [field for field in SCALE_FIELDS if field in companions]
    shared = tuple(sorted(SHARED_FIELDS & set(companions)))
    for field in shared:
        if companions[field].numel != 1:
            raise CannotError(
                f"{companions[field].name} has shape {list(companions[field].shape)}; expected one value",
            )
    if weight.dtype in FLOAT_DTYPES:
        if scales:
            raise BadInputError(
                f"{weight.name} is {weight.dtype} but has a scale, {companions[scales[0]].name}",
                hint="a half-finished dequantisation leaves this behind; convert the original again",
            )
        return Quantisation(Scheme.PLAIN, shared_fields=shared)
    if "qscale_weight" in companions and not scales:
        return Quantisation(
            Scheme.TENSOR, "qscale_weight", shared_fields=tuple(f for f in shared if f != "qscale_weight")
        )
    if len(scales) != 1:
        raise BadInputError(
            f"{weight.name} is {weight.dtype} and needs exactly one scale; found {scales or 'none'}",
            hint="the scale may lie in a shard that was not downloaded",
        )
    field = scales[0]
    scale = companions[field]
    blocks = [(rows, block[1]) for rows in dict.fromkeys((split_rows or block[0], block[0]))]
    scheme, found_block = _scale_scheme(weight, scale, blocks, is_blocked)
    return Quantisation(scheme, field, found_block, shared)


def _scale_scheme(
    weight: TensorSpec, scale: TensorSpec, blocks: Sequence[tuple[int, int]], is_blocked: bool
) -> tuple[Scheme, tuple[int, int] | None]:
    out_rows, in_columns = weight.shape
    if scale.numel == 1 and len(scale.shape) < 2:
        return Scheme.TENSOR, None
    expected = {block: (-(-out_rows // block[0]), -(-in_columns // block[1])) for block in blocks}
    fitting = [block for block, shape in expected.items() if scale.shape == shape]
    if scale.shape in ((out_rows,), (out_rows, 1)) and not (fitting and is_blocked):
        return Scheme.CHANNEL, None
    if fitting:
        return Scheme.BLOCK, fitting[0]
    needed = " or ".join(f"{list(shape)} in blocks of {b[0]}x{b[1]}" for b, shape in expected.items())
    raise BadInputError(
        f"{scale.name} has shape {list(scale.shape)}; {weight.name} {list(weight.shape)} needs {needed}",
        hint="the scale is of another weight, or the configuration states another block size",
    )


def config_block(quantization: Mapping[str, Any] | None) -> tuple[int, int]:
    """Block size that a config's ``quantization_config`` states; 128x128 where it says nothing."""
    return stated_block(quantization) or DEFAULT_BLOCK


def stated_block(quantization: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Block size that a config's ``quantization_config`` states; None where it says nothing.

    Raises:
        BadInputError: It states something that is no block size.
    """
    if not quantization:
        return None
    stated: Any = quantization.get("weight_block_size")
    groups = quantization.get("config_groups")
    if stated is None and isinstance(groups, dict):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict) and weights.get("block_structure"):
                stated = weights["block_structure"]
                if isinstance(stated, str):
                    stated = [int(part) for part in stated.split("x") if part.isdigit()]
    if stated is None:
        return None
    if (
        not isinstance(stated, list)
        or len(stated) != 2
        or not all(type(size) is int and size > 0 for size in stated)
    ):
        raise BadInputError(
            f"config.json: quantization_config.weight_block_size is {stated!r}; expected [rows, columns]"
        )
    return stated[0], stated[1]


def decode_scales(data: bytes, dtype: str) -> list[float]:
    """Scale values from their stored bytes.

    Raises:
        CannotError: ``dtype`` is not in ``SCALE_DTYPES``.
    """
    if dtype == "F32":
        return list(struct.unpack(f"<{len(data) // 4}f", data))
    if dtype == "BF16":
        words = struct.unpack(f"<{len(data) // 2}H", data)
        return [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]
    if dtype == "F8_E8M0":
        return [float("nan") if code == 255 else 2.0 ** (code - 127) for code in data]
    raise CannotError(f"scales stored as {dtype} cannot be applied", hint=f"known: {', '.join(SCALE_DTYPES)}")


def _e4m3(code: int) -> float:
    """Value of an FP8 E4M3 (finite, NaN at 0x7f and 0xff) code. OCP 8-bit floating point specification, 5.2."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


_E4M3 = tuple(_e4m3(code) for code in range(256))
#: Between these a scale keeps all codes apart in BF16: the smallest, 2^-9, stays normal, and the largest, 448, finite.
_SAFE_SCALES = (2.0**-117, 2.0**118)

#: Half-way between the largest float32 and the next power of two: from here on a float32 is infinite.
_F32_OVERFLOW = 2.0**128 - 2.0**103


def bf16_words(scale: float) -> list[int]:
    """BF16 bit pattern of each of the 256 E4M3 codes times ``scale``.

    The product is rounded to float32, then to bfloat16, both to nearest even: what a float32 kernel stores. The
    double in between is exact, since a code has 4 significant bits and a scale has 24.
    """
    products = [value * scale for value in _E4M3]
    if scale == scale and abs(scale) * 448 >= _F32_OVERFLOW:
        products = [
            math.copysign(math.inf, product) if abs(product) >= _F32_OVERFLOW else product
            for product in products
        ]
    words = [
        (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        for bits in struct.unpack("<256I", struct.pack("<256f", *products))
    ]
    for code, product in enumerate(products):
        if product != product:  # rounding could carry a NaN's payload away
            words[code] = 0xFFC0 if code & 0x80 else 0x7FC0
    return words


def _ambiguous_codes(words: Sequence[int]) -> bytes:
    """The codes whose BF16 word a smaller code has too: what the word cannot be turned back into."""
    if len(set(words)) == len(words):
        return b""
    first = {word: code for code, word in reversed(list(enumerate(words)))}
    return bytes(code for code, word in enumerate(words) if first[word] != code)


def require_dequantisable(weight: TensorSpec, scale: TensorSpec | None) -> None:
    """Raise CannotError if :func:`dequantise_rows` cannot read these codes and scales."""
    if weight.dtype != "F8_E4M3" or scale is None:
        raise CannotError(f"--dequantize reads F8_E4M3; {weight.name} is {weight.dtype}")
    if scale.dtype not in SCALE_DTYPES:
        raise CannotError(
            f"--dequantize reads scales stored as {', '.join(SCALE_DTYPES)}; {scale.name} is {scale.dtype}"
        )


def dequantise_rows(
    data: memoryview, columns: int, scales: Sequence[float], block_columns: int, skip: int = 0
) -> bytearray:
    """E4M3 rows that share one row of block scales, as little-endian BF16.

    Args:
        data: ``rows * columns`` codes.
        columns: Row length.
        scales: One value for each block of ``block_columns`` columns.
        block_columns: Columns that one scale covers.
        skip: Columns of the first block that lie before the first column.

    Returns:
        ``2 * len(data)`` bytes.

    Raises:
        CannotError: Two codes become one value (the scale is zero, NaN, or at the end of the range of float32),
            so :func:`requantise_rows` could not tell them apart.
    """
    least, most = _SAFE_SCALES
    if all(least <= abs(scale) <= most for scale in scales):
        return _multiplied(data, columns, scales, block_columns, skip)
    return _looked_up(data, columns, scales, block_columns, skip)


def _multiplied(
    data: memoryview, columns: int, scales: Sequence[float], block_columns: int, skip: int
) -> bytearray:
    """The same, a band at a time, for scales that keep all codes apart."""
    import torch

    out = bytearray(2 * len(data))
    if not out:
        return out
    codes = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.int8)
    # Sign, exponent and mantissa go where BF16 has them (the sign by its extension), which is the code's value times
    # 2^-120. PyTorch's own conversion of float8_e4m3fn gives the same, but one element at a time.
    bits = codes.to(torch.int16)
    bits <<= 4
    bits &= -0x7810  # 0x87F0
    values = bits.view(torch.bfloat16).to(torch.float32).view(-1, columns)
    values *= 2.0**120
    values *= torch.tensor(scales, dtype=torch.float32).repeat_interleave(block_columns)[
        skip : skip + columns
    ]
    torch.frombuffer(out, dtype=torch.bfloat16).view(-1, columns).copy_(values)
    # Codes of NaN are rare, and looking for them takes less than comparing every code.
    if codes.max() == 0x7F or codes.view(torch.uint8).max() == 0xFF:
        words = torch.frombuffer(out, dtype=torch.int16)
        words[codes == 0x7F] = 0x7FC0
        words[codes == -1] = 0x7FC0 - 0x8000
    return out


def _looked_up(
    data: memoryview, columns: int, scales: Sequence[float], block_columns: int, skip: int
) -> bytearray:
    """The same for any scales, each with a table of its own, which shows whether there is a way back."""
    out = bytearray(2 * len(data))
    for block, scale in enumerate(scales):
        words = bf16_words(scale)
        ambiguous = _ambiguous_codes(words)
        low, high = bytes(word & 255 for word in words), bytes(word >> 8 for word in words)
        start, stop = max(0, block * block_columns - skip), min((block + 1) * block_columns - skip, columns)
        for row in range(0, len(data), columns):
            codes = bytes(data[row + start : row + stop])
            if ambiguous and len(codes.translate(None, ambiguous)) != len(codes):
                raise CannotError(
                    f"the FP8 scale {scale!r} turns different weights into one BF16 value, so --dequantize could "
                    "not be undone",
                    hint="leave out --dequantize; a scale like this usually means a damaged checkpoint",
                )
            out[2 * (row + start) : 2 * (row + stop) : 2] = codes.translate(low)
            out[2 * (row + start) + 1 : 2 * (row + stop) : 2] = codes.translate(high)
    return out


def requantise_rows(
    data: memoryview, columns: int, scales: Sequence[float], block_columns: int, where: str
) -> bytearray:
    """The inverse of :func:`dequantise_rows` for the scales it was made with.

    Raises:
        BadInputError: A value is no E4M3 code times its scale, so the weights were changed since.
    """
    words = data.cast("B").cast("H")
    out = bytearray(len(words))
    for block, scale in enumerate(scales):
        codes = {word: code for code, word in reversed(list(enumerate(bf16_words(scale))))}
        start, stop = block * block_columns, min((block + 1) * block_columns, columns)
        for row in range(0, len(words), columns):
            try:
                out[row + start : row + stop] = bytes(map(codes.__getitem__, words[row + start : row + stop]))
            except KeyError:
                raise BadInputError(
                    f"{where}: row {row // columns} holds values that its original FP8 scale cannot produce",
                    hint="the weights were changed after --dequantize; combine without the manifest keeps BF16",
                ) from None
    return out
