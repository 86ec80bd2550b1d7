"""The public functions on a CPU, their errors, and the operators behind them under torch.compile."""

import pytest
import torch
from elementwise_cases import CASES, DTYPES, arguments_of, edge_gates

X = torch.ones(2, 4, 3, 8)
COS = torch.ones(1, 3, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_rotary_on_a_cpu_is_the_chain(kernel, submodule, assert_same_bits, case, dtype):
    arguments = arguments_of(case, dtype)
    assert kernel.can_rotate(*arguments)
    for got, want in zip(kernel.rotary(*arguments), submodule("reference").rotary(*arguments), strict=True):
        assert_same_bits(got, want)
        assert got.stride() == want.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_gated_on_a_cpu_has_no_tail(kernel, submodule, assert_same_bits, count_different_bits, dtype):
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(9973, generator=generator).to(dtype) * 4 for _ in range(2))
    gate[: len(edge_gates(dtype))] = edge_gates(dtype)
    chain = submodule("reference").gated
    whole = kernel.gated(gate, up)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(whole, chain(gate, up, "silu"), rtol=tolerance, atol=1e-30, equal_nan=True)
    parts = [slice(30, 30 + length) for length in range(1, 100)]
    for part in parts:
        assert_same_bits(kernel.gated(gate[part], up[part]), whole[part])
    if dtype is torch.float32:  # the control: stock's silu has one
        whole = chain(gate, up, "silu")
        assert any(count_different_bits(chain(gate[part], up[part], "silu"), whole[part]) for part in parts)


def bad_calls(kernel):
    rotary, gated = kernel.rotary, kernel.gated
    double, half = torch.float64, torch.float16
    return {
        "query dtype": (lambda: rotary(X.double(), X, COS, COS), TypeError, "query must be float32, .* got float64"),
        "key dtype": (
            lambda: rotary(X, X.half(), COS, COS),
            TypeError,
            r"key must have the dtype of query \(float32\)",
        ),
        "cos dtype": (lambda: rotary(X.half(), X.half(), COS, COS), TypeError, "cos must have the dtype of query"),
        "3-D": (lambda: rotary(X[0], X[0], COS, COS), ValueError, "query must have shape"),
        "odd": (lambda: rotary(X[..., :7], X[..., :7], COS[..., :7], COS[..., :7]), ValueError, "with an even D"),
        "key shape": (lambda: rotary(X, X[:, :, :2], COS, COS), ValueError, r"key must have shape \(2, H, 3, 8\)"),
        "cos shape": (lambda: rotary(X, X, COS[:, :1], COS), ValueError, r"cos must have shape \(2 or 1, 3, 8\)"),
        "cos and sin": (lambda: rotary(X, X, COS.expand(2, 3, 8), COS), ValueError, "sin must have shape"),
        "4-D cos": (lambda: rotary(X, X, COS[None], COS[None]), ValueError, "cos must have shape"),
        "device": (lambda: rotary(X, X.to("meta"), COS, COS), ValueError, "key must be on the device of query"),
        "activation": (lambda: gated(X, X, "gelu"), ValueError, "activation must be one of silu, got 'gelu'"),
        "gate dtype": (lambda: gated(X.to(double), X), TypeError, "gate must be float32, .* got float64"),
        "up dtype": (lambda: gated(X, X.to(half)), TypeError, "up must have the dtype of gate"),
        "up shape": (lambda: gated(X, X[:1]), ValueError, "up must have the shape of gate"),
        "up device": (lambda: gated(X, X.to("meta")), ValueError, "up must be on the device of gate"),
    }


def test_bad_arguments_raise_one_sentence(kernel):
    for name, (call, kind, message) in bad_calls(kernel).items():
        with pytest.raises(kind, match=message) as error:
            call()
        text = str(error.value)
        assert "\n" not in text and ". " not in text and 20 < len(text) < 250, (name, text)


def test_can_says_what_would_raise(kernel):
    assert kernel.can_gate(X, X) and not kernel.can_gate(X, X[:1]) and not kernel.can_gate(X, X, "gelu")
    assert kernel.can_rotate(X, X[:, :1], COS, COS) and not kernel.can_rotate(X, X, COS, COS.double())


def test_backward_raises(kernel):
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="rotary has no backward"):
        kernel.rotary(x, X, COS, COS)[0].sum().backward()
    with pytest.raises(RuntimeError, match="gated has no backward"):
        kernel.gated(X, x).sum().backward()


def test_operators_pass_opcheck(submodule):
    rotary, gated = submodule("rotary")._rotary_op, submodule("gated")._gated_op
    for case in CASES[1:3]:
        torch.library.opcheck(rotary, arguments_of(case, torch.bfloat16))
    torch.library.opcheck(gated, (torch.randn(3, 5).bfloat16(), torch.randn(3, 5).bfloat16(), "silu"))
    torch.library.opcheck(gated, (torch.randn(3, 5).t(), torch.randn(3, 5).t(), "silu"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_has_same_bits_as_eager(kernel, assert_same_bits, dynamic):
    torch._dynamo.reset()

    def both(query, key, cos, sin):
        query, key = kernel.rotary(query, key, cos, sin)
        return kernel.gated(query, query * 2), key

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for case in CASES[:4] if dynamic else CASES[:1]:
        arguments = arguments_of(case, torch.bfloat16)
        for got, want in zip(compiled(*arguments), both(*arguments), strict=True):
            assert_same_bits(got, want, case.id)
