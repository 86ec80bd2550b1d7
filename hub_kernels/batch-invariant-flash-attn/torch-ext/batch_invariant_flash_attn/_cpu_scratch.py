"""Memory that calls on one thread use one after the other.

A decode step writes a few megabytes and is done with them in a millisecond; taken from the system each time, their page
faults cost as much as the arithmetic.
"""

import math
import threading

import torch

_MOST_BYTES = 64 << 20  # larger tensors are not kept

_local = threading.local()


def scratch(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised tensor; the next call with the same name and dtype on this thread takes the memory back."""
    size = math.prod(shape)
    if size * dtype.itemsize > _MOST_BYTES:
        return torch.empty(shape, dtype=dtype)
    name = f"{name} {dtype}"
    kept = getattr(_local, name, None)
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            kept = torch.empty(size, dtype=dtype)
        setattr(_local, name, kept)
    return kept[:size].view(shape)
