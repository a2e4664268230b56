"""Synthetic checkpoints for tests, as bytes: any geometry, dtype, quantisation, naming and sharding.

Every byte is random unless that is asked otherwise, so NaN payloads, -0.0 and denormals are the rule. The seed is
the running test's name: a test sees the same bytes whatever ran before it. Reading back goes through the official
safetensors library, never through the code under test.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mla_convert import api
from mla_convert.combining import CombineOptions
from mla_convert.engine import RunOptions
from mla_convert.formats.safetensors import build_header
from mla_convert.splitting import SplitOptions
from mla_convert.tensors import TensorSpec

RUN = RunOptions(workers=2)
TOKENIZER = b'{"version": "1.0"}\n'
CODE = b"class Configuration:\n    pass\n"
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


#: FP8 fields of a recipe whose K and V start at scale blocks, and of one where they do not.
ALIGNED: dict[str, Any] = {"heads": 2, "nope": 128, "v": 128, "rank": 256, "dtype": "F8_E4M3"}
GLM: dict[str, Any] = {"heads": 3, "nope": 192, "v": 256, "rank": 256, "dtype": "F8_E4M3"}


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import this into a test module, and its conversions do not wait for the disk."""
    monkeypatch.setattr("mla_convert.storage.fsync_fd", lambda fd: True)


@dataclass(frozen=True)
class Stored:
    """One tensor as it is stored."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def torch(self) -> torch.Tensor:
        """The tensor, by torch's own reading of the bytes."""
        flat = torch.frombuffer(bytearray(self.data), dtype=torch.uint8) if self.data else torch.empty(0)
        return flat.view(TORCH_DTYPES[self.dtype]).reshape(self.shape)

    def rows(self) -> torch.Tensor:
        """The bytes of each row, [rows, bytes a row]."""
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).reshape(self.shape[0], -1)

    def bytes_by_element(self) -> torch.Tensor:
        """The bytes of each element, [..., bytes an element]."""
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).reshape(*self.shape, -1)


@dataclass(frozen=True)
class Recipe:
    """A checkpoint to write. ``scales`` is None, ``block``, ``channel`` or ``tensor``."""

    layers: int = 2
    heads: int = 4
    nope: int = 16
    rope: int = 8
    v: int = 16
    rank: int = 32
    hidden: int = 24
    q_rank: int | None = 12
    dtype: str = "BF16"
    scales: str | None = None
    scale_dtype: str = "F32"
    scale_field: str | None = None
    input_scale: bool = False
    wild_scales: bool = False
    block: tuple[int, int] = (128, 128)
    prefix: str = "model."
    attentions: tuple[str, ...] = ("self_attn",)
    without_mla: frozenset[int] = frozenset()
    mtp: bool = False
    native: bool = False
    shards: int = 1
    scales_apart: bool = False
    shard_name: str = "model-{number:05d}-of-{count:06d}.safetensors"
    index: bool = True
    total_size: int | None = None
    metadata: dict[str, str] | None = field(default_factory=lambda: {"format": "pt"})
    extras: bool = True
    config: dict[str, Any] | None = None

    @property
    def block_count(self) -> int:
        """How many attention blocks there are."""
        return (self.layers - len(self.without_mla) + self.mtp) * len(self.attentions)

    def modules(self) -> list[str]:
        """Prefix of each attention block, ``model.layers.0.self_attn.`` and so on."""
        layers = [layer for layer in range(self.layers + self.mtp) if layer not in self.without_mla]
        return [f"{self.prefix}layers.{layer}.{name}." for layer in layers for name in self.attentions]


def randomness() -> random.Random:
    """Random numbers that depend on the running test's name alone."""
    return random.Random(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])


def random_bytes(rng: random.Random, dtype: str, shape: tuple[int, ...]) -> Stored:
    """A tensor of random bytes."""
    return Stored(dtype, shape, rng.randbytes(TensorSpec("x", dtype, shape).nbytes))


def random_scales(rng: random.Random, dtype: str, shape: tuple[int, ...], *, wild: bool) -> Stored:
    """Scales between 2**-14 and 2**2, or of random bytes."""
    if wild:
        return random_bytes(rng, dtype, shape)
    count = TensorSpec("x", dtype, shape).numel
    if dtype == "F8_E8M0":
        return Stored(dtype, shape, bytes(rng.randrange(113, 130) for _ in range(count)))
    values = [rng.uniform(1, 2) * 2.0 ** rng.randrange(-14, 2) for _ in range(count)]
    data = struct.pack(f"<{count}f", *values)
    if dtype == "BF16":
        data = b"".join(data[at + 2 : at + 4] for at in range(0, len(data), 4))
    return Stored(dtype, shape, data)


def make_tensors(recipe: Recipe) -> dict[str, Stored]:
    """Every tensor of a recipe's checkpoint, in the order of the model."""
    rng = randomness()
    tensors: dict[str, Stored] = {}
    plain = recipe.dtype if not recipe.dtype.startswith("F8") else "BF16"

    def add(name: str, *shape: int, dtype: str = plain) -> None:
        tensors[name] = random_bytes(rng, dtype, shape)

    names = (
        {"q": "wq", "q_a": "wq_a", "q_b": "wq_b", "kv_a": "wkv_a", "kv_b": "wkv_b", "o": "wo"}
        if recipe.native
        else {
            "q": "q_proj",
            "q_a": "q_a_proj",
            "q_b": "q_b_proj",
            "kv_a": "kv_a_proj_with_mqa",
            "kv_b": "kv_b_proj",
            "o": "o_proj",
        }
    )
    add(f"{recipe.prefix}embed_tokens.weight", 10, recipe.hidden)
    modules = recipe.modules()
    for layer in range(recipe.layers + recipe.mtp):
        here = f"{recipe.prefix}layers.{layer}."
        for module in (module for module in modules if module.startswith(here)):
            heads, q_rows = recipe.heads, recipe.heads * (recipe.nope + recipe.rope)
            if recipe.q_rank is None:
                add(f"{module}{names['q']}.weight", q_rows, recipe.hidden)
            else:
                add(f"{module}{names['q_a']}.weight", recipe.q_rank, recipe.hidden)
                add(f"{module}{names['q_b']}.weight", q_rows, recipe.q_rank)
            add(f"{module}{names['kv_a']}.weight", recipe.rank + recipe.rope, recipe.hidden)
            rows = heads * (recipe.nope + recipe.v)
            add(f"{module}{names['kv_b']}.weight", rows, recipe.rank, dtype=recipe.dtype)
            tensors |= _scales(recipe, rng, f"{module}{names['kv_b']}.", rows)
            add(f"{module}{names['o']}.weight", recipe.hidden, heads * recipe.v)
        add(f"{here}input_layernorm.weight", recipe.hidden, dtype="F32")
        add(f"{here}mlp.gate.bias", 5, dtype="U8")  # misaligns whatever follows
    add(f"{recipe.prefix}norm.weight", recipe.hidden)
    add("counter", dtype="I64")
    add("nothing.weight", 0, 7)
    return tensors


def _scales(recipe: Recipe, rng: random.Random, module: str, rows: int) -> dict[str, Stored]:
    shapes: dict[str | None, tuple[str, tuple[int, ...]]] = {
        "block": ("weight_scale_inv", (-(-rows // recipe.block[0]), -(-recipe.rank // recipe.block[1]))),
        "channel": ("weight_scale", (rows, 1)),
        "tensor": ("weight_scale", ()),
    }
    if recipe.scales is None:
        return {}
    usual, shape = shapes[recipe.scales]
    name = module + (recipe.scale_field or usual)
    found = {name: random_scales(rng, recipe.scale_dtype, shape, wild=recipe.wild_scales)}
    if recipe.input_scale:
        found[module + "input_scale"] = random_bytes(rng, "F32", ())
    return found


def make_config(recipe: Recipe) -> dict[str, Any]:
    """The configuration that fits a recipe."""
    text: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": recipe.layers,
        "hidden_size": recipe.hidden,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": 1,
        "kv_lora_rank": recipe.rank,
        "q_lora_rank": recipe.q_rank,
        "qk_nope_head_dim": recipe.nope,
        "qk_rope_head_dim": recipe.rope,
        "v_head_dim": recipe.v,
        "rms_norm_eps": 1e-06,
    }
    config = {"model_type": "kimi_k25", "text_config": text} if "language_model" in recipe.prefix else text
    if recipe.scales:
        quantization: dict[str, Any] = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
        if recipe.scales == "block":
            quantization["weight_block_size"] = list(recipe.block)
        config["quantization_config"] = quantization
    return config | (recipe.config or {})


def write_file(path: Path, tensors: dict[str, Stored], metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file of these tensors in this order."""
    header = build_header([TensorSpec(name, t.dtype, t.shape) for name, t in tensors.items()], metadata)
    path.write_bytes(header + b"".join(tensor.data for tensor in tensors.values()))
    return path


def write_checkpoint(folder: Path, recipe: Recipe | None = None, **fields: Any) -> Path:
    """Write the checkpoint of a recipe, given as such or by its fields; returns the folder."""
    recipe = recipe or Recipe(**fields)
    write_tensors(folder, make_tensors(recipe), recipe)
    (folder / "config.json").write_text(json.dumps(make_config(recipe), indent=4))
    if recipe.extras:
        (folder / "tokenizer.json").write_bytes(TOKENIZER)
        (folder / "modeling_deepseek.py").write_bytes(CODE)
        (folder / "assets").mkdir()
        (folder / "assets" / "chat.jinja").write_bytes(b"{{ messages }}")
    return folder


def write_tensors(folder: Path, tensors: dict[str, Stored], recipe: Recipe) -> None:
    """Deal tensors out to shards, with an index if the recipe has one."""
    folder.mkdir(parents=True, exist_ok=True)
    apart = [name for name in tensors if recipe.scales_apart and "scale" in name]
    together = [name for name in tensors if name not in apart]
    count = recipe.shards
    size = -(-len(together) // count)
    shards = [together[at : at + size] for at in range(0, len(together), size)]
    shards += [apart] if apart else []
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        single = len(shards) == 1 and not recipe.index
        file = "model.safetensors" if single else recipe.shard_name.format(number=number, count=len(shards))
        write_file(folder / file, {name: tensors[name] for name in names}, recipe.metadata)
        weight_map |= dict.fromkeys(names, file)
    if recipe.index:
        total = sum(len(tensor.data) for tensor in tensors.values())
        stated = total if recipe.total_size is None else recipe.total_size
        index = {"metadata": {"total_size": stated}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def load(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's safetensors files, read by the official library."""
    found: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in found, f"{name} is in two files"
                tensor = file.get_tensor(name)
                data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
                found[name] = Stored(file.get_slice(name).get_dtype(), tuple(tensor.shape), data)
    return found


def digests(folder: Path, *, without: tuple[str, ...] = ("mla-convert.json",)) -> dict[str, str]:
    """sha256 of every file below a folder, by relative name."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in without
    }


def fingerprint(folder: Path) -> dict[str, tuple[str, int]]:
    """sha256 and modification time of every file and folder: what an operation must leave as it is."""
    return {
        path.relative_to(folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
    }


def halves(tensor: torch.Tensor, heads: int, nope: int, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V out of combined rows, the way every inference engine reads them: view, narrow, reshape."""
    by_head = tensor.view(heads, nope + v, -1)
    k, value = by_head.narrow(1, 0, nope), by_head.narrow(1, nope, v)
    return k.reshape(heads * nope, -1), value.reshape(heads * v, -1)


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Fail if anything in ``folder`` changes meanwhile."""
    before = fingerprint(folder)
    yield
    assert fingerprint(folder) == before, "an operation wrote to its source"


def split(source: Path, name: str = "split", **options: bool) -> Path:
    """Split into a folder beside the source, which must stay as it is; returns the folder."""
    target = source.with_name(name)
    with untouched(source):
        api.split(source, target, SplitOptions(**options), run=RUN)
    return target


def combine(source: Path, name: str = "combined", **options: bool) -> Path:
    """Combine into a folder beside the source, which must stay as it is; returns the folder."""
    target = source.with_name(name)
    with untouched(source):
        api.combine(source, target, CombineOptions(**options), run=RUN)
    return target
