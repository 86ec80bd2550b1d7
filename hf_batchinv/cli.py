"""Command line: `hf-batchinv demo` shows what a batch does to an answer, `hf-batchinv audit MODEL` what is converted.

Exit status: 0 if results do not depend on the batch, 1 if they do (or a part of a model is not covered), 2 if the
command cannot run; one sentence on standard error then says why. With --json, standard output holds one JSON object and
nothing else.
"""

import json
from enum import Enum
from typing import Annotated

import transformers
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from . import __version__
from .audit import audit as audit_model
from .demo import DTYPES, PROMPT, UsageError, explain_loading, run_demo
from .errors import UnsupportedModelError
from .smollm2 import ModelUnavailableError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


Device = Enum("Device", {name: name for name in ("auto", "cpu", "cuda")}, type=str)
Dtype = Enum("Dtype", {name: name for name in DTYPES}, type=str)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


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


@app.command()
def audit(
    model: Annotated[str, typer.Argument(help="A model's directory or Hub name.")],
    as_json: AsJson = False,
) -> None:
    """Say of every module of a model whether conversion covers it."""
    try:
        with explain_loading(model):
            config = transformers.AutoConfig.from_pretrained(model)
            architecture = (config.architectures or ["AutoModel"])[0]
            model_class = getattr(transformers, architecture, transformers.AutoModel)
            network = model_class.from_pretrained(model, dtype="auto")
    except UsageError as error:
        _stop(error)
    report = audit_model(network)
    typer.echo(json.dumps({"model": model, **report.to_json()}) if as_json else str(report))
    raise typer.Exit(int(not report.ok))


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
