"""Layer norm in float32: mean, then the mean of squared differences, then weight and bias."""

import math

import torch

from . import _cpu
from ._checks import check_float, check_same_device, check_shape, no_backward
from ._dispatch import runs_directly
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
    arguments = (x, weight, bias, float(eps), math.prod(shape), xhat, product, out)
    if x.device.type == "cpu" and runs_directly(x, weight, bias):
        return _cpu.layer_norm(*arguments)
    return _layer_norm_op(*arguments)


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
