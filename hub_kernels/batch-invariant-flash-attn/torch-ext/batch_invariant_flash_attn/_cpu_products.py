"""The two matrix products of CPU attention, with each row's bits independent of what is computed beside it.

    scores   query rows (items, T, D) x keys (items, N, D)         sum over D
    values   weights    (items, T, 64) x values (items, 64, Dv)    sum over the 64 keys of a block, added to a total

An item is one KV head of one sequence, a row one query of one of its heads. Both sums have a fixed length, so what is
left to fix is the order in which a GEMM takes them, and that it picks from the shape of the call. Calls therefore have
a few shapes only (T rows from `HEIGHTS`, items from `COUNTS`, N keys from `WIDTHS`), and a height is used only after a
trial on this machine has shown that a row gets the same bits at every such shape, in any slot and beside any
neighbours. Engines, best first:

    fused    torch.baddbmm adds to the total inside the GEMM
    plain    torch.bmm, then an addition
    ordered  one term after the other in float64: slow, needs no certificate

Before all of these comes "flash" (`_cpu_flash`), for what PyTorch's own kernel can do.

The trial's exact products are all 0 (half of the terms cancel the other half), so each result is pure rounding noise
and shows any change of order. A certificate holds for one shape and thread count, and lasts as long as the process.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch

BLOCK = 64  # keys per block: the length of the sum in `values`

HEIGHTS = (8, 16, 32, 64, 128, 192)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
WIDTHS = (64, 128, 256, 512, 1024)
ENGINES = ("flash", "fused", "plain", "ordered")

# Terms of a score that are summed at a stretch. A GEMM adds them one by one, which over a long head loses more to
# rounding than the stock decode kernel does.
_TERMS = 64

_TRIAL_ROWS = 16
_SMALLEST_HEIGHTS = HEIGHTS[:2]  # one of these must hold, or a decode step would be mostly padding

_lock = threading.RLock()
_plans: dict[Hashable, "Plan"] = {}
_forced: str | None = None


@dataclass(frozen=True)
class Plan:
    """An engine, the heights at which it gives a row the same bits, and whether it does so at any address and stride.

    views: keys and values may be slices of larger tensors; otherwise they must be copied first.
    """

    engine: str
    heights: tuple[int, ...] = HEIGHTS
    views: bool = True


@contextlib.contextmanager
def force_engine(name: str) -> Iterator[None]:
    """Try one engine only, in the whole process, so that each can be tested; "ordered" still serves where it fails."""
    global _forced
    if name not in ENGINES:
        raise ValueError(f"force_engine: expected name in {ENGINES}, got {name!r}; pass one of these")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def allows(engine: str) -> bool:
    """Whether an engine may be tried now."""
    return _forced in (None, engine)


def plan_for(head_dim: int, value_head_dim: int) -> Plan:
    """The plan of one head shape in the present environment, made at first use."""
    environment = (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled)
    key = (head_dim, value_head_dim, _forced, *environment)
    plan = _plans.get(key)
    if plan is None:
        with _lock:
            plan = _plans.get(key)
            if plan is None:
                plan = _plans[key] = _make_plan(head_dim, value_head_dim)
    return plan


def scores(plan: Plan, query: torch.Tensor, key: torch.Tensor, out: torch.Tensor) -> None:
    """query (items, T, D), key (items, n * 64, D) -> out (items, T, n * 64), a slice or not; all float32."""
    start = 0
    for width in _cut(key.shape[1], WIDTHS):
        columns = slice(start, start + width)
        for items in _item_groups(len(query)):
            _scores(plan.engine, query[items], key[items, columns], out[items, :, columns])
        start += width


def add_values(plan: Plan, total: torch.Tensor, weights: torch.Tensor, value: torch.Tensor) -> None:
    """total (items, T, Dv) += weights (items, T, 64) @ value (items, 64, Dv); all float32, weights a slice or not."""
    if len(total) in COUNTS:
        return _add_values(plan.engine, total, weights, value)
    for items in _item_groups(len(total)):
        _add_values(plan.engine, total[items], weights[items], value[items])


def _cut(size: int, parts: tuple[int, ...]) -> Iterator[int]:
    """Write a size as a sum of parts, largest first."""
    for part in reversed(parts):
        while size >= part:
            yield part
            size -= part
    assert size == 0, size


def _item_groups(items: int) -> Iterator[slice]:
    start = 0
    for count in _cut(items, COUNTS):
        yield slice(start, start + count)
        start += count


def _scores(engine: str, query: torch.Tensor, key: torch.Tensor, out: torch.Tensor) -> None:
    key = key.transpose(1, 2)
    if engine == "ordered":
        out.copy_(_ordered_product(query, key))
        return
    torch.bmm(query[..., :_TERMS], key[:, :_TERMS], out=out)
    for start in range(_TERMS, query.shape[-1], _TERMS):
        _add_values(engine, out, query[..., start : start + _TERMS], key[:, start : start + _TERMS])


def _add_values(engine: str, total: torch.Tensor, weights: torch.Tensor, value: torch.Tensor) -> None:
    if engine == "fused":
        total.baddbmm_(weights, value)
    elif engine == "plain":
        total += torch.bmm(weights, value)
    else:
        total += _ordered_product(weights, value).float()


def _ordered_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(items, T, K) x (items, K, N) -> (items, T, N) float64: K rank-one products, added one after the other.

    A product of two float32 numbers is exact in float64, so a fused multiply-add would not change anything.
    """
    left, right = left.double(), right.double()
    total = left[:, :, :1] * right[:, :1]
    for k in range(1, left.shape[2]):
        total += left[:, :, k : k + 1] * right[:, k : k + 1]
    return total


# --- the trial ---


def _make_plan(head_dim: int, value_head_dim: int) -> Plan:
    for engine in ("fused", "plain"):
        if not allows(engine):
            continue
        for views in (True, False):
            heights = set(_heights_of_scores(engine, head_dim, views))
            heights &= set(_heights_of_values(engine, value_head_dim, views))
            if heights & set(_SMALLEST_HEIGHTS):
                return Plan(engine, tuple(sorted(heights)), views)
    return Plan("ordered")


def _cancelling(terms: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, terms) and (terms, columns) whose product is 0 before rounding."""
    generator = torch.Generator().manual_seed(4321)
    left = torch.randn(_TRIAL_ROWS, terms, generator=generator)
    right = torch.randn(terms, columns, generator=generator)
    order = torch.randperm(terms // 2, generator=generator)
    left[:, terms // 2 :] = left[:, : terms // 2][:, order]
    right[terms // 2 :] = -right[: terms // 2][order]
    return left, right


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def _arrangements(count: int, height: int) -> Iterator[torch.Tensor]:
    """Which trial row goes into which slot: (count, height), so that each row meets other slots and neighbours."""
    slots = torch.arange(count * height).view(count, height)
    yield slots % _TRIAL_ROWS
    yield (slots * 7 + 3) % _TRIAL_ROWS
    if height < _TRIAL_ROWS:
        yield (slots + height) % _TRIAL_ROWS


def _largest_class(bits_of_height: dict[int, torch.Tensor]) -> tuple[int, ...]:
    """The heights that agree, from the largest group of those that hold a small one."""
    groups: list[list[int]] = []
    for height, bits in bits_of_height.items():
        for group in groups:
            if torch.equal(bits_of_height[group[0]], bits):
                group.append(height)
                break
        else:
            groups.append([height])
    return tuple(max(groups, key=lambda group: (group[0] in _SMALLEST_HEIGHTS, len(group)), default=()))


def _repeated(matrix: torch.Tensor, count: int, as_slice: bool) -> torch.Tensor:
    """The matrix for each item; as_slice: as part of a wider tensor, off the addresses that allocators give."""
    rows, columns = matrix.shape
    wide = torch.empty(count, rows, columns + 24 if as_slice else columns)
    return wide[:, :, 8 : 8 + columns].copy_(matrix) if as_slice else wide.copy_(matrix)


def _rows_in_small_tiles(height: int) -> Iterator[torch.Tensor]:
    """Every trial row once, `height` rows at a time: (1, height) each."""
    for row in range(0, _TRIAL_ROWS, height):
        yield (torch.arange(height)[None] + row) % _TRIAL_ROWS


def _heights_of_scores(engine: str, head_dim: int, views: bool) -> tuple[int, ...]:
    rows, keys = _cancelling(head_dim, WIDTHS[-1])
    keys = keys.t().contiguous()
    found = {}
    for height in HEIGHTS:
        expected = torch.empty(_TRIAL_ROWS, WIDTHS[-1])
        for order in _rows_in_small_tiles(height):
            out = torch.empty(*order.shape, WIDTHS[-1])
            _scores(engine, rows[order], keys[None], out)
            expected[order] = out
        if _scores_hold(engine, height, rows, keys, expected, views):
            found[height] = _bits(expected)
    return _largest_class(found)


def _scores_hold(
    engine: str, height: int, rows: torch.Tensor, keys: torch.Tensor, expected: torch.Tensor, views: bool
) -> bool:
    for count in COUNTS:
        orders = list(_arrangements(count, height))
        operands = [_repeated(keys, count, as_slice=views and number == 1) for number in range(2)]
        for number, width in enumerate(WIDTHS if count in (1, 8) else WIDTHS[::3]):
            start = (number * 192) % (WIDTHS[-1] - width + 64)
            columns = slice(start, start + width)
            order = orders[number % len(orders)]
            buffer = torch.empty(count, height, width + 64 * number)  # the result is a slice, too
            out = buffer[:, :, 64 * number :]
            _scores(engine, rows[order], operands[number % 2][:, columns], out)
            if not torch.equal(_bits(out), _bits(expected[:, columns][order])):
                return False
    return True


def _heights_of_values(engine: str, value_head_dim: int, views: bool) -> tuple[int, ...]:
    rows, value = _cancelling(BLOCK, value_head_dim)
    # Totals of the size of the rounding noise: large ones would hide it.
    before = torch.linspace(-1e-6, 1e-6, _TRIAL_ROWS * value_head_dim).view(_TRIAL_ROWS, value_head_dim)
    found = {}
    for height in HEIGHTS:
        expected = torch.empty_like(before)
        for order in _rows_in_small_tiles(height):
            total = before[order]
            _add_values(engine, total, rows[order], value[None])
            expected[order] = total
        if _values_hold(engine, height, rows, value, before, expected, views):
            found[height] = _bits(expected)
    return _largest_class(found)


def _values_hold(
    engine: str,
    height: int,
    rows: torch.Tensor,
    value: torch.Tensor,
    before: torch.Tensor,
    expected: torch.Tensor,
    views: bool,
) -> bool:
    for count in COUNTS:
        for number, order in enumerate(_arrangements(count, height)):
            odd = (number + count) % 2
            buffer = torch.empty(count, height, BLOCK * (1 + 8 * odd))
            weights = buffer[:, :, -BLOCK:].copy_(rows[order])
            total = before[order]
            _add_values(engine, total, weights, _repeated(value, count, as_slice=views and odd))
            if not torch.equal(_bits(total), _bits(expected[order])):
                return False
    return True
