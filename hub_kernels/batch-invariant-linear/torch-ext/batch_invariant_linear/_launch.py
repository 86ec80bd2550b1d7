"""Launch the Triton kernels: look the tile up, size the grid, nothing else. Imported at the first GPU call."""

import functools
from collections.abc import Callable

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from . import _cublaslt, contract, plan, selfcheck
from ._grouped_linear_kernel import grouped_linear_kernel, grouped_linear_tma_kernel
from ._linear_kernel import combine_kernel, linear_kernel, linear_tma_kernel
from ._relaunch import Launch

COMBINE_BLOCK = 64  # outputs that a program of the combining kernel adds up


@functools.cache
def gpu_of(device: torch.device) -> plan.Gpu:
    """What the plan needs to know of a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return plan.Gpu(capability=(0, 0), multiprocessors=4)
    properties = torch.cuda.get_device_properties(device)
    return plan.Gpu(
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,  # order-free: it sizes a persistent grid of whole tiles
        shared_kib=getattr(properties, "shared_memory_per_block_optin", 99 * 1024) // 1024,
    )


def _choose_tile(x: torch.Tensor, rows: int, n: int, k: int, descriptors: bool) -> plan.Tile:
    if not selfcheck.tiles_agree(x.dtype, x.device):
        return plan.only_tile(k, x.dtype)
    return plan.linear_tile(rows=rows, n=n, k=k, dtype=x.dtype, descriptors=descriptors, gpu=gpu_of(x.device))


def _order(order: contract.LinearContract, k: int, tile: plan.Tile, gpu: plan.Gpu) -> dict:
    """What a contract tells the kernels."""
    assert not order.k_split or (tile.k == order.k_chunk and not tile.tma), (order, tile)
    return dict(
        SPLIT_K=order.k_split or 0,
        PARTS=order.parts,
        FLOAT_PARTS=gpu.capability < (8, 0),
        EVEN_K=k % tile.k == 0,
    )


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


def _describable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the GPU and the operands allow tensor descriptors."""
    return (
        gpu_of(x.device).descriptors
        and _rows_aligned(x)
        and _rows_aligned(weight)
        and weight.shape[0] * x.element_size() % 16 == 0
    )


def serves(tile: plan.Tile, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the GPU and the operands allow a tile."""
    return not tile.tma or _describable(x, weight)


def _second_engine(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[_cublaslt.Product | None, bool]:
    """cuBLASLt's product where it may serve, else None. Where it may, it was never slower than our tiles by much.

    And whether that is so for good: not where a capture put the self-check off.
    """
    if x.device.type != "cuda" or x.dtype == torch.float32 or plan.engine() != "auto":
        return None, True
    if plan.prefers_triton(rows=x.shape[0], n=weight.shape[0], k=x.shape[1], gpu=gpu_of(x.device)):
        return None, True
    product = _cublaslt.product(x, weight, bias)
    if product is None:
        return None, True
    admitted = selfcheck.admits(product, x, weight, bias)
    return (product if admitted else None), product.admitted is not None


def engine_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str:
    """Which engine serves this call, "cublaslt" or "triton"."""
    x = x.reshape(-1, x.shape[-1])
    return "triton" if x.shape[0] == 0 or _second_engine(x, weight, bias)[0] is None else "cublaslt"


def linear_call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Callable, bool]:
    """The function of (x, weight, bias) that `linear` comes to, for all operands of these shapes, strides, dtypes,
    device and alignment; and whether it may be kept, which it may not where a capture put a self-check off.

    x (..., K), weight (N, K), bias (N,) or None -> (..., N).
    """
    k, n = x.shape[-1], weight.shape[0]
    shape = (*x.shape[:-1], n)
    flat = x if x.dim() == 2 else x.reshape(-1, k)
    copies = flat.data_ptr() != x.data_ptr()  # else only the address counts, and x will do
    if flat.shape[0] == 0:
        return lambda x, weight, bias: x.new_empty(shape), True
    spread = bias is not None and not bias.is_contiguous()
    bias = bias.contiguous() if spread else bias
    product, lasting = _second_engine(flat, weight, bias)
    launch = product or _triton_linear(flat, weight, bias)

    def call(x, weight, bias):
        y = x.new_empty(shape)
        launch(x.reshape(-1, k) if copies else x, weight, bias.contiguous() if spread else bias, y)
        return y

    return call, lasting


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: plan.Tile | None = None,
    apart: bool | None = None,
) -> torch.Tensor:
    """x (M, K), weight (N, K), any strides, bias (N,) or None -> (M, N).

    `tile` overrides the plan (tests, tuning) and keeps to Triton; so does `apart`, whether programs take single splits
    of K.
    """
    if tile is None and apart is None:
        return linear_call(x, weight, bias)[0](x, weight, bias)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    if x.shape[0] > 0:
        bias = None if bias is None else bias.contiguous()
        _triton_linear(x, weight, bias, tile, apart)(x, weight, bias, y)
    return y


def _triton_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: plan.Tile | None = None,
    apart: bool | None = None,
) -> Callable:
    """The function of (x, weight, bias, y) that our kernels serve operands like these with; arguments as above."""
    (rows, k), n, has_bias = x.shape, weight.shape[0], bias is not None
    tile = tile or _choose_tile(x, rows, n, k, _describable(x, weight))
    if not tile.tma:
        order = contract.linear_contract(n=n, k=k, dtype=x.dtype)
        return _pointer_launch(x[None], weight[None], has_bias, order, tile, apart)
    programs = min(gpu_of(x.device).multiprocessors, triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n))
    launch = Launch(
        linear_tma_kernel,
        (programs,),
        (rows, n, k, programs),
        HAS_BIAS=has_bias,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )

    def call(x, weight, bias, y):
        x, y = x.reshape(rows, k), y.view(rows, n)
        operands = _descriptor(x, tile.m, tile.k), _descriptor(weight, tile.n, tile.k), _descriptor(y, tile.m, tile.n)
        launch(*operands, bias)

    return call


def launch_bmm(x: torch.Tensor, y: torch.Tensor, tile: plan.Tile | None = None) -> torch.Tensor:
    """x (B, M, K), y (B, K, N), any strides -> (B, M, N)."""
    batch, rows, _ = x.shape
    out = torch.empty((batch, rows, y.shape[2]), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tile = tile or _choose_tile(x, rows, y.shape[2], contract.SHORT_K, descriptors=False)
    y = y.transpose(1, 2)
    _pointer_launch(x, y, False, contract.bmm_contract(dtype=x.dtype), tile)(x, y, None, out)
    return out


def _pointer_launch(
    x, weight, has_bias: bool, order: contract.LinearContract, tile: plan.Tile, apart: bool | None = None
) -> Callable:
    """The function of (x, weight, bias, y) for x (B, M, K) and weight (B, N, K) like these."""
    (batch, rows, k), n = x.shape, weight.shape[1]
    programs = batch * triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n)
    splits = order.splits(k)
    if apart is None:
        apart = plan.splits_apart(rows=rows, programs=programs, splits=splits, gpu=gpu_of(x.device))
    apart = apart and splits > 1
    launch = Launch(
        linear_kernel,
        (programs, splits if apart else 1),
        (rows, n, k, *x.stride(), *weight.stride()),
        HAS_BIAS=has_bias and not apart,
        SWAP=tile.swap,
        APART=apart,
        **_order(order, k, tile, gpu_of(x.device)),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if not apart:
        return launch
    outputs = batch * rows * n
    grid = (triton.cdiv(outputs, COMBINE_BLOCK),)
    combine = Launch(combine_kernel, grid, (outputs, splits, n), HAS_BIAS=has_bias, BLOCK=COMBINE_BLOCK, num_warps=1)

    def call(x, weight, bias, y):
        parts = torch.empty((splits, outputs), dtype=torch.float32, device=y.device)
        launch(x, weight, None, parts)
        combine(parts, bias, y)

    return call


def launch_grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, tile: plan.Tile | None = None
) -> torch.Tensor:
    """x (T, K) sorted by expert, weight (E, N, K), offsets (E,) int32 -> (T, N); rows past the last offset are 0."""
    rows, k = x.shape
    experts, n, _ = weight.shape
    if rows == 0 or experts == 0:
        return x.new_zeros(rows, n)
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    tma = x.dtype != torch.float32 and weight.is_contiguous() and _describable(x, weight[0])
    if tile is None:
        tile = plan.only_tile(k, x.dtype)
        if selfcheck.tiles_agree(x.dtype, x.device):
            call = dict(rows=rows, experts=experts, n=n, k=k, dtype=x.dtype, gpu=gpu_of(x.device))
            tile = plan.grouped_tile(**call, descriptors=tma)
    sizes = dict(
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        BLOCK_E=triton.next_power_of_2(experts + 1),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    tiles_n = triton.cdiv(n, tile.n)
    most_tiles = (rows // tile.m + min(experts, rows) + 1) * tiles_n
    if tile.tma:
        programs = min(gpu_of(x.device).multiprocessors, most_tiles)
        operands = _descriptor(x, tile.m, tile.k), _descriptor(weight.view(-1, k), tile.n, tile.k)
        grouped_linear_tma_kernel[(programs,)](*operands, offsets, y, experts, rows, n, k, programs, **sizes)
        return y
    grouped_linear_kernel[(most_tiles,)](
        x,
        weight,
        offsets,
        y,
        experts,
        rows,
        n,
        k,
        *x.stride(),
        *weight.stride(),
        SWAP=tile.swap,
        **_order(contract.linear_contract(n=n, k=k, dtype=x.dtype), k, tile, gpu_of(x.device)),
        **sizes,
    )
    return y
