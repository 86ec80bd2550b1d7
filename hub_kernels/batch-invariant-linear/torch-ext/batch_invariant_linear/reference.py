"""The order of reduction in plain PyTorch: short, slow, for reading and for comparison with a tolerance.

Within one chunk the hardware's order rules, so compare bits with the op itself, not with this.
"""

import torch

from .contract import linear_contract


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, K), weight (N, K), bias (N,) -> (M, N): chunks of K from left to right in float32, one rounding."""
    n, k = weight.shape
    order = linear_contract(n=n, k=k, dtype=x.dtype)
    y = torch.zeros(x.shape[0], n, dtype=torch.float32, device=x.device)
    lost = torch.zeros_like(y)  # what rounding took from y
    for start in range(0, k, order.k_chunk):
        part = slice(start, start + order.k_chunk)
        chunk = x[:, part].float() @ weight[:, part].float().t()
        term = chunk - lost
        total = y + term
        if order.compensated:
            lost = torch.where(chunk == 0, lost, ((total - y) - term).nan_to_num(nan=0.0))
        y = torch.where(chunk == 0, y, total)
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def bmm_reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x (B, M, K), y (B, K, N) -> (B, M, N): each item is a linear with weight y.T."""
    return torch.stack([linear_reference(a, b.t()) for a, b in zip(x, y, strict=True)])


def grouped_linear_reference(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x (T, K), weight (E, N, K), offsets (E,) row ends -> (T, N): one linear per expert, zeros after the last."""
    y = x.new_zeros(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        y[start:end] = linear_reference(x[start:end], weight[expert])
        start = end
    return y
