"""The one loop over K: everything that multiplies matrices through pointers in this package goes through it."""

import triton
import triton.language as tl


@triton.jit
def _product(x, w, acc, SWAP: tl.constexpr):
    """acc + x @ w.T, or its transpose if SWAP."""
    if SWAP:
        total = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return total


@triton.jit
def _parts(x, FLOAT_PARTS: tl.constexpr):
    """float32 x as three bfloat16 (24 bits of mantissa, exactly), the largest first; infinities stay in the first.

    FLOAT_PARTS: as float32 numbers, where the matrix unit takes no bfloat16.
    """
    high = x.to(tl.bfloat16)
    rest = tl.where(high.to(tl.float32) == x, 0.0, x - high.to(tl.float32))
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    if FLOAT_PARTS:
        return high.to(tl.float32), middle.to(tl.float32), low.to(tl.float32)
    return high, middle, low


@triton.jit
def _float32_product(x, w, SWAP: tl.constexpr, FLOAT_PARTS: tl.constexpr):
    """x @ w.T of float32 tiles, or its transpose if SWAP, as six products of bfloat16 parts, the smallest first.

    What is left out is 2**-25 of a product and less. A tile with an infinity keeps it: the small products, which may
    be NaN then, do not count.
    """
    x1, x2, x3 = _parts(x, FLOAT_PARTS)
    w1, w2, w3 = _parts(w, FLOAT_PARTS)
    small = _product(x3, w1, None, SWAP)
    small = _product(x1, w3, small, SWAP)
    small = _product(x2, w2, small, SWAP)
    small = _product(x2, w1, small, SWAP)
    small = _product(x1, w2, small, SWAP)
    small = tl.where(tl.abs(small) < float("inf"), small, 0.0)
    return _product(x1, w1, small, SWAP)


@triton.jit
def add_split(acc, lost, split):
    """acc + split with Kahan's compensation: the sum, and what rounding took from it in all."""
    term = split - lost
    total = acc + term
    rounding = (total - acc) - term
    # Zeros behind the end of K must change nothing, and an infinite total has lost nothing.
    lost = tl.where(split == 0.0, lost, tl.where(rounding == rounding, rounding, 0.0))
    return tl.where(split == 0.0, acc, total), lost


@triton.jit
def accumulate(
    x_ptr,  # (BLOCK_M,) pointers to the tile's rows of x
    w_ptr,  # (BLOCK_N,) pointers to the tile's rows of the weight
    begin,  # K's part, a multiple of SPLIT_K
    end,
    K,
    stride_xk,
    stride_wk,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,  # contract.LinearContract.k_split, 0 for None
    PARTS: tl.constexpr,  # of contract.LinearContract
    FLOAT_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum of x[m, k] * w[n, k] over ascending k from begin to end - 1, in float32: (BLOCK_M, BLOCK_N), or its transpose
    if SWAP.

    SPLIT_K: BLOCK_K is the contract's chunk; each chunk is summed by itself, and each split ends with `add_split`.
    K past the end is loaded as zeros, whose products leave a sum as it is.
    """
    k = begin + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr[:, None] + (k.to(tl.int64) * stride_xk)[None, :]
    w_ptrs = w_ptr[:, None] + (k.to(tl.int64) * stride_wk)[None, :]
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    lost = acc  # what rounding took from acc
    split = acc  # sum of the split so far
    for start in range(begin, end, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            inside = (k < K - (start - begin))[None, :]
            x = tl.load(x_ptrs, mask=inside, other=0.0)
            w = tl.load(w_ptrs, mask=inside, other=0.0)
        if SPLIT_K == 0:
            acc = _product(x, w, acc, SWAP)
        elif SPLIT_K == BLOCK_K:
            acc, lost = add_split(acc, lost, _product(x, w, None, SWAP))
        else:
            split = split + _float32_product(x, w, SWAP, FLOAT_PARTS)
            if (start + BLOCK_K) % SPLIT_K == 0 or start + BLOCK_K >= end:
                acc, lost = add_split(acc, lost, split)
                split = tl.zeros_like(split)
        x_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_xk
        w_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_wk
    return acc
