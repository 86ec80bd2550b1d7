"""A report as one HTML page that needs nothing from elsewhere."""

from html import escape

from . import report as rp
from .plot import svg
from .table import HEADINGS, cells, headline, lines, number, verdict

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: bottom; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
.same td:nth-child(2) { color: #00694d; } .differs td:nth-child(2) { color: #b04400; font-weight: 600; }
.verdict { font-size: 1.2rem; font-weight: 600; } .ok { color: #00694d; } .bad { color: #b04400; }
.none td { color: #777; } svg { max-width: 100%; height: auto; } summary { cursor: pointer; } code { font-size: 13px; }
"""
_CLASSES = {rp.SAME: "same", rp.DIFFERS: "differs", rp.FAILED: "differs", rp.NOT_APPLICABLE: "none"}


def page(report: rp.Report) -> str:
    """The whole page as text."""
    facts = report.subject
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    compared = f"Compared: {facts['compared']} of {', '.join(map(str, facts['tokens']))} tokens, bit by bit."
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(facts['model'])}: {'same bits' if report.ok else 'verify'}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(facts['model'])}</h1>",
        f"<p class='verdict {'ok' if report.ok else 'bad'}'>{escape(verdict(report))}</p>",
        f"<p>{escape(headline(report))}. {escape(compared)} {escape(versions)}; "
        f"at most {report.budget} cases an axis, {report.seconds:.0f} s.</p>",
        _table(HEADINGS, [(cells(axis), _CLASSES[axis.status]) for axis in report.axes]),
        svg(report),
        _list("Where it first differs", [axis for axis in report.axes if axis.culprit is not None]),
        "<h2>Left out, and why</h2><ul>",
        *(f"<li>{escape(sentence)}</li>" for sentence in _reasons(report)),
        "</ul><details><summary>Every case</summary>",
        _table(
            ("axis", "case", "text", "values", "differ", "max abs", "max ulp", "max KL"),
            [(_case_cells(axis.axis, case), "") for axis in report.axes for case in axis.cases],
        ),
        "</details></body></html>",
    ]
    return "\n".join(parts)


def _reasons(report: rp.Report) -> list[str]:
    places = sum(axis.culprit is not None for axis in report.axes)
    return [sentence for _, sentence in lines(report)[places:]] or ["nothing"]


def _case_cells(axis: str, case: rp.CaseResult) -> tuple[str, ...]:
    d = case.difference
    ulp = "-" if d.max_ulp is None else f"{d.max_ulp:,}"
    return (
        axis,
        case.name,
        str(case.text),
        f"{d.values:,}",
        f"{d.differing:,}",
        number(d.max_abs),
        ulp,
        number(d.max_kl),
    )


def _table(headings, rows) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join(
        f"<tr class='{kind}'>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row, kind in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _list(title: str, axes: list[rp.AxisResult]) -> str:
    items = "".join(
        f"<li>{escape(axis.axis)}, {escape(axis.culprit.case)}: <code>{escape(str(axis.culprit))}</code></li>"
        for axis in axes
    )
    return f"<h2>{title}</h2><ul>{items}</ul>" if axes else ""
