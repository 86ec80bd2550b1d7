"""The Triton kernels' logic on a CPU, in Triton's interpreter, against float64.

Bits say nothing here: the interpreter multiplies each tile with one NumPy call. bfloat16 products are left out, since
the interpreter multiplies their integer patterns.
"""

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests run the compiled kernels"),
]


SHAPES = {  # batch, query heads, KV heads, Q, KV, D, Dv
    "small": (1, 2, 1, 3, 37, 16, 16),
    "ragged": (2, 3, 1, 5, 9, 24, 32),
    "two splits": (1, 2, 1, 1, 530, 16, 16),
}
CHANGES = {
    "plain": {},
    "bidirectional, sinks": {"causal": False, "sinks": True},
    "window, softcap": {"window_left": 7, "softcap": 5.0},
    "window on both sides": {"causal": False, "window_left": 3, "window_right": 4},
}


FLOAT32 = [("small", change, torch.float32) for change in CHANGES] + [(s, "plain", torch.float32) for s in SHAPES]


@pytest.mark.parametrize("shape, change, dtype", [*FLOAT32, ("small", "plain", torch.float16)], ids=str)
def test_kernel_computes_attention(module, exact_masked_attention, shape, change, dtype):
    batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    query, key = random(batch, heads, q_len, head_dim), random(batch, kv_heads, kv_len, head_dim)
    value = random(batch, kv_heads, kv_len, value_dim)
    call = dict(causal=True, scale=head_dim**-0.5, window_left=-1, window_right=-1, softcap=0.0, sinks=None)
    call |= CHANGES[change]
    if call["sinks"]:
        call["sinks"] = random(heads)
    offset = torch.full((batch,), kv_len - q_len)
    extras = [
        {
            "origin": torch.tensor([3, -70][:batch], dtype=torch.int32),
            "key_mask": torch.rand(batch, kv_len, generator=generator) > 0.3,
        },
        {"key_mask": torch.arange(kv_len) < torch.tensor([kv_len - 1, kv_len // 2 + 1][:batch])[:, None]},
        {"mask": torch.rand(1, 1, q_len, kv_len, generator=generator) > 0.5},
        {"mask": random(batch, heads, q_len, kv_len)},
    ]
    if shape == "two splits":
        extras = [{}]
    none = dict.fromkeys(("mask", "key_mask", "origin", "query_offset"))
    for extra in extras:
        exact = exact_masked_attention(query, key, value, call, offset, **extra)
        for split in (False, True):
            got = module("_launch").launch_attention(query, key, value, **call, **(none | extra), split=split)
            assert (got.double() - exact).abs().max() < (3e-3 if dtype == torch.float16 else 2e-6), (extra, split)


@pytest.mark.parametrize("side", ["window_left", "window_right"])
def test_a_window_at_the_end_of_32_bits_hides_nothing(module, exact_masked_attention, side):
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, 1, length, 16, generator=generator) for length in (3, 37, 37))
    offset = torch.tensor([40, -40], dtype=torch.int32)
    call = dict(causal=False, scale=0.25, window_left=-1, window_right=-1, softcap=0.0, sinks=None)
    exact = exact_masked_attention(query, key, value, call, offset)
    extra = dict(mask=None, key_mask=None, origin=None, query_offset=offset)
    for split in (False, True):
        got = module("_launch").launch_attention(query, key, value, **call | {side: 2**31 - 2}, **extra, split=split)
        assert (got.double() - exact).abs().max() < 2e-6, split


def test_rows_without_holes_are_as_good_as_unpadded_and_rows_with_holes_can_be_done_over(
    module, exact_masked_attention
):
    """What the launch of the Hopper kernel leaves to the plain one."""
    launch = module("_launch")
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 1, length, 64, generator=generator).half() for length in (3, 260, 260))
    present = torch.arange(260)[None] < torch.tensor([[250], [260]])
    present[1, 100] = False
    call = dict(causal=False, scale=0.125, softcap=0.0, sinks=None)
    exact = exact_masked_attention(
        query, key, value, call | dict(window_left=-1, window_right=-1), torch.zeros(2), present
    )
    out = torch.full((2, 3, 1, 64), 7.0, dtype=torch.half)
    whole = dict(sequences=2, q_len=3, kv_len=260, window=(-1, -1), key_mask=present, split=False)
    tile = module("plan").Tile(16, warps=2, stages=2)
    tensors = (query, key, value, out, None, None, present, None, None, None, None)
    launch._prepare(query, key, value, **call, **whole, tile=tile, only_holes=True)(*tensors)
    assert (out[0] == 7.0).all() and (out[1].double() - exact[1]).abs().max() < 3e-3
    launch._prepare(query, key, value, **call, **whole, tile=tile)(*tensors)
    assert (out.double() - exact).abs().max() < 3e-3


def test_varlen_segments_are_attended_alone(module, exact_masked_attention):
    query, key, value = torch.randn(12, 4, 16), torch.randn(60, 2, 16), torch.randn(60, 2, 16)
    ends_q, ends_k = [0, 5, 5, 12], [0, 30, 33, 60]
    bounds = [torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_k)]
    call = dict(causal=True, scale=0.25, window_left=-1, window_right=-1, softcap=0.0, sinks=None)
    launch = module("_launch").launch_attention_varlen
    for split in (False, True):
        for origin in (None, torch.tensor([4, 0, -300], dtype=torch.int32)):
            got = launch(query, key, value, *bounds, 7, 30, **call, origin=origin, split=split)
            for s in (0, 2):
                q, k = slice(ends_q[s], ends_q[s + 1]), slice(ends_k[s], ends_k[s + 1])
                alone = [t.transpose(0, 1)[None] for t in (query[q], key[k], value[k])]
                offset = torch.tensor([alone[1].shape[2] - alone[0].shape[2]])
                start = None if origin is None else origin[s : s + 1]
                exact = exact_masked_attention(*alone, call, offset, origin=start)[0]
                assert (got[q].double() - exact).abs().max() < 2e-6


@pytest.mark.parametrize("origins", [None, [0, 3, -5, 0, 8, 0]])
def test_key_masks_are_prepared_in_one_launch_as_in_torch(module, origins):
    """Runs, holes, padding on both sides, a row without keys; more keys than a program takes at a time; odd strides."""
    generator = torch.Generator().manual_seed(0)
    origin = None if origins is None else torch.tensor(origins)
    for kv_len in (1, 9, 1024, 1500):
        key_mask = torch.rand(kv_len, 6, generator=generator).t() < 0.9
        key_mask[0], key_mask[3] = True, False
        key_mask[1] = torch.arange(kv_len) >= 3
        key_mask[5] = torch.arange(kv_len) < kv_len - 2
        for each in (key_mask, key_mask.contiguous()):
            got = module("_launch").launch_key_mask(each, origin)
            want = module("key_mask").prepared(each, origin)
            assert got.dtype == want.dtype and torch.equal(got, want), kv_len
    empty = torch.ones(2, 0, dtype=torch.bool)
    assert module("_launch").launch_key_mask(empty, None).shape == (2, 2)
