"""What fixes the bits of attention: KV blocks, splits and their origin.

A row's keys are cut into blocks counted from the row's first real key (`origin`), and blocks into splits at fixed
distances from it. A split keeps its own running maximum, sum and output; splits are folded together from left to right.
None of this sees a batch size, a query length or a cache length, so prefill, chunked prefill, decode, padded and packed
runs of one sequence do the same arithmetic in the same order.
"""

from dataclasses import dataclass

import torch

# Raised when the bits of any op in this package change on purpose.
NUMERICS_VERSION = 2

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = range(16, 257, 8)

# Splits are short where a decode step needs many of them to fill a GPU, and longer further out:
# (first key, length) of each stretch, in keys from the origin.
SPLIT_STRETCHES = ((0, 256), (4096, 1024))


@dataclass(frozen=True)
class AttentionContract:
    """kv_block: keys per step of the running softmax."""

    kv_block: int


def attention_contract(*, head_dim: int, value_head_dim: int, dtype: torch.dtype) -> AttentionContract:
    """The contract of one head shape on a GPU."""
    assert dtype in DTYPES, dtype
    if dtype == torch.float32:
        return AttentionContract(kv_block=32)
    return AttentionContract(kv_block=128 if max(head_dim, value_head_dim) <= 64 else 64)


def split_of(position: int) -> int:
    """The split that holds the key at `position` (counted from the origin)."""
    split = 0
    for (first, length), following in zip(SPLIT_STRETCHES, (*SPLIT_STRETCHES[1:], None), strict=True):
        if following is None or position < following[0]:
            return split + (position - first) // length
        split += (following[0] - first) // length
    raise AssertionError("unreachable")


def split_begin(split: int) -> int:
    """The position of a split's first key (counted from the origin)."""
    for (first, length), following in zip(SPLIT_STRETCHES, (*SPLIT_STRETCHES[1:], None), strict=True):
        if following is None or split < (following[0] - first) // length:
            return first + split * length
        split -= (following[0] - first) // length
    raise AssertionError("unreachable")


def split_multiple(keys: int | None) -> int:
    """A number of which every multiple among the first `keys` positions (None: among all) begins a split."""
    return max(length for first, length in SPLIT_STRETCHES if keys is None or first < max(keys, 1))


def mask_floor(dtype: torch.dtype) -> float:
    """An additive mask value at or below this hides the key, like -inf: `finfo.min` is how Transformers says "no"."""
    return torch.finfo(dtype).min / 2
