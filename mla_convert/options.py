"""The options that several commands share, each with its one help text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mla_convert.errors import UsageError
from mla_convert.megatron.eras import IndexerRows, Norms
from mla_convert.storage import LinkMode

if TYPE_CHECKING:
    from mla_convert.megatron.changes import MegatronOptions

    Location = Path | str  # a str is hf://org/name[@revision]
else:
    Location = Path  # Typer knows no unions; the parser decides

#: More than processors as a rule: workers mostly wait for the file system.
DEFAULT_WORKERS = 4


def parse_location(text: str) -> Location:
    """A path, or a text that names a repository on the Hub."""
    return text if text.startswith("hf://") else Path(text)


def parse_layers(text: str) -> tuple[int, ...]:
    """``0,3,60-61`` -> (0, 3, 60, 61).

    Raises:
        UsageError: It is no such list.
    """
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) - int(first) > 100_000:
            raise UsageError(f"--layers {text}: {part.strip()!r} is neither a layer nor a range such as 3-7")
        layers |= set(range(int(first), int(last or first) + 1))
    return tuple(sorted(layers))


Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout, and events as JSON lines on stderr."),
]
Quiet = Annotated[
    int,
    typer.Option("-q", "--quiet", count=True, help="Print only the result; twice: only errors.", metavar=""),
]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, help="Print more; twice: tracebacks too.", metavar="")
]
Color = Annotated[
    Literal["auto", "always", "never"],
    typer.Option(
        "--color", help="When to use colour; NO_COLOR and FORCE_COLOR are honoured.", metavar="WHEN"
    ),
]

Source = Annotated[
    Location,
    typer.Argument(
        help="A checkpoint folder, one .safetensors file, or hf://org/name[@revision] on the Hub.",
        metavar="PATH",
        parser=parse_location,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="Folder to write; default: beside PATH, or here if that is hf://.",
        metavar="OUT",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and write nothing.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output of this tool, atomically.")
]
Restart = Annotated[bool, typer.Option("--restart", help="Discard an unfinished run instead of resuming it.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        max=256,
        envvar="MLA_CONVERT_WORKERS",
        help="Files moved at a time; default: 4.",
        metavar="N",
    ),
]
Link = Annotated[
    LinkMode,
    typer.Option(
        "--link",
        help="How unchanged weight files reach the output: auto, reflink, hard or copy.",
        metavar="MODE",
    ),
]
Checksum = Annotated[
    bool, typer.Option("--checksum", help="Read every file and record its sha256 in the manifest.")
]
TrustShapes = Annotated[
    bool, typer.Option("--trust-shapes", help="Let tensor shapes win where config.json contradicts them.")
]

# For torch_dist checkpoints of Megatron alone

NormsWanted = Annotated[
    Norms | None,
    typer.Option(
        "--norms",
        help="Megatron: where the norms of the latents go: standalone (absorbed and sparse attention) or fused with "
        "the projection behind (standard MLA); default: where they are.",
        metavar="PLACE",
    ),
]
IndexerWanted = Annotated[
    IndexerRows | None,
    typer.Option(
        "--indexer",
        help="Megatron: rope-last (to 0.18), rope-first (from 0.19) or rope-first-interleaved: the order of the "
        "indexer's rows that is wanted; default: as it is.",
        metavar="ORDER",
    ),
]
IndexerFrom = Annotated[
    IndexerRows | None,
    typer.Option(
        "--indexer-from",
        help="Megatron: the order that the indexer's rows have, where the checkpoint does not tell.",
        metavar="ORDER",
    ),
]
DropOptimizer = Annotated[
    bool, typer.Option("--drop-optimizer", help="Megatron: leave the optimizer's state out.")
]
DropFp8State = Annotated[
    bool,
    typer.Option(
        "--drop-fp8-state",
        help="Megatron: replace delayed-scaling FP8 states of the projections that change by empty ones.",
    ),
]


def megatron_options(
    norms: Norms | None,
    indexer: IndexerRows | None,
    indexer_from: IndexerRows | None,
    drop_optimizer: bool,
    drop_fp8_state: bool = False,
) -> MegatronOptions:
    """What was asked for, for torch_dist checkpoints alone."""
    from mla_convert.megatron.changes import MegatronOptions

    return MegatronOptions(norms, indexer, indexer_from, drop_optimizer, drop_fp8_state)
