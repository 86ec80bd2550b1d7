"""Rules of the source that keep an order of summation from following the shape of a problem."""

import inspect
import re
from pathlib import Path

import pytest

from hf_batchinv import hub

SOURCES = sorted((Path(__file__).resolve().parents[1] / "hub_kernels").glob("*/torch-ext/**/*.py"))
SHAPE_TUNED = re.compile(r"triton\.autotune|tl\.atomic_|num_programs|multi_processor_count")


def test_kernels_are_not_tuned_by_shape():
    """A line that looks at the size of the GPU says why the order of a sum does not follow from it."""
    assert len(SOURCES) > 30
    lines = [(path.name, line) for path in SOURCES for line in path.read_text().splitlines()]
    assert [item for item in lines if SHAPE_TUNED.search(item[1]) and "order-free:" not in item[1]] == []


@pytest.mark.parametrize("family", sorted(hub.FAMILIES))
def test_contracts_do_not_see_the_batch(family):
    """No function of a contract takes a number of rows, a batch size, a query length or a cache length."""
    contract = __import__(f"{hub.load(family).__name__}.contract", fromlist=["contract"])
    assert isinstance(contract.NUMERICS_VERSION, int)
    functions = [f for _, f in inspect.getmembers(contract, inspect.isfunction) if f.__module__ == contract.__name__]
    assert functions
    banned = {"m", "rows", "batch", "batch_size", "tokens", "length", "q_len", "kv_len", "query_len", "seq_len"}
    for function in functions:
        assert not banned & set(inspect.signature(function).parameters), function


@pytest.mark.parametrize("name, packages", [("_verdicts.py", 2), ("_dispatch.py", 4), ("_relaunch.py", 4)])
def test_files_that_packages_share_are_the_same(name, packages):
    """Each package must work alone on the Hub, so what they share is there once in each."""
    copies = [path for path in SOURCES if path.name == name]
    assert len(copies) == packages and len({path.read_bytes() for path in copies}) == 1, copies
