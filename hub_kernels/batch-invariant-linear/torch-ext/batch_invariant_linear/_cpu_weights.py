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
        self.probes: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []  # view, indices, values
        self.copies: dict[tuple, Any] = {}

    def refresh(self, owner: torch.Tensor) -> None:
        """Drop the copies if the owner is not what they were made from.

        Its version, address and the thread count (packed layouts depend on it) are not enough: `.data`, fused
        optimizers and NumPy change values without a new version, and an address may be used again. So one element of
        every row and every column is compared, too; all of them would cost as much as the product.
        """
        state = (owner._version, owner.data_ptr(), owner.shape, owner.stride(), torch.get_num_threads())
        if state == self.state:
            for view, indices, values in self.probes:
                if not torch.equal(view if indices is None else view.take(indices), values):
                    break
            else:
                return
        self.state, self.copies = state, {}
        bits = owner.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[owner.element_size()])
        if bits.dim() == 2:
            self.probes = [(view, None, view.clone()) for view in _diagonals(bits)]
        else:
            indices = _one_of_every_slice(bits.shape)
            self.probes = [(bits, indices, bits.take(indices))]


def _diagonals(matrix: torch.Tensor) -> list[torch.Tensor]:
    """Views that meet every row and column; reading them in place takes half the time of collecting by index."""
    (rows, columns), (down, right), start = matrix.shape, matrix.stride(), matrix.storage_offset()
    if 0 in matrix.shape:
        return []
    whole, rest = divmod(rows, columns)
    last = start + whole * columns * down
    views = [
        matrix.as_strided((whole, columns), (columns * down, down + right), start),
        matrix.as_strided((rest,), (down + right,), last),
    ]
    if columns > rows:
        views.append(matrix[-1, rows:])
    return [view for view in views if view.numel()]


def _one_of_every_slice(shape: torch.Size) -> torch.Tensor:
    """Flat indices that meet every index of every dimension at least once."""
    steps = torch.arange(max(shape, default=1))
    flat = torch.zeros_like(steps)
    for size in shape:
        flat = flat * size + steps % size
    return flat


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
