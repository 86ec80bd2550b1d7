"""What hf_batchinv raises when a model cannot be converted whole, and how it quotes what others raise."""

from dataclasses import dataclass

_NAMES_SHOWN = 3


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class's name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Problem:
    """One part of a model that conversion does not cover.

    name: dotted module name, "" for the model itself; module: its class name; reason: why, and what to do about it.
    """

    name: str
    module: str
    reason: str


class UnsupportedModelError(ValueError):
    """The model has parts whose results would still depend on the batch; `problems` lists every one of them."""

    def __init__(self, model: str, problems: tuple[Problem, ...]):
        super().__init__(model, problems)
        self.model = model
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return f"{self.model} cannot be made batch invariant: {describe(self.problems)}"


class UnsupportedCompilerError(RuntimeError):
    """A converted model was about to be compiled by something that changes bits."""


def describe(problems: tuple[Problem, ...]) -> str:
    """Return the problems as one line, equal ones of many layers folded into one entry."""
    folded: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        folded.setdefault((problem.module, problem.reason), []).append(problem.name or "the model itself")
    entries = []
    for (module, reason), names in folded.items():
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        entries.append(f"{module} ({', '.join(names[:_NAMES_SHOWN])}{more}) {reason}")
    return "; ".join(entries)
