"""Layers that a converted model's modules become.

A converted module is the same object with another class: a subclass of its stock class, made here on demand, that has
another `forward` and nothing else. So parameters, buffers, hooks, `isinstance`, `state_dict` and device placement stay,
weights are read at call time (offloading), and putting the class back undoes it all.
"""

import threading
import types
from dataclasses import dataclass

import torch

from . import activation, conv1d, dropout, functional, gated_mlp, layer_norm, linear, rms_norm, rotary

# name -> function(stock class, options) that returns the forward of the converted class
FORWARDS = {
    "linear": linear.make_forward,
    "conv1d": conv1d.make_forward,
    "rms_norm": rms_norm.make_forward,
    "layer_norm": layer_norm.make_forward,
    "activation": activation.make_forward,
    "dropout": dropout.make_forward,
    "functional": functional.make_forward,
    "rotary": rotary.make_forward,
    "gated_mlp": gated_mlp.make_forward,
}


@dataclass(frozen=True)
class Origin:
    """What a converted class was made from: its stock class, a key of FORWARDS, and that layer's options."""

    stock_class: type
    layer: str
    options: tuple


_classes: dict[tuple, type] = {}
_lock = threading.Lock()


def batch_invariant_class(stock: type, layer: str, options: tuple = ()) -> type:
    """Return the batch-invariant subclass of a module class, always the same object for the same arguments.

    layer: a key of FORWARDS; options: hashable and picklable, read by that layer's `make_forward`.
    """
    key = (stock, layer, options)
    with _lock:
        if key not in _classes:
            forward = FORWARDS[layer](stock, options)
            name = f"BatchInvariant{stock.__name__}"
            forward.__qualname__ = f"{name}.forward"
            namespace = {
                "__module__": stock.__module__,
                "__doc__": stock.__doc__,
                "forward": forward,
                "__reduce_ex__": _reduce_ex,
                "batch_invariant_origin": Origin(stock, layer, options),
            }
            # One base only: with a mixin, Python would not let an instance change between the two classes.
            _classes[key] = types.new_class(name, (stock,), {}, lambda ns: ns.update(namespace))
        return _classes[key]


def _reduce_ex(self, protocol):
    # The class is made at run time, so pickle and deepcopy are told how to make it again.
    origin = origin_of(self)
    _, _, *rest = origin.stock_class.__reduce_ex__(self, max(protocol, 2))
    return (rebuild, (origin.stock_class, origin.layer, origin.options), *rest)


def rebuild(stock: type, layer: str, options: tuple) -> torch.nn.Module:
    """Return an empty module of a batch-invariant class, for pickle and deepcopy to fill."""
    cls = batch_invariant_class(stock, layer, options)
    return cls.__new__(cls)


def origin_of(module: torch.nn.Module) -> Origin | None:
    """Return what a converted module's class was made from, or None for a stock module."""
    return getattr(type(module), "batch_invariant_origin", None)


def stock_class(module: torch.nn.Module) -> type:
    """Return the class that a module has, or had before conversion."""
    origin = origin_of(module)
    return type(module) if origin is None else origin.stock_class
