"""Say of every module of a model what it is, on a stock model as well as on a converted one; and, given inputs, of
every operator that it runs."""

import io
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from . import conversion, layers
from .dispatch import ATTENTION, CONTAINER, CONVERTED, ELEMENTWISE, NOT_COVERED
from .op_audit import OpRow, audit_operators, harmless

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
    """model: class name; converted: whether `convert` was applied, else `rows` tell what it would do.

    operators: what one run of the model called, as it is (stock, if not converted); None if it was not run.
    """

    model: str
    converted: bool
    rows: tuple[Row, ...]
    operators: tuple[OpRow, ...] | None = None

    @property
    def ok(self) -> bool:
        """True if no module is left uncovered and, if the model was run, no operator on a stock or unknown kernel."""
        return not any(row.status == NOT_COVERED for row in self.rows) and not self.leftover

    @property
    def leftover(self) -> tuple[OpRow, ...]:
        """Operators of the run whose results may depend on the batch."""
        return tuple(row for row in self.operators or () if not harmless(row.status))

    def to_json(self) -> dict:
        """Return plain data: {"model", "converted", "ok", "rows": [{"name", "module", "status", "reason"}, ...]}.

        With example inputs also "operators": [{"operator", "module", "kind", "count", "status", "shapes"}, ...].
        """
        data = {**asdict(self), "rows": [asdict(row) for row in self.rows], "ok": self.ok}
        operators = data.pop("operators")
        return data if operators is None else {**data, "operators": list(operators)}

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
        console = Console(file=text, width=_TABLE_WIDTH, color_system=None, markup=False, force_jupyter=False)
        console.print(table)
        if self.operators is not None:
            console.print(self._operator_table())
        return text.getvalue().rstrip()

    def _operator_table(self):
        """Operators by verdict and class of the module that calls them; harmless ones as one row for each verdict."""
        from rich.table import Table

        how = "of the converted model" if self.converted else "of the stock model"
        table = Table(title=f"operators of one run {how}", title_justify="left")
        for column in ("verdict", "calls", "operator", "class", "first", "its shapes"):
            table.add_column(column, justify="right" if column == "calls" else "left", overflow="fold")
        groups: dict[tuple[str, str, str], list[OpRow]] = {}
        for row in self.operators:
            group = (row.status, "", "") if harmless(row.status) else (row.status, row.operator, row.kind)
            groups.setdefault(group, []).append(row)
        for (status, operator, kind), rows in groups.items():
            calls = str(sum(row.count for row in rows))
            if not operator:
                table.add_row(status, calls, f"{len({row.operator for row in rows})} operators", "", "", "")
                continue
            shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in rows[0].shapes)
            table.add_row(status, calls, operator, kind, rows[0].module or "(the model itself)", shapes)
        return table

    def _groups(self) -> list[tuple[tuple[str, str, str], int, str]]:
        """Return ((status, class, reason), count, first name), what is not covered first."""
        counts = Counter((row.status, row.module, row.reason) for row in self.rows)
        first: dict[tuple[str, str, str], str] = {}
        for row in self.rows:
            first.setdefault((row.status, row.module, row.reason), row.name)
        ordered = sorted(counts, key=lambda key: (STATUSES.index(key[0]), key[1]))
        return [(key, counts[key], first[key]) for key in ordered]


def audit(model: nn.Module, example_inputs: Any = None) -> Audit:
    """Return what every module of a model is, reading only; with example inputs also what one run of it calls.

    example_inputs: what the model's forward takes: a mapping of keyword arguments, a tuple of positional ones, or one
    tensor. The model is run as it is, so give it to a converted model to see what conversion has left over.

    Raises TypeError if `model` is no torch.nn.Module or `example_inputs` of another type.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    plan = conversion.plan_conversion(model)
    rows = tuple(
        Row(name, layers.stock_class(module).__name__, verdict.status, verdict.reason)
        for name, module, verdict in plan.modules
    )
    operators = None if example_inputs is None else audit_operators(model, example_inputs)
    return Audit(plan.model, conversion.is_converted(model), rows, operators)
