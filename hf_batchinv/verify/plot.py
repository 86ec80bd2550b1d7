"""A report as a picture. Needs matplotlib (`pip install hf_batchinv[bench]`), imported when something is drawn."""

import io
import math

from . import report as rp
from .subject import VerifyError
from .table import headline, verdict

# The first of Okabe and Ito's colours: they stand out on white, also to colour-blind readers.
SAME_COLOUR, DIFFERS_COLOUR, NEUTRAL = "#009E73", "#D55E00", "#999999"
LINE_COLOURS = ("#D55E00", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#8B6914", "#009E73")
MOST_LINES = 6


def png(report: rp.Report) -> bytes:
    """The picture as the bytes of a PNG file."""
    return _drawn(report, "png")


def svg(report: rp.Report) -> str:
    """The picture as SVG, to stand inside a page."""
    text = _drawn(report, "svg").decode()
    return text[text.index("<svg") :]


def _drawn(report: rp.Report, kind: str) -> bytes:
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise VerifyError("plots need matplotlib, which is not installed; pip install hf_batchinv[bench]") from error
    with rc_context({"svg.hashsalt": "hf_batchinv", "svg.fonttype": "none", "font.size": 9}):
        height = 1.6 + 0.32 * len(report.axes)
        figure = Figure(figsize=(11, height + 2.9), layout="constrained", dpi=110)
        FigureCanvasAgg(figure)
        figure.suptitle(f"{headline(report)}\n{verdict(report)}", fontsize=11, wrap=True)
        top, bottom = figure.subfigures(2, 1, height_ratios=(height, 2.9))
        left, right = top.subplots(1, 2, sharey=True)
        _bars(left, report, "share of values with other bits", _share, "{:.2%}".format)
        _bars(right, report, f"largest difference of {report.subject['compared']}", _largest, "{:.1e}".format, log=True)
        _tokens(bottom.subplots(1, 1), report)
        out = io.BytesIO()
        figure.savefig(out, format=kind, metadata={"Date": None, "Creator": None} if kind == "svg" else None)
    return out.getvalue()


def _share(axis: rp.AxisResult) -> float | None:
    return axis.differing_values / axis.values if axis.values else None


def _largest(axis: rp.AxisResult) -> float | None:
    return axis.max_abs


def _bars(ax, report: rp.Report, title: str, measure, written, log: bool = False) -> None:
    """A bar for each axis; where there is none, a word says why."""
    values = [measure(axis) for axis in report.axes]
    drawn = [value for value in values if value and math.isfinite(value)]
    lowest, highest = min(drawn, default=1.0), max(drawn, default=1.0)
    left, right = (lowest / 10, highest * (highest / lowest * 10) ** 0.3) if log else (0.0, 1.3 * highest)
    if log:
        from matplotlib.ticker import NullFormatter

        ax.set_xscale("log")
        ax.xaxis.set_minor_formatter(NullFormatter())  # they overlap within one decade
    ax.set_xlim(left, right)
    lengths = [min(value or 0.0, highest) - left if value else 0.0 for value in values]
    ax.barh(range(len(values)), lengths, left=left, color=DIFFERS_COLOUR, height=0.7)
    for index, (axis, value) in enumerate(zip(report.axes, values, strict=True)):
        word, colour = (written(value), DIFFERS_COLOUR) if value else ("0", SAME_COLOUR)
        if axis.status in (rp.NOT_APPLICABLE, rp.FAILED) and not value:
            word, colour = axis.status, NEUTRAL
        end = min(value, highest) if value else left
        ax.annotate(f" {word}", (end, index), va="center", fontsize=8, color=colour)
    ax.set_yticks(range(len(values)), [axis.axis for axis in report.axes])
    if not ax.yaxis_inverted():
        ax.invert_yaxis()
    ax.margins(y=0.02)
    ax.set_title(title, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


def _tokens(ax, report: rp.Report) -> None:
    """Along the sequence: how many values of each token differ, in the worst case of each axis."""
    ax.set_title("values with other bits by token, worst case of each axis", fontsize=10)
    ax.set_xlabel("token")
    ax.set_ylabel("share of a token's values")
    ax.set_ylim(-0.03, 1.03)
    ax.spines[["top", "right"]].set_visible(False)
    worst = [max(axis.cases, key=lambda case: case.difference.differing) for axis in report.axes if axis.cases]
    named = [(axis.axis, case) for axis, case in zip([a for a in report.axes if a.cases], worst, strict=True)]
    named = sorted(named, key=lambda item: -item[1].difference.differing)[:MOST_LINES]
    differing = [item for item in named if item[1].difference.differing]
    for index, (axis, case) in enumerate(differing or named[:1]):
        counts = case.difference.per_token
        width = case.difference.values / len(counts)
        colour = LINE_COLOURS[index % len(LINE_COLOURS)] if differing else SAME_COLOUR
        label = f"{axis}: {case.name}" if differing else "every axis"
        ax.plot([count / width for count in counts], color=colour, marker=".", markersize=4, linewidth=1, label=label)
    if named:
        ax.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
        ax.set_xlim(-0.5, max(math.ceil(len(case.difference.per_token)) for _, case in named) - 0.5)
