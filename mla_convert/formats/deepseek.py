"""DeepSeek's inference shards: one file a rank, ``model{rank}-mp{ranks}.safetensors``, with names of their own.

The names are those of the published conversion script, as a table that works in both directions. ``wq_b`` stands for
two things there: the query up-projection, and the indexer's, which keeps its name. Nothing is left out: an MTP layer
keeps its tensors, under the names that the script's table gives their parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mla_convert.errors import CannotError

#: Hugging Face's word for each part of a name, and DeepSeek's.
WORDS: dict[str, str] = {
    "embed_tokens": "embed",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attn",
    "mlp": "ffn",
    "q_proj": "wq",
    "q_a_proj": "wq_a",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "wkv_b",
    "k_b_proj": "wk_b",
    "v_b_proj": "wv_b",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
_BACK = {theirs: ours for ours, theirs in WORDS.items()}
#: Modules whose parts have the same names on both sides.
_KEPT = frozenset({"indexer", "shared_head"})
#: First words of the language model's names; anything else (a vision tower) keeps its name.
_FIRST = frozenset({"embed", "norm", "layers", "blocks", "mtp_layers", "mtp"})
_RANK_FILE = re.compile(r"model(\d+)-mp(\d+)\.safetensors")

DEFAULT_STEM = "model."


def rank_file(rank: int, ranks: int) -> str:
    """The file of one rank."""
    return f"model{rank}-mp{ranks}.safetensors"


def parse_rank_file(name: str) -> tuple[int, int] | None:
    """(rank, ranks) of a file's name; None if it is none of these files."""
    found = _RANK_FILE.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def to_deepseek(name: str, stem: str = DEFAULT_STEM) -> str:
    """A tensor's name in DeepSeek's inference code.

    Args:
        name: Its Hugging Face name.
        stem: What stands before ``layers.`` in the checkpoint's names.

    Raises:
        CannotError: The name could not be turned back into what it was.
    """
    for candidate in (_translated(name, stem), name):
        if from_deepseek(candidate, stem) == name:
            return candidate
    raise CannotError(
        f"{name} has no name in DeepSeek's inference format",
        hint="--to huggingface keeps every name, with one folder for each rank",
    )


def _translated(name: str, stem: str) -> str:
    outer = stem.removesuffix("model.")
    if name.startswith(outer + "lm_head."):
        return "head." + _fields_to(name[len(outer) + len("lm_head.") :].split("."))
    if not name.startswith(stem):
        return name
    return _fields_to(_words(name[len(stem) :].split("."), WORDS))


def from_deepseek(name: str, stem: str = DEFAULT_STEM) -> str:
    """The Hugging Face name of a tensor of DeepSeek's inference code; the inverse of :func:`to_deepseek`."""
    words = name.split(".")
    if words[0] == "head":
        return f"{stem.removesuffix('model.')}lm_head." + _fields_from(words[1:])
    if words[0] not in _FIRST:
        return name
    return stem + _fields_from(_words(words, _BACK))


def _words(words: Iterable[str], table: dict[str, str]) -> list[str]:
    found: list[str] = []
    for word in words:
        found.append(word if found and found[-1] in _KEPT else table.get(word, word))
    return found


def _fields_to(words: list[str]) -> str:
    if words[-1] == "weight_scale_inv":
        words = [*words[:-1], "scale"]
    elif words[-2:] == ["gate", "e_score_correction_bias"]:
        words = [*words[:-1], "bias"]
    return ".".join(words)


def _fields_from(words: list[str]) -> str:
    if words[-1] == "scale":
        words = [*words[:-1], "weight_scale_inv"]
    elif words[-2:] == ["gate", "bias"]:
        words = [*words[:-1], "e_score_correction_bias"]
    return ".".join(words)
