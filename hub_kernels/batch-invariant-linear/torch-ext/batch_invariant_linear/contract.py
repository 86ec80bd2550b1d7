"""What fixes the bits of a linear: the order in which K is summed.

The functions here see the weight's shape and the dtype, never the number of rows: that is the whole guarantee. Tile
shapes, warps, pipeline depth and the engine are speed, live in `plan.py`, and may follow the rows.
"""

from dataclasses import dataclass

import torch

# Raised when the bits of any op in this package change on purpose.
NUMERICS_VERSION = 4

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Up to here float32 products need no matrix unit.
SHORT_K = 256


@dataclass(frozen=True)
class LinearContract:
    """How one output element is reduced on a GPU, always in ascending order of k.

    k_chunk: elements that the hardware sums into one float32 accumulator; equal to K means one pass.
    k_split: elements whose chunks are added up plainly, a multiple of k_chunk; None without chunks. Splits are added
        with Kahan's compensation (Kahan 1965, "Further remarks on reducing truncation errors"), those that are exactly
        zero left out; different programs may take them.
    parts: 1: operands are multiplied as they are. 3: float32 operands as three bfloat16 parts each, six of the nine
        products (Henry, Tang, Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype for
        higher-precision computations"). Never TF32.
    """

    k_chunk: int
    k_split: int | None = None
    parts: int = 1

    def splits(self, k: int) -> int:
        """How many splits of several chunks K is cut into: that many programs may share it."""
        return 1 if self.k_split in (None, self.k_chunk) else -(-k // self.k_split)


def linear_contract(*, n: int, k: int, dtype: torch.dtype) -> LinearContract:
    """The contract of a weight (n, k).

    16-bit weights: one ascending pass over K, for every shape. It keeps the bits of a stock GEMM that does not split K,
    and a second engine with a plain K loop can serve the same contract. float32: short chunks, since one running sum
    over thousands of terms is several times less accurate than what stock kernels do. Where K is short, products are
    exact to float32's last bit, as a rotary embedding's are in stock.
    """
    assert dtype in DTYPES, dtype
    if dtype != torch.float32:
        return LinearContract(k_chunk=k)
    if k <= SHORT_K:
        return LinearContract(k_chunk=16, k_split=16)
    return LinearContract(k_chunk=32, k_split=256, parts=3)


def bmm_contract(*, dtype: torch.dtype) -> LinearContract:
    """The contract of a batched product, whatever its K: that may be a number of keys, which padding changes."""
    return linear_contract(n=1, k=SHORT_K, dtype=dtype)
