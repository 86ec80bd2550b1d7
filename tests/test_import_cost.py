"""Importing hf_batchinv costs next to nothing on top of what loading any model imports."""

import json
import subprocess
import sys

import pytest

MOST_SECONDS = 0.3
RUNS = 5

CODE = """
import json, sys, time
import transformers
from transformers import AttentionInterface, GenerationMixin, PreTrainedModel, activations, masking_utils
before = set(sys.modules)
begin = time.perf_counter()
import {imported}
seconds = time.perf_counter() - begin
print(json.dumps(dict(seconds=seconds, modules=sorted(set(sys.modules) - before))))
"""


def measure(imported):
    """Seconds and modules that an import adds in a fresh process with a model class at hand.

    Transformers itself is lazy: its models, torch with them and, through torch's compiler, triton come in with the
    first model class.
    """
    code = CODE.format(imported=imported)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def runs():
    return [measure("hf_batchinv") for _ in range(RUNS)]


def test_import_takes_at_most_a_third_of_a_second(runs):
    assert min(run["seconds"] for run in runs) <= MOST_SECONDS, [run["seconds"] for run in runs]


def test_import_adds_no_triton_no_kernel_and_no_command_line(runs):
    added = runs[0]["modules"]
    assert "hf_batchinv.conversion" in added
    banned = [name for name in added if name.split(".")[0] in ("triton", "kernels", "rich", "typer", "matplotlib")]
    heavy = (".bench", ".throughput", ".verify.")
    banned += [name for name in added if name.endswith(("_launch", "_kernel", "_cublaslt"))]
    banned += [name for name in added if any(part in name for part in heavy)]
    assert not banned


def test_import_compiles_nothing(tmp_path):
    """Triton compiled nothing if its cache is not even there; the self-checks left no verdict either."""
    code = "import os; os.environ.update({!r}); import transformers, hf_batchinv".format(
        {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "HF_BATCHINV_CACHE": str(tmp_path / "verdicts")}
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_import_is_seen():
    """The control: the same measure of a package that loads a compiler."""
    slow = measure("torch._inductor.compile_fx")
    assert slow["seconds"] > MOST_SECONDS and "torch._inductor.compile_fx" in slow["modules"]
