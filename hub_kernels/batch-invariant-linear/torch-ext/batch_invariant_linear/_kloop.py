"""The one loop over K: everything that multiplies matrices through pointers in this package goes through it."""

import triton
import triton.language as tl


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
def _float32_product(a, b, FLOAT_PARTS: tl.constexpr):
    """a @ b of float32 tiles on the matrix unit, as six products of bfloat16 parts, the smallest first.

    What is left out is 2**-25 of a product and less. A tile with an infinity keeps it: the small products, which may
    be NaN then, do not count.
    """
    a1, a2, a3 = _parts(a, FLOAT_PARTS)
    b1, b2, b3 = _parts(b, FLOAT_PARTS)
    small = tl.dot(a3, b1, input_precision="ieee")
    small = tl.dot(a1, b3, small, input_precision="ieee")
    small = tl.dot(a2, b2, small, input_precision="ieee")
    small = tl.dot(a2, b1, small, input_precision="ieee")
    small = tl.dot(a1, b2, small, input_precision="ieee")
    small = tl.where(tl.abs(small) < float("inf"), small, 0.0)
    return tl.dot(a1, b1, small, input_precision="ieee")


@triton.jit
def accumulate(
    x_ptr,  # (BLOCK_M,) pointers to the tile's rows of x
    w_ptr,  # (BLOCK_N,) pointers to the tile's rows of the weight
    K,
    stride_xk,
    stride_wk,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    SUM: tl.constexpr,  # contract.LinearContract.sum
    GROUP: tl.constexpr,  # chunks of a group, if SUM is "grouped"
    FLOAT_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum of x[m, k] * w[n, k] over ascending k, in float32: (BLOCK_M, BLOCK_N), or its transpose if SWAP.

    Unless SUM is "running", BLOCK_K is the contract's chunk. K past the end is loaded as zeros, whose products leave a
    sum as it is.
    """
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr[:, None] + (k.to(tl.int64) * stride_xk)[None, :]
    w_ptrs = w_ptr[:, None] + (k.to(tl.int64) * stride_wk)[None, :]
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    lost = acc  # what rounding took from acc, if SUM is "compensated"
    group = acc  # sum of the last chunks, if SUM is "grouped"
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            inside = (k < K - start)[None, :]
            x = tl.load(x_ptrs, mask=inside, other=0.0)
            w = tl.load(w_ptrs, mask=inside, other=0.0)
        if SUM == "compensated":
            chunk = tl.dot(x, tl.trans(w), input_precision="ieee")
            term = chunk - lost
            total = acc + term
            rounding = (total - acc) - term
            # Zeros behind the end of K must change nothing, and an infinite total has lost nothing.
            lost = tl.where(chunk == 0.0, lost, tl.where(rounding == rounding, rounding, 0.0))
            acc = tl.where(chunk == 0.0, acc, total)
        elif SUM == "grouped":
            if SWAP:
                group += _float32_product(w, tl.trans(x), FLOAT_PARTS)
            else:
                group += _float32_product(x, tl.trans(w), FLOAT_PARTS)
            if (start // BLOCK_K) % GROUP == GROUP - 1:
                acc += group
                group = tl.zeros_like(group)
        elif SWAP:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        x_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_xk
        w_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_wk
    if SUM == "grouped":
        acc += group
    return acc
