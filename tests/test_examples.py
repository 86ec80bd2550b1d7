"""The examples run as a user runs them, and print what they promise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(name, *arguments):
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])  # works in a bare checkout, too
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_quickstart_shows_that_the_one_line_makes_batches_agree():
    stock, converted = re.findall(r"change in a batch of 4: (\d+) of (\d+)", run("quickstart.py"))
    assert int(stock[0]) > 0
    assert converted == ("0", stock[1])


def test_a_kernel_package_works_without_hf_batchinv():
    source = (EXAMPLES / "hub_kernel_alone.py").read_text(encoding="utf-8")
    assert "import hf_batchinv" not in source and "from hf_batchinv" not in source
    stock, ours = re.findall(r"(\d+) of 576 values change", run("hub_kernel_alone.py"))
    assert int(stock) > 0
    assert int(ours) == 0


def test_throughput_prints_rows_of_both_sides():
    size = ["--batch", "2", "--prompt", "8", "--new-tokens", "4", "--cache", "dynamic", "--jobs", "generate"]
    result = json.loads(run("throughput.py", "--random-weights", "tiny", *size, "--device", "cpu", "--json"))
    (row,) = result["rows"]
    assert row["bits_ok"] and row["ours_s"] > 0 and row["stock_s"] > 0


def test_every_example_is_run_by_a_test():
    tests = Path(__file__).read_text(encoding="utf-8")
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(re.findall(r'run\("(\w+\.py)"', tests))
