"""What fixes the bits of a linear: the order in which K is summed.

The functions here see the weight's shape and the dtype, never the number of rows: that is the whole guarantee. Tile
shapes, warps, pipeline depth and the engine are speed, live in `plan.py`, and may follow the rows.
"""

from dataclasses import dataclass

import torch

# Raised when the bits of any op in this package change on purpose.
NUMERICS_VERSION = 1

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LinearContract:
    """How one output element is reduced on a GPU, always in ascending order of k.

    k_chunk: elements summed into one float32 accumulator; equal to K means one pass.
    compensated: chunks are added with Kahan's compensation (Kahan 1965, "Further remarks on reducing truncation
        errors"), chunks of exact zeros left out.
    input_precision: "ieee": products of float32 operands are float32 products, never TF32.
    """

    k_chunk: int
    compensated: bool
    input_precision: str = "ieee"


def linear_contract(*, n: int, k: int, dtype: torch.dtype) -> LinearContract:
    """The contract of a weight (n, k).

    16-bit weights: one ascending pass over K, for every shape. It keeps the bits of a stock GEMM that does not split K,
    and a second engine with a plain K loop can serve the same contract. float32: short chunks, since one running sum
    over thousands of terms is several times less accurate than what stock kernels do.
    """
    assert dtype in DTYPES, dtype
    if dtype == torch.float32:
        return LinearContract(k_chunk=16, compensated=True)
    return LinearContract(k_chunk=k, compensated=False)
