"""What fixes the bits of a row: its number of columns, the dtypes and the variant, and nothing else.

No function here takes the number of rows, a batch size or a length of another row, on purpose. `tl.sum` adds in an
order that depends on the tile's shape and on the number of warps, so both are chosen here and not in `plan.py`.
"""

from dataclasses import dataclass

import torch

# Raised whenever a change alters bits on purpose.
NUMERICS_VERSION = 2

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Up to here one program holds a whole row in registers: 16 warps of 32 elements per thread.
SINGLE_PASS_COLUMNS = 16384
# Longer rows are cut into chunks of this many columns, one program each, so that few rows still fill the GPU.
CHUNK_COLUMNS = 8192


@dataclass(frozen=True)
class Tile:
    """What one program works on."""

    rows: int
    columns: int
    warps: int


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def is_single_pass(columns: int) -> bool:
    return columns <= SINGLE_PASS_COLUMNS


def row_tile(columns: int) -> Tile:
    """The tile for whole rows; narrow rows (heads, routers) share a program, 2048 elements at a time."""
    assert is_single_pass(columns)
    width = max(next_power_of_two(columns), 16)
    if width < 1024:
        return Tile(rows=min(2048 // width, 32), columns=width, warps=4)
    # 16 elements per thread, two 16-byte loads of a 16-bit dtype, as long as 16 warps suffice.
    return Tile(rows=1, columns=width, warps=min(width // 512, 16))


def chunk_tile(columns: int) -> Tile:
    """The tile for one chunk of a long row."""
    assert not is_single_pass(columns)
    return Tile(rows=1, columns=CHUNK_COLUMNS, warps=8)


def chunk_count(columns: int) -> int:
    """How many chunks a long row has; their partial results are combined by one tree over all of them."""
    return -(-columns // CHUNK_COLUMNS)


@dataclass(frozen=True)
class Rounding:
    """The dtypes to which the steps of an RMS norm round; everything between the steps is float32.

    `factor`: 1 / rms. `xhat`: x * factor. `weight`: weight + offset. `out`: the result. The product of xhat and weight
    has torch's promotion of their two dtypes.
    """

    factor: torch.dtype
    xhat: torch.dtype
    weight: torch.dtype
    out: torch.dtype


def rms_norm_rounding(
    x: torch.dtype,
    weight: torch.dtype | None,
    *,
    cast_before_weight: bool,
    cast_to_weight_dtype: bool,
    offset_in_weight_dtype: bool,
    round_factor: bool,
    gate_last: bool,
) -> Rounding:
    """Where a variant of the RMS norm rounds, from its options and the dtypes of x and weight."""
    xhat = torch.float32
    if cast_before_weight:
        xhat = weight if cast_to_weight_dtype else x
    rounded_weight = torch.float32
    if weight is not None and (cast_before_weight or offset_in_weight_dtype):
        rounded_weight = weight
    out = x
    if cast_before_weight and weight is not None and not gate_last:
        out = torch.promote_types(xhat, weight)
    return Rounding(x if round_factor else torch.float32, xhat, rounded_weight, out)
