"""The contract: nothing that fixes bits can see how many rows there are."""

import inspect

import pytest
import torch

ROW_WORDS = ("row", "batch", "length", "m", "tokens", "programs", "shape")


def public_functions(module):
    return [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]


def test_contract_functions_have_no_rows_parameter(submodule):
    functions = public_functions(submodule("contract"))
    assert {"row_tile", "chunk_tile", "chunk_count", "rms_norm_rounding"} <= {f.__name__ for f in functions}
    for function in functions:
        for name in inspect.signature(function).parameters:
            assert name not in ROW_WORDS and "row" not in name and "batch" not in name, (function.__name__, name)


def test_plan_is_where_rows_go(submodule):
    """The control of the test above: it would find a rows parameter."""
    parameters = {name for f in public_functions(submodule("plan")) for name in inspect.signature(f).parameters}
    assert "rows" in parameters


def test_tiles_are_pinned(submodule):
    """Another tile means other bits on a GPU: raise NUMERICS_VERSION with it."""
    contract = submodule("contract")
    assert contract.NUMERICS_VERSION == 2
    tiles = {c: contract.row_tile(c) for c in (1, 64, 128, 576, 1000, 1024, 1025, 4096, 8192, 16384)}
    assert {c: (t.rows, t.columns, t.warps) for c, t in tiles.items()} == {
        1: (32, 16, 4),
        64: (32, 64, 4),
        128: (16, 128, 4),
        576: (1, 1024, 2),
        1000: (1, 1024, 2),
        1024: (1, 1024, 2),
        1025: (1, 2048, 4),
        4096: (1, 4096, 8),
        8192: (1, 8192, 16),
        16384: (1, 16384, 16),
    }
    assert not contract.is_single_pass(16385) and contract.chunk_count(16385) == 3
    assert contract.chunk_tile(16385).columns == 8192 and contract.chunk_count(151936) == 19


@pytest.mark.parametrize("columns", [1, 2, 63, 64, 65, 127, 130, 1001])
def test_cpu_row_sum_adds_halves(submodule, assert_same_bits, columns):
    """The order on a CPU, spelt out with scalars."""

    def add(values):
        while len(values) > 64:
            half = len(values) // 2
            folded = [a + b for a, b in zip(values[:half], values[half : 2 * half], strict=True)]
            if len(values) % 2:
                folded[0] = folded[0] + values[-1]
            values = folded
        total = torch.zeros((), dtype=torch.float64)
        for value in values:
            total = total + value.double()
        return total.float()

    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns))
    want = torch.stack([add(list(row)) for row in x])[:, None]
    assert_same_bits(submodule("_cpu").row_sum(x), want)
