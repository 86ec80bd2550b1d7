"""Run every `gpu` test and write what came out: `python tests/run_gpu_suite.py OUT.json [pytest arguments]`.

`--seconds N` stops the run after so long, and the result says so. Most of the time is compiling: the longest tests go
first, and `-n 16 --dist load --maxschedchunk 1` keeps 16 cores busy to the end.
"""

import argparse
import json
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

PATHS = ("hub_kernels/batch-invariant-flash-attn/tests/test_tiles.py", "tests", "hub_kernels")


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float)
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *PATHS, "-m", "gpu", f"--junitxml={report}", "-q", *arguments]
        run = subprocess.Popen(command, cwd=ROOT)
        stopped = False
        try:
            code = run.wait(options.seconds)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)  # like Ctrl-C: pytest still writes its report
            code, stopped = run.wait(), True
        suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    cases = [case for case in suite.iter("testcase")]
    by_file: dict[str, int] = {}
    for case in cases:
        by_file[case.get("classname")] = by_file.get(case.get("classname"), 0) + 1
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("failure") is not None]
    env = environment("cuda" if torch.cuda.is_available() else "cpu")
    result = {"env": env, **counts, "failed": failed, "stopped": stopped, "seconds": float(suite.get("time"))}
    options.out.write_text(json.dumps(result | {"by_file": by_file}, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
