"""The CPU path: torch operators only, chosen so that no element's bits depend on where it stands.

Sums halve the row by plain additions and end in a running sum, which goes from left to right by definition. All other
steps are operators that IEEE 754 rounds correctly (so a vector loop and its scalar tail agree) or exp, whose two forms
were seen to agree; rsqrt, sigmoid and silu were seen not to. Rows are handled in blocks that fit the cache.
"""

import torch

from .plan import cpu_rows

# Halving costs two operators a step, whatever the width; below this a running sum is cheaper.
RUNNING_SUM_COLUMNS = 64


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension (at least one element) of a float32 tensor, keeping it, in an order that it alone fixes.

    While the row is longer than 64, its second half is added to its first half (an odd last element to the first).
    """
    n = x.shape[-1]
    while n > RUNNING_SUM_COLUMNS:
        half = n // 2
        if n % 2 == 0:
            first, second = x.chunk(2, dim=-1)
            x = first + second
        else:
            last = x[..., 2 * half :]
            x = x[..., :half] + x[..., half : 2 * half]
            x[..., :1] += last
        n = half
    return x.cumsum(-1)[..., -1:]


def rms_norm(x, gate, weight, eps, group_size, weight_offset, gate_before, activation, rounding):
    """RMS norm of x (..., D) in groups of group_size; arguments as in the op, `rounding` a contract.Rounding."""
    out = torch.empty(x.shape, dtype=rounding.out, device=x.device)
    if not x.numel():
        return out
    groups = x.shape[-1] // group_size
    if weight is not None:
        weight = weight.reshape(groups, group_size)
        if weight_offset:
            weight = weight.to(rounding.weight) + weight_offset
    x_3d, out_3d = x.reshape(-1, groups, group_size), out.view(-1, groups, group_size)
    gate_3d = None if gate is None else gate.reshape(-1, groups, group_size)
    for start in range(0, x_3d.shape[0], step := cpu_rows(x.shape[-1])):
        block = slice(start, start + step)
        y = x_3d[block].float()
        if gate is not None and gate_before:
            y = y * _activate(gate_3d[block].float(), activation)
        factor = torch.sqrt(row_sum(y * y) / group_size + eps).reciprocal_()
        y = (y * factor.to(rounding.factor)).to(rounding.xhat)
        if weight is not None:
            y = y * weight
        if gate is not None and not gate_before:
            y = y.float() * _activate(gate_3d[block].float(), activation)
        out_3d[block] = y
    return out


def _activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "relu":
        return gate.relu()
    return (gate if activation == "silu" else 1.0) / torch.exp(-gate).add_(1.0)


def layer_norm(x, weight, bias, eps, columns, xhat, product, out_dtype):
    """Layer norm over the trailing `columns` elements of x; arguments as in the op."""
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if not x.numel():
        return out
    x_2d, out_2d = x.reshape(-1, columns), out.view(-1, columns)
    for start in range(0, x_2d.shape[0], step := cpu_rows(columns)):
        block = slice(start, start + step)
        y = x_2d[block].float()
        y = y - row_sum(y).div_(columns)
        factor = torch.sqrt(row_sum(y * y) / columns + eps).reciprocal_()
        y = y.mul_(factor).to(xhat)
        if weight is not None:
            y = (y * weight.reshape(columns)).to(product)
        if bias is not None:
            y = y + bias.reshape(columns)
        out_2d[block] = y
    return out


def softmax(x, log, out):
    """Softmax, or its logarithm, of the rows of x (rows, columns) into out (rows, columns)."""
    for start in range(0, x.shape[0], step := cpu_rows(x.shape[1])):
        block = slice(start, start + step)
        y = x[block].float()
        y = y - y.amax(-1, keepdim=True)
        if log:
            # One logarithm a row: float64 costs nothing and leaves no room for two forms of it to differ.
            out[block] = y.sub_(row_sum(torch.exp(y)).double().log_().float())
        else:
            y.exp_()
            out[block] = y.div_(row_sum(y))


def reduce(x, mean, out):
    """Sum or mean of the rows of x (rows, columns) into out (rows,)."""
    for start in range(0, x.shape[0], step := cpu_rows(x.shape[1])):
        block = slice(start, start + step)
        total = row_sum(x[block].float()).squeeze(-1)
        out[block] = total / x.shape[1] if mean else total
