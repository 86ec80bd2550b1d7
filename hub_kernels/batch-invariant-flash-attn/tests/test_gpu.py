"""The GPU kernels over wider ranges: bits between layouts, values against float64."""

import pytest
import torch

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025]
# (query heads, key heads, head_dim, value head_dim)
HEADS = [
    (4, 4, 64, 64),
    (6, 2, 128, 128),
    (7, 1, 80, 80),
    (3, 1, 24, 24),
    (2, 1, 256, 256),
    (4, 2, 192, 128),
    (1, 1, 16, 16),
]
# Keys and values of two sizes that the Hopper kernel serves, which takes 16-bit dtypes only.
MIXED_HEADS = [(4, 2, 64, 256), (8, 2, 128, 256), (4, 2, 256, 128), (4, 2, 128, 64), (4, 2, 64, 128)]
SHAPES = [(dtype, shape) for dtype in DTYPES for shape in HEADS]
MIXED_SHAPES = [(dtype, shape) for dtype in DTYPES[1:] for shape in MIXED_HEADS]
OPTIONS = {
    "plain": {},
    "window": dict(window=(100, 0)),
    "softcap": dict(softcap=5.0),
    "sinks": dict(sinks=True),
    "all": dict(window=(200, -1), softcap=30.0, sinks=True, scale=0.2),
}
by_name = {"ids": lambda x: str(x).removeprefix("torch.")}


def with_sinks(options, query_heads):
    if options.get("sinks"):
        return options | dict(sinks=torch.linspace(-2, 3, query_heads, device="cuda"))
    return options


def chunks(length):
    """(first, last) of queries: decode steps, short and long chunks, across blocks and splits."""
    yield length - 1, length
    yield max(0, length - 2), length
    yield max(0, length - 17), length
    yield length // 2, length
    yield 0, length
    yield length // 3, length // 3 + 1
    yield length // 4, length - length // 5


# Each option meets the head sizes that take different kernels.
OTHERS = [(option, shape) for option in OPTIONS if option != "plain" for shape in ((4, 4, 64, 64), (7, 1, 80, 80))]
OTHERS += [(option, (6, 2, 128, 128)) for option in ("window", "all")]
CASES = [(dtype, "plain", shape) for dtype, shape in SHAPES + MIXED_SHAPES]
CASES += [(dtype, *other) for dtype in DTYPES for other in OTHERS]


@pytest.mark.parametrize("dtype, options, shape", CASES, **by_name)
def test_prefill_chunks_decode_and_padding_share_their_bits(
    kernel, heads, make_sequence, assert_same_bits, dtype, options, shape
):
    lengths = LENGTHS if options == "plain" and shape in HEADS else [65, 513, 1025]
    for length in lengths:
        chosen = with_sinks(OPTIONS[options], shape[0])
        sequence = make_sequence(length, heads(*shape, dtype, "cuda"), **chosen)
        want = sequence.alone(kernel)
        for number, (first, last) in enumerate(chunks(length)):
            layout = dict(left=37 * number, tail=100 * (number % 3), mates=(0, 1, 7)[number % 3], place=number)
            got = sequence.chunk(kernel, first, last, **layout)
            assert_same_bits(got, want[:, first:last], f"{length} {first}:{last} {layout}")


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_long_sequences_share_their_bits(kernel, heads, make_sequence, assert_same_bits, dtype):
    for length in (4095, 4097, 8192, 8193, 9300):
        sequence = make_sequence(length, heads(8, 2, 128, 128, dtype, "cuda"))
        want = sequence.alone(kernel)
        for first, last in ((length - 1, length), (length - 100, length), (4050, 4051), (4000, 9000)):
            last = min(last, length)
            for mates in (0, 3):
                got = sequence.chunk(kernel, first, last, left=129, tail=33, mates=mates, place=2)
                assert_same_bits(got, want[:, first:last], f"{length} {first}:{last} {mates} mates")


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_very_long_decode_has_the_bits_of_a_chunk(kernel, heads, make_sequence, assert_same_bits, dtype):
    """Far enough for the longest splits."""
    sequence = make_sequence(42000, heads(2, 1, 64, 64, dtype, "cuda"))
    want = sequence.chunk(kernel, 41000, 42000)
    for i in (41000, 41500, 41999):
        got = sequence.chunk(kernel, i, i + 1, left=77, mates=1)
        assert_same_bits(got, want[:, i - 41000 : i - 40999], f"token {i}")


@pytest.mark.parametrize("dtype, shape", SHAPES + MIXED_SHAPES, **by_name)
def test_every_tile_split_or_not_gives_the_same_bits(
    kernel, module, heads, make_sequence, assert_same_bits, dtype, shape
):
    launch, plan, gpu = module("_launch").launch_attention, module("plan"), module("_launch").gpu_of
    sequence = make_sequence(1100, heads(*shape, dtype, "cuda"))
    tensors = [x[None] for x in (sequence.query, sequence.key, sequence.value)]
    settings = (True, shape[2] ** -0.5, -1, -1, 0.0, None, None, None, None, None)
    want = launch(*tensors, *settings)
    gpu = gpu(tensors[0].device)
    for tile in plan.all_tiles(head_dim=shape[2], value_head_dim=shape[3], dtype=dtype, gpu=gpu):
        last = 1 if tile.decode else 1100
        for split in (False,) if tile.hopper else (False, True, 512) if tile.decode else (False, True):
            got = launch(tensors[0][:, :, -last:], *tensors[1:], *settings, tile=tile, split=split)
            assert_same_bits(got, want[:, -last:], f"{tile} split={split}")


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_decode_from_a_cropped_cache(kernel, heads, make_sequence, assert_same_bits, dtype):
    sequence = make_sequence(2000, heads(4, 2, 128, 128, dtype, "cuda"), window=(700, 0))
    want = sequence.alone(kernel)
    for cropped in (1, 64, 255, 256, 257, 511, 513, 1299):
        got = sequence.chunk(kernel, 1999, 2000, cropped=cropped, mates=2, place=1)
        assert_same_bits(got, want[:, 1999:], f"{cropped} keys forgotten")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_packed_sequences_have_the_bits_of_single_ones(kernel, assert_same_bits, dtype, causal):
    lengths_q, lengths_k = [1, 0, 513, 64, 1, 140], [900, 5, 513, 100, 1, 140]
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(sum(lengths_q), 28, 128, generator=generator, device="cuda").to(dtype)
    k, v = (torch.randn(sum(lengths_k), 4, 128, generator=generator, device="cuda").to(dtype) for _ in range(2))
    ends_q, ends_k = (torch.tensor([0, *n]).cumsum(0).int().cuda() for n in (lengths_q, lengths_k))
    for options in ({}, dict(window_size=(50, 0)), dict(softcap=10.0, s_aux=torch.linspace(-1, 2, 28, device="cuda"))):
        out = kernel.flash_attn_varlen_func(q, k, v, ends_q, ends_k, 513, 900, causal=causal, **options)
        at_q = at_k = 0
        for n_q, n_k in zip(lengths_q, lengths_k, strict=True):
            own = q[None, at_q : at_q + n_q], k[None, at_k : at_k + n_k], v[None, at_k : at_k + n_k]
            alone = kernel.flash_attn_func(*own, causal=causal, **options)[0]
            assert_same_bits(out[at_q : at_q + n_q], alone, f"{n_q} {n_k} {list(options)}")
            at_q, at_k = at_q + n_q, at_k + n_k


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_shortening_one_rows_cache_changes_no_other_row(kernel, assert_same_bits, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    query = torch.randn(4, 32, 1, 128, generator=generator, device="cuda").to(dtype)
    key, value = (torch.randn(4, 8, 1024, 128, generator=generator, device="cuda").to(dtype) for _ in range(2))
    lengths = torch.tensor([900, 1000, 120, 500], dtype=torch.int32, device="cuda")
    before = kernel.attention(query, key, value, causal=True, query_offset=lengths - 1)
    lengths[0] -= 100
    after = kernel.attention(query, key, value, causal=True, query_offset=lengths - 1)
    assert_same_bits(after[1:], before[1:])
    for row in range(4):
        n = int(lengths[row])
        own = query[row : row + 1], key[row : row + 1, :, :n], value[row : row + 1, :, :n]
        assert_same_bits(kernel.attention(*own, causal=True), after[row : row + 1], f"row {row} alone")


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_masks_in_every_form_give_the_same_bits(kernel, assert_same_bits, dtype):
    generator = torch.Generator("cuda").manual_seed(2)
    query = torch.randn(2, 4, 300, 64, generator=generator, device="cuda").to(dtype)
    key, value = (torch.randn(2, 2, 300, 64, generator=generator, device="cuda").to(dtype) for _ in range(2))
    at = torch.arange(300, device="cuda")
    origin = torch.tensor([0, 23], dtype=torch.int32, device="cuda")
    present = at >= origin[:, None]
    square = (present[:, None] & (at <= at[:, None]))[:, None]
    want = kernel.attention(query, key, value, causal=True, origin=origin)
    assert not want[1, :, :23].any()
    assert_same_bits(kernel.attention(query, key, value, causal=True, origin=origin, key_mask=present), want, "2-D")
    assert_same_bits(kernel.attention(query, key, value, causal=False, origin=origin, mask=square), want, "boolean")
    hidden = present[:, None, :, None]
    nan = [x.masked_fill(~hidden, float("nan")) for x in (key, value)]
    assert_same_bits(kernel.attention(query, *nan, causal=True, origin=origin, key_mask=present), want, "NaN")
    for floor in (float("-inf"), torch.finfo(dtype).min):
        additive = torch.zeros(square.shape, dtype=dtype, device="cuda").masked_fill_(~square, floor)
        got = kernel.attention(query, key, value, causal=False, origin=origin, mask=additive)
        assert_same_bits(got, want, f"additive {floor}")


@pytest.mark.parametrize("shape", [(8, 2, 64, 64), (8, 2, 128, 128), (4, 4, 16, 16), (4, 2, 256, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_a_mask_gives_a_decode_step_the_bits_of_the_prefill(kernel, assert_same_bits, dtype, shape):
    """Padding with and without holes, as a key mask, prepared or not, and as a boolean mask; rows alone too."""
    query_heads, kv_heads, dim, _ = shape
    generator = torch.Generator("cuda").manual_seed(5)
    query = torch.randn(4, query_heads, 600, dim, generator=generator, device="cuda").to(dtype)
    key, value = (torch.randn(4, kv_heads, 600, dim, generator=generator, device="cuda").to(dtype) for _ in range(2))
    at = torch.arange(600, device="cuda")
    origin = torch.tensor([0, 23, 0, 300], dtype=torch.int32, device="cuda")
    present = at >= origin[:, None]
    whole = kernel.attention(query, key, value, causal=True, origin=origin)
    present[2, 40:47] = present[3, 411] = False
    prepared = kernel.prepare_key_mask(present, origin)
    want = kernel.attention(query, key, value, causal=True, origin=origin, key_mask=prepared)
    assert_same_bits(want[:2], whole[:2], "rows without holes")
    causal = (at <= at[:, None])[None, None]
    square = present[:, None, None] & causal
    assert_same_bits(kernel.attention(query, key, value, causal=False, origin=origin, mask=square), want, "boolean")
    hidden = ~present[:, None, :, None]
    clean = key, value
    key, value = (x.masked_fill(hidden, float("nan")) for x in (key, value))
    for first, last in ((599, 600), (598, 600), (500, 513), (570, 600)):
        part = query[:, :, first:last]
        offset = torch.full((4,), first, dtype=torch.int32, device="cuda")
        for name, mask in (("bool", present), ("prepared", prepared)):
            call = dict(causal=True, query_offset=offset, origin=origin, key_mask=mask)
            assert_same_bits(kernel.attention(part, key, value, **call), want[:, :, first:last], f"{name} {first}")
            for row in range(4):
                one = slice(row, row + 1)
                own = {name: x[one] if isinstance(x, torch.Tensor) else x for name, x in call.items()}
                got = kernel.attention(part[one], key[one], value[one], **own)
                assert_same_bits(got, want[one, :, first:last], f"{name} {first} row {row} alone")
        got = kernel.attention(part, *clean, causal=False, origin=origin, mask=square[:, :, first:last])
        assert_same_bits(got, want[:, :, first:last], f"boolean {first}")


@pytest.mark.parametrize("shape", [(8, 2, 64, 64), (8, 2, 128, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], **by_name)
def test_right_padding_hides_keys_from_queries_on_both_sides(kernel, assert_same_bits, dtype, shape):
    """An encoder's batch: the end of a row's keys is part of its key mask."""
    query_heads, kv_heads, dim, _ = shape
    generator = torch.Generator("cuda").manual_seed(6)
    lengths = [400, 1, 130, 256]
    query = torch.randn(4, query_heads, 400, dim, generator=generator, device="cuda").to(dtype)
    key, value = (torch.randn(4, kv_heads, 400, dim, generator=generator, device="cuda").to(dtype) for _ in range(2))
    present = torch.arange(400, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    got = kernel.attention(query, key, value, causal=False, key_mask=present)
    for row, n in enumerate(lengths):
        one = slice(row, row + 1)
        alone = kernel.attention(query[one, :, :n], key[one, :, :n], value[one, :, :n], causal=False)
        assert_same_bits(got[one, :, :n], alone, f"length {n}")


@pytest.mark.parametrize(
    "dtype, shape, q_len",
    [(*case, q_len) for case in SHAPES for q_len in (1, 7, 600)] + [(*case, 600) for case in MIXED_SHAPES],
    **by_name,
)
def test_error_is_at_most_that_of_stock(kernel, exact_attention, stock_attention, dtype, shape, q_len):
    query_heads, kv_heads, dim, value_dim = shape
    ours = theirs = 0.0
    largest = 0.0
    for seed in range(4):
        generator = torch.Generator("cuda").manual_seed(seed)
        query = torch.randn(2, query_heads, q_len, dim, generator=generator, device="cuda").to(dtype)
        key = torch.randn(2, kv_heads, 600, dim, generator=generator, device="cuda").to(dtype)
        value = torch.randn(2, kv_heads, 600, value_dim, generator=generator, device="cuda").to(dtype)
        exact = exact_attention(query, key, value, causal=True)
        ours += (kernel.attention(query, key, value, causal=True).double() - exact).square().mean().item()
        theirs += (stock_attention(query, key, value).double() - exact).square().mean().item()
        largest = max(largest, exact.abs().max().item())
    # Root mean square over all draws; half a unit in the last place of the largest result is its own rounding.
    floor = largest * torch.finfo(torch.float32).eps / 4
    assert (ours / 4) ** 0.5 <= 1.1 * (theirs / 4) ** 0.5 + floor, (ours, theirs, floor)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_mean_what_they_say(kernel, exact_attention, options):
    generator = torch.Generator("cuda").manual_seed(0)
    query = torch.randn(2, 8, 130, 64, generator=generator, device="cuda")
    key, value = (torch.randn(2, 2, 700, 64, generator=generator, device="cuda") for _ in range(2))
    chosen = with_sinks(OPTIONS[options], 8)
    exact = exact_attention(query, key, value, causal=True, **chosen)
    got = kernel.attention(query, key, value, causal=True, **chosen)
    torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **by_name)
def test_negative_control_stock_decode_differs_from_prefill(stock_attention, count_differing_bits, dtype):
    differing = 0
    for length in (65, 513, 1025, 4097):
        generator = torch.Generator("cuda").manual_seed(length)
        query = torch.randn(1, 8, length, 64, generator=generator, device="cuda").to(dtype)
        key, value = (torch.randn(1, 2, length, 64, generator=generator, device="cuda").to(dtype) for _ in range(2))
        prefill = stock_attention(query, key, value)
        differing += count_differing_bits(stock_attention(query[:, :, -1:], key, value), prefill[:, :, -1:])
    assert differing


def test_a_captured_graph_has_the_bits_of_eager(kernel, heads, make_sequence, assert_same_bits):
    sequence = make_sequence(700, heads(8, 2, 128, 128, torch.bfloat16, "cuda"))
    tensors = [x[None] for x in (sequence.query[:, -1:], sequence.key, sequence.value)]
    offset = torch.tensor([500], dtype=torch.int32, device="cuda")
    kernel.attention(*tensors, causal=True, query_offset=offset)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.attention(*tensors, causal=True, query_offset=offset)
    for position in (254, 255, 256, 257, 500, 511, 512, 699):
        offset.fill_(position)
        graph.replay()
        assert_same_bits(out, kernel.attention(*tensors, causal=True, query_offset=offset), f"position {position}")
