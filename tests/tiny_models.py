"""Very small random models of every architecture that conversion is tested on."""

import torch
import transformers as T

from hf_batchinv.testing import differing

DECODER = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GEMMA = dict(DECODER, head_dim=16, query_pre_attn_scalar=16, sliding_window=8)
GPT2 = dict(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
ENCODER = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
OPT = dict(
    vocab_size=96, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64
)
T5 = dict(vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)

# name -> (model class, config class, config)
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama-classifier": ("LlamaForSequenceClassification", "LlamaConfig", DECODER),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", dict(DECODER, head_dim=16)),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", DECODER),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertModel", "BertConfig", ENCODER),
    "bert-mlm": ("BertForMaskedLM", "BertConfig", ENCODER),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}


def make(name: str, dtype: torch.dtype = torch.float32, **overrides) -> T.PreTrainedModel:
    """Return a stock model in eval mode, the same weights at every call."""
    model_class, config_class, arguments = MODELS[name]
    torch.manual_seed(0)
    model = getattr(T, model_class)(getattr(T, config_class)(**{**arguments, **overrides}))
    with torch.no_grad():  # biases and norm weights start as constants; make them matter
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def run(model: torch.nn.Module, rows: slice = slice(None), length: int = 13) -> torch.Tensor:
    """Return the first output of a model for the same five sequences at every call, or for a part of them."""
    ids = torch.randint(3, 90, (5, 13), generator=torch.Generator().manual_seed(1))[rows, :length]
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        return model(**inputs)[0]


def depends_on_the_batch(model: torch.nn.Module) -> bool:
    """Return whether a sequence's output bits differ between being alone and being one of five."""
    for length in (1, 13):
        together = run(model, length=length)
        alone = torch.cat([run(model, slice(row, row + 1), length) for row in (0, 3)])
        if differing(alone, together[[0, 3]]):
            return True
    return False
