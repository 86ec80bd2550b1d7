"""Say of every module of a model what it is, on a stock model as well as on a converted one."""

import io
from collections import Counter
from dataclasses import asdict, dataclass

from torch import nn

from . import conversion, layers
from .dispatch import ATTENTION, CONTAINER, CONVERTED, ELEMENTWISE, NOT_COVERED

STATUSES = (NOT_COVERED, CONVERTED, ATTENTION, ELEMENTWISE, CONTAINER)
_TABLE_WIDTH = 120


@dataclass(frozen=True)
class Row:
    """One module: dotted name ("" for the model), stock class name, status (one of STATUSES), and why or how."""

    name: str
    module: str
    status: str
    reason: str


@dataclass(frozen=True)
class Audit:
    """model: class name; converted: whether `convert` was applied, else `rows` tell what it would do."""

    model: str
    converted: bool
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """True if no module is left uncovered."""
        return not any(row.status == NOT_COVERED for row in self.rows)

    def to_json(self) -> dict:
        """Return plain data: {"model", "converted", "ok", "rows": [{"name", "module", "status", "reason"}, ...]}."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows], "ok": self.ok}

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        verb = "is converted" if self.converted else "is stock; this is what convert would do"
        table = Table(title=f"{self.model} {verb}", title_justify="left")
        for column in ("status", "count", "class", "reason", "first"):
            table.add_column(column, justify="right" if column == "count" else "left", overflow="fold")
        for (status, module, reason), count, first in self._groups():
            table.add_row(status, str(count), module, reason, first or "(the model itself)")
        text = io.StringIO()
        Console(file=text, width=_TABLE_WIDTH, color_system=None, markup=False).print(table)
        return text.getvalue().rstrip()

    def _groups(self) -> list[tuple[tuple[str, str, str], int, str]]:
        """Return ((status, class, reason), count, first name), what is not covered first."""
        counts = Counter((row.status, row.module, row.reason) for row in self.rows)
        first: dict[tuple[str, str, str], str] = {}
        for row in self.rows:
            first.setdefault((row.status, row.module, row.reason), row.name)
        ordered = sorted(counts, key=lambda key: (STATUSES.index(key[0]), key[1]))
        return [(key, counts[key], first[key]) for key in ordered]


def audit(model: nn.Module) -> Audit:
    """Return what every module of a model is, reading only.

    Raises TypeError if `model` is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    plan = conversion.plan_conversion(model)
    rows = tuple(
        Row(name, layers.stock_class(module).__name__, verdict.status, verdict.reason)
        for name, module, verdict in plan.modules
    )
    return Audit(plan.model, conversion.is_converted(model), rows)
