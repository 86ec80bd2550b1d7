"""Launch the Triton kernels. This module is imported at the first launch, so the package loads without Triton."""

import torch

from . import contract
from ._dispatch import device_of
from ._gated_kernel import gated_kernel
from ._rotary_kernel import rotary_kernel


def rotary(query, key, cos, sin):
    """query (B, Hq, L, D), key (B, Hkv, L, D), cos and sin (B or 1, L, D) -> rotated query, key"""
    if not query.numel() or not key.numel():
        return torch.empty_like(query), torch.empty_like(key)
    batch, query_heads, length, dim = query.shape
    key_heads = key.shape[1]
    query_in, key_in = _token_major(query), _token_major(key)
    query_out, key_out = _empty(batch, length, query_heads, dim, query), _empty(batch, length, key_heads, dim, key)
    # Tokens are counted over the whole batch. With one token a row, the stride of a row is that of a token.
    token = 0 if length == 1 else 2
    tile = contract.rotary_tile(dim)
    blocks = -(-query_heads // tile.heads) - (-key_heads // tile.heads)
    with device_of(query):
        rotary_kernel[(batch * length, blocks)](
            query_in,
            key_in,
            cos.contiguous(),
            sin.contiguous(),
            query_out,
            key_out,
            cos.shape[0] * length,
            query_heads,
            key_heads,
            query_in.stride(token),
            query_in.stride(1),
            key_in.stride(token),
            key_in.stride(1),
            HALF=dim // 2,
            BLOCK_HEADS=tile.heads,
            BLOCK_HALF=tile.half,
            num_warps=contract.ROTARY_WARPS,
            enable_fp_fusion=False,
        )
    query_out = query_out if query_in is query else torch.empty_like(query).copy_(query_out)
    key_out = key_out if key_in is key else torch.empty_like(key).copy_(key_out)
    return query_out, key_out


def _empty(batch: int, length: int, heads: int, dim: int, like: torch.Tensor) -> torch.Tensor:
    """(B, H, L, D) whose memory is (B, L, H, D)."""
    strides = (length * heads * dim, dim, heads * dim, 1)
    return torch.empty_strided((batch, heads, length, dim), strides, dtype=like.dtype, device=like.device)


def _token_major(x: torch.Tensor) -> torch.Tensor:
    """x (B, H, L, D), or a copy of it, whose heads lie inside of its tokens and one stride over all tokens."""
    batch, heads, length, _ = x.shape
    row, head, token, element = x.stride()
    heads_inside = head <= token or heads == 1 or length == 1
    if element == 1 and heads_inside and (batch == 1 or length == 1 or row == length * token):
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def gated(gate, up, activation):
    """activation(gate) * up, contiguous"""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    count = gate.numel()
    if count:
        with device_of(gate):
            gated_kernel[(-(-count // contract.GATED_ELEMENTS),)](
                gate,
                up,
                out,
                count,
                ACTIVATION=activation,
                BLOCK=contract.GATED_ELEMENTS,
                num_warps=contract.GATED_WARPS,
                enable_fp_fusion=False,
            )
    return out
