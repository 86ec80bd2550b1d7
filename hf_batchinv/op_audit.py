"""Watch a model run, and say of every operator whether its result may depend on the batch.

The table of `audit` reads what a model is; this one sees what it does. An operator is taken for harmless only if it is
known to be: one of our kernels, exact on integers, elementwise by PyTorch's own tag, or a move of values. Whatever is
left runs on a stock kernel, and one that is in no list (random numbers among them) is reported as unknown. Kernels that
are launched past PyTorch's dispatcher are not seen here; the table of modules refuses what brings them in.
"""

import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import hub, layers
from .intercept import _OPERATORS as REDUCTIONS
from .intercept import _is_refused as is_uncovered_reduction
from .testing import call_arguments

OURS, EXACT, STOCK, VARIES_ON_CPU, UNKNOWN = (
    "our kernel",
    "exact or elementwise",
    "stock kernel",
    "stock kernel, varies on a CPU",
    "unknown",
)

# These move, pick, compare or make values and add nothing up; PyTorch has no tag that says so.
_EXACT = frozenset(
    """
    _to_copy clone copy copy_ contiguous cat stack index select slice gather embedding take take_along_dim where flip
    roll full full_like zeros zeros_like ones ones_like arange linspace eye new_empty new_zeros new_ones new_full empty
    empty_like empty_strided fill fill_ zero_ scalar_tensor scalar_tensor_out _local_scalar_dense item lift_fresh
    lift_fresh_copy alias detach detach_ repeat repeat_interleave expand_copy constant_pad_nd index_select masked_fill
    masked_fill_ masked_select index_copy index_copy_ slice_scatter select_scatter index_fill index_fill_ tril triu
    _unsafe_view view_copy _reshape_alias resize_ set_ promote_types _assert_async equal is_nonzero nonzero isin unique
    unique_consecutive max min amax amin aminmax argmax argmin any all topk sort argsort kthvalue searchsorted bucketize
    max_pool2d_with_indices max_pool3d_with_indices pixel_shuffle pixel_unshuffle is_same_size
    _has_compatible_shallow_copy_type record_stream
    """.split()
)
# Elementwise by the tag; on a CPU their vector body and scalar tail round differently.
_VARY_ON_CPU = frozenset("silu sigmoid softplus gelu mish elu selu celu log_sigmoid_forward glu logit".split())
_VARY_ON_CPU_16_BIT = frozenset(["rsqrt"])


@dataclass(frozen=True)
class OpRow:
    """An operator and the module that called it: dotted name, stock class, how often, verdict, shapes of the first."""

    operator: str
    module: str
    kind: str
    count: int
    status: str
    shapes: tuple[tuple[int, ...], ...]


def harmless(status: str) -> bool:
    """Whether results of an operator with this verdict cannot depend on the batch."""
    return status in (OURS, EXACT)


def audit_operators(model: nn.Module, example_inputs: Any) -> tuple[OpRow, ...]:
    """Run the model once and return its operators by module, those that are not harmless first.

    example_inputs: keyword arguments as a mapping, positional ones as a tuple or list, or a single tensor.
    Raises TypeError for anything else; what the model raises comes through.
    """
    if (call := call_arguments(example_inputs)) is None:
        raise TypeError(
            "example_inputs must be a tensor, a mapping of keyword arguments or a tuple of positional ones, got "
            f"{type(example_inputs).__name__}"
        )
    args, kwargs = call
    names = {id(module): name for name, module in model.named_modules()}
    recorder, handles = _Recorder(), []
    try:
        for module in model.modules():
            enter = lambda mod, *_: recorder.stack.append(names[id(mod)])  # noqa: E731
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(lambda *_: recorder.leave(), always_call=True))
        with torch.no_grad(), recorder:
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    kinds = {name: layers.stock_class(module).__name__ for name, module in model.named_modules()}
    rows = [
        OpRow(operator, name, kinds[name], count, status, recorder.shapes[operator, name, status])
        for (operator, name, status), count in recorder.counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: harmless(row.status)))


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.stack: list[str] = []
        self.counts: Counter = Counter()
        self.shapes: dict[tuple, tuple] = {}
        self.ours = _our_namespaces()

    def leave(self) -> None:
        self.stack.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        status = self._status(func, tensors, args, kwargs)
        key = (func._schema.name.replace("::", "."), self.stack[-1] if self.stack else "", status)
        self.counts[key] += 1
        self.shapes.setdefault(key, tuple(tuple(tensor.shape) for tensor in tensors))
        return func(*args, **kwargs)

    def _status(self, func, tensors: list[torch.Tensor], args, kwargs) -> str:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in self.ours:
            return OURS
        if namespace not in ("aten", "prim", "prims"):
            return UNKNOWN
        floats = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        if base in REDUCTIONS or is_uncovered_reduction(base) or base in ("index_put", "scatter"):
            if base == "index_put" and not _accumulates(args, kwargs):
                return EXACT
            if base == "scatter" and "reduce" not in kwargs and len(args) < 5:
                return EXACT
            return STOCK if floats else EXACT
        if not floats or func.is_view or name in _EXACT or base in _EXACT:
            return EXACT
        if torch.Tag.pointwise in func.tags or base in _VARY_ON_CPU:
            on_cpu = any(tensor.device.type == "cpu" for tensor in floats)
            narrow = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in floats)
            if on_cpu and (base in _VARY_ON_CPU or (narrow and base in _VARY_ON_CPU_16_BIT)):
                return VARIES_ON_CPU
            return EXACT
        return UNKNOWN


def _accumulates(args, kwargs) -> bool:
    """index_put(self, indices, values, accumulate=False)"""
    return bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))


def _our_namespaces() -> set[str]:
    """The operator namespaces of the kernel packages that are loaded."""
    packages = [hub.load(name) for name in hub.FAMILIES]
    operators = [importlib.import_module(f"{package.__name__}._ops") for package in packages]
    return {module.add_op_namespace_prefix("x").partition("::")[0] for module in operators}
