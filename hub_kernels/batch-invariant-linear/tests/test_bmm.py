"""bmm: a row has the same bits whatever else is in the product."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(64, 64), (100, 130), (7, 3), (1, 1), (300, 1)]  # (K, N)


def operands(batch, rows, k, n, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, rows, k, generator=generator).to(device, dtype)
    return x, torch.randn(batch, k, n, generator=generator).to(device, dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_has_the_same_bits_in_any_batch(kernel, assert_same_bits, shape, dtype, device):
    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(
        batch=st.integers(1, 10),
        rows=st.integers(1, 70),
        item=st.integers(0, 9),
        row=st.integers(0, 69),
        layout=st.sampled_from(["plain", "x transposed", "y transposed", "strided", "offset"]),
    )
    def check(batch, rows, item, row, layout):
        item, row = item % batch, row % rows
        x_alone, y_alone = operands(1, 1, *shape, dtype, device)
        x, y = operands(batch, rows, *shape, dtype, device, seed=1)
        x[item, row], y[item] = x_alone[0, 0], y_alone[0]
        if layout == "x transposed":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "y transposed":
            y = y.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "strided":
            x = torch.stack([x, x], -1)[..., 1]
            y = torch.stack([y, y], 1)[:, 0]
        elif layout == "offset":
            x, y = (t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t) for t in (x, y))
        assert_same_bits(kernel.bmm(x, y)[item, row], kernel.bmm(x_alone, y_alone)[0, 0], f"{batch}, {rows}, {layout}")

    check()


@pytest.mark.parametrize("device", DEVICES)
def test_stock_bmm_fails_this_check(kernel, assert_same_bits, count_differing_bits, device):
    differing = 0
    for shape in ((64, 64), (1000, 100), (4096, 512)):
        x, y = operands(3, 40, *shape, torch.float32, device)
        for rows in (1, 2, 7):
            differing += count_differing_bits(torch.bmm(x[:, :rows], y), torch.bmm(x, y)[:, :rows])
            assert_same_bits(kernel.bmm(x[:, :rows], y), kernel.bmm(x, y)[:, :rows])
    assert differing > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_columns_and_trailing_zeros_do_not_change_bits(kernel, assert_same_bits, dtype, device):
    """What attention over a padded neighbour needs: more keys, with weight zero, leave a row as it is."""
    x, y = operands(2, 5, 90, 200, dtype, device)
    want = kernel.bmm(x, y)
    for columns in (1, 63, 64, 65, 130):
        assert_same_bits(kernel.bmm(x, y[:, :, :columns]), want[:, :, :columns], f"{columns} columns")
    for extra in (1, 38, 39, 200):
        longer_x = torch.cat([x, x.new_zeros(2, 5, extra)], 2)
        longer_y = torch.cat([y, y.new_ones(2, extra, 200)], 1)
        assert_same_bits(kernel.bmm(longer_x, longer_y), want, f"{extra} trailing zeros")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_as_accurate_as_stock(kernel, assert_as_accurate, shape, dtype, device):
    x, y = operands(4, 33, *shape, dtype, device)
    assert_as_accurate(kernel.bmm(x, y), torch.bmm(x, y), torch.bmm(x.double(), y.double()))


def test_nan_stays_in_its_row_and_column(kernel, assert_same_bits):
    x, y = operands(2, 5, 90, 70, torch.float32, "cpu")
    clean = kernel.bmm(x, y)
    x[0, 2, 3], y[1, 4, 5] = float("nan"), float("inf")
    out = kernel.bmm(x, y)
    assert out[0, 2].isnan().all() and not out[1, :, 5].isfinite().any()
    out[0, 2], out[1, :, 5] = clean[0, 2], clean[1, :, 5]
    assert_same_bits(out, clean)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)], ids=str)
def test_empty_operands(kernel, shape):
    batch, rows, k, n = shape
    out = kernel.bmm(torch.randn(batch, rows, k), torch.randn(batch, k, n))
    assert out.shape == (batch, rows, n) and not out.any()


X, Y = torch.randn(2, 3, 4), torch.randn(2, 4, 5)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((X[0], Y[0]), ValueError, "expected x of shape (B, M, K), got (3, 4)"),
        ((X, Y[:1]), ValueError, "expected y of shape (2, 4, N), got (1, 4, 5)"),
        ((X, Y[:, :3]), ValueError, "expected y of shape (2, 4, N), got (2, 3, 5)"),
        ((X, Y.half()), TypeError, "expected y of the dtype of x, torch.float32, got torch.float16"),
        ((X.int(), Y.int()), TypeError, "expected x of dtype float32, float16 or bfloat16, got torch.int32"),
        ((X, Y.to("meta")), ValueError, "expected y on the device of x, cpu, got meta"),
    ],
)
def test_refusal_is_one_sentence(kernel, arguments, error, words):
    with pytest.raises(error) as caught:
        kernel.bmm(*arguments)
    assert str(caught.value).startswith("bmm: ") and words in str(caught.value) and "; " in str(caught.value)
