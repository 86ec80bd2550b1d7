"""Linear on the CPU: float32 in certified tiles, bfloat16 in hardware where that is certified, exact otherwise.

Weights of fewer than 8 rows (scoring heads) are multiplied in float64 instead: stock sums these in many lanes, more
accurately than one float32 chain, and for so few columns float64 costs little.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from . import _cpu_exact
from ._cpu_plan import Call, Plan, allows, certify, environment, plan_for, trial_operands
from ._cpu_weights import derived
from ._dispatch import plain_torch

# Heights to try, in rungs (see Plan). MKL's packed GEMM holds all but 1, oneDNN small ones; which ones the stock GEMM
# holds varies by machine.
_MKL = ((2, 4, 8, 16, 32), (64, 128), (192, 256), (512,))
_PACKED_FLOAT32 = ((1, 2, 4, 8, 16, 32), (64, 128), (256,))
_PACKED_BFLOAT16 = ((1, 2, 4, 8, 16, 32), (64, 128), (512,))
_TILED = ((2, 4, 8, 12, 16, 32, 48), (64, 96, 128), (192, 256))

# Below 8 columns or terms a GEMM turns into something else (a gemv, a dot): weights are padded with zeros to this.
_LEAST = 8

# oneDNN sums float32 in one chain per element, the stock GEMM in one per block of K. Chains of at most this length,
# added in ascending order, are as accurate as stock.
_CHAIN = 288

# MKL packs for an expected number of rows. It changes the speed only; this one is good for all of them.
_MKL_ROWS = 256

# MKL sums K in as many chains of at most 384 terms as it needs. The stock GEMM takes one chain more where that makes
# three; there, two halves of K are as accurate as stock.
_MKL_HALVED = range(2 * 384 + 1, 3 * 384 + 1)

# oneDNN's bfloat16 kernels take K in pairs and blocks; a ragged K goes through float32.
_BFLOAT16_K_MULTIPLE = 32


Ready = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # (x (M, K), bias) -> (M, N) in x's dtype


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K), weight (N, K), bias (N,) or None, one dtype, any strides -> (M, N), new and contiguous."""
    with plain_torch():
        if x.shape[0] == 0:
            return x.new_empty(0, weight.shape[0])
        has_bias = bias is not None
        ready = derived(weight, ("linear", has_bias, environment()), lambda w: _make_ready(w, has_bias))
        return ready(x, bias)


def _make_ready(weight: torch.Tensor, has_bias: bool) -> Ready:
    """The product with one weight in the present environment: planned, packed, and free of questions."""
    n, k = weight.shape
    if weight.dtype == torch.bfloat16 and k % _BFLOAT16_K_MULTIPLE == 0:
        plan = _bfloat16_plan(k, max(n, _LEAST), has_bias)
        if plan is not None:
            return _bfloat16(plan, weight)
    return _float32(weight)


def _padded(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The matrix itself, or a copy with zeros below and to the right."""
    if matrix.shape == (rows, columns):
        return matrix
    return F.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def _packed(weight: torch.Tensor, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """The product with a weight (N, K), any strides, held in oneDNN's blocked layout: (tile, bias=None) -> y."""
    n, k = weight.shape
    weight = _padded(weight.to(dtype), max(n, _LEAST), max(k, _LEAST)).contiguous()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda tile, bias=None: product(tile, packed, bias, "none", [], "")


def _chains(k: int) -> list[slice]:
    """K cut evenly into slices of at most _CHAIN, at multiples of 16."""
    count = -(-k // _CHAIN)
    ends = [i * k // count // 16 * 16 for i in range(count)] + [k]
    return [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]


def _packed_chains(weight: torch.Tensor) -> Call:
    """The product with a weight (N, K): the sum over the chains, in ascending order, of their packed products."""
    k = max(weight.shape[1], _LEAST)
    weight = _padded(weight, weight.shape[0], k)
    calls = [(chain, _packed(weight[:, chain], torch.float32)) for chain in _chains(k)]
    if len(calls) == 1:
        return calls[0][1]

    def call(tile: torch.Tensor) -> torch.Tensor:
        y = None
        for chain, product in calls:
            part = product(tile[:, chain].contiguous())
            y = part if y is None else y.add_(part)
        return y

    return call


def _mkl_packed(weight: torch.Tensor) -> Call:
    """The float32 product with a weight (N, K), any strides, packed by MKL, for two rows or more."""
    n, k = weight.shape
    k = max(k, _LEAST)
    weight = _padded(weight.float(), max(n, _LEAST), k)
    middle = [k // 2 // 16 * 16] if k in _MKL_HALVED else []
    pieces = []
    for start, end in zip([0, *middle], [*middle, k], strict=True):
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight[:, start:end].contiguous(), _MKL_ROWS)
        # Where the packed weight cannot serve, the op takes the original one; this one would show in every result.
        original = torch.full((), float("nan")).expand(weight.shape[0], end - start)
        pieces.append((start, end, packed, original))
    product = torch.ops.mkl._mkl_linear.default
    if len(pieces) == 1:
        return lambda tile: product(tile, packed, original, None, tile.shape[0])

    def call(tile: torch.Tensor) -> torch.Tensor:
        rows = tile.shape[0]
        if 2 * middle[0] == k:
            tiles = tile.view(rows, 2, -1).transpose(0, 1).contiguous()
        else:
            tiles = tile[:, : middle[0]].contiguous(), tile[:, middle[0] :].contiguous()
        first, second = (product(t, *pieces[i][2:], None, rows) for i, t in enumerate(tiles))
        return first.add_(second)

    return call


@functools.cache
def _has_mkl() -> bool:
    """Whether this build of torch and this CPU can pack a weight for MKL."""
    if not torch.backends.mkl.is_available() or not hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight"):
        return False
    ones = torch.ones(16, 16)
    try:
        return torch.equal(_mkl_packed(ones)(ones[:3]), ones[:3] * 16)
    except (RuntimeError, NotImplementedError):
        return False


@functools.cache
def _has_packed() -> bool:
    """Whether this build of torch and this CPU can pack a weight."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    try:
        _packed(torch.zeros(16, 16), torch.float32)(torch.zeros(1, 16))
    except (RuntimeError, NotImplementedError):
        return False
    return True


@functools.cache
def _has_bfloat16_units() -> bool:
    return _has_packed() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _bfloat16_plan(k: int, n: int, has_bias: bool) -> Plan | None:
    """The plan for bfloat16 products in hardware, or None where they are not available or not certified."""
    if not (allows("packed") and _has_bfloat16_units()):
        return None

    def make_trial():
        x, weight = trial_operands(k, n, torch.bfloat16)
        # A bias of the size of the rounding noise: a large one would hide it.
        bias = (torch.linspace(-1, 1, n) * 2**-22 * k**0.5).bfloat16() if has_bias else None
        product = _packed(weight, torch.bfloat16)
        return lambda tile: product(tile, bias), x

    def make():
        plan = certify("packed", _PACKED_BFLOAT16, make_trial)
        return plan if plan is not None and plan.heights[0] <= 16 else Plan("float32")

    plan = plan_for(("bfloat16", k, n, has_bias), make)
    return plan if plan.engine == "packed" else None


def _bfloat16(plan: Plan, weight: torch.Tensor) -> Ready:
    n = weight.shape[0]
    product = _packed(weight, torch.bfloat16)

    def ready(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is None:
            call = product
        else:
            bias = bias.contiguous() if n >= _LEAST else F.pad(bias, (0, _LEAST - n))
            call = lambda tile: product(tile, bias)  # noqa: E731
        y = _in_tiles(plan, call, x.contiguous())
        return y if n >= _LEAST else y[:, :n].contiguous()

    return ready


def _plan(k: int, n: int, dtype: torch.dtype) -> Plan:
    """The plan for products in float32 or float64."""

    def mkl_trial():
        x, weight = trial_operands(k, n, dtype)
        return _mkl_packed(weight), x

    def packed_trial():
        x, weight = trial_operands(k, n, dtype)
        return _packed_chains(weight), x

    def tiled_trial():
        x, weight = trial_operands(k, n, dtype)
        return lambda tile: F.linear(tile, weight), x

    def make():
        plan = None
        if dtype == torch.float32 and allows("mkl") and _has_mkl():
            plan = certify("mkl", _MKL, mkl_trial)
        if plan is None and dtype == torch.float32 and allows("packed") and _has_packed():
            plan = certify("packed", _PACKED_FLOAT32, packed_trial)
        if plan is None and allows("tiled"):
            plan = certify("tiled", _TILED, tiled_trial)
        return plan or Plan("exact")

    return plan_for((dtype, k, n), make)


def _aligned(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of the weight as the tiled engine takes it: contiguous, 64-byte aligned, padded."""
    n, k = weight.shape
    return _padded(weight.to(dtype), max(n, _LEAST), max(k, _LEAST)).clone(memory_format=torch.contiguous_format)


def _tiled_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    ready = weight.dtype == dtype and weight.is_contiguous() and weight.data_ptr() % 64 == 0
    return weight if ready and min(weight.shape) >= _LEAST else _aligned(weight, dtype)


def _float32(weight: torch.Tensor) -> Ready:
    """The product with a weight (N, K) of any supported dtype in float32, rounded once."""
    n, k = weight.shape
    dtype = torch.float64 if n < _LEAST else torch.float32
    plan = _plan(max(k, _LEAST), max(n, _LEAST), dtype)
    if plan.engine == "exact":
        parts = _cpu_exact.split(weight.float())
    elif plan.engine == "mkl":
        call = _mkl_packed(weight)
    elif plan.engine == "packed":
        call = _packed_chains(weight)
    else:
        copy = _tiled_weight(weight, dtype)
        call = lambda tile: F.linear(tile, copy)  # noqa: E731

    def product(x: torch.Tensor) -> torch.Tensor:
        if plan.engine == "exact":
            return _cpu_exact.matmul(x.float(), weight.float(), parts)
        x = x.to(dtype).contiguous()
        y = _in_tiles(plan, call, x if k >= _LEAST else F.pad(x, (0, _LEAST - k)))
        return y if n >= _LEAST else y[:, :n].float()

    def ready(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = product(x)
        if bias is not None:
            y += bias.float()
        return y.to(x.dtype)

    return ready


def _in_tiles(plan: Plan, call: Call, x: torch.Tensor) -> torch.Tensor:
    """Run x (M, K) through `call` in the plan's tiles and put the rows together."""
    rows = x.shape[0]
    if rows in plan.heights:
        return call(x)
    if rows == 1 and plan.heights[0] == 2:
        return call(torch.cat([x, x]))[:1]  # cheaper than padding; neighbours do not matter
    parts = []
    for start, height in plan.tiles(rows):
        end = min(start + height, rows)
        tile = x[start:end]
        if end - start < height:
            tile = F.pad(tile, (0, 0, 0, height - (end - start)))
        parts.append(call(tile)[: end - start])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
