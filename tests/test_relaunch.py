"""A kernel that is launched again gets the arguments that Triton gave it the first time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="launches again through Triton itself, as the first time"
)

TESTS = Path(__file__).resolve().parent
# In a process of its own: a driver without a GPU, whose launcher writes the arguments down.
CODE = """
import json
import sys
sys.path.insert(0, {tests!r})
import compile_only
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

launched, bound = [], []

class Launcher:
    def __init__(self, src, metadata):
        self.name = src.fn.__name__

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, False, False, None, None, *arguments)

    def launch(self, *arguments):
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        plain[10:13] = []  # what Triton's own launch hooks would get
        launched.append([self.name, [repr(a) for a in plain]])

class Utils:
    load_binary = staticmethod(lambda *arguments: (1, 2, 32, 0, 1024))
    get_device_properties = staticmethod(lambda device: dict(max_shared_mem=232448))

class Driver(compile_only._Driver):
    launcher_cls, utils = Launcher, Utils()

driver.set_active(Driver("9.0"))
torch.cuda.current_device = torch._C._cuda_getCurrentRawStream = lambda *device: 0
run = JITFunction.run
JITFunction.run = lambda self, *a, **k: bound.append(self.__name__) or run(self, *a, **k)
{body}
print(json.dumps(dict(launched=launched, bound=bound)))
"""
NORM = """
launch, contract = compile_only.load("norm", "_launch", "contract")
x, weight = torch.randn(8, 256), torch.randn(256)
rounding = contract.Rounding(torch.float32, torch.float32, torch.float32, torch.float32)
call = launch.rms_norm_call(x, None, weight, 1e-6, 256, 1.0, False, "silu", rounding)
out = torch.empty(8, 256)
torch.Tensor.new_empty = lambda *a, **k: out
"""
ATTENTION = """
launch, plan = compile_only.load("flash-attn", "_launch", "plan")
launch.gpu_of = lambda device: plan.Gpu((9, 0), 132, hopper_kernel=True)
query, key = torch.randn(1, 8, 1, 64).half(), torch.randn(1, 2, 3000, 64).half()
offset = torch.tensor([2999], dtype=torch.int32)
tensors = (query, key, key, None, None, None, None, offset)
call = launch.attention_call(*tensors, True, 0.1, -1, -1, 0.0)
kept = {}
torch.Tensor.new_empty = lambda tensor, shape, **k: kept.setdefault(shape, torch.empty(shape, **k))
"""
LINEAR = """
launch, plan = compile_only.load("linear", "_launch", "plan")
launch.gpu_of = lambda device: plan.Gpu((9, 0), 132)
x, weight, y = torch.randn(1, 512).half(), torch.randn(64, 512).half(), torch.empty(1, 64).half()
call = launch._triton_linear(x, weight, None)
"""
TWICE = {
    "norm": NORM + "for _ in range(3): call(x, None, weight)",
    "attention": ATTENTION + "for _ in range(3): call(*tensors)",
    "linear": LINEAR + "for _ in range(3): call(x, weight, None, y)",
}


def run(body: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = CODE.format(tests=str(TESTS), body=body)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("op, kernels", [("norm", 1), ("attention", 2), ("linear", 1)])
def test_a_repeated_launch_is_the_first_one_without_triton_binding_it(op, kernels):
    found = run(TWICE[op])
    assert len(found["bound"]) == kernels and len(found["launched"]) == 3 * kernels
    first, *again = (found["launched"][i : i + kernels] for i in range(0, 3 * kernels, kernels))
    assert again == [first, first]


def test_another_alignment_is_triton_s_to_decide():
    """An address that is not aligned needs another kernel, and must not get the one at hand."""
    shifted = "odd = torch.randn(513).half()[1:].view(1, 512)\n"
    found = run(LINEAR + shifted + "for each in (x, odd, x, odd): call(each, weight, None, y)")
    assert len(found["bound"]) == 3 and len(found["launched"]) == 4  # x once, odd each time
