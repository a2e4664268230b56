"""The model card: one marked section that says what was done to a checkpoint, and how far it was verified.

A README that is there is kept: the section is put at its end, or in the place of the section of an earlier push,
and metadata is added only where a key is missing. A licence is never invented, only carried from the source's card.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mla_convert.errors import CannotError
from mla_convert.formats.torch_dist import lists_torch_dist
from mla_convert.formats.torch_legacy import lists_torch
from mla_convert.manifest import Manifest
from mla_convert.streams import visible

BEGIN = "<!-- mla-convert: begin (written by mla-convert push; edit outside these marks) -->"
END = "<!-- mla-convert: end -->"
_SECTION = re.compile(
    r"<!-- mla-convert: begin\b(?:(?!<!-- mla-convert: begin\b).)*?<!-- mla-convert: end -->", re.DOTALL
)
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE)
_LICENCE_KEYS = ("license", "license_name", "license_link")
_REPOSITORY = r"[A-Za-z0-9][\w.-]*"
_CACHED = re.compile(rf"(?:^|/)models--({_REPOSITORY}?)--({_REPOSITORY})/snapshots(?:/|$)")


def make_card(
    manifest: Manifest,
    repo_id: str,
    *,
    verification: Mapping[str, Any] | None,
    stored_as: str | None,
    existing: bytes | None,
    source_card: bytes | None,
) -> bytes:
    """The README to push.

    Args:
        manifest: Of the checkpoint.
        repo_id: Where it goes.
        verification: What ``verify`` recorded, if it ran.
        stored_as: Dtype and quantisation of K and V, if known.
        existing: The README to keep, if there is one.
        source_card: The README that came with the source, whose licence is carried.

    Raises:
        CannotError: ``existing`` is no text.
    """
    section = f"{BEGIN}\n{_section(manifest, repo_id, verification, stored_as)}{END}"
    base = base_model(manifest)
    fields = {"base_model": base} if base else {}
    if existing is None:
        fields |= _licence(source_card)
        title = _text(repo_id.partition("/")[2] or repo_id)
        tags = ["mla-convert", *(["megatron"] if _megatron_format(manifest) else [])]
        return f"{_front({**fields, 'tags': tags})}# {title}\n\n{section}\n".encode()
    try:
        text = existing.decode("utf-8")
    except UnicodeDecodeError:
        raise CannotError(
            "README.md is not UTF-8, so no section can be added to it", hint="convert it, or use --no-card"
        ) from None
    if source_card is not None and source_card != existing and not (_metadata_keys(text) & {*_LICENCE_KEYS}):
        fields |= _licence(source_card)
    newline = "\r\n" if "\r\n" in text else "\n"
    text = _with_fields(text, fields, newline)
    section = section.replace("\n", newline)
    if found := _SECTION.search(text):
        text = text[: found.start()] + section + text[found.end() :]
    else:
        text = text.rstrip("\r\n") + newline * 2 + section + newline if text.strip() else section + newline
    return text.encode()


def base_model(manifest: Manifest) -> str | None:
    """The repository the source came from, where that is known: it lay in the Hub's cache, or was named."""
    path = manifest.value["source"]["path"]
    if found := re.match(rf"hf://({_REPOSITORY}/{_REPOSITORY}?)(?:@|$)", path):
        return found[1]
    found = _CACHED.search(path)
    return f"{found[1]}/{found[2]}" if found else None


# Metadata


def _metadata_keys(text: str) -> set[str]:
    front = _FRONT.match(text)
    return set(re.findall(r"^([A-Za-z_]+)[ \t]*:", front[1], re.MULTILINE)) if front else set()


def _licence(card: bytes | None) -> dict[str, str]:
    """The licence a card states, under its own keys."""
    front = _FRONT.match((card or b"").decode("utf-8", "replace"))
    if not front:
        return {}
    found = {}
    for key in _LICENCE_KEYS:
        line = re.search(rf"^{key}[ \t]*:[ \t]*([^\s#\[{{|>&*!].*?)[ \t]*\r?$", front[1], re.MULTILINE)
        if line:
            found[key] = line[1].strip("'\"")
    return found


def _front(fields: Mapping[str, Any]) -> str:
    return f"---\n{_lines(fields)}---\n\n" if fields else ""


def _lines(fields: Mapping[str, Any]) -> str:
    """YAML, of which JSON is a part."""
    return "".join(f"{key}: {_scalar(value)}\n" for key, value in fields.items())


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value)
    return (
        str(value)
        if plain and value.lower() not in ("true", "false", "yes", "no", "null")
        else json.dumps(value)
    )


def _with_fields(text: str, fields: Mapping[str, Any], newline: str) -> str:
    missing = {key: value for key, value in fields.items() if key not in _metadata_keys(text)}
    if not missing:
        return text
    front = _FRONT.match(text)
    if not front:
        return _front(missing).replace("\n", newline) + text
    return text[: front.end(1)] + _lines(missing).replace("\n", newline) + text[front.end(1) :]


# The section


def _section(
    manifest: Manifest, repo_id: str, verification: Mapping[str, Any] | None, stored_as: str | None
) -> str:
    split = manifest.value.get("layout") != "combined"
    megatron = _megatron_format(manifest)
    how = _how_to_load_in_megatron(repo_id, megatron, split) if megatron else _how_to_load(split)
    parts = [
        "## Conversion\n",
        _done(manifest),
        _table(("", ""), _facts(manifest, verification, stored_as)),
        "### Verification\n",
        _verification(verification),
        "### How to load\n",
        how,
    ]
    if split:
        is_restored = manifest.operation == "split" and megatron != "torch"
        parts += ["### How to combine it again\n", _how_to_combine(repo_id, is_restored=is_restored)]
    return "\n".join(parts)


def _megatron_format(manifest: Manifest) -> str | None:
    """``torch_dist`` or ``torch``, by the names of the files; None for safetensors."""
    names = list(manifest.value.get("files", ()))
    if lists_torch(names):
        return "torch"
    return "torch_dist" if lists_torch_dist(names) else None


def _done(manifest: Manifest) -> str:
    source = base_model(manifest)
    of = f" of [{source}](https://huggingface.co/{source})" if source else ""
    if manifest.operation == "combine":
        return f"K and V of the KV up-projections{of} were put together again by mla-convert.\n"
    if manifest.operation == "migrate":
        return (
            f"A checkpoint{of} was brought to the conventions of another Megatron release by mla-convert. Rows and "
            "names were moved; nothing was computed.\n"
        )
    if manifest.operation == "reshard":
        options = manifest.value.get("options")
        dequantised = isinstance(options, dict) and options.get("dequantize")
        how = (
            "FP8 weights were multiplied out to BF16 where needed" if dequantised else "nothing was computed"
        )
        return (
            f"The weights{of} were laid out anew, over ranks or in another format, by mla-convert; {how}.\n"
        )
    return (
        f"The KV up-projections{of} were split into K and V by mla-convert. Rows were moved, not computed; "
        "every other tensor is unchanged.\n"
    )


def _facts(
    manifest: Manifest, verification: Mapping[str, Any] | None, stored_as: str | None
) -> list[tuple[str, str]]:
    value = manifest.value
    tool = value.get("tool")
    version = tool.get("version") if isinstance(tool, dict) else None
    options = value.get("options")
    dequantised = options.get("dequantize") if isinstance(options, dict) else None
    blocks = [block for block in value["blocks"] if isinstance(block, dict)]
    shapes = sorted(
        {
            f"{b.get('heads')} heads, nope {b.get('nope')}, v {b.get('v')}, rank {b.get('rank')}"
            for b in blocks
        }
    )
    rows = [
        ("base model", base_model(manifest) or "not recorded"),
        ("operation", manifest.operation),
        ("layout of the KV up-projections", str(value.get("layout"))),
        ("attention blocks", f"{len(blocks)} ({'; '.join(shapes[:4])})"),
        ("stored as", (stored_as or "not read") + (" (dequantised)" if dequantised else "")),
        ("verified for tensor parallel", _ranks(verification)),
        ("tool", f"mla-convert {version}"),
        ("plan", f"`{manifest.plan[:16]}`" if re.fullmatch("[0-9a-f]{64}", manifest.plan) else "-"),
    ]
    return [(name, text if text.startswith("`") else _text(text)) for name, text in rows]


def _ranks(verification: Mapping[str, Any] | None) -> str:
    settings = (verification or {}).get("settings")
    ranks = settings.get("tp") if isinstance(settings, dict) else None
    return f"{ranks} rank" + ("" if ranks == 1 else "s") if ranks else "not verified"


def _verification(verification: Mapping[str, Any] | None) -> str:
    if verification is None:
        return "**This checkpoint has not been verified.**\n"
    passed = verification.get("passed") is True
    settings = verification.get("settings")
    how = ""
    if isinstance(settings, dict):
        devices = ", ".join(map(str, settings.get("devices") or []))
        pairs = (settings.get("blocks"), settings.get("blocks_in_checkpoint"), settings.get("tokens"))
        how = "{} of {} blocks, {} tokens".format(*pairs)
        how = f" {how}, {settings.get('dtype')}, backend {settings.get('backend')}, on {devices}."
    lead = "Passed." if passed else "**This checkpoint did not pass verification.**"
    checks = verification.get("checks")
    marks = {True: "passed", False: "**failed**", None: "not made"}
    rows = [
        (_text(str(level)), _text(str(name)), marks.get(found, "-"), _text(str(said)))
        for level, name, found, said in (c for c in checks or [] if isinstance(c, list) and len(c) == 4)
    ]
    worst = verification.get("worst")
    if isinstance(worst, dict):
        figures = ((k, worst.get(k)) for k in ("cosine", "absorbed", "standard"))
        said = ", ".join(f"{name} {value:.7g}" for name, value in figures if isinstance(value, (int, float)))
        rows.append(("numbers", "worst block", "passed" if passed else "-", _text(said)))
    against = _text(str(verification.get("against")))
    note = (
        "Errors are relative to float64: of absorbed attention with these weights, and of standard attention."
    )
    return (
        f"{lead}{_text(how)} Compared: {against}.\n\n"
        + _table(("level", "check", "", "found"), rows)
        + f"\n{note}\n"
    )


def _how_to_load(split: bool) -> str:
    if not split:
        return "As the original: the combined layout is the one that programs know.\n"
    return (
        "Each attention block has `k_b_proj.weight` `[heads * nope, rank]` and `v_b_proj.weight` "
        "`[heads * v, rank]` in the place of `kv_b_proj.weight`; neither is transposed. "
        "Programs that know only the combined layout, transformers among them, would run with random weights: "
        "combine it first.\n\n"
        "```python\nfrom safetensors import safe_open\n\n"
        'with safe_open("model.safetensors", framework="pt") as file:  # or the shard that the index names\n'
        '    k = file.get_tensor("model.layers.0.self_attn.k_b_proj.weight")\n'
        '    v = file.get_tensor("model.layers.0.self_attn.v_b_proj.weight")\n```\n'
    )


def _how_to_load_in_megatron(repo_id: str, format: str, split: bool) -> str:
    name = repo_id.partition("/")[2] or repo_id
    layout = (
        "Up-projections are `linear_k_up_proj` and `linear_v_up_proj`, as absorbed attention has them; for standard "
        "attention combine them first.\n\n"
        if split
        else ""
    )
    return (
        f"{layout}A checkpoint of Megatron in its `{format}` format:\n\n```console\n"
        f"$ hf download {repo_id} --local-dir {name}\n```\n\n"
        f"and then `--load {name} --use-checkpoint-args --ckpt-format {format}`. Some of its files are pickles, as "
        "Megatron writes them; mla-convert reads them as data.\n"
    )


def _how_to_combine(repo_id: str, *, is_restored: bool) -> str:
    name = repo_id.partition("/")[2] or repo_id
    download = f"```console\n$ hf download {repo_id} --local-dir {name}\n$ mla-convert verify {name}\n"
    if not is_restored:
        return f"{download}$ mla-convert reshard {name} --tp N --layout combined -o {name}-combined\n```\n"
    return (
        "`mla-convert.json` holds what it takes to rebuild the original weights, index and configuration, byte "
        f"for byte:\n\n{download}$ mla-convert combine {name} -o {name}-combined\n```\n"
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(text: str) -> str:
    """Text that Markdown and HTML leave as it is, on one line."""
    return (
        re.sub(r"([\\`*_{}\[\]<>|#~$&!])", r"\\\1", visible(text))
        .replace("\\<", "&lt;")
        .replace("\\&", "&amp;")
    )
