"""y = x @ weight.T (+ bias): a pointer kernel for any strides, and a persistent kernel with tensor descriptors."""

import triton
import triton.language as tl

from ._kloop import accumulate, add_split


@triton.jit
def tile_of(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Walk GROUP_M tile rows together, so that neighbouring programs share weight rows in L2."""
    per_group = GROUP_M * tiles_n
    first_m = (pid // per_group) * GROUP_M
    size_m = tl.minimum(tiles_m - first_m, GROUP_M)
    return first_m + (pid % per_group) % size_m, (pid % per_group) // size_m


# The number of rows is not specialised: one compilation of a tile serves them all.
@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x_ptr,  # (B, M, K)
    w_ptr,  # (B, N, K)
    bias_ptr,  # (N,)
    y_ptr,  # (B, M, N) contiguous, or (splits, B, M, N) float32 if APART
    M,
    N,
    K,
    stride_xb,
    stride_xm,
    stride_xk,
    stride_wb,
    stride_wn,
    stride_wk,
    HAS_BIAS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    APART: tl.constexpr,  # a program takes one split, and `combine_kernel` adds them up
    PARTS: tl.constexpr,
    FLOAT_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr = 8,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    begin = 0
    end = K
    if APART:
        begin = tl.program_id(1) * SPLIT_K
        end = tl.minimum(begin + SPLIT_K, K)
    pid = tl.program_id(0)
    batch = (pid // (tiles_m * tiles_n)).to(tl.int64)
    pid_m, pid_n = tile_of(pid % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)

    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns past the end read the last one again and are not stored: no mask inside the loop.
    x_rows = x_ptr + batch * stride_xb + tl.minimum(rows, M - 1).to(tl.int64) * stride_xm
    w_rows = w_ptr + batch * stride_wb + tl.minimum(cols, N - 1).to(tl.int64) * stride_wn
    acc = accumulate(
        x_rows,
        w_rows,
        begin,
        end,
        K,
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

    if APART:
        batches = (tl.num_programs(0) // (tiles_m * tiles_n)).to(tl.int64)  # order-free: where a split's result lies
        batch += tl.program_id(1) * batches
    y_ptrs = y_ptr + batch * M * N + rows.to(tl.int64)[:, None] * N + cols[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if SWAP:
        if HAS_BIAS:
            acc += bias[:, None]
        acc = tl.trans(acc)
    elif HAS_BIAS:
        acc += bias[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["outputs", "splits"])
def combine_kernel(
    parts_ptr,  # (splits, outputs) float32
    bias_ptr,  # (N,)
    y_ptr,  # (outputs,)
    outputs,
    splits,
    N,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr = 8,  # splits that are loaded at a time
):
    """Add the splits up from left to right, with the arithmetic of `accumulate`'s own adding."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < outputs
    acc = tl.zeros((BLOCK,), tl.float32)
    lost = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, splits, AHEAD):
        for i in tl.static_range(AHEAD):
            # A split behind the last one is zero, which changes nothing.
            there = tl.where(first + i < splits, outputs, 0)
            split = tl.load(parts_ptr + tl.cast(first + i, tl.int64) * outputs + at, mask=at < there, other=0.0)
            acc, lost = add_split(acc, lost, split)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "programs"])
def linear_tma_kernel(
    x_desc,  # (M, K)
    w_desc,  # (N, K)
    y_desc,  # (M, N)
    bias_ptr,  # (N,)
    M,
    N,
    K,
    programs,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr = 8,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # order-free: a program takes whole tiles, each of which sums all of K
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=True):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = x_desc.load([pid_m * BLOCK_M, step * BLOCK_K])
            w = w_desc.load([pid_n * BLOCK_N, step * BLOCK_K])
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if HAS_BIAS:
            cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
            acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        y_desc.store([pid_m * BLOCK_M, pid_n * BLOCK_N], acc.to(y_desc.dtype))
