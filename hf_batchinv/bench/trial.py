"""From one trial to one row of the result."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from ..errors import first_line
from ..testing import bits
from . import timing
from .cases import Case, dimensions

Call = Callable[[int], object]


@dataclass
class Trial:
    """One case with its operands: a call takes the number of the set of inputs that it shall use.

    check: whether a row has the bits in this batch that it has in others.
    triton: `ours` with the Triton kernel forced, None if `ours` is that already.
    timed: stock times that another process measured.
    against: the stock op that the ratio compares with, None for the fastest.
    plain: our own call without the feature that this case adds, to compare with.
    """

    case: Case
    nbytes: int
    flops: int
    sets: int
    check: Callable[[], bool]
    ours: Call
    engine: str = "triton"
    triton: Call | None = None
    stock: dict[str, Call] = field(default_factory=dict)
    timed: dict[str, float | None] = field(default_factory=dict)
    against: str | None = None
    plain: Call | None = None


def note(text: str) -> None:
    """One line on standard error that does not break a progress bar."""
    tqdm.write(f"hf-batchinv: {text}", file=sys.stderr)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two tensors have the same bit patterns (compared on their device, 0.0 differs from -0.0)."""
    return torch.equal(bits(got), bits(want))


def measure(op: str, trial: Trial, rates: timing.Rates) -> dict:
    """The row of a trial; where bits differ it holds no time."""
    row = {"op": op} | dimensions(trial.case)
    bits_ok = trial.check()
    count = timing.turns(trial.sets, trial.nbytes, trial.flops)

    def time(call: Call) -> float:
        return timing.graph_time(timing.rotated(call, trial.sets, count))

    ours = triton = ratio = plain = None
    stock = dict.fromkeys([*trial.stock, *trial.timed])
    if bits_ok:
        ours = time(trial.ours)
        triton = ours if trial.triton is None else time(trial.triton)
        plain = None if trial.plain is None else time(trial.plain)
        stock = {name: _stock_time(time, call, name, trial.case) for name, call in trial.stock.items()} | trial.timed
        compared = stock if trial.against is None else {trial.against: stock[trial.against]}
        fastest = min((us for us in compared.values() if us is not None), default=None)
        ratio = None if fastest is None else fastest / ours
    row |= {"ours_us": ours, "engine": trial.engine, "triton_us": triton, "stock_us": stock or None}
    row |= {"floor_us": rates.floor_us(trial.nbytes, trial.flops, trial.case.dtype), "ratio": ratio}
    if trial.plain is not None:
        row |= {"plain_us": plain, "over_plain": None if plain is None else ours / plain}
    return row | {"bits_ok": bits_ok}


def _stock_time(time: Callable[[Call], float], call: Call, name: str, case: Case) -> float | None:
    """None, and a note, where stock code does not take the case."""
    try:
        return time(call)
    except RuntimeError as error:
        reason = first_line(error)
        note(f"{name} does not take {case}: {reason}")
        return None
