"""MLPs that compute down_proj(act_fn(gate_proj(x)) * up_proj(x)) with a SiLU: on a GPU the inner step is one launch.

The class is recognised by its source, which must be this one expression.
"""

import ast
import functools

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .. import hub
from ..source_scan import parsed_forward
from .activation import is_silu
from .fused import runs_fused

_FORMULA = "self.down_proj(self.act_fn(self.gate_proj({x})) * self.up_proj({x}))"
_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def recognises(module: nn.Module) -> bool:
    """Whether a module is such an MLP."""
    parts = [module._modules.get(name) for name in _PARTS]
    if None in parts or not is_silu(type(parts[-1])):
        return False
    return _is_formula(parsed_forward(type(module)))


def _is_formula(tree: ast.AST | None) -> bool:
    """One argument, and no statement but `return <formula>` or `name = <formula>; return name`."""
    if tree is None or not isinstance(function := tree.body[0], ast.FunctionDef):
        return False
    arguments, body = function.args, function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    names = [argument.arg for argument in arguments.args]
    if len(names) != 2 or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or function.decorator_list:
        return False
    formula = _FORMULA.format(x=names[1])
    written = [ast.unparse(statement) for statement in body]
    if written == [f"return {formula}"]:
        return True
    if len(body) != 2 or not isinstance(body[0], ast.Assign):
        return False
    name = ast.unparse(body[0].targets[0])
    return name.isidentifier() and written == [f"{name} = {formula}", f"return {name}"]


def make_forward(stock: type, options: tuple):
    """options: ("silu",)."""
    (activation,) = options
    elementwise = hub.load("elementwise")
    gated = functools.partial(elementwise.gated, activation=activation)
    can_gate, original = elementwise.can_gate, stock.forward

    def forward(self, *args, **kwargs):
        """x (..., D) -> (..., D)"""
        act_fn = self._modules.get("act_fn")
        plain = len(args) == 1 and not kwargs and runs_fused(*args)  # first, since it is False while torch compiles
        if not plain or stock.forward is not original or not _is_plain_silu(act_fn):
            return stock.forward(self, *args, **kwargs)
        (x,) = args
        gate, up = self.gate_proj(x), self.up_proj(x)
        fused = runs_fused(gate, up) and can_gate(gate, up)
        return self.down_proj(gated(gate, up) if fused else act_fn(gate) * up)

    return forward


def _is_plain_silu(module: nn.Module | None) -> bool:
    """Whether nobody put another activation in, or wants to see this one called."""
    if module is None or _has_any_global_hook():
        return False
    watched = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not watched and is_silu(type(module))
