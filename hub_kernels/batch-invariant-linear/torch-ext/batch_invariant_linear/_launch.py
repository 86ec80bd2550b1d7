"""Launch the Triton kernels: look the tile up, size the grid, nothing else. Imported at the first GPU call."""

import functools

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from . import contract, plan
from ._grouped_linear_kernel import grouped_linear_kernel
from ._linear_kernel import linear_kernel, linear_tma_kernel


@functools.cache
def _device(index: int | None) -> tuple[int, bool]:
    """(multiprocessors, has tensor descriptors in hardware); a CPU under Triton's interpreter has index None."""
    if index is None:
        return 4, False
    properties = torch.cuda.get_device_properties(index)
    count = properties.multi_processor_count  # order-free: it sizes a persistent grid of whole tiles
    return count, properties.major >= 9 and torch.version.hip is None


def _compensated(n: int, k: int, dtype: torch.dtype, tile: plan.Tile) -> bool:
    order = contract.linear_contract(n=n, k=k, dtype=dtype)
    assert not order.compensated or (tile.k == order.k_chunk and not tile.swap and not tile.tma), (order, tile)
    return order.compensated


def _rows_aligned(tensor: torch.Tensor) -> bool:
    """Row-major with 16-byte aligned rows, as tensor descriptors need."""
    return (
        tensor.stride(-1) == 1
        and tensor.stride(-2) * tensor.element_size() % 16 == 0
        and tensor.stride(-2) >= tensor.shape[-1]
        and tensor.data_ptr() % 16 == 0
        and tensor.shape[-1] * tensor.element_size() % 16 == 0
    )


def _descriptor(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, cols])


def launch_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: plan.Tile | None = None
) -> torch.Tensor:
    """x (M, K), weight (N, K), any strides, bias (N,) or None -> (M, N). `tile` overrides the plan (tests, tuning)."""
    rows, k = x.shape
    n = weight.shape[0]
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    sms, descriptors = _device(x.device.index)
    descriptors = descriptors and _rows_aligned(x) and _rows_aligned(weight) and n * x.element_size() % 16 == 0
    tile = tile or plan.linear_tile(rows=rows, n=n, dtype=x.dtype, descriptors=descriptors, multiprocessors=sms)
    if not tile.tma:
        return _launch_pointer(x[None], weight[None], bias, y[None], tile)[0]
    programs = min(sms, triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n))
    linear_tma_kernel[(programs,)](
        _descriptor(x, tile.m, tile.k),
        _descriptor(weight, tile.n, tile.k),
        _descriptor(y, tile.m, tile.n),
        bias,
        rows,
        n,
        k,
        programs,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


def launch_bmm(x: torch.Tensor, y: torch.Tensor, tile: plan.Tile | None = None) -> torch.Tensor:
    """x (B, M, K), y (B, K, N), any strides -> (B, M, N)."""
    batch, rows, _ = x.shape
    out = torch.empty((batch, rows, y.shape[2]), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tile = tile or _pointer_tile(x, rows, n=y.shape[2])
    return _launch_pointer(x, y.transpose(1, 2), None, out, tile)


def _pointer_tile(x: torch.Tensor, rows: int, n: int) -> plan.Tile:
    return plan.linear_tile(
        rows=rows, n=n, dtype=x.dtype, descriptors=False, multiprocessors=_device(x.device.index)[0]
    )


def _launch_pointer(x, weight, bias, y, tile: plan.Tile) -> torch.Tensor:
    batch, rows, k = x.shape
    n = weight.shape[1]
    grid = (batch * triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n),)
    linear_kernel[grid](
        x,
        weight,
        bias,
        y,
        rows,
        n,
        k,
        *x.stride(),
        *weight.stride(),
        HAS_BIAS=bias is not None,
        SWAP=tile.swap,
        EVEN_K=k % tile.k == 0,
        COMPENSATED=_compensated(n, k, x.dtype, tile),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


def launch_grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, tile: plan.Tile | None = None
) -> torch.Tensor:
    """x (T, K) sorted by expert, weight (E, N, K), offsets (E,) int32 -> (T, N); rows past the last offset are 0."""
    rows, k = x.shape
    experts, n, _ = weight.shape
    y = torch.zeros((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0 or experts == 0:
        return y
    tile = tile or _pointer_tile(x, triton.cdiv(rows, experts), n)
    grid = ((triton.cdiv(rows, tile.m) + experts) * triton.cdiv(n, tile.n),)
    grouped_linear_kernel[grid](
        x,
        weight,
        offsets,
        y,
        experts,
        n,
        k,
        *x.stride(),
        *weight.stride(),
        EVEN_K=k % tile.k == 0,
        COMPENSATED=_compensated(n, k, x.dtype, tile),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y
