"""The tile table: what a program multiplies at a time, by GPU, number of rows and weight rows. Speed only.

To tune, edit this file; all tiles of a dtype give the same bits (a GPU test compares each of them). A table is a tuple
of (most rows, most weight rows, tile), None for no limit; the first entry that fits serves.
"""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Table:
    """few: up to 64 rows, the weight is read once and a program's share of it decides. many: the first tile, by size,
    whose programs all run at once, the last one above that. The _tma halves are for operands that descriptors can
    describe, and come first. grouped: experts, by the mean number of rows of one.
    """

    few: tuple
    many: tuple[Tile, ...]
    grouped: tuple
    few_tma: tuple = ()
    many_tma: tuple[Tile, ...] = ()
    grouped_tma: tuple = ()


# Any other GPU: small enough for 99 KB of shared memory a block (compute capability 8.6 and 8.9).
DEFAULT = Table(
    few=(
        (16, 2048, Tile(16, 32, 128, warps=4, stages=3)),
        (16, None, Tile(16, 64, 128, warps=4, stages=4, swap=True)),
        (64, None, Tile(64, 64, 64, warps=4, stages=4)),
    ),
    many=(Tile(64, 64, 64, warps=4, stages=4), Tile(128, 128, 32, warps=8, stages=4)),
    grouped=(
        (16, None, Tile(16, 64, 128, warps=4, stages=4, swap=True)),
        (None, None, Tile(64, 64, 64, warps=4, stages=4)),
    ),
)
# GPUs with tensor descriptors and so much shared memory a block: measured on an H200.
ROOMY_KIB = 227
ROOMY = Table(
    few=(
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
    ),
    few_tma=(
        (64, 4096, Tile(64, 32, 128, warps=4, stages=6, tma=True)),
        (64, 8192, Tile(64, 64, 128, warps=4, stages=5, tma=True)),
        (64, None, Tile(64, 128, 128, warps=4, stages=4, tma=True)),
    ),
    many_tma=(
        Tile(64, 64, 128, warps=4, stages=4, tma=True),
        Tile(128, 64, 128, warps=4, stages=4, tma=True),
        Tile(128, 128, 64, warps=4, stages=4, tma=True),
        Tile(128, 256, 64, warps=8, stages=3, tma=True),
    ),
    many=(Tile(64, 64, 64, warps=4, stages=4), Tile(128, 128, 64, warps=8, stages=3)),
    grouped_tma=(
        (4, None, Tile(16, 128, 128, warps=4, stages=4, swap=True)),
        (64, None, Tile(64, 128, 64, warps=4, stages=4, tma=True)),
        (None, None, Tile(128, 256, 64, warps=8, stages=3, tma=True)),
    ),
    grouped=(
        (16, None, Tile(16, 128, 64, warps=4, stages=4, swap=True)),
        (None, None, Tile(64, 64, 64, warps=4, stages=4)),
    ),
)
# By compute capability, where one of these two is not the best.
TUNED = {(9, 0): ROOMY}
# float32, any GPU; `k` is the contract's chunk.
FLOAT32 = (
    (16, None, Tile(16, 64, 32, warps=4, stages=4, swap=True)),
    (64, None, Tile(64, 64, 32, warps=4, stages=4)),
    (None, None, Tile(128, 64, 32, warps=8, stages=3)),
)
# float32 with a short K, whose products need no matrix unit.
FLOAT32_SHORT = (
    (16, None, Tile(16, 32, 16, warps=4, stages=4)),
    (64, None, Tile(32, 64, 16, warps=4, stages=4)),
    (None, None, Tile(64, 64, 16, warps=4, stages=4)),
)
