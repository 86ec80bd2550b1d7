"""Attention with each row's bits independent of the other rows, of padding, of the cache's length and of chunking."""

import torch

from ._checks import (
    as_int32,
    check_cu_seqlens,
    check_integers,
    check_masks,
    check_operands,
    check_scalars,
    check_sinks,
    no_backward,
)
from ._dispatch import call_on, device_of, is_plain_torch, kind_of, remember, runs_directly
from ._ops import add_op_namespace_prefix


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    origin: torch.Tensor | None = None,
    query_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Batch-invariant scaled dot product attention.

    query (B, Hq, Q, D), key (B, Hkv, KV, D), value (B, Hkv, KV, Dv) -> (B, Hq, Q, Dv), whose memory is contiguous as
    (B, Q, Hq, Dv). One dtype (float32, float16, bfloat16) for all; D and Dv multiples of 8 in 16..256; Hq a multiple of
    Hkv. Sums are float32, rounded once. Has no backward.

    causal: query i sees keys up to query_offset + i.
    scale: factor of the products, 1/sqrt(D) if None.
    window: (left, right): query i sees keys from query_offset + i - left to query_offset + i + right; -1 is no limit.
    softcap: scores become softcap * tanh(score / softcap) before masks.
    sinks: (Hq,) one more logit per head in the softmax's denominator, without a value.
    mask: (B|1, Hq|1, Q|1, KV), bool (True: attend) or added to the scores; -inf and finfo.min hide a key.
    key_mask: (B, KV) bool, False for keys that are not there; what they hold is never read as a number. Or what
        `prepare_key_mask` made of it, for this `origin`: the same bits, and the preparation once for many layers.
    origin: (B,) index of each row's first real key, from which its blocks of keys are counted: two layouts of one
        sequence (left-padded or not) give the same bits if this points at the same key. Negative where keys were
        cropped away in front. Keys before it are hidden. 0 if None.
    query_offset: (B,) index of the key at which query 0 stands, KV - Q if None.

    A row that sees no key gives zeros. Raises TypeError (dtype) or ValueError (shape, device, value).
    """
    tensors = (query, key, value, sinks, mask, key_mask)
    direct = runs_directly(*tensors)
    if direct and query.is_cuda:
        return _on_gpu(*tensors, origin, query_offset, causal, scale, window, softcap).transpose(1, 2)
    decode = None
    if direct and query.is_cpu and query.dim() == 4 and query.shape[2] == 1 and is_plain_torch():
        if tuple(window) == (-1, -1) and softcap == 0 and sinks is mask is key_mask is origin is query_offset is None:
            from . import _cpu_decode as decode

            call = decode.recalled(query, key, value, scale)
            if call is not None:
                return call(query, key, value)
    checked_scale, origin, query_offset = _check(*tensors, origin, query_offset, scale, window, softcap)
    settings = (bool(causal), checked_scale, int(window[0]), int(window[1]), float(softcap))
    arguments = (*tensors[:3], *settings, *tensors[3:], origin, query_offset)
    if decode is not None and (call := decode.prepare(query, key, value, scale)) is not None:
        return call(query, key, value)
    out = _on_cpu(*arguments) if direct and query.device.type == "cpu" else _attention_op(*arguments)
    return out.transpose(1, 2)


def _check(query, key, value, sinks, mask, key_mask, origin, query_offset, scale, window, softcap) -> tuple:
    """Raise unless these are arguments of `attention`; scale, origin and query_offset as the kernels take them."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"attention: expected {name} of shape (batch, heads, length, head_dim), got {tuple(tensor.shape)}; "
                "use attention_varlen for packed sequences"
            )
    check_operands("attention", query, key, value, heads_dim=1)
    if key.shape[0] != query.shape[0]:
        raise ValueError(
            f"attention: expected key with the batch size of query, {query.shape[0]}, got {key.shape[0]}; "
            "expand the smaller one"
        )
    scale = check_scalars("attention", scale, window, softcap, query.shape[-1])
    check_sinks("attention", sinks, query, query.shape[1])
    check_masks("attention", mask, key_mask, query, key.shape[2])
    per_row = (query.shape[0], query.device, "row of the batch")
    origin = check_integers("attention", "origin", origin, *per_row)
    query_offset = check_integers("attention", "query_offset", query_offset, *per_row)
    return scale, origin, query_offset


# What calls on a GPU come to, by all that they depend on but addresses and values.
_gpu_calls: dict = {}


def _recalled(query, key, value, sinks, mask, key_mask, origin, query_offset, causal, scale, window, softcap):
    """The function of the first eight arguments that serves calls like this; a new one is checked."""
    tensors = (query, key, value, sinks, mask, key_mask, origin, query_offset)
    # As plain numbers: a tensor would be one key whatever it holds.
    causal, scale, softcap = bool(causal), None if scale is None else float(scale), float(softcap)
    window = int(window[0]), int(window[1])
    call_key = (*map(kind_of, tensors), causal, scale, window, softcap)
    call = _gpu_calls.get(call_key)
    if call is None:
        from ._launch import attention_call  # imports triton

        scale, _, _ = _check(*tensors, scale, window, softcap)
        with device_of(query):
            call = attention_call(*tensors, causal, scale, *window, softcap)
        remember(_gpu_calls, call_key, call)
    return call


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    origin: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention` of sequences packed one after the other, with the bits that each would have alone.

    query (Tq, Hq, D), key (Tk, Hkv, D), value (Tk, Hkv, Dv) -> (Tq, Hq, Dv). cu_seqlens_q and cu_seqlens_k: int32
    (sequences + 1,), cumulative lengths; max_seqlen_q and max_seqlen_k: the longest of each. `causal` and `window`
    count from the bottom right corner of each sequence. Tokens after the last sequence give zeros. The rest is as in
    `attention`.

    origin: (sequences,) index of each sequence's first key among its packed ones, negative where a sliding cache has
        dropped it, so that the rest has the bits of the whole; 0 if None.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ValueError(
                f"attention_varlen: expected {name} of shape (tokens, heads, head_dim), got {tuple(tensor.shape)}; "
                "use attention for batches"
            )
    check_operands("attention_varlen", query, key, value, heads_dim=1)
    check_cu_seqlens("attention_varlen", cu_seqlens_q, cu_seqlens_k, query)
    scale = check_scalars("attention_varlen", scale, window, softcap, query.shape[-1])
    check_sinks("attention_varlen", sinks, query, query.shape[1])
    per_sequence = (cu_seqlens_q.numel() - 1, query.device, "sequence")
    origin = check_integers("attention_varlen", "origin", origin, *per_sequence)
    tensors = (query, key, value, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
    settings = (int(max_seqlen_q), int(max_seqlen_k), bool(causal), scale, int(window[0]), int(window[1]))
    arguments = (*tensors, *settings, float(softcap), sinks, origin)
    if runs_directly(*tensors, sinks):
        return _varlen_on_cpu(*arguments) if query.device.type == "cpu" else _varlen_on_gpu(*arguments)
    return _attention_varlen_op(*arguments)


def _on_gpu(query, key, value, sinks, mask, key_mask, origin, query_offset, *settings) -> torch.Tensor:
    """settings: causal, scale, window, softcap."""
    tensors = (query, key, value, sinks, mask, key_mask, origin, query_offset)
    call = _recalled(*tensors, *settings)
    return call_on(query, call, (*tensors[:6], as_int32(origin), as_int32(query_offset)))


def _on_cpu(*arguments) -> torch.Tensor:
    from ._cpu_attention import attention as on_cpu

    return on_cpu(*arguments)


def _varlen_on_gpu(query: torch.Tensor, *arguments) -> torch.Tensor:
    from ._launch import launch_attention_varlen  # imports triton

    with device_of(query):
        return launch_attention_varlen(query, *arguments)


def _varlen_on_cpu(*arguments) -> torch.Tensor:
    from ._cpu_attention import attention_varlen as on_cpu

    return on_cpu(*arguments)


@torch.library.custom_op(add_op_namespace_prefix("attention"), mutates_args=(), device_types=("cuda", "xpu"))
def _attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    origin: torch.Tensor | None,
    query_offset: torch.Tensor | None,
) -> torch.Tensor:
    settings = (causal, scale, (window_left, window_right), softcap)
    return _on_gpu(query, key, value, sinks, mask, key_mask, origin, query_offset, *settings)


@torch.library.register_kernel(add_op_namespace_prefix("attention"), "cpu")
def _(*arguments) -> torch.Tensor:
    return _on_cpu(*arguments)


@_attention_op.register_fake
def _(query, key, value, *_settings) -> torch.Tensor:
    batch, heads, q_len, _ = query.shape
    return query.new_empty(batch, q_len, heads, value.shape[-1])


@torch.library.custom_op(add_op_namespace_prefix("attention_varlen"), mutates_args=(), device_types=("cuda", "xpu"))
def _attention_varlen_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: torch.Tensor | None,
    origin: torch.Tensor | None,
) -> torch.Tensor:
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    settings = (causal, scale, window_left, window_right, softcap, sinks, origin)
    return _varlen_on_gpu(query, key, value, *lengths, *settings)


@torch.library.register_kernel(add_op_namespace_prefix("attention_varlen"), "cpu")
def _(*arguments) -> torch.Tensor:
    return _varlen_on_cpu(*arguments)


@_attention_varlen_op.register_fake
def _(query, key, value, *_settings) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[-1])


_attention_op.register_autograd(no_backward("attention"))


_attention_varlen_op.register_autograd(no_backward("attention_varlen"))
