"""RMS norm in all its variants: where it rounds and what it multiplies by is said by options, not by model names.

xhat = x / sqrt(mean(x ** 2) + eps)        in float32, over the last dimension or over groups of it
y = xhat * (weight + weight_offset)        rounded where the variant rounds
"""

import torch

from . import _cpu
from ._checks import check_float, check_same_device, check_shape, no_backward
from ._dispatch import call_on, kind_of, remember, runs_directly
from ._ops import add_op_namespace_prefix
from .contract import Rounding, rms_norm_rounding

ACTIVATIONS = ("silu", "swish", "sigmoid", "relu")


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    cast_before_weight: bool = True,
    weight_offset: float = 0.0,
    cast_to_weight_dtype: bool = False,
    offset_in_weight_dtype: bool = False,
    round_factor: bool = False,
    group_size: int | None = None,
) -> torch.Tensor:
    """Normalise the last dimension of x (..., D) by its root mean square and multiply by weight (D,).

    Args:
        cast_before_weight: round xhat to x's dtype first; the result has torch's promotion of both dtypes (Llama, Qwen
            and most others). False: multiply in float32 and round once, to x's dtype (GPT-OSS, Helium, Gemma,
            torch.nn.RMSNorm).
        weight_offset: added to the weight: 1.0 where weights are stored around zero (Gemma, Qwen3-Next). The sum is
            float32, or in the weight's dtype if cast_before_weight or offset_in_weight_dtype.
        cast_to_weight_dtype: with cast_before_weight, round xhat to the weight's dtype instead of x's, so that a
            float32 weight means no rounding at all (T5 and its family).
        offset_in_weight_dtype: see weight_offset (Muse Spark).
        round_factor: round 1/rms to x's dtype before x is multiplied by it (DeepSeek-V4's norm without weight).
        group_size: normalise each run of this many features by itself (Qwen4-exp).

    x and weight are float32, float16 or bfloat16, in any combination. No gradient: backward raises.
    Raises TypeError for other dtypes, ValueError for shapes, devices or options that do not fit together.
    """
    weight_offset = float(weight_offset)
    options = (cast_before_weight, weight_offset, cast_to_weight_dtype, offset_in_weight_dtype, round_factor)
    return _rms_norm("rms_norm", x, None, weight, eps, (*options, group_size, False, "silu"))


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    gate_before: bool = False,
    group_size: int | None = None,
    activation: str = "silu",
    cast_before_weight: bool = True,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """Normalise x (..., D) by its root mean square, with a gate (..., D) that passes through an activation in float32.

    Args:
        gate: same shape as x, or None for a plain norm.
        gate_before: multiply x by the gate before the norm (Mamba-2, Bamba, Zamba-2, Nemotron-H; there the result has
            torch's promotion of the dtypes of x and weight). False: multiply the weighted result, which is rounded to
            x's dtype afterwards (Qwen3-Next, Kimi-Linear).
        group_size: normalise each run of this many features by itself.
        activation: "silu" (or "swish"), "sigmoid" or "relu".
        cast_before_weight: round xhat to x's dtype before the weight (Mamba-2, Qwen3-Next); False: the weight is
            applied in float32 (Kimi-Linear, Falcon-H1).
        weight_offset: as in rms_norm.

    dtypes and errors: as in rms_norm. No gradient: backward raises.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"rms_norm_gated: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}; "
            "apply another one to the gate yourself"
        )
    if gate is not None:
        check_float("rms_norm_gated", "gate", gate)
        check_float("rms_norm_gated", "x", x)
        check_shape("rms_norm_gated", "gate", gate, tuple(x.shape))
    weight_offset = float(weight_offset)
    options = (cast_before_weight, weight_offset, False, False, False, group_size, gate_before, activation)
    return _rms_norm("rms_norm_gated", x, gate, weight, eps, options)


# What calls on a GPU come to, by all that they depend on but addresses and values.
_gpu_calls: dict = {}


def _rms_norm(op, x, gate, weight, eps, options):
    """options: those of `_checked`, in its order."""
    eps = float(eps)  # a tensor would be one key whatever it holds
    direct = runs_directly(x, gate, weight)
    if direct and x.is_cuda:
        key = (op, kind_of(x), kind_of(gate), kind_of(weight), eps, options)
        call = _gpu_calls.get(key)
        if call is None:
            from ._launch import rms_norm_call  # imports triton

            arguments, activation, rounding = _checked(op, x, gate, weight, eps, *options)
            call = remember(_gpu_calls, key, rms_norm_call(*arguments, activation, rounding))
        return call_on(x, call, (x, gate, weight))
    arguments, activation, rounding = _checked(op, x, gate, weight, eps, *options)
    if direct and x.device.type == "cpu":
        return _cpu.rms_norm(*arguments, activation, rounding)
    return _rms_norm_op(*arguments, activation, rounding.factor, rounding.xhat, rounding.weight, rounding.out)


def _checked(
    op,
    x,
    gate,
    weight,
    eps,
    cast_before_weight,
    weight_offset,
    cast_to_weight_dtype,
    offset_in_weight_dtype,
    round_factor,
    group_size,
    gate_before,
    activation,
):
    """The op's arguments from those of the public functions, the activation and the rounding."""
    check_float(op, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a 0-d tensor; use x.reshape(1)")
    if weight is not None:
        check_float(op, "weight", weight)
        check_shape(op, "weight", weight, (x.shape[-1],))
    check_same_device(op, x, weight=weight, gate=gate)
    if cast_to_weight_dtype and (weight is None or not cast_before_weight):
        raise ValueError(f"{op}: cast_to_weight_dtype needs a weight and cast_before_weight=True; drop it otherwise")
    if group_size is None:
        group_size = x.shape[-1]
    elif group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"{op}: group_size must divide the last dimension of x ({x.shape[-1]}), got {group_size}")
    rounding = rms_norm_rounding(
        x.dtype,
        None if weight is None else weight.dtype,
        cast_before_weight=cast_before_weight,
        cast_to_weight_dtype=cast_to_weight_dtype,
        offset_in_weight_dtype=offset_in_weight_dtype,
        round_factor=round_factor,
        gate_last=gate is not None and not gate_before,
    )
    arguments = (x, gate, weight, eps, group_size, weight_offset, gate_before)
    return arguments, "silu" if activation == "swish" else activation, rounding


@torch.library.custom_op(add_op_namespace_prefix("rms_norm"), mutates_args=(), device_types=("cuda", "xpu"))
def _rms_norm_op(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    group_size: int,
    weight_offset: float,
    gate_before: bool,
    activation: str,
    factor: torch.dtype,
    xhat: torch.dtype,
    rounded_weight: torch.dtype,
    out: torch.dtype,
) -> torch.Tensor:
    from . import _launch

    rounding = Rounding(factor, xhat, rounded_weight, out)
    return _launch.rms_norm(x, gate, weight, eps, group_size, weight_offset, gate_before, activation, rounding)


@torch.library.register_kernel(add_op_namespace_prefix("rms_norm"), "cpu")
def _(x, gate, weight, eps, group_size, weight_offset, gate_before, activation, factor, xhat, rounded_weight, out):
    rounding = Rounding(factor, xhat, rounded_weight, out)
    return _cpu.rms_norm(x, gate, weight, eps, group_size, weight_offset, gate_before, activation, rounding)


@_rms_norm_op.register_fake
def _(x, gate, weight, eps, group_size, weight_offset, gate_before, activation, factor, xhat, rounded_weight, out):
    return torch.empty(x.shape, dtype=out, device=x.device)


_rms_norm_op.register_autograd(no_backward("rms_norm"))
