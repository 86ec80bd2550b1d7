"""The one loop over K: everything that multiplies matrices through pointers in this package goes through it."""

import triton
import triton.language as tl


@triton.jit
def accumulate(
    x_ptr,  # (BLOCK_M,) pointers to the tile's rows of x
    w_ptr,  # (BLOCK_N,) pointers to the tile's rows of the weight
    K,
    stride_xk,
    stride_wk,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    COMPENSATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum of x[m, k] * w[n, k] over ascending k, in float32: (BLOCK_M, BLOCK_N), or its transpose if SWAP.

    COMPENSATED: BLOCK_K is the contract's chunk; each chunk is summed by itself and added with Kahan's compensation.
    K past the end is loaded as zeros, whose products leave an accumulator as it is.
    """
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr[:, None] + (k.to(tl.int64) * stride_xk)[None, :]
    w_ptrs = w_ptr[:, None] + (k.to(tl.int64) * stride_wk)[None, :]
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    lost = acc  # what rounding took from acc, if COMPENSATED
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            inside = (k < K - start)[None, :]
            x = tl.load(x_ptrs, mask=inside, other=0.0)
            w = tl.load(w_ptrs, mask=inside, other=0.0)
        if COMPENSATED:
            chunk = tl.dot(x, tl.trans(w), input_precision="ieee")
            term = chunk - lost
            total = acc + term
            rounding = (total - acc) - term
            # Zeros behind the end of K must change nothing, and an infinite total has lost nothing.
            lost = tl.where(chunk == 0.0, lost, tl.where(rounding == rounding, rounding, 0.0))
            acc = tl.where(chunk == 0.0, acc, total)
        elif SWAP:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        x_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_xk
        w_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_wk
    return acc
