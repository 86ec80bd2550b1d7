"""What `verify` found, as data; how it is shown is in table.py, plot.py and page.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from .compare import Difference

SAME, DIFFERS, NOT_APPLICABLE, FAILED = "same bits", "differs", "not applicable", "could not run"


@dataclass(frozen=True)
class CaseResult:
    """One way of running text number `text`: its name, and what differs from the sequence alone."""

    name: str
    text: int
    difference: Difference


@dataclass(frozen=True)
class Culprit:
    """The first place where equal inputs gave other outputs, in one case.

    module, kind: dotted name ("" is the model itself) and class. tokens: real tokens of this call whose outputs differ.
    call: index of the forward in the case. inputs, outputs: shapes in the varied run, inputs_alone in the reference.
    operator: the first one inside the module, with `operator_shapes` (varied, alone); "" if none could be named, then
    `note` says why.
    """

    case: str
    module: str
    kind: str
    call: int
    tokens: int
    inputs: tuple[tuple[int, ...], ...]
    inputs_alone: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    operator: str
    operator_shapes: tuple[tuple[tuple[int, ...], ...], ...]
    note: str = ""

    def __str__(self) -> str:
        shapes = " against ".join(_shapes(part[:1]) for part in (self.inputs, self.inputs_alone))
        where = f"{self.module or 'the model itself'} ({self.kind}), input {shapes}"
        if self.operator:
            varied, alone = (_shapes(part) for part in self.operator_shapes)
            where += f"; in it {self.operator}, {varied} against {alone}"
        return where + (f"; {self.note}" if self.note else "")


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes) or "none"


@dataclass(frozen=True)
class AxisResult:
    """One axis: status (one of the four above), why if it has no cases, and notes on cases that do not apply."""

    axis: str
    status: str
    reason: str = ""
    notes: tuple[str, ...] = ()
    cases: tuple[CaseResult, ...] = ()
    culprit: Culprit | None = None

    @property
    def differing_cases(self) -> int:
        return sum(case.difference.differing > 0 for case in self.cases)

    @property
    def values(self) -> int:
        return sum(case.difference.values for case in self.cases)

    @property
    def differing_values(self) -> int:
        return sum(case.difference.differing for case in self.cases)

    @property
    def max_abs(self) -> float | None:
        return self._worst("max_abs")

    @property
    def max_ulp(self) -> int | None:
        return self._worst("max_ulp")

    @property
    def max_kl(self) -> float | None:
        return self._worst("max_kl")

    @property
    def changed_tokens(self) -> int | None:
        counts = [case.difference.changed_tokens for case in self.cases]
        return None if not counts or None in counts else sum(counts)

    def _worst(self, name: str):
        found = [getattr(case.difference, name) for case in self.cases]
        return None if not found or None in found else max(found)

    def to_json(self) -> dict:
        """Plain data: the sums over the cases, and every case."""
        sums = ("differing_cases", "values", "differing_values", "max_abs", "max_ulp", "max_kl", "changed_tokens")
        data = {
            "axis": self.axis,
            "status": self.status,
            "reason": self.reason,
            "notes": list(self.notes),
            "cases_tried": len(self.cases),
            **{name: getattr(self, name) for name in sums},
            "first_difference": None if self.culprit is None else asdict(self.culprit),
            "cases": [{"name": c.name, "text": c.text, **asdict(c.difference)} for c in self.cases],
        }
        return _plain(data)


@dataclass(frozen=True)
class Report:
    """What `verify` found: one AxisResult for each axis asked for, none left out.

    subject: model (class), kind, converted, dtype, device, attention, compared, tokens (of each text), versions.
    """

    subject: dict
    axes: tuple[AxisResult, ...]
    budget: int
    seconds: float = field(compare=False, default=0.0)

    @property
    def ok(self) -> bool:
        """True if at least one case ran, all bits are the same, and no axis failed to run."""
        walked = [axis for axis in self.axes if axis.status != NOT_APPLICABLE]
        return bool(walked) and all(axis.status == SAME for axis in walked)

    @property
    def differs(self) -> bool:
        """True if any case has other bits."""
        return any(axis.status == DIFFERS for axis in self.axes)

    def to_json(self) -> dict:
        """Plain data: {"ok", "subject", "budget", "seconds", "axes": [...]}."""
        axes = [axis.to_json() for axis in self.axes]
        return {
            "ok": self.ok, "subject": _plain(self.subject), "budget": self.budget, "seconds": self.seconds, "axes": axes
        }  # fmt: skip

    def to_html(self) -> str:
        """One page with nothing outside of it: verdict, table, places of the differences, plots. Needs matplotlib."""
        from .page import page

        return page(self)

    def save_png(self, path: str | Path) -> None:
        """Draw the report into a PNG file. Needs matplotlib (`pip install hf_batchinv[bench]`)."""
        from .plot import png

        Path(path).write_bytes(png(self))

    def __rich__(self):
        from .table import renderable

        return renderable(self)

    def __str__(self) -> str:
        from .table import text

        return text(self)


def _plain(value):
    """Tuples as lists, and infinite floats as strings, which strict JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value
