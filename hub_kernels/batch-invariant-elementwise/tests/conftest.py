"""Fixtures: the package under test, comparison of bits; and the rule for GPU tests."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for elementwise_cases, in every import mode of pytest

HAS_CUDA = torch.cuda.is_available()
REPO_ID = "hf-batchinv/batch-invariant-elementwise"

if not HAS_CUDA:
    # Lets tests run the Triton kernels on CPU tensors. Triton reads it once, when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    if not HAS_CUDA:
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def kernel():
    """The package: the build that LOCAL_KERNELS names, if it does, and else the sources of this checkout."""
    if f"{REPO_ID}=" in os.environ.get("LOCAL_KERNELS", ""):
        from kernels import get_kernel

        return get_kernel(REPO_ID, revision="v1")
    root = str(Path(__file__).resolve().parents[3])
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module("hf_batchinv.hub").load("elementwise")


@pytest.fixture(scope="session")
def submodule(kernel):
    """Import a module of the package by name; where a function of that name hides it, this still finds the module."""
    return lambda name: importlib.import_module(f"{kernel.__name__}.{name}")


@pytest.fixture(scope="session")
def count_different_bits():
    """Count elements whose bit patterns differ; NaN equals NaN, since NaN has many patterns of one meaning."""

    def count(got, want):
        assert got.shape == want.shape and got.dtype == want.dtype
        integer = {2: torch.int16, 4: torch.int32}[got.element_size()]
        differ = got.contiguous().view(integer) != want.contiguous().view(integer)
        return int((differ & ~(got.isnan() & want.isnan())).sum())

    return count


@pytest.fixture(scope="session")
def assert_same_bits(count_different_bits):
    def check(got, want, what=""):
        different = count_different_bits(got, want)
        assert not different, f"{what}: {different} of {got.numel()} values differ"

    return check
