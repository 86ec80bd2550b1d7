"""Run the cases of the chosen ops, with a progress bar for each op."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch
from tqdm import tqdm

from .. import __version__
from . import attention, grouped_linear, linear, norm, softmax, timing
from .cases import DTYPES, OPS, Case, units
from .trial import Trial, measure, note


class BenchError(ValueError):
    """The benchmark cannot run here or with what was asked for; the message says what to change."""


_TRIALS: dict[str, Callable[..., Iterator[Trial]]] = {
    "linear": linear.trials,
    "grouped_linear": grouped_linear.trials,
    "attention": attention.trials,
    "norm": norm.trials,
    "softmax": softmax.trials,
}
assert tuple(_TRIALS) == OPS


def plan(
    ops: Sequence[str] = OPS,
    dtypes: Sequence[str] = DTYPES,
    *,
    quick: bool = False,
    shard: tuple[int, int] = (1, 1),
) -> dict[str, list[list[Case]]]:
    """The units of every op; raises BenchError if that leaves nothing to measure."""
    chosen = {op: units(op, dtypes, quick=quick, shard=shard) for op in OPS if op in ops}
    left_out = [op for op, found in chosen.items() if not found]
    chosen = {op: found for op, found in chosen.items() if found}
    if not chosen:
        raise BenchError(
            f"expected --op, --dtype and --shard to leave a case, got op {', '.join(ops)}, dtype {', '.join(dtypes)} "
            f"and shard {shard[0]}/{shard[1]}; grouped_linear, attention and norm have cases in bfloat16 only"
        )
    if left_out:
        note(f"--dtype and --shard leave no case of {', '.join(left_out)}")
    return chosen


def require_gpu() -> None:
    """Raise BenchError where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise BenchError(
            "torch finds no CUDA device here; run this on a machine with a GPU and a CUDA or ROCm build of torch"
        )


def start(device: str = "cuda") -> tuple[dict, timing.Rates]:
    """The head of the result, with the measured rates, and the rates themselves."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rates = timing.measure_rates(device)
    env = timing.environment() | {"hf_batchinv": __version__}
    return env | {name: round(value, 3) for name, value in asdict(rates).items()}, rates


@torch.no_grad()
def run_op(
    op: str,
    chosen: Sequence[Sequence[Case]],
    rates: timing.Rates,
    *,
    device: str = "cuda",
    progress: bool = True,
    save: Callable[[list[dict]], object] = lambda rows: None,
) -> list[dict]:
    """The rows of an op, so far as they are measured handed to `save` after every weight or head shape.

    A case for which this GPU has too little memory is named on standard error and left out.
    """
    torch.manual_seed(0)
    cases = [case for unit in chosen for case in unit]
    trials = _TRIALS[op]
    if op == "linear":
        trials = partial(trials, nosplit=linear.nosplit_times(cases, progress))
    rows = []
    with tqdm(total=len(cases), desc=op, unit="case", disable=not progress) as bar:
        for unit in chosen:
            done = 0
            try:
                for trial in trials(unit, device):
                    rows.append(measure(op, trial, rates))
                    done += 1
                    bar.update()
            except torch.OutOfMemoryError:
                note(f"left out for lack of memory on this GPU: {', '.join(map(str, unit[done:]))}")
                bar.update(len(unit) - done)
            if device == "cuda":
                torch.cuda.empty_cache()
            save(rows)
    return rows
