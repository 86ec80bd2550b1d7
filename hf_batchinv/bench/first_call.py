"""What the first `generate` of a process costs: the kernels that Triton compiles for a whole model."""

import time
from collections import Counter

import torch
import transformers

from ..conversion import convert
from .compilations import count_compilations

# (batch, tokens of the longest prompt): prefill and decoding at three batch sizes.
CALLS = ((1, 200), (4, 60), (32, 100))


def llama(device: str) -> transformers.PreTrainedModel:
    """A converted Llama in bfloat16: two layers with the head size of real models, so that their tiles serve it."""
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    return convert(model.to(device, torch.bfloat16).eval())


def generate(model: transformers.PreTrainedModel, batch: int, length: int) -> None:
    """Greedy decoding of four tokens behind left-padded rows of different lengths."""
    ids = torch.randint(2, 1024, (batch, length), generator=torch.Generator().manual_seed(batch))
    mask = torch.arange(length) >= torch.arange(batch)[:, None] * length // (2 * batch)
    inputs = {"input_ids": (ids * mask).to(model.device), "attention_mask": mask.long().to(model.device)}
    model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)


def measure(device: str = "cuda") -> dict:
    """The row {"op": "first_call", "calls", "compilations", "kernels", "seconds"}; `kernels` counts them by name.

    Right only in a process that has compiled nothing of ours yet. Seconds are short where Triton's cache on disk has
    the kernels; compilations count all the same. A self-check that runs here for the first time counts, too.
    """
    model = llama(device)
    begin = time.perf_counter()
    with count_compilations() as names:
        for batch, length in CALLS:
            generate(model, batch, length)
        if device == "cuda":
            torch.cuda.synchronize()
    seconds = round(time.perf_counter() - begin, 2)
    calls = [{"batch": batch, "prompt": length} for batch, length in CALLS]
    kernels = dict(sorted(Counter(names).items()))
    return {"op": "first_call", "calls": calls, "compilations": len(names), "kernels": kernels, "seconds": seconds}
