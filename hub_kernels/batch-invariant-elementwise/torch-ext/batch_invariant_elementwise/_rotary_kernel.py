"""The rotary embedding of query and key: a program is one token and some of its heads, first query's and then key's."""

import triton
import triton.language as tl


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    row,
    cos_row,
    block,
    heads,
    row_stride,
    head_stride,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Both halves of some heads of one token; float32 arithmetic, each step rounded to the dtype of the tensors."""
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    mask = (head < heads)[:, None] & (column < HALF)[None, :]
    x_first = x_ptr + row * row_stride + head[:, None] * head_stride + column[None, :]
    out_first = out_ptr + (row * heads + head[:, None]) * (2 * HALF) + column[None, :]
    # Every head loads the angles for itself, from the cache: handing them over would need shared memory and a barrier.
    angle = tl.broadcast_to(cos_row * (2 * HALF) + column[None, :], (BLOCK_HEADS, BLOCK_HALF))
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    first = tl.load(x_first, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_first + HALF, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    straight = (first * cos).to(DTYPE).to(tl.float32)
    turned = (second * sin).to(DTYPE).to(tl.float32)
    # a - b is a + (-b) in every bit, and the negative half times sin is the product with its sign changed.
    tl.store(out_first, (straight - turned).to(DTYPE), mask=mask)
    cos = tl.load(cos_ptr + angle + HALF, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle + HALF, mask=mask, other=0.0).to(tl.float32)
    straight = (second * cos).to(DTYPE).to(tl.float32)
    turned = (first * sin).to(DTYPE).to(tl.float32)
    tl.store(out_first + HALF, (straight + turned).to(DTYPE), mask=mask)


# `cos_rows` follows the batch and must not select another compiled kernel.
@triton.jit(do_not_specialize=["cos_rows"])
def rotary_kernel(
    query_ptr,  # (tokens, query_heads, 2 * HALF) with two strides
    key_ptr,  # (tokens, key_heads, 2 * HALF) with two strides
    cos_ptr,  # (cos_rows, 2 * HALF) contiguous, as is sin; cos_rows divides the number of tokens
    sin_ptr,
    query_out_ptr,  # (tokens, query_heads, 2 * HALF) contiguous
    key_out_ptr,
    cos_rows,
    query_heads,
    key_heads,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cos_row = row % cos_rows
    block = tl.program_id(1)
    query_blocks = tl.cdiv(query_heads, BLOCK_HEADS)
    if block < query_blocks:
        _rotate(
            query_ptr,
            query_out_ptr,
            cos_ptr,
            sin_ptr,
            row,
            cos_row,
            block,
            query_heads,
            query_stride,
            query_head_stride,
            HALF,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
    else:
        _rotate(
            key_ptr,
            key_out_ptr,
            cos_ptr,
            sin_ptr,
            row,
            cos_row,
            block - query_blocks,
            key_heads,
            key_stride,
            key_head_stride,
            HALF,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
