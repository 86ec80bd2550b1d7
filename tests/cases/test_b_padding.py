"""Section B: padding on either side, fully masked rows, and which token counts as the last."""

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_batchinv
from hf_batchinv.testing import assert_same_bits, differing
from tests.cases.models import build, build_refused
from tests.cases.support import (
    Batch,
    check,
    check_logic,
    check_refused,
    device_dtype,
    generate,
    generate_rows,
    positions,
    random_ids,
)

HALF_TOO = ("float32", "bfloat16", "float16")


@device_dtype()
def test_case_016_transformers_29419_left_and_right_padding_with_positions_from_the_mask(device, dtype):
    """A short row beside a full one has the same logits padded on either side, if position_ids count real tokens."""
    model = build("llama", device, dtype)
    full, short = random_ids(model, 23), random_ids(model, 21, seed=2)

    def comparisons():
        left, right = Batch([full, short], "left"), Batch([full, short], "right")
        left_logits, right_logits = model(**left.inputs).logits, model(**right.inputs).logits
        yield "short row, left against right", left.real(left_logits, 1), right.real(right_logits, 1)
        yield "full row", left_logits[0], right_logits[0]
        yield "short row, left against alone", left.real(left_logits, 1), model(short[None]).logits[0]
        yield "short row, right against alone", right.real(right_logits, 1), model(short[None]).logits[0]

    check(model, comparisons)


@device_dtype(gpu=("float32",))
def test_case_016_transformers_29419_without_position_ids_padding_sides_are_two_questions(device, dtype):
    """Without position_ids a left-padded row starts at a later position. Rotary angles are relative in exact arithmetic
    only: the logits are close but not equal, and only the unpadded mate keeps its bits."""
    model = hf_batchinv.convert(build("llama", device, dtype))
    rows = [random_ids(model, 23), random_ids(model, 21, seed=2)]
    left, right = Batch(rows, "left"), Batch(rows, "right")
    with torch.no_grad():
        left_logits, right_logits = model(**left.masked).logits, model(**right.masked).logits
    assert_same_bits(left_logits[0], right_logits[0], "full row")
    assert differing(left.real(left_logits, 1), right.real(right_logits, 1)) > 0
    distance = (left.real(left_logits, 1) - right.real(right_logits, 1)).abs().max()
    assert distance < (1e-3 if dtype == torch.float32 else 0.25)


@device_dtype()
def test_case_017_transformers_33095_default_positions_ignore_left_padding_and_generate_does_not(device, dtype):
    """Conversion leaves forward's default positions 0 ... n-1 alone. Positions from the mask, given by hand or by
    generate(), give a left-padded text the bits that it has alone."""
    model = build("llama", device, dtype)
    text = random_ids(model, 19)
    batch = Batch([text], "left", length=23)

    def comparisons():
        alone = model(text[None]).logits[0]
        yield "given positions", batch.real(model(**batch.inputs).logits, 0), alone
        padded, plain = generate_rows(model, [text, random_ids(model, 23, seed=2)], 4), generate(model, text[None], 4)
        yield "generate", padded[1][0], plain[1][0]

    check(model, comparisons)
    counted = torch.arange(23, device=device)[None]
    with torch.no_grad():
        default = model(**batch.masked).logits
        assert_same_bits(default, model(**batch.masked, position_ids=counted).logits, "default positions")
        assert differing(batch.real(default, 0), model(text[None]).logits[0]) > 0


def test_case_019_transformers_26380_bloom_is_refused():
    """BLOOM adds its ALiBi bias in an attention of its own: refused by name."""
    check_refused(build_refused("bloom", cls="AutoModelForSequenceClassification"), "BloomAttention")


@device_dtype()
def test_case_020_transformers_3021_gpt2_answers_prompts_of_two_lengths_in_one_batch(device, dtype):
    """GPT-2, with learned positions, continues two left-padded prompts as it continues each alone."""
    model = build("gpt2", device, dtype)
    prompts = [random_ids(model, 12), random_ids(model, 7, seed=2)]

    def comparisons():
        tokens, logits = generate_rows(model, prompts, 16)
        for i, prompt in enumerate(prompts):
            alone = generate(model, prompt[None], 16)
            yield f"tokens of prompt {i}", tokens[i], alone[0][0]
            yield f"logits of prompt {i}", logits[i], alone[1][0]

    check(model, comparisons)


@device_dtype()
def test_case_022_transformers_3150_bert_states_and_their_mean_over_real_tokens(device, dtype):
    """Ten pads leave BERT's real states, their mean and the pooled output alone; a mean over the pads, too, moves."""
    model = build("bert", device, dtype, cls="AutoModel")
    text = random_ids(model, 27)
    batch = Batch([text], "right", length=37)

    def comparisons():
        alone, padded = model(text[None]), model(**batch.masked)
        states = batch.real(padded.last_hidden_state, 0)
        yield "states", states, alone.last_hidden_state[0]
        yield "mean over real tokens", states.mean(0), alone.last_hidden_state[0].mean(0)
        yield "pooled", padded.pooler_output, alone.pooler_output

    check(model, comparisons)
    with torch.no_grad():
        plain_mean = model(**batch.masked).last_hidden_state.mean(1)
        assert differing(plain_mean, model(text[None]).last_hidden_state.mean(1)) > 0


@device_dtype(cpu=HALF_TOO)
def test_case_023_transformers_29739_left_padding_gives_no_nan_in_any_layer(device, dtype):
    """Left pads see nothing, yet no layer has a NaN or an infinity anywhere, and real tokens are as they are alone."""
    model = hf_batchinv.convert(build("llama", device, dtype))
    rows = [random_ids(model, 14), random_ids(model, 8, seed=2)]
    batch = Batch(rows, "left")
    with torch.no_grad():
        out = model(**batch.inputs, output_hidden_states=True)
        alone = model(rows[1][None], output_hidden_states=True)
    for layer, (states, want) in enumerate(zip(out.hidden_states, alone.hidden_states, strict=True)):
        assert states.isfinite().all(), f"layer {layer}"
        assert_same_bits(batch.real(states, 1), want[0], f"layer {layer}")
    assert out.logits.isfinite().all()


@device_dtype(cpu=HALF_TOO)
@pytest.mark.parametrize("form", ["bool", "lowest float", "minus infinity"])
def test_case_025_pytorch_103749_query_that_sees_no_key_gives_zeros_and_harms_no_other(form, device, dtype):
    """The registered attention function returns zeros for a query whose every key is masked, in each form of mask, and
    gives the other queries the bits that they have without it."""
    attend = ALL_ATTENTION_FUNCTIONS["batch_invariant"]
    module = hf_batchinv.convert(nn.Sequential(nn.Identity())).eval()
    draw = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, 5, 64, generator=draw).to(device, dtype)
    key, value = (torch.randn(2, 2, 9, 64, generator=draw).to(device, dtype) for _ in range(2))
    visible = torch.ones(2, 1, 5, 9, dtype=torch.bool, device=device)
    visible[0, :, 1, 4:] = False
    visible[1, :, 2] = False
    mask = visible
    if form != "bool":
        lowest = torch.finfo(dtype).min if form == "lowest float" else float("-inf")
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, lowest)

    out, weights = attend(module, query, key, value, mask)
    assert weights is None
    assert out.isfinite().all()
    assert (out[1, 2] == 0).all()
    others = [0, 1, 3, 4]
    without, _ = attend(module, query[:, :, others], key, value, mask[:, :, others])
    assert_same_bits(out[:, others], without, "other queries")


@device_dtype(cpu=HALF_TOO)
def test_case_026_unsloth_9848_gemma2_left_pads_with_a_window_shorter_than_the_prompts(device, dtype):
    """Gemma 2 in left-padded batches of 2, 4 and 8: nothing is NaN, in forward or generate, and real rows are as alone.

    The window is short enough for pads to fill it whole.
    """
    model = build("gemma2", device, dtype, sliding_window=8)
    prompts = [random_ids(model, length, seed=length) for length in (24, 6, 14, 9, 12, 7, 20, 5)]

    def comparisons():
        alone = [(model(prompt[None]).logits[0], generate(model, prompt[None], 3)[1][0]) for prompt in prompts]
        for rows in (2, 4, 8):
            batch = Batch(prompts[:rows], "left")
            logits = model(**batch.inputs).logits
            _, steps = generate_rows(model, prompts[:rows], 3)
            yield f"NaN in forward, batch of {rows}", logits.isnan(), torch.zeros_like(logits, dtype=torch.bool)
            yield f"NaN in generate, batch of {rows}", steps.isnan(), torch.zeros_like(steps, dtype=torch.bool)
            for i in range(rows):
                yield f"forward, row {i} of {rows}", batch.real(logits, i), alone[i][0]
                yield f"generate, row {i} of {rows}", steps[i], alone[i][1]

    check_logic(model, comparisons)


@device_dtype()
def test_case_028_transformers_35352_classifier_finds_the_last_token_of_a_text_with_eos_inside(device, dtype):
    """If end-of-text is the padding token, a text with one inside is scored the same alone and with three pads."""
    eos = 7
    head = dict(cls="AutoModelForSequenceClassification", num_labels=3)
    model = build("llama", device, dtype, **head, pad_token_id=eos, eos_token_id=eos)
    text = random_ids(model, 13)
    text[4] = text[5] = eos
    text[12] = 9
    ids = torch.full((1, 16), eos, device=device)
    ids[0, :13] = text
    mask = (torch.arange(16, device=device) < 13).long()[None]

    def comparisons():
        alone = model(text[None]).logits
        yield "three pads", model(ids, attention_mask=mask, position_ids=positions(mask)).logits, alone
        states = model.model(text[None]).last_hidden_state
        yield "the last token's score", alone, model.score(states)[:, -1]

    check_logic(model, comparisons)


@pytest.mark.parametrize(
    "family, part",
    [("qwen3_next", "linear_attn"), ("qwen3_5", "linear_attn"), ("bamba", "mamba"), ("falcon_h1", "mamba")],
)
def test_case_029_transformers_46773_linear_attention_models_are_refused(family, part):
    """Models that mix tokens by convolution and recurrence, padding included, are refused by the mixer's name."""
    check_refused(build_refused(family), part)
