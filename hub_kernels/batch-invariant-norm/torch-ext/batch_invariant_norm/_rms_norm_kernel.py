"""RMS norm kernels: whole rows in one pass, long rows in two (squares per chunk; combine and finish)."""

import triton
import triton.language as tl

from ._math_kernel import activate, inverse_sqrt, round_to


@triton.jit
def _load(x_ptr, gate_ptr, offsets, mask, GATE_FIRST: tl.constexpr, ACTIVATION: tl.constexpr):
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if GATE_FIRST:
        x = x * activate(tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    return x


@triton.jit
def _finish(
    x,
    mean_square,
    gate_ptr,
    weight_ptr,
    out_ptr,
    offsets,
    weight_offsets,
    mask,
    eps,
    weight_offset,
    FACTOR: tl.constexpr,
    XHAT: tl.constexpr,
    WEIGHT: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    GATE_LAST: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """From x and its mean square to the output, rounding in the order of contract.Rounding."""
    factor = round_to(inverse_sqrt(mean_square + eps), FACTOR)
    y = round_to(x * factor, XHAT)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + weight_offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            weight = round_to(weight + weight_offset, WEIGHT)
        y = round_to(y * weight, PRODUCT)
    if GATE_LAST:
        y = y * activate(tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


# `rows` must not select another compiled kernel: Triton would treat rows == 1 and multiples of 16 apart.
@triton.jit(do_not_specialize=["rows"])
def rms_norm_rows(
    x_ptr,  # (rows, columns) contiguous, as are gate and out
    gate_ptr,
    weight_ptr,  # (groups, columns)
    out_ptr,
    rows,
    columns,
    groups,
    count,  # columns as a float
    eps,
    weight_offset,
    FACTOR: tl.constexpr,
    XHAT: tl.constexpr,
    WEIGHT: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    GATE_LAST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offsets = (row * columns)[:, None] + column[None, :]
    weight_offsets = ((row % groups) * columns)[:, None] + column[None, :]
    x = _load(x_ptr, gate_ptr, offsets, mask, GATE_FIRST, ACTIVATION)
    total = tl.sum(x * x, axis=1)
    mean_square = tl.div_rn(total, count)[:, None]
    _finish(
        x,
        mean_square,
        gate_ptr,
        weight_ptr,
        out_ptr,
        offsets,
        weight_offsets,
        mask,
        eps,
        weight_offset,
        FACTOR,
        XHAT,
        WEIGHT,
        PRODUCT,
        HAS_WEIGHT,
        HAS_OFFSET,
        GATE_LAST,
        ACTIVATION,
    )


@triton.jit
def rms_norm_chunk_squares(
    x_ptr,
    gate_ptr,
    partial_ptr,  # (rows, chunks) float32: sum of squares of each chunk
    columns,
    chunks,
    GATE_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load(x_ptr, gate_ptr, row * columns + column, column < columns, GATE_FIRST, ACTIVATION)
    tl.store(partial_ptr + row * chunks + chunk, tl.sum(x * x, axis=0))


@triton.jit
def rms_norm_chunk_finish(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    partial_ptr,
    columns,
    chunks,
    groups,
    count,
    eps,
    weight_offset,
    FACTOR: tl.constexpr,
    XHAT: tl.constexpr,
    WEIGHT: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    GATE_LAST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTIALS: tl.constexpr,  # chunks, up to a power of two
):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    index = tl.arange(0, PARTIALS)
    total = tl.sum(tl.load(partial_ptr + row * chunks + index, mask=index < chunks, other=0.0), axis=0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = column < columns
    offsets = row * columns + column
    _finish(
        _load(x_ptr, gate_ptr, offsets, mask, GATE_FIRST, ACTIVATION),
        tl.div_rn(total, count),
        gate_ptr,
        weight_ptr,
        out_ptr,
        offsets,
        (row % groups) * columns + column,
        mask,
        eps,
        weight_offset,
        FACTOR,
        XHAT,
        WEIGHT,
        PRODUCT,
        HAS_WEIGHT,
        HAS_OFFSET,
        GATE_LAST,
        ACTIVATION,
    )
