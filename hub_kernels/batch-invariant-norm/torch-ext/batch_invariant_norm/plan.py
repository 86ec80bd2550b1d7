"""How rows are dealt out. This may follow the number of rows: it moves whole rows and changes no row's bits."""

from .contract import Tile

# Elements of float32 that the CPU path handles at a time, so that its intermediate results stay in the cache.
CPU_BLOCK_ELEMENTS = 1 << 17


def programs(rows: int, tile: Tile) -> int:
    """The number of GPU programs for whole rows."""
    return -(-rows // tile.rows)


def cpu_rows(columns: int) -> int:
    """The number of rows that the CPU path handles at a time."""
    return max(1, CPU_BLOCK_ELEMENTS // max(columns, 1))
