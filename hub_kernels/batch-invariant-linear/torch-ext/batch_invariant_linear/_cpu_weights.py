"""What is derived from a weight once (packed, upcast, split) and kept until the weight changes or dies."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

_lock = threading.RLock()
_owners: dict[int, "_Derived"] = {}


class _Derived:
    """The derived copies of one owner (a tensor and its views), valid for one state of its memory."""

    def __init__(self, owner: torch.Tensor):
        key = id(owner)

        def forget(reference: weakref.ref) -> None:
            with _lock:
                if key in _owners and _owners[key].owner is reference:
                    del _owners[key]

        self.owner = weakref.ref(owner, forget)
        self.state: tuple = ()
        self.bits = self.probe = self.values = torch.empty(0)
        self.copies: dict[tuple, Any] = {}

    def refresh(self, owner: torch.Tensor) -> None:
        """Drop the copies if the owner is not what they were made from.

        Its version, address and the thread count (packed layouts depend on it) are not enough: `.data`, fused
        optimizers and NumPy change values without a new version, and an address may be used again. So one element of
        every row and every column is compared, too; all of them would cost as much as the product.
        """
        state = (owner._version, owner.data_ptr(), owner.shape, owner.stride(), torch.get_num_threads())
        if state != self.state:
            self.state, self.copies = state, {}
            self.probe = _one_of_every_row_and_column(owner.shape)
            self.bits = _bits_of(owner)
            self.values = self.bits.take(self.probe)
        elif not torch.equal(values := self.bits.take(self.probe), self.values):
            self.values, self.copies = values, {}


def _one_of_every_row_and_column(shape: torch.Size) -> torch.Tensor:
    """Flat indices that meet every index of every dimension at least once."""
    steps = torch.arange(max(shape, default=1))
    flat = torch.zeros_like(steps)
    for size in shape:
        flat = flat * size + steps % size
    return flat


def _bits_of(owner: torch.Tensor) -> torch.Tensor:
    """The memory of the owner as integers, in which NaN equals NaN."""
    return owner.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[owner.element_size()])


def derived(weight: torch.Tensor, kind: str, make: Callable[[torch.Tensor], Any]) -> Any:
    """`make(weight)`, cached under `kind`.

    Views (`weight.t()`, one expert of a stack) are found again through the tensor that they are views of, so it does
    not matter that each call makes a new view object. A change of the tensor drops all copies of it
    (`_Derived.refresh` says what is seen).
    """
    owner = weight if weight._base is None else weight._base
    if owner.is_inference():  # no version counter: an in-place change would go unseen
        return make(weight.detach())
    view = (kind, weight.storage_offset(), weight.shape, weight.stride())
    with _lock:
        entry = _owners.get(id(owner))
        if entry is None or entry.owner() is not owner:
            entry = _owners[id(owner)] = _Derived(owner)
        entry.refresh(owner)
        if view not in entry.copies:
            entry.copies[view] = make(weight.detach())
        return entry.copies[view]


def cached_copies() -> int:
    """How many derived tensors are alive (for tests of memory)."""
    with _lock:
        return sum(len(entry.copies) for entry in _owners.values())
