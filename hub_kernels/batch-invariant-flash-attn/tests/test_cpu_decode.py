"""Remembered decode steps on the CPU have the bits of those that are worked out anew, whatever their memory held."""

import threading

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def decode(module):
    """The module, with nothing remembered; skips where this machine has no certificate for the flash kernel."""
    if module("_cpu_flash_plan").plan_for(64, torch.float32) is None:
        pytest.skip("this machine has no certificate for the flash kernel")
    decode = module("_cpu_decode")
    decode._calls.clear()
    decode._local.__dict__.clear()
    return decode


def operands(kv_len, *, batch=1, heads=6, kv_heads=2, dim=64, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    query = randn(batch, heads, 1, dim)
    return query, randn(batch, kv_heads, kv_len, dim), randn(batch, kv_heads, kv_len, dim)


def anew(kernel, query, key, value, **options):
    """The same call on a way that is not remembered."""
    offset = torch.full((len(query),), key.shape[2] - 1)
    return kernel.attention(query, key, value, causal=True, query_offset=offset, **options)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(6, 2, 64), (9, 3, 64), (8, 1, 128), (4, 4, 32), (40, 1, 16), (3, 1, 80)], ids=str)
def test_a_remembered_call_has_the_bits_of_a_new_one(kernel, decode, assert_same_bits, shape, dtype):
    heads, kv_heads, dim = shape
    for kv_len in (1, 15, 16, 17, 200, 256, 300, 512, 513, 700, 1024):
        call = operands(kv_len, batch=2, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
        want = anew(kernel, *call)
        for run in range(3):
            got = kernel.attention(*call, causal=True)
            assert got.transpose(1, 2).is_contiguous() and want.transpose(1, 2).is_contiguous()
            assert_same_bits(got, want, f"{kv_len} keys, run {run}")
        assert_same_bits(kernel.attention(*(each[1:] for each in call), causal=False), want[1:], "alone")


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(32, 8, 80), (8, 8, 48), (8, 2, 32), (9, 3, 64), (4, 1, 128)], ids=str)
def test_every_step_has_the_bits_of_the_prefill(kernel, decode, assert_same_bits, shape, dtype):
    """Steps with any number of keys, also where a product's sum is cut in two from some length on."""
    heads, kv_heads, dim = shape
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (
            torch.randn(1, count, 880, dim, generator=generator).to(dtype) for count in (heads, kv_heads, kv_heads)
        )
        want = kernel.attention(query, key, value, causal=True)
        for kv_len in (*range(1, 600, 7), *range(257, 353, 3), *range(769, 865, 3)):
            step = query[:, :, kv_len - 1 : kv_len], key[:, :, :kv_len], value[:, :, :kv_len]
            for _ in range(2):
                got = kernel.attention(*step, causal=True)
                assert_same_bits(got, want[:, :, kv_len - 1 : kv_len], f"{kv_len} keys")


@torch.no_grad()
def test_it_is_a_remembered_call_that_serves(kernel, decode, monkeypatch, module):
    call = operands(200)
    kernel.attention(*call, causal=True)
    monkeypatch.setattr(module("_cpu_flash"), "run", None)  # the way of new calls
    kernel.attention(*call, causal=True)
    with pytest.raises(TypeError):
        anew(kernel, *call)


@torch.no_grad()
def test_what_the_memory_held_does_not_matter(kernel, decode, assert_same_bits):
    """Longer and shorter caches, other groups, NaN and infinity take turns."""
    calls = [operands(kv_len, heads=heads, seed=kv_len) for kv_len in (207, 193, 200) for heads in (6, 2, 8)]
    wants = [anew(kernel, *call) for call in calls]
    bad = operands(206)
    bad[1][..., 195:, :], bad[2][..., 195:, :], bad[0][...] = torch.nan, torch.inf, torch.nan
    for _ in range(3):
        for call, want in zip(calls, wants, strict=True):
            assert kernel.attention(*bad, causal=True).isnan().all()
            assert_same_bits(kernel.attention(*call, causal=True), want)


@torch.no_grad()
def test_results_do_not_share_memory(kernel, decode, assert_same_bits):
    for heads in (6, 16):  # 3 and 8 queries a group; 8 need no filling up
        call = operands(200, heads=heads)
        first, second = (kernel.attention(*call, causal=True) for _ in range(2))
        want = second.clone()
        assert_same_bits(first, want)
        kernel.attention(*operands(200, heads=heads, seed=1), causal=True)
        assert_same_bits(second, want)


@torch.no_grad()
def test_threads_do_not_share_memory(kernel, decode, assert_same_bits):
    calls = [operands(200, seed=seed) for seed in range(4)]
    wants = [anew(kernel, *call) for call in calls]
    got = [[] for _ in calls]

    def work(number):
        with torch.no_grad():
            for _ in range(50):
                got[number].append(kernel.attention(*calls[number], causal=True))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for results, want in zip(got, wants, strict=True):
        assert len(results) == 50
        for result in results:
            assert_same_bits(result, want)


def test_modes_of_execution_take_turns(kernel, decode, assert_same_bits):
    call = operands(200)
    with torch.no_grad():
        want = anew(kernel, *call)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                assert_same_bits(kernel.attention(*call, causal=True), want, mode.__name__)


@torch.no_grad()
def test_another_number_of_threads_or_engine_is_another_call(kernel, decode, module):
    call = operands(200)
    kernel.attention(*call, causal=True)
    torch.set_num_threads(2)
    kernel.attention(*call, causal=True)
    with module("_cpu_products").force_engine("plain"):
        kernel.attention(*call, causal=True)
        kernel.attention(*call, causal=True)
    assert len(decode._calls) == 3 and list(decode._calls.values())[-1] is None


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(8, 1, 256), (32, 1, 128), (4, 1, 64)], ids=str)
def test_a_single_item_of_work_is_not_shared_by_threads(kernel, decode, assert_same_bits, shape, dtype):
    """One sequence with one key head: PyTorch would let its GEMMs use all threads."""
    heads, kv_heads, dim = shape
    torch.set_num_threads(4)
    for kv_len in (100, 200, 500, 512, 1024):
        pair = operands(kv_len, batch=2, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
        want, one = anew(kernel, *pair)[:1], [each[:1] for each in pair]
        for got in (anew(kernel, *one), *(kernel.attention(*one, causal=True) for _ in range(3))):
            assert_same_bits(got, want, f"{kv_len} keys")
    query, key, value = (torch.randn(2, count, 300, dim).to(dtype) for count in (heads, kv_heads, kv_heads))
    want = kernel.attention(query, key, value, causal=True)[:1]
    for queries in (1, 2, 3, 8, 300):
        got = kernel.attention(query[:1, :, -queries:], key[:1], value[:1], causal=True)
        assert_same_bits(got, want[:, :, -queries:], f"the last {queries} queries")


@torch.no_grad()
def test_the_default_dtype_does_not_matter(kernel, decode, assert_same_bits):
    call = operands(200)
    want = anew(kernel, *call)
    try:
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            decode._calls.clear()
            decode._local.__dict__.clear()
            for _ in range(2):
                assert_same_bits(kernel.attention(*call, causal=True), want)
            assert_same_bits(anew(kernel, *call), want)
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def test_arguments_are_checked_before_anything_is_remembered(kernel, decode):
    query, key, value = operands(200)
    for wrong in ((query, key.half(), value), (query, key[:, :, :-1], value), (query[..., :60], key, value)):
        with pytest.raises((TypeError, ValueError)):
            kernel.attention(*wrong, causal=True)
    with pytest.raises(ValueError, match="scale"):
        kernel.attention(query, key, value, causal=True, scale=-1.0)
    assert not decode._calls
    kernel.attention(query, key, value, causal=True)
    with pytest.raises(TypeError):
        kernel.attention(query, key, value, causal=True, softcap=None)


@torch.no_grad()
def test_memory_stays_bounded(kernel, decode, monkeypatch):
    monkeypatch.setattr(decode, "_MOST_KEPT", 1 << 20)
    for kv_len in range(1, 400, 7):
        for _ in range(2):
            kernel.attention(*operands(kv_len), causal=True)
        assert sum(memory.nbytes for memory in decode._local.kept.values()) <= 1 << 20


@torch.no_grad()
def test_options_count_by_their_values(kernel, decode, assert_same_bits):
    call, scale = operands(200), torch.tensor(0.1)
    for value in (0.1, 0.3):
        scale.fill_(value)
        want = anew(kernel, *call, scale=value)
        for _ in range(2):
            assert_same_bits(kernel.attention(*call, causal=True, scale=scale, window=[-1, -1], softcap=0), want)
    assert len(decode._calls) == 2
