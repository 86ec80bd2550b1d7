"""A sequence's bits in every layout of batch, padding, cache and chunk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

FEW = settings(max_examples=25, deadline=None, derandomize=True, database=None)
HEADS = [
    (1, 1, 16, 16),
    (3, 1, 24, 24),
    (4, 4, 64, 64),
    (6, 2, 80, 64),
    (7, 1, 128, 128),
    (2, 1, 256, 256),
    (4, 2, 64, 24),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def layouts(draw):
    length = draw(st.integers(1, 200))
    last = draw(st.integers(1, length))
    first = draw(st.integers(max(0, last - draw(st.sampled_from([1, 2, 9, 200]))), last - 1))
    layout = dict(left=draw(st.integers(0, 130)), tail=draw(st.integers(0, 130)), mates=draw(st.integers(0, 4)))
    return length, first, last, layout | dict(place=draw(st.integers(0, 4)), seed=draw(st.integers(0, 99)))


@pytest.mark.kernels_ci
@FEW
@given(layout=layouts(), shape=st.sampled_from(HEADS), dtype=st.sampled_from(DTYPES))
def test_chunk_in_any_layout_has_the_bits_of_the_sequence_alone(
    kernel, heads, make_sequence, assert_same_bits, layout, shape, dtype
):
    length, first, last, place = layout
    sequence = make_sequence(length, heads(*shape, dtype))
    want = sequence.alone(kernel)[:, first:last]
    assert_same_bits(sequence.chunk(kernel, first, last, **place), want, str((length, first, last, place)))


@FEW
@given(
    layout=layouts(),
    window=st.sampled_from([(-1, -1), (0, 0), (5, -1), (64, 0), (100, 3)]),
    softcap=st.sampled_from([0.0, 5.0]),
    sinks=st.booleans(),
)
def test_window_softcap_and_sinks_keep_the_bits(
    kernel, make_sequence, assert_same_bits, layout, window, softcap, sinks
):
    length, first, last, place = layout
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0]) if sinks else None
    sequence = make_sequence(length, window=window, softcap=softcap, sinks=sinks)
    want = sequence.alone(kernel)[:, first:last]
    assert_same_bits(sequence.chunk(kernel, first, last, **place), want, str((length, first, last, place)))


@FEW
@given(length=st.integers(1, 150), left=st.integers(0, 100), tail=st.integers(0, 100), mates=st.integers(0, 3))
def test_without_causality_padding_and_mates_do_not_matter(
    kernel, make_sequence, assert_same_bits, length, left, tail, mates
):
    sequence = make_sequence(length, causal=False)
    batch, kv_len = mates + 1, left + length + tail
    query = torch.randn(batch, *sequence.query.shape)
    key, value = (
        torch.full((batch, x.shape[0], kv_len, x.shape[2]), float("nan")) for x in (sequence.key, sequence.value)
    )
    present = torch.zeros(batch, kv_len, dtype=torch.bool)
    query[mates] = sequence.query
    key[mates, :, left : left + length] = sequence.key
    value[mates, :, left : left + length] = sequence.value
    present[mates, left : left + length] = True
    origin = torch.tensor([0] * mates + [left], dtype=torch.int32)
    out = kernel.attention(query, key, value, causal=False, key_mask=present, origin=origin)
    assert_same_bits(out[mates], sequence.alone(kernel))
    assert not out[:mates].any()  # rows that see no key are zeros, whatever their keys hold


def test_decode_from_a_cropped_cache_has_the_bits_of_the_whole_one(kernel, make_sequence, assert_same_bits):
    sequence = make_sequence(300, window=(70, 0))
    want = sequence.alone(kernel)
    for cropped in (1, 63, 64, 65, 200, 229):
        got = sequence.chunk(kernel, 299, 300, cropped=cropped, tail=9, mates=1)
        assert_same_bits(got, want[:, 299:], f"{cropped} keys forgotten")


@pytest.mark.kernels_ci
def test_token_by_token_has_the_bits_of_prefill(kernel, make_sequence, assert_same_bits):
    sequence = make_sequence(140)
    steps = [sequence.chunk(kernel, i, i + 1, tail=141 - i) for i in range(len(sequence))]
    assert_same_bits(torch.cat(steps, 1), sequence.alone(kernel))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_odd_sizes_keep_the_bits_at_any_thread_count(kernel, heads, make_sequence, assert_same_bits, threads):
    torch.set_num_threads(threads)
    for length, shape in ((131, (9, 3, 24, 40)), (257, (7, 1, 16, 16))):
        sequence = make_sequence(length, heads(*shape), softcap=20.0)
        want = sequence.alone(kernel)
        for first, last in ((0, length), (length - 1, length), (length // 3, length - 5)):
            got = sequence.chunk(kernel, first, last, left=11, tail=30, mates=2, place=1)
            assert_same_bits(got, want[:, first:last], f"{threads} threads, {length}, {first}:{last}")


def test_large_batches_and_many_heads_per_key_head(kernel, heads, make_sequence, assert_same_bits):
    for shape in ((71, 1, 16, 16), (130, 2, 16, 24), (3, 3, 16, 16)):
        sinks = torch.linspace(-2, 2, shape[0])
        sequence = make_sequence(40, heads(*shape), sinks=sinks)
        want = sequence.alone(kernel)
        assert_same_bits(sequence.chunk(kernel, 30, 40, mates=40, place=33, left=7), want[:, 30:])


@pytest.mark.parametrize("dtype", [torch.float32])
def test_negative_control_stock_attention_fails_both_checks(
    stock_attention, make_sequence, count_differing_bits, dtype
):
    differing = {"decode": 0, "left padding": 0}
    for length in (65, 131, 200):
        sequence = make_sequence(length)
        query, key, value = (tensor[None] for tensor in (sequence.query, sequence.key, sequence.value))
        prefill = stock_attention(query, key, value)
        differing["decode"] += count_differing_bits(stock_attention(query[:, :, -1:], key, value), prefill[:, :, -1:])
        padded = [torch.nn.functional.pad(x, (0, 0, 7, 0)) for x in (query, key, value)]
        at = torch.arange(length + 7)
        seen = (at <= at[:, None]) & (at >= 7) | torch.eye(length + 7, dtype=torch.bool)
        got = torch.nn.functional.scaled_dot_product_attention(*padded, attn_mask=seen, enable_gqa=True)[:, :, 7:]
        differing["left padding"] += count_differing_bits(got, prefill)
    assert all(differing.values()), differing


# --- masks ---


def masked_operands(batch=3, heads=4, q_len=9, kv_len=90):
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(batch, heads, q_len, 32, generator=generator),
        torch.randn(batch, 2, kv_len, 32, generator=generator),
        torch.randn(batch, 2, kv_len, 32, generator=generator),
        torch.rand(batch, heads, q_len, kv_len, generator=generator) < 0.7,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_boolean_and_additive_masks_give_the_same_bits(kernel, assert_same_bits, dtype):
    query, key, value, mask = masked_operands()
    query, key, value = (x.to(dtype) for x in (query, key, value))
    mask[1, 2, 3] = False
    want = kernel.attention(query, key, value, causal=True, mask=mask)
    assert not want[1, 2, 3].any()
    for hidden in (float("-inf"), torch.finfo(dtype).min):
        additive = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, hidden)
        assert_same_bits(kernel.attention(query, key, value, causal=True, mask=additive), want, str(hidden))


def test_case_25_a_fully_masked_row_is_zeros_and_changes_no_other_row(kernel, assert_same_bits):
    query, key, value, _ = masked_operands(batch=1)
    mask = torch.ones(1, 1, 9, 90, dtype=torch.bool)
    without = kernel.attention(query, key, value, causal=False, mask=mask)
    mask[:, :, 4] = False
    lowest = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
    rest = [0, 1, 2, 3, 5, 6, 7, 8]
    for form in (mask, lowest):
        out = kernel.attention(query, key, value, causal=False, mask=form)
        assert not out[:, :, 4].any()
        assert_same_bits(out[:, :, rest], without[:, :, rest])
        alone = kernel.attention(query[:, :, rest], key, value, causal=False, mask=form[:, :, rest])
        assert_same_bits(out[:, :, rest], alone)


@pytest.mark.kernels_ci
def test_case_56_every_form_of_one_mask_gives_the_same_bits(kernel, assert_same_bits):
    """A left-padded row by origin, 2-D mask, 4-D boolean mask and 4-D additive mask (blocks counted from one place)."""
    query, key, value, _ = masked_operands(batch=2, q_len=90)
    origin = torch.tensor([0, 23], dtype=torch.int32)
    present = torch.arange(90) >= origin[:, None]
    square = (present[:, None] & (torch.arange(90) <= torch.arange(90)[:, None]))[:, None]
    additive = torch.zeros(square.shape).masked_fill_(~square, torch.finfo(torch.float32).min)
    want = kernel.attention(query, key, value, causal=True, origin=origin)
    forms = dict(
        two_dimensional=dict(causal=True, key_mask=present),
        boolean=dict(causal=False, mask=square),
        additive=dict(causal=False, mask=additive),
    )
    for name, form in forms.items():
        assert_same_bits(kernel.attention(query, key, value, origin=origin, **form), want, name)


@pytest.mark.parametrize("shape", [(1, 1, 1, 90), (3, 1, 9, 90), (1, 4, 1, 90), (3, 4, 9, 90), (1, 1, 9, 90)], ids=str)
def test_broadcast_masks_have_the_bits_of_expanded_ones(kernel, assert_same_bits, shape):
    query, key, value, _ = masked_operands()
    for mask in (torch.rand(shape) < 0.5, torch.randn(shape)):
        want = kernel.attention(query, key, value, causal=True, mask=mask.expand(3, 4, 9, 90).contiguous())
        got = kernel.attention(query, key, value, causal=True, mask=mask)
        assert_same_bits(got, want)
        origin = torch.tensor([0, 3, 64], dtype=torch.int32)
        rows = kernel.attention(query, key, value, causal=True, mask=mask, origin=origin)
        for b in range(3):
            row_mask = mask[b : b + 1] if mask.shape[0] > 1 else mask
            own = [x[b : b + 1] for x in (query, key, value)]
            alone = kernel.attention(*own, causal=True, mask=row_mask, origin=origin[b : b + 1])
            assert_same_bits(alone, rows[b : b + 1])


def test_keys_outside_key_mask_may_hold_nan(kernel, assert_same_bits):
    query, key, value, _ = masked_operands(q_len=1)
    present = torch.rand(3, 90) < 0.8
    want = kernel.attention(query, key, value, causal=True, key_mask=present)
    hidden = ~present[:, None, :, None]
    key, value = (x.masked_fill(hidden, float("nan")) for x in (key, value))
    assert_same_bits(kernel.attention(query, key, value, causal=True, key_mask=present), want)


def test_nan_stays_in_its_row(kernel, assert_same_bits):
    query, key, value, _ = masked_operands(q_len=20)
    want = kernel.attention(query, key, value, causal=True)
    query[1, 2, 5] = float("nan")
    got = kernel.attention(query, key, value, causal=True)
    assert got[1, 2, 5].isnan().all()
    got[1, 2, 5] = want[1, 2, 5]
    assert_same_bits(got, want)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 5, 3)], ids=str)
def test_empty_batches_queries_and_keys(kernel, sizes):
    batch, q_len, kv_len = sizes
    out = kernel.attention(
        torch.ones(batch, 4, q_len, 16), torch.ones(batch, 2, kv_len, 16), torch.ones(batch, 2, kv_len, 24), causal=True
    )
    assert out.shape == (batch, 4, q_len, 24)
    assert out.transpose(1, 2).is_contiguous()
    # bottom right: with fewer keys than queries the first queries see nothing
    assert not out[:, :, : max(0, q_len - kv_len)].any() and (out[:, :, max(0, q_len - kv_len) :] == 1).all()


@pytest.mark.parametrize("layout", ["transposed", "strided", "sliced"])
def test_memory_layout_does_not_matter(kernel, make_sequence, assert_same_bits, layout):
    sequence = make_sequence(100)
    query, key, value = (x[None].repeat(2, 1, 1, 1) for x in (sequence.query, sequence.key, sequence.value))

    def laid_out(x):
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "strided":
            return torch.stack([x, x], -1)[..., 0]
        return torch.nn.functional.pad(x, (3, 2, 1, 5))[:, :, 1:-5, 3:-2]

    want = kernel.attention(query, key, value, causal=True)
    assert_same_bits(kernel.attention(*(laid_out(x) for x in (query, key, value)), causal=True), want)
