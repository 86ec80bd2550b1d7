"""Layer norm kernels: whole rows in one pass, long rows in two (mean and squares per chunk; combine and finish)."""

import triton
import triton.language as tl

from ._math_kernel import inverse_sqrt, round_to


@triton.jit
def _finish(
    difference,
    variance,
    weight_ptr,
    bias_ptr,
    out_ptr,
    offsets,
    column,
    column_mask,
    mask,
    eps,
    XHAT: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    y = round_to(difference * inverse_sqrt(variance + eps), XHAT)
    if HAS_WEIGHT:
        y = round_to(y * tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(tl.float32), PRODUCT)
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


# `rows` must not select another compiled kernel: Triton would treat rows == 1 and multiples of 16 apart.
@triton.jit(do_not_specialize=["rows"])
def layer_norm_rows(
    x_ptr,  # (rows, columns) contiguous, as is out
    weight_ptr,  # (columns,)
    bias_ptr,  # (columns,)
    out_ptr,
    rows,
    columns,
    count,  # columns as a float
    eps,
    XHAT: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    mask = (row < rows)[:, None] & (column < columns)
    offsets = (row * columns)[:, None] + column
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(x, axis=1)
    mean = tl.div_rn(total, count)[:, None]
    difference = tl.where(mask, x - mean, 0.0)
    squares = tl.sum(difference * difference, axis=1)
    variance = tl.div_rn(squares, count)[:, None]
    _finish(
        difference,
        variance,
        weight_ptr,
        bias_ptr,
        out_ptr,
        offsets,
        column,
        column < columns,
        mask,
        eps,
        XHAT,
        PRODUCT,
        HAS_WEIGHT,
        HAS_BIAS,
    )


@triton.jit
def layer_norm_chunk_moments(
    x_ptr,
    mean_ptr,  # (rows, chunks) float32: mean of each chunk
    squares_ptr,  # (rows, chunks) float32: sum of squared differences from that mean
    columns,
    chunks,
    CHUNK: tl.constexpr,
):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(x, axis=0)
    mean = tl.div_rn(total, tl.minimum(columns - chunk * CHUNK, CHUNK).to(tl.float32))
    difference = tl.where(mask, x - mean, 0.0)
    tl.store(mean_ptr + row * chunks + chunk, mean)
    tl.store(squares_ptr + row * chunks + chunk, tl.sum(difference * difference, axis=0))


@triton.jit
def layer_norm_chunk_finish(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    mean_ptr,
    squares_ptr,
    columns,
    chunks,
    count,
    eps,
    XHAT: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTIALS: tl.constexpr,  # chunks, up to a power of two
):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    index = tl.arange(0, PARTIALS)
    present = index < chunks
    chunk_mean = tl.load(mean_ptr + row * chunks + index, mask=present, other=0.0)
    chunk_squares = tl.load(squares_ptr + row * chunks + index, mask=present, other=0.0)
    size = tl.where(present, tl.minimum(columns - index * CHUNK, CHUNK), 0).to(tl.float32)
    total = tl.sum(size * chunk_mean, axis=0)
    mean = tl.div_rn(total, count)
    shift = chunk_mean - mean
    squares = tl.sum(tl.where(present, tl.fma(size * shift, shift, chunk_squares), 0.0), axis=0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = column < columns
    offsets = row * columns + column
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    _finish(
        x - mean,
        tl.div_rn(squares, count),
        weight_ptr,
        bias_ptr,
        out_ptr,
        offsets,
        column,
        mask,
        mask,
        eps,
        XHAT,
        PRODUCT,
        HAS_WEIGHT,
        HAS_BIAS,
    )
