"""Linear on the CPU: float32 in certified tiles, bfloat16 in hardware where that is certified, exact otherwise."""

import functools

import torch
import torch.nn.functional as F

from . import _cpu_exact
from ._cpu_plan import Call, Plan, allows, certify, plan_for, trial_operands
from ._cpu_weights import derived
from ._dispatch import plain_torch

# Heights to try, in rungs (see Plan). oneDNN holds small heights; which ones the stock GEMM holds varies by machine.
_PACKED_FLOAT32 = ((1, 2, 4, 8, 16, 32), (48, 64, 96, 128), (192, 256, 512))
_PACKED_BFLOAT16 = ((1, 2, 4, 8, 16, 32), (64, 128, 256, 512))
_TILED = ((2, 4, 8, 12, 16, 32, 48), (64, 96, 128), (192, 256))

# Below 8 columns or terms a GEMM turns into something else (a gemv, a dot): weights are padded with zeros to this.
_LEAST = 8

# oneDNN's bfloat16 kernels take K in pairs and blocks; a ragged K goes through float32.
_BFLOAT16_K_MULTIPLE = 32


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K), weight (N, K), bias (N,) or None, one dtype, any strides -> (M, N), new and contiguous."""
    with plain_torch():
        if x.shape[0] == 0:
            return x.new_empty(0, weight.shape[0])
        n, k = weight.shape
        if x.dtype == torch.bfloat16 and k % _BFLOAT16_K_MULTIPLE == 0:
            plan = _bfloat16_plan(k, max(n, _LEAST), bias is not None)
            if plan is not None:
                return _bfloat16(plan, x, weight, bias)
        y = _float32(x, weight)
        if bias is not None:
            y = y.add_(bias.float())
        return y.to(x.dtype)


def _padded(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The matrix itself, or a copy with zeros below and to the right."""
    if matrix.shape == (rows, columns):
        return matrix
    return F.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def _pack(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight (N, K), any strides, in oneDNN's blocked layout for this dtype."""
    n, k = weight.shape
    weight = _padded(weight.to(dtype), max(n, _LEAST), max(k, _LEAST)).contiguous()
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _call_packed(packed: torch.Tensor, bias: torch.Tensor | None) -> Call:
    return lambda tile: torch.ops.mkldnn._linear_pointwise(tile, packed, bias, "none", [], "")


@functools.cache
def _has_packed() -> bool:
    """Whether this build of torch and this CPU can pack a weight."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    try:
        _call_packed(_pack(torch.zeros(16, 16), torch.float32), None)(torch.zeros(1, 16))
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
        return _call_packed(_pack(weight, torch.bfloat16), bias), x

    def make():
        plan = certify("packed", _PACKED_BFLOAT16, make_trial)
        return plan if plan is not None and plan.heights[0] <= 16 else Plan("float32")

    plan = plan_for(("bfloat16", k, n, has_bias), make)
    return plan if plan.engine == "packed" else None


def _bfloat16(plan: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    n = weight.shape[0]
    packed = derived(weight, "packed bfloat16", lambda w: _pack(w, torch.bfloat16))
    if bias is not None:
        bias = bias.contiguous()
        if n < _LEAST:
            bias = F.pad(bias, (0, _LEAST - n))
    y = _in_tiles(_call_packed(packed, bias), x.contiguous(), plan.tiles(x.shape[0]))
    return y if y.shape[1] == n else y[:, :n].contiguous()


def _float32_plan(k: int, n: int) -> Plan:
    def packed_trial():
        x, weight = trial_operands(k, n, torch.float32)
        return _call_packed(_pack(weight, torch.float32), None), x

    def tiled_trial():
        x, weight = trial_operands(k, n, torch.float32)
        return lambda tile: F.linear(tile, weight), x

    def make():
        plan = None
        if allows("packed") and _has_packed():
            plan = certify("packed", _PACKED_FLOAT32, packed_trial)
        if plan is None and allows("tiled"):
            plan = certify("tiled", _TILED, tiled_trial)
        return plan or Plan("exact")

    return plan_for(("float32", k, n), make)


def _aligned_float32(weight: torch.Tensor) -> torch.Tensor:
    n, k = weight.shape
    weight = _padded(weight.float(), max(n, _LEAST), max(k, _LEAST)).contiguous()
    return weight if weight.data_ptr() % 64 == 0 else weight.clone()


def _float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (M, K) @ weight (N, K).T in float32, from operands of any supported dtype."""
    n, k = weight.shape
    plan = _float32_plan(max(k, _LEAST), max(n, _LEAST))
    x = x.float().contiguous()
    if plan.engine == "exact":
        parts = derived(weight, "split", lambda w: _cpu_exact.split(w.float()))
        return _cpu_exact.matmul(x, weight.float(), parts)
    if plan.engine == "packed":
        call = _call_packed(derived(weight, "packed float32", lambda w: _pack(w, torch.float32)), None)
    else:
        fits = weight.dtype == torch.float32 and weight.is_contiguous() and weight.data_ptr() % 64 == 0
        fits = fits and min(n, k) >= _LEAST
        ready = weight if fits else derived(weight, "float32", _aligned_float32)
        call = lambda tile: F.linear(tile, ready)  # noqa: E731
    if k < _LEAST:
        x = F.pad(x, (0, _LEAST - k))
    y = _in_tiles(call, x, plan.tiles(x.shape[0]))
    return y if y.shape[1] == n else y[:, :n].contiguous()


def _in_tiles(call: Call, x: torch.Tensor, tiles: list[tuple[int, int]]) -> torch.Tensor:
    """Run the tiles over x (M, K) and put the rows together."""
    rows = x.shape[0]
    parts = []
    for start, height in tiles:
        end = min(start + height, rows)
        tile = x[start:end]
        if end - start < height:
            tile = F.pad(tile, (0, 0, 0, height - (end - start)))
        parts.append(call(tile)[: end - start])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
