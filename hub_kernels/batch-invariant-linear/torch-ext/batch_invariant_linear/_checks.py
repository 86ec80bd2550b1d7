"""Argument checks that all three ops share: every refusal is one sentence."""

import torch

from .contract import DTYPES

DEVICES = ("cpu", "cuda", "xpu", "meta")


def check_operands(op: str, first: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise TypeError or ValueError unless `x` (called `first`) and the others share one supported dtype and device."""
    dtype, device = x.dtype, x.device
    if dtype not in DTYPES:
        raise TypeError(
            f"{op}: expected {first} of dtype float32, float16 or bfloat16, got {dtype}; "
            f"convert or dequantise {first} first"
        )
    if device.type not in DEVICES:
        raise ValueError(
            f"{op}: expected {first} on a CPU, CUDA or XPU device, got {device}; move {first} to one of these"
        )
    for name, other in others.items():
        if other is None:
            continue
        if other.dtype is not dtype:
            raise TypeError(
                f"{op}: expected {name} of the dtype of {first}, {dtype}, got {other.dtype}; convert one of the two"
            )
        if other.device != device:
            raise ValueError(
                f"{op}: expected {name} on the device of {first}, {device}, got {other.device}; move one of the two"
            )


def shape_error(op: str, name: str, expected: str, got: object, remedy: str) -> ValueError:
    """The ValueError "op: expected name expected, got got; remedy"."""
    return ValueError(f"{op}: expected {name} {expected}, got {got}; {remedy}")


def no_backward(op: str):
    """An autograd formula that raises: the ops have no backward, and the reason should be readable."""

    def backward(context, *gradients):
        raise RuntimeError(
            f"{op} has no backward, got a loss that needs its gradient; train with the stock layer, or run the "
            "batch-invariant one under torch.no_grad()"
        )

    return backward
