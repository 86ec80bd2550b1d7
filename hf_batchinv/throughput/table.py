"""Rows to tables for a terminal of 80 columns: one of speeds for each model, one of operations for each profile."""

from collections.abc import Sequence
from itertools import zip_longest

from rich import box
from rich.markup import escape
from rich.table import Table

from .measure import SIDES

SHOWN = 8  # operations of a profile


def speeds(model: str, rows: Sequence[dict]) -> Table:
    """Below stock's speed a row is yellow, one whose bits differ is red."""
    title = f"{escape(model)}: speed and memory, stock = 1"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))
    for heading in ("op", "cache"):
        table.add_column(heading, no_wrap=True)
    for heading in ("batch", "prompt", "stock ms", "ours ms", "tokens/s", "speed", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        size = row["op"], row["cache"] or "", str(row["batch"]), str(row["prompt"])
        if not row["bits_ok"]:
            table.add_row(*size, "bits", "differ", style="red")
            continue
        peaks = row["ours_peak_bytes"], row["stock_peak_bytes"]
        table.add_row(
            *size,
            f"{1e3 * row['stock_s']:.2f}",
            f"{1e3 * row['ours_s']:.2f}",
            f"{tokens(row) / row['ours_s']:,.0f}",
            f"{row['ratio']:.2f}",
            "" if None in peaks else f"{peaks[0] / peaks[1]:.2f}",
            style="yellow" if row["ratio"] < 1 else None,
        )
    return table


def tokens(row: dict) -> int:
    """How many tokens are done in `ours_s`: one of every sequence in a step of decoding, else all of them."""
    return row["batch"] * (1 if row["op"] == "generate" else row["prompt"])


def operations(what: str, profiles: Sequence[dict], width: int) -> Table:
    """The largest operations of both sides of a setting, by their share of the busy time, in `width` columns."""
    by_side = {profile["side"]: profile for profile in profiles}
    letters = max(20, (width - 14) // 2)
    table = Table(
        box=box.SIMPLE_HEAD, title=escape(what), title_justify="left", title_style="bold", padding=(0, 1, 0, 0)
    )
    for side in SIDES:
        profile = by_side[side]
        busy, wall = (profile[name] / profile["steps"] / 1e3 for name in ("busy_us", "wall_us"))
        table.add_column("%", justify="right", no_wrap=True)
        table.add_column(f"{side}: busy {busy:.2f} of {wall:.2f} ms")
    for pair in zip_longest(*(by_side[side]["rows"][:SHOWN] for side in SIDES)):
        cells = [("", "") if row is None else (f"{100 * row['share']:.0f}", row["name"][:letters]) for row in pair]
        table.add_row(*(escape(cell) for two in cells for cell in two))
    return table
