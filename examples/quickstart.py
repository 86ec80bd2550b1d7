"""The same prompt alone and in a batch: stock Transformers and the one line that makes them agree, bit for bit.

python examples/quickstart.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_batchinv  # noqa: F401  (makes attn_implementation="batch_invariant" known to Transformers)
from hf_batchinv.smollm2 import find_smollm2

PROMPT = "Tell me about Richard Feynman"
OTHERS = ["Hi!", "Write a haiku about a lighthouse in the fog.", "Explain to a child why the sky is blue. " * 4]

device = "cuda" if torch.cuda.is_available() else "cpu"
name = find_smollm2()  # "HuggingFaceTB/SmolLM2-135M-Instruct", or a local copy if the Hub cannot be reached
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")


def ask(model, prompts):
    """Return the first prompt's answer and the logits of every step, (tokens, vocabulary)."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    options = {"add_generation_prompt": True, "padding": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tokenizer.apply_chat_template(chats, **options).to(device)
    result = model.generate(
        **inputs, do_sample=False, max_new_tokens=8, output_logits=True, return_dict_in_generate=True
    )
    answer = result.sequences[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True), torch.stack(result.logits, dim=1)[0]


for attention in ("sdpa", "batch_invariant"):
    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation=attention).to(device)
    text, alone = ask(model, [PROMPT])
    _, in_batch = ask(model, [PROMPT, *OTHERS])
    print(f"{attention}: {text!r}")
    print(f"  logit values that change in a batch of 4: {int((alone != in_batch).sum())} of {alone.numel()}")
