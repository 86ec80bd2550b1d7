"""The tile table: how many rows, warps and pipeline stages serve which call, by GPU and head size. Speed only.

To tune, edit this file; every tile below gives the same bits (a GPU test compares all of them).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """rows: packed (query, head of the group) rows a program holds. hopper: the kernel with a loading warp, which has
    two stages and two groups of four warps: of 128 rows each takes half, of 64 rows half of the values' columns.
    decode: the Hopper kernel that takes all rows of a KV head in one tile, of 32 or 64 rows.
    """

    rows: int
    warps: int
    stages: int
    hopper: bool = False
    decode: bool = False


# A launch of so many programs per multiprocessor is crowded: smaller ones, of which more fit side by side, end sooner.
CROWDED_PROGRAMS_PER_SM = 2.75
# A table goes by the widest head up to (elements): (most rows, tile, tile of a crowded launch if it has its own), None
# for no limit.
# Any other GPU: small enough for 99 KB of shared memory a block (compute capability 8.6 and 8.9).
DEFAULT = {
    32: ((None, Tile(64, warps=4, stages=2)),),
    64: ((16, Tile(16, warps=4, stages=2)), (None, Tile(64, warps=4, stages=2))),
    128: ((16, Tile(16, warps=4, stages=2)), (None, Tile(64, warps=4, stages=2))),
    256: ((16, Tile(16, warps=4, stages=1)), (None, Tile(32, warps=4, stages=1))),
}
# GPUs with tensor descriptors and so much shared memory a block: measured on an H200.
ROOMY_KIB = 227
ROOMY = DEFAULT | {
    64: ((16, Tile(16, warps=4, stages=3), Tile(16, warps=2, stages=2)), (None, Tile(64, warps=4, stages=2))),
    128: ((16, Tile(16, warps=4, stages=3), Tile(16, warps=2, stages=2)), (None, Tile(64, warps=4, stages=2))),
    256: ((16, Tile(16, warps=4, stages=3)), (None, Tile(32, warps=4, stages=1))),
}
# By compute capability. On 10.0 the larger tiles for heads of 256 do not fit the tensor memory.
TUNED = {
    (9, 0): ROOMY
    | {
        256: (
            (16, Tile(16, warps=4, stages=3)),
            (64, Tile(64, warps=4, stages=2)),
            (None, Tile(128, warps=8, stages=2)),
        ),
    },
}
# Many rows, none of them masked but by position and window: the Hopper kernel, by the values' columns: (most blocks of
# keys, tile).
_WHOLE_ROWS = Tile(128, warps=4, stages=2, hopper=True)
_HALF_COLUMNS = Tile(64, warps=4, stages=2, hopper=True)
HOPPER = {
    64: ((None, _WHOLE_ROWS),),
    128: ((None, _WHOLE_ROWS),),
    256: ((32, _HALF_COLUMNS), (None, _WHOLE_ROWS)),
}
# Few rows, on Hopper: (most rows, tile of up to DECODE_SHORT_BLOCKS blocks of keys, tile), by heads whose columns are
# both 64 or 128. So many of these programs run on a multiprocessor at a time.
DECODE = tuple((rows, *(Tile(rows, warps=4, stages=stages, decode=True) for stages in (2, 3))) for rows in (32, 64))
DECODE_SHORT_BLOCKS = 2
DECODE_PROGRAMS_PER_SM = 2
# float32 uses no tensor core: the thread layout follows the tile, so a head size has one tile only.
FLOAT32 = {widest: Tile(16 if widest == 256 else 32, warps=4, stages=1) for widest in (32, 64, 128, 256)}
