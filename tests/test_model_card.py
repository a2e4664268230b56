"""The model card: what it says, and that it keeps what others wrote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pushing import VERIFICATION

from mla_convert.errors import CannotError
from mla_convert.manifest import Manifest
from mla_convert.model_card import BEGIN, END, base_model, make_card

REPO = "org/model-split"
VALUE: dict[str, Any] = {
    "tool": {"name": "mla-convert", "version": "9.8.7"},
    "operation": "split",
    "options": {"dequantize": None},
    "layout": "split",
    "plan": "ab" * 32,
    "source": {"path": "../models--deepseek-ai--DeepSeek-V3.2/snapshots/0123", "files": {}},
    "blocks": [{"prefix": "model.layers.0.", "heads": 128, "nope": 128, "v": 128, "rank": 512}],
}
SOURCE_CARD = b"---\nlicense: mit\nlibrary_name: transformers\n---\n# Theirs\n"


def card(
    existing: bytes | None = None,
    *,
    source: bytes | None = None,
    verification: Any = VERIFICATION,
    **changes: Any,
) -> str:
    manifest = Manifest(Path("mla-convert.json"), {**VALUE, **changes})
    made = make_card(
        manifest,
        REPO,
        verification=verification,
        stored_as="FP8 E4M3 128x128",
        existing=existing,
        source_card=source,
    )
    return made.decode()


def metadata(text: str) -> Any:
    found = re.match(r"---\r?\n(.*?)---\r?\n", text, re.DOTALL)
    return yaml.safe_load(found[1]) if found else None


def test_a_new_card_says_what_was_done() -> None:
    text = card()
    assert metadata(text) == {"base_model": "deepseek-ai/DeepSeek-V3.2", "tags": ["mla-convert"]}
    for line in (
        "| base model | deepseek-ai/DeepSeek-V3.2 |",
        "| layout of the KV up-projections | split |",
        "| stored as | FP8 E4M3 128x128 |",
        "| verified for tensor parallel | 2 ranks |",
        "| tool | mla-convert 9.8.7 |",
        "| bytes | K and V rows | passed | 3 of 3 blocks |",
        "$ hf download org/model-split --local-dir model-split",
        "$ mla-convert combine model-split -o model-split-combined",
    ):
        assert f"{line}\n" in text
    assert "Passed. 3 of 3 blocks, 128 tokens, float32, backend reference, on CPU." in text
    assert "license" not in text


def test_an_unverified_card_says_so() -> None:
    assert "**This checkpoint has not been verified.**" in card(verification=None)
    text = card(verification={**VERIFICATION, "passed": False, "checks": [["bytes", "rows", False, "bad"]]})
    assert "**This checkpoint did not pass verification.**" in text
    assert "| bytes | rows | **failed** | bad |" in text
    assert "Passed" not in text


@pytest.mark.parametrize(
    "text",
    [
        "# Theirs\n\nText.\n",
        "",
        "no newline at the end",
        "---\nlicense: mit\n---\n# Theirs\n",
        "---\r\nlicense: mit\r\n---\r\n# Theirs\r\n",
        "---\n---\nempty metadata\n",
        "---\nlicense: other\nlicense_name: x\nbase_model:\n- a/b\n---\nText with --- in it\n---\n",
        f"Before\n\n{BEGIN}\nold\n{END}\n\nAfter\n",
        f"Before\n{BEGIN}\nno end\n",
    ],
)
def test_what_is_there_is_kept(text: str) -> None:
    """Everything outside the marks, and every key of the metadata; amending twice is amending once."""
    amended = card(text.encode())
    assert card(amended.encode()) == amended
    assert amended.count(END) == 1
    before, after = metadata(text) or {}, metadata(amended)
    assert {**after, **before} == after
    assert after["base_model"] == before.get("base_model", "deepseek-ai/DeepSeek-V3.2")
    kept = [line for line in text.splitlines() if line not in ("", "old", END, BEGIN, "---")]
    assert [line for line in amended.splitlines() if line in kept] == kept
    assert "\nold\n" not in amended
    assert ("\r\n" in text) == ("\r\n" in amended)
    if "\r\n" in text:
        assert "\n" not in amended.replace("\r\n", "")


def test_the_licence_is_carried_and_never_invented() -> None:
    assert metadata(card(b"# Mine\n", source=SOURCE_CARD))["license"] == "mit"
    assert metadata(card(None, source=SOURCE_CARD))["license"] == "mit"
    assert metadata(card(b"---\nlicense: apache-2.0\n---\n", source=SOURCE_CARD))["license"] == "apache-2.0"
    assert "license" not in metadata(card(b"# Mine\n", source=b"# No metadata\n"))
    named = b"---\nlicense: other\nlicense_name: 'deepseek'\nlicense_link: LICENSE-MODEL\n---\n"
    assert metadata(card(b"# Mine\n", source=named)) == {
        "base_model": "deepseek-ai/DeepSeek-V3.2",
        "license": "other",
        "license_name": "deepseek",
        "license_link": "LICENSE-MODEL",
    }


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("../../hub/models--org--name/snapshots/abc", "org/name"),
        ("../models--org--name.v1-x/snapshots/abc", "org/name.v1-x"),
        ("hf://org/name@main", "org/name"),
        ("hf://org/name", "org/name"),
        ("../DeepSeek-V3.2", None),
        ("../models--org--name", None),
        ("../models----/snapshots/x", None),
    ],
)
def test_the_base_model(path: str, expected: str | None) -> None:
    manifest = Manifest(Path("m"), {**VALUE, "source": {"path": path, "files": {}}})
    assert base_model(manifest) == expected


def test_what_verification_says_is_no_markup() -> None:
    said = "[bold]x[/x] | <script>alert(1)</script> `code` *a*\nline & $x$"
    text = card(verification={**VERIFICATION, "checks": [["bytes", said, True, said]]})
    row = next(line for line in text.splitlines() if "script" in line)
    assert row.count(" | ") == 3
    assert "<" not in row
    assert "\\[bold\\]x\\[/x\\] \\|" in row
    assert "\\\\nline" in row


def test_records_of_any_shape_are_survived() -> None:
    for record in (
        {},
        {"passed": True, "checks": "x", "settings": [], "worst": 3},
        {"checks": [[1]], "passed": 1},
    ):
        assert END in card(verification=record)
    assert END in card(tool=None, options=None, blocks=[None], layout=None, plan="<b>")


def test_a_readme_that_is_no_text() -> None:
    with pytest.raises(CannotError, match="not UTF-8"):
        card(b"\xff\xfe")
