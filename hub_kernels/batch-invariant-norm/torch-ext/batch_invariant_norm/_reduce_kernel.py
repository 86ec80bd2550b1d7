"""Row sums: whole rows in one pass, long rows in chunks whose sums are rows again."""

import triton
import triton.language as tl


# `rows` must not select another compiled kernel: Triton would treat rows == 1 and multiples of 16 apart.
@triton.jit(do_not_specialize=["rows"])
def sum_rows(
    x_ptr,  # (rows, columns) contiguous
    out_ptr,  # (rows,)
    rows,
    columns,
    divisor,  # float; 1 for a sum
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + (row * columns)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(x, axis=1)
    total = tl.div_rn(total, divisor)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def sum_chunks(
    x_ptr,  # (rows, columns) contiguous
    partial_ptr,  # (rows, chunks) float32
    columns,
    chunks,
    CHUNK: tl.constexpr,
):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    # A reduction over all of a tensor makes one row of it, whose columns may pass 2 ** 31.
    column = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(partial_ptr + row * chunks + chunk, tl.sum(x, axis=0))
