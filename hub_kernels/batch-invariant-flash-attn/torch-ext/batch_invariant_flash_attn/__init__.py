"""Attention whose rows do not depend on the batch, padding, cache or chunking, bit for bit."""

from .attention import attention, attention_varlen
from .flash_attn import flash_attn_func, flash_attn_varlen_func
from .key_mask import prepare_key_mask

__all__ = ["attention", "attention_varlen", "flash_attn_func", "flash_attn_varlen_func", "prepare_key_mask"]
