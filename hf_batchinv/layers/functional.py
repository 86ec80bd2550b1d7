"""Modules that keep their stock forward, with a few calls in it done in another way.

* Rotary embeddings of older releases form position times frequency as a matrix product with one term per element. It is
  exact in float32, but a library may run it in TF32 for some shapes and not for others; a multiply has no such choice.
* `silu`, `sigmoid` and the like, and `dropout`, as functions: the same as the modules of `layers.activation` and
  `layers.dropout`.
"""

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from . import activation, dropout

_PRODUCTS = frozenset([torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm])


def _gelu(x, approximate="none"):
    return (activation.gelu_tanh if approximate == "tanh" else activation.gelu)(x)


def _softplus(x, beta=1, threshold=20):
    return activation.softplus(x * beta) / beta


def _dropout(input, p=0.5, training=True, inplace=False):
    return dropout.identity(input, p, training)


_ACTIVATIONS = {
    F.silu: lambda x, inplace=False: activation.silu(x),
    F.mish: lambda x, inplace=False: activation.mish(x),
    F.gelu: _gelu,
    F.softplus: _softplus,
    F.sigmoid: activation.sigmoid,
    torch.sigmoid: activation.sigmoid,
    torch.Tensor.sigmoid: activation.sigmoid,
}


class _BatchInvariantCalls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _PRODUCTS and args[0].shape[-1] == 1:
            left, right = args
            return left * right
        if func in _ACTIVATIONS:
            x, *rest = args if args else (kwargs.pop("input"),)
            if x.device.type == "cpu":
                return _ACTIVATIONS[func](x.float(), *rest, **kwargs).to(x.dtype)
            return func(x, *rest, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def make_forward(stock: type, options: tuple):
    def forward(self, *args, **kwargs):
        """What the stock forward takes and returns."""
        with _BatchInvariantCalls():
            return stock.forward(self, *args, **kwargs)

    return forward
