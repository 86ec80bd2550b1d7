"""The file of a model, written after every row, since a long run may be cut short."""

import json
from pathlib import Path

from .measure import Outcome
from .settings import Setting

LISTS = ("rows", "runs", "profiles", "left_out")


class Result:
    """What was measured of one model, in memory and, if there is a path, in a file."""

    def __init__(self, env: dict, dtype: str, path: Path | None):
        self.data = {"env": env, "dtype": dtype} | {name: [] for name in LISTS}
        self.path = path

    def resume(self) -> bool:
        """Take over what the file holds; False if it was measured elsewhere or in another dtype, or is not there."""
        if self.path is None or not self.path.exists():
            return False
        try:
            before = json.loads(self.path.read_text())
            same = _head(before) == _head(self.data)
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        if same:
            self.data = before | {"left_out": []}
        return same

    def has(self, setting: Setting) -> bool:
        """Whether there is a row for a setting."""
        return any(tuple(row[name] for name in ("op", "batch", "prompt", "cache")) == setting.key for row in self.rows)

    def add(self, outcome: Outcome) -> None:
        self.rows.append(outcome.row)
        self.data["runs"].extend(outcome.runs)
        self.data["profiles"].extend(outcome.profiles)
        self.write()

    def leave_out(self, setting: Setting, why: str) -> None:
        self.data["left_out"].append({"setting": str(setting), "why": why})
        self.write()

    def write(self) -> None:
        if self.path is not None:
            unfinished = self.path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self.data, indent=1))
            unfinished.replace(self.path)

    @property
    def rows(self) -> list[dict]:
        return self.data["rows"]


def _head(data: dict) -> tuple[str, dict]:
    return data["dtype"], {name: value for name, value in data["env"].items() if name != "date"}
