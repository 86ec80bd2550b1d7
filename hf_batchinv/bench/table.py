"""The summary as a rich table for a terminal."""

import math

from rich import box
from rich.table import Table

from .summary import Line


def summary_table(lines: list[Line]) -> Table:
    """One row per line; groups below their target are yellow, groups with differing bits red."""
    table = Table(box=box.SIMPLE_HEAD, title="our speed, stock = 1 (geometric mean)", title_justify="left")
    for heading in ("op", "dtype", "cases of", "beside"):
        table.add_column(heading)
    for heading in ("mean", "worst", "best", "cases", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for line in lines:
        block = (line.op, line.dtype, line.peer)
        if before not in (None, block):
            table.add_section()
        before = block
        below = line.target is not None and line.mean < line.target
        table.add_row(
            line.op,
            line.dtype,
            line.group,
            line.peer,
            *map(_number, (line.mean, line.worst, line.best)),
            f"{line.cases}" + (f", {line.broken} differ" if line.broken else ""),
            "" if line.target is None else f"{line.target:.2f}",
            style="red" if line.broken else "yellow" if below else None,
        )
    return table


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"
