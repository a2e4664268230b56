"""Recognising how a projection is stored, and the arithmetic of FP8 scales against torch, bit for bit."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mla_convert.errors import BadInputError, CannotError
from mla_convert.quant import (
    Quantisation,
    Scheme,
    _looked_up,
    bf16_words,
    config_block,
    decode_scales,
    dequantise_rows,
    read_quantisation,
    requantise_rows,
    stated_block,
)
from mla_convert.tensors import TensorSpec

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
NAN = (0x7F, 0xFF)
#: Scales that leave all 256 codes apart: the results are normal BF16 numbers, or near enough.
SANE = st.floats(2.0**-100, 2.0**100, width=32)


def fields(
    *, dtype: str = "F8_E4M3", shape: tuple[int, ...] = (512, 256), **more: tuple[str, tuple[int, ...]]
) -> dict[str, TensorSpec]:
    found = {"weight": TensorSpec("m.weight", dtype, shape)}
    return found | {name: TensorSpec(f"m.{name}", *spec) for name, spec in more.items()}


def read(stored: dict[str, TensorSpec], block: tuple[int, int] = (128, 128), **options: Any) -> Quantisation:
    return read_quantisation(stored, block, "m", **options)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_floats_are_plain(dtype: str) -> None:
    assert read(fields(dtype=dtype)) == Quantisation(Scheme.PLAIN)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("weight_scale_inv", (4, 2), Quantisation(Scheme.BLOCK, "weight_scale_inv", (128, 128))),
        ("scale", (4, 2), Quantisation(Scheme.BLOCK, "scale", (128, 128))),
        ("weight_scale", (512,), Quantisation(Scheme.CHANNEL, "weight_scale")),
        ("weight_scale", (512, 1), Quantisation(Scheme.CHANNEL, "weight_scale")),
        ("weight_scale", (), Quantisation(Scheme.TENSOR, "weight_scale")),
        ("weight_scale", (1,), Quantisation(Scheme.TENSOR, "weight_scale")),
        ("qscale_weight", (), Quantisation(Scheme.TENSOR, "qscale_weight")),
    ],
)
def test_schemes(name: str, shape: tuple[int, ...], expected: Quantisation) -> None:
    assert read(fields(**{name: ("F32", shape)})) == expected


def test_companions_are_shared() -> None:
    found = read(fields(weight_scale=("F32", ()), input_scale=("F32", ()), qscale_act=("F32", (1,))))
    assert found.shared_fields == ("input_scale", "qscale_act")
    found = read(fields(qscale_weight=("F32", ()), qscale_act=("F32", ())))
    assert (found.scale_field, found.shared_fields) == ("qscale_weight", ("qscale_act",))


def test_edge_blocks_count() -> None:
    found = read(fields(shape=(448, 200), weight_scale_inv=("F32", (4, 2))))
    assert found.block == (128, 128)


def test_halves_have_finer_blocks() -> None:
    stored = fields(shape=(192, 256), weight_scale_inv=("F32", (3, 2)))
    assert read(stored, split_rows=64).block == (64, 128)
    with pytest.raises(BadInputError, match=r"\[3, 2\].*\[2, 2\]"):
        read(stored)


def test_one_head_with_finer_blocks_is_not_taken_for_a_whole_block() -> None:
    """64 rows need one scale row in blocks of 64 and in blocks of 128 alike."""
    stored = fields(shape=(64, 256), weight_scale_inv=("F32", (1, 2)))
    assert read(stored, split_rows=64).block == (64, 128)


def test_one_scale_a_row_is_a_channel_unless_the_config_has_blocks() -> None:
    stored = fields(shape=(9, 100), weight_scale=("F32", (9, 1)))
    assert read(stored, split_rows=1).scheme is Scheme.CHANNEL
    assert read(stored, split_rows=1, is_blocked=True).block == (1, 128)
    whole = fields(shape=(512, 100), weight_scale=("F32", (512, 1)))
    assert read(whole, is_blocked=True).scheme is Scheme.CHANNEL


@pytest.mark.parametrize("shape", [(3, 2), (5, 2), (4, 1), (2, 4), (8, 2), (511,), (4, 2, 1)])
def test_scales_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadInputError) as caught:
        read(fields(weight_scale_inv=("F32", shape)))
    assert str(list(shape)) in caught.value.message and "[4, 2]" in caught.value.message
    assert "m.weight_scale_inv" in caught.value.message


def test_a_missing_scale() -> None:
    with pytest.raises(BadInputError, match=r"m\.weight is F8_E4M3 and needs exactly one scale; found none"):
        read(fields())


def test_two_scales() -> None:
    with pytest.raises(BadInputError, match="exactly one scale"):
        read(fields(weight_scale=("F32", ()), weight_scale_inv=("F32", (4, 2))))


def test_a_scale_beside_floats() -> None:
    with pytest.raises(BadInputError, match=r"m\.weight is BF16 but has a scale, m\.weight_scale_inv"):
        read(fields(dtype="BF16", weight_scale_inv=("F32", (4, 2))))


@pytest.mark.parametrize(
    "stored",
    [
        fields(dtype="U8", weight_scale=("F8_E4M3", (512, 16)), weight_scale_2=("F32", ())),
        fields(dtype="U32", scales=("BF16", (512, 4)), biases=("BF16", (512, 4))),
        {"qweight": TensorSpec("m.qweight", "I32", (256, 64))},
        {"weight_packed": TensorSpec("m.weight_packed", "I32", (512, 32))},
        fields(dtype="BF16", bias=("BF16", (512,))),
        fields(dtype="I8", weight_scale=("F32", (512, 1))),
    ],
    ids=["nvfp4", "mlx", "awq", "pack-quantized", "bias", "int8"],
)
def test_formats_that_are_refused(stored: dict[str, TensorSpec]) -> None:
    with pytest.raises(CannotError) as caught:
        read(stored)
    assert caught.value.message.startswith("m ")
    assert "BF16" in (caught.value.hint or "")


def test_a_weight_that_is_no_matrix() -> None:
    with pytest.raises(BadInputError, match=r"shape \[4, 128, 256\]"):
        read(fields(dtype="BF16", shape=(4, 128, 256)))


def test_a_companion_that_is_no_scalar() -> None:
    with pytest.raises(CannotError, match=r"m\.input_scale has shape \[512\]"):
        read(fields(weight_scale=("F32", ()), input_scale=("F32", (512,))))


@pytest.mark.parametrize(
    ("quantization", "block"),
    [
        (None, None),
        ({}, None),
        ({"quant_method": "fp8"}, None),
        ({"weight_block_size": None}, None),
        ({"weight_block_size": [64, 128]}, (64, 128)),
        ({"config_groups": {"group_0": {"weights": {"block_structure": [128, 64]}}}}, (128, 64)),
        ({"config_groups": {"group_0": {"weights": {"block_structure": "128x32"}}}}, (128, 32)),
        ({"config_groups": {"group_0": {"weights": {"strategy": "channel"}}}}, None),
        ({"config_groups": {"group_0": None}}, None),
    ],
)
def test_block_size_of_a_config(quantization: dict[str, Any] | None, block: tuple[int, int] | None) -> None:
    assert stated_block(quantization) == block
    assert config_block(quantization) == (block or (128, 128))


@pytest.mark.parametrize(
    "stated", [128, [128], [128, 128, 128], [0, 128], [128.0, 128], ["128", "128"], True]
)
def test_block_sizes_that_are_none(stated: object) -> None:
    with pytest.raises(BadInputError, match=r"weight_block_size is .* expected"):
        config_block({"weight_block_size": stated})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_decode_as_torch_does(dtype: torch.dtype) -> None:
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e8m0fnu: "F8_E8M0"}[dtype]
    if dtype is torch.float32:
        codes = torch.randint(-(2**31), 2**31 - 1, (2000,), dtype=torch.int32)
    elif dtype is torch.bfloat16:
        codes = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    else:
        codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(dtype).to(torch.float64)
    found = torch.tensor(decode_scales(codes.numpy().tobytes(), name), dtype=torch.float64)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_scales_in_an_unknown_dtype() -> None:
    with pytest.raises(CannotError, match="scales stored as F16"):
        decode_scales(b"\0\0", "F16")


def torch_words(scale: float) -> torch.Tensor:
    """All codes times a float32 scale, in float32, cast to bfloat16: as int16 words, [256]."""
    product = CODES.to(torch.float32) * torch.tensor(scale, dtype=torch.float32)
    return product.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF


@given(st.floats(width=32, allow_nan=False))
@example(1.0)
@example(2.0**-126)
@example(2.0**-127)
@example(2.0**-149)
@example(2.0**119)
@example(2.0**120 * 1.1428571)
@example(float(torch.finfo(torch.float32).max))
@example(0.0)
@example(-0.0)
@example(-3.5)
@example(math.inf)
@example(-math.inf)
def test_words_equal_torch(scale: float) -> None:
    expected, found = torch_words(scale), torch.tensor(bf16_words(scale), dtype=torch.int32)
    nan = expected.to(torch.int32).bitwise_and(0x7FFF) > 0x7F80
    assert torch.equal(found.bitwise_and(0x7FFF) > 0x7F80, nan)
    assert torch.equal(found[~nan], expected[~nan])


def test_a_nan_scale_makes_nan() -> None:
    assert set(bf16_words(math.nan)) == {0x7FC0, 0xFFC0}


@given(SANE, st.booleans())
def test_words_tell_all_codes_apart(scale: float, negative: bool) -> None:
    assert len(set(bf16_words(-scale if negative else scale))) == 256


def rows_of(codes: list[int], scales: list[float], columns: int, block: int) -> bytearray:
    return dequantise_rows(memoryview(bytes(codes)), columns, scales, block)


@given(st.data())
def test_rows_equal_torch(data: st.DataObject) -> None:
    columns, block = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    count = data.draw(st.integers(1, 4))
    blocks = -(-columns // block)
    scales = data.draw(st.lists(SANE, min_size=blocks, max_size=blocks))
    codes = data.draw(st.lists(st.integers(0, 255), min_size=columns * count, max_size=columns * count))
    found = torch.frombuffer(rows_of(codes, scales, columns, block), dtype=torch.int16)
    assert found.numpy().tobytes() == _looked_up(memoryview(bytes(codes)), columns, scales, block, 0)
    weight = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(count, columns)
    wide = torch.tensor(scales, dtype=torch.float32).repeat_interleave(block)[:columns]
    expected = (weight.to(torch.float32) * wide).to(torch.bfloat16).view(torch.int16).reshape(-1)
    number = torch.tensor([code not in NAN for code in codes])
    assert torch.equal(found[number], expected[number])
    back = requantise_rows(memoryview(bytes(found.numpy().tobytes())), columns, scales, block, "m")
    assert list(back) == codes


@pytest.mark.parametrize("scale", [2.0**-117, 2.0**118, -(2.0**118), 1.7, -1.7, math.nextafter(2.0**-117, 0)])
def test_multiplying_and_looking_up_agree(scale: float) -> None:
    codes = memoryview(bytes(range(256)))
    assert dequantise_rows(codes, 256, [scale], 256) == _looked_up(codes, 256, [scale], 256, 0)


@pytest.mark.parametrize("scale", [0.0, -0.0, math.nan, math.inf, 2.0**-140, 2.0**125])
def test_scales_that_could_not_be_undone(scale: float) -> None:
    with pytest.raises(CannotError, match="could not be undone") as caught:
        rows_of(list(range(256)), [scale], 256, 256)
    assert repr(scale) in caught.value.message


def test_a_zero_scale_over_zeros_is_harmless() -> None:
    codes = [0, 0x80, 0, 0]
    found = rows_of(codes, [0.0], 4, 128)
    assert struct.unpack("<4H", found) == (0, 0x8000, 0, 0)
    assert list(requantise_rows(memoryview(bytes(found)), 4, [0.0], 128, "m")) == codes


def test_a_value_that_no_code_makes() -> None:
    found = rows_of([1, 2, 3, 4, 5, 6], [1.5], 3, 128)
    found[8] ^= 1  # second row
    with pytest.raises(BadInputError, match="m: row 1 holds values that its original FP8 scale cannot"):
        requantise_rows(memoryview(bytes(found)), 3, [1.5], 128, "m")


@pytest.mark.parametrize(
    ("quantisation", "phrase"),
    [
        (Quantisation(Scheme.PLAIN), "F8_E4M3"),
        (Quantisation(Scheme.BLOCK, "weight_scale_inv", (64, 128)), "F8_E4M3, scales 64x128"),
        (Quantisation(Scheme.CHANNEL, "weight_scale"), "F8_E4M3, one scale a channel"),
        (Quantisation(Scheme.TENSOR, "weight_scale"), "F8_E4M3, one scale a tensor"),
    ],
)
def test_descriptions(quantisation: Quantisation, phrase: str) -> None:
    assert quantisation.describe("F8_E4M3") == phrase
