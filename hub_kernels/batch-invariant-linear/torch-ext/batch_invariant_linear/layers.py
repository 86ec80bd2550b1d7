"""Layers for `kernels.kernelize`: forward only, parameters come from the module whose forward they replace."""

import torch
from torch import nn

from .linear import linear


class Linear(nn.Module):
    """`torch.nn.Linear`: weight (N, K), bias (N,) or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class Conv1D(nn.Module):
    """GPT-2's linear with the weight stored as (K, N): y = x @ weight + bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight.t(), self.bias)
