"""grouped_linear: a row has the bits of `linear` with its expert's weight, whatever else was routed there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N, K = 48, 96


def operands(rows, experts, dtype, device, n=N, k=K):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=generator).to(device, dtype)
    return x, (torch.randn(experts, n, k, generator=generator) / k**0.5).to(device, dtype)


def offsets_of(counts, device):
    return torch.tensor(counts, device=device).cumsum(0).int()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_row_has_the_bits_of_linear_alone(kernel, assert_same_bits, dtype, device):
    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(counts=st.lists(st.sampled_from([0, 0, 1, 2, 3, 17, 40]), min_size=1, max_size=6), unused=st.integers(0, 5))
    def check(counts, unused):
        x, weight = operands(sum(counts) + unused, len(counts), dtype, device)
        y = kernel.grouped_linear(x, weight, offsets_of(counts, device))
        start = 0
        for expert, count in enumerate(counts):
            for row in {start, start + count - 1} if count else ():
                assert_same_bits(y[row], kernel.linear(x[row], weight[expert]), f"row {row} of {counts}")
            start += count
        assert y.shape == (len(x), N) and not y[start:].any()

    check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_weights_stored_transposed(kernel, assert_same_bits, dtype, device):
    x, weight = operands(30, 3, dtype, device)
    offsets = offsets_of([10, 0, 20], device)
    stored = weight.transpose(1, 2).contiguous()
    assert_same_bits(
        kernel.grouped_linear(x, stored.transpose(1, 2), offsets), kernel.grouped_linear(x, weight, offsets)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_is_as_accurate_as_stock(kernel, assert_as_accurate, dtype, device):
    x, weight = operands(30, 2, dtype, device)
    y = kernel.grouped_linear(x, weight, offsets_of([10, 20], device))
    stock = torch.cat([x[:10] @ weight[0].t(), x[10:] @ weight[1].t()])
    exact = torch.cat([x[:10].double() @ weight[0].double().t(), x[10:].double() @ weight[1].double().t()])
    assert_as_accurate(y, stock, exact)


def test_a_loop_of_stock_products_fails_this_check(count_differing_bits):
    x, weight = operands(40, 1, torch.float32, "cpu", n=1000, k=1000)
    assert count_differing_bits((x[:1] @ weight[0].t()), (x @ weight[0].t())[:1]) > 0


def test_without_rows_or_experts(kernel):
    x, weight = operands(0, 2, torch.float32, "cpu")
    assert kernel.grouped_linear(x, weight, offsets_of([0, 0], "cpu")).shape == (0, N)
    x = torch.randn(3, K)
    assert not kernel.grouped_linear(x, weight[:0], torch.empty(0, dtype=torch.int32)).any()


X, W, ENDS = torch.randn(4, 16), torch.randn(2, 8, 16), torch.tensor([1, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((X[0], W, ENDS), ValueError, "expected x of shape (T, 16), got (16,)"),
        ((X[:, :8], W, ENDS), ValueError, "expected x of shape (T, 16), got (4, 8)"),
        ((X, W[0], ENDS), ValueError, "expected weight of shape (E, N, K)"),
        ((X, W, ENDS.long()), TypeError, "expected offsets of dtype int32, got torch.int64"),
        ((X, W, ENDS[:1]), ValueError, "expected offsets of shape (2,) on cpu, got (1,) on cpu"),
        ((X, W, ENDS.flip(0)), ValueError, "expected offsets ascending and within 0 ... 4, got [4, 1]"),
        ((X, W, ENDS + 1), ValueError, "expected offsets ascending and within 0 ... 4, got [2, 5]"),
        ((X, W, ENDS - 2), ValueError, "expected offsets ascending and within 0 ... 4, got [-1, 2]"),
        ((X, W.half(), ENDS), TypeError, "expected weight of the dtype of x, torch.float32, got torch.float16"),
    ],
)
def test_refusal_is_one_sentence(kernel, arguments, error, words):
    with pytest.raises(error) as caught:
        kernel.grouped_linear(*arguments)
    assert str(caught.value).startswith("grouped_linear: ") and words in str(caught.value) and "; " in str(caught.value)
