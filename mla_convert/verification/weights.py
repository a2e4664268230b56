"""Weights for checking: read by the official safetensors library, not by the engine's reader.

A fault in how the engine finds or moves bytes therefore cannot hide itself here.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mla_convert.catalogue import Catalogue
from mla_convert.errors import BadInputError
from mla_convert.formats.huggingface_edit import MODULE_BLOCKS
from mla_convert.geometry import AttentionBlock, Layout, layer_config, quantization_config
from mla_convert.names import Part
from mla_convert.quant import SCALE_FIELDS, config_block
from mla_convert.runtime.reference import AttentionWeights, IndexerWeights, combine_kv_rows, split_kv_rows
from mla_convert.runtime.spec import AttentionSpec, attention_spec
from mla_convert.runtime.weights import shard_rows


class TensorReader:
    """Reads tensors of one checkpoint by name with the official library; files are opened when first needed.

    Args:
        catalogue: The checkpoint.
        name_of: What a tensor is called here, given its name in the file.
    """

    def __init__(self, catalogue: Catalogue, name_of: Callable[[str], str] = str) -> None:
        self.catalogue = catalogue
        self._open: dict[str, Any] = {}
        self._files: dict[str, tuple[str, str]] = {}
        for name in catalogue.files:
            for tensor in self._handle(name).keys():  # noqa: SIM118 - a safe_open handle is not a mapping
                self._files[name_of(tensor)] = (name, tensor)

    def _handle(self, name: str) -> Any:
        if name not in self._open:
            path = self.catalogue.files[name].path
            try:
                self._open[name] = safe_open(str(path), framework="pt", device="cpu")
            except Exception as error:
                raise BadInputError(f"{path}: the safetensors library cannot read it ({error})") from error
        return self._open[name]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._files)

    def get(self, name: str) -> Tensor:
        """A tensor as stored.

        Raises:
            BadInputError: There is none of this name.
        """
        if name not in self._files:
            raise BadInputError(f"tensor {name} is missing from {self.catalogue.root}")
        file, stored = self._files[name]
        tensor: Tensor = self._handle(file).get_tensor(stored)
        return tensor

    def optional(self, name: str | None) -> Tensor | None:
        """A tensor as stored, or None."""
        return self.get(name) if name is not None and name in self._files else None

    def dense(self, module: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A projection's weight with its scales applied, on ``device``.

        The product is taken in float64 and rounded to ``dtype`` once.

        Raises:
            BadInputError: The weight is missing, or a scale does not fit it.
        """
        weight = self.get(f"{module}.weight")
        field = next((field for field in SCALE_FIELDS if f"{module}.{field}" in self._files), None)
        if field is None or not weight.dtype.is_floating_point or weight.element_size() > 1:
            return weight.to(device).to(dtype)
        scale = self.get(f"{module}.{field}").to(device).to(torch.float32).to(torch.float64)
        wide = weight.to(device).to(torch.float32).to(torch.float64)
        return (wide * expand_scale(scale, wide.shape, self._scale_block(module), module)).to(dtype)

    def bf16(self, module: str) -> Tensor:
        """An FP8 projection as ``--dequantize bf16`` makes it: the product in float32, rounded to BF16."""
        codes = self.get(f"{module}.weight").to(torch.float32)
        name = next(f"{module}.{field}" for field in SCALE_FIELDS if f"{module}.{field}" in self)
        scale = self.get(name).to(torch.float32)
        return (codes * expand_scale(scale, codes.shape, self._scale_block(module), module)).to(
            torch.bfloat16
        )

    def _scale_block(self, module: str) -> tuple[int, int]:
        quantization = quantization_config(self.catalogue.config.value if self.catalogue.config else None)
        own = (quantization or {}).get(MODULE_BLOCKS, {}).get(module)
        return (own[0], own[1]) if own else config_block(quantization)


def expand_scale(scale: Tensor, shape: torch.Size, block: tuple[int, int], where: str) -> Tensor:
    """A scale as one factor an element (or something that broadcasts to that)."""
    rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.shape in ((rows,), (rows, 1)):
        return scale.reshape(rows, 1)
    row_block = block[0]
    if -(-rows // row_block) != scale.shape[0]:
        row_block = rows // scale.shape[0]
    expanded = scale.repeat_interleave(row_block, 0).repeat_interleave(block[1], 1)
    if expanded.shape[0] < rows or expanded.shape[1] < columns:
        raise BadInputError(f"{where}: a scale of shape {list(scale.shape)} does not cover {list(shape)}")
    return expanded[:rows, :columns]


#: Projections by the fields of `AttentionWeights` and `IndexerWeights`.
_PROJECTIONS = {"q": Part.Q, "q_a": Part.Q_A, "q_b": Part.Q_B, "kv_a": Part.KV_A, "o": Part.O}
_OF_INDEXER = {"wq_b": Part.INDEX_Q, "wk": Part.INDEX_K, "weights_proj": Part.INDEX_WEIGHTS}


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """One attention block, dequantised: the up-projection in both forms, from whichever is stored.

    ``w_kv_b`` [H*(N+V), R] for the standard path, ``w_uk`` [H*N, R] and ``w_uv`` [H*V, R] for the absorbed one;
    ``stored`` is the dtype they have on disk, ``dtypes`` what other weights have, by field of ``weights`` and of its
    indexer. Where the checkpoint lies on ranks, ``by_rank`` has the part of each that this process runs.
    """

    block: AttentionBlock
    spec: AttentionSpec
    weights: AttentionWeights
    w_kv_b: Tensor
    w_uk: Tensor
    w_uv: Tensor
    stored: torch.dtype
    by_rank: tuple[LoadedBlock | None, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def part(self, rank: int, world: int) -> LoadedBlock:
        """The block as tensor-parallel rank ``rank`` of ``world`` holds it: as it lies on disk, or cut out."""
        if self.by_rank:
            own = self.by_rank[rank]
            if own is None:
                raise ValueError(f"{self.block.prefix}: the part of rank {rank} was not read")
            return own
        uk, uv = (shard_rows(w, self.spec.heads, rank, world) for w in (self.w_uk, self.w_uv))
        weights = self.weights.shard(self.spec, rank, world)
        return replace(self, spec=self.spec.shard(rank, world), weights=weights, w_uk=uk, w_uv=uv)

    def to(self, dtype: torch.dtype) -> LoadedBlock:
        """The same block in another dtype."""
        return LoadedBlock(
            self.block,
            self.spec,
            self.weights.to(dtype=dtype),
            self.w_kv_b.to(dtype),
            self.w_uk.to(dtype),
            self.w_uv.to(dtype),
            self.stored,
        )

    def rounded_like(self, other: LoadedBlock) -> LoadedBlock:
        """Weights rounded to the 16 bits that ``other`` stores, where that is less than they have themselves.

        After ``--dequantize`` weights carry a rounding that FP8 codes times their scales do not have.
        """

        def rounded(weights: Any, fields: Mapping[str, Part]) -> dict[str, Any]:
            return {
                name: getattr(weights, name).to(torch.bfloat16).to(self.w_kv_b.dtype)
                for name in fields
                if self.dtypes.get(name, "").startswith("F8") and other.dtypes.get(name) == "BF16"
            }

        weights = replace(self.weights, **rounded(self.weights, _PROJECTIONS))
        if weights.indexer is not None:
            indexer = replace(weights.indexer, **rounded(weights.indexer, _OF_INDEXER))
            weights = replace(weights, indexer=indexer)
        found = replace(self, weights=weights)
        if other.stored == self.stored or other.stored.itemsize != 2:
            return found
        return replace(found, w_kv_b=self.w_kv_b.to(other.stored).to(self.w_kv_b.dtype))


def block_spec(catalogue: Catalogue, block: AttentionBlock) -> AttentionSpec:
    """The attention that a checkpoint's configuration describes for one block.

    Raises:
        BadInputError: The configuration is missing or lacks a field.
    """
    if catalogue.config is None:
        raise BadInputError(
            f"{catalogue.root} has no config.json, so its attention cannot be run",
            hint="put the model's config.json beside the weights",
        )
    query = block.find(catalogue, Part.INDEX_Q)
    index_weights = block.find(catalogue, Part.INDEX_WEIGHTS)
    heads = dim = None
    if query and index_weights:
        heads = catalogue.tensors[index_weights].spec.shape[0]
        dim = catalogue.tensors[query].spec.shape[0] // heads
    if block.hidden is None:
        raise BadInputError(f"{block.prefix}: neither its input nor its output projection is stored")
    return attention_spec(
        layer_config(catalogue.config.value, block.layer),
        hidden=block.hidden,
        heads=block.heads,
        nope=block.nope,
        rope=block.rope,
        v=block.v,
        rank=block.rank,
        q_rank=block.q_rank,
        layer=block.layer or 0,
        has_indexer=block.has_indexer,
        index_heads=heads,
        index_dim=dim,
    )


def load_block(
    reader: TensorReader, block: AttentionBlock, spec: AttentionSpec, device: torch.device
) -> LoadedBlock:
    """Read one block in float64.

    Raises:
        BadInputError: A part is missing or does not have the shape its block needs.
    """
    catalogue, wide = reader.catalogue, torch.float64

    def dense(part: Part) -> Tensor | None:
        name = block.find(catalogue, part)
        return None if name is None else reader.dense(name.removesuffix(".weight"), device, wide)

    def vector(part: Part, field: str = "weight") -> Tensor | None:
        tensor = reader.optional(block.find(catalogue, part, field))
        return None if tensor is None else tensor.to(device).to(wide)

    def needed(tensor: Tensor | None, part: Part) -> Tensor:
        if tensor is None:
            raise BadInputError(f"{block.prefix}: the {part} part is missing")
        return tensor

    indexer = None
    if spec.indexer is not None:
        indexer = IndexerWeights(
            wq_b=needed(dense(Part.INDEX_Q), Part.INDEX_Q),
            wk=needed(dense(Part.INDEX_K), Part.INDEX_K),
            k_norm_weight=needed(vector(Part.INDEX_K_NORM), Part.INDEX_K_NORM),
            k_norm_bias=vector(Part.INDEX_K_NORM, "bias"),
            weights_proj=needed(dense(Part.INDEX_WEIGHTS), Part.INDEX_WEIGHTS),
        )
    weights = AttentionWeights(
        q=dense(Part.Q) if block.q_rank is None else None,
        q_a=dense(Part.Q_A),
        q_a_bias=vector(Part.Q_A, "bias"),
        q_a_norm=vector(Part.Q_A_NORM),
        q_b=dense(Part.Q_B),
        kv_a=needed(dense(Part.KV_A), Part.KV_A),
        kv_a_bias=vector(Part.KV_A, "bias"),
        kv_a_norm=needed(vector(Part.KV_A_NORM), Part.KV_A_NORM),
        o=needed(dense(Part.O), Part.O),
        o_bias=vector(Part.O, "bias"),
        indexer=indexer,
    )
    combined = dense(Part.KV_B) if block.layout is not Layout.SPLIT else None
    if block.layout is Layout.COMBINED:
        w_kv_b = needed(combined, Part.KV_B)
        w_uk, w_uv = split_kv_rows(w_kv_b, spec)
    else:
        w_uk, w_uv = needed(dense(Part.K_B), Part.K_B), needed(dense(Part.V_B), Part.V_B)
        w_kv_b = combined if combined is not None else combine_kv_rows(w_uk, w_uv, spec)
    stored = reader.get(block.tensor(Part.KV_B if block.layout is Layout.COMBINED else Part.K_B)).dtype
    names = {field: block.find(catalogue, part) for field, part in (_PROJECTIONS | _OF_INDEXER).items()}
    dtypes = {field: catalogue.tensors[name].spec.dtype for field, name in names.items() if name}
    return LoadedBlock(block, spec, weights, w_kv_b, w_uk, w_uv, stored, dtypes=dtypes)


def raw_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes as uint8 [n], so that NaN payloads and signed zeros count."""
    flat = tensor.contiguous().reshape(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def sha256_of_tensor(tensor: Tensor) -> str:
    """Hex sha256 of a tensor's bytes (row-major)."""
    data = raw_bytes(tensor.cpu())
    if not data.numel():
        return hashlib.sha256().hexdigest()
    return hashlib.sha256((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).hexdigest()


def paired(
    ours: Mapping[str, AttentionBlock], theirs: Mapping[str, AttentionBlock]
) -> Iterator[tuple[AttentionBlock, AttentionBlock]]:
    """Blocks that stand under the same prefix in two checkpoints."""
    for prefix, block in ours.items():
        if prefix in theirs:
            yield block, theirs[prefix]
