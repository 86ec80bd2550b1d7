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
    table = Table(
        box=box.SIMPLE_HEAD, title=escape(model), title_justify="left", title_style="bold", padding=(0, 1, 0, 0)
    )
    for heading in ("op", "cache"):
        table.add_column(heading, no_wrap=True)
    numbers = ("batch", "prompt", "stock\nms", "ours\nms", "stock\ntokens/s", "ours\ntokens/s", "speed,\nstock = 1")
    for heading in (*numbers, "memory,\nstock = 1"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        size = row["op"], row["cache"] or "", str(row["batch"]), str(row["prompt"])
        if not row["bits_ok"]:
            table.add_row(*size, "bits", "differ", style="red")
            continue
        seconds = row["stock_s"], row["ours_s"]
        peaks = row["ours_peak_bytes"], row["stock_peak_bytes"]
        table.add_row(
            *size,
            *(f"{1e3 * side:.2f}" for side in seconds),
            *(f"{tokens(row) / side:,.0f}" for side in seconds),
            f"{row['ratio']:.2f}",
            "" if None in peaks else f"{peaks[0] / peaks[1]:.2f}",
            style="yellow" if row["ratio"] < 1 else None,
        )
    return table


def tokens(row: dict) -> int:
    """How many tokens are done in `ours_s`: one of every sequence in a step of decoding, else all of them."""
    return row["batch"] * (1 if row["op"] == "generate" else row["prompt"])


def operations(what: str, profiles: Sequence[dict]) -> Table:
    """The largest operations of both sides of a setting, by their share of the busy time."""
    by_side = {profile["side"]: profile for profile in profiles}
    table = Table(
        box=box.SIMPLE_HEAD, title=escape(what), title_justify="left", title_style="bold", padding=(0, 1, 0, 0)
    )
    for side in SIDES:
        profile = by_side[side]
        busy, wall = (profile[name] / profile["steps"] / 1e3 for name in ("busy_us", "wall_us"))
        table.add_column("%", justify="right", min_width=3)
        table.add_column(f"{side}: busy {busy:.2f} of {wall:.2f} ms", no_wrap=True, overflow="ellipsis", ratio=1)
    for pair in zip_longest(*(by_side[side]["rows"][:SHOWN] for side in SIDES)):
        cells = [("", "") if row is None else (f"{100 * row['share']:.0f}", escape(row["name"])) for row in pair]
        table.add_row(*cells[0], *cells[1])
    return table
