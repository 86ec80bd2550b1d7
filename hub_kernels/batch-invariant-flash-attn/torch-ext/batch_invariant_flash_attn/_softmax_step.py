"""The arithmetic of the running softmax, shared by every kernel of this package.

State of a row: maximum m (log2 units), sum l of exp2(score - m), output acc = sum of exp2(score - m) * value. Multiply-adds
are spelt out with `tl.fma`, since a compiler may contract `a * b + c` in one kernel and not in another.

l is a product with ones, LANES equal columns of it, summed like the output: the order of `tl.sum` follows the layout
that the compiler picks for the scores, which changes with the mask and the tile; a matrix product has one order.
"""

import triton
import triton.language as tl


@triton.jit
def _finite(m):
    """m, but 0 for a row that has seen no key: exp2(-inf - 0) is 0 where exp2(-inf - -inf) is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def step(m, l, acc, score, unit, value, LANES: tl.constexpr):
    """Take one KV block. score (R, N) raw, -inf where masked; unit > 0 turns it into log2 units; value (N, Dv).

    m (R,), l (R, LANES), acc (R, Dv).
    """
    m_new = tl.maximum(m, tl.max(score, 1) * unit)
    base = _finite(m_new)
    p = tl.math.exp2(tl.fma(score, tl.zeros_like(score) + unit, tl.zeros_like(score) - base[:, None]))
    alpha = tl.math.exp2(m - base)[:, None]
    p = p.to(value.dtype)
    ones = tl.full((value.shape[0], LANES), 1.0, value.dtype)
    if value.dtype == tl.float32:
        # The block is summed by itself: one running sum over all keys would lose accuracy that float32 can show.
        l = tl.fma(l, tl.zeros_like(l) + alpha, tl.dot(p, ones, input_precision="ieee"))
        acc = tl.fma(acc, tl.zeros_like(acc) + alpha, tl.dot(p, value, input_precision="ieee"))
    else:
        l = tl.dot(p, ones, l * alpha)
        acc = tl.dot(p, value, acc * alpha)
    return m_new, l, acc


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
def sink_scales(m, l, sink):
    """Let a learned logit (log2 units) take its share of the sum: factor of the output, new sum."""
    m_new, scale, share = merge_scales(m, sink)
    return scale, tl.fma(l, scale, share)


@triton.jit
def normalise(acc, l):
    """acc / l; a row that saw no key gives zeros."""
    return tl.where(l == 0.0, 0.0, acc / tl.where(l == 0.0, 1.0, l))


@triton.jit
def tanh(x):
    """tanh to float32 accuracy from exp2: a series near 0, where 1 - exp2(..) would cancel."""
    a = tl.abs(x)
    e = tl.math.exp2(a * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = tl.fma(tl.fma(tl.fma(tl.fma(s, 0.021869488536155203, -0.053968253968253971), s, 0.13333333333333333), s,
                         -0.33333333333333333), s, 1.0) * a
    t = tl.where(a < 0.25, near, far)
    return tl.where(x < 0, -t, t)
