"""The GPU kernels at real sizes: rows against themselves bit by bit, values against float64."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(4096, 4096), (1024, 3072), (320, 1000), (1, 4096), (1, 1), (77, 90)]  # (N, K)
ROWS = [*range(1, 70), 96, 127, 128, 129, 192, 255, 256, 257, 299, 300]


def operands(rows, n, k, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, k, device="cuda", generator=generator)
    weight = torch.randn(n, k, device="cuda", generator=generator) / k**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(n, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_rows_have_the_same_bits_at_every_m(kernel, assert_same_bits, shape, dtype):
    x, weight, bias = operands(300, *shape, dtype)
    for b in (None, bias):
        want = kernel.linear(x, weight, b)
        for rows in ROWS:
            assert_same_bits(kernel.linear(x[:rows], weight, b), want[:rows], f"first {rows} rows")
            assert_same_bits(kernel.linear(x[-rows:], weight, b), want[-rows:], f"last {rows} rows")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_cancelling_data_shows_no_change_of_order(kernel, module, assert_same_bits, dtype):
    """Exact products are 0 here, so every output is rounding noise: the sharpest check of the order."""
    x, weight = module("_cpu_plan").trial_operands(4096, 1024, dtype)
    x, weight = x.cuda().repeat(100, 1)[:300], weight.cuda()
    want = kernel.linear(x, weight)
    for rows in ROWS:
        assert_same_bits(kernel.linear(x[:rows], weight), want[:rows], f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_is_as_accurate_as_stock(kernel, assert_as_accurate, shape, dtype):
    for rows in (32, 300):  # of a single number nothing can be said
        x, weight, bias = operands(rows, *shape, dtype)
        exact = F.linear(x.double(), weight.double(), bias.double())
        assert_as_accurate(kernel.linear(x, weight, bias), F.linear(x, weight, bias), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 3072), (576, 576), (320, 1000), (4096, 14336)], ids=str)
def test_cublaslt_and_triton_give_the_same_bits(kernel, module, monkeypatch, assert_same_bits, shape, dtype):
    """The second engine, whatever kernel it picks for a number of rows; and it is used where it may be."""
    engine_of = module("linear").engine_of
    served = set()
    for rows in [*range(1, 40), 63, 64, 65, 96, 128, 200, 256, 400, 1000, 2048]:
        x, weight, bias = operands(rows, *shape, dtype, seed=rows)
        for b in (None, bias):
            monkeypatch.setenv("HF_BATCHINV_ENGINE", "triton")
            assert engine_of(x, weight, b) == "triton"
            want = kernel.linear(x, weight, b)
            monkeypatch.setenv("HF_BATCHINV_ENGINE", "auto")
            served.add(engine_of(x, weight, b))
            assert_same_bits(kernel.linear(x, weight, b), want, f"{rows} rows, bias {b is not None}")
    assert "cublaslt" in served


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 128), (1600, 64), (96, 32), (48, 16), (64, 8)], ids=str)
def test_small_weights_have_the_same_bits_from_both_engines(
    kernel, module, monkeypatch, assert_same_bits, shape, dtype
):
    """Here cuBLASLt has kernels that add eight products at a time; one draw of common numbers does not show it."""
    for rows in [*range(1, 20), 33, 64, 128, 300]:
        x, weight = module("selfcheck").cancelling(rows, *shape, dtype, torch.device("cuda"), seed=1234)
        monkeypatch.setenv("HF_BATCHINV_ENGINE", "triton")
        want = kernel.linear(x, weight)
        monkeypatch.setenv("HF_BATCHINV_ENGINE", "auto")
        assert_same_bits(kernel.linear(x, weight), want, f"{rows} rows")


def test_cublaslt_in_a_captured_graph_has_the_bits_of_eager(kernel, module, assert_same_bits):
    x, weight, bias = operands(64, 4096, 4096, torch.bfloat16)
    want = kernel.linear(x, weight, bias)
    assert module("linear").engine_of(x, weight, bias) == "cublaslt"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kernel.linear(x, weight, bias)
    graph.replay()
    assert_same_bits(got, want)


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_layouts_do_not_change_bits(kernel, assert_same_bits, dtype, layout):
    x, weight, _ = operands(130, 320, 1000, dtype)

    def laid_out(t):
        if layout == "transposed":
            return t.t().contiguous().t()
        if layout == "strided":
            return torch.stack([t, t], -1)[..., 1]
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)

    for rows in (1, 17, 130):
        want = kernel.linear(x[:rows], weight)
        assert_same_bits(kernel.linear(laid_out(x[:rows]), weight), want, "x")
        assert_same_bits(kernel.linear(x[:rows], laid_out(weight)), want, "weight")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(128, 512), (1000, 77)], ids=str)
def test_bmm_rows_have_the_same_bits_at_every_m(kernel, assert_same_bits, assert_as_accurate, shape, dtype):
    k, n = shape
    x = torch.randn(9, 300, k, device="cuda").to(dtype)
    y = torch.randn(9, k, n, device="cuda").to(dtype)
    want = kernel.bmm(x, y)
    assert_as_accurate(want, torch.bmm(x, y), torch.bmm(x.double(), y.double()))
    for rows in ROWS:
        assert_same_bits(kernel.bmm(x[:, :rows], y), want[:, :rows], f"{rows} rows")
        assert_same_bits(kernel.bmm(x[3:5, -rows:], y[3:5]), want[3:5, -rows:], f"{rows} rows of two items")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_grouped_rows_have_the_bits_of_linear(kernel, assert_same_bits, dtype):
    weight = (torch.randn(16, 512, 1024, device="cuda") / 32).to(dtype)
    for counts in ([1] * 16, [0, 300, 0, 5] * 4, [64] * 16, [700] + [0] * 15):
        x = torch.randn(sum(counts) + 3, 1024, device="cuda").to(dtype)
        y = kernel.grouped_linear(x, weight, torch.tensor(counts, device="cuda").cumsum(0).int())
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                assert_same_bits(y[rows], kernel.linear(x[rows], weight[expert]), f"expert {expert} of {counts}")
            start += count
        assert not y[start:].any()


def test_grouped_linear_does_not_wait_for_the_gpu(kernel):
    x, weight = torch.randn(8, 64, device="cuda"), torch.randn(2, 32, 64, device="cuda")
    offsets = torch.tensor([3, 8], dtype=torch.int32, device="cuda")
    kernel.grouped_linear(x, weight, offsets)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.grouped_linear(x, weight, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nan_stays_in_its_row(kernel, assert_same_bits):
    x, weight, bias = operands(130, 320, 1000, torch.bfloat16)
    clean = kernel.linear(x, weight, bias)
    x[77, 999] = float("nan")
    y = kernel.linear(x, weight, bias)
    assert y[77].isnan().all()
    y[77] = clean[77]
    assert_same_bits(y, clean)


def test_graph_replay_has_the_same_bits(kernel, assert_same_bits):
    x, weight, bias = operands(33, 1024, 3072, torch.bfloat16)
    want = kernel.linear(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.linear(x, weight, bias)
    graph.replay()
    assert_same_bits(y, want)


def test_backward_is_refused(kernel):
    x, weight, bias = operands(3, 320, 1000, torch.bfloat16)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="has no backward"):
        kernel.linear(x.requires_grad_(), weight, bias).sum().backward()


@pytest.mark.slow
def test_offsets_beyond_31_bits_of_x(kernel, assert_same_bits):
    rows, k = 537_200, 4096  # 2.2e9 elements
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda")
    tail, weight, bias = operands(40, 16, k, torch.bfloat16)
    x[-40:] = tail
    want = kernel.linear(tail, weight, bias)
    assert_same_bits(kernel.linear(x, weight, bias)[-40:], want, "linear")
    assert_same_bits(kernel.bmm(x.view(2, rows // 2, k), weight.t().expand(2, k, 16))[1, -40:],
                     kernel.linear(tail, weight), "bmm")  # fmt: skip
    offsets = torch.tensor([rows - 40, rows], dtype=torch.int32, device="cuda")
    grouped = kernel.grouped_linear(x, weight.expand(2, 16, k), offsets)
    assert_same_bits(grouped[-40:], kernel.linear(tail, weight), "grouped_linear")


@pytest.mark.slow
def test_offsets_beyond_31_bits_of_weight_and_result(kernel, assert_same_bits):
    x, weight, _ = operands(70_000, 32_768, 64, torch.bfloat16)  # result: 2.3e9 elements
    y = kernel.linear(x, weight)
    assert_same_bits(y[-9:], kernel.linear(x[-9:], weight), "result")
    del y
    x, weight = x[:5], torch.zeros(34_000_000, 64, dtype=torch.bfloat16, device="cuda")  # weight: 2.2e9 elements
    weight[-50:] = 1.0
    assert_same_bits(kernel.linear(x, weight)[:, -50:], kernel.linear(x, weight[-50:]), "weight")
