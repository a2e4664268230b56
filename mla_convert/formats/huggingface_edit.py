"""How a conversion edits a Hugging Face checkpoint's index and configuration: pure functions on their JSON.

Nothing is rewritten from scratch. Keys keep their order, unknown keys stay, and only what the conversion made
untrue is changed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Where the layout is marked in config.json.
MARK = "mla_convert"
#: Block sizes of modules that differ from quantization_config.weight_block_size.
MODULE_BLOCKS = "module_weight_block_size"
#: Lists of modules that a quantised checkpoint leaves alone, as different producers call them.
_SKIP_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")
_QUANTIZATION = ("quantization_config", "compression_config")
#: The one of them that a quantisation method reads, where it is not the first.
_SKIP_LIST_OF = {"compressed-tensors": "ignore", "modelopt": "exclude_modules", "quark": "exclude"}


def edit_index(
    index: Mapping[str, Any],
    placed: Mapping[str, str],
    replaced: Mapping[str, Sequence[str]],
    total_size: int,
) -> dict[str, Any]:
    """The index of the output.

    Args:
        index: The source's index.
        placed: File name of every output tensor.
        replaced: For each source tensor that is gone, the output tensors that stand at its place in the order.
        total_size: Bytes of all tensors of the output, which is what ``metadata.total_size`` should say.
    """
    weight_map: dict[str, str] = {}
    for name in index["weight_map"]:
        for target in (name,) if name in placed else replaced.get(name, ()):
            weight_map[target] = placed[target]
    for name, file in placed.items():
        weight_map.setdefault(name, file)
    metadata = {**index.get("metadata", {}), "total_size": total_size}
    first = {} if "metadata" in index else {"metadata": metadata}
    return {**first, **index, "metadata": metadata, "weight_map": weight_map}


def mark_layout(config: Mapping[str, Any], layout: str | None) -> dict[str, Any]:
    """A copy of ``config`` that says how the KV up-projections are stored; None removes the mark."""
    edited = copy.deepcopy(dict(config))
    edited.pop(MARK, None)
    if layout is not None:
        edited[MARK] = {"layout": layout}
    return edited


def rename_skipped(
    config: dict[str, Any],
    renamed: Mapping[str, Sequence[str]],
    *,
    keep: bool,
    leaf_renamed: Mapping[str, Sequence[str]],
) -> None:
    """Follow renamed modules in the lists of modules that are not quantised. Edits ``config`` in place.

    Args:
        config: The configuration.
        renamed: New names by full module name.
        keep: Keep the old entry too (both layouts are stored).
        leaf_renamed: New leaves by leaf, for entries such as ``self_attn.kv_b_proj`` or ``*kv_b_proj*``.
    """
    for quantization in _quantization_blocks(config):
        for key in _SKIP_LISTS:
            entries = quantization.get(key)
            if isinstance(entries, list):
                quantization[key] = _unique(_renamed(entries, renamed, keep, leaf_renamed))


def _renamed(
    entries: Iterable[Any],
    renamed: Mapping[str, Sequence[str]],
    keep: bool,
    leaves: Mapping[str, Sequence[str]],
) -> Iterable[Any]:
    for entry in entries:
        new = renamed.get(entry) if isinstance(entry, str) else None
        if new is None and isinstance(entry, str):
            leaf = next((leaf for leaf in leaves if re.search(_as_word(leaf), entry)), None)
            new = [re.sub(_as_word(leaf), other, entry) for other in leaves[leaf]] if leaf else None
        if new is None or keep:
            yield entry
        yield from new or ()


def _as_word(leaf: str) -> str:
    return rf"(?<![A-Za-z0-9_]){re.escape(leaf)}(?![A-Za-z0-9_])"


def _unique(entries: Iterable[Any]) -> list[Any]:
    seen: list[Any] = []
    strings: set[str] = set()
    for entry in entries:
        if isinstance(entry, str):
            if entry in strings:
                continue
            strings.add(entry)
        seen.append(entry)
    return seen


def skip_modules(config: dict[str, Any], modules: Sequence[str]) -> None:
    """Add modules to the list of those that are not quantised. Edits ``config`` in place."""
    for quantization in _quantization_blocks(config):
        usual = _SKIP_LIST_OF.get(str(quantization.get("quant_method")), _SKIP_LISTS[0])
        key = next((key for key in _SKIP_LISTS if isinstance(quantization.get(key), list)), usual)
        quantization[key] = _unique([*(quantization.get(key) or []), *modules])


def drop_quantization(config: dict[str, Any]) -> None:
    """Take the statement that weights are quantised away, where none is any more. Edits ``config`` in place."""
    for level in _levels(config):
        for key in _QUANTIZATION:
            level.pop(key, None)


def set_module_blocks(config: dict[str, Any], blocks: Mapping[str, tuple[int, int]]) -> None:
    """State the block size of modules that differ from the rest; an empty mapping removes the statement."""
    for quantization in _quantization_blocks(config):
        quantization.pop(MODULE_BLOCKS, None)
        if blocks:
            quantization[MODULE_BLOCKS] = {name: list(block) for name, block in blocks.items()}


def _quantization_blocks(config: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for level in _levels(config):
        for key in _QUANTIZATION:
            if isinstance(level.get(key), dict):
                yield level[key]


def _levels(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [config, *(value for value in config.values() if isinstance(value, dict))]


def without_skip_lists(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without its lists of unquantised modules, for comparing. Edits ``config`` in place."""
    for quantization in _quantization_blocks(config):
        for key in _SKIP_LISTS:
            quantization.pop(key, None)
    return config
