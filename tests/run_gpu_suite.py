"""Run every `gpu` test and write what came out: `python tests/run_gpu_suite.py OUT.json [pytest arguments]`."""

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_batchinv.bench.timing import environment  # noqa: E402


def main() -> int:
    out, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}", "-q", *arguments]
        code = subprocess.run(command, cwd=ROOT).returncode
        suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    cases = [case for case in suite.iter("testcase")]
    by_file: dict[str, int] = {}
    for case in cases:
        by_file[case.get("classname")] = by_file.get(case.get("classname"), 0) + 1
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("failure") is not None]
    result = {"env": environment(), **counts, "failed": failed, "seconds": float(suite.get("time")), "by_file": by_file}
    Path(out).write_text(json.dumps(result, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
