"""What the public functions share: the error of an op without backward, and a dtype's name."""

import torch


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def no_backward(op: str):
    """An autograd formula that raises: the ops have no backward, and the reason should be readable."""

    def backward(context, *gradients):
        raise RuntimeError(
            f"{op} has no backward, got a loss that needs its gradient; train with the torch operators, or run this "
            "one under torch.no_grad()"
        )

    return backward
