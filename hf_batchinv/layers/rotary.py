"""Rotary embeddings that form position times frequency as a matrix product with one term per element.

The product is exact in float32, but a library may run it in TF32 for some shapes and not for others; a plain multiply
has no such choice, and the same bits as the float32 product.
"""

import torch
from torch.overrides import TorchFunctionMode

_PRODUCTS = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm)


class _MultiplySingleTerms(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _PRODUCTS:
            left, right = args
            assert left.shape[-1] == 1, f"expected a product with one term per element, got {tuple(left.shape)}"
            return left * right
        return func(*args, **(kwargs or {}))


def make_forward(stock: type, options: tuple):
    def forward(self, *args, **kwargs):
        """The stock forward, with `left @ right` as `left * right`."""
        with _MultiplySingleTerms():
            return stock.forward(self, *args, **kwargs)

    return forward
