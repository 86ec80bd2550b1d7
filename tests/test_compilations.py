"""What the first call costs: the number of kernels that Triton compiles for a whole model."""

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hf_batchinv.bench.compilations import count_compilations
from hf_batchinv.bench.first_call import generate, llama, measure

ROOT = Path(__file__).resolve().parents[1]
# Prefill and decode at three batch sizes, self-checks not counted. More is a first call that users notice.
MOST_COMPILATIONS = 40

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "triton"])
def test_generate_at_three_batch_sizes_compiles_few_kernels(engine, monkeypatch):
    monkeypatch.setenv("HF_BATCHINV_ENGINE", engine)
    model = llama("cuda")
    # The self-checks of a GPU that was not tested compile every tile, once in the life of an installation.
    generate(model, 1, 8)
    clear_compiled_kernels()
    row = measure("cuda")
    assert 0 < row["compilations"] <= MOST_COMPILATIONS, row
    with count_compilations() as again:
        for batch, length in ((1, 201), (3, 77), (29, 99)):  # near sizes are served by the kernels at hand
            generate(model, batch, length)
    # Where cuBLASLt may serve, a new configuration of it is compared with one tile of ours, which that may compile.
    assert len(again) <= (engine == "auto"), Counter(again)


def clear_compiled_kernels():
    """Forget what this process has compiled of our packages, so that a count begins at nothing."""
    from triton.runtime.jit import JITFunction

    for name, module in list(sys.modules.items()):
        if "batch_invariant_" in name:
            vars(module).get("_gpu_calls", {}).clear()
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()


COUNTER = """
import sys
sys.path.insert(0, {tests!r})
import compile_only
import torch
launch, contract = compile_only.load("norm", "_launch", "contract")
launch.device_of = lambda x: compile_only.contextlib.nullcontext()
from hf_batchinv.bench.compilations import count_compilations

def softmax(rows, columns):
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    launch.softmax(x, False, torch.empty_like(x))

from triton import knobs
seen = []
knobs.runtime.jit_post_compile_hook = lambda **details: seen.append(details["fn"].name)
with compile_only.Recorder("9.0").recording():
    softmax(8, 64)
    with count_compilations() as names:
        softmax(8, 64)
        softmax(16, 64)  # the process has it already
        softmax(8, 4096)
        softmax(8, 20000)  # two kernels
    softmax(8, 8192)
print(*names)
print(len(seen))
"""


@needs_triton
def test_the_counter_names_every_compilation_and_only_those():
    """Without a GPU: the compile-only driver in a process of its own. A hook that was there before sees everything."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = COUNTER.format(tests=str(ROOT / "tests"))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["softmax_rows", "softmax_chunk_sums", "softmax_chunk_finish", "5"]


@needs_triton
def test_the_row_of_a_first_call():
    """On a CPU nothing is compiled; the calls and the form of the row are the same."""
    row = measure("cpu")
    assert row["op"] == "first_call" and row["compilations"] == 0 and row["kernels"] == {} and row["seconds"] > 0
    assert [call["batch"] for call in row["calls"]] == [1, 4, 32]
