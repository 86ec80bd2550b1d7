"""One linear per expert over rows that are sorted by expert, each row's bits independent of the other rows."""

import torch

from . import _cpu_linear
from ._checks import check_operands, no_backward, shape_error
from ._dispatch import device_of, runs_directly
from ._ops import add_op_namespace_prefix


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows offsets[e-1]:offsets[e] of x times weight[e].T.

    x (T, K) with its rows sorted by expert, weight (E, N, K), offsets (E,) int32 -> (T, N), in the dtype of x
    (float32, float16 or bfloat16). `offsets` holds the cumulative row ends, ascending, at most T; rows from
    offsets[-1] on give zeros. A row has the bits of `linear(row, weight[e])`. Offsets are read on the device: nothing
    waits for a GPU, and only a CPU call can check their values. Has no backward: call it under `torch.no_grad()` or
    `torch.inference_mode()`.

    Raises TypeError (dtype) or ValueError (shape, device, offsets on a CPU).
    """
    check_operands("grouped_linear", "x", x, weight=weight)
    if weight.dim() != 3 or 0 in weight.shape[1:]:
        raise shape_error(
            "grouped_linear",
            "weight",
            "of shape (E, N, K) with N >= 1 and K >= 1",
            tuple(weight.shape),
            "stack the experts' weights",
        )
    experts, _, k = weight.shape
    if x.dim() != 2 or x.shape[1] != k:
        raise shape_error(
            "grouped_linear", "x", f"of shape (T, {k})", tuple(x.shape), "flatten the tokens and match the weight's K"
        )
    if offsets.dtype is not torch.int32:
        raise TypeError(f"grouped_linear: expected offsets of dtype int32, got {offsets.dtype}; use offsets.int()")
    if offsets.dim() != 1 or offsets.shape[0] != experts or offsets.device != x.device:
        got = f"{tuple(offsets.shape)} on {offsets.device}"
        raise shape_error(
            "grouped_linear", "offsets", f"of shape ({experts},) on {x.device}", got, "pass one row end per expert"
        )
    if runs_directly(x, weight, offsets):
        return _on_cpu(x, weight, offsets) if x.device.type == "cpu" else _on_gpu(x, weight, offsets)
    return _grouped_linear_op(x, weight, offsets)


def _on_gpu(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    from ._launch import launch_grouped_linear  # imports triton

    with device_of(x):
        return launch_grouped_linear(x, weight, offsets)


def _on_cpu(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    ends = offsets.tolist()
    starts = [0, *ends][: len(ends)]
    if any(start > end for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > x.shape[0]):
        raise shape_error(
            "grouped_linear",
            "offsets",
            f"ascending and within 0 ... {x.shape[0]}",
            ends,
            "pass the cumulative number of rows per expert",
        )
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if start < end:
            y[start:end] = _cpu_linear.linear(x[start:end], weight[expert], None)
    return y


@torch.library.custom_op(add_op_namespace_prefix("grouped_linear"), mutates_args=(), device_types=("cuda", "xpu"))
def _grouped_linear_op(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return _on_gpu(x, weight, offsets)


@torch.library.register_kernel(add_op_namespace_prefix("grouped_linear"), "cpu")
def _(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return _on_cpu(x, weight, offsets)


@_grouped_linear_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


_grouped_linear_op.register_autograd(no_backward("grouped_linear"))
