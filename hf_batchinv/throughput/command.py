"""One run: measure, write, draw, print.

Exit status: 0 if no result of ours depends on the batch, 1 if one does (or a setting has failed), 2 if the command
cannot run; one sentence on standard error then says why.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm
from transformers import PreTrainedModel, logging

from .. import __version__
from ..bench.plot import can_draw
from ..bench.timing import environment
from ..conversion import plan_conversion
from ..demo import DTYPES, UsageError, pick_device
from ..errors import UnsupportedModelError, first_line
from ..smollm2 import ModelUnavailableError
from . import models, plot, table
from .clock import Clock
from .deadline import Deadline
from .measure import Comparison
from .models import SHAPES, SMOLLM2, Source
from .result import LISTS, Result
from .settings import CACHES, JOBS, LEAST_NEW_TOKENS, NEW_TOKENS, Setting, plan

DEFAULT_OUT = "hf-batchinv-throughput"
LEFT_OUT = {"time": "would exceed --time-limit", "memory": "need more memory than there is"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with command-line arguments, those of the process if None; returns the exit status."""
    logging.set_verbosity_error()
    try:
        options = _parse(arguments)
        result = run(options)
    except (UsageError, ModelUnavailableError, UnsupportedModelError) as error:
        _note(error)
        return 2
    if options.json:
        print(json.dumps(result))
    else:
        _print(result, options.out)
    failed = any(item["why"] not in LEFT_OUT for item in result["left_out"])
    return int(failed or not all(row["bits_ok"] for row in result["rows"]))


def run(options: argparse.Namespace) -> dict:
    """Measure what was asked for; returns {"env", "dtype", "rows", "runs", "profiles", "left_out"} of all models.

    Raises UsageError, smollm2.ModelUnavailableError or the conversion's UnsupportedModelError.
    """
    device = pick_device(options.device)
    deadline = Deadline(options.time_limit, device.type == "cuda")
    sources = [Source(name) for name in options.models] + [Source(name, random=True) for name in options.random_weights]
    sources = sources or [Source(SMOLLM2)]
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--out must be a directory that can be written, got {options.out} ({error.strerror})"
            ) from error
        if not can_draw():
            _note("no PNG without matplotlib; run `pip install hf_batchinv[bench]`")
    env = environment(device.type) | {"hf_batchinv": __version__}
    merged = {"env": env, "dtype": options.dtype} | {name: [] for name in LISTS}
    for source in dict.fromkeys(sources):
        result = _measure_model(source, options, env, device, deadline)
        for name in LISTS:
            merged[name] += [{"model": source.file_name} | item if name != "rows" else item for item in result[name]]
    if not merged["rows"]:
        raise UsageError("no setting was measured: all were left out, as said above; ask for smaller ones")
    return merged


def _measure_model(
    source: Source, options: argparse.Namespace, env: dict, device: torch.device, deadline: Deadline
) -> dict:
    path = None if options.out is None else options.out / f"{source.file_name}.json"
    result = Result(env, options.dtype, path)
    if options.resume and result.resume():
        _note(f"{path} has {len(result.rows)} rows, which are not measured again")
    settings = plan(
        options.jobs,
        options.batch,
        options.prompt,
        options.cache,
        options.new_tokens,
        options.scoring,
        options.profile,
    )
    settings = [setting for setting in settings if not result.has(setting)]
    if deadline.passed():
        for setting in settings:
            result.leave_out(setting, "time")
    elif settings:
        model, name = models.load(source, device, DTYPES[options.dtype])
        _check(model, settings)
        comparison = Comparison(model, name, options.dtype, Clock(device))
        _measure_settings(comparison, settings, result, deadline)
    for why in dict.fromkeys(item["why"] for item in result.data["left_out"]):
        left_out = [item["setting"] for item in result.data["left_out"] if item["why"] == why]
        reason = f"since they {LEFT_OUT[why]}" if why in LEFT_OUT else f"after an error ({why})"
        _note(f"{source.name}: left out {reason}: {', '.join(left_out)}")
    if path is not None and can_draw() and any(row["ratio"] is not None for row in result.rows):
        plot.draw(result.rows[0]["model"], result.rows, env, path.with_suffix(".png"))
    return result.data


def _measure_settings(comparison: Comparison, settings: list[Setting], result: Result, deadline: Deadline) -> None:
    with tqdm(total=len(settings), desc=comparison.name, unit="setting") as bar:
        for setting in settings:
            if not deadline.allows(comparison.name, setting):
                result.leave_out(setting, "time")
                bar.update()
                continue
            start = time.monotonic()
            try:
                result.add(comparison.measure(setting, lambda side, now=setting: bar.set_postfix_str(f"{now}, {side}")))
            except torch.OutOfMemoryError:
                result.leave_out(setting, "memory")
            except RuntimeError as error:  # such as a compiler that stock code lacks here: the other settings may go
                reason = first_line(error)
                result.leave_out(setting, f"{type(error).__name__}: {reason}")
            else:
                stock = result.data["runs"][-2]
                if setting.cache == "static" and comparison.clock.on_gpu and not stock["compiled"]:
                    _note(f"{setting}: stock did not compile, so this is not stock at its best")
            comparison.clock.free()  # here, where the error and the tensors of its frames are gone
            deadline.took(comparison.name, setting, time.monotonic() - start)
            bar.update()


def _check(model: PreTrainedModel, settings: list[Setting]) -> None:
    """Refuse now what would fail after stock has been measured."""
    conversion = plan_conversion(model)
    if conversion.problems:
        raise UnsupportedModelError(conversion.model, conversion.problems)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(settings, key=lambda setting: setting.prompt + setting.new_tokens)
    if most is not None and longest.prompt + longest.new_tokens > most:
        option = "--scoring" if longest.op == "scoring" else "--prompt plus --new-tokens"
        raise UsageError(
            f"{option} must be at most {most}, the positions of this model, got {longest.prompt + longest.new_tokens}; "
            "ask for shorter sequences"
        )


# --- arguments ---


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(message.replace("argument ", "", 1))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="throughput.py", description="Time whole models, stock and batch invariant, in one process.")
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help=f"Hub name or directory; {SMOLLM2}: the packaged SmolLM2-135M")
    add("--random-weights", nargs="+", default=[], metavar="SHAPE", choices=SHAPES, help=f"any of {', '.join(SHAPES)}")
    add("--batch", type=_numbers(1), default="1,8,32,128", help="sizes, default %(default)s")
    add("--prompt", type=_numbers(2), default="128,2048", help="lengths, default %(default)s")
    tokens = ", ".join(f"{count} ({cache})" for cache, count in NEW_TOKENS.items())
    add("--new-tokens", type=_number(LEAST_NEW_TOKENS), help=f"to generate, default {tokens}")
    add("--cache", type=_names(CACHES), default=",".join(CACHES), help="of generate, default %(default)s")
    add("--jobs", type=_names(JOBS), default=",".join(JOBS), help="default %(default)s")
    add("--scoring", type=_size, default="64x1024", metavar="BxN", help="sequences x tokens, default %(default)s")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the weights, default %(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run, default %(default)s")
    add("--profile", action="store_true", help="say which operations the time goes to")
    add("--time-limit", type=_seconds, metavar="SECONDS", help="leave out what would not be done by then")
    add("--resume", action="store_true", help="keep the rows that DIR has from this machine and software")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--out", type=Path, metavar="DIR", help=f"for <model>.json and .png, default {DEFAULT_OUT}, with --json none")
    options = parser.parse_args(arguments)
    if options.out is None and not options.json:
        options.out = Path(DEFAULT_OUT)
    if options.resume and options.out is None:
        raise UsageError("--resume needs the directory that holds earlier rows, got none; add --out DIR")
    return options


def _number(least: int):
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least}, got {text!r}")
        return int(text)

    return parse


def _numbers(least: int):
    def parse(text: str) -> list[int]:
        parts = text.split(",")
        if not all(part.isdecimal() and int(part) >= least for part in parts):
            raise argparse.ArgumentTypeError(f"expected whole numbers from {least} such as 8,32, got {text!r}")
        return [int(part) for part in parts]

    return parse


def _names(known: Sequence[str]):
    def parse(text: str) -> list[str]:
        if not set(names := text.split(",")) <= set(known):
            listed = ", ".join(known)
            raise argparse.ArgumentTypeError(f"expected names from {listed} with commas between, got {text!r}")
        return names

    return parse


def _size(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    if not (batch.isdecimal() and length.isdecimal() and int(batch) >= 1 and int(length) >= 2):
        raise argparse.ArgumentTypeError(f"expected sequences x tokens such as 64x1024, got {text!r}")
    return int(batch), int(length)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds from 0 such as 300, got {text!r}")
    return seconds


# --- what a person sees ---


def _note(text: object) -> None:
    tqdm.write(f"throughput: {text}", file=sys.stderr)


def _print(result: dict, out: Path) -> None:
    env, console = result["env"], Console()
    console.print(f"\n{env['device']}, torch {env['torch']}, transformers {env['transformers']}, {result['dtype']}")
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        console.print(table.speeds(name, [row for row in result["rows"] if row["model"] == name]))
    console.print("ms of generate: one step, in which every sequence of the batch gets a token", markup=False)
    seen = dict.fromkeys((profile["model"], profile["what"]) for profile in result["profiles"])
    for model, what in seen:
        both = [profile for profile in result["profiles"] if (profile["model"], profile["what"]) == (model, what)]
        console.print(table.operations(f"{model}: {what}", both, console.width))
    console.print(f"rows and pictures: {out}", markup=False)
