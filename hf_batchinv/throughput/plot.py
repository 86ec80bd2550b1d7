"""Rows to a PNG for each model: our speed over the batch. Needs matplotlib (`pip install hf_batchinv[bench]`)."""

from collections.abc import Sequence
from pathlib import Path

from ..bench.plot import COLOURS, MARKERS, SPEED, Panel, Series, draw_panel


def panels_of(rows: Sequence[dict]) -> list[Panel]:
    """A panel for each op and cache, a line for each length of the prompt; rows without a time are left out."""
    panels: dict[str, Panel] = {}
    lengths = sorted({row["prompt"] for row in rows})
    for row in sorted(rows, key=lambda row: (row["prompt"], row["batch"])):
        if row["ratio"] is None:
            continue
        title = f"{row['op']}, {row['cache']} cache" if row["op"] == "generate" else row["op"]
        panel = panels.setdefault(title, Panel(title, "sequences in the batch", SPEED))
        label = f"{row['prompt']} tokens"
        if not panel.series or panel.series[-1].label != label:
            place = lengths.index(row["prompt"])
            panel.series.append(Series(label, COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]))
        panel.series[-1].points.append((row["batch"], row["ratio"]))
    return [panels[title] for title in sorted(panels)]


def draw(model: str, rows: Sequence[dict], env: dict, path: Path) -> None:
    """Draw a model's rows, of which at least one has a time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = panels_of(rows)
    figure = Figure(figsize=(1.5 + 4.2 * len(panels), 4.6), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    where = f"{env['device']}, torch {env['torch']}, transformers {env['transformers']}, {env['date']}"
    figure.suptitle(f"{model}, {rows[0]['dtype']}, batch invariant, beside stock\n{where}", fontsize=11)
    for panel, ax in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        draw_panel(panel, ax)
        ax.legend(loc="lower right", fontsize=8, frameon=False)
    figure.savefig(path)
