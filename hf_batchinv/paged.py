"""What continuous batching hands to an attention function, brought into one form.

A step packs requests end to end: queries (1, Hq, tokens, D), `cu_seq_lens_q` and `cu_seq_lens_k` bound the requests in
queries and keys. In transformers 5.24 the keys at hand come out of the paged cache already; up to 5.22 the attention
function gets the cache itself and must write the new keys into it and read all of them back.
"""

import inspect

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from .mask import BatchInvariantMask


def read_cache(
    cache: PagedAttentionCache, module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put new keys (1, Hkv, tokens, D) and values into the cache; return all that the requests see, in that form.

    kwargs has read_index, write_index, and cu_seq_lens_k and max_length_k by type of layer; the latter two become
    those of this layer. Raises ValueError for another cache.
    """
    if not isinstance(cache, PagedAttentionCache):
        raise ValueError(
            f"batch-invariant attention updates no cache but that of generate_batch, got {type(cache).__name__} as "
            "cache; use another attn_implementation for this model"
        )
    if "kwargs" in inspect.signature(cache.update).parameters:  # 5.22
        return cache.update(key, value, module.layer_idx, kwargs)
    key, value = cache.update(key, value, module.layer_idx, kwargs["read_index"], kwargs["write_index"])
    if isinstance(kwargs["cu_seq_lens_k"], dict):  # more than one type of layer; "no window" is 1 there
        kind = "full_attention" if cache.sliding_windows[module.layer_idx] == 1 else "sliding_attention"
        kwargs.update({name: kwargs[name][kind] for name in ("cu_seq_lens_k", "max_length_k")})
    return tuple(states.transpose(0, 1)[None] for states in (key, value))


def requests_pattern(
    module: torch.nn.Module,
    mask: object,
    sliding_window: int | None,
    position_ids: torch.Tensor | None,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
) -> tuple[bool, tuple[int, int], torch.Tensor | None]:
    """Return (causal, window, origin) of requests, each causal from the bottom right corner.

    A sliding layer's keys are those of the request's queries and the last window - 1 before them: where the first key
    of all was (`origin`, negative) follows from the position of the last query.

    Raises ValueError for a mask, and for a sliding layer that does not say where its queries stand.
    """
    name = type(module).__name__
    # Up to 5.22 a model makes its mask from the packed tokens, which says nothing about requests.
    if mask is not None and not isinstance(mask, BatchInvariantMask):
        raise ValueError(
            f"continuous batching packs requests without a mask, got attention_mask for {name}; "
            "call generate_batch without one"
        )
    if sliding_window is None:
        if _slides(module):
            raise ValueError(
                f"{name} is a sliding-window layer that passes no sliding_window to its attention, so its cropped "
                "cache cannot be told apart; use generate for this model"
            )
        return True, (-1, -1), None
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[0] != 1:
        raise ValueError(
            f"{name} must pass position_ids of shape (1, tokens) to its sliding-window attention in continuous "
            f"batching, got {None if position_ids is None else tuple(position_ids.shape)}; use generate for this model"
        )
    last = position_ids[0].index_select(0, (bounds_q[1:] - 1).clamp_(min=0))
    return True, (sliding_window - 1, -1), (bounds_k.diff() - 1 - last).to(torch.int32)


def _slides(module: torch.nn.Module) -> bool:
    """Whether continuous batching keeps only a window of this layer's keys."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return getattr(config, "sliding_window", None) is not None
    return index is not None and types[index] == "sliding_attention"
