"""The FlashAttention-2 functions: packed, padded and single sequences share their bits."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def packed(lengths_q, lengths_k, heads=(4, 2), dim=32, dtype=torch.float32, seed=0, device="cpu"):
    """q (Tq, Hq, D), k, v (Tk, Hkv, D), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""
    generator = torch.Generator(device).manual_seed(seed)
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    shapes = ((total_q, heads[0], dim), (total_k, heads[1], dim), (total_k, heads[1], dim))
    tensors = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]
    ends = [torch.tensor([0, *lengths]).cumsum(0).int().to(device) for lengths in (lengths_q, lengths_k)]
    return *tensors, *ends, max(lengths_q, default=0), max(lengths_k, default=0)


def one_by_one(kernel, q, k, v, ends_q, ends_k, **options):
    """flash_attn_func on each sequence alone."""
    ends_q, ends_k = ends_q.tolist(), ends_k.tolist()
    return torch.cat(
        [
            kernel.flash_attn_func(
                q[ends_q[s] : ends_q[s + 1]][None],
                k[ends_k[s] : ends_k[s + 1]][None],
                v[ends_k[s] : ends_k[s + 1]][None],
                **options,
            )[0]
            for s in range(len(ends_q) - 1)
        ]
    )


@pytest.mark.kernels_ci
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 150)), min_size=1, max_size=5),
    options=st.sampled_from(
        [
            dict(causal=True),
            dict(causal=False),
            dict(causal=True, window_size=(20, 20)),
            dict(causal=False, window_size=(20, 5), softcap=10.0),
            dict(causal=True, softmax_scale=0.3, s_aux=torch.tensor([0.0, 1.0, -3.0, 2.0])),
        ]
    ),
)
def test_packed_sequences_have_the_bits_of_single_ones(kernel, assert_same_bits, lengths, options):
    arguments = packed(*zip(*lengths, strict=True))
    got = kernel.flash_attn_varlen_func(*arguments, **options)
    assert_same_bits(got, one_by_one(kernel, *arguments[:5], **options), str(lengths))


def test_case_58_padded_and_packed_entry_points_agree(kernel, assert_same_bits):
    """One sequence of 140 tokens: alone, packed between others, and left-padded."""
    q, k, v, ends, _, longest, _ = packed([33, 140, 70], [33, 140, 70], heads=(28, 4), dim=128, dtype=torch.bfloat16)
    own = [x[33:173][None] for x in (q, k, v)]
    alone = kernel.flash_attn_func(*own, causal=True)
    among = kernel.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)
    assert_same_bits(among[33:173], alone[0], "packed")
    padded = [torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 21, 0)) for x in own]
    origin = torch.tensor([21], dtype=torch.int32)
    out = kernel.attention(*padded, causal=True, origin=origin)
    assert_same_bits(out.transpose(1, 2)[:, 21:], alone, "left-padded")


def test_case_59_shortening_one_rows_cache_changes_no_other_row(kernel, assert_same_bits):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(4, 32, 1, 128, generator=generator).bfloat16()
    key, value = (torch.randn(4, 8, 1024, 128, generator=generator).bfloat16() for _ in range(2))
    lengths = torch.tensor([900, 1000, 120, 500], dtype=torch.int32)
    before = kernel.attention(query, key, value, causal=True, query_offset=lengths - 1)
    lengths[0] -= 100
    after = kernel.attention(query, key, value, causal=True, query_offset=lengths - 1)
    assert_same_bits(after[1:], before[1:])
    assert not torch.equal(after[0], before[0])


def test_case_61_no_effect_of_a_boundary_at_128(kernel, make_sequence, assert_same_bits):
    sequence = make_sequence(137)
    want = sequence.alone(kernel)
    assert_same_bits(sequence.chunk(kernel, 0, 128), want[:, :128], "first 128")
    for i in range(128, 137):
        assert_same_bits(sequence.chunk(kernel, i, i + 1), want[:, i : i + 1], f"token {i}")


def test_tokens_behind_the_last_sequence_are_zeros(kernel):
    q, k, v, ends, _, longest, _ = packed([5, 6], [5, 6])
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 3)) + 1 for x in (q, k, v))
    out = kernel.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)
    assert out[:11].all() and not out[11:].any()


def test_negative_control_stock_attention_depends_on_packing(count_differing_bits, stock_attention):
    q, k, v, *_ = packed([137], [137])
    query, key, value = (x[None].transpose(1, 2) for x in (q, k, v))
    whole = stock_attention(query, key, value)
    padded = [torch.nn.functional.pad(x, (0, 0, 9, 0)) for x in (query, key, value)]
    at = torch.arange(146)
    seen = (at <= at[:, None]) & (at >= 9) | torch.eye(146, dtype=torch.bool)
    got = torch.nn.functional.scaled_dot_product_attention(*padded, attn_mask=seen, enable_gqa=True)
    assert count_differing_bits(got[:, :, 9:], whole)


def test_signatures_name_every_parameter_that_transformers_looks_for(kernel):
    known = {"dropout_p", "softmax_scale", "causal", "window_size", "softcap", "deterministic", "s_aux"}
    for function, more in (
        (kernel.flash_attn_func, set()),
        (kernel.flash_attn_varlen_func, {"max_seqlen_q", "max_seqlen_k", "block_table"}),
    ):
        parameters = inspect.signature(function).parameters
        assert known | more <= set(parameters)
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize(
    "refused",
    [
        dict(dropout_p=0.1),
        dict(alibi_slopes=torch.ones(4)),
        dict(return_attn_probs=True),
    ],
    ids=lambda refused: next(iter(refused)),
)
def test_what_is_not_done_is_refused(kernel, refused):
    arguments = packed([5, 6], [5, 6])
    name = next(iter(refused))
    with pytest.raises(ValueError, match=f"flash_attn_varlen_func: expected {name}"):
        kernel.flash_attn_varlen_func(*arguments, **refused)
    with pytest.raises(ValueError, match=f"flash_attn_func: expected {name}"):
        kernel.flash_attn_func(*(x[None] for x in arguments[:3]), **refused)


def test_deterministic_changes_nothing(kernel, assert_same_bits):
    arguments = packed([5, 60], [5, 60])
    want = kernel.flash_attn_varlen_func(*arguments, causal=True)
    assert_same_bits(kernel.flash_attn_varlen_func(*arguments, causal=True, deterministic=True), want)
