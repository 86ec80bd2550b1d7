"""Elementwise helpers that all kernels of this package share, so that one formula has one set of bits."""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOG2_E_REST = tl.constexpr(1.925963033500991e-08)  # log2(e) - float32(log2(e))
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round float32 to DTYPE and come back to float32."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def inverse_sqrt(x):
    """1 / sqrt(x), both steps correctly rounded."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def exp_nonpositive(x):
    """exp(x) for x <= 0 or NaN: exp2 of the leading part of x * log2(e), corrected by the part that was rounded off."""
    x = tl.where(x < -1000.0, -1000.0, x)  # -inf would give inf - inf below; NaN passes
    leading = x * _LOG2_E
    rest = tl.fma(x, _LOG2_E_REST, tl.fma(x, _LOG2_E, -leading))
    power = tl.exp2(leading)
    return tl.fma(power, rest * _LN_2, power)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """silu, sigmoid or relu of a float32 gate; exp sees no positive number, so nothing overflows."""
    if ACTIVATION == "relu":
        return tl.where(gate < 0.0, 0.0, gate)  # NaN passes
    small = exp_nonpositive(-tl.abs(gate))
    if ACTIVATION == "silu":
        top = tl.where(gate < 0.0, gate * small, gate)
    else:
        top = tl.where(gate < 0.0, small, 1.0)
    return tl.div_rn(top, 1.0 + small)
