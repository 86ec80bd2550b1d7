"""y = x @ weight.T + bias with each row's bits independent of the other rows."""

import os
from collections.abc import Callable
from threading import get_ident

import torch

from . import _cpu_linear
from ._checks import check_operands, no_backward, shape_error
from ._dispatch import call_on, device_of, kind_of, remember, runs_directly
from ._ops import add_op_namespace_prefix


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Batch-invariant `torch.nn.functional.linear`.

    x (..., K), weight (N, K), bias (N,) or None -> (..., N), in the dtype of x (float32, float16 or bfloat16), any
    strides. Sums and the bias addition are in float32, rounded once. A row's bits depend on that row, the weight and
    the bias only. Has no backward: call it under `torch.no_grad()` or `torch.inference_mode()`.

    Raises TypeError (dtype) or ValueError (shape, device).
    """
    direct = runs_directly(x, weight, bias)
    if direct and x.is_cuda:
        return _on_gpu(x, weight, bias)
    _check(x, weight, bias)
    return _on_cpu(x, weight, bias) if direct and x.device.type == "cpu" else _linear_op(x, weight, bias)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
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


def engine_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str:
    """Which engine serves `linear(x, weight, bias)`: "cpu", "triton" or "cublaslt". All that may serve a GPU call give
    the same bits; `HF_BATCHINV_ENGINE=triton` keeps to Triton.
    """
    if x.device.type == "cpu":
        return "cpu"
    from ._launch import engine_of as on_gpu  # imports triton

    with device_of(x):
        return on_gpu(x, weight, bias)


# What calls on a GPU come to, by all that they depend on but addresses and values.
_gpu_calls: dict = {}


def _recalled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable:
    """The function of (x, weight, bias) that serves operands like these, which are checked when they are new."""
    engine = os.environ.get("HF_BATCHINV_ENGINE")
    # By thread, too: a product of cuBLASLt with a bias holds its address.
    key = (kind_of(x), kind_of(weight), kind_of(bias), engine, get_ident())
    call = _gpu_calls.get(key)
    if call is None:
        from ._launch import linear_call  # imports triton

        _check(x, weight, bias)
        with device_of(x):
            call, lasting = linear_call(x, weight, bias)
        if lasting:
            remember(_gpu_calls, key, call)
    return call


def _on_gpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return call_on(x, _recalled(x, weight, bias), (x, weight, bias))


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
