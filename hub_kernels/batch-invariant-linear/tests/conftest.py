"""Loading of the kernel package, bitwise comparison, and the rule for GPU tests."""

import importlib
import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

REPO_ID = "hf-batchinv/batch-invariant-linear"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pytest_collection_modifyitems(items):
    if HAS_CUDA:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def kernel():
    """The kernel package: the build that LOCAL_KERNELS names, or the sources."""
    if REPO_ID in os.environ.get("LOCAL_KERNELS", ""):
        from kernels import get_kernel

        return get_kernel(REPO_ID, version=1)
    from hf_batchinv import hub

    return hub.load("linear")


@pytest.fixture(scope="session")
def module(kernel):
    """Give a private module of the package by name: module("_cpu_plan")."""
    return lambda name: importlib.import_module(f"{kernel.__name__}.{name}")


def _differing(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, got.dtype, want.shape, want.dtype)
    integers = _INTEGERS[got.element_size()]
    return (got.contiguous().view(integers) != want.contiguous().view(integers)).flatten().nonzero().flatten()


@pytest.fixture(scope="session")
def count_differing_bits():
    """Number of elements whose bit patterns differ."""
    return lambda got, want: len(_differing(got, want))


@pytest.fixture(scope="session")
def assert_same_bits():
    """Unlike torch.equal this tells 0.0 from -0.0."""

    def check(got, want, what=""):
        differing = _differing(got, want)
        if len(differing):
            i = int(differing[0])
            raise AssertionError(
                f"{what}: {len(differing)} of {got.numel()} values differ, first at flat index {i}: "
                f"{got.flatten()[i].item()!r} != {want.flatten()[i].item()!r}"
            )

    return check


@pytest.fixture(scope="session")
def assert_as_accurate():
    """Our root mean square error against float64 is at most 1.1 of the stock op's.

    The floor, half a unit in the last place of the largest result, is what rounding that result alone may cost.
    """

    def check(got, stock, exact):
        exact = exact.double()
        ours, theirs = ((y.double() - exact).square().mean().sqrt().item() for y in (got, stock))
        floor = exact.abs().max().item() * torch.finfo(torch.float32).eps / 4
        assert ours <= 1.1 * theirs + floor, (ours, theirs, floor)

    return check


@pytest.fixture(autouse=True)
def no_grad():
    """The ops have no backward; tests that want gradients enable them."""
    with torch.no_grad():
        yield
