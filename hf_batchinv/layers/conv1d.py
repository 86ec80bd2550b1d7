"""transformers' Conv1D (GPT-2), a linear layer whose weight is stored (K, N)."""

import torch

from .. import hub
from ..compilation import check_compiler


def make_forward(stock: type, options: tuple):
    conv1d = hub.load("linear").layers.Conv1D.forward

    def forward(self, x):
        """x (..., K), self.weight (K, N), self.bias (N,) -> (..., N), in the dtype of x."""
        if torch.compiler.is_compiling():
            check_compiler()
        return conv1d(self, x)

    return forward
