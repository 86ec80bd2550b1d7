"""The arithmetic of the running softmax, shared by every kernel of this package.

State of a row: maximum m (log2 units), weight = sum of exp2(score - m), acc = sum of exp2(score - m) * value.
Multiply-adds are spelt out with `tl.fma`, since a compiler may contract `a * b + c` in one kernel and not in another.

The weight is kept in LANES partial sums and added up by `halve`, not by `tl.sum`, whose order follows the layout that
the compiler picks for the scores, which changes with the mask and the tile. In the layout of a matrix product's result
the additions below need no exchange between threads.
"""

import triton
import triton.language as tl

# Partial sums that a row's weight is kept in: the threads that share a row of a matrix product's result.
LANES = tl.constexpr(4)


@triton.jit
def _finite(m):
    """m, but 0 for a row that has seen no key: exp2(-inf - 0) is 0 where exp2(-inf - -inf) is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _halve(x):
    """(R, A, 2 * B) -> (R, A, B): neighbours added. The order is part of the contract."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
    return even + odd


@triton.jit
def lane_sums(p):
    """(R, N) -> (R, LANES): lane l takes the pairs of columns 2 * l, 2 * l + 1 of every 8, added up as a tree."""
    R: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    pairs = _halve(tl.reshape(p, (R, N // 8, 2 * LANES)))
    x = tl.permute(pairs, (0, 2, 1))
    for _ in tl.static_range(4):
        if x.shape[2] > 1:
            x = _halve(x)
    return tl.reshape(x, (R, LANES))


@triton.jit
def lanes_to_weight(lanes):
    """(R, LANES) -> (R,)."""
    R: tl.constexpr = lanes.shape[0]
    return tl.reshape(_halve(_halve(tl.reshape(lanes, (R, 1, LANES)))), (R,))


@triton.jit
def softmax_step(m, highest, score, unit):
    """Take one KV block's scores (R, N), -inf where masked, worth `unit` log2 units each, of which each row's highest
    is given (R,): new m (R,), p = exp2(score * unit - m) (R, N) and the factor alpha (R,) of what was summed before.
    """
    m_new = tl.maximum(m, highest * unit)
    base = _finite(m_new)
    return m_new, tl.math.exp2(tl.fma(score, unit, -base[:, None])), tl.math.exp2(m - base)


@triton.jit
def add_weights(lanes, alpha, p):
    """Partial sums (R, LANES) of the weights with the block's p (R, N) added."""
    return tl.fma(lanes, alpha[:, None], lane_sums(p))


@triton.jit
def merge_scales(m_total, m):
    """Maximum of both, and the factors of the running total and of the next split."""
    m_new = tl.maximum(m_total, m)
    base = _finite(m_new)
    return m_new, tl.math.exp2(m_total - base), tl.math.exp2(m - base)


@triton.jit
def merge(total, scale_total, part, scale_part):
    """Fold the next split into the running total (sums or outputs). An empty split changes nothing."""
    return tl.fma(total, scale_total, part * scale_part)


@triton.jit
def fold_split(m_total, weight_total, acc_total, m, weight, acc):
    """Fold the next split's m (R,), weight (R,) and acc (R, Dv) into the totals."""
    m_total, scale_total, scale = merge_scales(m_total, m)
    weight_total = merge(weight_total, scale_total, weight, scale)
    return m_total, weight_total, merge(acc_total, scale_total[:, None], acc, scale[:, None])


@triton.jit
def finish(m_total, weight_total, acc_total, sink, SINKS: tl.constexpr):
    """acc / weight, with a learned logit `sink` (R,) taking its share of the sum; a row that saw no key gives zeros."""
    if SINKS:
        # As an fma, so that no compiler can merge the product with what follows.
        sink = sink.to(tl.float32)
        sink = tl.fma(sink, 1.4426950408889634, 0.0)
        _, scale, share = merge_scales(m_total, sink)
        weight_total = tl.fma(weight_total, scale, share)
        acc_total = acc_total * scale[:, None]
    # One reciprocal a row. For a weight from 2^-126 to 2^126 (it is about 1 or more, or 0) a division of every element
    # would have the same bits.
    inverse = 1.0 / tl.where(weight_total == 0.0, 1.0, weight_total)
    return tl.where(weight_total[:, None] == 0.0, 0.0, acc_total * inverse[:, None])


@triton.jit
def tanh(x):
    """tanh to an absolute error of float32's epsilon: scores are only compared by their difference."""
    return 1.0 - 2.0 / (tl.math.exp2(x * 2.8853900817779268) + 1.0)
