"""The chains of torch operators whose bits the GPU kernels have."""

import torch
import torch.nn.functional as F


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(..., D): minus the second half, then the first half."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotary(query, key, cos, sin):
    """query (B, Hq, L, D), key (B, Hkv, L, D), cos and sin (B or 1, L, D) -> query, key"""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


def gated(gate, up, activation):
    """gate and up of one shape -> the same shape"""
    return {"silu": F.silu}[activation](gate) * up
