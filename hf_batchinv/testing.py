"""Comparing bits: what every invariance test of this project, and of its users, is made of."""

import torch

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a floating-point tensor as integers of its width; any other tensor as it is."""
    tensor = tensor.detach().contiguous()
    return tensor.view(_INTEGER[tensor.element_size()]) if tensor.is_floating_point() else tensor


def differing(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many elements of two tensors of one shape and dtype have different bits.

    Unlike `torch.equal` this tells 0.0 from -0.0 and accepts equal NaNs.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(
            f"got: expected shape {tuple(want.shape)} and {want.dtype}, got {tuple(got.shape)} and {got.dtype}, "
            "so compare the same slice of both results."
        )
    return int((bits(got) != bits(want).to(got.device)).sum())


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "tensors") -> None:
    """Raise AssertionError with the count and the first place where the bits of two tensors differ."""
    count = differing(got, want)
    if count:
        index = int((bits(got) != bits(want).to(got.device)).flatten().nonzero()[0])
        raise AssertionError(
            f"{what}: {count} of {got.numel()} values differ in their bits, first at flat index {index}: "
            f"{got.flatten()[index].item()!r} != {want.flatten()[index].item()!r}"
        )
