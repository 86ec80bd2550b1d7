"""Run the cases of every axis and put together the report."""

import time
from collections.abc import Sequence as ListOf
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ..errors import first_line
from . import report as rp
from .bisect import find_culprit
from .cases import AXES, plan
from .compare import compare
from .sequence import Case, Sequence
from .subject import Subject, VerifyError, examine, sequences


def chosen_axes(axes: str | ListOf[str]) -> list[str]:
    """Names of axes in their usual order; raises VerifyError for one that does not exist."""
    names = list(AXES) if axes == "all" else axes.split(",") if isinstance(axes, str) else list(axes)
    unknown = [name for name in names if name not in AXES]
    if unknown or not names:
        raise VerifyError(f"axes must be 'all' or some of {', '.join(AXES)}, got {', '.join(unknown) or 'none'}")
    return [name for name in AXES if name in names]


def run(
    model: nn.Module,
    tokenizer: Any,
    texts: ListOf[str] | None,
    axes: str | ListOf[str],
    budget: int,
    *,
    max_tokens: int,
    bisect: bool,
    progress: bool,
) -> rp.Report:
    """What `verify` documents."""
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise VerifyError(f"budget must be a number of cases from 1 (for each axis), got {budget!r}")
    names = chosen_axes(axes)
    begin, was_training = time.perf_counter(), getattr(model, "training", False)
    try:
        if was_training:
            model.eval()
        with torch.no_grad():
            subject = examine(model, tokenizer)
            asked = [
                Sequence(subject, i, ids) for i, ids in enumerate(sequences(subject, tokenizer, texts, max_tokens))
            ]
            _check_reference(asked[0])
            plans = {name: _planned(name, asked, budget) for name in names}
            total = sum(len(cases) for cases, _, _ in plans.values())
            with tqdm(total=total, unit="case", disable=not progress) as bar:
                results = tuple(_walk(subject, name, *plans[name], bisect, bar) for name in names)
    finally:
        if was_training:
            model.train()
    facts = {
        **subject.describe(),
        "compared": "logits" if _has_logits(subject, asked[0].plain) else "last hidden state",
        "tokens": [seq.n for seq in asked],
    }
    return rp.Report(facts, results, budget, round(time.perf_counter() - begin, 2))


def _check_reference(sequence: Sequence) -> None:
    """The plain forward must run, and give numbers: NaN would agree with NaN on every axis."""
    try:
        plain = sequence.plain
    except VerifyError:
        raise
    except Exception as error:
        name = type(sequence.subject.model).__name__
        raise VerifyError(f"{name} cannot run a plain forward: {first_line(error)}") from error
    if not plain.isfinite().any():
        raise VerifyError(
            "the model's results hold no finite number, so there is nothing to compare; check its weights"
        )


def _planned(name: str, asked: list[Sequence], budget: int) -> tuple[list[Case], list[str], str]:
    """(cases, notes, error): an axis that cannot even be laid out fails, and the others run."""
    try:
        return (*plan(name, asked, budget), "")
    except Exception as error:
        return [], [], first_line(error)


def _walk(
    subject: Subject, name: str, cases: list[Case], notes: list[str], error: str, bisect: bool, bar: tqdm
) -> rp.AxisResult:
    bar.set_description(name)
    if not cases:
        status = rp.FAILED if error else rp.NOT_APPLICABLE
        return rp.AxisResult(name, status, error or "; ".join(notes))
    done, first_bad, failed = [], None, ""
    for case in cases:
        try:
            got = case.got()
            difference = compare(got, case.want(), _has_logits(subject, got))
        except Exception as error:  # whatever a model raises on one axis: it is reported, and the others run
            failed = failed or f"{case.name}: {first_line(error)}"
        else:
            done.append(rp.CaseResult(case.name, case.text, difference))
            if difference.differing and first_bad is None:
                first_bad = case
        bar.update()
    culprit = None
    if first_bad is not None and bisect:
        try:
            culprit = find_culprit(subject.model, first_bad)
        except Exception as error:  # hooks and dispatch modes meet foreign code; the numbers stand without a name
            notes = [*notes, f"the first place that differs could not be named: {first_line(error)}"]
        else:
            if culprit is None:
                notes = [*notes, f"{first_bad.name}: it differed once and not when it was run again to name the place"]
    status = rp.DIFFERS if first_bad is not None else rp.FAILED if failed else rp.SAME
    if first_bad is not None and failed:
        notes = [*notes, f"could not run: {failed}"]
        failed = ""
    return rp.AxisResult(name, status, failed, tuple(notes), tuple(done), culprit)


def _has_logits(subject: Subject, result: torch.Tensor) -> bool:
    return result.dim() == 2 and result.shape[1] == subject.vocabulary
