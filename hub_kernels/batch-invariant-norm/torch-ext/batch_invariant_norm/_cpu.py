"""The CPU path: torch operators only, chosen so that no element's bits depend on where it stands.

Layer norm, softmax and the sum of squares are PyTorch's row kernels where a trial has shown that they hold
(`_cpu_rows`). Elsewhere, and for plain sums, the sums halve the row by plain additions and end in a running sum, which
goes from left to right by definition. All other steps are operators that IEEE 754 rounds correctly (so a vector loop
and its scalar tail agree) or exp, whose two forms were seen to agree; rsqrt, sigmoid and silu were seen not to. Rows
are handled in blocks that fit the cache.
"""

import torch
import torch.nn.functional as F

from . import _cpu_rows
from ._dispatch import plain_torch
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
    if not x.numel():
        return torch.empty(x.shape, dtype=rounding.out, device=x.device)
    with plain_torch():
        groups = x.shape[-1] // group_size
        if weight is not None:
            weight = weight.reshape(groups, group_size) if groups > 1 else weight
            if weight_offset:
                weight = weight.to(rounding.weight) + weight_offset
        x_3d = x.reshape(-1, groups, group_size)
        gate_3d = None if gate is None else gate.reshape(-1, groups, group_size)
        square_of_norm = _cpu_rows.holds("norm", group_size, torch.float32)

        def rows(block: slice) -> torch.Tensor:
            y = x_3d[block].float()
            if gate is not None and gate_before:
                y = y * _activate(gate_3d[block].float(), activation)
            total = _cpu_rows.norm(y).square_() if square_of_norm else row_sum(y * y)
            factor = total.div_(group_size).add_(eps).sqrt_().reciprocal_()
            y = (y * factor.to(rounding.factor)).to(rounding.xhat)
            if weight is not None:
                y = y * weight
            if gate is not None and not gate_before:
                y = y.float() * _activate(gate_3d[block].float(), activation)
            return y

        return _in_blocks(rows, len(x_3d), x.shape[-1], x.shape, rounding.out)


def _in_blocks(rows, count, columns, shape, dtype):
    """`rows(block)` for all of `count` rows, a block that fits the cache at a time, as one tensor of `shape`."""
    step = cpu_rows(columns)
    if count <= step:
        return rows(slice(None)).to(dtype).contiguous().view(shape)
    out = torch.empty(shape, dtype=dtype)
    out_2d = out.view(count, -1)
    for start in range(0, count, step):
        block = slice(start, start + step)
        out_2d[block] = rows(block).flatten(1)
    return out


def _activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "relu":
        return gate.relu()
    return (gate if activation == "silu" else 1.0) / torch.exp(-gate).add_(1.0)


def layer_norm(x, weight, bias, eps, columns, xhat, product, out_dtype):
    """Layer norm over the trailing `columns` elements of x; arguments as in the op."""
    if not x.numel():
        return torch.empty(x.shape, dtype=out_dtype, device=x.device)
    with plain_torch():
        x_2d = x.reshape(-1, columns)
        weight, bias = (None if each is None else each.reshape(columns) for each in (weight, bias))
        one_dtype = all(each is None or each.dtype == x.dtype for each in (weight, bias))
        if one_dtype and out_dtype == x.dtype and product == torch.float32 and _holds_layer_norm(columns, x.dtype):
            # Everything in float32 and one rounding: this is the stock kernel.
            return F.layer_norm(x_2d.contiguous(), (columns,), weight, bias, eps).view(x.shape)
        whole = _holds_layer_norm(columns, torch.float32)

        def rows(block: slice) -> torch.Tensor:
            y = x_2d[block].float()
            if whole:
                y = F.layer_norm(y.contiguous(), (columns,), None, None, eps).to(xhat)
            else:
                y = y - row_sum(y).div_(columns)
                factor = torch.sqrt(row_sum(y * y) / columns + eps).reciprocal_()
                y = y.mul_(factor).to(xhat)
            if weight is not None:
                y = (y * weight).to(product)
            if bias is not None:
                y = y + bias
            return y

        return _in_blocks(rows, len(x_2d), columns, x.shape, out_dtype)


def _holds_layer_norm(columns, dtype):
    return _cpu_rows.holds("layer_norm", columns, dtype)


def softmax(x, log, out):
    """Softmax, or its logarithm, of the rows of x (rows, columns) into out (rows, columns)."""
    with plain_torch():
        whole = _cpu_rows.holds("softmax", x.shape[1], torch.float32)
        stock = torch.log_softmax if log else torch.softmax
        if whole and x.dtype == out.dtype == torch.float32:
            stock(x.contiguous(), -1, out=out)
            return
        for start in range(0, x.shape[0], step := cpu_rows(x.shape[1])):
            block = slice(start, start + step)
            y = x[block].float()
            if whole:
                out[block] = stock(y.contiguous(), -1)
                continue
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
