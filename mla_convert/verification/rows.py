"""Level 2: do K and V hold exactly the rows of the combined tensor, and is everything else untouched?

Bytes are compared, so NaN payloads and signed zeros count. The rows are found by reshaping in torch, not by the
arithmetic of the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from mla_convert.catalogue import SourceTensor
from mla_convert.geometry import AttentionBlock, Layout
from mla_convert.manifest import Manifest
from mla_convert.names import Part, parse_up_projection
from mla_convert.progress import Progress
from mla_convert.quant import SCALE_FIELDS
from mla_convert.verification.result import Check
from mla_convert.verification.weights import TensorReader, raw_bytes, sha256_of_tensor

LEVEL = "bytes"
#: Carried tensors are compared in pieces of this many bytes.
_PIECE = 64 << 20

Blocks = Mapping[str, AttentionBlock]


def check_rows(ours: TensorReader, theirs: TensorReader, our_blocks: Blocks, their_blocks: Blocks) -> Check:
    """The KV up-projections of both checkpoints hold the same bytes, whatever the layout of each."""
    bad: list[str] = []
    exact = dequantised = 0
    for prefix, block in our_blocks.items():
        original = their_blocks.get(prefix)
        if original is None:
            continue  # reported by the structure check
        found = _compare_block(ours, theirs, block, original)
        bad += found.differences
        exact += found.exact
        dequantised += found.dequantised
    compared = f"{exact} of {len(our_blocks)} blocks equal byte for byte"
    if dequantised:
        compared += f", {dequantised} equal to the dequantised original bit for bit"
    if bad:
        return Check(LEVEL, "K and V rows", False, f"{len(bad)} differences; {compared}", tuple(bad))
    return Check(LEVEL, "K and V rows", True, compared)


class _Comparison:
    def __init__(self) -> None:
        self.differences: list[str] = []
        self.exact = self.dequantised = 0


def _compare_block(
    ours: TensorReader, theirs: TensorReader, block: AttentionBlock, original: AttentionBlock
) -> _Comparison:
    result = _Comparison()
    for our_part, their_part in _weight_pairs(block, original):
        mine, other = _rows(ours, block, our_part), _rows(theirs, original, their_part)
        if mine.shape != other.shape:
            result.differences.append(
                f"{block.prefix}: {our_part} is {list(mine.shape)}, originally {list(other.shape)}"
            )
            continue
        if mine.dtype == other.dtype:
            result.differences += _row_differences(mine, other, block, our_part)
            mine_scale, other_scale = (
                _row_scales(ours, block, our_part),
                _row_scales(theirs, original, their_part),
            )
            if (mine_scale is None) != (other_scale is None):
                result.differences.append(f"{block.prefix}: {our_part} has a scale on one side only")
            elif mine_scale is not None and other_scale is not None:
                result.differences += _row_differences(mine_scale, other_scale, block, f"scale of {our_part}")
        else:
            wide = _dequantised_rows(theirs, original, their_part)
            if mine.dtype != torch.bfloat16 or wide is None:
                result.differences.append(
                    f"{block.prefix}: {our_part} is {mine.dtype}, originally {other.dtype}"
                )
                continue
            same = (mine == wide) | (mine.isnan() & wide.isnan())
            if not bool(same.all()):
                row = int((~same).any(1).nonzero()[0])
                result.differences.append(
                    f"{block.prefix}: {our_part} row {row} is not the dequantised original"
                )
            result.dequantised += our_part == Part.K_B
    result.exact = not result.differences and not result.dequantised
    return result


def _weight_pairs(block: AttentionBlock, original: AttentionBlock) -> Iterator[tuple[Part, Part]]:
    """K and V of both sides; a combined tensor is cut into the two."""
    yield Part.K_B, Part.K_B
    yield Part.V_B, Part.V_B
    if Layout.BOTH in (block.layout, original.layout):
        yield Part.KV_B, Part.KV_B


def _rows(reader: TensorReader, block: AttentionBlock, part: Part) -> Tensor:
    """The weight rows of K, V or the combined tensor [rows, R], whichever way they are stored."""
    if part in block.quantisation:
        return reader.get(block.tensor(part))
    if part is Part.KV_B:
        return _join(reader.get(block.tensor(Part.K_B)), reader.get(block.tensor(Part.V_B)), block)
    return _cut(reader.get(block.tensor(Part.KV_B)), block, part)


def _join(k: Tensor, v: Tensor, block: AttentionBlock) -> Tensor:
    parts = [t.reshape(block.heads, -1, *t.shape[1:]) for t in (_integers(k), _integers(v))]
    return torch.cat(parts, 1).flatten(0, 1).view(k.dtype)


def _cut(combined: Tensor, block: AttentionBlock, part: Part) -> Tensor:
    by_head = combined.reshape(block.heads, block.nope + block.v, *combined.shape[1:])
    rows = by_head[:, : block.nope] if part is Part.K_B else by_head[:, block.nope :]
    return rows.flatten(0, 1)


def _integers(tensor: Tensor) -> Tensor:
    """The same bits as integers: not every operation knows the 8-bit floats."""
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def _row_scales(reader: TensorReader, block: AttentionBlock, part: Part) -> Tensor | None:
    """The scale of each weight row, one row of scales for each row of K, V or the combined tensor."""
    stored = part if part in block.quantisation else (Part.KV_B if part is not Part.KV_B else None)
    if stored is None:
        k, v = (_row_scales(reader, block, half) for half in (Part.K_B, Part.V_B))
        return None if k is None or v is None else _join(k, v, block)
    name = next((n for f in SCALE_FIELDS if (n := block.tensor(stored, f)) in reader), None)
    if name is None:
        return None
    scale = reader.get(name)
    rows = {Part.KV_B: block.kv.combined_rows, Part.K_B: block.kv.k_rows, Part.V_B: block.kv.v_rows}[stored]
    if scale.numel() == 1:
        expanded = _integers(scale).reshape(1, 1).expand(rows, 1)
    elif scale.shape[0] == rows:
        expanded = _integers(scale).reshape(rows, -1)
    else:
        quantisation = block.quantisation[stored]
        size = quantisation.block[0] if quantisation.block else 1
        expanded = _integers(scale).repeat_interleave(size, 0)[:rows]
    return expanded if stored is part else _cut(expanded, block, part)


def _dequantised_rows(reader: TensorReader, block: AttentionBlock, part: Part) -> Tensor | None:
    """What ``--dequantize bf16`` must give: the product in float32, rounded to BF16."""
    codes, scales = _rows(reader, block, part), _row_scales(reader, block, part)
    if scales is None or codes.element_size() != 1:
        return None
    stored = block.quantisation.get(part) or block.quantisation[Part.KV_B]
    name = next(n for f in SCALE_FIELDS if (n := block.tensor(next(iter(block.quantisation)), f)) in reader)
    factors = scales.contiguous().view(reader.get(name).dtype).to(torch.float32)
    if stored.block:
        factors = factors.repeat_interleave(stored.block[1], 1)[:, : codes.shape[1]]
    return (codes.to(torch.float32) * factors).to(torch.bfloat16)


def _row_differences(mine: Tensor, other: Tensor, block: AttentionBlock, what: str) -> list[str]:
    if mine.dtype != other.dtype or mine.shape != other.shape:
        return [
            f"{block.prefix}: {what} is {mine.dtype} {list(mine.shape)}, originally "
            f"{other.dtype} {list(other.shape)}"
        ]
    differs = (_integers(mine) != _integers(other)).reshape(mine.shape[0], -1).any(1)
    if not bool(differs.any()):
        return []
    row, count = int(differs.nonzero()[0]), int(differs.sum())
    per_head = max(1, mine.shape[0] // block.heads)
    return [f"{block.prefix}: {what}: {count} rows differ, the first is row {row} (head {row // per_head})"]


def check_hashes(ours: TensorReader, blocks: Blocks, manifest: Manifest) -> Check:
    """Without the original: the recombined weights hash to what the manifest recorded of the original."""
    bad, good, unknown = [], 0, 0
    dequantised = manifest.value.get("options", {}).get("dequantize") is not None
    for block in blocks.values():
        name = block.tensor(Part.KV_B)
        recorded = manifest.tensor_sha256.get(name)
        if recorded is None or dequantised:
            unknown += 1
            continue
        if sha256_of_tensor(_rows(ours, block, Part.KV_B)) == recorded:
            good += 1
        else:
            bad.append(f"{name} does not come back as it was (sha256 differs)")
    summary = f"{good} of {len(blocks)} recombined weights have the recorded sha256"
    if unknown:
        summary += f"; {unknown} cannot be compared without the original"
    passed = False if bad else (True if good else None)
    return Check(LEVEL, "K and V rows", passed, summary, tuple(bad))


def check_carried(
    ours: TensorReader, theirs: TensorReader, progress: Progress, dequantised: Collection[str] = ()
) -> Check:
    """Every tensor outside the KV up-projections holds the same bytes in both checkpoints.

    Weights in ``dequantised`` hold the original's values instead, bit for bit as ``--dequantize`` makes them.
    """
    names = sorted(name for name in ours.names & theirs.names if parse_up_projection(name) is None)
    pairs = [(name, ours.catalogue.tensors[name], theirs.catalogue.tensors[name]) for name in names]
    progress.start("compare bytes", sum(mine.spec.nbytes for _, mine, _ in pairs), "bytes")
    bad, linked = [], 0
    for name, mine, other in pairs:
        if _is_linked(ours, mine, theirs, other):
            linked += 1  # a hard link: the very same bytes
        elif name in dequantised:
            if not _same_values(ours.get(name), theirs.bf16(name.rpartition(".")[0])):
                bad.append(f"{name}: not the dequantised original")
        elif not _same_bytes(ours.get(name), theirs.get(name)):
            bad.append(name)
        progress.advance(mine.spec.nbytes)
    progress.finish()
    if bad:
        return Check(LEVEL, "carried tensors", False, f"{len(bad)} of {len(names)} differ", tuple(bad))
    summary = f"{len(names) - len(dequantised)} tensors identical"
    summary += f" ({linked} in hard-linked files)" if linked else ""
    if dequantised:
        summary += f", {len(dequantised)} equal to the dequantised original bit for bit"
    return Check(LEVEL, "carried tensors", True, summary)


def _is_linked(ours: TensorReader, mine: SourceTensor, theirs: TensorReader, other: SourceTensor) -> bool:
    if not mine.file or not other.file or mine.start != other.start:
        return False  # a tensor that lies on ranks has no file of its own
    ours_at, theirs_at = ours.catalogue.files[mine.file].path, theirs.catalogue.files[other.file].path
    return ours_at.samefile(theirs_at)


def _same_values(mine: Tensor, other: Tensor) -> bool:
    """Bit for bit, but for what NaN carries."""
    if mine.dtype != other.dtype or mine.shape != other.shape:
        return False
    same = (mine.view(torch.int16) == other.view(torch.int16)) | (mine.isnan() & other.isnan())
    return bool(same.all())


def _same_bytes(mine: Tensor, other: Tensor) -> bool:
    if mine.dtype != other.dtype or mine.shape != other.shape:
        return False
    left, right = raw_bytes(mine), raw_bytes(other)
    return all(
        torch.equal(left[at : at + _PIECE], right[at : at + _PIECE]) for at in range(0, left.numel(), _PIECE)
    )
