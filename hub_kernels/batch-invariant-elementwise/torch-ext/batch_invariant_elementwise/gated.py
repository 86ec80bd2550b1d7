"""activation(gate) * up, the inner step of gated MLPs (SwiGLU); the activation and the product are both rounded."""

import torch

from . import _cpu
from ._checks import name_of, no_backward
from ._dispatch import call_on, kind_of, remember, runs_directly
from ._ops import add_op_namespace_prefix
from .contract import ACTIVATIONS, FLOAT_DTYPES


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """activation(gate) * up for gate and up of one shape, in one launch; contiguous.

    The activation is computed in float32 and rounded to the dtype of the inputs before the product, as torch does.
    activation: "silu". gate and up are float32, float16 or bfloat16, of one dtype. No gradient: backward raises.
    Raises TypeError for other dtypes, ValueError for another activation and for shapes or devices that differ.
    """
    direct = runs_directly(gate, up)
    if direct and gate.is_cuda:
        key = (kind_of(gate), kind_of(up), activation)
        call = _gpu_calls.get(key)
        if call is None:
            from ._launch import gated_call  # imports triton

            _check(gate, up, activation)
            call = remember(_gpu_calls, key, gated_call(gate, up, activation))
        return call_on(gate, call, (gate, up))
    _check(gate, up, activation)
    return _cpu.gated(gate, up, activation) if direct and gate.device.type == "cpu" else _gated_op(gate, up, activation)


# What calls on a GPU come to, by all that they depend on but addresses and values.
_gpu_calls: dict = {}


def _check(gate, up, activation) -> None:
    if (problem := _problem(gate, up, activation)) is not None:
        raise problem


def can_gate(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> bool:
    """Whether `gated` takes these arguments."""
    return _problem(gate, up, activation) is None


def _problem(gate, up, activation) -> Exception | None:
    if activation not in ACTIVATIONS:
        return ValueError(
            f"gated: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}; apply another one to the "
            "gate yourself"
        )
    if gate.dtype not in FLOAT_DTYPES:
        return TypeError(
            f"gated: gate must be float32, float16 or bfloat16, got {name_of(gate.dtype)}; cast it first, for example "
            "gate.float()"
        )
    if up.dtype != gate.dtype:
        return TypeError(
            f"gated: up must have the dtype of gate ({name_of(gate.dtype)}), got {name_of(up.dtype)}; cast it first"
        )
    if up.shape != gate.shape:
        return ValueError(
            f"gated: up must have the shape of gate, {tuple(gate.shape)}, got {tuple(up.shape)}; expand it first"
        )
    if up.device != gate.device:
        return ValueError(
            f"gated: up must be on the device of gate ({gate.device}), got {up.device}; move it with .to()"
        )
    return None


@torch.library.custom_op(add_op_namespace_prefix("gated"), mutates_args=(), device_types=("cuda", "xpu"))
def _gated_op(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    from . import _launch

    return _launch.gated(gate, up, activation)


@torch.library.register_kernel(add_op_namespace_prefix("gated"), "cpu")
def _(gate, up, activation):
    return _cpu.gated(gate, up, activation)


@_gated_op.register_fake
def _(gate, up, activation):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


_gated_op.register_autograd(no_backward("gated"))
