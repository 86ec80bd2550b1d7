"""How the CPU path comes to rows whose bits do not depend on the batch: certified tile heights.

A CPU GEMM picks its loop order from the number of rows. So it is only ever called with a few fixed row counts
("heights"), the last tile padded, and a height is used only after a trial run, on this machine, has shown that a row
gets the same bits in any slot of the tile, beside any neighbours, and at every other height in use. Engines, best
first:

    mkl      MKL's GEMM with the weight packed once (float32)
    packed   oneDNN with the weight packed once
    tiled    the stock GEMM
    exact    a product without rounding (`_cpu_exact`), for which no certificate is needed

The trial's exact dot products are all 0 (the second half of K repeats the first with the weight's sign flipped), so
each output is pure rounding noise: a change of order shows in it, also after rounding to 16 bits.

A certificate holds for one shape, dtype and thread count, and lasts as long as the process. With another thread count
the bits may be others; within one they are fixed.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch

ENGINES = ("mkl", "packed", "tiled", "exact")

Call = Callable[[torch.Tensor], torch.Tensor]  # (height, K) -> (height, N)

_lock = threading.RLock()
_plans: dict[Hashable, "Plan"] = {}
_forced: str | None = None

# Rows in a trial: enough outputs to see a change of order even for a small weight.
_TRIAL_OUTPUTS = 1024
_TRIAL_ROWS = (4, 32)


@contextlib.contextmanager
def force_engine(name: str) -> Iterator[None]:
    """Try one engine only, in the whole process, so that each can be tested; "exact" still serves where it fails."""
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
    return _forced is None or _forced == engine


def environment() -> tuple:
    """The process settings that may change a GEMM's order: certificates of one setting say nothing about another."""
    return (
        _forced,
        torch.get_num_threads(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_fp32_precision_getter("mkldnn", "matmul"),
    )


def trial_operands(k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(x (rows, K), weight (N, K)) whose products are 0 before rounding."""
    generator = torch.Generator().manual_seed(4321)
    least, most = _TRIAL_ROWS
    rows = min(max(least, _TRIAL_OUTPUTS // n), most)
    # Beyond 1024 rows the weight repeats itself: drawing millions of numbers would take longer than the trial.
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(rows, k, generator=generator, dtype=drawn)
    weight = torch.randn(min(n, 1024), k, generator=generator, dtype=drawn)
    half = k // 2
    if half:
        order = torch.randperm(half, generator=generator)
        x[:, half : 2 * half] = x[:, :half][:, order]
        weight[:, half : 2 * half] = -weight[:, :half][:, order]
        x[:, 2 * half :] = 0
    return x.to(dtype), weight.to(dtype).repeat(-(-n // 1024), 1)[:n].contiguous()


def _bits(y: torch.Tensor) -> torch.Tensor:
    return y.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[y.element_size()])


def row_bits(call: Call, x: torch.Tensor, height: int) -> torch.Tensor | None:
    """The bits (rows, N) that each row of x gets in tiles of `height`, or None if slot, mates or alignment matter."""
    rows, k = x.shape
    seen: dict[int, torch.Tensor] = {}
    arrangements = [(torch.arange(height) + start) % rows for start in range(0, rows, height)]
    arrangements += [order.flip(0) for order in arrangements[: 1 if height > 1 else 0]]
    for number, order in enumerate(arrangements):
        # The first tile starts one element past an aligned address, as a slice of a larger tensor may.
        tile = torch.empty(height * k + 16, dtype=x.dtype)[1 if number == 0 else 0 :][: height * k].view(height, k)
        y = _bits(call(tile.copy_(x[order])))
        for slot, row in enumerate(order.tolist()):
            if not torch.equal(seen.setdefault(row, y[slot]), y[slot]):
                return None
    return torch.stack([seen[row] for row in range(rows)])


@dataclass
class Plan:
    """An engine and, unless it is "exact", the heights that give a row the same bits.

    Heights come in rungs. The first rung decides which bits are the plan's; a later rung is tried when a call first
    has that many rows, and joins only with the same bits. So what was called before cannot change a result.
    """

    engine: str
    heights: tuple[int, ...] = ()
    bits: torch.Tensor | None = None
    later_rungs: list[tuple[int, ...]] = field(default_factory=list)
    make_trial: Callable[[], tuple[Call, torch.Tensor]] | None = None

    def tiles(self, rows: int) -> list[tuple[int, int]]:
        """(first row, height) of the tiles that cover `rows` rows; the last one may reach beyond."""
        while self.later_rungs and rows > self.heights[-1] and _fills(rows, self.later_rungs[0][0]):
            self._climb()
        tiles, start = [], 0
        while start < rows:
            height = _next_height(self.heights, rows - start)
            tiles.append((start, height))
            start += height
        return tiles

    def _climb(self) -> None:
        with _lock:
            if not self.later_rungs:
                return
            call, x = self.make_trial()
            same = []
            for height in self.later_rungs[0]:
                bits = row_bits(call, x, height)
                if bits is not None and torch.equal(bits, self.bits):
                    same.append(height)
            self.heights = tuple(sorted({*self.heights, *same}))
            self.later_rungs = self.later_rungs[1:]


def _fills(rows: int, height: int) -> bool:
    """Whether a tile of this height is worth its padding."""
    return height <= rows * 1.34 + 4


def _next_height(heights: tuple[int, ...], rows: int) -> int:
    """The smallest height that holds all rows, if little of it is padding; else the largest one that they fill."""
    holding = next((height for height in heights if height >= rows), None)
    if holding is not None and (_fills(rows, holding) or holding == heights[0]):
        return holding
    return max((height for height in heights if height <= rows), default=heights[0])


def certify(
    engine: str, rungs: tuple[tuple[int, ...], ...], make_trial: Callable[[], tuple[Call, torch.Tensor]]
) -> Plan | None:
    """The plan of an engine, or None if no small height holds.

    Heights of the first rung are grouped by the bits that they give; the group that serves both few rows (16 or less)
    and many wins.
    """
    call, x = make_trial()
    groups: list[tuple[torch.Tensor, list[int]]] = []
    for height in rungs[0]:
        bits = row_bits(call, x, height)
        if bits is None:
            continue
        for known, heights in groups:
            if torch.equal(known, bits):
                heights.append(height)
                break
        else:
            groups.append((bits, [height]))
    if not groups:
        return None
    bits, heights = max(groups, key=lambda group: (group[1][0] <= 16, group[1][-1], len(group[1])))
    return Plan(engine, tuple(heights), bits, list(rungs[1:]), make_trial)


def plan_for(key: tuple, make: Callable[[], Plan]) -> Plan:
    """The plan cached under `key` in the present environment, made at first use."""
    key = (*key, environment())
    plan = _plans.get(key)
    if plan is None:
        with _lock:
            plan = _plans.get(key)
            if plan is None:
                plan = _plans[key] = make()
    return plan
