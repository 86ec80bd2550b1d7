"""The attention function registered in transformers' AttentionInterface.

It turns what a model's attention module passes, and what `mask.py` says about the batch, into one call of the
flash-attn kernel package. Each case below differs only in where the pattern and the row's first key come from.
"""

import torch

from . import hub
from .compilation import check_compiler
from .mask import BatchInvariantMask, visible_and_origin
from .paged import read_cache, requests_pattern

_flash_attn = hub.load("flash-attn")

# Keywords by which a model hands over a part of the computation that this function does not do.
_UNSUPPORTED_KEYWORDS = {
    "indices": "sparse attention indices",
    "block_indices": "sparse attention block indices",
    "block_table": "a paged key/value cache",
}


def batch_invariant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BatchInvariantMask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention whose result for a row does not depend on the rest of the batch, the padding or the cache.

    Args:
        module: the attention module, part of a converted model.
        query: (B, Hq, Q, D); a batch of 1 is repeated to the keys' batch.
        key, value: (B, Hkv, KV, D), (B, Hkv, KV, Dv), the cache included, heads not repeated.
        attention_mask: the object made by `batch_invariant_mask`; a bool (True = attend) or additive float tensor
            (B, H, Q, KV), H, Q and B possibly 1; or None, which is causal if `is_causal` (or `module.is_causal`) says
            so and there is more than one query.
        sliding_window: read only if there is no mask; a mask knows its own window.
        s_aux, sinks: (Hq,) attention sink logits (two names of one thing).
        position_bias: (1 or B, Hq, Q, KV), added to the scores.
        cu_seq_lens_q, cu_seq_lens_k: (S + 1,) bounds of packed documents in a batch of 1. With read_index among the
            keywords they are the requests of continuous batching (see `paged`), with the new keys alone if its cache
            comes too.
        kwargs: what else a model passes; ignored, save for parts of the computation that are refused by name.

    Returns (B, Q, Hq, Dv), contiguous, and None for the attention weights.

    Raises ValueError for a module of an unconverted model, dropout in training, output_attentions, sparse indices and
    combinations that have no batch-invariant form.
    """
    if torch.compiler.is_compiling():
        check_compiler()
    _check(module, query, dropout, output_attentions, kwargs)
    sinks = _one_of(s_aux, sinks, query)
    if (cache := kwargs.pop("cache", None)) is not None:
        kwargs.update(cu_seq_lens_k=cu_seq_lens_k, max_length_k=max_length_k)
        key, value = read_cache(cache, module, key, value, kwargs)
        cu_seq_lens_k, max_length_k = kwargs["cu_seq_lens_k"], kwargs["max_length_k"]
    is_paged = kwargs.get("read_index") is not None
    call = {"scale": scaling, "softcap": softcap or 0.0, "sinks": sinks}
    if isinstance(attention_mask, BatchInvariantMask) and not is_paged:
        _check_lengths(attention_mask, query, key)
        attention_mask = attention_mask.for_batch(key.shape[0])
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)

    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if position_bias is not None or cu_seq_lens_q is None or cu_seq_lens_k is None or query.shape[0] != 1:
            raise ValueError(
                "packed documents need both cu_seq_lens_q and cu_seq_lens_k, a batch of 1 and no position_bias, got "
                f"batch {query.shape[0]}; pass a padded batch with an attention mask instead"
            )
        origin = None
        if is_paged:
            causal, window, origin = requests_pattern(
                module, attention_mask, sliding_window, kwargs.get("position_ids"), cu_seq_lens_q, cu_seq_lens_k
            )
        else:
            causal, window = _packed_pattern(module, attention_mask, is_causal, sliding_window, query, key)
        longest_q = _longest(cu_seq_lens_q) if max_length_q is None else max_length_q
        longest_k = _longest(cu_seq_lens_k) if max_length_k is None else max_length_k
        bounds = (cu_seq_lens_q, cu_seq_lens_k, longest_q, longest_k)
        return _attend_documents(query, key, value, bounds, causal=causal, window=window, origin=origin, **call), None

    if attention_mask is None:
        causal, window = _pattern_without_mask(module, is_causal, sliding_window, query, key)
        return _attend(query, key, value, causal=causal, window=window, mask=position_bias, **call), None

    if isinstance(attention_mask, torch.Tensor):
        mask, origin = visible_and_origin(attention_mask)
        mask = _add_bias(mask, position_bias)
        origin = origin.expand(key.shape[0]).contiguous()
        return _attend(query, key, value, causal=False, mask=mask, origin=origin, **call), None

    if not isinstance(attention_mask, BatchInvariantMask):
        raise TypeError(
            f"attention_mask must be None, a tensor or the batch-invariant mask, got {type(attention_mask).__name__}; "
            "build it with transformers.masking_utils"
        )
    described = attention_mask
    if described.segments is not None:
        bounds, longest = described.documents()
        if described.kind == "custom" or position_bias is not None:
            mask = _add_bias(described.dense(), position_bias)
            return _attend_each_document(query, key, value, mask, bounds, **call), None
        bounds = (bounds, bounds, longest, longest)
        causal = described.kind == "causal"
        return _attend_documents(query, key, value, bounds, causal=causal, window=described.window, **call), None
    if described.kind == "custom":
        mask = _add_bias(described.dense(), position_bias)
        return _attend(query, key, value, causal=False, mask=mask, origin=described.origin, **call), None
    out = _attend(
        query,
        key,
        value,
        causal=described.kind == "causal",
        window=described.window,
        mask=position_bias,
        key_mask=described.prepared_key_mask(),
        origin=described.origin,
        query_offset=described.query_offset,
        **call,
    )
    return out, None


# --- the three ways to the kernel ---


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call) -> torch.Tensor:
    """One padded batch: (B, Hq, Q, D) -> (B, Q, Hq, Dv)."""
    return _flash_attn.attention(query, key, value, **call).transpose(1, 2).contiguous()


def _attend_documents(query, key, value, bounds: tuple[torch.Tensor, torch.Tensor, int, int], **call) -> torch.Tensor:
    """Packed documents, each from its own first key, the rows laid end to end: (B, Hq, Q, D) -> (B, Q, Hq, Dv)."""
    batch, _, length, _ = query.shape
    flat = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    out = _flash_attn.attention_varlen(*flat, *bounds, **call)
    return out.view(batch, length, *out.shape[1:]).contiguous()


def _attend_each_document(query, key, value, mask: torch.Tensor, bounds: torch.Tensor, **call) -> torch.Tensor:
    """Packed documents under a dense mask or bias, one after the other: slow, but each keeps its own first key."""
    batch, heads, length, _ = query.shape
    out = value.new_empty(batch, length, heads, value.shape[-1])
    mask = mask.expand(batch, -1, length, length)
    edges = bounds.tolist()
    for first, end in zip(edges[:-1], edges[1:], strict=True):
        row, start = divmod(first, length)
        stop = start + end - first
        one, part = slice(row, row + 1), slice(start, stop)
        states = (tensor[one, :, part] for tensor in (query, key, value))
        out[one, part] = _attend(*states, causal=False, mask=mask[one, :, part, part], **call)
    return out


# --- patterns ---


def _pattern_without_mask(module, is_causal, sliding_window, query, key) -> tuple[bool, tuple[int, int]]:
    """(causal, window) for a caller that built no mask, such as a vision tower."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if query.shape[2] > 1 and is_causal is None:
        raise ValueError(
            f"{type(module).__name__} passes neither attention_mask nor is_causal and has no is_causal attribute; "
            "set module.is_causal"
        )
    causal = bool(is_causal) and query.shape[2] > 1
    if sliding_window is None or sliding_window >= key.shape[2]:
        return causal, (-1, -1)
    if not is_causal:
        raise ValueError(
            f"{type(module).__name__} passes sliding_window={sliding_window} without a mask for attention that is not "
            "causal, where its meaning differs from model to model; pass an attention_mask"
        )
    return True, (sliding_window - 1, -1)


def _packed_pattern(module, mask, is_causal, sliding_window, query, key) -> tuple[bool, tuple[int, int]]:
    """(causal, window) within each document that cu_seq_lens_q / cu_seq_lens_k bound."""
    if mask is None:
        return _pattern_without_mask(module, is_causal, sliding_window, query, key)
    if not isinstance(mask, BatchInvariantMask) or mask.kind == "custom" or mask.key_mask is not None:
        raise ValueError(
            "cu_seq_lens_q cannot be combined with a padding mask or a dense attention mask; "
            "pass attention_mask=None with packed documents"
        )
    return mask.kind == "causal", mask.window


def _add_bias(mask: torch.Tensor, position_bias: torch.Tensor | None) -> torch.Tensor:
    """Combine a bool or additive mask with an additive bias."""
    if position_bias is None:
        return mask
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, float("-inf"))
    return mask + position_bias


def _longest(bounds: torch.Tensor) -> int:
    return int(bounds.diff().max())


# --- checks ---


def _check(
    module: torch.nn.Module, query: torch.Tensor, dropout: float, output_attentions: bool | None, kwargs: dict
) -> None:
    name = type(module).__name__
    if not getattr(module, "_batch_invariant", False):
        raise ValueError(
            f"{name} uses attn_implementation='batch_invariant' but its model was never converted; "
            "call hf_batchinv.convert(model)"
        )
    if torch.is_autocast_enabled(query.device.type):
        raise ValueError(
            "batch-invariant layers run in the dtype of the weights, so torch.autocast would go unheard, got autocast "
            f"to {torch.get_autocast_dtype(query.device.type)}; leave autocast and load the model in that dtype"
        )
    if dropout > 0 and module.training:
        raise ValueError(
            f"batch-invariant attention has no dropout, got dropout={dropout} in training; "
            "set attention_dropout=0 in the config or call model.eval()"
        )
    if output_attentions:
        raise ValueError(
            "batch-invariant attention does not compute attention weights, got output_attentions=True; "
            "use attn_implementation='eager' to look at them"
        )
    for keyword, meaning in _UNSUPPORTED_KEYWORDS.items():
        if kwargs.get(keyword) is not None:
            raise ValueError(
                f"{name} passes {keyword} ({meaning}), which batch-invariant attention does not support; "
                "use another attn_implementation for this model"
            )


def _one_of(s_aux: torch.Tensor | None, sinks: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    if s_aux is not None and sinks is not None:
        raise ValueError("s_aux and sinks are two names of the attention sinks, got both; pass one")
    sinks = s_aux if sinks is None else sinks
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise ValueError(
            f"attention sinks must have shape ({query.shape[1]},), one per query head, got {tuple(sinks.shape)}; "
            "sinks that depend on the token are not supported"
        )
    return sinks


def _check_lengths(mask: BatchInvariantMask, query: torch.Tensor, key: torch.Tensor) -> None:
    if (mask.query_len, mask.kv_len) != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"the mask is for {mask.query_len} queries and {mask.kv_len} keys, but attention got {query.shape[2]} and "
            f"{key.shape[2]}; build the mask from the same cache and inputs"
        )
