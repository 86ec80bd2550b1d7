"""Chains of elementwise operators in one launch each: the rotary embedding of query and key, and a gated activation.

On a GPU (Triton) every step is rounded where the chain of torch operators rounds it, so the bits are those of the
chain; on a CPU torch operators run. Inputs are float32, float16 or bfloat16. There is no backward: it raises.
"""

from .gated import can_gate, gated
from .rotary import can_rotate, rotary

__all__ = ["rotary", "gated", "can_rotate", "can_gate"]
