"""Launch the Triton kernels. This module is imported at the first launch, so the package loads without Triton."""

from collections.abc import Callable

import torch

from . import contract
from ._dispatch import device_of
from ._gated_kernel import gated_kernel
from ._relaunch import Launch
from ._rotary_kernel import rotary_kernel


def rotary(query, key, cos, sin):
    """query (B, Hq, L, D), key (B, Hkv, L, D), cos and sin (B or 1, L, D) -> rotated query, key"""
    with device_of(query):
        return rotary_call(query, key, cos, sin)(query, key, cos, sin)


def rotary_call(query, key, cos, sin) -> Callable:
    """The function of (query, key, cos, sin) that `rotary` comes to, for all tensors of these kinds."""
    if not query.numel() or not key.numel():
        return lambda query, key, cos, sin: (torch.empty_like(query), torch.empty_like(key))
    batch, query_heads, length, dim = query.shape
    key_heads = key.shape[1]
    query_strides, key_strides = _token_strides(query), _token_strides(key)
    query_like, key_like = _result_strides(query_heads, length, dim), _result_strides(key_heads, length, dim)
    tile = contract.rotary_tile(dim)
    blocks = -(-query_heads // tile.heads) - (-key_heads // tile.heads)
    dense_query, dense_key = (dim * query_heads, dim), (dim * key_heads, dim)
    launch = Launch(
        rotary_kernel,
        (batch * length, blocks),
        (cos.shape[0] * length, query_heads, key_heads, *(query_strides or dense_query), *(key_strides or dense_key)),
        HALF=dim // 2,
        BLOCK_HEADS=tile.heads,
        BLOCK_HALF=tile.half,
        num_warps=contract.ROTARY_WARPS,
        enable_fp_fusion=False,
    )

    def call(query, key, cos, sin):
        query_in = query if query_strides else query.transpose(1, 2).contiguous()
        key_in = key if key_strides else key.transpose(1, 2).contiguous()
        query_out = query.new_empty_strided(query.shape, query_like)
        key_out = key.new_empty_strided(key.shape, key_like)
        launch(query_in, key_in, cos.contiguous(), sin.contiguous(), query_out, key_out)
        query_out = query_out if query_strides else torch.empty_like(query).copy_(query_out)
        key_out = key_out if key_strides else torch.empty_like(key).copy_(key_out)
        return query_out, key_out

    return call


def _result_strides(heads: int, length: int, dim: int) -> tuple[int, ...]:
    """(B, H, L, D) whose memory is (B, L, H, D)."""
    return (length * heads * dim, dim, heads * dim, 1)


def _token_strides(x: torch.Tensor) -> tuple[int, int] | None:
    """The stride of x (B, H, L, D) from a token to the next over all rows, and that from head to head.

    None unless the heads of a token lie inside of it, as in the result.
    """
    batch, heads, length, _ = x.shape
    row, head, token, element = x.stride()
    if length == 1:
        head_inside, token = True, row
    else:
        head_inside = (head <= token or heads == 1) and (row == length * token or batch == 1)
    return (token, head) if element == 1 and head_inside else None


def gated(gate, up, activation):
    """activation(gate) * up, contiguous"""
    with device_of(gate):
        return gated_call(gate, up, activation)(gate, up)


def gated_call(gate, up, activation) -> Callable:
    """The function of (gate, up) that `gated` comes to, for all tensors of these kinds."""
    count = gate.numel()
    shape = gate.shape
    launch = Launch(
        gated_kernel,
        (-(-count // contract.GATED_ELEMENTS),),
        (count,),
        ACTIVATION=activation,
        BLOCK=contract.GATED_ELEMENTS,
        num_warps=contract.GATED_WARPS,
        enable_fp_fusion=False,
    )

    def call(gate, up):
        out = gate.new_empty(shape)
        if count:
            launch(gate.contiguous(), up.contiguous(), out)
        return out

    return call
