"""Makes a synthetic checkpoint with the shard structure of DeepSeek-V3, at any size from a few megabytes up.

    python -m benchmarks.checkpoint OUT --size 8GB

What stays as in the model: its 163 shards in nine groups of whole layers, the last of each group shorter or longer
than the rest; all tensor names in their order; FP8 weights with an F32 scale for each block of 128 × 128, one scale
in another shard than its weight; the MTP layer; the index, whose ``total_size`` is twice the truth. What shrinks:
hidden size, ranks, heads and vocabulary, each by the same factor, so that the KV up-projections keep their share of
the bytes. Below 256 MB there are also fewer experts, and with ``--experts`` at any size: a small checkpoint with all
256 has as many tensors as the model in a hundredth of its bytes, one with 8 has tensors of about the model's size.
With ``--ranks`` heads, widths and vocabulary divide by that number into whole scale blocks, as the model's do.

The bytes are pseudo-random and the same each time: windows into one random block for each dtype, so that writing
is as fast as the disk and memory stays small.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log2, prod
from pathlib import Path
from typing import Any

#: Bytes of the tensors of DeepSeek-V3, which full dimensions give exactly.
FULL_PAYLOAD = 688_574_839_360
SHARDS = 163
LAYERS = 61
DENSE_LAYERS = 3
EXPERTS = 256
NOPE, ROPE, V = 128, 64, 128
SCALE_BLOCK = 128
#: Shards, layers, and the length of the last shard against the others, for each group of layers.
GROUPS = ((12, 7, 0.35), *((22, 8, 0.35),) * 5, (19, 7, 0.73), (19, 7, 1.19), (3, 1, 1.5))
#: The layer whose scale of kv_b_proj is moved to the next shard.
STRAY_SCALE_LAYER = 30

_WIDTH = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
_BLOCK = 8 << 20
_BATCH = 512  # tensors a write: the kernel takes at most 1024 buffers


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written: name, dtype as safetensors spells it, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * _WIDTH[self.dtype]


@dataclass(frozen=True, slots=True)
class Dims:
    """The model's dimensions, scaled: widths by ``factor``, parameters by its square."""

    hidden: int
    dense: int
    moe: int
    q_rank: int
    kv_rank: int
    heads: int
    vocabulary: int
    experts: int

    @classmethod
    def scaled(cls, factor: float, experts: int, ranks: int = 1) -> Dims:
        """Dimensions for one factor. The KV rank stays a power of two, and heads make up for the rounding.

        Over more than one of ``ranks`` they divide into whole heads and whole scale blocks.
        """

        def width(full: float, step: int = 2) -> int:
            return max(8, step, round(full * factor / step) * step)

        step, pair = (SCALE_BLOCK * ranks, 2 * ranks) if ranks > 1 else (2, 1)
        kv_rank = 2 ** max(2, round(log2(512 * factor)))
        heads = max(2, pair, round(128 * 512 * factor**2 / kv_rank / pair) * pair)
        vocabulary = width(129280 * min(experts, EXPERTS) / EXPERTS, 2 * ranks)
        widths = width(7168), width(18432, step), width(2048, step), width(1536)
        return cls(*widths, kv_rank, heads, vocabulary, experts)


def parse_size(text: str) -> int:
    """``8GB``, ``500MB`` or ``8000000`` as bytes, in decimal units.

    Raises:
        ValueError: It is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(TB|GB|MB|kB|B|)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"not a size: {text!r} (try 8GB)")
    power = ("B", "KB", "MB", "GB", "TB").index(match[2].upper() or "B")
    return int(float(match[1]) * 1000**power)


def groups(dims: Dims) -> Iterator[tuple[int, float, list[Tensor]]]:
    """Shard count, length of the last shard, and tensors in order, for each group of layers."""
    first = 0
    for shards, layers, last in GROUPS:
        tensors = [tensor for layer in range(first, first + layers) for tensor in _layer(layer, dims)]
        first += layers
        if first == GROUPS[0][1]:
            tensors.insert(0, Tensor("model.embed_tokens.weight", "BF16", (dims.vocabulary, dims.hidden)))
        if first == LAYERS:
            tensors.append(Tensor("model.norm.weight", "BF16", (dims.hidden,)))
            tensors.append(Tensor("lm_head.weight", "BF16", (dims.vocabulary, dims.hidden)))
        yield shards, last, tensors


def _layer(layer: int, dims: Dims) -> Iterator[Tensor]:
    prefix, hidden, heads = f"model.layers.{layer}", dims.hidden, dims.heads

    def plain(name: str, *shape: int, dtype: str = "BF16") -> Tensor:
        return Tensor(f"{prefix}.{name}", dtype, shape)

    def fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield Tensor(f"{prefix}.{name}.weight", "F8_E4M3", (rows, columns))
        blocks = (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
        yield Tensor(f"{prefix}.{name}.weight_scale_inv", "F32", blocks)

    def mlp(name: str, inner: int) -> Iterator[Tensor]:
        yield from fp8(f"{name}.gate_proj", inner, hidden)
        yield from fp8(f"{name}.up_proj", inner, hidden)
        yield from fp8(f"{name}.down_proj", hidden, inner)

    if layer == LAYERS:
        yield plain("embed_tokens.weight", dims.vocabulary, hidden)
        yield plain("enorm.weight", hidden)
        yield plain("hnorm.weight", hidden)
        yield plain("eh_proj.weight", hidden, 2 * hidden)
    yield from fp8("self_attn.q_a_proj", dims.q_rank, hidden)
    yield plain("self_attn.q_a_layernorm.weight", dims.q_rank)
    yield from fp8("self_attn.q_b_proj", heads * (NOPE + ROPE), dims.q_rank)
    yield from fp8("self_attn.kv_a_proj_with_mqa", dims.kv_rank + ROPE, hidden)
    yield plain("self_attn.kv_a_layernorm.weight", dims.kv_rank)
    yield from fp8("self_attn.kv_b_proj", heads * (NOPE + V), dims.kv_rank)
    yield from fp8("self_attn.o_proj", hidden, heads * V)
    if layer < DENSE_LAYERS:
        yield from mlp("mlp", dims.dense)
    else:
        yield plain("mlp.gate.weight", dims.experts, hidden)
        yield plain("mlp.gate.e_score_correction_bias", dims.experts, dtype="F32")
        yield from mlp("mlp.shared_experts", dims.moe)
        for expert in range(dims.experts):
            yield from mlp(f"mlp.experts.{expert}", dims.moe)
    yield plain("input_layernorm.weight", hidden)
    yield plain("post_attention_layernorm.weight", hidden)
    if layer == LAYERS:
        yield plain("shared_head.norm.weight", hidden)
        yield plain("shared_head.head.weight", dims.vocabulary, hidden)


def fit(size: int, experts: int | None = None, ranks: int = 1) -> Dims:
    """The largest dimensions whose weights are within ``size`` bytes, with all experts a layer or with fewer."""
    if experts is None:
        experts = min(EXPERTS, max(8, EXPERTS * size // 256_000_000))
    low, high = 1e-4, 4.0
    for _ in range(30):
        middle = (low + high) / 2
        fits = weight_bytes(Dims.scaled(middle, experts, ranks)) <= size
        low, high = (middle, high) if fits else (low, middle)
    return Dims.scaled(low, experts, ranks)


def weight_bytes(dims: Dims) -> int:
    """Bytes of all tensors, worked out without listing every expert: they are linear in the number of experts."""
    none, one = (
        sum(tensor.nbytes for _, _, group in groups(replace(dims, experts=experts)) for tensor in group)
        for experts in (0, 1)
    )
    return none + dims.experts * (one - none)


def shards(dims: Dims) -> list[list[Tensor]]:
    """The tensors of each shard.

    Raises:
        ValueError: The checkpoint is so small that a shard would be empty.
    """
    filled: list[list[Tensor]] = []
    for count, last, tensors in groups(dims):
        capacity = sum(tensor.nbytes for tensor in tensors) / (count - 1 + last)
        group: list[list[Tensor]] = [[] for _ in range(count)]
        start = 0
        for tensor in tensors:
            group[min(count - 1, int(start / capacity))].append(tensor)
            start += tensor.nbytes
        filled += group
    if not all(filled):
        raise ValueError(f"too small for {SHARDS} shards: number {filled.index([]) + 1} would be empty")
    _stray(filled, f"model.layers.{STRAY_SCALE_LAYER}.self_attn.kv_b_proj.weight_scale_inv")
    return filled


def _stray(filled: list[list[Tensor]], name: str) -> None:
    """Move one tensor to the next shard: a weight and its scale may be apart in the model, too."""
    for shard, following in pairwise(filled):
        for tensor in shard:
            if tensor.name == name:
                shard.remove(tensor)
                following.insert(0, tensor)
                return


class Bytes:
    """Pseudo-random weights without zeros, NaN or infinities: windows into one block for each dtype."""

    def __init__(self, largest: int) -> None:
        generator = random.Random(0)
        size = _BLOCK + min(largest, _BLOCK)
        noise = generator.randbytes(size)
        codes = bytes(b | 1 if b & 0x7F == 0 else b & 0xFE if b & 0x7F == 0x7F else b for b in range(256))
        signs = bytes((0x3C, 0x3D, 0xBC, 0xBD)[b & 3] for b in range(256))  # about 0.01 to 0.1, either sign
        small = bytes((0x39,) * 256)  # about 1e-4 to 5e-4
        self._blocks = {
            "F8_E4M3": memoryview(noise.translate(codes)),
            "BF16": memoryview(_interleaved(noise, {1: signs})),
            "F32": memoryview(_interleaved(noise, {2: codes, 3: small})),
        }
        self._at = 0

    def take(self, dtype: str, count: int) -> Iterator[memoryview]:
        """``count`` bytes in one or more parts, from another place than the last ones."""
        block = self._blocks[dtype]
        while count:
            self._at = (self._at + 1_234_577) % (_BLOCK // 8)
            start = 8 * self._at
            part = block[start : start + min(count, len(block) - start)]
            yield part
            count -= len(part)


def _interleaved(noise: bytes, tables: dict[int, bytes]) -> bytes:
    """``noise`` with the last bytes of each element mapped through their own table."""
    width = max(tables) + 1
    data = bytearray(noise[: len(noise) // width * width])
    for place, table in tables.items():
        data[place::width] = data[place::width].translate(table)
    return bytes(data)


def header(tensors: Sequence[Tensor]) -> bytes:
    """The safetensors header of a file that holds ``tensors`` in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(directory: Path, size: int, experts: int | None = None, ranks: int = 1) -> dict[str, int]:
    """Write a checkpoint of about ``size`` bytes into ``directory``, which must be new or empty.

    Returns:
        Counts of it: ``files``, ``tensors``, ``bytes`` (of weights and headers), ``kv_b_bytes``, ``kv_b_shards``.

    Raises:
        ValueError: The directory is not empty, or the size is too small.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty")
    dims = fit(size, experts, ranks)
    plan = shards(dims)
    directory.mkdir(parents=True, exist_ok=True)
    source = Bytes(max(tensor.nbytes for shard in plan for tensor in shard))
    written = 0
    places: dict[str, str] = {}
    for number, tensors in enumerate(plan, 1):
        name = f"model-{number:05d}-of-{SHARDS:06d}.safetensors"
        written += _write_shard(directory / name, tensors, source)
        places |= {tensor.name: name for tensor in tensors}
    _write_small_files(directory, dims, places, sum(t.nbytes for shard in plan for t in shard))
    up = [[tensor for tensor in shard if ".kv_b_proj." in tensor.name] for shard in plan]
    return {
        "files": SHARDS,
        "tensors": len(places),
        "bytes": written,
        "kv_b_bytes": sum(tensor.nbytes for shard in up for tensor in shard),
        "kv_b_shards": sum(map(bool, up)),
    }


def _write_shard(path: Path, tensors: Sequence[Tensor], source: Bytes) -> int:
    data = header(tensors)
    written = len(data)
    with path.open("xb", buffering=0) as file:
        file.write(data)
        for first in range(0, len(tensors), _BATCH):
            parts = [part for t in tensors[first : first + _BATCH] for part in source.take(t.dtype, t.nbytes)]
            for start in range(0, len(parts), 2 * _BATCH):
                written += _write_all(file.fileno(), parts[start : start + 2 * _BATCH])
    return written


def _write_all(fd: int, parts: list[memoryview]) -> int:
    total = sum(map(len, parts))
    done = os.writev(fd, parts)
    while done < total:  # a full disk or a signal cuts a write short; the next one says why
        left, parts = done, list(parts)
        while left >= len(parts[0]):
            left -= len(parts.pop(0))
        parts[0] = parts[0][left:]
        total, done = total - done, os.writev(fd, parts)
    return total


def _write_small_files(directory: Path, dims: Dims, places: dict[str, str], total: int) -> None:
    index = {"metadata": {"total_size": 2 * total}, "weight_map": places}
    vocabulary = {f"token{number}": number for number in range(min(dims.vocabulary, 2000))}
    documents: dict[str, Any] = {
        "config.json": _config(dims),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.6, "top_p": 0.95},
        "model.safetensors.index.json": index,
        "tokenizer.json": {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}},
        "tokenizer_config.json": {"model_max_length": 131072, "tokenizer_class": "LlamaTokenizerFast"},
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=2) + "\n")
    (directory / "README.md").write_text("Synthetic weights in the shard structure of DeepSeek-V3.\n")


def _config(dims: Dims) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": dims.hidden,
        "intermediate_size": dims.dense,
        "moe_intermediate_size": dims.moe,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": DENSE_LAYERS,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.heads,
        "q_lora_rank": dims.q_rank,
        "kv_lora_rank": dims.kv_rank,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V,
        "n_routed_experts": dims.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": min(8, dims.experts),
        "vocab_size": dims.vocabulary,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
        },
        "torch_dtype": "bfloat16",
    }


def size_argument(text: str) -> int:
    """:func:`parse_size` as argparse wants it."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    """Entry point of ``python -m benchmarks.checkpoint``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; new or empty")
    parser.add_argument(
        "--size", type=size_argument, default="8GB", help="bytes of weights, such as 8GB (default)"
    )
    parser.add_argument("--experts", type=int, help="experts a layer; default 256, as in the model")
    parser.add_argument("--ranks", type=int, default=1, help="let dimensions divide by this number of ranks")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args()
    started = time.perf_counter()
    try:
        counts = write(options.out, options.size, options.experts, options.ranks)
    except ValueError as error:
        parser.error(str(error))
    seconds = time.perf_counter() - started
    if options.json:
        print(json.dumps(counts))
        return
    share = counts["kv_b_bytes"] / counts["bytes"]
    print(
        f"{options.out}: {counts['bytes'] / 1e9:.3f} GB, {counts['tensors']} tensors in {counts['files']} shards; "
        f"KV up-projections: {share:.3%} of the bytes, in {counts['kv_b_shards']} shards; "
        f"{counts['bytes'] / 1e9 / seconds:.2f} GB/s"
    )


if __name__ == "__main__":
    main()
