"""Level 1: is everything there, once, in the right shape, and does the configuration still say the same?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from mla_convert.catalogue import Catalogue
from mla_convert.formats.huggingface_edit import (
    drop_quantization,
    mark_layout,
    set_module_blocks,
    without_skip_lists,
)
from mla_convert.formats.safetensors import parse_header
from mla_convert.geometry import AttentionBlock, Layout
from mla_convert.manifest import Manifest, sha256_of
from mla_convert.names import parse_up_projection
from mla_convert.quant import FP8_DTYPES, SCALE_FIELDS, SHARED_FIELDS
from mla_convert.strict_json import parse_json
from mla_convert.tensors import TensorSpec
from mla_convert.verification.result import Check

LEVEL = "structure"


def check_index(catalogue: Catalogue) -> Check:
    """The index's ``total_size`` is the bytes of all tensors (opening it checked the rest)."""
    if catalogue.index is None:
        return Check(LEVEL, "index", None, "there is no index")
    stated = catalogue.index.value.get("metadata", {}).get("total_size")
    true = sum(tensor.spec.nbytes for tensor in catalogue.tensors.values())
    if stated == true:
        return Check(LEVEL, "index", True, f"{len(catalogue.tensors)} tensors, total_size {true} bytes")
    return Check(LEVEL, "index", False, f"total_size says {stated}, the tensors have {true} bytes")


def check_inventory(
    catalogue: Catalogue, blocks: Iterable[AttentionBlock], expected: Mapping[str, TensorSpec], source: str
) -> Check:
    """Every tensor outside the KV up-projections is in both checkpoints, with the same dtype and shape."""
    ours = _plain(tensor.spec for tensor in catalogue.tensors.values())
    theirs = _plain(expected.values())
    missing = sorted(set(theirs) - set(ours))
    extra = sorted(set(ours) - set(theirs))
    changed = sorted(name for name in set(ours) & set(theirs) if ours[name] != theirs[name])
    # Every combined up-projection must have a block that holds it, in one layout or the other.
    held = {block.prefix for block in blocks}
    wanted = {parsed.prefix for name in expected if (parsed := parse_up_projection(name))}
    missing += sorted(f"{prefix}(KV up-projection)" for prefix in wanted - held)
    extra += sorted(f"{prefix}(KV up-projection)" for prefix in held - wanted)
    if not (missing or extra or changed):
        return Check(
            LEVEL, "tensors", True, f"{len(ours)} carried tensors and {len(held)} blocks as in {source}"
        )
    return Check(
        LEVEL,
        "tensors",
        False,
        f"{len(missing)} missing, {len(extra)} not expected, {len(changed)} of another dtype or shape",
        (
            *(f"missing: {name}" for name in missing),
            *(f"not expected: {name}" for name in extra),
            *(f"{name}: {_shown(ours[name])}, expected {_shown(theirs[name])}" for name in changed),
        ),
    )


def dequantised_weights(catalogue: Catalogue, expected: Mapping[str, TensorSpec]) -> set[str]:
    """Weights outside the KV up-projections that are BF16 here, without scales, and FP8 in the original."""
    found = set()
    for name, spec in _plain(tensor.spec for tensor in catalogue.tensors.values()).items():
        scales = [f"{name.removesuffix('weight')}{field}" for field in SCALE_FIELDS]
        if name.endswith(".weight") and spec.dtype == "BF16" and not catalogue.tensors.keys() & set(scales):
            before = expected.get(name)
            if before and before.dtype in FP8_DTYPES and expected.keys() & set(scales):
                found.add(name)
    return found


def without_scales(expected: Mapping[str, TensorSpec], dequantised: Collection[str]) -> dict[str, TensorSpec]:
    """The original's tensors as they are once these weights are BF16."""
    modules = {name.rpartition(".")[0] for name in dequantised}
    gone = {f"{module}.{field}" for module in modules for field in (*SCALE_FIELDS, *SHARED_FIELDS)}
    return {
        name: replace(spec, dtype="BF16") if name in dequantised else spec
        for name, spec in expected.items()
        if name not in gone
    }


def lost_all_scales(ours: Iterable[str], theirs: Iterable[str]) -> bool:
    """The other checkpoint's tensors include scales, and ours do not."""
    fields = (*SCALE_FIELDS, *SHARED_FIELDS)
    one, other = ({name.rpartition(".")[2] for name in names} for names in (ours, theirs))
    return not other.isdisjoint(fields) and one.isdisjoint(fields)


def expected_specs(manifest: Manifest, catalogue: Catalogue) -> dict[str, TensorSpec]:
    """The original's tensors as far as a manifest knows them: rewritten files from their original headers.

    Files that were carried over are taken as they are now; their size and hash are checked elsewhere.
    """
    headers = manifest.restore_headers
    specs: dict[str, TensorSpec] = {}
    for name, raw in headers.items():
        size = manifest.value["source"]["files"].get(name, [0])[0]
        for stored in parse_header(raw, size, f"{manifest.path}: original header of {name}").tensors:
            specs[stored.spec.name] = stored.spec
    for name, file in catalogue.files.items():
        if name not in headers:
            specs |= {stored.spec.name: stored.spec for stored in file.header.tensors}
    return specs


def check_config(
    ours: Mapping[str, Any] | None,
    theirs: Mapping[str, Any] | None,
    source: str,
    *,
    dequantised: bool,
) -> Check:
    """The configurations agree in everything that a conversion does not edit.

    Args:
        ours, theirs: The two configurations.
        source: Whose the other one is, in words.
        dequantised: No weight has scales any more, so ours should not say that weights are quantised.
    """
    if ours is None or theirs is None:
        if ours is None and theirs is None:
            return Check(LEVEL, "config", None, "there is no config.json")
        return Check(
            LEVEL, "config", False, f"config.json is only in {'the original' if ours is None else 'this one'}"
        )
    expected = _comparable(theirs)
    if dequantised:
        drop_quantization(expected)
    differing = sorted(_differences(_comparable(ours), expected, ""))
    if not differing:
        return Check(LEVEL, "config", True, f"says the same as in {source}")
    return Check(LEVEL, "config", False, f"{len(differing)} fields differ from {source}", tuple(differing))


def original_config(manifest: Manifest, name: str) -> dict[str, Any] | None:
    """The configuration before the conversion, if the manifest holds it."""
    data = manifest.restore_files.get(name)
    value = parse_json(data, where=f"{manifest.path}: original {name}") if data is not None else None
    return value if isinstance(value, dict) else None


def check_files(catalogue: Catalogue, manifest: Manifest) -> Check:
    """Every file of the manifest is there with its size; small files also by their sha256."""
    bad = []
    present = {file.name: file.path for file in catalogue.files.values()}
    present |= {file.name: file.path for file in catalogue.others}
    for json in (catalogue.config, catalogue.index):
        if json:
            present[json.name] = catalogue.root / json.name
    hashed = 0
    for name, entry in manifest.files.items():
        path = present.get(name, catalogue.root / name)  # a rank's own index is in no inventory
        if not path.is_file():
            bad.append(f"{name} is missing")
            continue
        size = path.stat().st_size
        if size != entry["size"]:
            bad.append(f"{name} has {size} bytes, recorded {entry['size']}")
        elif entry.get("sha256") and size < 16 << 20:
            hashed += 1
            if sha256_of(path.read_bytes()) != entry["sha256"]:
                bad.append(f"{name} was changed since the conversion (sha256 differs)")
    if bad:
        return Check(
            LEVEL, "files", False, f"{len(bad)} files are not as the manifest records them", tuple(bad)
        )
    return Check(
        LEVEL,
        "files",
        True,
        f"{len(manifest.files)} files as recorded (sizes; {hashed} small ones by sha256)",
    )


def check_layout_mark(catalogue: Catalogue, blocks: Iterable[AttentionBlock]) -> Check:
    """config.json says which layout the blocks are stored in."""
    found = {block.layout for block in blocks}
    stored = str(next(iter(found))) if len(found) == 1 else "mixed"
    mark = catalogue.config.value.get("mla_convert") if catalogue.config else None
    stated = mark.get("layout") if isinstance(mark, dict) else None
    if catalogue.config is None or (stated is None and stored == Layout.COMBINED):
        return Check(LEVEL, "layout", True, stored)
    if stated == stored:
        return Check(LEVEL, "layout", True, f"{stored}, as config.json says")
    return Check(LEVEL, "layout", False, f"blocks are {stored}; config.json says {stated}")


def _plain(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Everything but the KV up-projections."""
    return {spec.name: spec for spec in specs if parse_up_projection(spec.name) is None}


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    edited = mark_layout(config, None)
    set_module_blocks(edited, {})
    return without_skip_lists(edited)


def _differences(ours: Any, theirs: Any, path: str) -> Iterable[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {*ours, *theirs}:
            yield from _differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else str(key))
    elif ours != theirs or type(ours) is not type(theirs):
        yield f"{path}: {ours!r}, originally {theirs!r}"


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
