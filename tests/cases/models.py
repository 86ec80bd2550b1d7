"""Random-weight models of the families that the reports are about: small on a CPU, the recipes' sizes on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers


@dataclass(frozen=True)
class Size:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int


# The CPU path certifies every weight shape once per process, so all families share these few shapes.
SMALL = Size(hidden=256, inner=704, heads=4, kv_heads=2, vocab=512)
FULL = Size(hidden=1024, inner=2816, heads=16, kv_heads=4, vocab=2048)
HEAD_DIM = 64
PAD = 0


def size_for(device: str) -> Size:
    return FULL if device == "cuda" else SMALL


def _common(size: Size) -> dict:
    return dict(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=2,
        num_attention_heads=size.heads,
        max_position_embeddings=4096,
        pad_token_id=PAD,
    )


def _llama(size: Size) -> dict:
    return dict(_common(size), num_key_value_heads=size.kv_heads)


def _qwen3(size: Size) -> dict:
    return dict(_llama(size), head_dim=HEAD_DIM)


def _gemma2(size: Size) -> dict:
    return dict(
        _qwen3(size),
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    )


def _opt(size: Size) -> dict:
    common = _common(size)
    common["ffn_dim"] = common.pop("intermediate_size")
    return dict(common, word_embed_proj_dim=size.hidden)


def _gpt2(size: Size) -> dict:
    return dict(vocab_size=size.vocab, n_embd=size.hidden, n_inner=size.inner, n_layer=2, n_head=size.heads)


def _t5(size: Size) -> dict:
    return dict(
        vocab_size=size.vocab,
        d_model=size.hidden,
        d_ff=size.inner,
        d_kv=HEAD_DIM,
        num_layers=2,
        num_heads=size.heads,
        decoder_start_token_id=PAD,
    )


FAMILIES: dict[str, tuple[str, Callable[[Size], dict]]] = {
    "llama": ("LlamaConfig", _llama),
    "mistral": ("MistralConfig", _llama),
    "qwen2": ("Qwen2Config", _llama),
    "qwen3": ("Qwen3Config", _qwen3),
    "gemma2": ("Gemma2Config", _gemma2),
    "gemma3": ("Gemma3TextConfig", _gemma2),
    "phi3": ("Phi3Config", _llama),
    "phi": ("PhiConfig", _common),
    "opt": ("OPTConfig", _opt),
    "gpt2": ("GPT2Config", _gpt2),
    "bert": ("BertConfig", _common),
    "t5": ("T5Config", _t5),
    "mt5": ("MT5Config", _t5),
}


def build(family: str, device: str, dtype: torch.dtype, cls: str = "AutoModelForCausalLM", **overrides):
    """A stock model of a family with seeded random weights and the default attention, in eval mode.

    cls: a class of transformers, often an auto class. overrides: for the config. Generation never stops early.
    """
    config_name, arguments = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**arguments(size_for(device)), **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, cls).from_config(config, dtype=dtype)
    # Biases and norm weights start as constants, so that whatever is done with them would go unseen.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    if model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD
    return model.to(device).eval()


# --- models with parts that conversion refuses ---

_TINY = dict(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
_TINY_GQA = dict(_TINY, intermediate_size=256, num_key_value_heads=2)
_DELTA_NET = dict(
    _TINY_GQA,
    head_dim=32,
    layer_types=["linear_attention", "full_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64)

REFUSED: dict[str, tuple[str, dict]] = {
    "xglm": ("XGLMConfig", dict(vocab_size=256, d_model=128, ffn_dim=256, num_layers=2, attention_heads=4)),
    "bloom": ("BloomConfig", dict(vocab_size=256, hidden_size=128, n_layer=2, n_head=4)),
    "gpt_neo": (
        "GPTNeoConfig",
        dict(vocab_size=256, hidden_size=128, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA_NET),
    "qwen3_next": ("Qwen3NextConfig", dict(_DELTA_NET, **_MOE)),
    "bamba": (
        "BambaConfig",
        dict(_TINY_GQA, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, attn_layer_indices=[1]),
    ),
    "falcon_h1": ("FalconH1Config", _TINY_GQA),
    "recurrent_gemma": ("RecurrentGemmaConfig", dict(_TINY_GQA, lru_width=128)),
    "mamba2": (
        "Mamba2Config",
        dict(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_heads=8, head_dim=32, state_size=16, n_groups=1),
    ),
    "whisper": (
        "WhisperConfig",
        dict(
            d_model=128,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=256,
            decoder_ffn_dim=256,
        ),
    ),
}


def build_refused(family: str, cls: str = "AutoModelForCausalLM"):
    """A tiny stock model, on the CPU, of a family that conversion refuses."""
    config_name, arguments = REFUSED[family]
    config = getattr(transformers, config_name)(**arguments)
    return getattr(transformers, cls).from_config(config).eval()
