"""Section C: with and without a cache, static and dynamic caches, prefill and decoding."""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

import hf_batchinv
from tests.cases.models import build, build_refused
from tests.cases.support import (
    Batch,
    check,
    check_logic,
    check_refused,
    device_dtype,
    generate,
    generate_rows,
    in_pieces,
    random_ids,
)


@device_dtype()
def test_case_031_transformers_36536_step_logits_with_and_without_a_cache(device, dtype):
    """Every step of generate() has the same logits with the cache on and off."""
    model = build("llama", device, dtype)
    prompt = random_ids(model, 2, 9)
    new = 32 if device == "cuda" else 12

    def comparisons():
        tokens, logits = generate(model, prompt, new, use_cache=True)
        full_tokens, full_logits = generate(model, prompt, new, use_cache=False)
        yield "tokens", tokens, full_tokens
        for step in range(new):
            yield f"logits of step {step}", logits[:, step], full_logits[:, step]

    check(model, comparisons)


@device_dtype()
def test_case_032_transformers_34164_answer_from_a_copy_of_a_prefilled_prompt_cache(device, dtype):
    """A prompt whose beginning comes from a copied cache is answered as it is cold, for prefixes of 1 to 129 tokens."""
    model = build("llama", device, dtype)
    text = random_ids(model, 1, 136)

    def comparisons():
        for prefix in (1, 17, 64, 129):
            prompt = text[:, : prefix + 7]
            cache = DynamicCache(config=model.config)
            model(text[:, :prefix], past_key_values=cache, use_cache=True)
            tokens, logits = generate(model, prompt, 4, past_key_values=copy.deepcopy(cache))
            cold_tokens, cold_logits = generate(model, prompt, 4)
            yield f"tokens, prefix of {prefix}", tokens, cold_tokens
            yield f"logits, prefix of {prefix}", logits, cold_logits

    check(model, comparisons)


@device_dtype()
def test_case_034_pytorch_122889_linear_on_the_last_step_alone_and_in_the_sequence(device, dtype):
    """A linear layer gives the last row the same bits alone and at the end of 2, 10, 128 or 129 rows.

    The last shape, wide to narrow, is not the report's: GPU libraries split its long sums in half precision.
    """
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    shapes = ((20, 5), (128, 512), (1024, 2816), (2816, 1024))
    layers = nn.ModuleList(nn.Linear(*shape) for shape in shapes).to(device, dtype)
    inputs = [torch.randn(1, 129, layer.in_features, generator=draw).to(device, dtype) for layer in layers]

    def comparisons():
        for layer, x in zip(layers, inputs, strict=True):
            for length in (1, 2, 10, 128, 129):
                sequence = x[:, :length]
                what = f"{layer.in_features} -> {layer.out_features}, {length} rows"
                yield what, layer(sequence)[:, -1], layer(sequence[:, -1:])[:, 0]

    check(layers, comparisons)


@device_dtype(cpu=("float32", "bfloat16", "float16"))
def test_case_035_transformers_25420_decoding_and_padding_apart_and_together(device, dtype):
    """Decoding with a cache, left padding, and both at once, leave the logits of one full forward alone."""
    model = build("llama", device, dtype)
    text, mate = random_ids(model, 24), random_ids(model, 31, seed=2)
    steps = range(18, 24)

    def comparisons():
        alone = model(text[None]).logits[0]
        yield "decoded", in_pieces(model, text[None], steps)[0], alone
        batch = Batch([text, mate], "left")
        yield "padded", batch.real(model(**batch.inputs).logits, 0), alone
        both = in_pieces(model, batch.ids, [end + 7 for end in steps], batch.mask)
        yield "padded and decoded", batch.real(both, 0), alone

    check(model, comparisons)


PADDED_LENGTHS = (13, 8, 10)


@device_dtype()
@pytest.mark.parametrize("family", ["phi", "llama"])
def test_case_037_transformers_30688_static_and_dynamic_cache_on_a_left_padded_batch(family, device, dtype):
    """Three left-padded prompts go on alike from a dynamic cache, from static caches of any size, and alone."""
    model = build(family, device, dtype)
    prompts = [random_ids(model, length, seed=length) for length in PADDED_LENGTHS]

    def comparisons():
        tokens, logits = generate_rows(model, prompts, 6)
        for room in (19, 40, 100):
            cache = StaticCache(config=model.config, max_cache_len=room)
            got = generate_rows(model, prompts, 6, past_key_values=cache, disable_compile=True)
            yield f"tokens, static cache of {room}", got[0], tokens
            yield f"logits, static cache of {room}", got[1], logits
        for i, prompt in enumerate(prompts):
            yield f"prompt {i} alone", generate(model, prompt[None], 6)[1][0], logits[i]

    check(model, comparisons)


@device_dtype(cpu=())
@pytest.mark.parametrize("family", ["phi", "llama"])
def test_case_037_transformers_30688_static_cache_where_generate_would_compile(family, device, dtype):
    """The same on a GPU, compilation left to generate(): it compiles stock models there, but not converted ones, whose
    compiled decoding step would not have the bits of the prefill."""
    model = build(family, device, dtype)
    prompts = [random_ids(model, length, seed=length) for length in PADDED_LENGTHS]

    def comparisons():
        tokens, logits = generate_rows(model, prompts, 6)
        got = generate_rows(model, prompts, 6, cache_implementation="static")
        yield "tokens", got[0], tokens
        yield "logits", got[1], logits

    check_logic(model, comparisons)


@device_dtype()
def test_case_038_transformers_30351_static_cache_does_not_repeat_the_last_answer(device, dtype):
    """A prompt answered after another, from a static cache, gets the answer of a fresh model and of a dynamic cache.

    On a GPU generate() would compile a stock model's decoding step, which is how the report came about.
    """
    model = build("llama", device, dtype)
    first, second = (random_ids(model, 1, 12, seed=seed) for seed in (1, 2))
    static = dict(cache_implementation="static")

    def comparisons():
        generate(model, first, 8, **static)
        tokens, logits = generate(model, second, 8, **static)
        fresh = hf_batchinv.convert(build("llama", device, dtype))
        for what, want in (
            ("fresh model", generate(fresh, second, 8, **static)),
            ("dynamic cache", generate(model, second, 8)),
        ):
            yield f"tokens, {what}", tokens, want[0]
            yield f"logits, {what}", logits, want[1]

    check_logic(model, comparisons)


@device_dtype()
def test_case_040_transformers_37574_sliding_cache_around_the_window(device, dtype):
    """Decoding past a window of 16, to 15, 16, 17 and 40 tokens, matches one full forward."""
    model = build("gemma2", device, dtype, sliding_window=16)
    text = random_ids(model, 1, 40)

    def comparisons():
        for length in (15, 16, 17, 40):
            ids = text[:, :length]
            full = model(ids, use_cache=False).logits
            yield f"{length} tokens, from 10 on", in_pieces(model, ids, range(10, length)), full
            yield f"{length} tokens, in pieces of 7", in_pieces(model, ids, range(7, length, 7)), full

    check(model, comparisons)


def test_case_041_transformers_48961_recurrent_gemma_is_refused():
    """RecurrentGemma mixes tokens by a convolution and a recurrence: refused by the block's name."""
    check_refused(build_refused("recurrent_gemma"), "RecurrentGemmaRecurrentBlock")


@device_dtype()
def test_case_041_transformers_48961_static_equals_dynamic_on_a_sliding_model(device, dtype):
    """What the report's reviewer asked for, on a covered family with sliding layers: static and dynamic text agree."""
    model = build("gemma2", device, dtype, sliding_window=16)
    prompt = random_ids(model, 2, 13)

    def comparisons():
        tokens, logits = generate(model, prompt, 8)
        static = generate(model, prompt, 8, cache_implementation="static", disable_compile=True)
        yield "tokens", static[0], tokens
        yield "logits", static[1], logits

    check_logic(model, comparisons)
