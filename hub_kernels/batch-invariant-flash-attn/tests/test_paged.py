"""Paged caches and cropped ones: the bits of packed keys, and of the whole sequence."""

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS_Q, LENGTHS_K = (1, 37, 1, 0, 130), (300, 37, 64, 9, 700)
WINDOW = 48

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def cumulative(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def packed(device, dtype, lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, value_dim=64):
    """q (Tq, 6, 64), k (Tk, 2, 64), v (Tk, 2, value_dim), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""
    random = torch.Generator().manual_seed(0)
    shapes = ((sum(lengths_q), 6, 64), (sum(lengths_k), 2, 64), (sum(lengths_k), 2, value_dim))
    tensors = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)
    bounds = (cumulative(lengths_q, device), cumulative(lengths_k, device))
    return *tensors, *bounds, max(lengths_q), max(lengths_k)


def paged(k, v, lengths_k, page_size, seed):
    """The keys and values in pages of a larger cache, in shuffled order, and the table; nan where there is no key."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths_k]
    order = torch.randperm(sum(counts) + 7, generator=random).tolist()
    table = torch.full((len(lengths_k), max(counts) + 1), -1, dtype=torch.int32)
    caches = [x.new_full((len(order), page_size, *x.shape[1:]), float("nan")) for x in (k, v)]
    start = 0
    for sequence, length in enumerate(lengths_k):
        for page in range(counts[sequence]):
            table[sequence, page] = block = order.pop()
            first = start + page * page_size
            last = min(first + page_size, start + length)
            for cache, x in zip(caches, (k, v), strict=True):
                cache[block, : last - first] = x[first:last]
        start += length
    return *caches, table.to(k.device)


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256, 1024])
@pytest.mark.kernels_ci
def test_any_block_table_and_page_size_give_the_bits_of_the_dense_cache(
    kernel, assert_same_bits, count_differing_bits, device, dtype, page_size
):
    q, k, v, *lengths = packed(device, dtype, value_dim=32)
    want = kernel.flash_attn_varlen_func(q, k, v, *lengths, causal=True)
    for seed in range(3):
        *caches, table = paged(k, v, LENGTHS_K, page_size, seed)
        got = kernel.flash_attn_varlen_func(q, *caches, *lengths, causal=True, block_table=table)
        assert_same_bits(got, want, f"table {seed}")
    windowed = dict(causal=True, window_size=(20, 0), softcap=10.0)
    got = kernel.flash_attn_varlen_func(q, *caches, *lengths, block_table=table, **windowed)
    assert_same_bits(got, kernel.flash_attn_varlen_func(q, k, v, *lengths, **windowed), "window and softcap")
    table[4, :-1] = table[4, :-1].roll(1)  # negative control: the table is read
    if int((table[4] >= 0).sum()) > 2:
        got = kernel.flash_attn_varlen_func(q, *caches, *lengths, causal=True, block_table=table)
        assert count_differing_bits(got, want)


@on_each_device
@in_each_dtype
def test_page_has_the_bits_of_a_dense_decode_step(kernel, assert_same_bits, device, dtype):
    """A step of one query for each sequence, from pages and from a dense cache (B, H, KV, D) with free places."""
    lengths = (300, 37, 64, 700)
    q, k, v, *bounds = packed(device, dtype, (1,) * 4, lengths)
    dense = [torch.full((4, 2, 800, 64), float("nan"), device=device, dtype=dtype) for _ in range(2)]
    starts = cumulative(lengths).tolist()
    for row, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        for cache, x in zip(dense, (k, v), strict=True):
            cache[row, :, : last - first] = x[first:last].transpose(0, 1)
    offset = torch.tensor(lengths, dtype=torch.int32, device=device) - 1
    want = kernel.attention(q[:, :, None], *dense, causal=True, query_offset=offset)[:, :, 0]
    *caches, table = paged(k, v, lengths, 16, 0)
    got = kernel.flash_attn_varlen_func(q, *caches, *bounds, causal=True, block_table=table)
    assert_same_bits(got, want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(9, 2, 64)}, "expected k of shape \\(blocks, page_size, heads, head_dim\\)"),
        ({"v": torch.zeros(5, 4, 2, 64)}, "expected v to have the blocks and page size of k"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int32)}, "expected block_table to be an integer tensor"),
        ({"block_table": torch.zeros(2, 3)}, "expected block_table to be an integer tensor"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "max_seqlen_k=6 keys, got 1 blocks of 4"),
    ],
)
def test_block_table_that_does_not_fit_is_refused(kernel, changes, message):
    q, _, _, *lengths = packed("cpu", torch.float32, (1, 2), (3, 6))
    cache = torch.zeros(7, 4, 2, 64)
    call = dict(k=cache, v=cache, block_table=torch.zeros(2, 3, dtype=torch.int32)) | changes
    k, v = call.pop("k"), call.pop("v")
    with pytest.raises(ValueError, match=f"flash_attn_varlen_func: .*{message}"):
        kernel.flash_attn_varlen_func(q, k, v, *lengths, causal=True, **call)


# --- packed sequences whose first keys are gone ---


def cropped(k, lengths_q, lengths_k):
    """The keys that a window leaves, packed, their numbers, and the origin of each sequence among them."""
    kept = [min(length, WINDOW - 1 + queries) for queries, length in zip(lengths_q, lengths_k, strict=True)]
    parts = [part[part.shape[0] - n :] for part, n in zip(k.split(lengths_k), kept, strict=True)]
    origin = torch.tensor([n - length for n, length in zip(kept, lengths_k, strict=True)], dtype=torch.int32)
    return torch.cat(parts), kept, origin.to(k.device)


def whole_and_cropped(device, dtype, lengths_q, lengths_k):
    """Arguments of attention_varlen for both, and the origins for the latter."""
    q, k, v, bounds_q, bounds_k, longest_q, longest_k = packed(device, dtype, lengths_q, lengths_k)
    few_k, kept, origin = cropped(k, lengths_q, lengths_k)
    few_v, *_ = cropped(v, lengths_q, lengths_k)
    few = (q, few_k, few_v, bounds_q, cumulative(kept, device), longest_q, max(kept))
    return (q, k, v, bounds_q, bounds_k, longest_q, longest_k), few, origin


@on_each_device
@in_each_dtype
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [
        (LENGTHS_Q, LENGTHS_K),
        ((1,) * 5, (5300, 520, 64, 9, 700)),
        ((1, 0, 1, 0), (530, 0, 40, 7)),
        ((513, 2), (513, 4100)),
    ],
)
def test_cropped_sequences_have_the_bits_of_whole_ones(kernel, assert_same_bits, device, dtype, lengths_q, lengths_k):
    whole, few, origin = whole_and_cropped(device, dtype, lengths_q, lengths_k)
    options = dict(causal=True, window=(WINDOW - 1, -1), sinks=torch.linspace(-1, 1, 6, device=device))
    want = kernel.attention_varlen(*whole, **options)
    assert_same_bits(kernel.attention_varlen(*few, **options, origin=origin), want)


@on_each_device
def test_negative_control_cropped_sequences_without_origin_differ(kernel, count_differing_bits, device):
    whole, few, _ = whole_and_cropped(device, torch.float32, LENGTHS_Q, LENGTHS_K)
    options = dict(causal=True, window=(WINDOW - 1, -1))
    assert count_differing_bits(kernel.attention_varlen(*few, **options), kernel.attention_varlen(*whole, **options))


@on_each_device
@in_each_dtype
def test_origin_works_both_ways_and_what_other_sequences_hold_does_not_matter(kernel, assert_same_bits, device, dtype):
    """Not causal, an origin behind the first key, and values in front of a sequence that are not numbers."""
    q, k, v, *lengths = packed(device, dtype, (20, 70), (200, 300))
    v[:200] = float("nan")
    origin = torch.tensor([3, -70], dtype=torch.int32, device=device)
    got = kernel.attention_varlen(q, k, v, *lengths, causal=False, origin=origin)
    own = [x[first:].transpose(0, 1)[None] for x, first in ((q, 20), (k, 200), (v, 200))]
    want = kernel.attention(*own, causal=False, origin=origin[1:])[0].transpose(0, 1)
    assert_same_bits(got[20:], want)


def test_tokens_behind_the_last_sequence_stay_zeros_with_origins(kernel):
    for lengths_q in ((1, 1), (1, 3)):
        q, k, v, *lengths = packed("cpu", torch.float32, lengths_q, (4, 6))
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 3)) + 1
        out = kernel.attention_varlen(q, k, v, *lengths, causal=True, origin=torch.zeros(2, dtype=torch.int32))
        assert out[: sum(lengths_q)].all() and not out[sum(lengths_q) :].any()


def test_origins_that_cannot_be_are_refused(kernel):
    q, k, v, *lengths = packed("cpu", torch.float32, (1, 2), (3, 6))
    for origin, message in (
        (torch.zeros(3, dtype=torch.int32), r"origin to be an integer tensor of shape \(2,\)"),
        (torch.zeros(2), "origin to be an integer tensor"),
    ):
        with pytest.raises(ValueError, match=f"attention_varlen: expected {message}"):
            kernel.attention_varlen(q, k, v, *lengths, causal=True, origin=origin)
