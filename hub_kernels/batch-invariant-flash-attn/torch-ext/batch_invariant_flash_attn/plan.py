"""Which tile serves which call: speed only.

A row is summed by matrix products alone, which give it the same bits in every tile below, so the query length may
choose freely; a GPU test runs each tile against the others.
"""

from dataclasses import dataclass

import torch

# A call is cut into one program per split when its row tiles alone would leave the GPU this empty (programs per SM).
SPLIT_BELOW_PROGRAMS_PER_SM = 4
# Bytes of partial results that a split launch may use.
WORKSPACE_LIMIT = 512 * 2**20


@dataclass(frozen=True)
class Tile:
    """rows: packed (query, head of the group) rows a program holds."""

    rows: int
    warps: int
    stages: int


def attention_tile(*, rows: int, head_dim: int, value_head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile for `rows` packed query rows of one KV head."""
    wide = max(head_dim, value_head_dim) > 128
    if dtype == torch.float32:  # no tensor core: the thread layout follows the tile, so there is one tile only
        return Tile(rows=32, warps=4, stages=1)
    if wide:
        return Tile(rows=64, warps=8 if rows > 64 else 4, stages=2)
    if rows <= 64:
        return Tile(rows=64, warps=4, stages=3)
    return Tile(rows=128, warps=8, stages=3)


def all_tiles(*, head_dim: int, value_head_dim: int, dtype: torch.dtype) -> list[Tile]:
    """Every tile that `attention_tile` can return for a head shape (for the test that they agree)."""
    shape = dict(head_dim=head_dim, value_head_dim=value_head_dim, dtype=dtype)
    return list(dict.fromkeys(attention_tile(rows=rows, **shape) for rows in (1, 10**6)))
