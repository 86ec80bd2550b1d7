"""Find out which norm a module computes by asking it, not by its name.

A stand-in of the module's class with random weights runs on random rows on the CPU; the variant of the norm package
whose stock formula gives the same bits, for every combination of input and weight dtype, is what the class computes.
The stand-in has the module's own attributes and shapes but none of its tensors, so the module may be on any device,
meta included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from . import hub

# Mixed dtypes (x, weight) need not run in a class, but where they do they must agree, too.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAME = tuple((dtype, dtype) for dtype in _DTYPES)
_MIXED = tuple(pair for pair in product(_DTYPES, repeat=2) if pair not in _SAME)

# Tiny rows make eps count, large ones make roundings show.
_SCALES = (1e-6, 1e-3, 1.0, 30.0)
_ROWS_PER_SCALE = 3
_WEIGHTLESS_DIM = 96

# torch.nn.RMSNorm(eps=None) means the machine epsilon of float32, or in older releases that of the input's dtype.
EPS_OF_INPUT = "<dtype of the input>"
_DEFAULT_EPS = (torch.finfo(torch.float32).eps, EPS_OF_INPUT)

_PLAIN = (int, float, str, bool, tuple, list, torch.dtype, type(None))


@dataclass(frozen=True)
class Match:
    """layer: "rms_norm" or "layer_norm"; variant: its name in the norm package.

    weight_name and bias_name are the attributes that hold them, None where there is none; eps is what `eps_of` reads.
    """

    layer: str
    variant: str
    weight_name: str | None
    bias_name: str | None
    eps: str | float

    @property
    def options(self) -> tuple[str, str | None, str | None, str | float]:
        return self.variant, self.weight_name, self.bias_name, self.eps


def eps_of(module: nn.Module, eps: str | float, x: torch.Tensor) -> float:
    """Return the value that a Match's eps stands for: an attribute's name, EPS_OF_INPUT, or the value itself."""
    if isinstance(eps, float):
        return eps
    return torch.finfo(x.dtype).eps if eps == EPS_OF_INPUT else getattr(module, eps)


@dataclass(frozen=True)
class _Candidate:
    match: Match
    stock: Callable[..., torch.Tensor]
    options: dict[str, bool | float]


def recognise(module: nn.Module) -> Match | str:
    """Return the Match of a stock norm module, or the reason why there is none, as the end of a sentence.

    Only shapes and plain attributes of the module are read, and the answer for equal ones is kept; random numbers come
    from a generator of this function's own.
    """
    shapes = tuple((name, parameter.shape) for name, parameter in module._parameters.items() if parameter is not None)
    key = (type(module), shapes, repr(sorted(_plain_attributes(module).items(), key=lambda item: item[0])))
    if key not in _recognised:
        _recognised[key] = _recognise(module)
    return _recognised[key]


_recognised: dict[tuple, Match | str] = {}


def _recognise(module: nn.Module) -> Match | str:
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    shapes = {tuple(parameter.shape) for parameter in parameters.values()}
    if len(parameters) > 2 or len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        return "has parameters other than one weight and one bias of one dimension"
    bias_name = next((name for name in parameters if "bias" in name or "beta" in name), None)
    weight_name = next((name for name in parameters if name != bias_name), None)
    dim = shapes.pop()[0] if shapes else _WEIGHTLESS_DIM

    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor(_SCALES).repeat_interleave(_ROWS_PER_SCALE).reshape(2, -1, 1)
    candidates = list(_candidates(module, weight_name, bias_name))
    for x_dtype, weight_dtype in (*_SAME, *_MIXED):
        x = (torch.randn(*scales.shape[:-1], dim, generator=generator) * scales).to(x_dtype)
        values = {name: (torch.randn(dim, generator=generator) * 0.3 + 0.8).to(weight_dtype) for name in parameters}
        try:
            with torch.no_grad():
                expected = _stand_in(module, values)(x)
        except Exception as error:  # any code may stand in a stock forward; what it says goes into the reason
            if x_dtype != weight_dtype:
                continue
            return f"does not run on a random {x_dtype} tensor ({type(error).__name__}: {error})"
        if not isinstance(expected, torch.Tensor):
            return f"returns {type(expected).__name__} instead of one tensor"
        candidates = [c for c in candidates if _agrees(c, module, x, values, expected)]
    if not candidates:
        return "computes no norm formula that is known here"
    first = candidates[0]
    if any(c.options != first.options or c.match.eps != first.match.eps for c in candidates):
        return f"fits several norm formulas ({', '.join(c.match.variant for c in candidates)})"
    return first.match


def _candidates(module: nn.Module, weight_name: str | None, bias_name: str | None):
    norm = hub.load("norm")
    attributes = _plain_attributes(module)
    sources = [name for name, value in attributes.items() if isinstance(value, float)]
    if attributes.get("eps", 0.0) is None:
        sources.extend(_DEFAULT_EPS)
    for eps in sources:
        for variant in norm.variants():
            if bias_name is None and variant.weighted == (weight_name is not None):
                match = Match("rms_norm", variant.name, weight_name, None, eps)
                yield _Candidate(match, variant.stock, variant.options)
        for variant in norm.layer_norm_variants():
            match = Match("layer_norm", variant.name, weight_name, bias_name, eps)
            yield _Candidate(match, variant.stock, variant.options)


def _agrees(candidate: _Candidate, module: nn.Module, x, values: dict, expected: torch.Tensor) -> bool:
    match = candidate.match
    eps = eps_of(module, match.eps, x)
    tensors = [values.get(match.weight_name)] + ([values.get(match.bias_name)] if match.layer == "layer_norm" else [])
    try:
        y = candidate.stock(x, *tensors, eps)
    except RuntimeError:  # torch's own layer norm on dtypes that it does not mix: then it is not this formula
        return False
    return y.dtype == expected.dtype and y.shape == expected.shape and torch.equal(y, expected)


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    """Return what the class put on the module besides tensors: eps and the like, not torch's own bookkeeping."""
    own = vars(nn.Module())
    return {name: value for name, value in vars(module).items() if name not in own and isinstance(value, _PLAIN)}


def _stand_in(module: nn.Module, values: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], object]:
    """Return the forward of a new object of the module's class with its plain attributes and the given parameters."""
    cls = type(module)
    stand_in = cls.__new__(cls)
    nn.Module.__init__(stand_in)
    for name, value in _plain_attributes(module).items():
        setattr(stand_in, name, value)
    stand_in.training = False
    for name in module._parameters:
        stand_in.register_parameter(name, None)
    for name, value in values.items():
        setattr(stand_in, name, nn.Parameter(value, requires_grad=False))
    return lambda x: cls.forward(stand_in, x)
