"""Each engine of the CPU path in turn, and what its certificates rest on."""

import pytest
import torch

ENGINES = ["fused", "plain", "ordered"]


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_keeps_the_bits(kernel, module, heads, make_sequence, assert_same_bits, engine):
    with module("_cpu_products").force_engine(engine):
        for shape, length in (((6, 2, 24, 40), 140), ((4, 1, 96, 96), 70)):
            sequence = make_sequence(length, heads(*shape), softcap=9.0)
            want = sequence.alone(kernel)
            for first, last in ((length - 1, length), (3, 66), (0, length)):
                got = sequence.chunk(kernel, first, last, left=5, tail=70, mates=2, place=1)
                assert_same_bits(got, want[:, first:last], f"{engine} {first}:{last}")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_is_accurate(kernel, module, exact_attention, engine):
    tensors = [torch.randn(2, h, n, 80) for h, n in ((4, 20), (2, 150), (2, 150))]
    with module("_cpu_products").force_engine(engine):
        got = kernel.attention(*tensors, causal=True)
    torch.testing.assert_close(got.double(), exact_attention(*tensors, causal=True), rtol=3e-6, atol=3e-6)


def test_unknown_engine_is_refused(module):
    with pytest.raises(ValueError, match="force_engine: expected name"):
        with module("_cpu_products").force_engine("fast"):
            pass


def test_the_ordered_engine_serves_where_nothing_is_certified(
    kernel, module, make_sequence, monkeypatch, assert_same_bits
):
    products = module("_cpu_products")
    monkeypatch.setattr(module("_cpu_flash"), "plan_for", lambda *_: None)
    monkeypatch.setattr(products, "_plans", {})
    monkeypatch.setattr(products, "_heights_of_scores", lambda *_: ())
    sequence = make_sequence(70)
    got = sequence.alone(kernel)
    assert {plan.engine for plan in products._plans.values()} == {"ordered"}
    with products.force_engine("ordered"):
        assert_same_bits(got, sequence.alone(kernel))


def test_a_gemm_whose_order_follows_the_shape_gets_no_certificate(module, monkeypatch):
    """Negative control: what stock GEMMs do with few rows must be noticed by the trial."""
    products = module("_cpu_products")
    stock = torch.bmm

    def fickle(left, right, out=None):
        if left.shape[1] == 8:  # another order for small tiles only
            half = left.shape[2] // 2
            result = stock(left[..., half:], right[:, half:]) + stock(left[..., :half], right[:, :half])
        else:
            result = stock(left, right)
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(torch, "bmm", fickle)
    for heights in (products._heights_of_scores("plain", 64, True), products._heights_of_values("plain", 64, True)):
        assert not (8 in heights and 16 in heights), heights


def test_a_gemm_that_looks_at_neighbours_gets_no_certificate(module, monkeypatch):
    products = module("_cpu_products")
    stock = torch.bmm

    def leaky(left, right, out=None):
        result = stock(left, right)
        result[:, -1] += 1e-3 * result[:, 0]
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(torch, "bmm", leaky)
    assert products._heights_of_scores("plain", 64, True) == ()
    assert products._heights_of_values("plain", 64, True) == ()


# --- exp and tanh ---


def test_polynomials_stand_in_for_functions_with_another_tail(
    kernel, module, monkeypatch, make_sequence, assert_same_bits
):
    exp = module("_cpu_exp")
    monkeypatch.setattr(exp, "holds", lambda name: False)
    x = torch.linspace(-79.0, 0.0, 5001)
    torch.testing.assert_close(exp.weights_(x.clone()), x.double().exp().float(), rtol=1.2e-7, atol=0)
    y = torch.linspace(-30.0, 30.0, 5001)
    torch.testing.assert_close(exp.tanh_(y.clone()), y.double().tanh().float(), rtol=1.2e-7, atol=0)
    for length in (1, 7, 100):
        assert_same_bits(exp.weights_(x[:length].clone()), exp.weights_(x.clone())[:length])
    sequence = make_sequence(90, softcap=5.0)
    assert_same_bits(sequence.chunk(kernel, 80, 90, mates=1, left=3), sequence.alone(kernel)[:, 80:])


def test_a_function_with_another_tail_is_noticed(module, monkeypatch):
    exp = module("_cpu_exp")

    def two_faced(x):
        y = x.double().exp()
        return y.float() if len(x) >= 16 else (y * (1 + 2**-23)).float()

    monkeypatch.setattr(torch, "exp", two_faced)
    assert not exp.holds.__wrapped__("exp")


def test_weights_below_the_floor_are_zero_and_nan_stays(module):
    got = module("_cpu_exp").weights_(torch.tensor([float("-inf"), -81.0, float("nan"), 0.0] * 16))
    assert got[0] == 0 and got[1] == 0 and got[2].isnan() and got[3] == 1
