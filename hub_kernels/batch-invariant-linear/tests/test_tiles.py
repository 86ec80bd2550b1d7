"""Tile shapes are speed only: every one of the plan gives the same bits, on shapes with ragged ends."""

import pytest
import torch

SHAPES = [(4096, 1024), (576, 576), (320, 1000), (257, 72), (8, 4096), (1, 17)]  # (N, K)
HALF = [torch.float16, torch.bfloat16]


def cancelling(rows, n, k, dtype):
    """Operands whose exact products are 0: every output is rounding noise, so any change of order shows."""
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(rows, k, device="cuda", generator=generator).to(dtype)
    weight = torch.randn(n, k, device="cuda", generator=generator).to(dtype)
    half = k // 2
    x[:, half : 2 * half] = x[:, :half]
    weight[:, half : 2 * half] = -weight[:, :half]
    return x, weight


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_gives_the_same_bits(module, assert_same_bits, shape, dtype):
    launch, plan = module("_launch"), module("plan")
    n, k = shape
    for rows in (1, 77, 300):
        x, weight = cancelling(rows, n, k, dtype)
        want = launch.launch_linear(x, weight, None)
        for tile in plan.all_tiles(dtype):
            if tile.tma and (n * x.element_size() % 16 or k * x.element_size() % 16):
                continue  # tensor descriptors cannot describe these rows, and the plan does not ask for it
            assert_same_bits(launch.launch_linear(x, weight, None, tile), want, f"{rows} rows, {tile}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype)[6:])
def test_another_order_of_k_is_seen(assert_same_bits, module, dtype):
    """The control: the same operands with K reversed have other bits, so the test above can fail."""
    launch = module("_launch")
    x, weight = cancelling(77, 320, 1000, dtype)
    with pytest.raises(AssertionError):
        assert_same_bits(launch.launch_linear(x.flip(1), weight.flip(1), None), launch.launch_linear(x, weight, None))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=lambda dtype: str(dtype)[6:])
def test_plan_serves_every_number_of_rows_with_a_listed_tile(module, dtype):
    plan = module("plan")
    for n in (1, 576, 4096, 6144, 151936):
        for rows in (1, 4, 5, 16, 17, 33, 64, 65, 128, 1000, 10**6):
            for descriptors in (False, True):
                tile = plan.linear_tile(rows=rows, n=n, dtype=dtype, descriptors=descriptors, multiprocessors=132)
                assert tile in plan.all_tiles(dtype)
                assert descriptors or not tile.tma
