"""How results look to a person. Each function takes plain data or a result and prints it on a Rich console."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mla_convert.api import Conversion
from mla_convert.comparing import SYMBOLS
from mla_convert.console import facts, table
from mla_convert.inspection import group_blocks
from mla_convert.progress import format_bytes, format_duration
from mla_convert.streams import shell_word

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

    from mla_convert.comparing import Comparison
    from mla_convert.demo import DemoResult
    from mla_convert.push import PushResult
    from mla_convert.verification.result import LayerResult, VerifyReport
    from mla_convert.warmup import WarmupReport

_FORMATS = {
    "huggingface": "Hugging Face safetensors",
    "deepseek": "DeepSeek inference shards",
    "torch_dist": "Megatron torch_dist",
    "torch": "Megatron torch (mp_rank files)",
}
_WAYS = {
    "reflink": "shared by reflink",
    "hard": "hard-linked",
    "copy": "copied",
    "rewrite": "written",
}


def show_inspection(console: RichConsole, document: Mapping[str, Any]) -> None:
    """The result of ``inspect``."""
    size = document["bytes"]
    kind = document["model_type"] or ("Megatron" if "megatron" in document else "no config.json")
    if document["text_model_type"] not in (None, document["model_type"]):
        kind += f" ({document['text_model_type']})"
    share = size["up_projections"] / size["tensors"] if size["tensors"] else 0
    ranks = f", {_count(document['ranks'], 'rank')}" if document["ranks"] > 1 else ""
    pairs: list[tuple[str, object]] = [
        ("path", document["path"]),
        ("model", kind),
        ("format", f"{_FORMATS[document['format']]}, {_count(document['files'], 'file')}" + ranks),
        ("tensors", f"{document['tensors']} ({_dtypes(document['dtypes'])})"),
        ("size", format_bytes(size["files"])),
        ("layout", document["layout"]),
        ("KV up-projections", f"{format_bytes(size['up_projections'])}, {share:.2%} of the tensors"),
        ("sparse attention", _sparse(document["sparse_attention"])),
    ]
    pairs += _megatron(document.get("megatron"))
    stated = size["stated_total_size"]
    if stated is not None and stated != size["tensors"]:
        pairs.append(("index total_size", f"says {stated}, the tensors have {size['tensors']} bytes"))
    if document["layers_without_mla"]:
        pairs.append(("layers without MLA", len(document["layers_without_mla"])))
    parallel = document["tensor_parallel"]
    pairs.append(("tensor parallel", "legal: " + ", ".join(map(str, parallel["legal"]))))
    for illegal, reason in parallel["illegal"].items():
        pairs.append((f"  not {illegal}", reason))
    console.print(facts(pairs))
    console.print()
    console.print(
        table(
            ("layers", "heads", "nope", "rope", "v", "rank", "layout", "stored as", "also"),
            [
                (
                    group["layers"],
                    *(group[name] for name in ("heads", "nope", "rope", "v", "rank", "layout", "storage")),
                    _also(group),
                )
                for group in document["attention"]
            ],
            right=("heads", "nope", "rope", "v", "rank"),
        )
    )


def show_conversion(console: RichConsole, result: Conversion) -> None:
    """The result of ``split`` or ``combine``, planned or done."""
    plan, report = result.plan, result.report
    done = "would " + plan.operation if report is None else plan.operation
    if report is not None and report.already_done:
        done = f"{plan.operation}: already done"
    pairs: list[tuple[str, object]] = [("output", result.output)]
    for group in group_blocks(result.inventory, result.blocks):
        label = "MTP layer" if group.first.is_mtp else "layers"
        pairs.append((label, f"{group.layers}: {group.first.dims}, {group.storage(result.inventory)}"))
    if plan.operation == "reshard":
        count, experts = plan.options["tp"], plan.options["experts"]
        ranks = f"{_count(count, 'rank')}, {_FORMATS[plan.options['to']]}"
        is_dealt = count > 1 and plan.options["to"] != "torch_dist"
        pairs.append(("written as", ranks + (f", experts by {experts.upper()}" if is_dealt else "")))
    pairs.append(
        ("rewritten", f"{_count(len(plan.rewritten), 'file')}, {format_bytes(plan.bytes_rewritten)}")
    )
    pairs.append(("unchanged", f"{_count(len(plan.carried), 'file')}, {format_bytes(plan.bytes_carried)}"))
    pairs.append(("edited", ", ".join(file.name for file in plan.generated) or None))
    if report is not None and not report.already_done:
        ways = [f"{format_bytes(n)} {_WAYS[way]}" for way, n in sorted(report.bytes_by_way.items()) if n]
        pairs.append(("moved", ", ".join(ways) or "nothing"))
        if report.resumed_files:
            pairs.append(("resumed", f"{_count(report.resumed_files, 'file')} finished by an earlier run"))
        pairs.append(("time", format_duration(report.seconds) if report.seconds >= 1 else "under a second"))
    pairs.append(("plan", plan.digest()))
    console.print(facts(pairs, title=f"{done} {plan.catalogue.label}"))
    if report is not None and plan.operation in ("split", "reshard") and plan.options.get("to") != "torch":
        console.print(f"\nnext: mla-convert verify {shell_word(str(result.output))}")


def show_comparison(console: RichConsole, result: Comparison, *, everything: bool) -> None:
    """The result of ``diff``: a line for each tensor that is not the same on both sides, or for each tensor."""
    rows = [
        (line.symbol, line.name, line.note or "-")
        for line in result.lines
        if everything or line.symbol != "="
    ]
    if rows:
        console.print(table(("", "tensor", "found"), rows))
        console.print()
    counts = {symbol: sum(line.symbol == symbol for line in result.lines) for symbol in SYMBOLS}
    pairs = [(f"{symbol} {SYMBOLS[symbol]}", count) for symbol, count in counts.items() if count]
    console.print(facts([("A", result.left), ("B", result.right), *pairs]))
    console.print(f"\n{'✓ the same tensors' if result.is_same else '✗ they DIFFER'}")


def show_verification(console: RichConsole, report: VerifyReport) -> None:
    """The result of ``verify``: how it was run, every check, and a line for each layer."""
    settings = report.settings
    pairs: list[tuple[str, object]] = [
        ("against", f"{report.against} ({report.against_note})" if report.against else report.against_note)
    ]
    if settings:
        pairs += [
            ("ran on", ", ".join(settings["devices"])),
            ("backend", f"{settings['backend']} ({settings['backend_reason']})"),
            ("parts", ", ".join(f"{part}: {by}" for part, by in sorted(report.ran.items())) or None),
            (
                "attention",
                f"{settings['blocks']} of {settings['blocks_in_checkpoint']} blocks, {settings['tokens']} tokens, "
                f"{settings['dtype']}" + (", forward and backward" if settings["backward"] else ""),
            ),
            ("ranks", _ranks(settings)),
        ]
    console.print(facts(pairs, title=f"verify {report.path}"))
    console.print()
    marks = {True: "✓", False: "✗", None: "-"}
    console.print(
        table(
            ("level", "check", "", "found"),
            [(c.level, c.name, marks[c.passed], c.summary) for c in report.checks],
        )
    )
    if report.layers:
        console.print()
        console.print(
            table(
                (
                    "layer",
                    "heads",
                    "attention",
                    "cosine",
                    "standard",
                    "absorbed",
                    "limit",
                    "worst head",
                    "worst row",
                    "selection",
                    "",
                ),
                [_layer_row(layer) for layer in report.layers],
                right=("heads", "cosine", "standard", "absorbed", "limit"),
            )
        )
        if any(layer.gradients for layer in report.layers):
            _show_gradients(console, report)
        console.print("errors are relative to float64; limit is what the absorbed path may reach")
    unmodelled = sorted({what for layer in report.layers for what in layer.unmodelled})
    for what in unmodelled:
        console.print(f"not modelled on either side: {what}")
    if report.recorded:
        console.print("recorded in the manifest")
    console.print(
        f"\n{'✓ verified' if report.passed else '✗ NOT verified'} in {format_duration(report.seconds)}"
    )


def show_warmup(console: RichConsole, report: WarmupReport) -> None:
    """The result of ``warmup``: a line for each kernel."""
    built = [seconds for seconds in report.kernels.values() if seconds is not None]
    console.print(
        table(
            ("kernel", "seconds"),
            [(name, "-" if s is None else f"{s:.1f}") for name, s in report.kernels.items()],
            right=("seconds",),
        )
    )
    console.print()
    done = f"{len(built)} compiled or found" if built else f"{len(report.kernels)} to compile"
    console.print(
        facts([("kernels", done), ("cache", report.cache), ("time", format_duration(report.seconds))])
    )


def _ranks(settings: Mapping[str, Any]) -> str:
    tp, cp = settings["tp"], settings["cp"]
    text = _count(tp, "tensor-parallel rank") + (f" x {cp} context-parallel" if cp > 1 else "")
    if settings["process_group"] is not None:
        return f"{text}, {settings['processes']} processes over {settings['process_group']}"
    return text + (", folded into one process" if tp * cp > 1 else "")


def _show_gradients(console: RichConsole, report: VerifyReport) -> None:
    """For each layer the gradient that is closest to its limit; ``--json`` has all of them."""
    rows = []
    for layer in report.layers:
        worst = max(layer.gradients, key=lambda gradient: (not gradient.passed, gradient.strain))
        rows.append(
            (
                layer.layer if layer.layer is not None else layer.prefix,
                f"{sum(gradient.passed for gradient in layer.gradients)} of {len(layer.gradients)}",
                f"{min(gradient.absorbed.cosine for gradient in layer.gradients):.7f}",
                worst.name,
                f"{worst.standard.relative:.1e}",
                f"{worst.absorbed.relative:.1e}",
                f"{worst.limit.relative:.1e}",
                f"{worst.unit} {worst.absorbed.at}: {worst.absorbed.worst:.1e}",
                "✓" if all(gradient.passed for gradient in layer.gradients) else "✗",
            )
        )
    console.print()
    columns = (
        "layer",
        "gradients",
        "lowest cosine",
        "worst of",
        "standard",
        "absorbed",
        "limit",
        "worst part",
    )
    console.print(table((*columns, ""), rows, right=("lowest cosine", "standard", "absorbed", "limit")))


def _layer_row(layer: LayerResult) -> tuple[object, ...]:
    selection = layer.selection
    chosen = "-"
    if selection is not None:
        chosen = f"{selection.missed} of {selection.expected} differ" + (
            ", all ties" if selection.passed and selection.missed else ""
        )
    absorbed = layer.absorbed
    return (
        layer.layer if layer.layer is not None else layer.prefix,
        layer.heads,
        layer.kind,
        f"{layer.cosine:.7f}",
        f"{layer.standard.relative:.1e}",
        f"{absorbed.relative:.1e}",
        f"{layer.limit.relative:.1e}",
        f"{absorbed.worst_head}: {absorbed.head:.1e}",
        f"{absorbed.worst_row}: {absorbed.row:.1e}",
        chosen,
        "✓" if layer.passed else "✗",
    )


def show_demo(console: RichConsole, result: DemoResult) -> None:
    """The result of ``demo``."""
    show_conversion(console, result.split)
    console.print()
    show_verification(console, result.verification)
    console.print()
    marks = {True: "✓", False: "✗"}
    rows = [(name, marks[same]) for name, same in result.identical.items()]
    console.print(table(("combined again, byte for byte", ""), rows))
    if result.kept:
        console.print(f"kept in {result.original.parent}")
    outcome = "✓ demo passed" if result.passed else "✗ demo FAILED"
    console.print(f"\n{outcome}: split, verified and combined in {format_duration(result.seconds)}")


def show_push(console: RichConsole, result: PushResult) -> None:
    """The result of ``push``, planned or done."""
    options, planned = result.options, result.options.dry_run
    where = result.repo_id + ("" if options.revision == "main" else f" ({options.revision})")
    lead = "would push" if planned else "push" if result.committed else "push: nothing to do for"
    there = len(result.files) - len(result.outgoing)
    sent = f"{_count(len(result.outgoing), 'file')}, {format_bytes(result.bytes_outgoing)}"
    pairs: list[tuple[str, object]] = [
        ("repository", result.repository_url + (", new" if result.created else "")),
        ("files", f"{_count(len(result.files), 'file')}, {format_bytes(result.bytes_total)}"),
        ("to send" if planned else "sent", sent),
        ("there already", _count(there, "file")),
        ("verified", "yes" if result.verified else "no"),
        ("left out", "the source's path in the manifest" if result.withheld else None),
    ]
    if result.landed is not None:
        pairs.append(("commit", result.landed.commit))
    if not planned:
        seconds = format_duration(result.seconds) if result.seconds >= 1 else "under a second"
        pairs.append(("time", seconds))
    shown = [pair for pair in pairs if pair[1] is not None]
    console.print(facts(shown, title=f"{lead} {result.path} to {where}"))
    if result.landed is not None:
        console.print(f"\n{result.url}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _dtypes(dtypes: Mapping[str, int]) -> str:
    return ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in dtypes.items())


def _sparse(facts_on_dsa: Mapping[str, Any] | None) -> str:
    if not facts_on_dsa:
        return "none (dense)"
    sharing = facts_on_dsa["layers_sharing_one"]
    text = (
        f"DSA, top-k {facts_on_dsa['topk'] or 'not stated'}, {facts_on_dsa['index_heads']} index heads x "
        f"{facts_on_dsa['index_dim']}, on {_count(facts_on_dsa['layers_with_indexer'], 'layer')}"
    )
    return text + (f" ({sharing} share one)" if sharing else "")


def _megatron(found: Mapping[str, Any] | None) -> list[tuple[str, object]]:
    """What only a checkpoint of Megatron has."""
    if not found:
        return []
    indexer, optimizer = found["indexer"], found["optimizer"]
    pairs: list[tuple[str, object]] = [
        ("iteration", found["iteration"]),
        ("layers", found["layers"]),
        ("norms of the latents", found["norms"]),
        ("common state", found["common_state"]),
        ("pipeline, experts", found.get("ranks")),
    ]
    if indexer:
        pairs.append(("indexer rows", indexer["rows"] or "not told: give --indexer-from to migrate them"))
    if optimizer:
        states = ", ".join(optimizer["states"]) if optimizer["by_name"] else "not by name"
        size = f"{format_bytes(optimizer['bytes'])}: " if optimizer["bytes"] is not None else ""
        pairs.append(("optimizer", size + states))
    return [pair for pair in pairs if pair[1] is not None]


def _also(group: Mapping[str, Any]) -> str:
    notes = [name for name, has in (("indexer", group["indexer"]), ("MTP", group["mtp"])) if has]
    return ", ".join([*notes, *([group["note"]] if group["note"] else [])]) or "-"
