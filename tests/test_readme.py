"""The README says what is true: its code runs, its table is the one measured, its files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_batchinv.smollm2 import find_smollm2

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.+?)```", README, flags=re.DOTALL)
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("options", [[], ["--models"]], ids=["kernels", "models"])
def test_cost_table_is_the_one_made_from_the_result_files(options):
    command = [sys.executable, str(ROOT / "hub_kernels" / "cost_table.py"), *options]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert table in README


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_test_command_is_the_one_of_ci():
    (command,) = re.findall(r'pip install -e "\.\[test\]" && (.+)', README)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def run_block(code: str) -> list[str]:
    """Run a code block of the README; return the lines that it prints."""
    assert HUB_NAME in code
    code = code.replace(HUB_NAME, find_smollm2())  # the Hub need not be reachable here
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()


@pytest.mark.slow
def test_proof_runs_and_prints_what_it_says():
    proof, _ = BLOCKS
    stock, converted = run_block(proof)
    values = r"values that depend on the batch: (\d+) of (\d+)"
    assert int(re.fullmatch(f"sdpa {values}", stock)[1]) > 0
    assert int(re.fullmatch(f"batch_invariant {values}", converted)[1]) == 0
    assert converted in README


@pytest.mark.slow
def test_request_of_continuous_batching_has_the_bits_of_one_alone():
    _, batching = BLOCKS
    assert run_block(batching) == ["True"] * 3
