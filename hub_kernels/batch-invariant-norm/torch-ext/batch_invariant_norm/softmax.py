"""softmax and log_softmax over any dimension, computed in float32."""

import torch

from . import _cpu
from ._checks import check_float, check_out_dtype, no_backward, normalize_dim
from ._dispatch import runs_directly
from ._ops import add_op_namespace_prefix


def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """exp(x) / sum(exp(x)) over `dim`, contiguous, in x's dtype or in `dtype` (x is cast to it first, as torch does).

    A row of -inf only gives NaN, as in torch. No gradient: backward raises.
    Raises TypeError for dtypes other than float32, float16 and bfloat16, IndexError for a dim out of range.
    """
    return _softmax("softmax", x, dim, dtype, log=False)


def log_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The logarithm of softmax over `dim`, computed as x - max - log(sum(exp(x - max))); otherwise as `softmax`."""
    return _softmax("log_softmax", x, dim, dtype, log=True)


def _softmax(op, x, dim, dtype, log):
    if dtype is not None:
        check_out_dtype(op, dtype)
        if dtype is not torch.float32 or x.dtype not in (torch.float16, torch.bfloat16):
            x = x.to(dtype)
    check_float(op, "x", x)
    arguments = (x, normalize_dim(op, dim, x.dim()), log, dtype or x.dtype)
    if x.device.type == "cpu" and runs_directly(x):
        return _over_last_dim(_cpu.softmax, *arguments)
    return _softmax_op(*arguments)


@torch.library.custom_op(add_op_namespace_prefix("softmax"), mutates_args=(), device_types=("cuda", "xpu"))
def _softmax_op(x: torch.Tensor, dim: int, log: bool, dtype: torch.dtype) -> torch.Tensor:
    from . import _launch

    return _over_last_dim(_launch.softmax, x, dim, log, dtype)


@torch.library.register_kernel(add_op_namespace_prefix("softmax"), "cpu")
def _(x, dim, log, dtype):
    return _over_last_dim(_cpu.softmax, x, dim, log, dtype)


@_softmax_op.register_fake
def _(x, dim, log, dtype):
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _over_last_dim(function, x, dim, log, dtype):
    """Run `function(x2d, log, out2d)` on the rows along `dim`; the result is contiguous in x's shape."""
    x_last = (x.reshape(1) if x.dim() == 0 else x).movedim(dim, -1)
    out = torch.empty(x_last.shape, dtype=dtype, device=x.device)
    if out.numel():
        function(x_last.reshape(-1, x_last.shape[-1]), log, out.view(-1, out.shape[-1]))
    return out.movedim(-1, dim).contiguous().view(x.shape)


_softmax_op.register_autograd(no_backward("softmax"))
