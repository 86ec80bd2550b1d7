"""Keys, values and masks in blocks counted from each row's origin."""

from collections.abc import Sequence

import torch

from ._cpu_products import BLOCK
from ._cpu_scratch import scratch


def gather(
    source: torch.Tensor,
    dim: int,
    first: int,
    length: int,
    origins: Sequence[int],
    limits: Sequence[int],
    name: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Keys first ... first + length - 1 of each row, in another dtype, with zeros where the row has no key.

    source (rows, ...) of any dtype with the keys along `dim`; origins, limits: per row, the index in `source` of key 0
    and the index behind the last key. With a name, the result is scratch memory.
    """
    shape = list(source.shape)
    shape[dim] = length
    out = torch.empty(shape, dtype=dtype) if name is None else scratch(name, *shape, dtype=dtype)
    spans = []
    for origin, limit in zip(origins, limits, strict=True):
        start = origin + first
        begin = min(max(-start, 0), length)
        spans.append((start, begin, max(begin, min(length, limit - start))))
    if len(set(spans)) == 1:  # all rows at once
        _fill(out, source, dim, *spans[0])
    else:
        for row, span in enumerate(spans):
            _fill(out[row], source[row], dim - 1, *span)
    return out


def view_of_blocks(
    source: torch.Tensor, first_block: int, blocks: int, origins: Sequence[int], limits: Sequence[int]
) -> torch.Tensor | None:
    """Blocks of a float32 source (rows, heads, keys, D) as a view (rows * heads, blocks * 64, D), if they are one."""
    rows, heads = source.shape[:2]
    if source.dtype != torch.float32 or source.stride(3) != 1 or len(set(origins)) > 1:
        return None
    start = origins[0] + first_block * BLOCK
    if start < 0 or start + blocks * BLOCK > min(limits):
        return None
    if rows > 1 and heads > 1 and source.stride(0) != heads * source.stride(1):
        return None
    return source.narrow(2, start, blocks * BLOCK).flatten(0, 1)


def _fill(out: torch.Tensor, source: torch.Tensor, dim: int, start: int, begin: int, end: int) -> None:
    """out[begin:end] = source[start + begin : start + end] along `dim`, and zeros around it."""
    if begin > 0:
        out.narrow(dim, 0, begin).zero_()
    if end < out.shape[dim]:
        out.narrow(dim, end, out.shape[dim] - end).zero_()
    if begin < end:
        out.narrow(dim, begin, end - begin).copy_(source.narrow(dim, start + begin, end - begin))


def clear_hidden_keys(keys: torch.Tensor, present: torch.Tensor) -> None:
    """Zero the keys (rows, heads, n, D) that are not `present` (rows, n). They may hold NaN."""
    for row, flags in enumerate(present):
        hidden = (flags == 0).nonzero().flatten()
        if len(hidden):
            keys[row].index_fill_(1, hidden, 0.0)
