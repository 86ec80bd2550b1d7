"""Verdicts of self-checks, kept in one JSON file per user: {key: {"passed": bool, "detail": str}}."""

import functools
import json
import os
import tempfile
from pathlib import Path


def cache_path() -> Path:
    """Where verdicts are kept: `HF_BATCHINV_CACHE`, or ~/.cache/hf_batchinv."""
    root = os.environ.get("HF_BATCHINV_CACHE") or Path.home() / ".cache" / "hf_batchinv"
    return Path(root) / "selfcheck.json"


def _read() -> dict:
    try:
        found = json.loads(cache_path().read_text())
    except (OSError, RuntimeError, ValueError):  # none yet, no home, or written by something else: check again
        return {}
    return {key: verdict for key, verdict in found.items() if _is_verdict(verdict)} if isinstance(found, dict) else {}


def _is_verdict(value: object) -> bool:
    return isinstance(value, dict) and type(value.get("passed")) is bool and isinstance(value.get("detail"), str)


@functools.cache
def _known() -> dict:
    """The file's content when this process first asked, and what it has found since."""
    return _read()


def get(key: str) -> bool | None:
    """The verdict, or None if nothing is known."""
    verdict = _known().get(key)
    return None if verdict is None else bool(verdict["passed"])


def put(key: str, passed: bool, detail: str) -> None:
    """Remember a verdict here and on disk, beside those that other processes have written meanwhile."""
    _known()[key] = {"passed": passed, "detail": detail}
    try:
        path = cache_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({**_read(), key: _known()[key]}, file, indent=1)
        os.replace(file.name, path)
    except (OSError, RuntimeError):  # a read-only home, or none: the next process checks again
        return


def matching(prefix: str) -> dict[str, dict]:
    """All known verdicts whose key starts with `prefix`."""
    return {key: verdict for key, verdict in _known().items() if key.startswith(prefix)}
