"""activation(gate) * up, flat.

torch computes silu on CUDA as x / (1 + expf(-x)) in float32. Triton's own exp is a coarser one, so expf is spelled out
here: CUDA's steps with CUDA's constants, which take fused multiply-adds, a floor and ex2.approx (tl.exp2).
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950216293335)  # 0x3fb8aa3b
_LOG2_E_REST = tl.constexpr(1.925963033500991e-08)  # 0x32a57060
_LOG2_E_252ND = tl.constexpr(0.0057249800302088261)  # 0x3bbb989d, log2(e) / 252


@triton.jit
def expf(x):
    """CUDA's expf: 2 ** n * 2 ** f, with n the floor of x * log2(e), kept within -126 and 126, and f what is left."""
    share = tl.minimum(tl.maximum(tl.fma(x, _LOG2_E_252ND, 0.5), 0.0), 1.0)
    product = share * 252.0
    floor = tl.floor(product)
    # The exact product may lie below a whole number to which it was rounded up.
    floor = tl.where((floor == product) & (tl.fma(share, 252.0, -product) < 0.0), floor - 1.0, floor)
    n = floor - 126.0
    f = tl.fma(x, _LOG2_E_REST, tl.fma(x, _LOG2_E, -n))
    power = ((floor + 1.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.exp2(f) * power


@triton.jit
def gated_kernel(
    gate_ptr,  # (count,) contiguous, as are up and out
    up_ptr,
    out_ptr,
    count,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tl.static_assert(ACTIVATION == "silu")
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    activated = tl.div_rn(gate, 1.0 + expf(-gate)).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + offsets, (activated * up).to(DTYPE), mask=mask)
