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
        self.copies: dict[tuple, Any] = {}


def derived(weight: torch.Tensor, kind: str, make: Callable[[torch.Tensor], Any]) -> Any:
    """`make(weight)`, cached under `kind`.

    Views (`weight.t()`, one expert of a stack) are found again through the tensor that they are views of, so it does
    not matter that each call makes a new view object. An in-place change, other memory (`weight.data = ...`) or
    another thread count (packed layouts depend on it) drops all copies of that tensor.
    """
    owner = weight if weight._base is None else weight._base
    if owner.is_inference():  # no version counter: an in-place change would go unseen
        return make(weight.detach())
    state = (owner._version, owner.data_ptr(), torch.get_num_threads())
    view = (kind, weight.storage_offset(), weight.shape, weight.stride())
    with _lock:
        entry = _owners.get(id(owner))
        if entry is None or entry.owner() is not owner:
            entry = _owners[id(owner)] = _Derived(owner)
        if entry.state != state:
            entry.state, entry.copies = state, {}
        if view not in entry.copies:
            entry.copies[view] = make(weight.detach())
        return entry.copies[view]


def cached_copies() -> int:
    """How many derived tensors are alive (for tests of memory)."""
    with _lock:
        return sum(len(entry.copies) for entry in _owners.values())
