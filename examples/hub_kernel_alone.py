"""One kernel package without hf_batchinv: a linear layer whose rows do not know how many other rows there are.

python examples/hub_kernel_alone.py                                     # builds the package from this checkout
python examples/hub_kernel_alone.py hf-batchinv/batch-invariant-linear  # fetches it from the Hub
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import kernels
import torch
import torch.nn.functional as F

PACKAGE = "batch-invariant-linear"

if len(sys.argv) > 1:
    package = kernels.get_kernel(sys.argv[1], version=1, trust_remote_code=[sys.argv[1]])
else:
    builder = Path(__file__).resolve().parent.parent / "hub_kernels" / "build.py"
    built = tempfile.TemporaryDirectory()  # goes away with the script
    subprocess.run([sys.executable, builder, PACKAGE, "--out", built.name], check=True, stdout=subprocess.DEVNULL)
    package = kernels.get_local_kernel(Path(built.name) / PACKAGE / "build")

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x = torch.randn(64, 1536, device=device)
weight = torch.randn(576, 1536, device=device)


def values_that_depend_on_the_batch(linear):
    """Count the outputs of x's first row that change when the other 63 rows come along."""
    alone, in_batch = linear(x[:1], weight), linear(x, weight)[:1]
    return int((alone.view(torch.int32) != in_batch.view(torch.int32)).sum())


print(f"F.linear: {values_that_depend_on_the_batch(F.linear)} of 576 values change with the batch")
print(f"{PACKAGE}: {values_that_depend_on_the_batch(package.linear)} of 576 values change with the batch")
