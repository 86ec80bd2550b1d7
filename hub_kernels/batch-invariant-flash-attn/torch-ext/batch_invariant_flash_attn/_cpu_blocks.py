"""Keys, values and masks in blocks counted from each row's origin."""

from collections.abc import Sequence

import torch

from ._cpu_products import BLOCK


def gather(
    source: torch.Tensor,
    dim: int,
    first_block: int,
    blocks: int,
    origins: Sequence[int],
    limits: Sequence[int],
) -> torch.Tensor:
    """Blocks first_block ... of each row, as a new float32 tensor with zeros where the row has no key.

    source (rows, ...) of any dtype with the keys along `dim`; origins, limits: per row, the index in `source` of key 0 of
    block 0 and the index behind the last key.
    """
    length = blocks * BLOCK
    shape = list(source.shape)
    shape[dim] = length
    spans = []
    for origin, limit in zip(origins, limits, strict=True):
        start = origin + first_block * BLOCK
        spans.append((start, max(start, origin, 0), min(start + length, limit)))
    if len(set(spans)) == 1:
        start, begin, end = spans[0]
        if end - begin == length:
            return torch.empty(shape, dtype=torch.float32).copy_(source.narrow(dim, begin, length))
        out = torch.zeros(shape, dtype=torch.float32)
        if begin < end:
            out.narrow(dim, begin - start, end - begin).copy_(source.narrow(dim, begin, end - begin))
        return out
    out = torch.zeros(shape, dtype=torch.float32)
    for row, (start, begin, end) in enumerate(spans):
        if begin < end:
            out[row].narrow(dim - 1, begin - start, end - begin).copy_(source[row].narrow(dim - 1, begin, end - begin))
    return out


def clear_hidden_keys(keys: torch.Tensor, present: torch.Tensor) -> None:
    """Zero the keys (rows, heads, n, D) that are not `present` (rows, n): 1.0 or 0.0. They may hold NaN."""
    for row, flags in enumerate(present):
        hidden = (flags == 0).nonzero().flatten()
        if len(hidden):
            keys[row].index_fill_(1, hidden, 0.0)
