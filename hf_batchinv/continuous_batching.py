"""Continuous batching (`generate_batch`) of converted models.

Transformers decides in `ContinuousBatchingManager.switch_to_cb_friendly_attn` which attention may run. What it would do
with ours differs from release to release, and each of it ends the promise:

    5.17    swaps it for FlashAttention where that is installed, else asks for "paged|batch_invariant"
    5.22 on swaps it likewise, else refuses it, as every name without "flash" is

So for a converted model this method is replaced: nothing is swapped, and in 5.17 the paged name is set. Whether the
release is of one or the other kind is read from the signatures and argument names around it; one that looks like
neither is refused. Other models go through the stock method.
"""

import inspect

import torch
import transformers
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching import cache, continuous_api, input_outputs

from . import conversion
from .attention import batch_invariant_attention
from .dispatch import ATTENTION_NAME
from .wrapping import is_wrapped, unwrapped, wrapped

PAGED_NAME = f"paged|{ATTENTION_NAME}"

_PLAIN = "the name stays"
_PREFIXED = "the name gets a prefix"

_ARGUMENTS = {
    "attention_mask",
    "block_table",
    "cache",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "input_ids",
    "logits_indices",
    "logits_processor_args",
    "position_ids",
    "read_index",
    "use_cache",
    "write_index",
}
# What was tried: parameters of the switch and of the cache's update, and the arguments of a model's forward.
_KNOWN = {
    (
        ("self", "model"),
        ("self", "key_states", "value_states", "layer_idx", "read_index", "write_index"),
        frozenset(_ARGUMENTS | {"max_seqlen_q", "max_seqlen_k"}),
    ): _PREFIXED,
    (
        ("self", "model", "auto_switch_to_flash"),
        ("self", "key_states", "value_states", "layer_idx", "kwargs"),
        frozenset(_ARGUMENTS | {"max_length_q", "max_length_k", "is_causal"}),
    ): _PLAIN,
}


def install() -> None:
    """Wrap the two methods of ContinuousBatchingManager and register the paged name; again is a no-op."""
    AttentionInterface.register(PAGED_NAME, paged_batch_invariant_attention)
    for name, wrapper in (("__init__", _init), ("switch_to_cb_friendly_attn", _switch)):
        original = vars(continuous_api.ContinuousBatchingManager)[name]
        if not is_wrapped(original):
            setattr(continuous_api.ContinuousBatchingManager, name, wrapped(original, wrapper))


def uninstall() -> None:
    """Put the stock methods back: `generate_batch` of a converted model is then what Transformers makes of it."""
    for name in ("__init__", "switch_to_cb_friendly_attn"):
        method = vars(continuous_api.ContinuousBatchingManager)[name]
        setattr(continuous_api.ContinuousBatchingManager, name, unwrapped(method))


def paged_batch_invariant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function under the paged name (transformers 5.17).

    Args:
        query: (1, Hq, tokens, D), the queries of all requests of a step.
        key, value: (1, Hkv, tokens, D), (1, Hkv, tokens, Dv), their new keys and values.
        kwargs: cache, read_index, write_index, cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q and max_seqlen_k as made by
            continuous batching, the rest as in `batch_invariant_attention`.

    Returns (1, tokens, Hq, Dv), contiguous, and None for the attention weights.

    Raises ValueError without a paged cache, and as `batch_invariant_attention` does.
    """
    if kwargs.get("cache") is None:
        raise ValueError(
            f"attn_implementation={PAGED_NAME!r} expects the paged cache of generate_batch, got none; "
            f"load the model with attn_implementation={ATTENTION_NAME!r}"
        )
    kwargs.update({f"max_length_{of}": kwargs.pop(f"max_seqlen_{of}") for of in "qk"})
    return batch_invariant_attention(module, query, key, value, attention_mask, **kwargs)


def _init(original, self, *args, **kwargs):
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    model = given.get("model")
    if isinstance(model, PreTrainedModel) and conversion.is_converted(model):
        _check_settings(model, given.get("generation_config"), given.get("continuous_batching_config"))
    return original(self, *args, **kwargs)


def _switch(original, self, model, *args, **kwargs):
    name = model.config._attn_implementation
    if not conversion.is_converted(model) and name not in (ATTENTION_NAME, PAGED_NAME):
        return original(self, model, *args, **kwargs)
    if name not in (ATTENTION_NAME, PAGED_NAME):
        raise ValueError(
            f"continuous batching of a converted model needs attn_implementation={ATTENTION_NAME!r}, got {name!r}; "
            "call hf_batchinv.convert(model) again, or hf_batchinv.revert(model) to run it stock"
        )
    if _kind(original) == _PREFIXED and name != PAGED_NAME:
        model.set_attn_implementation(PAGED_NAME)
        self._original_attn_impl = name
    return None


def _kind(switch) -> str:
    """Which of the kinds of releases this is, given the stock switch method."""
    arguments = getattr(input_outputs, "PagedAttentionArgs", None)
    looks = (
        tuple(inspect.signature(switch).parameters),
        tuple(inspect.signature(cache.PagedAttentionCache.update).parameters),
        frozenset(getattr(arguments, "__annotations__", ())),
    )
    if looks not in _KNOWN:
        raise RuntimeError(
            f"generate_batch of a converted model was tried with transformers 5.17 to 5.24, whose internals differ "
            f"from those of transformers {transformers.__version__}; use generate, or one of these releases"
        )
    return _KNOWN[looks]


def _check_settings(model, generation_config, continuous_batching_config) -> None:
    compilers = [
        (continuous_batching_config, "varlen_compile_config"),
        (continuous_batching_config, "decode_compile_config"),
        (continuous_batching_config, "default_compile_level"),
        (generation_config, "compile_config"),
        (model.config.get_text_config(), "compile_config"),
    ]
    for owner, name in compilers:
        if value := getattr(owner, name, None):
            raise ValueError(
                "continuous batching would compile a converted model with Inductor, which drops roundings, "
                f"got {name}={value!r}; leave it out"
            )
    for name in ("use_cuda_graph", "q_padding_interval_size", "kv_padding_interval_size"):
        value = getattr(continuous_batching_config, name, None)
        if any(value) if isinstance(value, tuple) else value:
            raise ValueError(
                "continuous batching of a converted model was not tried with CUDA graphs, "
                f"got {name}={value!r}; leave it out"
            )
