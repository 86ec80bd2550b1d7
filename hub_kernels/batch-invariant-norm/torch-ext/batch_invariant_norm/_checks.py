"""Checks of arguments that the public functions share; each failure is one sentence that says what to do."""

import torch

from .contract import FLOAT_DTYPES


def check_float(op: str, name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{op}: {name} must be float32, float16 or bfloat16, got {str(tensor.dtype)[6:]}; "
            f"cast it first, for example {name}.float()"
        )


def check_out_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{op}: dtype must be float32, float16 or bfloat16, got {str(dtype)[6:]}; "
            "ask for torch.float32 and cast the result"
        )


def check_same_device(op: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(
                f"{op}: {name} must be on the device of x ({x.device}), got {other.device}; move one of them with .to()"
            )


def check_shape(op: str, name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(
            f"{op}: {name} must have shape {tuple(expected)}, got {tuple(tensor.shape)}; pass the one made for this x"
        )


def normalize_dim(op: str, dim: int, ndim: int) -> int:
    """A dimension counted from the front; a 0-d tensor counts as having one dimension."""
    limit = max(ndim, 1)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{op}: dim must be an int, got {dim!r}")
    if not -limit <= dim < limit:
        raise IndexError(f"{op}: dim must be between {-limit} and {limit - 1} for this x, got {dim}")
    return dim % limit


def no_backward(op: str):
    """An autograd formula that raises: the ops have no backward, and the reason should be readable."""

    def backward(context, *gradients):
        raise RuntimeError(
            f"{op} has no backward, got a loss that needs its gradient; train with the stock layer, or run the "
            "batch-invariant one under torch.no_grad()"
        )

    return backward
