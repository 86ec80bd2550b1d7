"""The CPU path: each engine by itself, what is cached and for how long, and what must not disturb it."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ENGINES = ["mkl", "packed", "tiled", "exact"]


def operands(rows, n, k, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    return x, (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# --- engines ---


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(96, 256), (5, 90), (320, 1000)], ids=str)
def test_each_engine_gives_a_row_the_same_bits(kernel, module, assert_same_bits, shape, dtype, engine):
    x, weight = operands(70, *shape, dtype)
    bias = weight[:, 0].clone()
    with module("_cpu_plan").force_engine(engine):
        together = kernel.linear(x, weight, bias)
        for size in (1, 2, 3, 11, 33):
            apart = torch.cat([kernel.linear(part, weight, bias) for part in x.split(size)])
            assert_same_bits(apart, together, f"batches of {size}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_each_engine_is_as_accurate_as_stock(kernel, module, assert_as_accurate, dtype, engine):
    x, weight = operands(64, 320, 1000, dtype)
    with module("_cpu_plan").force_engine(engine):
        y = kernel.linear(x, weight)
    assert_as_accurate(y, F.linear(x, weight), F.linear(x.double(), weight.double()))


@pytest.mark.parametrize("engine", ["tiled", "exact"])
def test_each_engine_of_bmm_gives_a_row_the_same_bits(kernel, module, assert_same_bits, assert_as_accurate, engine):
    x, y = torch.randn(3, 70, 100), torch.randn(3, 100, 90)
    with module("_cpu_plan").force_engine(engine):
        together = kernel.bmm(x, y)
        for size in (1, 2, 11):
            apart = torch.cat([kernel.bmm(part, y) for part in x.split(size, 1)], 1)
            assert_same_bits(apart, together, f"{size} rows")
    assert_as_accurate(together, torch.bmm(x, y), torch.bmm(x.double(), y.double()))


def test_exact_engine_is_exact_up_to_the_last_rounding(kernel, module, assert_same_bits):
    x, weight = operands(20, 30, 700, torch.float32)
    x[:, 0] *= 1e4  # an outlier must not cost the other terms their bits
    with module("_cpu_plan").force_engine("exact"):
        y = kernel.linear(x, weight)
    exact = F.linear(x.double(), weight.double())
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-24 * 1.01 + 1e-9).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_keeps_nan_and_inf_where_they_are(kernel, module, assert_same_bits, engine):
    x, weight = operands(9, 48, 64, torch.float32)
    with module("_cpu_plan").force_engine(engine):
        clean = kernel.linear(x, weight)
        x[2, 5], x[4, 6], weight[7, 8] = float("nan"), float("inf"), -float("inf")
        y = kernel.linear(x, weight)
    stock = F.linear(x, weight)
    torch.testing.assert_close(y, stock, equal_nan=True, atol=1e-5, rtol=1e-5)
    assert torch.equal(y.isfinite(), stock.isfinite())
    y[[2, 4]], y[:, 7] = clean[[2, 4]], clean[:, 7]
    assert_same_bits(y, clean)


def test_unknown_engine_is_refused(module):
    with pytest.raises(ValueError, match="force_engine: expected name in"), module("_cpu_plan").force_engine("fast"):
        pass


# --- certificates ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_trial_sees_a_change_of_order(module, dtype):
    """A GEMM that sums K otherwise in one slot, beside some neighbours or at some heights gets no certificate there."""
    plan = module("_cpu_plan")
    x, weight = plan.trial_operands(192, 40, dtype)

    def in_order(tile, blocks=3):
        total = 0
        for a, b in zip(tile.float().chunk(blocks, 1), weight.float().chunk(blocks, 1), strict=True):
            total = total + (a.double() @ b.double().t()).float()
        return total.to(dtype)

    def one_slot(tile):
        y = in_order(tile)
        y[1] = in_order(tile[1:2], blocks=6)[0]
        return y

    def by_neighbour(tile):
        return in_order(tile, blocks=6 if tile[0, 0] > tile[-1, 0] else 3)

    def by_height(tile):
        return in_order(tile, blocks=6 if len(tile) < 4 else 3)

    assert plan.row_bits(in_order, x, 8) is not None
    assert plan.row_bits(one_slot, x, 8) is None
    assert plan.row_bits(by_neighbour, x, 8) is None
    assert plan.certify("tiled", ((2, 4, 8), (16, 32)), lambda: (in_order, x)).tiles(40) == [(0, 32), (32, 8)]
    assert plan.certify("tiled", ((2, 4, 8),), lambda: (by_height, x)).heights == (4, 8)


def test_trial_products_are_zero_before_rounding(module):
    for k in (8, 9, 576):
        x, weight = module("_cpu_plan").trial_operands(k, 40, torch.float32)
        assert (x.double() @ weight.double().t()).abs().max() < 1e-12


def test_tiles_cover_every_number_of_rows(module):
    plan = module("_cpu_plan").Plan("tiled", (2, 8, 32))
    for rows in range(1, 200):
        tiles = plan.tiles(rows)
        assert [start for start, _ in tiles] == [sum(h for _, h in tiles[:i]) for i in range(len(tiles))]
        assert rows <= tiles[-1][0] + tiles[-1][1] < rows + 32
        assert {height for _, height in tiles} <= {2, 8, 32}


def test_earlier_calls_do_not_change_bits(kernel, module, assert_same_bits, monkeypatch):
    x, weight = operands(300, 56, 200, torch.float32)
    plans = module("_cpu_plan")._plans
    results = []
    for first in (1, 300, 40):
        monkeypatch.setattr(module("_cpu_plan"), "_plans", {})
        kernel.linear(x[:first], weight)
        results.append(kernel.linear(x, weight))
    monkeypatch.setattr(module("_cpu_plan"), "_plans", plans)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_each_thread_count_has_its_own_plan(kernel, module, assert_same_bits, two_threads):
    x, weight = operands(33, 104, 264, torch.float32)
    seen = {}
    for threads in (2, 1, 2, 1):
        torch.set_num_threads(threads)
        y = kernel.linear(x, weight)
        assert_same_bits(kernel.linear(x[5], weight), y[5], f"{threads} threads")
        assert_same_bits(y, seen.setdefault(threads, y), f"{threads} threads, later")
    keys = [key for key in module("_cpu_plan")._plans if key[:3] == (torch.float32, 264, 104)]
    assert {key[-1][1] for key in keys} == {1, 2}


# --- cached weights ---


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_copies_die_with_their_weight(kernel, module, dtype):
    copies = module("_cpu_weights").cached_copies
    gc.collect()
    before = copies()
    x, weight = operands(3, 48, 64, dtype)
    for _ in range(3):
        kernel.linear(x, weight)
    assert copies() == before + 1
    del weight
    gc.collect()
    assert copies() == before


@pytest.mark.parametrize("change", ["in place", "data"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_a_changed_weight_is_seen(kernel, module, assert_same_bits, dtype, engine, change):
    x, weight = operands(3, 48, 64, dtype)
    weight = torch.nn.Parameter(weight)
    copies = module("_cpu_weights").cached_copies
    with module("_cpu_plan").force_engine(engine):
        kernel.linear(x, weight)
        count = copies()
        if change == "in place":
            weight.mul_(2)
        else:
            weight.data = weight.data * 2
        assert_same_bits(kernel.linear(x, weight), kernel.linear(x, weight.detach().clone()))
        assert copies() <= count


def test_views_of_a_parameter_share_one_copy(kernel, module):
    copies = module("_cpu_weights").cached_copies
    stored = torch.nn.Parameter(torch.randn(64, 48))
    experts = torch.nn.Parameter(torch.randn(3, 16, 64))
    x = torch.randn(5, 64)
    before = copies()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for _ in range(3):
                kernel.linear(x, stored.t())
                kernel.grouped_linear(x, experts, torch.tensor([1, 1, 4], dtype=torch.int32))
    assert copies() == before + 1 + 2
    del stored, experts
    gc.collect()
    assert copies() == before


def test_a_growing_buffer_used_as_weight_keeps_no_stale_copies(kernel, module):
    copies = module("_cpu_weights").cached_copies
    buffer, x = torch.zeros(64, 32), torch.randn(2, 32)
    kernel.linear(x, buffer[:8])
    before = copies()
    for length in range(9, 20):
        buffer[length] = 1.0
        kernel.linear(x, buffer[:length])
    assert copies() == before


def test_a_weight_made_in_inference_mode(kernel, assert_same_bits):
    x, weight = operands(3, 48, 64, torch.bfloat16)
    want = kernel.linear(x, weight * 2)
    with torch.inference_mode():
        other = weight.clone()
        kernel.linear(x, other)
        other.mul_(2)
        assert_same_bits(kernel.linear(x, other), want)


def test_threads_may_call_at_once(kernel, assert_same_bits):
    x, weight = operands(40, 72, 136, torch.float32)
    errors = []

    def work(seed):
        try:
            order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
            y = kernel.linear(x[order], weight)
            for _ in range(5):
                assert_same_bits(kernel.linear(x[order[:3]], weight), y[:3])
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors


# --- surroundings ---


def test_autocast_and_precision_settings_do_not_leak_in(kernel, module, assert_same_bits):
    x, weight = operands(7, 48, 64, torch.float32)
    y = torch.randn(2, 64, 20)
    for engine in ENGINES:
        with module("_cpu_plan").force_engine(engine):
            want, want_bmm = kernel.linear(x, weight), kernel.bmm(x.expand(2, 7, 64), y)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert_same_bits(kernel.linear(x, weight), want, engine)
                assert_same_bits(kernel.bmm(x.expand(2, 7, 64), y), want_bmm, engine)


def test_function_modes_do_not_see_the_inside(kernel, module, assert_same_bits):
    class Refuse(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            assert function not in (F.linear, torch.bmm, torch.mm, torch.matmul), function
            return function(*args, **(kwargs or {}))

    x, weight = operands(7, 48, 64, torch.float32)
    for engine in ENGINES:
        with module("_cpu_plan").force_engine(engine):
            want = kernel.linear(x, weight)
            with Refuse():
                assert_same_bits(kernel.linear(x, weight), want, engine)
