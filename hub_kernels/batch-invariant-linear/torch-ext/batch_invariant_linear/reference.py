"""The order of reduction in plain PyTorch: short, slow, for reading and for comparison with a tolerance.

Within one chunk the hardware's order rules, so compare bits with the op itself, not with this.
"""

import torch

from .contract import LinearContract, bmm_contract, linear_contract


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, K), weight (N, K), bias (N,) -> (M, N): chunks of K from left to right in float32, one rounding."""
    n, k = weight.shape
    return _linear(x, weight, bias, linear_contract(n=n, k=k, dtype=x.dtype))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, order: LinearContract) -> torch.Tensor:
    k = weight.shape[1]
    y = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    lost = torch.zeros_like(y)  # what rounding took from y
    length = order.k_split or k
    for begin in range(0, k, length):
        split = torch.zeros_like(y)
        for start in range(begin, min(begin + length, k), order.k_chunk):
            chunk = slice(start, start + order.k_chunk)
            split = split + _product(x[:, chunk], weight[:, chunk], order.parts)
        term = split - lost
        total = y + term
        if order.k_split:
            lost = torch.where(split == 0, lost, ((total - y) - term).nan_to_num(nan=0.0))
        y = torch.where(split == 0, y, total)
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def _product(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """x (M, k) @ weight (N, k).T in float32: as it is, or as six products of three bfloat16 parts each."""
    if parts == 1:
        return x.float() @ weight.float().t()
    x1, x2, x3 = _three_parts(x)
    w1, w2, w3 = _three_parts(weight)
    small = x3 @ w1.t() + x1 @ w3.t() + x2 @ w2.t() + x2 @ w1.t() + x1 @ w2.t()
    return torch.where(small.isfinite(), small, 0.0) + x1 @ w1.t()


def _three_parts(x: torch.Tensor) -> list[torch.Tensor]:
    parts = []
    for _ in range(3):
        parts.append(x.bfloat16().float())
        x = torch.where(parts[-1] == x, 0.0, x - parts[-1])
    return parts


def bmm_reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x (B, M, K), y (B, K, N) -> (B, M, N): each item is a linear with weight y.T, in the order of a short K."""
    order = bmm_contract(dtype=x.dtype)
    return torch.stack([_linear(a, b.t(), None, order) for a, b in zip(x, y, strict=True)])


def grouped_linear_reference(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x (T, K), weight (E, N, K), offsets (E,) row ends -> (T, N): one linear per expert, zeros after the last."""
    y = x.new_zeros(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        y[start:end] = linear_reference(x[start:end], weight[expert])
        start = end
    return y
