"""Command line: `hf-batchinv demo` shows what a batch does to an answer, `hf-batchinv verify MODEL` where results
depend on it, `hf-batchinv audit MODEL` what is converted, `hf-batchinv bench` what it costs in speed, `hf-batchinv
doctor` what runs here and whether it was checked.

Exit status: 0 if results do not depend on the batch, 1 if they do (or a part of a model is not covered, or a self-check
has failed), 2 if the command cannot run; one sentence on standard error then says why. With --json, standard output
holds one JSON object and nothing else.
"""

import json
import warnings
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__
from .audit import Audit
from .audit import audit as audit_model
from .bench import command as bench_command
from .bench.cases import OPS
from .bench.linear import StarvedError
from .bench.run import BenchError
from .conversion import convert
from .demo import DTYPES, PROMPT, UsageError, pick_device, run_demo
from .doctor import examine
from .errors import UnsupportedModelError
from .loading import load_model
from .smollm2 import ModelUnavailableError
from .verify.cases import AXES
from .verify.command import run_verify
from .verify.report import Report
from .verify.subject import VerifyError
from .verify.table import WIDTH

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


Device = Enum("Device", {name: name for name in ("auto", "cpu", "cuda")}, type=str)
Dtype = Enum("Dtype", {name: name for name in DTYPES}, type=str)
StoredDtype = Enum("StoredDtype", {name: name for name in ("auto", *DTYPES)}, type=str)
Op = Enum("Op", {name: name for name in OPS}, type=str)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Model = Annotated[str, typer.Argument(help="A model's directory, Hub name or GGUF file.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.", show_default="main")]
Strict = Annotated[bool, typer.Option(help="Refuse a model with parts that are not covered, or leave them stock.")]


def main() -> None:
    """Entry point of the `hf-batchinv` command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf_batchinv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Transformers models whose results do not depend on the batch, bit for bit."""


def _batch_sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise typer.BadParameter(f"expected whole numbers from 1 such as 1,2,5,8, got {text!r}")
    return sizes


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="Causal language model, a directory or Hub name.", show_default="SmolLM2-135M")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the weights.")] = Dtype.bfloat16,
    tokens: Annotated[int | None, typer.Option(min=1, help="New tokens.", show_default="16, on a GPU 120")] = None,
    batches: Annotated[
        str | None, typer.Option(help="Batch sizes, such as 1,2,8.", show_default="1 to 8, on a GPU 1 to 256")
    ] = None,
    completions: Annotated[
        int | None, typer.Option(min=1, help="Repeat the batches until each arm has so many completions.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses mates and positions.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Ask one prompt alone and in many batches; count the different answers, stock and converted."""
    try:
        result = run_demo(
            model,
            device=device.value,
            dtype=dtype.value,
            tokens=tokens,
            batches=_batch_sizes(batches),
            completions=completions,
            seed=seed,
        )
    except (UsageError, ModelUnavailableError, UnsupportedModelError) as error:
        _stop(error)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print_demo(result)
    converted = result["batch_invariant"]
    raise typer.Exit(int(converted["unique"] > 1 or converted["differing_logit_values"] > 0))


@app.command(
    epilog="Examples:\n\nhf-batchinv verify HuggingFaceTB/SmolLM2-135M-Instruct\n\n"
    "hf-batchinv verify ./my-model --stock --axes batch-size,left-padding --html report.html\n\n"
    "hf-batchinv verify model.gguf --dtype bfloat16 --texts prompts.txt --budget 20 --json"
)
def verify(
    model: Model,
    revision: Revision = None,
    dtype: Annotated[StoredDtype, typer.Option(help="Dtype of the weights; auto: as they are stored.")] = (
        StoredDtype.auto
    ),
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.auto,
    axes: Annotated[str, typer.Option(help=f"Axes with commas between: {', '.join(AXES)}.")] = "all",
    budget: Annotated[int, typer.Option(min=1, help="The most cases of each axis.")] = 6,
    texts: Annotated[
        Path | None,
        typer.Option(help="Texts to run: paragraphs of a text file, or a JSON list.", show_default="built-in texts"),
    ] = None,
    stock: Annotated[bool, typer.Option("--stock", help="Verify the model as it is, without conversion.")] = False,
    strict: Strict = True,
    html: Annotated[Path | None, typer.Option(help="Write the report as one page.", show_default=False)] = None,
    png: Annotated[Path | None, typer.Option(help="Write the plots.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Run texts alone and in every surrounding; count the bits that differ, and name the first place that differs.

    Exit status: 0 same bits on every axis that applies, 1 some differ, 2 it cannot run.
    """
    try:
        report = run_verify(
            model,
            revision=revision,
            dtype=dtype.value,
            device=device.value,
            axes=axes,
            budget=budget,
            texts=texts,
            stock=stock,
            strict=strict,
            html=html,
            png=png,
        )
    except (UsageError, VerifyError, UnsupportedModelError, torch.cuda.OutOfMemoryError) as error:
        _stop(error)
    if as_json:
        typer.echo(json.dumps({"name": model, **report.to_json()}, allow_nan=False))
    else:
        _print_report(report)
    raise typer.Exit(0 if report.ok else 1 if report.differs else 2)


@app.command(
    epilog="Examples:\n\nhf-batchinv audit ./my-model\n\n"
    "hf-batchinv audit HuggingFaceTB/SmolLM2-135M-Instruct --operators"
)
def audit(
    model: Model,
    revision: Revision = None,
    dtype: Annotated[StoredDtype, typer.Option(help="Dtype of the weights; auto: as they are stored.")] = (
        StoredDtype.auto
    ),
    device: Annotated[Device, typer.Option(help="Where to load and run it.")] = Device.cpu,
    operators: Annotated[
        bool, typer.Option("--operators", help="Convert and run it, too, and list operators left on stock kernels.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say of every module of a model whether conversion covers it.

    Exit status: 0 everything is covered, 1 something is not, 2 it cannot run.
    """
    try:
        network = load_model(model, revision=revision, dtype=dtype.value, device=pick_device(device.value))
        report = _audit_with_operators(network) if operators else audit_model(network)
    except (UsageError, VerifyError, torch.cuda.OutOfMemoryError) as error:
        _stop(error)
    typer.echo(json.dumps({"model": model, **report.to_json()}) if as_json else str(report))
    raise typer.Exit(int(not report.ok))


def _audit_with_operators(network: torch.nn.Module) -> Audit:
    """Of the converted model; what conversion does not cover stays stock and shows up."""
    from .verify.subject import example_inputs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the table says the same
        convert(network, strict=False)
    return audit_model(network, example_inputs(network))


def _print_report(report: Report) -> None:
    """In colour if the terminal is wide enough for the table, else as text that is not cut."""
    console = Console()
    if console.is_terminal and console.width >= WIDTH:
        console.print(report)
    else:
        typer.echo(str(report))


def _dtypes(text: str | None) -> list[str]:
    names = list(DTYPES) if text is None else text.split(",")
    if not set(names) <= set(DTYPES):
        raise typer.BadParameter(f"expected names from {', '.join(DTYPES)} with commas between, got {text!r}")
    return names


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise typer.BadParameter(f"expected part/parts such as 1/4, got {text!r}")
    return int(part), int(parts)


@app.command()
def bench(
    op: Annotated[
        list[Op] | None, typer.Option("--op", help="Measure this op; repeat for more.", show_default="all")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtypes with commas between.", show_default="bfloat16,float16,float32")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases of every op.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Directory for <op>.json and <op>.png.",
            show_default=f"{bench_command.DEFAULT_OUT}, with --json none",
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(help="i/n: only every n-th weight or head shape, from the i-th, to fill Triton's cache."),
    ] = "1/1",
    first_call: Annotated[
        bool, typer.Option("--first-call", help="Only count what a model's first generate compiles, and its seconds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time every op beside stock PyTorch on this GPU, after its bits have been compared."""
    names = list(OPS) if not op else [name.value for name in op]
    if out is None and not as_json:
        out = Path(bench_command.DEFAULT_OUT)
    try:
        if first_call:
            result = bench_command.run_first_call(out)
            typer.echo(json.dumps(result) if as_json else bench_command.first_call_text(result))
            raise typer.Exit
        result = bench_command.run_bench(names, _dtypes(dtype), quick=quick, shard=_shard(shard), out=out)
    except (BenchError, StarvedError) as error:
        _stop(error)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        bench_command.print_summary(result, out)
    raise typer.Exit(int(not all(row["bits_ok"] for row in result["rows"])))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what runs here: device, versions, contracts, engine, and the verdicts of the self-checks."""
    try:
        report = examine()
    except (ImportError, ValueError) as error:
        _stop(error)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print_doctor(report)
    raise typer.Exit(int(any(check["status"] == "failed" for check in report["self_checks"])))


def _stop(error: Exception) -> None:
    typer.echo(f"hf-batchinv: {error}", err=True)
    raise typer.Exit(2) from error


def _print_demo(result: dict) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for heading in ("completions", "unique\ntexts", "differs\nat token", "differing\nlogit values", "seconds"):
        table.add_column(heading, justify="right")
    for arm in ("stock", "batch_invariant"):
        values = result[arm]
        first = values["first_difference_token"]
        table.add_row(
            arm.replace("_", " "),
            str(values["completions"]),
            str(values["unique"]),
            "none" if first is None else str(first),
            f"{values['differing_logit_values']:,}",
            f"{values['seconds']:.1f}",
        )
    typer.echo(f"\n{result['model']}, {result['dtype']}, {result['device']}")
    typer.echo(f"{PROMPT!r}, greedily, alone and in batches with other prompts:")
    Console().print(table)


def _print_doctor(report: dict) -> None:
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    device = report["device"] or "no CUDA device here: GPU kernels cannot run, converted models run on the CPU"
    facts.add_row("device", device)
    facts.add_row("compute capability", report["compute_capability"] or "-")
    facts.add_row("driver", report["driver"] or "-")
    for name, version in report["versions"].items():
        facts.add_row(name, version or "not installed")
    for name, version in report["contracts"].items():
        facts.add_row(f"contract of {name}", f"version {version}")
    facts.add_row("linear engine", report["engine"])
    for name, place in report["self_check_caches"].items():
        facts.add_row(f"self-check cache of {name}", place or "none in this version")
    Console().print(facts)
    checks = Table(box=box.SIMPLE_HEAD)
    for heading in ("package", "self-check", "verdict", "detail"):
        checks.add_column(heading, overflow="fold")
    colours = {"failed": "red", "not run": "yellow"}
    for check in report["self_checks"]:
        cells = (check["package"], check["name"], check["status"], check["detail"])
        checks.add_row(*map(escape, map(str, cells)), style=colours.get(check["status"]))
    Console().print(checks)
