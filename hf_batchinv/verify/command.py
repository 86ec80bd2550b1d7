"""One run of `hf-batchinv verify`: load, convert, verify, write."""

import importlib.util
import json
import sys
from pathlib import Path

from ..conversion import convert
from ..demo import UsageError, pick_device
from ..loading import load_model, load_tokenizer
from . import verify
from .report import Report
from .run import chosen_axes


def run_verify(
    name: str,
    *,
    revision: str | None,
    dtype: str,
    device: str,
    axes: str,
    budget: int,
    texts: Path | None,
    stock: bool,
    strict: bool,
    html: Path | None,
    png: Path | None,
) -> Report:
    """Verify a model and write what was asked for.

    Raises UsageError or VerifyError for what cannot be followed, UnsupportedModelError as `convert` does; everything
    that can be checked is checked before the model is loaded.
    """
    chosen_axes(axes)
    wanted = None if texts is None else read_texts(texts)
    for option, path in (("--html", html), ("--png", png)):
        if path is not None:
            _check_output(option, path)
    place = pick_device(device)
    model = load_model(name, revision=revision, dtype=dtype, device=place)
    try:
        tokenizer = load_tokenizer(name, revision)
    except UsageError as error:
        if wanted is not None:
            raise
        print(f"hf-batchinv: {error}; the model is asked random token ids", file=sys.stderr)
        tokenizer = None
    if not stock:
        convert(model, strict=strict)
    report = verify(model, tokenizer, wanted, axes, budget)
    try:
        if html is not None:
            html.write_text(report.to_html(), encoding="utf-8")
        if png is not None:
            report.save_png(png)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error
    return report


def read_texts(path: Path) -> list[str]:
    """The texts of a file: a JSON list of strings if its name ends in .json, else paragraphs, with empty lines between.

    Raises UsageError if it cannot be read or holds none.
    """
    try:
        content = path.read_text(encoding="utf-8")
        found = json.loads(content) if path.suffix == ".json" else content.split("\n\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"--texts must be a readable text or JSON file, got {path}: {error}") from error
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise UsageError(f"--texts must hold a list of strings, got another kind of JSON in {path}")
    found = [text.strip() for text in found if text.strip()]
    if not found:
        raise UsageError(f"--texts must hold at least one text, got none in {path}")
    return found


def _check_output(option: str, path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"{option} must be a file in a directory that exists, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option} needs matplotlib, which is not installed; pip install hf_batchinv[bench]")
