"""One run of `hf-batchinv bench`: measure, write, draw, print."""

import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import get_args

from rich.console import Console

from . import plot, run
from .cases import Case
from .run import BenchError
from .summary import lines
from .table import summary_tables

DEFAULT_OUT = "hf-batchinv-bench"


def run_bench(
    ops: Sequence[str], dtypes: Sequence[str], *, quick: bool, shard: tuple[int, int], out: Path | None
) -> dict:
    """Measure the cases that were asked for, and return {"env": ..., "rows": [...]}.

    With `out`, every op's result is written there, as <op>.json after every weight or head shape (a run that is stopped
    leaves those before it) and as <op>.png.
    Raises BenchError or linear.StarvedError.
    """
    chosen = run.plan(ops, dtypes, quick=quick, shard=shard)
    run.require_gpu()
    draws = out is not None and plot.can_draw()
    if out is not None:
        _make(out)
        if not draws:
            print("hf-batchinv: no PNG without matplotlib; run `pip install hf_batchinv[bench]`", file=sys.stderr)
    env, rates = run.start()
    result = {"env": env, "rows": []}
    for op, units in chosen.items():
        rows = run.run_op(op, units, rates, save=partial(_write, out, op, env))
        result["rows"] += rows
        if draws and rows:
            plot.draw(op, rows, env, out / f"{op}.png")
    return result


def run_first_call(out: Path | None) -> dict:
    """Count what a first `generate` compiles in this process, and return {"env": ..., "rows": [row]}.

    With `out`, the result is written to <out>/first_call.json. Raises BenchError.
    """
    from . import first_call, timing

    run.require_gpu()
    result = {"env": timing.environment(), "rows": [first_call.measure()]}
    if out is not None:
        _make(out)
        (out / "first_call.json").write_text(json.dumps(result, indent=1))
    return result


def first_call_text(result: dict) -> str:
    """One sentence for people."""
    (row,) = result["rows"]
    kernels = ", ".join(f"{name} {count}" for name, count in row["kernels"].items())
    return (
        f"{row['compilations']} Triton compilations in {row['seconds']} s for generate at {len(row['calls'])} batch "
        f"sizes of a Llama: {kernels or 'none'}"
    )


def _write(out: Path | None, op: str, env: dict, rows: list[dict]) -> None:
    if out is not None:
        (out / f"{op}.json").write_text(json.dumps({"env": env, "rows": rows}, indent=1))


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--out must be a directory that can be written, got {out} ({error.strerror})") from error


def print_summary(result: dict, out: Path | None) -> None:
    """The table on standard output; cases whose bits differ by name."""
    env = result["env"]
    console = Console()
    console.print(f"\n{env['device']}, torch {env['torch']}, Triton {env['triton']}, driver {env['driver']}", end="")
    console.print(f", copy {env['copy_tb_s']:.2f} TB/s, bfloat16 products {env['matmul_tflop_s']:.0f} TFLOP/s")
    console.print(summary_tables(lines(result["rows"])))
    dimensions = {"op", *(field.name for kind in get_args(Case) for field in fields(kind))}
    for row in result["rows"]:
        if not row["bits_ok"]:
            shape = ", ".join(f"{name} {value}" for name, value in row.items() if name in dimensions)
            console.print(f"bits differ between batch sizes, so there is no time: {shape}", markup=False)
    if out is not None:
        console.print(f"rows and pictures: {out}", markup=False)
