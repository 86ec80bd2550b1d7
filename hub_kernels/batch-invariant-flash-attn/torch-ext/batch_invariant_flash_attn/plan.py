"""Which tile serves which call, and whether splits run in programs of their own: speed only.

A row is summed in an order that is the same in every tile of `tiles.py`, so the query length and the size of the GPU
may choose freely.
"""

import functools
from dataclasses import dataclass

import torch

from . import contract, tiles
from .tiles import Tile

# A call is cut into one program per split when its row tiles alone would leave the GPU this empty (programs per SM).
SPLIT_BELOW_PROGRAMS_PER_SM = 0.75
# The same for the Hopper kernel, of which one program alone keeps a multiprocessor busy.
HOPPER_SPLIT_BELOW_PROGRAMS_PER_SM = 0.375
# Bytes of partial results that a split launch may use.
WORKSPACE_LIMIT = 512 * 2**20
# Bytes of keys and values that are read again and again while row tiles of their heads run.
L2_SHARE = 24 * 2**20
# As many stay there if all heads run side by side.
L2_WHOLE = 40 * 2**20
# Rows of the largest tile.
MOST_ROWS = 128
# Up to so many blocks of keys, a tile is short for the Hopper kernel.
PERSISTENT_BLOCKS = 64
# What such a tile costs beside its blocks of keys, in such blocks.
BLOCKS_PER_TILE = 4
# Programs whose shares of the work differ more than this (most over mean) wait for each other too long.
MOST_UNEVEN = 1.1
# Up to so much more of it, the smaller one of two sections of heads is the better choice.
AS_EVEN = 0.03
# Heads side by side that are looked at wherever so many and more fit the cache.
SMALL_SECTIONS = range(2, 13)


@dataclass(frozen=True)
class Gpu:
    """capability: NVIDIA's compute capability, (0, 0) on other vendors' GPUs and under the interpreter. hopper_kernel:
    the Triton release is one for which the Hopper kernel was tested. shared_kib: KiB of shared memory that a block may
    use.
    """

    capability: tuple[int, int]
    multiprocessors: int
    hopper_kernel: bool = False
    shared_kib: int = 99

    @property
    def descriptors(self) -> bool:
        """Tensor descriptors and dependent launches in hardware."""
        return self.capability >= (9, 0)

    @property
    def hopper_kernels(self) -> bool:
        """Whether it runs the kernels for Hopper alone."""
        return self.hopper_kernel and self.capability == (9, 0)


def _entry(table: tuple, size: int) -> list[Tile]:
    """The tiles of a table's first entry for `size`."""
    return next(found for most, *found in table if most is None or size <= most)


def _head_class(head_dim: int, value_head_dim: int) -> int:
    return next(widest for widest in (32, 64, 128, 256) if max(head_dim, value_head_dim) <= widest)


def table_of(gpu: Gpu) -> dict:
    """What was tuned for a GPU, or the default for one of its kind."""
    roomy = gpu.descriptors and gpu.shared_kib >= tiles.ROOMY_KIB
    return tiles.TUNED.get(gpu.capability, tiles.ROOMY if roomy else tiles.DEFAULT)


def _hopper_tiles(head_dim: int, value_head_dim: int, gpu: Gpu) -> tuple:
    """The Hopper kernel's table for a head shape, empty where it serves none."""
    if not gpu.hopper_kernels or {head_dim, value_head_dim} - {64, 128, 256}:
        return ()
    return tiles.HOPPER[value_head_dim]


def _hopper_tile(head_dim: int, value_head_dim: int, blocks: int, gpu: Gpu) -> Tile | None:
    table = _hopper_tiles(head_dim, value_head_dim, gpu)
    return _entry(table, blocks)[0] if table else None


def _decode_tiles(head_dim: int, value_head_dim: int, gpu: Gpu) -> tuple:
    """The decode kernel's table for a head shape, empty where it serves none."""
    if not gpu.hopper_kernels or {head_dim, value_head_dim} - {64, 128}:
        return ()
    return tiles.DECODE


def _decode_tile(
    rows: int,
    heads: int,
    keys: int,
    blocks: int,
    splits: int,
    split_bytes: int,
    head_dim: int,
    value_head_dim: int,
    split_keys: int,
    gpu: Gpu,
) -> tuple[Tile, bool | int] | None:
    """What `attention_tile` finds for few rows on Hopper, if the decode kernel serves them."""
    entries = _decode_tiles(head_dim, value_head_dim, gpu)
    if not entries or rows > entries[-1][0]:
        return None
    short, long = _entry(entries, rows)
    is_short = blocks <= tiles.DECODE_SHORT_BLOCKS
    tile = short if is_short else long
    slots = tiles.DECODE_PROGRAMS_PER_SM * gpu.multiprocessors
    few = heads < SPLIT_BELOW_PROGRAMS_PER_SM * gpu.multiprocessors
    if splits == 1 or not few or heads * rows * splits * split_bytes > WORKSPACE_LIMIT:
        # Long programs in two waves, the second one half empty: twice as many of a crowded launch's fit side by side.
        half_empty = not is_short and slots < heads <= 1.5 * slots
        if half_empty and rows <= 16 and max(head_dim, value_head_dim) == 64:
            tile = table_of(gpu)[64][0][-1]
        return tile, False
    (_, short_split), (longer_from, _) = contract.SPLIT_STRETCHES
    if keys <= longer_from and heads * splits > slots:
        # More programs than fit at a time would not be faster: as many as do take several splits each.
        together = max(split_keys, 2 * short_split)
        while heads * -(-keys // together) > slots:
            together *= 2
        if together < keys:
            return tile, together
    return tile, True


def only_tile(*, head_dim: int, value_head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile that serves everything where the tiles were not seen to agree."""
    if dtype == torch.float32:
        return tiles.FLOAT32[_head_class(head_dim, value_head_dim)]
    return tiles.DEFAULT[_head_class(head_dim, value_head_dim)][-1][1]


def visible_keys(queries: int, *, kv_len: int, causal: bool, window: tuple[int, int]) -> int:
    """How many of kv_len keys `queries` neighbouring queries can see between them, at most."""
    left, right = window[0], 0 if causal else window[1]
    return kv_len if left < 0 or right < 0 else min(kv_len, left + right + queries)


def attention_tile(
    *,
    rows: int,
    heads: int,
    keys: int,
    blocks: int,
    splits: int,
    split_bytes: int,
    head_dim: int,
    value_head_dim: int,
    dtype: torch.dtype,
    plain: bool,
    aligned: bool,
    split_keys: int,
    gpu: Gpu,
) -> tuple[Tile, bool | int]:
    """The tile for `rows` packed query rows of each of `heads` KV heads, and whether to launch a program per split; for
    decode tiles, if a number, a program for each so many keys.

    keys: that the call can see, at most. blocks: of the keys that a tile can see. splits: how many a row may touch.
    split_bytes: partial results of one row and split. plain: nothing but positions and windows hides a key, and the
    operands allow tensor descriptors. aligned: rows of all operands begin at multiples of 16 bytes, and no mask but one
    of keys is there. split_keys: a number whose multiples all begin splits (contract.split_multiple).
    """
    if aligned and dtype != torch.float32:
        decode = _decode_tile(rows, heads, keys, blocks, splits, split_bytes, head_dim, value_head_dim, split_keys, gpu)
        if decode is not None:
            return decode
    if dtype == torch.float32:
        found = [only_tile(head_dim=head_dim, value_head_dim=value_head_dim, dtype=dtype)]
    else:
        found = _entry(table_of(gpu)[_head_class(head_dim, value_head_dim)], rows)
    tile = found[0]
    programs = heads * -(-rows // tile.rows)
    few = programs < SPLIT_BELOW_PROGRAMS_PER_SM * gpu.multiprocessors
    hopper = None
    if plain and dtype != torch.float32 and rows > 64:
        hopper = _hopper_tile(head_dim, value_head_dim, blocks, gpu)
    if hopper is not None:
        few = heads * -(-rows // hopper.rows) < HOPPER_SPLIT_BELOW_PROGRAMS_PER_SM * gpu.multiprocessors
    split = splits > 1 and few and programs * tile.rows * splits * split_bytes <= WORKSPACE_LIMIT
    if hopper is not None and not split:
        return hopper, False
    if programs * (splits if split else 1) >= tiles.CROWDED_PROGRAMS_PER_SM * gpu.multiprocessors:
        tile = found[-1]
    return tile, split


@functools.lru_cache(maxsize=1024)
def hopper_grid(*, row_tiles: int, heads: int, blocks: int, bytes_each: int, gpu: Gpu) -> tuple[int, int]:
    """(programs, heads side by side) for the Hopper kernel: `row_tiles` of each of `heads` KV heads, of up to `blocks`
    blocks, bytes_each of keys and values.

    Tiles are dealt out to one program per multiprocessor, which loads the next tile's keys while it ends this one.
    Sections of heads follow each other: of those that the L2 cache holds, small ones that give every program about as
    much work, so that tiles of all lengths run side by side. Long tiles of heads that it does not hold together, and
    sections that cannot be cut so, are left to the GPU's own scheduler.
    """
    tiles = row_tiles * heads
    programs = min(tiles, gpu.multiprocessors)
    fits = heads * bytes_each <= L2_WHOLE
    if fits or blocks <= PERSISTENT_BLOCKS:
        sizes = {size for size in SMALL_SECTIONS if size < heads and size * bytes_each <= L2_SHARE}
        if fits:
            sizes.add(heads)
        else:
            fewest = min(heads, -(-heads * bytes_each // L2_SHARE))
            sizes |= {-(-heads // count) for count in range(fewest, min(2 * fewest, fewest + 7, heads) + 1)}
        work = {size: _unevenness(row_tiles, heads, size, blocks, programs) for size in sizes}
        if fits or min(work.values()) <= MOST_UNEVEN:
            return programs, min(size for size in sizes if work[size] <= min(work.values()) + AS_EVEN)
    return tiles, max(1, L2_SHARE // max(bytes_each, 1))


def _unevenness(row_tiles: int, heads: int, side_by_side: int, blocks: int, programs: int) -> float:
    """The most work of a program that the Hopper kernel's `_tile` deals causal tiles out to, over the mean."""
    # Of a head's row tiles, from the longest on: integers, each row_tiles times the blocks that its tile is worth.
    work = torch.arange(row_tiles, 0, -1, device="cpu") * blocks + BLOCKS_PER_TILE * row_tiles
    sections, heads_left = divmod(heads, side_by_side)
    waves = -(-row_tiles * heads // programs)
    order = (
        work[:, None].expand(sections, row_tiles, side_by_side).flatten(),
        work.repeat_interleave(heads_left),
        work.new_zeros(waves * programs - row_tiles * heads),
    )
    dealt = torch.cat(order).view(waves, programs)
    each = dealt[::2].sum(0) + dealt[1::2].sum(0).flip(0)
    return int(each.max()) * programs / (heads * int(work.sum()))


def all_tiles(*, head_dim: int, value_head_dim: int, dtype: torch.dtype, gpu: Gpu) -> list[Tile]:
    """Every tile that `attention_tile` can return for a head shape (for the test that they agree)."""
    if dtype == torch.float32:
        return [only_tile(head_dim=head_dim, value_head_dim=value_head_dim, dtype=dtype)]
    widest = _head_class(head_dim, value_head_dim)
    shape = (head_dim, value_head_dim, gpu)
    entries = (*tiles.DEFAULT[widest], *table_of(gpu)[widest], *_decode_tiles(*shape), *_hopper_tiles(*shape))
    return list(dict.fromkeys(tile for _, *found in entries for tile in found))
