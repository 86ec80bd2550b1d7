"""linear beside F.linear: cuBLAS as it is, and cuBLASLt that cannot split K (in a process of its own, starved.py)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .. import hub
from . import timing
from .cases import LinearCase
from .trial import Trial, same_bits

ENGINE_VARIABLE = "HF_BATCHINV_ENGINE"
STARVED = "hf_batchinv.bench.starved"
# Read by cuBLAS and torch when they make their first handle: no workspace, so no partial sums of split K.
STARVED_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}

NosplitTimes = dict[LinearCase, float | None]


class StarvedError(RuntimeError):
    """The process that times cuBLASLt without split K has failed."""


@dataclass
class Operands:
    """Rows for every case of a weight, and so many copies of the weight that they exceed the L2 cache."""

    inputs: torch.Tensor
    weights: list[torch.Tensor]


def operands(cases: Sequence[LinearCase], device: str) -> Operands:
    """Operands of one unit of cases."""
    first = cases[0]
    dtype = getattr(torch, first.dtype)
    sets = timing.rotation(first.N * first.K * dtype.itemsize, device)
    weights = torch.randn(sets, first.N, first.K, device=device, dtype=dtype)
    inputs = torch.randn(max(case.M for case in cases), first.K, device=device, dtype=dtype)
    return Operands(inputs, list(weights))


def work(case: LinearCase) -> tuple[int, int]:
    """(bytes, flops) of one product."""
    itemsize = getattr(torch, case.dtype).itemsize
    return (case.N * case.K + case.M * (case.N + case.K)) * itemsize, 2 * case.M * case.N * case.K


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Calls of `linear` inside use this engine ("auto" or "triton")."""
    before = os.environ.get(ENGINE_VARIABLE)
    os.environ[ENGINE_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENGINE_VARIABLE]
        else:
            os.environ[ENGINE_VARIABLE] = before


def engine_of(package, x: torch.Tensor, weight: torch.Tensor) -> str:
    """The engine that serves this product by default; a package without `engine_of` has the Triton kernel only."""
    if not hasattr(package, "engine_of"):
        return "triton"
    with engine("auto"):
        return package.engine_of(x, weight)


def trials(cases: Sequence[LinearCase], device: str, nosplit: NosplitTimes) -> Iterator[Trial]:
    """One trial per number of rows of a weight. All rows of every M are compared with those of the largest M."""
    package = hub.load("linear")
    given = operands(cases, device)
    weights = given.weights

    def run(x: torch.Tensor, weight: torch.Tensor, name: str = "auto") -> torch.Tensor:
        with engine(name):
            return package.linear(x, weight)

    whole = run(given.inputs, weights[0], "triton")
    for case in cases:
        x = given.inputs[: case.M]
        chosen = engine_of(package, x, weights[0])

        def check(x=x, chosen=chosen) -> bool:
            names = ("auto", "triton") if chosen == "cublaslt" else ("auto",)
            results = [run(x, weights[0], name) for name in names]
            alone = run(x[-1:], weights[0])
            return all(same_bits(got, whole[: len(x)]) and same_bits(got[-1:], alone) for got in results)

        nbytes, flops = work(case)
        yield Trial(
            case,
            nbytes,
            flops,
            sets=len(weights),
            check=check,
            ours=lambda i, x=x: run(x, weights[i]),
            engine=chosen,
            triton=(lambda i, x=x: run(x, weights[i], "triton")) if chosen == "cublaslt" else None,
            stock={"cublas_default": lambda i, x=x: F.linear(x, weights[i])},
            timed={"cublaslt_nosplit": nosplit[case]},
            against="cublas_default",
        )


def nosplit_times(cases: Sequence[LinearCase], progress: bool) -> NosplitTimes:
    """Microseconds of F.linear when cuBLASLt cannot split K, by one process for all cases.

    Raises StarvedError if that process fails; its own message is on standard error.
    """
    question = {"progress": progress, "cases": [[case.dtype, case.N, case.K, case.M] for case in cases]}
    done = subprocess.run(
        [sys.executable, "-m", STARVED],
        input=json.dumps(question),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | STARVED_ENVIRONMENT,
    )
    if done.returncode:
        raise StarvedError(
            f"`python -m {STARVED}` must end with status 0, got {done.returncode}; its message is above, and "
            "`--op` with other ops runs without it"
        )
    return dict(zip(cases, json.loads(done.stdout), strict=True))
