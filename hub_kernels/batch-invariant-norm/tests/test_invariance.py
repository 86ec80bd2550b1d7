"""A row has the same bits alone and in any batch, at any position, in any memory layout, at any thread count."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(shape, dtype, seed, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * 3).to(dtype)


def row_functions(kernel, columns, dtype, device="cpu"):
    """Every function of the package that maps rows to rows, by name, with its weights bound."""
    weight = random((columns,), dtype, 1, device)
    bias = random((columns,), dtype, 2, device)
    # One gate value per column: the gate of a row must not depend on the row's position here.
    gate = random((columns,), dtype, 3, device)
    functions = {v.name: (lambda x, v=v: v(x, weight if v.weighted else None, 1e-6)) for v in kernel.variants()}
    for v in kernel.gated_variants():
        functions[v.name] = lambda x, v=v: v(x, gate.expand_as(x), weight, 1e-6)
    for v in kernel.layer_norm_variants():
        functions[f"layer_norm_{v.name}"] = lambda x, v=v: v(x, weight, bias, 1e-5)
    functions["softmax"] = lambda x: kernel.softmax(x, -1)
    functions["log_softmax"] = lambda x: kernel.log_softmax(x, -1)
    functions["mean"] = lambda x: kernel.mean(x, -1, keepdim=True)
    functions["sum"] = lambda x: kernel.sum(x, -1, keepdim=True)
    return functions


def in_layout(x, layout):
    """The same values of x (rows, columns) in another memory layout."""
    rows, columns = x.shape
    if layout == "offset":  # starts at one element past an aligned address
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(rows, columns)
    if layout == "wide":  # rows farther apart than columns
        return torch.cat([x, x.new_zeros(rows, 3)], 1)[:, :columns]
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "strided":  # every second element
        return torch.stack([x, x.new_zeros(rows, columns)], -1).flatten(1)[:, ::2]
    return x


LAYOUTS = ["contiguous", "offset", "wide", "transposed", "strided"]


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    columns=st.integers(1, 300) | st.sampled_from([512, 576, 1000, 1024, 1536, 4096, 4097]),
    rows=st.integers(2, 9) | st.sampled_from([64, 100]),
    position=st.floats(0, 1, exclude_max=True),
    dtype=st.sampled_from(CPU_DTYPES),
    layout=st.sampled_from(LAYOUTS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_row_has_same_bits_in_any_batch(
    kernel, assert_same_bits, set_threads, columns, rows, position, dtype, layout, threads, seed
):
    x = random((rows, columns), dtype, seed)
    index = int(position * rows)
    for name, function in row_functions(kernel, columns, dtype).items():
        set_threads(1)
        alone = function(x[index : index + 1].clone())
        set_threads(threads)
        together = function(in_layout(x, layout))
        assert_same_bits(together[index : index + 1], alone, f"{name}, {columns} columns, row {index} of {rows}")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("columns", [61, 1024])
def test_all_rows_have_same_bits_at_255_256_257_rows(kernel, assert_same_bits, set_threads, columns, dtype):
    x = random((257, columns), dtype, 0)
    set_threads(3)
    for name, function in row_functions(kernel, columns, dtype).items():
        whole = function(x)
        for rows in (1, 2, 255, 256):
            assert_same_bits(function(x[:rows]), whole[:rows], f"{name}, first {rows} rows")
            assert_same_bits(function(x[-rows:]), whole[-rows:], f"{name}, last {rows} rows")


def test_leading_dimensions_do_not_matter(kernel, assert_same_bits):
    x = random((2, 3, 4, 40), torch.bfloat16, 0)
    for name, function in row_functions(kernel, 40, torch.bfloat16).items():
        assert_same_bits(function(x).flatten(0, 2), function(x.flatten(0, 2)), name)
        assert_same_bits(function(x[1, 2, 3]), function(x)[1, 2, 3], name)


def test_rows_along_another_dimension_have_the_same_bits(kernel, assert_same_bits):
    x = random((5, 77, 6), torch.float32, 0)
    last = x.transpose(1, 2).contiguous()
    for function in (kernel.softmax, kernel.log_softmax):
        assert_same_bits(function(x, 1), function(last, -1).transpose(1, 2), function.__name__)
    for function in (kernel.sum, kernel.mean):
        assert_same_bits(function(x, 1), function(last, -1), function.__name__)
        assert_same_bits(function(x[:2], (1, 2)), function(x, (1, 2))[:2], function.__name__)
        assert_same_bits(function(x, (0, 1, 2)), function(x), function.__name__)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=lambda d: str(d)[6:])
def test_nan_and_inf_stay_in_their_row(kernel, assert_same_bits, dtype, poison):
    x = random((7, 130), dtype, 0)
    poisoned = x.clone()
    poisoned[3, 5] = poison
    others = [0, 1, 2, 4, 5, 6]
    for name, function in row_functions(kernel, 130, dtype).items():
        assert_same_bits(function(poisoned)[others], function(x)[others], name)
        assert_same_bits(function(poisoned)[3:4], function(poisoned[3:4]), name)
        if poison != poison:
            assert function(poisoned)[3].isnan().all(), name


def test_stock_operators_do_vary_on_the_cpu(count_different_bits, set_threads):
    """The control. Stock row reductions were not seen to vary on a CPU; their elementwise neighbours and linear do."""
    set_threads(3)
    different = 0
    weight = random((61, 61), torch.float32, 1)
    for function in (F.silu, torch.sigmoid, lambda x: F.linear(x, weight)):
        for rows in (257, 1001):
            x = random((rows, 61), torch.float32, rows)
            alone = torch.cat([function(row) for row in x.split(1)])
            different += count_different_bits(function(x), alone)
    assert different > 0


# On a GPU: the kernels themselves, over wider ranges. Compiling takes the time, so only two widths see every variant.

CORE = ("cast_then_weight", "gate_norm_cast_weight", "layer_norm_torch", "softmax", "log_softmax", "mean", "sum")
GPU_CASES = [
    (columns, dtype)
    for columns in (1, 7, 64, 128, 576, 1000, 1023, 4096, 4097, 16384, 16385, 32001, 151936)
    for dtype in (torch.float32, torch.bfloat16)
] + [(128, torch.float16), (4096, torch.float16)]


def gpu_functions(kernel, columns, dtype, every=False):
    functions = row_functions(kernel, columns, dtype, "cuda")
    return functions if every else {name: functions[name] for name in CORE}


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: f"{case[0]}-{str(case[1])[6:]}")
def test_row_has_same_bits_in_any_batch_on_gpu(kernel, assert_same_bits, case):
    columns, dtype = case
    rows = 1025 if columns <= 16384 else 67
    x = random((rows, columns), dtype, columns, "cuda")
    every = columns in (128, 4096) and dtype is torch.bfloat16
    for name, function in gpu_functions(kernel, columns, dtype, every).items():
        whole = function(x)
        for start, stop in [(0, 1), (1, 2), (rows - 1, rows), (3, 35), (2, 34), (0, rows // 2), (rows // 4, rows)]:
            assert_same_bits(function(x[start:stop]), whole[start:stop], f"{name} rows {start}:{stop}")
        for layout in LAYOUTS[1:]:
            assert_same_bits(function(in_layout(x[:33], layout)), whole[:33], f"{name} {layout}")


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [128, 4096])
def test_every_number_of_rows_up_to_257_has_same_bits_on_gpu(kernel, assert_same_bits, columns):
    x = random((257, columns), torch.bfloat16, 0, "cuda")
    for name, function in gpu_functions(kernel, columns, torch.bfloat16).items():
        whole = function(x)
        for rows in range(1, 257):
            assert_same_bits(function(x[:rows]), whole[:rows], f"{name}, first {rows} rows")


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [128, 4096, 32001])
def test_offsets_beyond_2_to_31_on_gpu(kernel, assert_same_bits, columns):
    rows = 2**31 // columns + 40
    tail = random((32, columns), torch.bfloat16, 0, "cuda")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-32:] = tail
    for name, function in gpu_functions(kernel, columns, torch.bfloat16).items():
        if not name.startswith("gate"):  # a gate spread over these rows would take as much again
            assert_same_bits(function(x)[-32:], function(tail), name)


@pytest.mark.gpu
def test_misaligned_weights_give_the_same_bits_on_gpu(kernel, assert_same_bits):
    x = random((9, 4096), torch.bfloat16, 0, "cuda")
    weight = random((4096,), torch.bfloat16, 1, "cuda")
    shifted = torch.cat([weight[:1], weight])[1:]
    assert shifted.data_ptr() % 16
    assert_same_bits(kernel.rms_norm(x, shifted, 1e-6), kernel.rms_norm(x, weight, 1e-6))
    shape = (4096,)
    assert_same_bits(
        kernel.layer_norm(x, shape, shifted, shifted, 1e-5), kernel.layer_norm(x, shape, weight, weight, 1e-5)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [128, 4096, 16385])
def test_nan_and_inf_stay_in_their_row_on_gpu(kernel, assert_same_bits, columns):
    x = random((7, columns), torch.float32, 0, "cuda")
    others = [0, 1, 2, 4, 5, 6]
    for poison in (float("nan"), float("inf"), float("-inf")):
        poisoned = x.clone()
        poisoned[3, 5] = poison
        for name, function in gpu_functions(kernel, columns, torch.float32).items():
            assert_same_bits(function(poisoned)[others], function(x)[others], name)
            if poison != poison:
                assert function(poisoned)[3].isnan().all(), name


@pytest.mark.gpu
def test_cuda_graph_and_other_stream_have_same_bits(kernel, assert_same_bits):
    x = random((5, 4096), torch.bfloat16, 0, "cuda")
    functions = gpu_functions(kernel, 4096, torch.bfloat16)
    eager = {name: function(x) for name, function in functions.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        streamed = {name: function(x) for name, function in functions.items()}
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = {name: function(x) for name, function in functions.items()}
    graph.replay()
    for name in functions:
        assert_same_bits(streamed[name], eager[name], f"{name} on another stream")
        assert_same_bits(captured[name], eager[name], f"{name} in a graph")


@pytest.mark.gpu
def test_stock_reductions_do_vary_on_gpu(count_different_bits):
    """The control: the eager mean of squares in float32, and softmax at a row length that is not aligned."""
    different = 0
    for columns in (4096, 4097, 32001):
        x = random((1024, columns), torch.float32, 0, "cuda")
        for function in (lambda x: x.pow(2).mean(-1, keepdim=True), lambda x: torch.softmax(x, -1)):
            whole = function(x)
            different += sum(count_different_bits(function(x[:rows]), whole[:rows]) for rows in (1, 2, 7, 33, 256))
    assert different > 0
