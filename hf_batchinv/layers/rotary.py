"""Attention modules whose forward calls `apply_rotary_pos_emb(q, k, cos, sin)` of their file: on a GPU in one launch.

The converted forward is the stock one with another function under that name. Several models have functions of this
name that compute something else (interleaved, partial, multimodal ones), so the function is asked: it must give the
bits of the plain formula.
"""

import functools
import inspect
import types
from collections.abc import Callable

import torch
from torch import nn

from .. import hub
from .fused import runs_fused

NAME = "apply_rotary_pos_emb"
_PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")


def recognises(cls: type) -> bool:
    """Whether the forward of a module class can be given another rotary function, and the one it has is plain."""
    forward = inspect.getattr_static(cls, "forward")
    innermost = inspect.unwrap(forward)
    if with_global(forward, NAME, None) is None:
        return False
    return computes_plain_formula(innermost.__globals__[NAME])


def with_global(function: object, name: str, value: object) -> types.FunctionType | None:
    """Return a function that is another one with a global variable replaced, under the same decorators.

    None if the function does not use the global, or if a decorator keeps it in another way than functools.wraps does:
    as its `__wrapped__` and in one cell of its closure.
    """
    if not isinstance(function, types.FunctionType):
        return None
    wrapped = vars(function).get("__wrapped__")
    variables, closure = function.__globals__, function.__closure__
    if wrapped is None:
        if name not in function.__code__.co_names or name not in variables:
            return None
        variables = {**variables, name: value}
    else:
        inner = with_global(wrapped, name, value)
        holders = [cell for cell in closure or () if _content(cell) is wrapped]
        if inner is None or len(holders) != 1:
            return None
        closure = tuple(types.CellType(inner) if cell is holders[0] else cell for cell in closure)
    twin = types.FunctionType(function.__code__, variables, function.__name__, function.__defaults__, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(twin, function)
    del twin.__wrapped__
    if wrapped is not None:
        twin.__wrapped__ = inner
    return twin


def names_in(code: types.CodeType) -> set[str]:
    """Return the names that a function reads from outside, those of functions inside of it included."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put in yet
        return None


@functools.cache
def computes_plain_formula(function: Callable) -> bool:
    """Whether a rotary function rotates the halves of all dimensions and rounds where the torch operators round.

    It is run on small tensors on the CPU, in float32 and bfloat16, and must give the formula's bits. The `kernels`
    library wraps such functions in a module each; one that it has replaced is not asked.
    """
    if isinstance(function, nn.Module):
        if "forward" in vars(function):
            return False
        parameters = inspect.signature(function.forward).parameters
    elif isinstance(function, types.FunctionType):
        parameters = inspect.signature(function).parameters
    else:
        return False
    if tuple(parameters) != _PARAMETERS or parameters["unsqueeze_dim"].default != 1:
        return False
    reference = hub.load("elementwise").rotary
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 2):
            shapes = (2, 4, 3, 16), (2, 2, 3, 16), (rows, 3, 16), (rows, 3, 16)
            tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
            with torch.no_grad():
                expected = reference(*tensors)
                try:
                    found = function(*tensors)
                except (RuntimeError, TypeError, ValueError):  # it wants other shapes, as that of GPT-OSS does
                    return False
            if not isinstance(found, tuple) or len(found) != 2:
                return False
            if any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                return False
    return True


def make_forward(stock: type, options: tuple):
    elementwise = hub.load("elementwise")
    rotary, can_rotate = elementwise.rotary, elementwise.can_rotate
    original = stock.forward
    variables = inspect.unwrap(original).__globals__
    plain = variables[NAME]

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        function = variables[NAME]  # somebody may have put another one there since
        if unsqueeze_dim == 1 and function is plain and runs_fused(q, k, cos, sin) and can_rotate(q, k, cos, sin):
            return rotary(q, k, cos, sin)
        return function(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    twin = with_global(original, NAME, apply_rotary_pos_emb)
    twin_variables = inspect.unwrap(twin).__globals__
    others = [name for name in names_in(inspect.unwrap(original).__code__) if name in variables and name != NAME]

    def forward(self, *args, **kwargs):
        """What the stock forward takes and returns."""
        if stock.forward is not original or torch.compiler.is_compiling():
            return stock.forward(self, *args, **kwargs)
        for name in others:  # somebody may have patched the file
            twin_variables[name] = variables[name]
        return twin(self, *args, **kwargs)

    return forward
