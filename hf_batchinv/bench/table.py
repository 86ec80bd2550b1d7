"""The summary for a terminal of 80 columns: one small table for each op, dtype and peer."""

import math
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from .summary import Line


def summary_tables(lines: list[Line]) -> Group:
    """Groups below their target are yellow, groups with differing bits red."""
    blocks = groupby(lines, key=lambda line: (line.op, line.dtype, line.peer))
    return Group(*(_block(f"{op}, {dtype}, beside {peer}", list(group)) for (op, dtype, peer), group in blocks))


def _block(title: str, lines: list[Line]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("speed, peer = 1", width=29)
    for heading in ("mean", "worst", "best", "cases", "target"):
        table.add_column(heading, justify="right", width=6)
    for line in lines:
        below = line.target is not None and line.mean < line.target
        table.add_row(
            line.group,
            *map(_number, (line.mean, line.worst, line.best)),
            str(line.cases),
            "" if line.target is None else f"{line.target:.2f}",
            style="yellow" if below else None,
        )
        if line.broken:
            table.add_row(f"  bits differ in {line.broken} more", style="red")
    return table


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"
