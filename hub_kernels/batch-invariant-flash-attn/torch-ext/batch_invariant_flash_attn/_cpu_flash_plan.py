"""Which calls of PyTorch's CPU flash kernel give a query the same bits, found out by trial.

The kernel takes 512 keys at a time and keeps a running maximum, sum and output, so with keys counted from the row's
origin the order of a row's sums is fixed, up to what its GEMMs do with the shape at hand: queries at a time, keys in
the last step, heads. Calls are therefore made with a few numbers of queries ("lengths") and of keys in the last step
("widths") only, and each is used only after a trial on this machine has shown that it gives a row the bits of the
smallest length with the same keys, hidden or not there, in any slot, beside any neighbours, at any address.

In one of the trial's data sets the exact scores are 0 and what rounding leaves of them is magnified, in another the
exact outputs are 0: both show a change of order that ordinary data may hide, also in 16 bits.
"""

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

STEP = 512  # keys that the kernel takes at a time
_WIDTHS = (64, 128, 256, STEP)
# Calls of few queries have more widths, at every 16 keys, since in decoding keys may have to be copied to fill one up.
# Other numbers of keys never held: what is left of a vector goes through another exp. From 256 on GEMMs cut some sums
# in two and not others, so that a trial in 16 bits can pass by chance. So these widths are used up to there, and only
# if all of them hold, for a reason that they share.
_FINE = 16
_MOST_FINE = 256
_FINE_LENGTHS = 32
_KEYS = 2 * STEP
_ROWS = 16
_BASES = (8, 16)
_MASKED = float("-inf")

# The binding of aten's operator, which takes 3 microseconds less than `torch.ops`.
flash = torch._scaled_dot_product_flash_attention_for_cpu

_lock = threading.RLock()
_plans: dict[Hashable, "Plan | None"] = {}

Bits = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Data:
    """Operands of one trial: rows (16, D), keys (1024, D), values (1024, D)."""

    rows: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float


@dataclass
class Plan:
    """What holds for one head_dim, dtype and environment.

    views: operands may be slices of larger tensors. causal: the kernel's own causal mask gives the same bits.
    """

    data: list[_Data]
    base: int
    expected: dict[int, list[Bits]] = field(default_factory=dict)  # keys in sight -> per data set, bits of each row
    lengths: dict[int, bool] = field(default_factory=dict)
    fine: dict[int, bool] = field(default_factory=dict)  # queries -> whether the widths of every 16 keys hold
    widths: tuple[int, ...] = _WIDTHS
    views: bool = True
    causal: bool = True

    def length(self, rows: int) -> int:
        """Queries per call for `rows` queries: the smallest length that holds them, or the largest that there is."""
        for length in _ladder(rows):
            if self.holds(length):
                return length
        return next(length for length in (256, 128, 64, 32, self.base) if self.holds(length))

    def padded(self, keys: int, length: int | None = None) -> int:
        """The number of keys of a call that needs `keys`, of `length` queries if it is one of few."""
        whole = keys // STEP * STEP
        rest = keys - whole
        if not rest:
            return whole
        if length is not None and length <= _FINE_LENGTHS and rest <= _MOST_FINE and self._has_fine_widths(length):
            return whole - (-rest // _FINE) * _FINE
        return whole + next(width for width in self.widths if width >= rest)

    def _has_fine_widths(self, length: int) -> bool:
        """Whether calls of `length` queries give each row its bits with any 16 * i <= 256 keys in the last step."""
        widths = range(_FINE, _MOST_FINE + 1, _FINE)
        return _once(self.fine, length, lambda: all(self._try_width(length, width) for width in widths))

    def _try_width(self, length: int, width: int) -> bool:
        order, heads = _order(length), (1, _most_heads())
        for data in self.data:
            for keys in (width, STEP + width):
                for hidden in (0, 1, _FINE - 1):
                    mask = _mask(length, slice(keys - hidden, None), keys) if hidden else None
                    want = _pick(_expected(data, self.base, keys - hidden), length)
                    ways = [dict(heads=count) for count in heads] + [dict(as_slice=True)] * self.views
                    if not all(_same(_run(data, order, keys, mask=mask, **way), want) for way in ways):
                        return False
        return True

    def holds(self, length: int) -> bool:
        """Whether calls of this many queries give each row its bits; tried when first asked for."""
        return _once(self.lengths, length, lambda: self._try(length))

    def _try(self, length: int) -> bool:
        heads = (1, _most_heads()) if length <= 256 else (1,)
        sights = self.expected if length <= 256 else (STEP + 64, _KEYS)
        return all(
            _same(_run(data, _order(length), keys, heads=count), _pick(self.expected[keys][number], length))
            for number, data in enumerate(self.data)
            for keys in sights
            for count in heads
        )


def _once(known: dict, key: Hashable, make: Callable[[], Any]) -> Any:
    """known[key], made by the first thread that asks for it."""
    if key not in known:
        with _lock:
            if key not in known:
                known[key] = make()
    return known[key]


def _most_heads() -> int:
    """Heads of a trial: more than threads, and no fewer than from where kernels begin to pack operands."""
    return max(4, min(2 * torch.get_num_threads(), 16))


def environment() -> tuple:
    """What a certificate depends on beside the shape."""
    return torch.get_num_threads(), torch.get_float32_matmul_precision(), torch._C._get_mkldnn_enabled()


def plan_for(head_dim: int, dtype: torch.dtype) -> Plan | None:
    """The plan of one head shape in the present environment, or None if the kernel is not to be used."""
    return _once(_plans, (head_dim, dtype, *environment()), lambda: _make_plan(head_dim, dtype))


def _ladder(rows: int) -> Iterable[int]:
    """Lengths to try for some rows: the kernel's own tiles have 32 rows below 192, 64 below 768 and 256 from there."""
    for step, below in ((8, 9), (16, 17), (32, 192), (64, 768), (256, rows + 256)):
        length = -(-rows // step) * step
        if length < below:
            yield length


# --- the trial ---


def _make_plan(head_dim: int, dtype: torch.dtype) -> Plan | None:
    data = _make_data(head_dim, dtype)
    for base in _BASES:
        try:
            plan = _plan_from(data, base)
        except (RuntimeError, NotImplementedError):  # this build has no such kernel, or none for grouped heads
            return None
        if plan is not None:
            return plan
    return None


def _plan_from(data: list[_Data], base: int) -> Plan | None:
    plan = Plan(data, base)
    sights = sorted({sight for width in _WIDTHS for sight in (width, STEP + width)})
    plan.expected = {sight: [_expected(each, base, sight) for each in data] for sight in sights}
    if not (plan.holds(base) and plan.holds(32)) or not _hides_exactly(plan):
        return None
    plan.views = all(
        _same(_run(each, _order(length), _KEYS, as_slice=True), _pick(plan.expected[_KEYS][number], length))
        for number, each in enumerate(data)
        for length in (base, 32)
    )
    plan.causal = plan.holds(_KEYS) and all(_causal_holds(each, base) for each in data)
    return plan


def _make_data(head_dim: int, dtype: torch.dtype) -> list[_Data]:
    generator = torch.Generator().manual_seed(4321)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)

    rows, keys, values = normal(_ROWS, head_dim), normal(_KEYS, head_dim), normal(_KEYS, head_dim)
    half = head_dim // 2
    order = torch.randperm(half, generator=generator)
    rows[:, half : 2 * half] = rows[:, :half][:, order]
    keys[:, half : 2 * half] = -keys[:, :half][:, order]
    zero_scores = _Data(rows, keys, values, 2.0**21)

    rows, keys, values = normal(_ROWS, head_dim), normal(_KEYS, head_dim), normal(_KEYS, head_dim)
    if dtype == torch.float16:
        values *= 2.0**12  # what rounding leaves is far below 1 and would be 0 in float16
    for block in range(0, _KEYS, _FINE):  # so that any number of whole blocks gives 0
        first, second = block + torch.randperm(_FINE, generator=generator).view(2, _FINE // 2)
        keys[second], values[second] = keys[first], -values[first]
    zero_outputs = _Data(rows, keys, values, head_dim**-0.5)
    plain = _Data(normal(_ROWS, head_dim), normal(_KEYS, head_dim), normal(_KEYS, head_dim), head_dim**-0.5)
    return [zero_scores, zero_outputs, plain]


def _order(length: int) -> torch.Tensor:
    """Which trial row goes into which slot."""
    return (torch.arange(length) * 7 + 3) % _ROWS


def _run(
    data: _Data,
    order: torch.Tensor,
    keys: int,
    *,
    heads: int = 1,
    as_slice: bool = False,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> Bits:
    """Bits of outputs (2, heads, length, D) and of log-sums (2, heads, length): two sequences, one key head."""
    query = _placed(data.rows[order], as_slice).expand(2, heads, -1, -1)
    operands = [_placed(source[:keys], as_slice) for source in (data.keys, data.values)]
    out, log_sum = flash(query, *operands, 0.0, causal, attn_mask=mask, scale=data.scale)
    integer = {2: torch.int16, 4: torch.int32}
    return tuple(each.contiguous().view(integer[each.element_size()]) for each in (out, log_sum))


def _placed(matrix: torch.Tensor, as_slice: bool) -> torch.Tensor:
    """The matrix for two sequences of one head; as_slice: within a larger tensor, off the addresses of allocators."""
    rows, columns = matrix.shape
    if not as_slice:
        return matrix.expand(2, 1, rows, columns)
    wide = torch.empty(2, rows + 3, 2, columns + 8, dtype=matrix.dtype)
    return wide[:, 3:, 1:, 8:].copy_(matrix[:, None]).transpose(1, 2)


def _same(got: Bits, want: Bits) -> bool:
    return all(torch.equal(each, other.expand_as(each)) for each, other in zip(got, want, strict=True))


def _pick(bits: Bits, length: int) -> Bits:
    """The bits of the rows in `_order(length)`."""
    return tuple(each[_order(length)] for each in bits)


def _mask(length: int, hidden: slice, keys: int = _KEYS) -> torch.Tensor:
    mask = torch.zeros(1, 1, 1, keys, dtype=torch.float32)
    mask[..., hidden] = _MASKED
    return mask.expand(1, 1, length, keys)


def _expected(data: _Data, base: int, sight: int) -> Bits:
    """Bits of each trial row, (16, D) and (16,), when it sees the first keys and the others are hidden."""
    parts = []
    for first in range(0, _ROWS, base):
        order = torch.arange(first, first + base)
        parts.append([each[0, 0] for each in _run(data, order, _KEYS, mask=_mask(base, slice(sight, None)))])
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _hides_exactly(plan: Plan) -> bool:
    """A first step that is hidden counts as nothing, and a row that sees nothing gives zeros."""
    for data in plan.data:
        for length in (plan.base, 32):
            order = _order(length)
            later = _Data(data.rows, data.keys[STEP:], data.values[STEP:], data.scale)
            hidden = _run(data, order, _KEYS, mask=_mask(length, slice(STEP)))
            if not _same(hidden, _run(later, order, STEP)):
                return False
            nothing, _ = _run(data, order, _KEYS, mask=_mask(length, slice(None)))
            if nothing.any():
                return False
    return True


def _causal_holds(data: _Data, base: int) -> bool:
    """The kernel's causal mask against a mask in memory, for all queries at once and for some tiles of them."""
    order = _order(_KEYS)
    mask = torch.full((_KEYS, _KEYS), _MASKED, dtype=torch.float32).triu_(1)[None, None]
    causal = _run(data, order, _KEYS, causal=True)
    if not _same(_run(data, order, _KEYS, mask=mask), causal):
        return False
    for first in (0, 3 * base, STEP - base, STEP, _KEYS - base):
        tile = slice(first, first + base)
        got = _run(data, order[tile], _KEYS, mask=mask[:, :, tile])
        if not _same(got, tuple(each[:, :, tile] for each in causal)):
            return False
    return True
