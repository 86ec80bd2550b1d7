"""linear: a row alone has the bits that it has in any batch."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def dtype_id(value):
    return str(value)[6:] if isinstance(value, torch.dtype) else None


@dataclass(frozen=True)
class Case:
    N: int
    K: int
    bias: bool = False

    @property
    def id(self):
        return f"N{self.N}-K{self.K}" + ("-bias" if self.bias else "")


CASES = [
    Case(96, 256),
    Case(48, 64, bias=True),
    Case(320, 1000, bias=True),
    Case(5, 90),
    Case(1, 96),
    Case(3, 7, bias=True),
    Case(1, 1),
]


def operands(case, rows, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, case.K, generator=generator)
    weight = torch.randn(case.N, case.K, generator=generator) / case.K**0.5
    bias = torch.randn(case.N, generator=generator) if case.bias else None
    return tuple(None if t is None else t.to(device, dtype) for t in (x, weight, bias))


def laid_out(x, layout):
    """The same values in other memory."""
    rows, k = x.shape
    if layout == "offset":
        return x.new_empty(rows * k + 1)[1:].view(rows, k).copy_(x)
    if layout == "strided":
        return x.new_full((2 * rows, 2 * k), float("nan"))[::2, ::2].copy_(x)
    if layout == "transposed":
        return x.t().contiguous().t()
    return x


@pytest.mark.kernels_ci
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_row_has_the_same_bits_in_any_batch(kernel, assert_same_bits, case, dtype, device):
    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(
        rows=st.integers(1, 70),
        position=st.integers(0, 69),
        mates=st.integers(1, 5),
        scale=st.sampled_from([0.0, 1.0, 300.0]),
        layout=st.sampled_from(["plain", "offset", "strided", "transposed"]),
    )
    def check(rows, position, mates, scale, layout):
        x, weight, bias = operands(case, 1, dtype, device)
        batch = operands(case, rows, dtype, device, seed=mates)[0] * scale
        batch[position % rows] = x[0]
        alone = kernel.linear(x, weight, bias)
        together = kernel.linear(laid_out(batch, layout), weight, bias)
        assert_same_bits(together[position % rows], alone[0], f"{rows} rows, {layout}")

    check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_weight_layout_does_not_change_bits(kernel, assert_same_bits, case, dtype, device):
    x, weight, bias = operands(case, 5, dtype, device)
    want = kernel.linear(x, weight, bias)
    for layout in ("offset", "strided", "transposed"):
        assert_same_bits(kernel.linear(x, laid_out(weight, layout), bias), want, layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_is_as_accurate_as_stock(kernel, assert_as_accurate, case, dtype, device):
    x, weight, bias = operands(case, 64, dtype, device)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_as_accurate(kernel.linear(x, weight, bias), F.linear(x, weight, bias), exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_bias_is_added_before_the_only_rounding(kernel, assert_same_bits, dtype, device):
    # x @ w is 1 + 2**-9, which needs the bias to be added unrounded: both 16-bit types round it at magnitude 4.
    for k in (64, 60):
        x = torch.zeros(2, k, dtype=dtype, device=device)
        x[:, 0], x[:, 1] = 1.0, 2.0**-9
        weight = torch.ones(8, k, dtype=dtype, device=device)
        bias = torch.full((8,), 2.0**-9, dtype=dtype, device=device)
        want = torch.full((2, 8), 1 + 2.0**-8, device=device).to(dtype)
        assert_same_bits(kernel.linear(x, weight, bias), want)


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 0), (2, 3), (2, 1, 5)])
def test_leading_dimensions_are_kept(kernel, assert_same_bits, lead):
    x, (_, weight, bias) = torch.randn(*lead, 64), operands(CASES[1], 1, torch.float32, "cpu")
    y = kernel.linear(x, weight, bias)
    assert y.shape == (*lead, 48) and y.dtype == x.dtype and y.is_contiguous()
    assert_same_bits(y.view(-1, 48), kernel.linear(x.reshape(-1, 64), weight, bias))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_row(kernel, assert_same_bits, dtype, device, bad):
    x, weight, bias = operands(CASES[1], 9, dtype, device)
    clean = kernel.linear(x, weight, bias)
    x[4, 3] = bad
    y = kernel.linear(x, weight, bias)
    others = [row for row in range(9) if row != 4]
    assert_same_bits(y[others], clean[others])
    assert not y[4].isfinite().any()
    torch.testing.assert_close(y[4], F.linear(x[4], weight, bias), equal_nan=True)


# --- negative control and reported cases ---


def test_stock_linear_fails_this_check(kernel, assert_same_bits, count_differing_bits):
    x, weight, _ = operands(Case(1000, 1000), 2, torch.float32, "cpu")
    assert count_differing_bits(F.linear(x[:1], weight), F.linear(x, weight)[:1]) > 0
    assert_same_bits(kernel.linear(x[:1], weight), kernel.linear(x, weight)[:1])


@pytest.mark.gpu
def test_stock_linear_fails_this_check_on_a_gpu(kernel, assert_same_bits, count_differing_bits):
    x, weight, _ = operands(Case(4096, 4096), 1024, torch.bfloat16, "cuda")
    assert count_differing_bits(F.linear(x[:1], weight), F.linear(x, weight)[:1]) > 0
    assert_same_bits(kernel.linear(x[:1], weight), kernel.linear(x, weight)[:1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(20, 5), (128, 512), (1024, 2816)], ids=str)
def test_case_34_last_time_step_alone_or_in_its_sequence(kernel, assert_same_bits, device, sizes):
    k, n = sizes
    x, weight, bias = operands(Case(n, k, bias=True), 129, torch.float32, device)
    for length in (1, 2, 10, 128, 129):
        sequence = x[None, :length]
        alone = kernel.linear(sequence[:, -1], weight, bias)
        assert_same_bits(kernel.linear(sequence, weight, bias)[:, -1], alone, f"length {length}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(1000, 1000), (90, 5)], ids=str)
def test_case_136_first_row_alone_or_in_a_small_batch(kernel, assert_same_bits, device, sizes):
    k, n = sizes
    x, weight, _ = operands(Case(n, k), 8, torch.float32, device)
    for rows in (1, 2, 3, 5, 8):
        assert_same_bits(kernel.linear(x[:rows], weight)[0], kernel.linear(x[:1], weight)[0], f"{rows} rows")


@pytest.mark.parametrize("device", DEVICES)
def test_case_137_tags_do_not_depend_on_the_batch(kernel, assert_same_bits, count_differing_bits, device):
    generator = torch.Generator().manual_seed(137)
    weights = [(torch.randn(128, 128, generator=generator) / 128**0.5).to(device) for _ in range(6)]
    head = torch.randn(50, 128, generator=generator).to(device)
    x = torch.randn(1000, 128, generator=generator).to(device)

    def scores(linear, x):
        for weight in weights:
            x = F.gelu(linear(x, weight))
        return linear(x, head)

    together = scores(kernel.linear, x)
    for size in (1, 7, 333):
        rows = x[:200] if size == 1 else x
        apart = torch.cat([scores(kernel.linear, part) for part in rows.split(size)])
        assert_same_bits(apart, together[: len(rows)], f"batches of {size}")
        assert torch.equal(apart.argmax(-1), together[: len(rows)].argmax(-1))
    stock = scores(F.linear, x)
    assert count_differing_bits(torch.cat([scores(F.linear, row[None]) for row in x[:50]]), stock[:50]) > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_case_140_slice_before_or_after_a_3d_linear(kernel, assert_same_bits, device, dtype, has_bias):
    x, weight, bias = operands(Case(512, 1024, bias=has_bias), 200, dtype, device)
    x = x.view(2, 100, 1024)
    assert_same_bits(kernel.linear(x[:1], weight, bias), kernel.linear(x, weight, bias)[:1])


# --- layers ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_layers_compute_what_their_originals_do(kernel, assert_same_bits, dtype, device):
    x, weight, bias = operands(CASES[2], 6, dtype, device)
    want = kernel.linear(x, weight, bias)
    for layer_class, stored in ((kernel.layers.Linear, weight), (kernel.layers.Conv1D, weight.t().contiguous())):
        layer = layer_class()
        layer.weight, layer.bias = torch.nn.Parameter(stored), torch.nn.Parameter(bias)
        assert_same_bits(layer(x), want, layer_class.__name__)
        layer.bias = None
        assert_same_bits(layer(x), kernel.linear(x, weight), layer_class.__name__)


# --- refusals ---

X, W, B = torch.randn(2, 16), torch.randn(8, 16), torch.randn(8)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((X, W[:, :12]), ValueError, "expected x of shape (..., 12), got (2, 16)"),
        ((X[0, 0], W), ValueError, "expected x of shape (..., 16), got ()"),
        ((X, W[0]), ValueError, "expected weight of shape (N, K)"),
        ((X, W[:0]), ValueError, "expected weight of shape (N, K) with N >= 1"),
        ((X[:, :0], W[:, :0]), ValueError, "expected weight of shape (N, K) with N >= 1 and K >= 1"),
        ((X, W, B[:5]), ValueError, "expected bias of shape (8,), got (5,)"),
        ((X, W, B[None]), ValueError, "expected bias of shape (8,), got (1, 8)"),
        ((X.half(), W), TypeError, "expected weight of the dtype of x, torch.float16, got torch.float32"),
        ((X, W, B.bfloat16()), TypeError, "expected bias of the dtype of x, torch.float32, got torch.bfloat16"),
        ((X.double(), W.double()), TypeError, "expected x of dtype float32, float16 or bfloat16, got torch.float64"),
        ((X.to(torch.float8_e4m3fn), W), TypeError, "got torch.float8_e4m3fn"),
        ((X, W.to(torch.int8)), TypeError, "got torch.int8"),
        ((X, W.to("meta")), ValueError, "expected weight on the device of x, cpu, got meta"),
    ],
)
def test_refusal_is_one_sentence(kernel, arguments, error, words):
    with pytest.raises(error) as caught:
        kernel.linear(*arguments)
    message = str(caught.value)
    assert message.startswith("linear: ") and words in message and "; " in message and "\n" not in message
