"""Tiny random models of the families that the guarantee is tested on."""

import torch
import transformers

COMMON = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16384,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = dict(vocab_size=512, n_embd=256, n_layer=2, n_head=4, n_positions=9216, bos_token_id=1, eos_token_id=2)
# Two layers, one of each kind, where a family alternates; a window shorter than the test sequences.
ALTERNATING = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])

FAMILIES = {
    "llama": ("LlamaConfig", COMMON),
    "qwen2": ("Qwen2Config", COMMON),
    "qwen3": ("Qwen3Config", dict(COMMON, head_dim=64)),
    "mistral": ("MistralConfig", dict(COMMON, sliding_window=16)),
    "gemma2": ("Gemma2Config", dict(COMMON, head_dim=64, query_pre_attn_scalar=64, **ALTERNATING)),
    "gemma3": ("Gemma3TextConfig", dict(COMMON, head_dim=64, query_pre_attn_scalar=64, **ALTERNATING)),
    "phi3": ("Phi3Config", COMMON),
    "gpt2": ("GPT2Config", GPT2),
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **overrides):
    """A random causal LM of a family, in eval mode, with stock attention."""
    name, arguments = FAMILIES[family]
    config = getattr(transformers, name)(**{**arguments, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    # Biases and norm weights start as constants: make them matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(device).eval()
