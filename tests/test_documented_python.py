"""The Python of docs/runtime.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parent.parent / "docs/runtime.md"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would compile every kernel")
def test_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 6
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert isinstance(names["same"], torch.Tensor) and names["same"].shape == (100, 512)
    assert torch.equal(names["same"], names["backend"].indexer_select(  # type: ignore[attr-defined]
        names["index_q"], names["index_k"], names["weights"], 512,
        ends=torch.arange(3997, 4097, dtype=torch.int32),
    ))  # fmt: skip
    said = capsys.readouterr().out
    for operation in ("sparse_mla", "indexer_select", "indexer_loss", "dense_mla", "decode_mla"):
        assert f"{operation}: reference" in said
