"""Softmax kernels: whole rows in one pass, long rows in two (maximum and sum per chunk; combine and finish).

A row whose maximum is -inf or inf, or that holds NaN, becomes NaN as in torch, and no other row does.
"""

import triton
import triton.language as tl

from ._math_kernel import exp_nonpositive


@triton.jit
def _finish(x, maximum, exp, total, out_ptr, offsets, mask, LOG: tl.constexpr):
    if LOG:
        y = x - maximum - tl.log(total)
    else:
        y = tl.div_rn(exp, total)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


# `rows` must not select another compiled kernel: Triton would treat rows == 1 and multiples of 16 apart.
@triton.jit(do_not_specialize=["rows"])
def softmax_rows(
    x_ptr,  # (rows, columns) contiguous, as is out
    out_ptr,
    rows,
    columns,
    LOG: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offsets = (row * columns)[:, None] + column[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    maximum = tl.max(x, axis=1)[:, None]
    exp = exp_nonpositive(x - maximum)
    total = tl.sum(exp, axis=1)[:, None]
    _finish(x, maximum, exp, total, out_ptr, offsets, mask, LOG)


@triton.jit
def softmax_chunk_sums(
    x_ptr,
    maximum_ptr,  # (rows, chunks) float32: maximum of each chunk
    total_ptr,  # (rows, chunks) float32: sum of exp(x - maximum) of each chunk
    columns,
    chunks,
    CHUNK: tl.constexpr,
):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    maximum = tl.max(x, axis=0)
    # A chunk of -inf only sums to 0, unlike a row of them: other chunks may have finite values.
    total = tl.sum(exp_nonpositive(x - tl.where(maximum == float("-inf"), 0.0, maximum)), axis=0)
    tl.store(maximum_ptr + row * chunks + chunk, maximum)
    tl.store(total_ptr + row * chunks + chunk, total)


@triton.jit
def softmax_chunk_finish(
    x_ptr,
    out_ptr,
    maximum_ptr,
    total_ptr,
    columns,
    chunks,
    LOG: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTIALS: tl.constexpr,  # chunks, up to a power of two
):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    index = tl.arange(0, PARTIALS)
    present = index < chunks
    chunk_maximum = tl.load(maximum_ptr + row * chunks + index, mask=present, other=float("-inf"))
    chunk_total = tl.load(total_ptr + row * chunks + index, mask=present, other=0.0)
    maximum = tl.max(chunk_maximum, axis=0)
    total = tl.sum(chunk_total * exp_nonpositive(chunk_maximum - maximum), axis=0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = column < columns
    offsets = row * columns + column
    x = tl.load(x_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    _finish(x, maximum, exp_nonpositive(x - maximum), total, out_ptr, offsets, mask, LOG)
