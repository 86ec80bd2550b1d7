"""sum and mean over any dimensions, added in float32 in an order that follows from the number of addends alone."""

from collections.abc import Sequence

import torch

from . import _cpu
from ._checks import check_float, check_out_dtype, no_backward, normalize_dim
from ._ops import add_op_namespace_prefix


def mean(
    x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The mean of x over `dim` (None or empty: over all), in x's dtype or in `dtype` (x is cast to it first).

    No gradient: backward raises.
    Raises TypeError for dtypes other than float32, float16 and bfloat16, IndexError for a dim out of range.
    """
    return _reduce("mean", x, dim, keepdim, dtype, mean=True)


def sum(
    x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The sum of x over `dim` (None or empty: over all), in x's dtype or in `dtype` (x is cast to it first).

    Sums of integers and booleans are exact in any order and are left to torch. No gradient: backward raises.
    Raises TypeError for dtypes other than float32, float16 and bfloat16, IndexError for a dim out of range.
    """
    return _reduce("sum", x, dim, keepdim, dtype, mean=False)


def _is_exact(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _reduce(op, x, dim, keepdim, dtype, mean):
    if not mean and _is_exact(dtype or x.dtype):
        return torch.sum(x, dim, keepdim=keepdim, dtype=dtype)
    if dtype is not None:
        check_out_dtype(op, dtype)
        if dtype is not torch.float32 or x.dtype not in (torch.float16, torch.bfloat16):
            x = x.to(dtype)
    check_float(op, "x", x)
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    dims = [normalize_dim(op, d, x.dim()) for d in dims] or list(range(x.dim()))
    if len(set(dims)) != len(dims):
        raise ValueError(f"{op}: dim must name each dimension once, got {dim}")
    return _reduce_op(x, sorted(dims) if x.dim() else [], keepdim, mean, dtype or x.dtype)


@torch.library.custom_op(add_op_namespace_prefix("reduce"), mutates_args=(), device_types=("cuda", "xpu"))
def _reduce_op(x: torch.Tensor, dims: list[int], keepdim: bool, mean: bool, dtype: torch.dtype) -> torch.Tensor:
    from . import _launch

    return _over_last_dims(_launch.reduce, x, dims, keepdim, mean, dtype)


@torch.library.register_kernel(add_op_namespace_prefix("reduce"), "cpu")
def _(x, dims, keepdim, mean, dtype):
    return _over_last_dims(_cpu.reduce, x, dims, keepdim, mean, dtype)


@_reduce_op.register_fake
def _(x, dims, keepdim, mean, dtype):
    return torch.empty(_reduced_shape(x, dims, keepdim), dtype=dtype, device=x.device)


def _reduced_shape(x, dims, keepdim):
    return [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]


def _over_last_dims(function, x, dims, keepdim, mean, dtype):
    """Run `function(x2d, mean, out1d)` on rows that hold the reduced dimensions in ascending order."""
    out = torch.empty(_reduced_shape(x, dims, keepdim), dtype=dtype, device=x.device)
    if x.numel() == 0:
        return out.fill_(float("nan") if mean else 0.0)
    kept = [d for d in range(x.dim()) if d not in dims]
    function(x.permute(kept + list(dims)).reshape(out.numel(), -1), mean, out.view(-1))
    return out


_reduce_op.register_autograd(no_backward("reduce"))
