"""The flash engine of the CPU path: what its certificate rests on, and every layout and mask against the same bits."""

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MACHINE_HAS_NONE = "this machine has no certificate for the flash kernel"


@pytest.fixture
def flash_plan(module):
    """The plan of a head shape; skips where there is none. Its engine is forced, so a call cannot go elsewhere."""

    def find(dim, dtype):
        flash = module("_cpu_flash")
        plan = flash.plan_for(flash.filled_dim(dim, dtype), dtype)
        if plan is None:
            pytest.skip(MACHINE_HAS_NONE)
        return plan

    return find


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(6, 2, 64), (4, 4, 128), (3, 1, 80), (40, 1, 16)], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (70, -1)], ids=["all", "window"])
def test_chunks_padding_mates_and_caches_give_the_same_bits(
    kernel, module, flash_plan, heads, make_sequence, assert_same_bits, shape, dtype, window
):
    flash_plan(shape[-1], dtype)
    query, kv, dim = shape
    sequence = make_sequence(700, heads(query, kv, dim, dim, dtype), window=window)
    with module("_cpu_products").force_engine("flash"):
        want = sequence.alone(kernel)
        for first, last, left, tail, mates in (
            (699, 700, 0, 0, 0),
            (699, 700, 13, 60, 3),
            (511, 512, 1, 0, 1),
            (512, 513, 0, 500, 2),
            (0, 700, 130, 0, 2),
            (300, 320, 5, 3, 1),
            (100, 645, 600, 9, 1),
            (0, 64, 0, 0, 4),
            (0, 3, 2, 1, 1),
        ):
            got = sequence.chunk(kernel, first, last, left=left, tail=tail, mates=mates, place=1)
            assert_same_bits(got, want[:, first:last], f"{first}:{last} left {left} tail {tail} mates {mates}")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_forms_of_one_mask_give_the_same_bits(
    kernel, module, flash_plan, make_sequence, heads, assert_same_bits, dtype
):
    flash_plan(64, dtype)
    length, left = 600, 50
    sequence = make_sequence(length, heads(dtype=dtype))
    want = sequence.alone(kernel)
    query, key, value = (
        torch.cat([torch.randn(each.shape[0], left, 64).to(dtype), each], 1)[None].repeat(2, 1, 1, 1)
        for each in (sequence.query, sequence.key, sequence.value)
    )
    present = (torch.arange(length + left) >= left)[None].repeat(2, 1)
    seen = present[:, None, None] & torch.ones(length + left, length + left, dtype=torch.bool).tril()
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    origin = torch.tensor([left, left], dtype=torch.int32)
    with module("_cpu_products").force_engine("flash"):
        for options in (
            dict(causal=True, origin=origin),
            dict(causal=True, origin=origin, key_mask=present),
            dict(causal=False, origin=origin, mask=seen),
            dict(causal=True, origin=origin, mask=added),
            dict(causal=False, origin=origin, mask=added.to(dtype).expand(2, 4, -1, -1)),
        ):
            got = kernel.attention(query, key, value, **options)
            assert_same_bits(got[1][:, left:], want, str(list(options)))
            for first in (left, left + 7, length + left - 1):  # few queries: heads packed into one tile
                part = dict(options)
                if "mask" in part:
                    part["mask"] = part["mask"][:, :, first : first + 2]
                part["query_offset"] = torch.tensor([first, first], dtype=torch.int32)
                got = kernel.attention(query[:, :, first : first + 2], key, value, **part)
                assert_same_bits(got[0], want[:, first - left : first - left + 2][:, : got.shape[2]], f"from {first}")


def test_a_row_that_sees_nothing_gives_zeros(kernel, module, flash_plan):
    for dtype in DTYPES:
        flash_plan(64, dtype)
        query, key = torch.randn(2, 4, 40, 64).to(dtype), torch.randn(2, 2, 40, 64).to(dtype)
        present = torch.ones(2, 40, dtype=torch.bool)
        present[1] = False
        with module("_cpu_products").force_engine("flash"):
            got = kernel.attention(query, key, key, causal=True, key_mask=present)
            assert not got[1].any() and got[0].abs().sum(-1).all()
            got = kernel.attention(query, key, key, causal=True, query_offset=torch.tensor([0, -10], dtype=torch.int32))
            assert not got[1, :, :10].any() and got[1, :, 10:].abs().sum(-1).all()


def test_the_engine_follows_the_model_only(kernel, module):
    """Softcap, sinks and another head_dim of the values are the block engine's, whatever the batch."""
    flash = module("_cpu_flash")
    call = module("_cpu_attention").Call
    query, value = torch.zeros(1, 2, 3, 64), torch.zeros(1, 2, 3, 32)

    def plan(softcap=0.0, sinks=None, value=query):
        lists = ([0], [0], [0], [3])
        return flash.plan_of(call(query, query, value, 0.1, softcap, sinks, None, None, None, 0, *lists))

    assert plan(softcap=3.0) is None and plan(sinks=torch.zeros(2)) is None and plan(value=value) is None
    assert plan() is flash.plan_for(64, torch.float32)


def spoiled(stock, spoil):
    """The flash kernel with `spoil(query, keys, out, mask)` called on its output."""

    def kernel(query, keys, values, dropout, causal, *, attn_mask=None, scale=None):
        out, log_sum = stock(query, keys, values, dropout, causal, attn_mask=attn_mask, scale=scale)
        spoil(query, keys, out, attn_mask)
        return out, log_sum

    return kernel


def by_few_queries(query, keys, out, mask):
    if query.shape[2] <= 16:
        out *= 1 + 2**-7


def by_slot(query, keys, out, mask):
    out[:, :, 1] *= 1 + 2**-7


def by_hidden_keys(query, keys, out, mask):
    if keys.shape[2] < 1024:
        out *= 1 + 2**-7


def by_heads(query, keys, out, mask):
    if query.shape[1] > 1:
        out *= 1 + 2**-7


@pytest.mark.parametrize("spoil", [by_few_queries, by_slot, by_hidden_keys, by_heads], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_a_kernel_that_looks_at_the_shape_gets_no_certificate(module, flash_plan, monkeypatch, dtype, spoil):
    flash_plan(64, dtype)
    plans = module("_cpu_flash_plan")
    monkeypatch.setattr(plans, "flash", spoiled(plans.flash, spoil))
    assert plans._make_plan(64, dtype) is None


def test_what_fails_for_one_reason_is_given_up_for_it(module, flash_plan, monkeypatch):
    """A kernel that minds strides keeps its certificate for copies; one whose own mask differs, for masks in memory."""
    flash_plan(64, torch.float32)
    plans = module("_cpu_flash_plan")
    stock = plans.flash

    def by_stride(query, keys, out, mask):
        if keys.stride(-2) != 64:
            out *= 1.5

    def by_own_mask(query, keys, values, dropout, causal, *, attn_mask=None, scale=None):
        out, log_sum = stock(query, keys, values, dropout, causal, attn_mask=attn_mask, scale=scale)
        return (out * 1.5 if causal else out), log_sum

    monkeypatch.setattr(plans, "flash", spoiled(stock, by_stride))
    plan = plans._make_plan(64, torch.float32)
    assert not plan.views and plan.causal
    monkeypatch.setattr(plans, "flash", by_own_mask)
    plan = plans._make_plan(64, torch.float32)
    assert plan.views and not plan.causal


def test_a_length_that_fails_is_not_used(module, flash_plan, monkeypatch):
    flash_plan(64, torch.float32)
    plans = module("_cpu_flash_plan")

    def by_length(query, keys, out, mask):
        if query.shape[2] >= 320:
            out *= 1.5

    monkeypatch.setattr(plans, "flash", spoiled(plans.flash, by_length))
    plan = plans._make_plan(64, torch.float32)
    assert plan.length(3) == 8 and plan.length(33) == 64 and plan.length(300) == 256 and not plan.causal
    assert plan.padded(1) == 64 and plan.padded(200) == 256 and plan.padded(513) == 576 and plan.padded(1024) == 1024


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_more_widths_serve_few_queries_where_they_hold(module, flash_plan, dtype):
    flash_plan(64, dtype)
    plan = module("_cpu_flash_plan")._make_plan(64, dtype)
    for length in (8, 32):
        for keys in (1, 17, 200, 256, 300, 512, 700, 1000, 1024):
            count = plan.padded(keys, length)
            assert keys <= count <= plan.padded(keys) and count % 16 == 0
    assert plan.padded(200, 64) == plan.padded(200) and plan.padded(300, 8) == plan.padded(300)


def test_one_width_that_fails_is_the_end_of_them_all(module, flash_plan, monkeypatch):
    flash_plan(64, torch.float32)
    plans = module("_cpu_flash_plan")
    stock = plans.flash

    def by_width(query, keys, out, mask):
        if keys.shape[2] % 512 == 208:
            out *= 1.5

    def by_hidden_keys_of_a_narrow_call(query, keys, out, mask):
        if keys.shape[2] == 208 and mask is not None:
            out *= 1.5

    def by_nothing(query, keys, out, mask):
        pass

    for spoil, count in ((by_width, 128), (by_hidden_keys_of_a_narrow_call, 128), (by_nothing, 112)):
        monkeypatch.setattr(plans, "flash", spoiled(stock, spoil))
        plan = plans._make_plan(64, torch.float32)
        assert plan.padded(100, 8) in (count, 128) and plan.padded(512 + 100, 8) in (512 + count, 512 + 128)
        assert plan.fine == {8: plan.padded(100, 8) == 112}


def in_every_layout(tensor):
    """The values of a (B, H, L, D) tensor in memory of other orders, and in every second place of a row."""
    yield "columns first", tensor.transpose(2, 3).contiguous().transpose(2, 3)
    yield "heads last", tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    wide = tensor.new_zeros(*tensor.shape[:3], 2 * tensor.shape[3])
    wide[..., ::2] = tensor
    yield "every second", wide[..., ::2]
    yield "rows first", tensor.transpose(1, 2).contiguous().transpose(1, 2)


@torch.no_grad()
@pytest.mark.parametrize(
    ("engine", "dtype"), [("flash", torch.float32), ("flash", torch.bfloat16), ("fused", torch.float32)], ids=str
)
def test_layouts_in_memory_do_not_matter(kernel, module, assert_same_bits, engine, dtype):
    generator = torch.Generator().manual_seed(0)
    with module("_cpu_products").force_engine(engine):
        for q_len, kv_len in ((1, 64), (1, 200), (40, 61), (128, 128)):
            states = [(8, q_len), (1, kv_len), (1, kv_len)]  # 8 queries a group: they need no filling up
            operands = [torch.randn(2, *state, 64, generator=generator).to(dtype) for state in states]
            want = kernel.attention(*operands, causal=True)
            for place in range(3):
                for name, other in in_every_layout(operands[place]):
                    given = [*operands[:place], other, *operands[place + 1 :]]
                    for options in ({}, {"origin": torch.tensor([0, 0])}, {"window": (10_000, -1)}):
                        got = kernel.attention(*given, causal=True, **options)
                        assert_same_bits(got, want, f"{q_len} of {kv_len}, operand {place}, {name}, {list(options)}")
