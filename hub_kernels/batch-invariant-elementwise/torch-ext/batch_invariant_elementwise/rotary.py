"""The rotary position embedding of query and key, halves rotated against each other (Llama and most others).

out = x * cos + rotate_half(x) * sin        both products and the sum rounded to x's dtype
"""

import torch

from . import _cpu, reference
from ._checks import name_of, no_backward
from ._dispatch import call_on, kind_of, remember, runs_directly
from ._ops import add_op_namespace_prefix
from .contract import FLOAT_DTYPES


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query (B, Hq, L, D) and key (B, Hkv, L, D) by cos and sin (B or 1, L, D), in one launch.

    Any strides; D is even. The results have the bits, the dtype and the memory layout that the chain of torch operators
    gives: those of a transposed view of (B, L, H, D) are one again. All four tensors are float32, float16 or bfloat16,
    of one dtype. No gradient: backward raises.
    Raises TypeError for other dtypes, ValueError for shapes or devices that do not fit together.
    """
    tensors = (query, key, cos, sin)
    direct = runs_directly(*tensors)
    if direct and query.is_cuda:
        kinds = tuple(map(kind_of, tensors))
        call = _gpu_calls.get(kinds)
        if call is None:
            from ._launch import rotary_call  # imports triton

            _check(*tensors)
            call = remember(_gpu_calls, kinds, rotary_call(*tensors))
        return call_on(query, call, tensors)
    _check(*tensors)
    return _cpu.rotary(*tensors) if direct and query.device.type == "cpu" else _rotary_op(*tensors)


# What calls on a GPU come to, by all that they depend on but addresses and values.
_gpu_calls: dict = {}


def _check(query, key, cos, sin) -> None:
    if not can_rotate(query, key, cos, sin):
        raise _problem(query, key, cos, sin)


def can_rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether `rotary` takes these tensors."""
    # Asked at every call of a decoding step: every attribute is read once.
    dtype, device, shape, angles = query.dtype, query.device, query.shape, cos.shape
    if len(shape) != 4 or len(angles) != 3:
        return False
    batch, _, length, dim = shape
    rows, cos_length, cos_dim = angles
    return (
        dtype in FLOAT_DTYPES
        and dtype == key.dtype == cos.dtype == sin.dtype
        and cos_length == length
        and cos_dim == dim
        and (rows == batch or rows == 1)
        and dim % 2 == 0
        and sin.shape == angles
        and key.dim() == 4
        and key.shape == (batch, key.shape[1], length, dim)
        and device == key.device == cos.device == sin.device
    )


def _problem(query, key, cos, sin) -> Exception:
    """What is wrong with arguments that `can_rotate` does not accept."""
    dtype, device, shape = query.dtype, query.device, query.shape
    if dtype not in FLOAT_DTYPES:
        return TypeError(
            f"rotary: query must be float32, float16 or bfloat16, got {name_of(dtype)}; cast it first, for example "
            "query.float()"
        )
    if len(shape) != 4 or shape[3] % 2:
        return ValueError(
            f"rotary: query must have shape (B, H, L, D) with an even D, got {tuple(shape)}; use the torch operators "
            "for other layouts"
        )
    batch, _, length, dim = shape
    if key.dim() != 4 or key.shape[0] != batch or key.shape[2:] != shape[2:]:
        return ValueError(
            f"rotary: key must have shape ({batch}, H, {length}, {dim}) for this query, got {tuple(key.shape)}; pass "
            "the key of the same tokens"
        )
    for name, tensor in (("cos", cos), ("sin", sin)):
        rows = tensor.shape
        if len(rows) != 3 or rows[1] != length or rows[2] != dim or rows[0] not in (1, batch) or rows != cos.shape:
            return ValueError(
                f"rotary: {name} must have shape ({batch} or 1, {length}, {dim}) for this query, the same for cos and "
                f"sin, got {tuple(rows)}; expand it first"
            )
    for name, tensor in (("key", key), ("cos", cos), ("sin", sin)):
        if tensor.dtype != dtype:
            return TypeError(
                f"rotary: {name} must have the dtype of query ({name_of(dtype)}), got {name_of(tensor.dtype)}; cast it "
                "first"
            )
        if tensor.device != device:
            return ValueError(
                f"rotary: {name} must be on the device of query ({device}), got {tensor.device}; move it with .to()"
            )
    raise AssertionError("can_rotate accepts these")


@torch.library.custom_op(add_op_namespace_prefix("rotary"), mutates_args=(), device_types=("cuda", "xpu"))
def _rotary_op(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from . import _launch

    return _launch.rotary(query, key, cos, sin)


@torch.library.register_kernel(add_op_namespace_prefix("rotary"), "cpu")
def _(query, key, cos, sin):
    return _cpu.rotary(query, key, cos, sin)


@_rotary_op.register_fake
def _(query, key, cos, sin):
    return reference.rotary(query, key, cos, sin)


_rotary_op.register_autograd(no_backward("rotary"))
