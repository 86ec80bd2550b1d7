"""Section E: logits of generation steps against logits of one forward over the finished text."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_batchinv
from hf_batchinv.testing import assert_same_bits
from tests.cases.models import build, build_refused
from tests.cases.support import (
    check,
    check_logic,
    check_refused,
    device_dtype,
    failures,
    generate,
    random_ids,
)


@device_dtype()
def test_case_049_vllm_48271_rms_norm_row_in_any_number_of_rows(device, dtype):
    """A row has the same RMS norm alone and among 255, 256, 257 or 4096 rows, with and without a residual added.

    Stock torch passes on a CPU, where it sums each row by itself; the control is the next test.
    """
    draw = torch.Generator().manual_seed(0)
    norms = nn.ModuleList([LlamaRMSNorm(1024), LlamaRMSNorm(4096)]).to(device, dtype)
    counts = (1, 255, 256, 257, 4096) if device == "cuda" else (1, 255, 256, 257, 512)

    def comparisons():
        for norm in norms:
            width = norm.weight.numel()
            norm.weight.data.copy_(torch.randn(width, generator=draw))
            x, residual = (torch.randn(counts[-1], width, generator=draw).to(device, dtype) for _ in range(2))
            for rows in counts:
                for what, states in (("", x[:rows]), (", residual", x[:rows] + residual[:rows])):
                    yield f"width {width}, {rows} rows{what}", norm(states)[-1], norm(states[-1:])[0]

    hf_batchinv.convert(norms)
    assert failures(comparisons()) == {}


@device_dtype()
def test_case_049_vllm_48271_forward_over_more_than_256_tokens_agrees_with_every_decoding_step(device, dtype):
    """One forward over a generated text of more than 256 tokens has the logits, and so the argmax, of each step."""
    model = build("llama", device, dtype)
    prompt, new = (random_ids(model, 1, 10), 300) if device == "cuda" else (random_ids(model, 1, 240), 24)

    def comparisons():
        tokens, logits = generate(model, prompt, new)
        text = torch.cat([prompt, tokens], 1)
        again = model(text, use_cache=False).logits[:, prompt.shape[1] - 1 : -1].float()
        yield "logits", again, logits.float()
        yield "argmax", again.argmax(-1), tokens

    check(model, comparisons)


@device_dtype()
def test_case_050_transformers_24801_scores_logits_and_transition_scores_agree(device, dtype):
    """Without processors, generate()'s scores are its logits, its logits are forward's, and the transition scores are
    the log-softmax of both."""
    model = build("llama", device, dtype)
    prompt = random_ids(model, 1, 14)
    run = dict(max_new_tokens=8, do_sample=False, output_logits=True, output_scores=True, return_dict_in_generate=True)

    def comparisons():
        out = model.generate(prompt, **run)
        logits, scores = torch.stack(out.logits, 1), torch.stack(out.scores, 1)
        yield "scores are logits", scores, logits.to(scores.dtype)
        forward = model(out.sequences, use_cache=False).logits[:, 13:-1]
        yield "logits are forward's", logits.float(), forward.float()
        transitions = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        chosen = torch.log_softmax(forward.float(), -1).gather(-1, out.sequences[:, 14:, None])[..., 0]
        assert torch.allclose(transitions, chosen, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.1)

    check(model, comparisons)


@device_dtype()
@pytest.mark.parametrize("length", [1, 2, 50])
def test_case_052_transformers_40098_embeddings_in_place_of_token_ids(length, device, dtype):
    """Qwen 2 and GPT-2 give a text the same logits from ids and from embeddings, alone, in a batch and in generate."""
    for family in ("qwen2", "gpt2"):
        model = build(family, device, dtype)
        ids = random_ids(model, 5, length)

        def comparisons(model=model, ids=ids):
            embeddings = model.get_input_embeddings()(ids)
            alone = model(ids[:1]).logits
            yield "alone", model(inputs_embeds=embeddings[:1]).logits, alone
            yield "in a batch", model(inputs_embeds=embeddings).logits[:1], alone
            tokens, logits = generate(model, ids[:1], 4)
            embedded = generate(model, None, 4, inputs_embeds=embeddings)
            yield "generated tokens", embedded[0][:1], tokens
            yield "generated logits", embedded[1][:1], logits

        check(model, comparisons)


@device_dtype()
def test_case_052_transformers_40098_classifier_from_embeddings(device, dtype):
    """A Llama classifier scores a text without pads the same from ids and from embeddings; with pads, embeddings hide
    where the text ends, and the last position is scored."""
    model = build("llama", device, dtype, cls="AutoModelForSequenceClassification", num_labels=3)
    texts = {length: random_ids(model, 1, length) for length in (1, 2, 50)}

    def comparisons():
        for length, ids in texts.items():
            embeddings = model.get_input_embeddings()(ids)
            yield f"{length} tokens", model(inputs_embeds=embeddings).logits, model(ids).logits

    check_logic(model, comparisons)
    padded = torch.cat([texts[50], torch.zeros_like(texts[50][:, :3])], 1)
    with torch.no_grad():
        states = model.model(padded).last_hidden_state
        blind = model(inputs_embeds=model.get_input_embeddings()(padded)).logits
        assert_same_bits(blind, model.score(states)[:, -1], "score of the last position")
        assert_same_bits(model(padded).logits, model.score(states)[:, 49], "score of the last real token")


def test_case_052_transformers_40098_mamba2_is_refused():
    """Mamba 2, also named in the report, mixes tokens by a convolution and a state-space scan: refused by name."""
    check_refused(build_refused("mamba2"), "mixer")


def test_case_050_transformers_24801_whisper_is_refused():
    """Whisper, also named in the report, begins with convolutions over time: refused by name."""
    check_refused(build_refused("whisper", cls="AutoModelForSpeechSeq2Seq"), "Conv1d")
