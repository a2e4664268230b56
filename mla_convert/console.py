"""The one place that prints. A command's result goes to stdout, everything else to stderr.

``Console`` renders results and messages in the mode the flags ask for: for people, as JSON, or quietly. Rich
is imported when something is first shown to a person; JSON mode never needs it. Names out of a checkpoint are
untrusted: no markup is interpreted, and control characters show as escapes.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from mla_convert import __version__
from mla_convert.errors import ExitCode, MlaConvertError
from mla_convert.progress import BarProgress, HeartbeatProgress, JsonProgress, Progress, SilentProgress
from mla_convert.streams import Sink, dump, fit, visible

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import ConsoleOptions, RenderResult
    from rich.text import Text

Color = Literal["auto", "always", "never"]

#: A person sees this many lines of an error's details; JSON has them all.
MAX_DETAILS = 8

_CELL_STYLES = {"✓": "green", "✗": "red"}


def _is_dumb_terminal() -> bool:
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def _rich_console(sink: Sink, color: Color) -> RichConsole:
    from rich.console import Console as RichConsole

    class SafeConsole(RichConsole):
        """Strings print literally, and only line breaks among the control characters have an effect."""

        def render_str(self, text: str, **options: Any) -> Text:
            lines = (fit(visible(line), self.encoding) for line in text.split("\n"))
            return super().render_str("\n".join(lines), **options)

    colored = color == "always"
    if color == "auto" and not os.environ.get("NO_COLOR") and not _is_dumb_terminal():
        colored = bool(os.environ.get("FORCE_COLOR")) or sink.isatty()
    return SafeConsole(
        file=cast("IO[str]", sink),
        force_terminal=sink.isatty(),
        color_system="standard" if colored else None,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
    )


class Console:
    """Where a command reports; made once a run, by ``Console.create``.

    ``-q`` leaves warnings, errors and the short form of the result; ``-qq`` leaves errors and no result.
    ``--json`` asks for the document by name, so it is printed even then.
    """

    def __init__(self, *, json: bool, quiet: int, verbose: int, color: Color) -> None:
        self.json, self.quiet, self.verbose, self._color = json, quiet, verbose, color
        self._out, self._err = Sink("stdout"), Sink("stderr")
        self._err_console: RichConsole | None = None
        self._progress: Progress | None = None
        self._has_result = False

    @classmethod
    def create(
        cls, *, json: bool = False, quiet: int = 0, verbose: int = 0, color: Color = "auto"
    ) -> Console:
        """A console for these flags; ``quiet`` counts the q in ``-qq``, ``verbose`` the v in ``-vv``."""
        return cls(json=json, quiet=quiet, verbose=verbose, color=color)

    # Results, on stdout

    def result(
        self,
        document: Mapping[str, Any],
        *,
        human: Callable[[RichConsole], None] | None = None,
        quiet: str | None = None,
    ) -> None:
        """Print what the command was run for; called exactly once.

        Args:
            document: Printed with ``--json``, as one JSON document.
            human: Shows it to a person on the Rich console it is given.
            quiet: The line ``-q`` prints, such as the path of the output; also used when ``human`` is None.
        """
        if self._has_result:
            raise RuntimeError("a command has one result, and it has been printed already")
        self._has_result = True
        self.close()
        if self.json:
            self._out.write(dump(document, self._out.encoding, indent=2) + "\n")
        elif self.quiet == 0 and human is not None:
            human(_rich_console(self._out, self._color))
        elif self.quiet <= 1 and quiet is not None:
            self._out.write_data(quiet + "\n")
        self._out.flush()

    # Messages, on stderr

    def info(self, text: str) -> None:
        """Something worth knowing; hidden by ``-q``."""
        if self.quiet == 0:
            self._say("info", text)

    def detail(self, text: str) -> None:
        """Something only ``-v`` shows."""
        if self.verbose and self.quiet == 0:
            self._say("detail", text)

    def warning(self, text: str, hint: str | None = None) -> None:
        """Something the user should look at; hidden by ``-qq`` only."""
        if self.quiet <= 1:
            self._say("warning", text, hint=hint)

    def error(self, error: MlaConvertError) -> None:
        """Say why the command failed, whatever the flags; the caller exits with ``error.exit_code``."""
        self.close()
        name, code = type(error).__name__, error.exit_code
        self._say("error", error.message, hint=error.hint, details=error.details, name=name, exit_code=code)

    def unexpected(self, error: BaseException) -> None:
        """Admit a bug and ask for a report. ``-vv`` or ``MLA_CONVERT_DEBUG=1`` adds the traceback."""
        self.close()
        debug = self.verbose >= 2 or os.environ.get("MLA_CONVERT_DEBUG", "0") not in ("", "0")
        trace = "".join(traceback.format_exception(error)).splitlines() if debug else []
        name = type(error).__name__
        hint = (
            f"this is a bug in mla-convert {__version__}: please report it with the command and the traceback"
        )
        if not debug:
            hint += " (-vv or MLA_CONVERT_DEBUG=1 shows it)"
        if not self.json:
            for line in trace:
                self._line(line)
            trace = []
        self._say(
            "error", f"unexpected {name}: {error}".removesuffix(": "), hint=hint, details=trace, name=name
        )

    # Progress, on stderr

    def progress(self) -> Progress:
        """The progress that suits stderr: a bar on a terminal, else a line every 30 s, JSON, or nothing."""
        if self._progress is None:
            if self.quiet:
                self._progress = SilentProgress()
            elif self.json:
                self._progress = JsonProgress(self._json_line)
            elif self._err.isatty() and not _is_dumb_terminal():
                self._progress = BarProgress(self._stderr(), show_notes=self.verbose > 0)
            else:
                self._progress = HeartbeatProgress(self._line, show_notes=self.verbose > 0)
        return self._progress

    def close(self) -> None:
        """End a running progress display and give back the cursor. Results and errors do so first."""
        if self._progress is not None:
            self._progress.finish()

    def _stderr(self) -> RichConsole:
        if self._err_console is None:
            self._err_console = _rich_console(self._err, self._color)
        return self._err_console

    def _json_line(self, line: str) -> None:
        self._err.write(line + "\n")
        self._err.flush()

    def _say(
        self,
        event: Literal["info", "detail", "warning", "error"],
        text: str,
        *,
        hint: str | None = None,
        details: Sequence[str] = (),
        name: str = "",
        exit_code: int = ExitCode.UNEXPECTED,
    ) -> None:
        """One message: a JSON object, or for a person one line a part, whatever a name in it contains."""
        if self.json:
            record: dict[str, Any] = {"event": event, "message": text}
            if event == "warning":
                record |= {"hint": hint}
            elif event == "error":
                record |= {"error": name, "exit_code": exit_code, "hint": hint, "details": details}
            self._json_line(dump(record, self._err.encoding))
            return
        lead = {"warning": "bold yellow", "error": "bold red"}.get(event)
        body = "dim" if event == "detail" else ""
        self._line(text, lead=f"{event}: " if lead else "", lead_style=lead or "", style=body)
        for detail in details[:MAX_DETAILS]:
            self._line(detail, lead="  ")
        if len(details) > MAX_DETAILS:
            self._line(f"… and {len(details) - MAX_DETAILS} more (all with --json)", lead="  ")
        if hint is not None:
            self._line(hint, lead="hint: ", lead_style="bold cyan")

    def _line(self, text: str, *, lead: str = "", lead_style: str = "", style: str = "") -> None:
        from rich.text import Text

        console = self._stderr()
        line = fit(visible(text), console.encoding)
        console.print(Text.assemble((lead, lead_style), (line, style)))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Collection[str] = (), title: str = ""
) -> Any:
    """Rows for ``RichConsole.print``, names whole and literal; None shows as "-".

    Off a terminal each row is one line of any length. On a terminal that is too narrow, long cells fold.

    Args:
        columns: The headings; every row has as many cells.
        right: Headings of the columns to align right (numbers); these never fold.
        title: A line above the table.
    """
    marks = [name in right for name in columns]
    return _Rows([columns, *rows], marks, has_heading=True, title=title)


def facts(pairs: Iterable[tuple[str, object]], *, title: str = "") -> Any:
    """Names and values, one pair a line, printed like ``table``."""
    return _Rows(list(pairs), [False, False], has_heading=False, title=title)


class _Rows:
    """What ``table`` and ``facts`` return: laid out when it is known where it will be printed."""

    def __init__(
        self, rows: Sequence[Sequence[object]], right: list[bool], *, has_heading: bool, title: str
    ) -> None:
        names = {None: "-", True: "yes", False: "no"}
        self._rows = [
            [names[v] if v is None or v is True or v is False else str(v) for v in row] for row in rows
        ]
        self._right, self._has_heading, self._title = right, has_heading, title
        if wrong := [row for row in rows if len(row) != len(right)]:
            raise ValueError(f"a row has {len(wrong[0])} cells where the table has {len(right)} columns")

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        def text(cell: str, style: str) -> Text:
            return Text(fit(visible(cell), options.encoding), style=style or _CELL_STYLES.get(cell, ""))

        if self._title:
            yield text(self._title, "bold")
        rows = [
            [text(cell, "bold" if self._has_heading and number == 0 else "") for cell in row]
            for number, row in enumerate(self._rows)
        ]
        widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
        if console.is_terminal and sum(widths) + 2 * (len(widths) - 1) > options.max_width:
            grid = Table.grid(padding=(0, 2, 0, 0))
            for right in self._right:
                grid.add_column(justify="right" if right else "left", no_wrap=right, overflow="fold")
            for row in rows:
                grid.add_row(*row)
            yield grid
            return
        for row in rows:
            line = Text(no_wrap=True, overflow="ignore")
            for cell, width, right in zip(row, widths, self._right, strict=True):
                space = " " * (width - cell.cell_len)
                line.append(space if right else "").append_text(cell).append(("" if right else space) + "  ")
            line.rstrip()
            yield line
