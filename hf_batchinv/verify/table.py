"""A report in the terminal."""

import io

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from . import report as rp

WIDTH = 120
_STYLES = {rp.SAME: "green", rp.DIFFERS: "red", rp.FAILED: "yellow", rp.NOT_APPLICABLE: "dim"}
HEADINGS = ("axis", "result", "cases", "differ", "values", "differ", "max abs", "max ulp", "max KL", "other\ntokens")


def cells(axis: rp.AxisResult) -> tuple[str, ...]:
    """The row of an axis, a string for each of HEADINGS."""
    if not axis.cases:
        return (axis.axis, axis.status, *[""] * 8)
    return (
        axis.axis,
        axis.status,
        str(len(axis.cases)),
        str(axis.differing_cases),
        f"{axis.values:,}",
        f"{axis.differing_values:,}",
        number(axis.max_abs),
        "-" if axis.max_ulp is None else f"{axis.max_ulp:,}",
        number(axis.max_kl),
        "-" if axis.changed_tokens is None else str(axis.changed_tokens),
    )


def number(value: float | None) -> str:
    """A measure with two digits; "-" if there is none."""
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def headline(report: rp.Report) -> str:
    """What was run, in one line."""
    facts = report.subject
    state = "converted" if facts["converted"] else "stock"
    where = f"{facts['dtype']}, {facts['device']}, attention {facts['attention']}"
    return f"{facts['model']} ({facts['kind']}), {state}, {where}"


def verdict(report: rp.Report) -> str:
    """The answer, in one sentence."""
    differing = [axis.axis for axis in report.axes if axis.status == rp.DIFFERS]
    failed = [axis.axis for axis in report.axes if axis.status == rp.FAILED]
    if differing:
        return f"Results depend on: {', '.join(differing)}."
    if failed:
        return f"No verdict, these could not run: {', '.join(failed)}."
    return "Same bits on every axis that applies." if report.ok else "No axis applies, so nothing was compared."


def lines(report: rp.Report) -> list[tuple[str, str]]:
    """(style, sentence) for what the table has no room for: places, notes, reasons."""
    found = []
    for axis in report.axes:
        if axis.culprit is not None:
            found.append(("", f"{axis.axis}, {axis.culprit.case}: first differs {axis.culprit}"))
    for axis in report.axes:
        if axis.reason:
            found.append((_STYLES[axis.status], f"{axis.axis} {axis.status}: {axis.reason}"))
        found += [("dim", f"{axis.axis}, left out: {note}") for note in axis.notes]
    return found


def renderable(report: rp.Report) -> Group:
    """The report for a rich console."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if index < 2 else "right", no_wrap=True)
    for axis in report.axes:
        table.add_row(*map(escape, cells(axis)), style=_STYLES[axis.status])
    details = [Text(sentence, style) for style, sentence in lines(report)]
    end = Text(verdict(report), "bold green" if report.ok else "bold red")
    return Group(Text(headline(report)), table, *details, *([Text()] if details else []), end)


def text(report: rp.Report) -> str:
    """The report as plain text, without colours."""
    out = io.StringIO()
    # Without force_jupyter=False, rich shows it in a notebook by itself and leaves `out` empty.
    Console(file=out, width=WIDTH, color_system=None, force_jupyter=False).print(renderable(report))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
