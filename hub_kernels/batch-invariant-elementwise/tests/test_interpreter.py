"""The Triton kernels, run by Triton's interpreter on CPU tensors, have the bits of the chains of torch operators.

The interpreter's exp2 and fused multiply-add are NumPy's, so of silu this shows the formula and not the last bit.
"""

import importlib.util

import pytest
import torch
from elementwise_cases import CASES, DTYPES, arguments_of, edge_gates

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered"),  # NumPy, on infinities and NaN
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, triton compiles; the gpu tests run the kernels"),
]


def cut_off(x):
    """float32 to bfloat16 without rounding, as some releases of the interpreter do it."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32).bfloat16()


def rotary_in_steps(query, key, cos, sin, round_to):
    """The chain with every rounding in view."""
    results = []
    for x in (query, key):
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        pairs = ((x.float(), cos), (turned, sin))
        products = [round_to(part * angle.float().unsqueeze(1)).float() for part, angle in pairs]
        results.append(round_to(products[0] + products[1]))
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_rotary_has_the_bits_and_the_layout_of_the_chain(submodule, count_different_bits, case, dtype):
    arguments = arguments_of(case, dtype)
    before = [tensor.clone() for tensor in arguments]
    got, want = submodule("_launch").rotary(*arguments), submodule("reference").rotary(*arguments)
    cut = rotary_in_steps(*arguments, cut_off) if dtype is torch.bfloat16 else want
    for x, y, z in zip(got, want, cut, strict=True):
        assert 0 in (count_different_bits(x, y), count_different_bits(x, z))
        strides = [(a, b) for a, b, size in zip(x.stride(), y.stride(), x.shape, strict=True) if size > 1]
        assert all(a == b for a, b in strides), (x.stride(), y.stride())
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


def test_rotary_in_steps_is_the_chain(submodule, assert_same_bits):
    """The control of the test above: with rounding in place of cutting off."""
    for dtype in DTYPES:
        arguments = arguments_of(CASES[3], dtype)
        steps = rotary_in_steps(*arguments, lambda x, dtype=dtype: x.to(dtype))
        for got, want in zip(steps, submodule("reference").rotary(*arguments), strict=True):
            assert_same_bits(got, want)


def test_rotary_of_nothing_is_nothing(submodule):
    query, key = torch.empty(2, 4, 0, 16), torch.empty(2, 2, 0, 16)
    cos = torch.empty(1, 0, 16)
    assert [x.shape for x in submodule("_launch").rotary(query, key, cos, cos)] == [query.shape, key.shape]
    assert submodule("_launch").gated(torch.empty(0, 3), torch.empty(0, 3), "silu").shape == (0, 3)


TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 1001), (4, 1024), (5, 2, 640)], ids=str)
def test_gated_agrees_with_the_chain(submodule, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    gate, up = ((torch.randn(shape, generator=generator) * 4).to(dtype) for _ in range(2))
    for a, b in ((gate, up), (gate.transpose(0, -1), up.transpose(0, -1)), (gate[..., ::2], up[..., ::2])):
        got, want = submodule("_launch").gated(a, b, "silu"), submodule("reference").gated(a, b, "silu")
        assert got.is_contiguous() and got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_gated_of_extreme_gates(submodule, dtype):
    gate = edge_gates(dtype)
    got = submodule("_launch").gated(gate, torch.ones_like(gate), "silu")
    want = (gate.double() / (1 + (-gate.double()).exp())).to(dtype)
    atol = 6e-8 if dtype is torch.float16 else 1e-36  # float16's smallest number; where float32's exp overflows
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=atol, equal_nan=True)
    assert torch.equal(got.isnan(), gate.isnan() | (gate == float("-inf")))
