"""Batch invariance for raw PyTorch code: `with batch_invariant_mode(): y = a @ b`.

Two modes, both local to the thread, both gone after the block:

* a TorchDispatchMode sees every operator after PyTorch has broken it down (einsum to bmm, matmul to mm, bmm or mv, ...)
  and sends those that reduce to the kernel packages. It sits below autograd.
* a TorchFunctionMode catches the calls whose breakdown would already depend on the batch: `linear` adds its bias before
  or after rounding depending on strides, `scaled_dot_product_attention` picks a backend by shape.

An operator that reduces and has no batch-invariant form here is refused by name. Integers are exact in any order and
are left alone. torch.compile does not compile inside the block: PyTorch runs compiled functions eagerly there.
"""

import contextlib
import math
import threading
from types import FunctionType

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import hub
from .mask import visible_and_origin

_linear_kernels = hub.load("linear")
_norm_kernels = hub.load("norm")
_flash_attn = hub.load("flash-attn")

COVERED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _State(threading.local):
    active = False  # inside a batch_invariant_mode block
    inside = False  # inside one of our handlers, or inside an opaque custom operator


_state = _State()


@contextlib.contextmanager
def batch_invariant_mode():
    """Context manager: matrix products, softmax, norms, sums and attention give each row the same bits in any batch.

    Covers mm, addmm, bmm, baddbmm, mv, dot, addmv, linear, matmul, einsum, softmax, log_softmax, mean, sum, layer_norm,
    rms_norm and scaled_dot_product_attention, in float32, float16 and bfloat16. Affects only this thread and only the
    block; blocks may be nested. Inference only: backward through linear, norms and attention raises.

    Inside the block, raises ValueError for other floating point dtypes, for sparse or quantised tensors, and for
    operators that reduce and are not covered (never TypeError, which the `@` operator would swallow).
    """
    if _state.active:
        yield
        return
    _state.active = True
    try:
        with _DispatchMode(), _FunctionMode():
            yield
    finally:
        _state.active = False


@contextlib.contextmanager
def _our_own_work():
    """The kernel packages compute with torch operators too: those are not for us."""
    before = _state.inside
    _state.inside = True
    try:
        yield
    finally:
        _state.inside = before


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _state.inside:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _multi_head_attention_forward(*args, **kwargs)
        if func is torch.einsum:
            return _einsum(*args, **kwargs)
        handler = _FUNCTIONS.get(func)
        if handler is None or not _is_ours(handler.__name__.lstrip("_"), args, kwargs):
            return func(*args, **kwargs)
        with _our_own_work():
            return handler(*args, **kwargs)


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _state.inside:
            return func(*args, **kwargs)
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "quantized":
            raise ValueError(f"batch_invariant_mode does not cover {func._schema.name}; dequantise the tensors first")
        if namespace != "aten":
            with _our_own_work():
                return func(*args, **kwargs)
        in_place = name.endswith("_") and not name.endswith("__")
        base = name[:-1] if in_place else name
        if base in _OPERATORS:
            if not _is_ours(base, args, kwargs):
                return func(*args, **kwargs)
            out = kwargs.pop("out", None)
            with _our_own_work():
                result = _OPERATORS[base](*args, **kwargs)
                if in_place:
                    return args[0].copy_(result)
                return result if out is None else _write(base, out, result)
        if func._can_decompose():  # composites come here whole only for inference tensors
            with self:
                return func.decompose(*args, **kwargs)
        if _is_refused(base) and any(leaf.is_floating_point() or leaf.is_complex() for leaf in _tensors(args, kwargs)):
            raise ValueError(
                f"batch_invariant_mode has no batch-invariant form of torch.{base}, whose order of addition may follow "
                "the batch; compute it outside the block or from covered operators (matmul, sum, mean, softmax)"
            )
        return func(*args, **kwargs)


# --- what is ours ---


def _tensors(args, kwargs) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _is_ours(name: str, args, kwargs) -> bool:
    """Whether an operator of our list reduces floating point values; ValueError if they are of an uncovered kind."""
    tensors = _tensors(args, kwargs)
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise ValueError(
                f"batch_invariant_mode covers torch.{name} for dense tensors, got a {kind} one; convert it with "
                f"{'dequantize' if tensor.is_quantized else 'to_dense'}()"
            )
    dtypes = {tensor.dtype for tensor in tensors}
    if isinstance(kwargs.get("dtype"), torch.dtype):
        dtypes.add(kwargs["dtype"])
    for dtype in dtypes:
        if (dtype.is_floating_point or dtype.is_complex) and dtype not in COVERED_DTYPES:
            raise ValueError(
                f"batch_invariant_mode covers torch.{name} in float32, float16 and bfloat16, got "
                f"{str(dtype).removeprefix('torch.')}; cast it or compute it outside the block"
            )
    return any(dtype.is_floating_point for dtype in dtypes)


def _write(name: str, out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    if out.shape != result.shape or out.dtype != result.dtype:
        raise ValueError(
            f"torch.{name}: out must have shape {tuple(result.shape)} and dtype {result.dtype}, got "
            f"{tuple(out.shape)} and {out.dtype}; batch_invariant_mode does not resize or cast out"
        )
    return out.copy_(result)


# --- matrix products ---


def _mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(M, K) @ (K, N)."""
    return _bmm(x.unsqueeze(0), y.unsqueeze(0)).squeeze(0)


def _bmm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(B, M, K) @ (B, K, N)."""
    if 0 in x.shape or 0 in y.shape:  # nothing to add up
        return torch.bmm(x, y)
    return _linear_kernels.bmm(x, y)


def _mv(x: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """(M, K) @ (K,)."""
    return _mm(x, vector.unsqueeze(1)).squeeze(1)


def _dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(K,) @ (K,)."""
    return _mm(x.unsqueeze(0), y.unsqueeze(1)).reshape(())


def _scaled_and_added(product, addend, x, y, beta, alpha) -> torch.Tensor:
    """beta * addend + alpha * product(x, y), everything in float32 and rounded once; beta = 0 ignores the addend."""
    result = product(x.float(), y.float())
    if alpha != 1:
        result = result * alpha
    if beta != 0:
        result = addend.float() * beta + result
    return result.to(x.dtype)


def _addmm(addend, x, y, *, beta=1, alpha=1) -> torch.Tensor:
    is_bias = addend.dim() > 0 and addend.numel() == y.shape[1] == addend.shape[-1]
    if beta == alpha == 1 and is_bias and 0 not in x.shape and 0 not in y.shape:
        return _linear_kernels.linear(x, y.t(), addend.reshape(-1))
    return _scaled_and_added(_mm, addend, x, y, beta, alpha)


def _baddbmm(addend, x, y, *, beta=1, alpha=1) -> torch.Tensor:
    return _scaled_and_added(_bmm, addend, x, y, beta, alpha)


def _addmv(addend, x, vector, *, beta=1, alpha=1) -> torch.Tensor:
    return _scaled_and_added(_mv, addend, x, vector, beta, alpha)


def _linear(input, weight, bias=None) -> torch.Tensor:
    input, weight, bias = _autocast(input, weight, bias)
    if weight.dim() == 1:  # (..., K) with (K,): one output without a dimension
        out = _linear(input, weight.unsqueeze(0), None if bias is None else bias.reshape(1))
        return out.squeeze(-1)
    if 0 in input.shape or 0 in weight.shape:
        return F.linear(input, weight, bias)
    return _linear_kernels.linear(input, weight, bias)


def _einsum(equation: str, *operands) -> torch.Tensor:
    """With three operands and more, einsum may choose their order by size (opt_einsum): go from left to right."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = operands[0]
    return torch._C._VariableFunctions.einsum(equation, operands)


def _autocast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Cast as torch.autocast would have done: a function mode runs before it."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors]


# --- reductions and norms ---


def _sum(x, dim=None, keepdim=False, *, dtype=None) -> torch.Tensor:
    return _norm_kernels.sum(x, dim, keepdim, dtype)


def _mean(x, dim=None, keepdim=False, *, dtype=None) -> torch.Tensor:
    return _norm_kernels.mean(x, dim, keepdim, dtype)


def _softmax(x, dim, half_to_float=False, *, dtype=None) -> torch.Tensor:
    """aten._softmax(x, dim, half_to_float) and aten.softmax(x, dim, dtype)."""
    return _norm_kernels.softmax(x, dim, _softmax_dtype(half_to_float, dtype))


def _log_softmax(x, dim, half_to_float=False, *, dtype=None) -> torch.Tensor:
    return _norm_kernels.log_softmax(x, dim, _softmax_dtype(half_to_float, dtype))


def _softmax_dtype(half_to_float, dtype):
    if isinstance(half_to_float, torch.dtype):  # aten.softmax takes its dtype by position
        return half_to_float
    return torch.float32 if half_to_float else dtype


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True) -> torch.Tensor:
    return _norm_kernels.layer_norm(input, tuple(normalized_shape), weight, bias, eps)


def _native_layer_norm(input, normalized_shape, weight, bias, eps):
    """(output, mean, 1 / standard deviation), the latter two for autograd, in float32."""
    out = _layer_norm(input, normalized_shape, weight, bias, eps)
    dims = list(range(-len(normalized_shape), 0))
    x = input.float()
    mean = _norm_kernels.mean(x, dims, True)
    centred = x - mean
    return out, mean, torch.rsqrt(_norm_kernels.mean(centred * centred, dims, True) + eps)


def _rms_norm(input, normalized_shape, weight=None, eps=None) -> torch.Tensor:
    shape = tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"torch.rms_norm: normalized_shape must be the last dimensions of the input, got {shape} for an input of "
            f"shape {tuple(input.shape)}; pass the input's own"
        )
    eps = torch.finfo(torch.float32).eps if eps is None else eps  # torch's, for 16-bit inputs too: it adds in float32
    rows = input.flatten(-len(shape))
    weight = None if weight is None else weight.flatten()
    return _norm_kernels.rms_norm(rows, weight, eps, cast_before_weight=False).view(input.shape)


# --- attention ---


def _scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> torch.Tensor:
    """query (..., [Hq,] Q, D), key, value (..., [Hkv,] KV, D or Dv); is_causal counts from the top left corner."""
    if dropout_p > 0:
        raise ValueError(
            f"batch_invariant_mode covers scaled_dot_product_attention without dropout, got dropout_p={dropout_p}; "
            "pass 0.0"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention takes attn_mask or is_causal=True, got both; pass one")
    query, key, value = _autocast(query, key, value)
    dims = query.dim()
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (dims - attn_mask.dim())]
    query, key, value, attn_mask = (_with_heads(tensor) for tensor in (query, key, value, attn_mask))
    batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in (query, key, value)))
    heads, kv_heads = query.shape[-3], max(key.shape[-3], value.shape[-3])
    if not enable_gqa:
        heads = max(heads, kv_heads)
        if kv_heads not in (1, heads):
            raise ValueError(
                f"scaled_dot_product_attention needs as many key as query heads, got {kv_heads} and {heads}; "
                "pass enable_gqa=True"
            )
    states = [
        tensor.expand(*batch, count, *tensor.shape[-2:]).reshape(math.prod(batch), count, *tensor.shape[-2:])
        for tensor, count in ((query, heads), (key, kv_heads), (value, kv_heads))
    ]
    q_len, kv_len, rows = query.shape[-2], key.shape[-2], math.prod(batch)
    call = {"causal": is_causal, "scale": scale}
    if is_causal and q_len != kv_len:
        call["query_offset"] = torch.zeros(rows, dtype=torch.int32, device=query.device)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], kv_len)
        if any(size > 1 for size in attn_mask.shape[:-3]):
            attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:])
        mask, origin = visible_and_origin(attn_mask.flatten(0, -4))
        call |= {"mask": mask, "origin": origin.expand(rows).contiguous()}
    out = _flash_attn.attention(*states, **call).reshape(*batch, heads, q_len, value.shape[-1])
    return out if dims > 3 else out.reshape(*out.shape[: dims - 2], q_len, value.shape[-1])


def _with_heads(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """(Q, D) and (N, Q, D) have no head dimension: give them one, and (Q, D) a batch."""
    if tensor is None or tensor.dim() > 3:
        return tensor
    return tensor.unsqueeze(-3) if tensor.dim() == 3 else tensor[None, None]


def _unchecked_twin(function):
    """The same function that never asks whether a function mode wants it, so that the mode sees what it calls."""
    no = FunctionType((lambda *_: False).__code__, {})
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    variables = {**function.__globals__, **dict.fromkeys(names, no)}
    twin = FunctionType(function.__code__, variables, function.__name__, function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


_multi_head_attention_forward = _unchecked_twin(F.multi_head_attention_forward)

# Whole calls, by the Python function.
_FUNCTIONS = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _scaled_dot_product_attention,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}

# Operators, by their name in the aten namespace; in-place and out= overloads are derived from these.
_OPERATORS = {
    "mm": _mm,
    "bmm": _bmm,
    "mv": _mv,
    "dot": _dot,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "addmv": _addmv,
    "sum": _sum,
    "mean": _mean,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "native_layer_norm": _native_layer_norm,
    "linear": _linear,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _scaled_dot_product_attention,
}


def _is_refused(name: str) -> bool:
    return name in _REFUSED or name.startswith(("linalg_", "_linalg_", "_scaled_dot_product_", "_fft_"))


_REFUSED = {
    # products
    *("addbmm", "_addmm_activation", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_trilinear"),
    *("_sparse_mm", "_sparse_addmm", "_weight_int4pack_mm", "_weight_int8pack_mm", "_cslt_sparse_mm"),
    *("triangular_solve", "cholesky", "cholesky_solve", "cholesky_inverse", "lu_solve", "ormqr"),
    *("_cdist_forward", "_euclidean_dist", "_pdist_forward"),
    # convolutions and recurrent layers
    *("convolution", "_convolution", "convolution_overrideable", "conv_tbc"),
    *("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"),
    # reductions
    *("var", "std", "var_mean", "std_mean", "norm", "renorm", "prod", "nansum", "logsumexp"),
    *("cumsum", "cumprod", "logcumsumexp"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
    *("_batch_norm_with_update", "_batch_norm_no_update", "cudnn_batch_norm", "miopen_batch_norm"),
    *("_fused_rms_norm", "_masked_softmax", "_safe_softmax"),
    # attention
    *("_flash_attention_forward", "_efficient_attention_forward", "_fused_sdp_choice"),
    *("_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_triton_multi_head_attention"),
    # additions in memory, whose order is the order of arrival on a GPU
    *("index_add", "index_reduce", "scatter_add", "scatter_reduce", "_embedding_bag", "_embedding_bag_forward_only"),
}
