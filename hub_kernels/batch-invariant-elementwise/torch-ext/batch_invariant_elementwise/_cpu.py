"""The CPU path: torch operators only, chosen so that no element's bits depend on where it stands.

Products and sums are rounded correctly in a vector loop and in its scalar tail alike. PyTorch's silu is not, so it is
made of exp and a division here, in float32, and rounded once.
"""

import torch

from . import reference
from ._dispatch import plain_torch


def rotary(query, key, cos, sin):
    with plain_torch():
        return reference.rotary(query, key, cos, sin)


def gated(gate, up, activation):
    assert activation == "silu"
    with plain_torch():
        gate, up = gate.contiguous(), up.contiguous()
        x = gate.float()
        return (x / (1 + torch.exp(-x))).to(gate.dtype) * up
