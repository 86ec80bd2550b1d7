"""y = x @ weight.T + bias with each row's bits independent of the other rows."""

import torch

from . import _cpu_linear
from ._checks import check_operands, no_backward, shape_error
from ._dispatch import device_of, runs_directly
from ._ops import add_op_namespace_prefix


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Batch-invariant `torch.nn.functional.linear`.

    x (..., K), weight (N, K), bias (N,) or None -> (..., N), in the dtype of x (float32, float16 or bfloat16), any
    strides. Sums and the bias addition are in float32, rounded once. A row's bits depend on that row, the weight and
    the bias only. Has no backward: call it under `torch.no_grad()` or `torch.inference_mode()`.

    Raises TypeError (dtype) or ValueError (shape, device).
    """
    check_operands("linear", "x", x, weight=weight, bias=bias)
    if weight.dim() != 2 or 0 in weight.shape:
        raise shape_error(
            "linear", "weight", "of shape (N, K) with N >= 1 and K >= 1", tuple(weight.shape), "pass a 2-D weight"
        )
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise shape_error("linear", "x", f"of shape (..., {k})", tuple(x.shape), "make its last dimension the weight's")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != n):
        raise shape_error("linear", "bias", f"of shape ({n},)", tuple(bias.shape), "pass one value per weight row")
    if runs_directly(x, weight, bias):
        return _on_cpu(x, weight, bias) if x.device.type == "cpu" else _on_gpu(x, weight, bias)
    return _linear_op(x, weight, bias)


def engine_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str:
    """Which engine serves `linear(x, weight, bias)`: "cpu", "triton" or "cublaslt". All that may serve a GPU call give
    the same bits; `HF_BATCHINV_ENGINE=triton` keeps to Triton.
    """
    if x.device.type == "cpu":
        return "cpu"
    from ._launch import engine_of as on_gpu  # imports triton

    with device_of(x):
        return on_gpu(x, weight, bias)


def _on_gpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from ._launch import launch_linear  # imports triton

    with device_of(x):
        if x.dim() == 2:
            return launch_linear(x, weight, bias)
        return launch_linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def _on_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = _cpu_linear.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op(add_op_namespace_prefix("linear"), mutates_args=(), device_types=("cuda", "xpu"))
def _linear_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _on_gpu(x, weight, bias)


@torch.library.register_kernel(add_op_namespace_prefix("linear"), "cpu")
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _on_cpu(x, weight, bias)


@_linear_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_linear_op.register_autograd(no_backward("linear"))
