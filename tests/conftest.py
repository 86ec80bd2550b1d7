"""Set-up that must come before anything imports triton or huggingface_hub, and the rule for GPU tests.

The hooks see every collected test, also those of the kernel packages in hub_kernels/.
"""

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    # Lets tests run the Triton kernels on CPU tensors. Triton reads it once, when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# No test may need the network; huggingface_hub reads it once, when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items):
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
