"""Launch the Triton kernels on rows. Triton is imported here, at the first launch, so the package loads without it."""

import torch

from . import contract, plan
from ._dispatch import device_of


def _rows(tensor: torch.Tensor | None, columns: int) -> torch.Tensor | None:
    """The tensor as contiguous rows whose first byte is 16-byte aligned.

    The compiler widens loads by the alignment it sees, and with the width of a load changes which elements a thread
    holds and so the order of `tl.sum`. With the start always aligned, that depends on `columns` alone.
    """
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return (tensor.clone() if tensor.data_ptr() % 16 else tensor).view(-1, columns)


def _triton_dtype(dtype: torch.dtype):
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def rms_norm(x, gate, weight, eps, group_size, weight_offset, gate_before, activation, rounding):
    """RMS norm of x (..., D) in groups of group_size; arguments as in the op, `rounding` a contract.Rounding."""
    from . import _rms_norm_kernel as kernels

    out = torch.empty(x.shape, dtype=rounding.out, device=x.device)
    if not x.numel():
        return out
    groups = x.shape[-1] // group_size
    x, gate, weight = (_rows(tensor, group_size) for tensor in (x, gate, weight))
    rows, columns = x.shape
    product = rounding.xhat if weight is None else torch.promote_types(rounding.xhat, weight.dtype)
    gate_options = {"GATE_FIRST": gate is not None and gate_before, "ACTIVATION": activation}
    options = {
        "FACTOR": _triton_dtype(rounding.factor),
        "XHAT": _triton_dtype(rounding.xhat),
        "WEIGHT": _triton_dtype(rounding.weight),
        "PRODUCT": _triton_dtype(product),
        "HAS_WEIGHT": weight is not None,
        "HAS_OFFSET": weight_offset != 0.0,
        "GATE_LAST": gate is not None and not gate_before,
        **gate_options,
    }
    gate = x if gate is None else gate
    weight = x if weight is None else weight
    with device_of(x):
        if contract.is_single_pass(columns):
            tile = contract.row_tile(columns)
            kernels.rms_norm_rows[(plan.programs(rows, tile),)](
                x,
                gate,
                weight,
                out,
                rows,
                columns,
                groups,
                float(columns),
                eps,
                weight_offset,
                **options,
                TILE_ROWS=tile.rows,
                TILE_COLUMNS=tile.columns,
                num_warps=tile.warps,
            )
            return out
        tile, chunks = contract.chunk_tile(columns), contract.chunk_count(columns)
        partial = torch.empty(rows, chunks, dtype=torch.float32, device=x.device)
        kernels.rms_norm_chunk_squares[(rows * chunks,)](
            x, gate, partial, columns, chunks, **gate_options, CHUNK=tile.columns, num_warps=tile.warps
        )
        kernels.rms_norm_chunk_finish[(rows * chunks,)](
            x,
            gate,
            weight,
            out,
            partial,
            columns,
            chunks,
            groups,
            float(columns),
            eps,
            weight_offset,
            **options,
            CHUNK=tile.columns,
            PARTIALS=contract.next_power_of_two(chunks),
            num_warps=tile.warps,
        )
    return out


def layer_norm(x, weight, bias, eps, columns, xhat, product, out_dtype):
    """Layer norm over the trailing `columns` elements of x; arguments as in the op."""
    from . import _layer_norm_kernel as kernels

    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if not x.numel():
        return out
    x, weight, bias = (_rows(tensor, columns) for tensor in (x, weight, bias))
    rows = x.shape[0]
    options = {
        "XHAT": _triton_dtype(xhat),
        "PRODUCT": _triton_dtype(product),
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
    }
    weight = x if weight is None else weight
    bias = x if bias is None else bias
    with device_of(x):
        if contract.is_single_pass(columns):
            tile = contract.row_tile(columns)
            kernels.layer_norm_rows[(plan.programs(rows, tile),)](
                x,
                weight,
                bias,
                out,
                rows,
                columns,
                float(columns),
                eps,
                **options,
                TILE_ROWS=tile.rows,
                TILE_COLUMNS=tile.columns,
                num_warps=tile.warps,
            )
            return out
        tile, chunks = contract.chunk_tile(columns), contract.chunk_count(columns)
        mean = torch.empty(rows, chunks, dtype=torch.float32, device=x.device)
        squares = torch.empty_like(mean)
        kernels.layer_norm_chunk_moments[(rows * chunks,)](
            x, mean, squares, columns, chunks, CHUNK=tile.columns, num_warps=tile.warps
        )
        kernels.layer_norm_chunk_finish[(rows * chunks,)](
            x,
            weight,
            bias,
            out,
            mean,
            squares,
            columns,
            chunks,
            float(columns),
            eps,
            **options,
            CHUNK=tile.columns,
            PARTIALS=contract.next_power_of_two(chunks),
            num_warps=tile.warps,
        )
    return out


def softmax(x, log, out):
    """Softmax, or its logarithm, of the rows of x (rows, columns) into out (rows, columns), contiguous."""
    from . import _softmax_kernel as kernels

    rows, columns = x.shape
    x = _rows(x, columns)
    with device_of(x):
        if contract.is_single_pass(columns):
            tile = contract.row_tile(columns)
            kernels.softmax_rows[(plan.programs(rows, tile),)](
                x, out, rows, columns, LOG=log, TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns, num_warps=tile.warps
            )
            return
        tile, chunks = contract.chunk_tile(columns), contract.chunk_count(columns)
        maximum = torch.empty(rows, chunks, dtype=torch.float32, device=x.device)
        total = torch.empty_like(maximum)
        kernels.softmax_chunk_sums[(rows * chunks,)](
            x, maximum, total, columns, chunks, CHUNK=tile.columns, num_warps=tile.warps
        )
        kernels.softmax_chunk_finish[(rows * chunks,)](
            x,
            out,
            maximum,
            total,
            columns,
            chunks,
            LOG=log,
            CHUNK=tile.columns,
            PARTIALS=contract.next_power_of_two(chunks),
            num_warps=tile.warps,
        )


def reduce(x, mean, out):
    """Sum or mean of the rows of x (rows, columns) into out (rows,)."""
    from . import _reduce_kernel as kernels

    rows, columns = x.shape
    divisor = float(columns) if mean else 1.0
    x = _rows(x, columns)
    with device_of(x):
        while not contract.is_single_pass(x.shape[1]):
            columns = x.shape[1]
            tile, chunks = contract.chunk_tile(columns), contract.chunk_count(columns)
            partial = torch.empty(rows, chunks, dtype=torch.float32, device=x.device)
            kernels.sum_chunks[(rows * chunks,)](x, partial, columns, chunks, CHUNK=tile.columns, num_warps=tile.warps)
            x = partial
        tile = contract.row_tile(x.shape[1])
        kernels.sum_rows[(plan.programs(rows, tile),)](
            x,
            out,
            rows,
            x.shape[1],
            divisor,
            TILE_ROWS=tile.rows,
            TILE_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
