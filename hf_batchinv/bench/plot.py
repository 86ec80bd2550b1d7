"""Rows to one PNG per op: our speed beside stock, and how near a call comes to the machine's limit.

Needs matplotlib (`pip install hf_batchinv[bench]`), imported when something is drawn.
"""

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .cases import EXPERTS, LINEAR_WEIGHTS, VARIANTS
from .summary import PEERS

MODELS = {
    "linear": {(n, k): model for n, k, model in LINEAR_WEIGHTS},
    "grouped_linear": {(n, k): model for *_, n, k, model in EXPERTS},
}
MOST_WEIGHTS = 10  # lines of one panel; more are spread over a pair of panels for each model
SPEED, ROOF = "speed, stock = 1", "share of the machine's limit"
MARKERS = "osD^vPX*"
# A colour for each model or head shape; the first of Okabe and Ito's that stand out on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#8B6914")


@dataclass
class Series:
    """A line of a panel: points (x, y), with the style of its label in every panel."""

    label: str
    colour: str
    marker: str
    points: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Panel:
    """A plot: lines over x, or horizontal bars (label, value)."""

    title: str
    x: str
    y: str
    series: list[Series] = field(default_factory=list)
    bars: list[tuple[str, float]] = field(default_factory=list)


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def roof(row: dict) -> float | None:
    """floor_us / ours_us."""
    return None if row["ours_us"] is None else row["floor_us"] / row["ours_us"]


def speed(row: dict) -> float | None:
    return row["ratio"]


# --- rows to panels ---


def _series(rows: Iterable[dict], label: Callable, x: str, y: Callable, styles: dict[str, tuple]) -> list[Series]:
    """Lines by label(row), each point the geometric mean of the rows at one x."""
    values: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if (value := y(row)) is not None:
            values.setdefault(label(row), {}).setdefault(row[x], []).append(value)
    return [
        Series(name, *styles[name], [(at, math.exp(sum(map(math.log, v)) / len(v))) for at, v in sorted(found.items())])
        for name, found in values.items()
    ]


def _styles(labels: Sequence[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """(label, family) -> label: (colour of the family, marker within it)."""
    families = list(dict.fromkeys(family for _, family in labels))
    styles: dict[str, tuple[str, str]] = {}
    for label, family in dict.fromkeys(labels):
        member = sum(1 for other, of in dict.fromkeys(labels) if of == family and other in styles)
        styles[label] = COLOURS[families.index(family) % len(COLOURS)], MARKERS[member % len(MARKERS)]
    return styles


def _weights(op: str, rows: list[dict], x: str, x_label: str) -> list[Panel]:
    """linear and grouped_linear: two panels for each dtype (and model, if there are many weights)."""

    def model(row: dict) -> str:
        return MODELS[op].get((row["N"], row["K"]), "other")

    def weight(row: dict) -> str:
        return f"{row['N']}x{row['K']}"

    def weight_and_model(row: dict) -> str:
        return f"{weight(row)}  {model(row)}"

    panels = []

    def add(title: str, mine: list[dict], label: Callable, styles: dict) -> None:
        panels.append(Panel(f"{title}: speed", x_label, SPEED, _series(mine, label, x, speed, styles)))
        panels.append(Panel(f"{title}: roofline", x_label, ROOF, _series(mine, label, x, roof, styles)))

    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        mine = [row for row in rows if row["dtype"] == dtype]
        if len({weight(row) for row in mine}) <= MOST_WEIGHTS:
            add(dtype, mine, weight_and_model, _styles([(weight_and_model(row), model(row)) for row in mine]))
            continue
        for name in dict.fromkeys(map(model, mine)):
            own = [row for row in mine if model(row) == name]
            add(f"{dtype}, {name}", own, weight, _styles([(weight(row), weight(row)) for row in own]))
    return panels


def _heads(row: dict) -> str:
    return f"{row['heads']}/{row['kv_heads']} heads, D = {row['head_dim']}"


def _attention(rows: list[dict]) -> list[Panel]:
    decode = [row for row in rows if row["case"] == "decode"]
    prefill = [row for row in rows if row["case"] == "prefill"]
    variants = [row for row in rows if "over_plain" in row]

    def by_batch(row: dict) -> str:
        return f"batch {row['batch']}"

    def by_heads_and_batch(row: dict) -> str:
        return f"{_heads(row)}, {'batch 1' if row['batch'] == 1 else 'batch of 2 to 8'}"

    heads_styles = _styles([(_heads(row), _heads(row)) for row in rows])
    batch_styles = _styles([(by_batch(row), by_batch(row)) for row in decode])
    prefill_styles = _styles([(by_heads_and_batch(row), _heads(row)) for row in prefill])
    panels = []
    for heads in dict.fromkeys(map(_heads, decode)):
        mine = [row for row in decode if _heads(row) == heads]
        panels.append(Panel(f"decode: {heads}", "keys", SPEED, _series(mine, by_batch, "kv_len", speed, batch_styles)))
    if decode:
        series = _series(decode, _heads, "kv_len", roof, heads_styles)
        panels.append(Panel("decode: roofline, mean over batches", "keys", ROOF, series))
    for title, y_label, y in (("prefill: speed", SPEED, speed), ("prefill: roofline", ROOF, roof)):
        if prefill:
            series = _series(prefill, by_heads_and_batch, "q_len", y, prefill_styles)
            panels.append(Panel(title, "tokens of a sequence", y_label, series))
    bars = [
        (f"{row['case']}\n{row['heads']}/{row['kv_heads']}, D = {row['head_dim']}", 1 / row["over_plain"])
        for name in VARIANTS
        for row in variants
        if row["case"] == name and row["over_plain"] is not None
    ]
    if variants:
        length = variants[0]["kv_len"]
        panels.append(Panel(f"prefill of {length}: features", "speed, our plain causal attention = 1", "", bars=bars))
    return panels


def _rows(rows: list[dict]) -> list[Panel]:
    """norm and softmax: two panels for each function, a line for each width and dtype."""

    def label(row: dict) -> str:
        return f"{row['columns']} columns, {row['dtype']}"

    styles = _styles([(label(row), label(row)) for row in rows])
    panels = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        panels.append(Panel(f"{case}: speed", "rows", SPEED, _series(mine, label, "rows", speed, styles)))
        panels.append(Panel(f"{case}: roofline", "rows", ROOF, _series(mine, label, "rows", roof, styles)))
    return panels


def panels_of(op: str, rows: list[dict]) -> list[Panel]:
    """The panels of an op's figure."""
    if op == "linear":
        return _weights(op, rows, "M", "rows (M)")
    if op == "grouped_linear":
        return _weights(op, rows, "tokens", "tokens")
    return _attention(rows) if op == "attention" else _rows(rows)


# --- panels to a picture ---


def draw(op: str, rows: list[dict], env: dict, path: Path) -> None:
    """Draw an op's rows into a PNG; rows without a time are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = panels_of(op, rows)
    across = 2 if op != "attention" else min(3, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(6.4 * across, 1 + 4.2 * down), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    where = f"{env['device']}, torch {env['torch']}, Triton {env['triton']}, {env['date']}"
    figure.suptitle(f"{op}, batch invariant, beside {PEERS[op]}\n{where}", fontsize=12)
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for panel, ax in zip(panels, axes, strict=False):
        draw_panel(panel, ax)
        # Both panels of a pair have the same lines: one legend, at the right of the second.
        alone = op == "attention" or ax in axes[1::2] or panel is panels[-1]
        if panel.series and alone:
            ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=7.5, frameon=False, borderaxespad=0)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    figure.savefig(path)


def draw_panel(panel: Panel, ax) -> None:
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel(panel.x, fontsize=9)
    ax.set_ylabel(panel.y, fontsize=9)
    ax.tick_params(labelsize=8)
    if panel.bars:
        labels, values = zip(*panel.bars, strict=True)
        bars = ax.barh(range(len(values)), values, color=COLOURS[0], height=0.7)
        ax.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
        ax.set_yticks(range(len(values)), labels, fontsize=7.5)
        ax.invert_yaxis()
        ax.set_xlim(0, 1.15 * max(1.0, *values))
        ax.axvline(1.0, color="black", linewidth=1)
        return
    for series in panel.series:
        style = {"color": series.colour, "marker": series.marker, "markersize": 4, "linewidth": 1.1}
        ax.plot(*zip(*series.points, strict=True), label=series.label, **style)
    ax.axhline(1.0, color="black", linewidth=1)
    places = sorted({x for series in panel.series for x, _ in series.points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(_spread(places), [f"{place:g}" for place in _spread(places)], rotation=45)
    ax.minorticks_off()
    ax.set_ylim(0, 1.1 * max([1.0, *(y for series in panel.series for _, y in series.points)]))
    ax.grid(alpha=0.25)


def _spread(places: list[float]) -> list[float]:
    """Those of the ascending places that are at least 1.6 times the one before, so that tick labels do not touch."""
    chosen: list[float] = []
    for place in places:
        if not chosen or place >= 1.6 * chosen[-1]:
            chosen.append(place)
    return chosen
