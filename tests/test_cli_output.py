"""Exactly what people read: the whole output of each command on one fixed checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conversions import CONFIG, attention, fails, memory_folder, run, write_checkpoint, write_shard

from mla_convert.strict_json import dump_json
from mla_convert.tensors import TensorSpec


@pytest.fixture
def here() -> Iterator[Path]:
    with memory_folder() as folder:
        write_checkpoint(folder / "model")
        yield folder


def printed(here: Path, *arguments: str) -> str:
    """stdout, with the digest of the plan (it covers modification times) and the folder's name masked."""
    done = run(*arguments, cwd=here)
    assert done.returncode == 0, done.stderr
    return re.sub(r"\b[0-9a-f]{64}\b", "DIGEST", done.stdout).replace(str(here), "HERE")


def test_inspect(here: Path) -> None:
    assert printed(here, "inspect", "model") == (
        "path               model\n"
        "model              deepseek_v3\n"
        "format             Hugging Face safetensors, 5 files\n"
        "tensors            14 (BF16 142.3 kB)\n"
        "size               144.0 kB\n"
        "layout             combined\n"
        "KV up-projections  24.6 kB, 17.27% of the tensors\n"
        "sparse attention   none (dense)\n"
        "tensor parallel    legal: 1, 2, 4\n"
        "\n"
        "layers  heads  nope  rope   v  rank  layout    stored as  also\n"
        "0-2         4    16     8  16    32  combined  BF16       -\n"
    )


def test_inspect_a_mixed_model(here: Path) -> None:
    """An indexer in one layer, an MTP layer, and a layer that is no attention at all."""
    mixed = here / "mixed"
    mixed.mkdir()
    indexer = TensorSpec("model.layers.0.self_attn.indexer.wq_b.weight", "BF16", (16, 48))
    write_shard(mixed / "model.safetensors", [*attention(0), indexer, *attention(2), *attention(3)])
    facts = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 8}
    (mixed / "config.json").write_bytes(dump_json({**CONFIG, **facts}))
    assert printed(here, "inspect", "mixed") == (
        "path                mixed\n"
        "model               deepseek_v3\n"
        "format              Hugging Face safetensors, 1 file\n"
        "tensors             13 (BF16 102.9 kB)\n"
        "size                104.3 kB\n"
        "layout              combined\n"
        "KV up-projections   24.6 kB, 23.88% of the tensors\n"
        "sparse attention    DSA, top-k 8, 2 index heads x 8, on 1 layer (2 share one)\n"
        "layers without MLA  1\n"
        "tensor parallel     legal: 1, 2, 4\n"
        "\n"
        "layers  heads  nope  rope   v  rank  layout    stored as  also\n"
        "0           4    16     8  16    32  combined  BF16       indexer\n"
        "2           4    16     8  16    32  combined  BF16       -\n"
        "3           4    16     8  16    32  combined  BF16       MTP\n"
    )


DETAILS = (
    "layers     0-2: 4 heads, nope 16, rope 8, v 16, rank 32, BF16\n"
    "rewritten  3 files, {rewritten}\n"
    "unchanged  5 files, 44.0 kB\n"
    "edited     config.json, model.safetensors.index.json\n"
)


def test_split(here: Path) -> None:
    details = DETAILS.format(rewritten="115.1 kB")
    planned = f"would split model\noutput     HERE/model-split\n{details}plan       DIGEST\n"
    assert printed(here, "split", "model", "--dry-run") == planned
    assert printed(here, "split", "model") == (
        f"split model\noutput     HERE/model-split\n{details}"
        "moved      2.75 kB copied, 41.2 kB hard-linked, 115.1 kB written\n"
        "time       under a second\n"
        "plan       DIGEST\n"
        "\n"
        "next: mla-convert verify HERE/model-split\n"
    )
    assert printed(here, "split", "model") == (
        f"split: already done model\noutput     HERE/model-split\n{details}"
        "plan       DIGEST\n"
        "\n"
        "next: mla-convert verify HERE/model-split\n"
    )
    assert printed(here, "split", "model", "-o", "my out", "--link", "copy").endswith(
        "moved      44.0 kB copied, 115.1 kB written\n"
        "time       under a second\n"
        "plan       DIGEST\n"
        "\n"
        "next: mla-convert verify 'my out'\n"
    )


def test_combine(here: Path) -> None:
    run("split", "model", cwd=here)
    details = DETAILS.format(rewritten="102.8 kB")
    planned = f"would combine model-split\noutput     HERE/model-split-combined\n{details}plan       DIGEST\n"
    assert printed(here, "combine", "model-split", "--dry-run") == planned
    assert printed(here, "combine", "model-split", "-o", "whole") == (
        f"combine model-split\noutput     whole\n{details}"
        "moved      2.75 kB copied, 41.2 kB hard-linked, 102.8 kB written\n"
        "time       under a second\n"
        "plan       DIGEST\n"
    )


def test_verbose_names_every_file(here: Path) -> None:
    done = run("split", "model", "-v", "--workers", "1", cwd=here)
    assert done.stderr == (
        "model-1.safetensors: rewrite\n"
        "model-2.safetensors: rewrite\n"
        "model-3.safetensors: rewrite\n"
        "model-4.safetensors: hard\n"
        "model-5.safetensors: hard\n"
        "generation_config.json: copy\n"
        "code/modeling.py: copy\n"
        "tokenizer.json: copy\n"
        "split: 160.6 kB in less than 1 s\n"
    )


@pytest.mark.parametrize(
    ("code", "arguments", "stderr"),
    [
        (2, ["split", "absent"], "error: absent does not exist\n"),
        (
            4,
            ["combine", "model"],
            "error: nothing to combine: all 3 attention blocks are stored combined already, "
            "model.layers.0.self_attn among them\n"
            "  model.layers.0.self_attn.\n"
            "  model.layers.1.self_attn.\n"
            "  model.layers.2.self_attn.\n"
            "hint: use `mla-convert split` for the other direction\n",
        ),
        (
            4,
            ["split", "model", "--dequantize", "bf16"],
            "error: --dequantize: the KV up-projections are not quantised (BF16)\nhint: run split without it\n",
        ),
        (
            2,
            ["split", "model", "-o", "model/out"],
            "error: the output model/out lies inside the input model\nhint: choose another output with -o\n",
        ),
        (
            2,
            ["split", "--foo"],
            "Usage: mla-convert split [OPTIONS] {PATH}\n"
            "Try 'mla-convert split -h' for help.\n"
            "\n"
            "Error: No such option: --foo (Possible options: --color)\n",
        ),
    ],
)
def test_errors(here: Path, code: int, arguments: list[str], stderr: str) -> None:
    assert fails(code, *arguments, cwd=here) == stderr


def test_an_error_as_json(here: Path) -> None:
    assert fails(2, "split", "absent", "--json", cwd=here) == (
        '{"event": "error", "message": "absent does not exist", "error": "UsageError", "exit_code": 2, '
        '"hint": null, "details": []}\n'
    )
