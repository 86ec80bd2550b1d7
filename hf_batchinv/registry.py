"""Registration with transformers, under the name that users pass as `attn_implementation`."""

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import batch_invariant_attention
from .mask import batch_invariant_mask

NAME = "batch_invariant"


def register() -> None:
    """Make attn_implementation="batch_invariant" known in this process; calling it again changes nothing.

    The mask function goes with the attention function: without it transformers would silently drop padding, windows and
    packing for an unknown name.
    """
    AttentionInterface.register(NAME, batch_invariant_attention)
    AttentionMaskInterface.register(NAME, batch_invariant_mask)
