"""The Triton kernels, run by Triton's interpreter on CPU tensors, agree with reference.py on small shapes.

This tests addressing, masks, rounding steps and the combination of chunks; the interpreter adds in NumPy's order.
"""

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # NumPy, on the rows of inf and NaN
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, triton compiles; the gpu tests run the kernels"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter cuts bfloat16 off instead of rounding it, hence the room for it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}


@pytest.fixture(params=["rows", "chunks"])
def launch(request, submodule, monkeypatch):
    """The launch functions; with "chunks", rows of more than 32 columns count as long and are cut by 32."""
    if request.param == "chunks":
        contract = submodule("contract")
        monkeypatch.setattr(contract, "SINGLE_PASS_COLUMNS", 32)
        monkeypatch.setattr(contract, "CHUNK_COLUMNS", 32)
        monkeypatch.setattr(submodule("reference"), "CHUNK_COLUMNS", 32)
    return submodule("_launch")


def random(shape, dtype, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def assert_close(got, want, coarsest=torch.float32):
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = max(TOLERANCE[got.dtype], TOLERANCE[coarsest])
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_rms_norm_kernels_agree_with_reference(launch, submodule, kernel, dtype):
    rounding_of, reference = submodule("contract").rms_norm_rounding, submodule("reference")
    for index, variant in enumerate(kernel.variants()):
        columns = (37, 64, 100)[index % 3]
        x, weight = random((2, columns), dtype, index), random((columns,), DTYPES[index % 2], 1)
        weight = weight if variant.weighted else None
        options = {key: value for key, value in variant.options.items() if key != "weight_offset"}
        rounding = rounding_of(dtype, getattr(weight, "dtype", None), gate_last=False, **options)
        offset = variant.weight_offset
        got = launch.rms_norm(x, None, weight, 1e-5, columns, offset, False, "silu", rounding)
        assert_close(got, reference.rms_norm(x, weight, 1e-5, rounding, offset), coarsest=dtype)


@pytest.mark.parametrize("activation", ["silu", "sigmoid", "relu"])
@pytest.mark.parametrize("gate_before", [True, False])
def test_gated_rms_norm_kernels_agree_with_reference(launch, submodule, gate_before, activation):
    rounding_of, reference = submodule("contract").rms_norm_rounding, submodule("reference")
    x, gate, weight = (
        random((2, 3, 120), torch.float16),
        random((2, 3, 120), torch.float32, 1),
        random((120,), DTYPES[0]),
    )
    gate[0, 0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    rounding = rounding_of(
        torch.float16,
        torch.float32,
        cast_before_weight=True,
        cast_to_weight_dtype=False,
        offset_in_weight_dtype=False,
        round_factor=False,
        gate_last=not gate_before,
    )
    got = launch.rms_norm(x, gate, weight, 1e-5, 40, 0.0, gate_before, activation, rounding)
    for group in (slice(0, 40), slice(40, 80), slice(80, 120)):
        want = reference.rms_norm(
            x[..., group], weight[group], 1e-5, rounding, 0.0, gate[..., group], gate_before, activation
        )
        assert_close(got[..., group], want, coarsest=torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("columns", [1, 20, 100])
def test_layer_norm_kernels_agree_with_reference(launch, submodule, columns, dtype):
    reference, f32 = submodule("reference"), torch.float32
    x, weight, bias = random((3, columns), dtype) + 3, random((columns,), dtype, 1), random((columns,), dtype, 2)
    for w, b in ((weight, bias), (None, None)):
        got = launch.layer_norm(x, w, b, 1e-3, columns, f32, f32, dtype)
        assert_close(got, reference.layer_norm(x, w, b, 1e-3))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("columns", [1, 20, 100])
def test_softmax_kernels_agree_with_reference(launch, submodule, columns, dtype, log):
    x = random((6, columns), dtype)
    x[1, :33] = float("-inf")  # a whole chunk, or a whole short row
    x[2] = float("-inf")
    x[3, 0] = float("nan")
    x[4, -1] = float("inf")
    out = torch.empty_like(x)
    launch.softmax(x, log, out)
    assert_close(out, submodule("reference").softmax(x, log))


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("columns", [1, 20, 100, 1200])
def test_sum_kernels_agree_with_reference(launch, submodule, columns, dtype, mean):
    x = random((2, columns), dtype)
    out = torch.empty(2, dtype=torch.float32)
    launch.reduce(x, mean, out)
    want = submodule("reference").row_sum(x.float()).squeeze(-1)
    torch.testing.assert_close(out, want / columns if mean else want, rtol=1e-5, atol=1e-4)


def test_a_misaligned_input_is_copied_to_an_aligned_place(launch):
    x = random((3, 40), torch.float32)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(3, 40)
    rows = launch._aligned(shifted)
    assert rows.data_ptr() % 16 == 0 and torch.equal(rows, x)
