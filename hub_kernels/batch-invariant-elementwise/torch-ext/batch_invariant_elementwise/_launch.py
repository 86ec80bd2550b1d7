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
    query_in, query_stride, query_head_stride = _token_major(query, batch, query_heads, length)
    key_in, key_stride, key_head_stride = _token_major(key, batch, key_heads, length)
    query_out, key_out = _empty(batch, query_heads, length, dim, query), _empty(batch, key_heads, length, dim, query)
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
            query_stride,
            query_head_stride,
            key_stride,
            key_head_stride,
            HALF=dim // 2,
            BLOCK_HEADS=tile.heads,
            BLOCK_HALF=tile.half,
            num_warps=contract.ROTARY_WARPS,
            enable_fp_fusion=False,
        )
    query_out = query_out if query_in is query else torch.empty_like(query).copy_(query_out)
    key_out = key_out if key_in is key else torch.empty_like(key).copy_(key_out)
    return query_out, key_out


def _empty(batch: int, heads: int, length: int, dim: int, like: torch.Tensor) -> torch.Tensor:
    """(B, H, L, D) whose memory is (B, L, H, D)."""
    strides = (length * heads * dim, dim, heads * dim, 1)
    return torch.empty_strided((batch, heads, length, dim), strides, dtype=like.dtype, device=like.device)


def _token_major(x: torch.Tensor, batch: int, heads: int, length: int) -> tuple[torch.Tensor, int, int]:
    """x (B, H, L, D) or a copy of it, the stride from a token to the next over all rows, and that from head to head.

    In memory the heads of a token lie inside of it, as in the result.
    """
    row, head, token, element = x.stride()
    if length == 1:
        head_inside, token = True, row
    else:
        head_inside = (head <= token or heads == 1) and (row == length * token or batch == 1)
    if element == 1 and head_inside:
        return x, token, head
    dim = x.shape[3]
    return x.transpose(1, 2).contiguous().transpose(1, 2), heads * dim, dim


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
