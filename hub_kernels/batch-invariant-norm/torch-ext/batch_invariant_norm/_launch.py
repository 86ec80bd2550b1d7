"""Launch the Triton kernels on rows. Triton is imported here, at the first launch, so the package loads without it."""

import torch

from . import contract, plan
from ._dispatch import device_of
from ._relaunch import Launch


def _aligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, contiguous and with its first byte 16-byte aligned.

    The compiler widens loads by the alignment it sees, and with the width of a load changes which elements a thread
    holds and so the order of `tl.sum`. With the start always aligned, that depends on the number of columns alone.
    """
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _triton_dtype(dtype: torch.dtype):
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def rms_norm(x, gate, weight, eps, group_size, weight_offset, gate_before, activation, rounding):
    """RMS norm of x (..., D) in groups of group_size; arguments as in the op, `rounding` a contract.Rounding."""
    settings = (eps, group_size, weight_offset, gate_before, activation, rounding)
    with device_of(x):
        return rms_norm_call(x, gate, weight, *settings)(x, gate, weight)


def rms_norm_call(x, gate, weight, eps, group_size, weight_offset, gate_before, activation, rounding):
    """The function of (x, gate, weight) that `rms_norm` comes to, for all tensors of these kinds."""
    from . import _rms_norm_kernel as kernels

    shape, out_dtype = x.shape, rounding.out
    columns = group_size
    if not x.numel():
        return lambda x, gate, weight: x.new_empty(shape, dtype=out_dtype)
    rows = x.numel() // columns
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
    numbers = (x.shape[-1] // columns, float(columns), eps, weight_offset)
    if contract.is_single_pass(columns):
        tile = contract.row_tile(columns)
        sizes = dict(TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns, num_warps=tile.warps)
        grid = (plan.programs(rows, tile),)
        launch = Launch(kernels.rms_norm_rows, grid, (rows, columns, *numbers), **options, **sizes)

        def call(x, gate, weight):
            out = x.new_empty(shape, dtype=out_dtype)
            x, gate, weight = _aligned(x), _aligned(gate), _aligned(weight)
            launch(x, x if gate is None else gate, x if weight is None else weight, out)
            return out

        return call

    tile, chunks = contract.chunk_tile(columns), contract.chunk_count(columns)
    sizes = dict(CHUNK=tile.columns, num_warps=tile.warps)
    grid, ends = (rows * chunks,), dict(PARTIALS=contract.next_power_of_two(chunks))
    squares = Launch(kernels.rms_norm_chunk_squares, grid, (columns, chunks), **gate_options, **sizes)
    finish = Launch(kernels.rms_norm_chunk_finish, grid, (columns, chunks, *numbers), **options, **sizes, **ends)

    def call_chunks(x, gate, weight):
        out = x.new_empty(shape, dtype=out_dtype)
        x, gate, weight = _aligned(x), _aligned(gate), _aligned(weight)
        gate, weight = x if gate is None else gate, x if weight is None else weight
        partial = x.new_empty(rows, chunks, dtype=torch.float32)
        squares(x, gate, partial)
        finish(x, gate, weight, out, partial)
        return out

    return call_chunks


def layer_norm(x, weight, bias, eps, columns, xhat, product, out_dtype):
    """Layer norm over the trailing `columns` elements of x; arguments as in the op."""
    with device_of(x):
        return layer_norm_call(x, weight, bias, eps, columns, xhat, product, out_dtype)(x, weight, bias)


def layer_norm_call(x, weight, bias, eps, columns, xhat, product, out_dtype):
    """The function of (x, weight, bias) that `layer_norm` comes to, for all tensors of these kinds."""
    from . import _layer_norm_kernel as kernels

    shape = x.shape
    if not x.numel():
        return lambda x, weight, bias: x.new_empty(shape, dtype=out_dtype)
    rows = x.numel() // columns
    options = {
        "XHAT": _triton_dtype(xhat),
        "PRODUCT": _triton_dtype(product),
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
    }
    if contract.is_single_pass(columns):
        tile = contract.row_tile(columns)
        sizes = dict(TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns, num_warps=tile.warps)
        numbers = (rows, columns, float(columns), eps)
        launch = Launch(kernels.layer_norm_rows, (plan.programs(rows, tile),), numbers, **options, **sizes)

        def call(x, weight, bias):
            out = x.new_empty(shape, dtype=out_dtype)
            x, weight, bias = _aligned(x), _aligned(weight), _aligned(bias)
            launch(x, x if weight is None else weight, x if bias is None else bias, out)
            return out

        return call

    tile, chunks = contract.chunk_tile(columns), contract.chunk_count(columns)
    grid, sizes = (rows * chunks,), dict(CHUNK=tile.columns, num_warps=tile.warps)
    moments = Launch(kernels.layer_norm_chunk_moments, grid, (columns, chunks), **sizes)
    numbers, ends = (columns, chunks, float(columns), eps), dict(PARTIALS=contract.next_power_of_two(chunks))
    finish = Launch(kernels.layer_norm_chunk_finish, grid, numbers, **options, **sizes, **ends)

    def call_chunks(x, weight, bias):
        out = x.new_empty(shape, dtype=out_dtype)
        x, weight, bias = _aligned(x), _aligned(weight), _aligned(bias)
        mean = x.new_empty(rows, chunks, dtype=torch.float32)
        squares = torch.empty_like(mean)
        moments(x, mean, squares)
        finish(x, x if weight is None else weight, x if bias is None else bias, out, mean, squares)
        return out

    return call_chunks


def softmax(x, log, out):
    """Softmax, or its logarithm, of the rows of x (rows, columns) into out (rows, columns), contiguous."""
    from . import _softmax_kernel as kernels

    rows, columns = x.shape
    x = _aligned(x)
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
    x = _aligned(x)
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
