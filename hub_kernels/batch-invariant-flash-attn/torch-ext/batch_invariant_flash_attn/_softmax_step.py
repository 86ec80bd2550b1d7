"""The arithmetic of the running softmax, shared by every kernel of this package.

State of a row: maximum m (log2 units), weight = sum of exp2(score - m), acc = sum of exp2(score - m) * value.
Multiply-adds are spelt out with `tl.fma`, since a compiler may contract `a * b + c` in one kernel and not in another.

The weight is a product with ones, LANES equal columns of it, summed like the output. `tl.sum` would not do: its order
follows the layout that the compiler picks for the scores, which changes with the mask and the tile. A matrix product
has one order.
"""

import triton
import triton.language as tl


@triton.jit
def _finite(m):
    """m, but 0 for a row that has seen no key: exp2(-inf - 0) is 0 where exp2(-inf - -inf) is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def to_log2(score, unit, bias):
    """score * unit + bias, rounded once, whether or not a mask adds a bias (0.0 if not)."""
    return tl.fma(score, tl.zeros_like(score) + unit, tl.zeros_like(score) + bias)


@triton.jit
def step(m, weight, acc, score, value, LANES: tl.constexpr):
    """Take one KV block: m (R,), weight (R, LANES), acc (R, Dv); score (R, N) in log2 units, -inf where masked;
    value (N, Dv).
    """
    m_new = tl.maximum(m, tl.max(score, 1))
    base = _finite(m_new)
    p = tl.math.exp2(score - base[:, None])
    alpha = tl.math.exp2(m - base)[:, None]
    p = p.to(value.dtype)
    ones = tl.full((value.shape[0], LANES), 1.0, value.dtype)
    if value.dtype == tl.float32:
        # The block is summed by itself: one running sum over all keys would lose accuracy that float32 can show.
        weight = tl.fma(weight, tl.zeros_like(weight) + alpha, tl.dot(p, ones, input_precision="ieee"))
        acc = tl.fma(acc, tl.zeros_like(acc) + alpha, tl.dot(p, value, input_precision="ieee"))
    else:
        weight = tl.dot(p, ones, weight * alpha)
        acc = tl.dot(p, value, acc * alpha)
    return m_new, weight, acc


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
def sink_scales(m, weight, sink):
    """Let a learned logit (log2 units) take its share of the sum: factor of the output, new sum."""
    m_new, scale, share = merge_scales(m, sink)
    return scale, tl.fma(weight, scale, share)


@triton.jit
def normalise(acc, weight):
    """acc / weight; a row that saw no key gives zeros."""
    return tl.where(weight == 0.0, 0.0, acc / tl.where(weight == 0.0, 1.0, weight))


@triton.jit
def tanh(x):
    """tanh to float32 accuracy from exp2: a series near 0, where 1 - exp2(..) would cancel."""
    a = tl.abs(x)
    e = tl.math.exp2(a * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = (
        tl.fma(
            tl.fma(
                tl.fma(tl.fma(s, 0.021869488536155203, -0.053968253968253971), s, 0.13333333333333333),
                s,
                -0.33333333333333333,
            ),
            s,
            1.0,
        )
        * a
    )
    t = tl.where(a < 0.25, near, far)
    return tl.where(x < 0, -t, t)
