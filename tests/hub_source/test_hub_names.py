"""Names of repositories: what is one, what is none, and what is a path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import FakeHub
from hub_sources import NAME, SOURCE

from mla_convert.errors import UsageError
from mla_convert.hub_source import HubId, hub_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/name", HubId("org/name")),
        ("hf://deepseek-ai/DeepSeek-V3.2_x", HubId("deepseek-ai/DeepSeek-V3.2_x")),
        ("hf://org/name@refs/pr/3", HubId("org/name", "refs/pr/3")),
        ("hf://org/name@feature/x-1", HubId("org/name", "feature/x-1")),
        ("hf://org/name@v1.0@x", HubId("org/name", "v1.0@x")),
        ("hf://org/name@" + "a1" * 20, HubId("org/name", "a1" * 20)),
    ],
)
def test_names(text: str, expected: HubId) -> None:
    assert hub_id(text) == expected
    assert str(expected) == text
    assert hub_id(text.removeprefix("hf://")) is None
    assert hub_id(Path("folder")) is None


BAD = (
    "hf://",
    "hf:///",
    "hf://name",
    "hf://org/",
    "hf:///name",
    "hf://org/name/",
    "hf://org/name/model.safetensors",
    "hf://datasets/org/name",
    "hf://org/na me",
    "hf://org/na--me",
    "hf://org/..",
    "hf://../name",
    "hf://org/name.git",
    "hf://org/-name",
    "hf://org/näme",
    "hf://org/" + "n" * 100,
    "hf://org/name@",
    "hf://org/name@../../x",
    "hf://org/name@a/../b",
    "hf://org/name@/x",
    "hf://org/name@a//b",
    "hf://org/name@-x",
    "hf://org/name@a b",
    "hf://org/name@a\nb",
    "hf://org/name@a:b",
    "hf://org/name@.x",
    "hf://org/name@x.lock",
)


@pytest.mark.parametrize("text", BAD)
def test_bad_names(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        hub_id(text)
    assert caught.value.message.startswith(text.split("@")[0])
    assert caught.value.hint


def test_a_bad_name_is_a_usage_error(fails: Callable[..., str], hub: FakeHub) -> None:
    assert "names a part of a repository\nhint: give all of it: hf://org/name\n" in fails(
        2, "split", f"{SOURCE}/x"
    )
    for name in ("inspect", "split", "combine", "verify"):
        assert "error: hf://name does not name a repository\nhint: " in fails(2, name, "hf://name")
    assert "hf://name does not name" in fails(2, "verify", SOURCE, "--against", "hf://name")
    assert hub.log == []


def test_a_bare_name_is_a_path(fails: Callable[..., str], hub: FakeHub) -> None:
    for name in ("inspect", "split", "combine"):
        expected = (
            "error: org/name does not exist\nhint: if you mean the repository on the Hub: hf://org/name\n"
        )
        assert fails(2, name, NAME) == expected
    assert hub.log == []
