"""Time F.linear with a cuBLASLt that has no workspace and so cannot split K: a process of its own, with one job.

cuBLAS reads its settings once, so they must stand before the first product of the process (linear.py sets them). On
standard input: {"progress": bool, "cases": [[dtype, N, K, M], ...]}. On standard output: [microseconds or null, ...].
"""

import json
import os
import sys
from itertools import groupby
from typing import TextIO

import torch
from torch.nn import functional as F
from tqdm import tqdm

from ..errors import first_line
from . import timing
from .cases import LinearCase
from .linear import STARVED_ENVIRONMENT, operands, work
from .trial import note


def times(cases: list[LinearCase], device: str, progress: bool) -> list[float | None]:
    """Microseconds of each case, operands and graphs as in linear.py; None, and a note, if cuBLASLt refuses it."""
    found: list[float | None] = []
    with tqdm(total=len(cases), desc="cuBLASLt, no split K", disable=not progress) as bar:
        for _, group in groupby(cases, key=lambda case: case.unit):
            unit = list(group)
            given = operands(unit, device)
            for case in unit:
                x, weights = given.inputs[: case.M], given.weights
                count = timing.turns(len(weights), *work(case))
                calls = timing.rotated(lambda i, x=x, w=weights: F.linear(x, w[i]), len(weights), count)
                try:
                    found.append(timing.graph_time(calls))
                except RuntimeError as error:
                    note(f"cuBLASLt without workspace does not take {case}: {first_line(error)}")
                    found.append(None)
                bar.update()
            del given, x, weights, calls
    return found


def main(source: TextIO = sys.stdin, target: TextIO = sys.stdout, device: str = "cuda") -> int:
    """Answer one question; 2 if the environment does not starve cuBLASLt."""
    for name, value in STARVED_ENVIRONMENT.items():
        if os.environ.get(name) != value:
            got = os.environ.get(name)
            print(
                f"starved: expected {name}={value} in the environment, got {got!r}; let `hf-batchinv bench` start it",
                file=sys.stderr,
            )
            return 2
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_tf32 = False
    question = json.load(source)
    cases = [LinearCase(dtype, "", m, n, k) for dtype, n, k, m in question["cases"]]
    with torch.no_grad():
        json.dump(times(cases, device, question["progress"]), target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
