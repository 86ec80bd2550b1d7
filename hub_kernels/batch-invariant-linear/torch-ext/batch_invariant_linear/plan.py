"""Which engine and which tile serve how many rows: speed only.

Every tile of `tiles.py` sums K in the contract's order, so all of them give the same bits; the number of rows and the
size of the GPU may therefore choose freely.
"""

import os
from dataclasses import dataclass

import torch

from . import contract, tiles
from .tiles import Tile

ENGINES = ("auto", "triton")
# Launches of so many waves of the largest tile are as fast on our tiles as on cuBLASLt, or faster.
TRITON_FROM_ROWS = 1024
TRITON_FROM_WAVES = 4
# A program with less of K to walk is mostly its beginning and end.
TRITON_FROM_K = 1024
# A decode step of up to so many rows through the widest of weights (a vocabulary) is faster on our tiles.
TRITON_VOCABULARY = dict(rows=64, n=100_000, k=4096)


@dataclass(frozen=True)
class Gpu:
    """capability: NVIDIA's compute capability, (0, 0) on other vendors' GPUs and under the interpreter. shared_kib: KiB
    of shared memory that a block may use.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_kib: int = 99

    @property
    def descriptors(self) -> bool:
        """Tensor descriptors in hardware."""
        return self.capability >= (9, 0)


def engine() -> str:
    """`HF_BATCHINV_ENGINE`: "auto" (default) lets cuBLASLt serve what it was seen to give our bits for and is fast at,
    "triton" keeps to our own kernels. The bits are the same.

    Raises ValueError for anything else.
    """
    name = os.environ.get("HF_BATCHINV_ENGINE", "auto")
    if name not in ENGINES:
        raise ValueError(f"HF_BATCHINV_ENGINE: expected one of {', '.join(ENGINES)}, got {name!r}; unset it for auto")
    return name


def prefers_triton(*, rows: int, n: int, k: int, gpu: Gpu) -> bool:
    """Whether our tiles are at least as fast as cuBLASLt."""
    largest = tiles.TUNED.get(gpu.capability, tiles.DEFAULT).many_tma[-1:]  # only where it was measured
    if not largest:
        return False
    wide = TRITON_VOCABULARY
    if rows <= wide["rows"] and n >= wide["n"] and k >= wide["k"]:
        return True
    if rows < TRITON_FROM_ROWS or k < TRITON_FROM_K:
        return False
    programs = -(-rows // largest[0].m) * -(-n // largest[0].n)
    return programs >= TRITON_FROM_WAVES * gpu.multiprocessors


def splits_apart(*, rows: int, programs: int, splits: int, gpu: Gpu) -> bool:
    """Whether every split of K gets programs of its own, `programs` of them being enough for one: where a program's way
    through K takes long, and writing the splits' results down takes little (they are rows / 128 of the weight's bytes).
    """
    return splits > 1 and programs < gpu.multiprocessors * (8 if rows <= 16 else 1)


def table_of(gpu: Gpu) -> tiles.Table:
    """What was tuned for a GPU, or the default for one of its kind."""
    roomy = gpu.descriptors and gpu.shared_kib >= tiles.ROOMY_KIB
    return tiles.TUNED.get(gpu.capability, tiles.ROOMY if roomy else tiles.DEFAULT)


def _float32_table(k: int) -> tuple:
    parts = contract.linear_contract(n=1, k=k, dtype=torch.float32).parts
    return tiles.FLOAT32_SHORT if parts == 1 else tiles.FLOAT32


def only_tile(k: int, dtype: torch.dtype) -> Tile:
    """The tile that serves everything where the tiles were not seen to agree."""
    return _float32_table(k)[0][-1] if dtype == torch.float32 else tiles.DEFAULT.many[0]


def _first_fit(table, rows: int, n: int) -> Tile | None:
    return next((tile for most_rows, most_n, tile in table if rows <= (most_rows or rows) and n <= (most_n or n)), None)


def linear_tile(*, rows: int, n: int, k: int, dtype: torch.dtype, descriptors: bool, gpu: Gpu) -> Tile:
    """The tile for `rows` rows of a weight (n, k).

    descriptors: operands and GPU allow tensor descriptors.
    """
    if dtype == torch.float32:
        return _first_fit(_float32_table(k), rows, n)
    table = table_of(gpu)
    few = (table.few, table.few_tma) if descriptors else (table.few,)
    tile = next((tile for entries in few if (tile := _first_fit(entries, rows, n))), None)
    if tile is not None:
        return tile
    many = (descriptors and table.many_tma) or table.many
    return next((t for t in many if -(-rows // t.m) * -(-n // t.n) <= gpu.multiprocessors), many[-1])


def grouped_tile(*, rows: int, experts: int, n: int, k: int, dtype: torch.dtype, descriptors: bool, gpu: Gpu) -> Tile:
    """The tile for `rows` rows dealt out to `experts` weights (n, k); how they are dealt is not known here."""
    mean = -(-rows // experts)
    if dtype == torch.float32:
        return _first_fit(_float32_table(k), mean, n)
    table = table_of(gpu)
    return _first_fit((descriptors and table.grouped_tma) or table.grouped, mean, n)


def all_tiles(k: int, dtype: torch.dtype, gpu: Gpu) -> list[Tile]:
    """Every tile that may serve weights (any, k) of a dtype on a GPU (for the test that they agree)."""
    if dtype == torch.float32:
        return [tile for *_, tile in _float32_table(k)]
    table = table_of(gpu)
    listed = [
        tile for one in (tiles.DEFAULT, table) for *_, tile in one.few + one.few_tma + one.grouped + one.grouped_tma
    ]
    plain = [tile for one in (tiles.DEFAULT, table) for tile in one.many + one.many_tma]
    return list(dict.fromkeys(listed + plain))
