"""Layer norm in float32: mean, then the mean of squared differences, then weight and bias."""

import math

import torch

from . import _cpu
from ._checks import check_float, check_same_device, check_shape, no_backward
from ._dispatch import call_on, kind_of, remember, runs_directly
from ._ops import add_op_namespace_prefix


def layer_norm(
    x: torch.Tensor,
    normalized_shape: int | list[int] | tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    cast_before_weight: bool = False,
) -> torch.Tensor:
    """Normalise the trailing dimensions `normalized_shape` of x to mean 0 and variance 1, then apply weight and bias.

    Args:
        normalized_shape: the trailing dimensions, as in torch.nn.LayerNorm; weight and bias have this shape.
        cast_before_weight: False: everything in float32, one rounding to x's dtype (torch.nn.LayerNorm, and Cohere's
            norm, which is this one without bias). True: round to x's dtype before the weight and after each step, with
            torch's promotion of the dtypes (DeBERTa; Chameleon).

    x, weight and bias are float32, float16 or bfloat16; bias has the weight's dtype. No gradient: backward raises.
    Raises TypeError for other dtypes, ValueError for shapes or devices that do not fit together.
    """
    eps = float(eps)  # a tensor would be one key whatever it holds
    direct = runs_directly(x, weight, bias)
    if not direct or not x.is_cuda:
        arguments = _checked(x, normalized_shape, weight, bias, eps, cast_before_weight)
        return _cpu.layer_norm(*arguments) if direct and x.device.type == "cpu" else _layer_norm_op(*arguments)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    key = (kind_of(x), shape, kind_of(weight), kind_of(bias), eps, cast_before_weight)
    call = _gpu_calls.get(key)
    if call is None:
        from ._launch import layer_norm_call  # imports triton

        arguments = _checked(x, shape, weight, bias, eps, cast_before_weight)
        call = remember(_gpu_calls, key, layer_norm_call(*arguments))
    return call_on(x, call, (x, weight, bias))


# What calls on a GPU come to, by all that they depend on but addresses and values.
_gpu_calls: dict = {}


def _checked(x, normalized_shape, weight, bias, eps, cast_before_weight):
    """The op's arguments from those of the public function."""
    op = "layer_norm"
    check_float(op, "x", x)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{op}: normalized_shape must be the trailing dimensions of x, got {shape} for x of shape {tuple(x.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_float(op, name, tensor)
            check_shape(op, name, tensor, shape)
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError(
            f"{op}: bias must have the weight's dtype, got {str(bias.dtype)[6:]} beside {str(weight.dtype)[6:]}; "
            "cast one of them"
        )
    check_same_device(op, x, weight=weight, bias=bias)
    product, out = torch.float32, x.dtype
    if cast_before_weight:
        for tensor in (weight, bias):
            out = out if tensor is None else torch.promote_types(out, tensor.dtype)
        product = out
    xhat = x.dtype if cast_before_weight else torch.float32
    return x, weight, bias, eps, math.prod(shape), xhat, product, out


@torch.library.custom_op(add_op_namespace_prefix("layer_norm"), mutates_args=(), device_types=("cuda", "xpu"))
def _layer_norm_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    columns: int,
    xhat: torch.dtype,
    product: torch.dtype,
    out: torch.dtype,
) -> torch.Tensor:
    from . import _launch

    return _launch.layer_norm(x, weight, bias, eps, columns, xhat, product, out)


@torch.library.register_kernel(add_op_namespace_prefix("layer_norm"), "cpu")
def _(x, weight, bias, eps, columns, xhat, product, out):
    return _cpu.layer_norm(x, weight, bias, eps, columns, xhat, product, out)


@_layer_norm_op.register_fake
def _(x, weight, bias, eps, columns, xhat, product, out):
    return torch.empty(x.shape, dtype=out, device=x.device)


_layer_norm_op.register_autograd(no_backward("layer_norm"))
