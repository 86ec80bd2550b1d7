"""Batched matrix product with each row's bits independent of the other rows and of the other items."""

import torch

from . import _cpu_bmm
from ._checks import check_operands, no_backward, shape_error
from ._dispatch import device_of, runs_directly
from ._ops import add_op_namespace_prefix


def bmm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Batch-invariant `torch.bmm`.

    x (B, M, K), y (B, K, N) -> (B, M, N), in the dtype of x (float32, float16 or bfloat16), any strides. Sums are in
    float32, rounded once. Has no backward: call it under `torch.no_grad()` or `torch.inference_mode()`.

    Raises TypeError (dtype) or ValueError (shape, device).
    """
    check_operands("bmm", "x", x, y=y)
    if x.dim() != 3:
        raise shape_error("bmm", "x", "of shape (B, M, K)", tuple(x.shape), "add or flatten dimensions to three")
    batch, _, k = x.shape
    if y.dim() != 3 or y.shape[0] != batch or y.shape[1] != k:
        raise shape_error(
            "bmm", "y", f"of shape ({batch}, {k}, N)", tuple(y.shape), "make its first two dimensions the B and K of x"
        )
    if runs_directly(x, y):
        return _on_cpu(x, y) if x.device.type == "cpu" else _on_gpu(x, y)
    return _bmm_op(x, y)


def _on_gpu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    from ._launch import launch_bmm  # imports triton

    with device_of(x):
        return launch_bmm(x, y)


def _on_cpu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _cpu_bmm.bmm(x, y)


@torch.library.custom_op(add_op_namespace_prefix("bmm"), mutates_args=(), device_types=("cuda", "xpu"))
def _bmm_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _on_gpu(x, y)


@torch.library.register_kernel(add_op_namespace_prefix("bmm"), "cpu")
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _on_cpu(x, y)


@_bmm_op.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1], y.shape[2])


_bmm_op.register_autograd(no_backward("bmm"))
