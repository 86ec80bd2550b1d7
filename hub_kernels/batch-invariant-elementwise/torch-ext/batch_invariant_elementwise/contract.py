"""What fixes the bits of an element: its own inputs and their dtype. Every step is rounded to that dtype.

No tile changes a bit here, since nothing is added up over a row.
"""

from typing import NamedTuple

import torch

# Raised whenever a change alters bits on purpose.
NUMERICS_VERSION = 1

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("silu",)

# Elements of one half of the heads that a program of `rotary` handles.
ROTARY_ELEMENTS = 512
ROTARY_WARPS = 2
# Elements that a program of `gated` handles.
GATED_ELEMENTS = 1024
GATED_WARPS = 4


class RotaryTile(NamedTuple):
    """heads, and half a head's dimensions up to a power of two."""

    heads: int
    half: int


def rotary_tile(head_dim: int) -> RotaryTile:
    """What one program works on for heads of this size."""
    half = 1 << (head_dim // 2 - 1).bit_length()
    return RotaryTile(max(1, ROTARY_ELEMENTS // half), half)
