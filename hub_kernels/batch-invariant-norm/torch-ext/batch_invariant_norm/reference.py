"""What the GPU kernels compute and in which order, in plain torch; the rounding steps are those of the kernels.

Within one tile `tl.sum` adds in a tree that follows from the tile's width and its number of warps (contract.py). Here
the sum of the CPU path stands for it: results agree with the kernels' to a few units in the last place, not in bits.
"""

import torch

from ._cpu import row_sum as tile_sum
from .contract import CHUNK_COLUMNS, Rounding, is_single_pass


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension of float32 x, keeping it: in one tile, or chunk by chunk and then over the chunks."""
    columns = x.shape[-1]
    if is_single_pass(columns):
        return tile_sum(x)
    return row_sum(torch.cat([tile_sum(chunk) for chunk in x.split(CHUNK_COLUMNS, dim=-1)], dim=-1))


def _round(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).float()


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of a gate in float32."""
    gate = gate.float()
    return {"silu": lambda: gate * torch.sigmoid(gate), "sigmoid": gate.sigmoid, "relu": gate.relu}[activation]()


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rounding: Rounding,
    weight_offset: float = 0.0,
    gate: torch.Tensor | None = None,
    gate_before: bool = False,
    activation: str = "silu",
) -> torch.Tensor:
    """RMS norm of x (rows, columns) with weight (columns,) and gate (rows, columns)."""
    y = x.float()
    if gate is not None and gate_before:
        y = y * activate(gate, activation)
    mean_square = row_sum(y * y) / y.shape[-1]
    y = _round(y * _round(1.0 / torch.sqrt(mean_square + eps), rounding.factor), rounding.xhat)
    if weight is not None:
        product = torch.promote_types(rounding.xhat, weight.dtype)
        weight = weight.float()
        if weight_offset:
            weight = _round(weight + weight_offset, rounding.weight)
        y = _round(y * weight, product)
    if gate is not None and not gate_before:
        y = y * activate(gate, activation)
    return y.to(rounding.out)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Layer norm of x (rows, columns), rounded once; rows in chunks merge the chunks' means and squares."""
    y = x.float()
    columns = y.shape[-1]
    chunks = y.split(columns if is_single_pass(columns) else CHUNK_COLUMNS, dim=-1)
    means = [tile_sum(chunk) / chunk.shape[-1] for chunk in chunks]
    squares = [tile_sum((chunk - mean) ** 2) for chunk, mean in zip(chunks, means, strict=True)]
    mean = tile_sum(torch.cat([m * chunk.shape[-1] for m, chunk in zip(means, chunks, strict=True)], -1)) / columns
    shifted = [s + c.shape[-1] * (m - mean) ** 2 for s, m, c in zip(squares, means, chunks, strict=True)]
    y = (y - mean) * (1.0 / torch.sqrt(tile_sum(torch.cat(shifted, -1)) / columns + eps))
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def softmax(x: torch.Tensor, log: bool) -> torch.Tensor:
    """Softmax, or its logarithm, of x (rows, columns); chunks sum relative to their own maximum."""
    y = x.float()
    columns = y.shape[-1]
    chunks = y.split(columns if is_single_pass(columns) else CHUNK_COLUMNS, dim=-1)
    maxima = [chunk.amax(-1, keepdim=True) for chunk in chunks]
    maximum = torch.cat(maxima, -1).amax(-1, keepdim=True)
    sums = [
        tile_sum(torch.exp(chunk - torch.where(m == -torch.inf, 0.0, m))) * torch.exp(m - maximum)
        for chunk, m in zip(chunks, maxima, strict=True)
    ]
    total = tile_sum(torch.cat(sums, -1))
    y = y - maximum
    return (y - total.log() if log else torch.exp(y) / total).to(x.dtype)
