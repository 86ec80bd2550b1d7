"""Norms, softmax and reductions whose rows have the same bits in any batch.

Every row is reduced in an order that follows from its number of columns alone, on the GPU (Triton) and on the CPU
(torch operators). Inputs are float32, float16 or bfloat16; sums are float32. There is no backward: it raises.
"""

from . import layers
from ._variants import gated_variants, layer_norm_variants, variants
from .layer_norm import layer_norm
from .reduce import mean, sum
from .rms_norm import rms_norm, rms_norm_gated
from .softmax import log_softmax, softmax

__all__ = [
    "rms_norm",
    "rms_norm_gated",
    "layer_norm",
    "softmax",
    "log_softmax",
    "mean",
    "sum",
    "variants",
    "gated_variants",
    "layer_norm_variants",
    "layers",
]
