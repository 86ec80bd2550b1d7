"""y[rows of expert e] = x[rows of expert e] @ weight[e].T: one launch, experts found on the device."""

import triton
import triton.language as tl

from ._kloop import accumulate


@triton.jit
def grouped_linear_kernel(
    x_ptr,  # (T, K)
    w_ptr,  # (E, N, K)
    offsets_ptr,  # (E,) int32, cumulative row ends
    y_ptr,  # (T, N) contiguous
    E,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    EVEN_K: tl.constexpr,
    COMPENSATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    pid_m = pid // tiles_n
    pid_n = pid % tiles_n

    # Each expert's rows are cut into tiles of their own; walk the experts to the one that owns tile `pid_m`.
    expert = -1
    row = 0
    row_end = 0
    begin = 0
    tiles_before = 0
    for e in range(E):
        end = tl.load(offsets_ptr + e)
        tiles = tl.cdiv(end - begin, BLOCK_M)
        mine = (pid_m >= tiles_before) & (pid_m < tiles_before + tiles)
        expert = tl.where(mine, e, expert)
        row = tl.where(mine, begin + (pid_m - tiles_before) * BLOCK_M, row)
        row_end = tl.where(mine, end, row_end)
        tiles_before += tiles
        begin = end
    if expert >= 0:
        rows = row + tl.arange(0, BLOCK_M)
        cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        x_rows = x_ptr + tl.minimum(rows, row_end - 1).to(tl.int64) * stride_xm
        w_rows = w_ptr + expert.to(tl.int64) * stride_we + tl.minimum(cols, N - 1).to(tl.int64) * stride_wn
        acc = accumulate(x_rows, w_rows, K, stride_xk, stride_wk, False, EVEN_K, COMPENSATED, BLOCK_M, BLOCK_N, BLOCK_K)
        y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        inside = (rows < row_end)[:, None] & (cols < N)[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=inside)
