"""y[rows of expert e] = x[rows of expert e] @ weight[e].T: one launch, experts found on the device.

Rows behind the last expert's belong to one more group, whose result is 0.
"""

import triton
import triton.language as tl

from ._kloop import accumulate
from ._linear_kernel import tile_of


@triton.jit
def _row_tiles(offsets_ptr, E, T, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """For every group (BLOCK_E,): first row, row end, number of the first row tile; and the number of row tiles."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(offsets_ptr + e, mask=e < E, other=0)
    begin = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e <= E), other=0)
    end = tl.where(e == E, T, end)
    tiles = tl.where(e <= E, tl.cdiv(end - begin, BLOCK_M), 0)
    tile_end = tl.cumsum(tiles, 0)
    return begin, end, tile_end - tiles, tl.max(tile_end, 0)


@triton.jit
def _group_of(pid_m, begin, end, first_tile, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """(expert, first row, row end) of row tile `pid_m`."""
    e = tl.arange(0, BLOCK_E)
    # Empty groups begin where the next one does: the last group that begins at or before the tile owns it.
    expert = tl.max(tl.where((first_tile <= pid_m) & (end > begin), e, 0), 0)
    mine = e == expert
    row = tl.sum(tl.where(mine, begin + (pid_m - first_tile) * BLOCK_M, 0), 0)
    return expert, row, tl.sum(tl.where(mine, end, 0), 0)


# The number of rows is not specialised: one compilation of a tile serves them all.
@triton.jit(do_not_specialize=["T"])
def grouped_linear_kernel(
    x_ptr,  # (T, K)
    w_ptr,  # (E, N, K)
    offsets_ptr,  # (E,) int32, cumulative row ends
    y_ptr,  # (T, N) contiguous
    E,
    T,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PARTS: tl.constexpr,
    FLOAT_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m = tl.program_id(0) // tiles_n
    pid_n = tl.program_id(0) % tiles_n
    begin, end, first_tile, tiles_m = _row_tiles(offsets_ptr, E, T, BLOCK_M, BLOCK_E)
    if pid_m < tiles_m:
        expert, row, row_end = _group_of(pid_m, begin, end, first_tile, BLOCK_M, BLOCK_E)
        rows = row + tl.arange(0, BLOCK_M)
        cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        x_rows = x_ptr + tl.minimum(rows, row_end - 1).to(tl.int64) * stride_xm
        w_rows = w_ptr + expert.to(tl.int64) * stride_we + tl.minimum(cols, N - 1).to(tl.int64) * stride_wn
        length = tl.where(expert < E, K, 0)
        acc = accumulate(
            x_rows,
            w_rows,
            0,
            length,
            length,
            stride_xk,
            stride_wk,
            SWAP,
            EVEN_K,
            SPLIT_K,
            PARTS,
            FLOAT_PARTS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        if SWAP:
            acc = tl.trans(acc)
        y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        inside = (rows < row_end)[:, None] & (cols < N)[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "programs"])
def grouped_linear_tma_kernel(
    x_desc,  # (T, K)
    w_desc,  # (E * N, K)
    offsets_ptr,  # (E,) int32, cumulative row ends
    y_ptr,  # (T, N) contiguous
    E,
    T,
    N,
    K,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr = 8,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    begin, end, first_tile, tiles_m = _row_tiles(offsets_ptr, E, T, BLOCK_M, BLOCK_E)
    # order-free: a program takes whole tiles, each of which sums all of K
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=True):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        expert, row, row_end = _group_of(pid_m, begin, end, first_tile, BLOCK_M, BLOCK_E)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            # Past the expert's rows and columns the tile holds those of others, which are not stored.
            x = x_desc.load([row, step * BLOCK_K])
            w = w_desc.load([expert * N + pid_n * BLOCK_N, step * BLOCK_K])
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        rows = row + tl.arange(0, BLOCK_M)
        cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        inside = (rows < row_end)[:, None] & (cols < N)[None, :]
        # The group behind the last expert has met zeros past the end of the weights, or none of its own.
        tl.store(y_ptrs, tl.where(expert < E, acc, 0.0).to(y_ptr.dtype.element_ty), mask=inside)
