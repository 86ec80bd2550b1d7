"""Activations whose CPU kernels round differently in the vector body and in the scalar tail of a thread's share.

Which elements of a row stand in a tail depends on the rows around it. On the CPU these layers use formulas of exp,
tanh, erf, log1p and plain arithmetic, which have no such tail, computed in float32 and rounded once. Other devices run
the stock forward, elementwise there.
"""

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import activations

# exp(-x) stays finite above this, so the gradient of 1 / (1 + exp(-x)) is never inf * 0.
_LOWEST = -87.0


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x.clamp(min=_LOWEST)))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x.clamp(min=_LOWEST)))


def softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(1.702 * x)


def mish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tanh(softplus(x))


def sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(softplus(x))


FORMULAS = {f.__name__: f for f in (sigmoid, silu, softplus, gelu, gelu_tanh, quick_gelu, mish, sqrt_softplus)}

_BY_TYPE = {
    nn.Sigmoid: "sigmoid",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    activations.SiLUActivation: "silu",
    activations.QuickGELUActivation: "quick_gelu",
    activations.MishActivation: "mish",
}
if hasattr(activations, "SqrtSoftplusActivation"):  # since transformers 5.18
    _BY_TYPE[activations.SqrtSoftplusActivation] = "sqrt_softplus"


def formula_of(module: nn.Module) -> str | None:
    """Return the name in FORMULAS of what the module computes, or None if it is no activation that needs one."""
    kind = type(module)
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    if kind is nn.Softplus and module.beta == 1 and module.threshold == 20:
        return "softplus"
    if kind is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    # The Python spellings of these two are made of ops without a tail; they keep the stock forward.
    if kind is activations.GELUActivation and module.act is F.gelu:
        return "gelu"
    if kind is activations.GELUTanh and getattr(module.act, "func", None) is F.gelu:
        return "gelu_tanh"
    return None


@functools.cache
def is_silu(kind: type) -> bool:
    """Whether modules of a class, stock or converted, compute silu."""
    origin = getattr(kind, "batch_invariant_origin", None)
    return _BY_TYPE.get(kind if origin is None else origin.stock_class) == "silu"


def make_forward(stock: type, options: tuple):
    """options: (name in FORMULAS,)."""
    formula = FORMULAS[options[0]]

    def forward(self, input):
        """input of any shape -> same shape and dtype."""
        if input.device.type == "cpu":
            return formula(input.float()).to(input.dtype)
        return stock.forward(self, input)

    return forward
