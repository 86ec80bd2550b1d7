"""Run every `gpu` test and write what came out: `python tests/run_gpu_suite.py OUT.json [pytest arguments]`.

`--seconds N` stops the run after so long, and the result names what was left; `--left-of EARLIER.json` runs just that.
Most of the time is compiling: the longest tests go first, and `-n 16 --dist load --maxschedchunk 1` keeps 16 cores busy
to the end.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from hf_batchinv.bench.timing import environment  # noqa: E402

# Where the run notes which tests there are, and which of them came to an end: this file is a plugin of it, too.
COLLECTED, ENDED = "GPU_SUITE_COLLECTED", "GPU_SUITE_ENDED"
FIRST = "hub_kernels/batch-invariant-flash-attn/tests/test_tiles.py"
PATHS = ("tests", "hub_kernels")


def pytest_collection_modifyitems(items) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_collection_finish(session) -> None:
    note = Path(os.environ[COLLECTED])
    mine = note.with_suffix(f".{os.getpid()}")  # every worker collects the same
    mine.write_text("\n".join(item.nodeid for item in session.items))
    mine.replace(note)


def pytest_runtest_logfinish(nodeid: str) -> None:
    with open(os.environ[ENDED], "a") as note:
        note.write(nodeid + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--left-of", type=Path)
    options, arguments = parser.parse_known_args()
    tests = PATHS if options.left_of is None else json.loads(options.left_of.read_text())["left"]
    if not tests:
        parser.error(f"--left-of {options.left_of}: expected a run that left tests, got one that ended all")
    with tempfile.TemporaryDirectory() as folder:
        report, collected, ended = (Path(folder) / name for name in ("report.xml", "collected", "ended"))
        ended.touch()
        notes = {COLLECTED: str(collected), ENDED: str(ended)}
        plugin = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))}
        command = [sys.executable, "-m", "pytest", *tests, "-m", "gpu", f"--junitxml={report}", "-q"]
        command += ["-p", Path(__file__).stem, *arguments]
        run = subprocess.Popen(command, cwd=ROOT, env=os.environ | notes | plugin)
        stopped = False
        try:
            code = run.wait(options.seconds)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)  # like Ctrl-C: pytest still writes its report
            code, stopped = run.wait(), True
        suite = ElementTree.parse(report).getroot().find("testsuite")
        left = sorted(set(collected.read_text().splitlines()) - set(ended.read_text().splitlines()))
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    cases = [case for case in suite.iter("testcase")]
    by_file: dict[str, int] = {}
    for case in cases:
        by_file[case.get("classname")] = by_file.get(case.get("classname"), 0) + 1
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("failure") is not None]
    env = environment("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "env": env,
        **counts,
        "failed": failed,
        "stopped": stopped,
        "left": left,
        "seconds": float(suite.get("time")),
    }
    options.out.write_text(json.dumps(result | {"by_file": by_file}, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
