"""Which tile serves how many rows: speed only.

Every tile below sums K in the contract's order, so all of them give the same bits (a GPU test runs each of them); the
number of rows and the size of the GPU may therefore choose freely.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """One launch shape of the linear kernels.

    m, n, k: rows, weight rows and K elements a program takes at a time.
    swap: compute (weight @ x.T).T, so that a handful of rows fill the narrow side of the matrix unit.
    tma: the persistent kernel with tensor descriptors (needs 16-byte aligned rows, `swap` must be off).
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False


# Few rows: the weight is read once and a program's share of it decides. (most rows, most weight rows, tile).
_FEW_ROWS = (
    (4, 2048, Tile(16, 64, 128, warps=4, stages=4, swap=True)),
    (4, 16384, Tile(16, 64, 256, warps=4, stages=3, swap=True)),
    (4, None, Tile(16, 128, 128, warps=4, stages=4, swap=True)),
    (16, 2048, Tile(16, 16, 256, warps=4, stages=4)),
    (16, 4096, Tile(16, 32, 256, warps=4, stages=4)),
    (16, None, Tile(16, 64, 128, warps=4, stages=4, swap=True)),
    (32, 2048, Tile(32, 16, 256, warps=4, stages=4)),
    (32, 4096, Tile(32, 32, 256, warps=4, stages=4)),
    (32, None, Tile(32, 64, 128, warps=4, stages=4, swap=True)),
    (64, 2048, Tile(64, 32, 128, warps=4, stages=5)),
)
_FEW_ROWS_TMA = (
    (64, 4096, Tile(64, 32, 128, warps=4, stages=6, tma=True)),
    (64, 8192, Tile(64, 64, 128, warps=4, stages=5, tma=True)),
    (64, None, Tile(64, 128, 128, warps=4, stages=4, tma=True)),
)
# Many rows: the first tile, by size, whose programs all run at once; the last one above that.
_MANY_ROWS_TMA = (
    Tile(64, 64, 128, warps=4, stages=4, tma=True),
    Tile(128, 64, 128, warps=4, stages=4, tma=True),
    Tile(128, 128, 64, warps=4, stages=4, tma=True),
    Tile(128, 256, 64, warps=8, stages=3, tma=True),
)
_MANY_ROWS = (
    Tile(64, 64, 64, warps=4, stages=4),
    Tile(128, 128, 64, warps=8, stages=3),
)
# float32: `k` is the contract's chunk.
_FLOAT32 = (
    (16, None, Tile(16, 32, 16, warps=4, stages=4)),
    (64, None, Tile(32, 64, 16, warps=4, stages=4)),
    (None, None, Tile(64, 64, 16, warps=4, stages=4)),
)


def _first_fit(table, rows: int, n: int) -> Tile | None:
    return next((tile for most_rows, most_n, tile in table if rows <= (most_rows or rows) and n <= (most_n or n)), None)


def linear_tile(*, rows: int, n: int, dtype: torch.dtype, descriptors: bool, multiprocessors: int) -> Tile:
    """The tile for `rows` rows of a weight with n rows.

    descriptors: operands and GPU allow tensor descriptors.
    """
    if dtype == torch.float32:
        return _first_fit(_FLOAT32, rows, n)
    if rows <= 64:
        tables = (_FEW_ROWS, _FEW_ROWS_TMA) if descriptors else (_FEW_ROWS,)
        tile = next((tile for table in tables if (tile := _first_fit(table, rows, n))), None)
        if tile is not None:
            return tile
    tiles = _MANY_ROWS_TMA if descriptors else _MANY_ROWS
    return next((t for t in tiles if -(-rows // t.m) * -(-n // t.n) <= multiprocessors), tiles[-1])


def all_tiles(dtype: torch.dtype) -> list[Tile]:
    """Every tile that `linear_tile` can return for a dtype (for the test that they agree)."""
    if dtype == torch.float32:
        return [tile for *_, tile in _FLOAT32]
    return [*(tile for *_, tile in _FEW_ROWS + _FEW_ROWS_TMA), *_MANY_ROWS_TMA, *_MANY_ROWS]
