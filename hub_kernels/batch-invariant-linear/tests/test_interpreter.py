"""The Triton kernels' logic on a CPU, in Triton's interpreter, against float64.

Bits say nothing here: the interpreter multiplies each tile with one NumPy call. bfloat16 products are left out, since
the interpreter multiplies their integer patterns.
"""

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests run the compiled kernels"),
]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(1, 5, 7), (5, 33, 70), (70, 64, 128), (3, 20, 600)], ids=str)
def test_every_tile_computes_a_linear(module, shape, dtype):
    launch, plan = module("_launch"), module("plan")
    rows, n, k = shape
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=generator).to(dtype) for size in ((rows, k), (n, k), (n,)))
    exact = x.double() @ weight.double().t() + bias.double()
    for tile in plan.all_tiles(k, dtype, plan.Gpu((9, 0), 4)):
        if tile.tma and (n % 8 or k % 8):
            continue
        for apart in (False, True):
            got = launch.launch_linear(x, weight, bias, tile, apart)
            assert (got.double() - exact).abs().max() < TOLERANCE[dtype] * 4, (tile, apart)


def test_strided_operands(module):
    launch = module("_launch")
    x, weight = torch.randn(24, 9).t(), torch.randn(24, 2, 5)[:, 1].t()
    torch.testing.assert_close(launch.launch_linear(x, weight, None), x @ weight.t(), atol=1e-4, rtol=1e-4)


def test_bmm(module):
    x, y = torch.randn(3, 5, 16), torch.randn(3, 16, 9)
    torch.testing.assert_close(module("_launch").launch_bmm(x, y), x @ y, atol=1e-4, rtol=1e-4)


def test_grouped_linear_with_an_empty_expert_and_rows_left_over(module):
    x, weight = torch.randn(50, 24), torch.randn(4, 9, 24)
    ends = [3, 3, 40, 45]
    got = module("_launch").launch_grouped_linear(x, weight, torch.tensor(ends, dtype=torch.int32))
    start = 0
    for expert, end in enumerate(ends):
        torch.testing.assert_close(got[start:end], x[start:end] @ weight[expert].t(), atol=1e-4, rtol=1e-4)
        start = end
    assert (got[45:] == 0).all()


@pytest.mark.parametrize("k", [100, 600])
def test_infinite_and_nan_rows_stay_what_they_are(module, k):
    x, weight = torch.randn(4, k), torch.rand(3, k) + 0.1
    x[1, 5], x[2, 5] = float("inf"), float("nan")
    got = module("_launch").launch_linear(x, weight, None)
    assert (got[1] == float("inf")).all() and got[2].isnan().all() and got[[0, 3]].isfinite().all()
