"""Values: against float64 beside the stock op, and against the readable reference."""

import pytest
import torch

# (heads, key heads, queries, keys, head_dim)
SHAPES = [(4, 2, 130, 130, 64), (8, 2, 1, 300, 128), (6, 2, 7, 70, 24), (4, 4, 100, 200, 80), (2, 1, 1, 500, 256)]


def operands(shape, seed, dtype=torch.float32, batch=4):
    heads, kv_heads, q_len, kv_len, dim = shape
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, q_len, dim, generator=generator)
    key, value = (torch.randn(batch, kv_heads, kv_len, dim, generator=generator) for _ in range(2))
    return [x.to(dtype) for x in (query, key, value)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_error_is_at_most_that_of_stock(kernel, exact_attention, stock_attention, dtype):
    """One rare rounding decides a single maximum, so the largest errors of many draws are summed up."""
    ours = theirs = 0.0
    for shape in SHAPES:
        for seed in range(8):
            tensors = operands(shape, seed, dtype)
            exact = exact_attention(*tensors, causal=True)
            ours += (kernel.attention(*tensors, causal=True).double() - exact).abs().max().item()
            theirs += (stock_attention(*tensors).double() - exact).abs().max().item()
    assert ours <= 1.1 * theirs + 1e-9, (ours, theirs)


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=False),
        dict(causal=True, window=(30, -1)),
        dict(causal=False, window=(30, 10)),
        dict(causal=True, softcap=3.0),
        dict(causal=True, sinks=True),
        dict(causal=True, scale=0.7, softcap=10.0, window=(50, 0), sinks=True),
    ],
    ids=lambda options: "-".join(options),
)
def test_options_mean_what_they_say(kernel, exact_attention, options):
    for shape in SHAPES:
        tensors = operands(shape, 1, batch=2)
        chosen = dict(options)
        if "sinks" in chosen:
            chosen["sinks"] = torch.linspace(-2, 3, shape[0])
        exact = exact_attention(*tensors, **chosen)
        torch.testing.assert_close(kernel.attention(*tensors, **chosen).double(), exact, rtol=2e-5, atol=2e-5)


def test_reference_agrees(kernel, module):
    reference = module("reference").attention_reference
    query, key, value = operands((4, 2, 5, 600, 32), 3, batch=2)
    origin, offset = torch.tensor([0, 37], dtype=torch.int32), torch.tensor([570, 595], dtype=torch.int32)
    present = torch.rand(2, 600) < 0.9
    boolean, additive = torch.rand(2, 1, 5, 600) < 0.8, torch.randn(1, 4, 5, 600)
    additive[0, 0, 2] = torch.finfo(torch.float32).min
    for options in (
        dict(causal=True),
        dict(causal=True, origin=origin, query_offset=offset),
        dict(causal=False, key_mask=present, mask=boolean, softcap=4.0),
        dict(causal=True, mask=additive, window=(100, 0), sinks=torch.tensor([0.0, 2.0, -1.0, 5.0]), origin=origin),
    ):
        got, want = kernel.attention(query, key, value, **options), reference(query, key, value, **options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_wide_scores_do_not_slow_down_or_lose_accuracy(kernel, exact_attention, scale):
    """Weights far below 2**-100 count as nothing."""
    tensors = operands((4, 2, 70, 200, 64), 2, batch=1)
    exact = exact_attention(*tensors, causal=True, scale=scale)
    torch.testing.assert_close(
        kernel.attention(*tensors, causal=True, scale=scale).double(), exact, rtol=1e-3, atol=1e-3
    )
