"""The two matrix products of CPU attention, with each row's bits independent of what is computed beside it.

    scores   query rows (items, T, D) x keys (items, N, D)         sum over D
    values   weights    (items, T, 64) x values (items, 64, Dv)    sum over the 64 keys of a block, added to a total

An item is one KV head of one sequence, a row one query of one of its heads. Both sums have a fixed length, so what is
left to fix is the order in which a GEMM takes them, and that it picks from the shape of the call. Calls therefore have a
few shapes only (T rows from `HEIGHTS`, items from `COUNTS`, N keys from `WIDTHS`), and a height is used only after a
trial on this machine has shown that a row gets the same bits at every such shape, in any slot and beside any
neighbours. Engines, best first:

    fused    torch.baddbmm adds to the total inside the GEMM
    plain    torch.bmm, then an addition
    ordered  one term after the other in float64: slow, needs no certificate

The trial's exact products are all 0 (half of the terms cancel the other half), so each result is pure rounding noise
and shows any change of order. A certificate holds for one shape and thread count, and lasts as long as the process.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch

BLOCK = 64  # keys per block: the length of the sum in `values`

HEIGHTS = (8, 16, 32, 64)
COUNTS = (1, 2, 4, 8, 16)
WIDTHS = (64, 128, 256, 512, 1024)
ENGINES = ("fused", "plain", "ordered")

_TRIAL_ROWS = 16
_SMALLEST_HEIGHTS = HEIGHTS[:2]  # one of these must hold, or a decode step would be mostly padding

_lock = threading.RLock()
_plans: dict[Hashable, "Plan"] = {}
_forced: str | None = None


@dataclass(frozen=True)
class Plan:
    """An engine and the heights at which it gives a row the same bits (any height will do for "ordered")."""

    engine: str
    heights: tuple[int, ...] = HEIGHTS


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


def plan_for(head_dim: int, value_head_dim: int) -> Plan:
    """The plan of one head shape in the present environment, made at first use."""
    key = (
        (head_dim, value_head_dim, _forced, torch.get_num_threads())
        + (torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled)
    )  # fmt: skip
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
    if engine == "ordered":
        out.copy_(_ordered_product(query, key.transpose(1, 2)))
    else:
        torch.bmm(query, key.transpose(1, 2), out=out)


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
        if _forced not in (None, engine):
            continue
        heights = set(_heights_of_scores(engine, head_dim)) & set(_heights_of_values(engine, value_head_dim))
        if heights & set(_SMALLEST_HEIGHTS):
            return Plan(engine, tuple(sorted(heights)))
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


def _heights_of_scores(engine: str, head_dim: int) -> tuple[int, ...]:
    rows, keys = _cancelling(head_dim, WIDTHS[-1])
    keys = keys.t().contiguous()
    found = {}
    for height in HEIGHTS:
        expected = torch.empty(_TRIAL_ROWS, WIDTHS[-1])
        for row in range(0, _TRIAL_ROWS, min(height, _TRIAL_ROWS)):
            order = (torch.arange(height) + row) % _TRIAL_ROWS
            out = torch.empty(1, height, WIDTHS[-1])
            _scores(engine, rows[order][None], keys[None], out)
            expected[order] = out[0]
        if _scores_hold(engine, height, rows, keys, expected):
            found[height] = _bits(expected)
    return _largest_class(found)


def _scores_hold(
    engine: str, height: int, rows: torch.Tensor, keys: torch.Tensor, expected: torch.Tensor
) -> bool:  # fmt: skip
    for count in COUNTS:
        spread = keys.expand(count, *keys.shape).contiguous()
        for width in WIDTHS if count in (1, 8) else WIDTHS[::3]:
            for number, order in enumerate(_arrangements(count, height)):
                start = (number * 192) % (WIDTHS[-1] - width + 64)
                columns = slice(start, start + width)
                buffer = torch.empty(count, height, width + 64 * number)  # a slice of a wider buffer, as in use
                out = buffer[:, :, 64 * number :]
                _scores(engine, rows[order], spread[:, columns], out)
                if not torch.equal(_bits(out), _bits(expected[order][..., columns])):
                    return False
    return True


def _heights_of_values(engine: str, value_head_dim: int) -> tuple[int, ...]:
    rows, value = _cancelling(BLOCK, value_head_dim)
    # A total of the size of the rounding noise: a large one would hide it.
    before = torch.linspace(-1e-6, 1e-6, _TRIAL_ROWS * value_head_dim).view(_TRIAL_ROWS, value_head_dim)
    found = {}
    for height in HEIGHTS:
        expected = torch.empty_like(before)
        held = True
        for count in COUNTS:
            spread = value.expand(count, *value.shape).contiguous()
            for number, order in enumerate(_arrangements(count, height)):
                buffer = torch.empty(count, height, BLOCK * (1 + 8 * number))
                weights = buffer[:, :, -BLOCK:].copy_(rows[order])
                total = before[order]
                _add_values(engine, total, weights, spread)
                if count == COUNTS[0] and number == 0:
                    for slot, row in enumerate(order[0].tolist()):
                        expected[row] = total[0, slot]
                    # Rows that a small tile has no room for get their expectation from a tile of their own.
                    if height < _TRIAL_ROWS:
                        rest = (order[:1] + height) % _TRIAL_ROWS
                        more = before[rest]
                        _add_values(engine, more, rows[rest], spread)
                        expected[rest[0]] = more[0]
                held = held and torch.equal(_bits(total), _bits(expected[order]))
        if held:
            found[height] = _bits(expected)
    return _largest_class(found)
