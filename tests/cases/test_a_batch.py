"""Section A: the number of rows in the batch, and who the other rows are."""

import pytest
import torch

import hf_batchinv
from tests.cases.models import build, build_refused
from tests.cases.support import (
    Batch,
    check,
    check_refused,
    device_dtype,
    generate,
    generate_rows,
    log_softmax,
    random_ids,
    token_log_probs,
)


@device_dtype()
@pytest.mark.parametrize("family", ["opt", "mistral"])
def test_case_001_transformers_28732_same_text_alone_and_in_a_batch_of_three(family, device, dtype):
    """A text has the same logits alone, beside two mates of its length, and beside two shorter, right-padded ones."""
    model = build(family, device, dtype)
    texts = random_ids(model, 3, 8)

    def comparisons():
        alone = model(texts[:1]).logits[0]
        yield "mates of equal length", model(texts).logits[0], alone
        batch = Batch([texts[0], texts[1, :5], texts[2, :3]], "right")
        yield "shorter mates", batch.real(model(**batch.inputs).logits, 0), alone
        yield "texts of one token", model(texts[:, :1]).logits[0], model(texts[:1, :1]).logits[0]

    check(model, comparisons)


@device_dtype(cpu=("float32", "bfloat16", "float16"))
def test_case_002_transformers_26869_llama_logits_in_a_batch_that_holds_a_row_twice(device, dtype):
    """Both copies of a row keep its logits and its summed log-probability in batches of 2, 5 and 16."""
    model = build("llama", device, dtype)
    texts = random_ids(model, 16, 12)
    texts[1] = texts[0]

    def comparisons():
        alone = model(texts[:1]).logits
        alone_sum = token_log_probs(model, alone, texts[:1]).sum(-1)
        yield "texts of one token", model(texts[:2, :1]).logits[1], model(texts[:1, :1]).logits[0]
        for rows in (2, 5, 16):
            together = model(texts[:rows]).logits
            sums = token_log_probs(model, together, texts[:rows]).sum(-1)
            for copy in (0, 1):
                yield f"copy {copy} among {rows}", together[copy], alone[0]
                yield f"summed log-probability of copy {copy} among {rows}", sums[copy], alone_sum[0]

    check(model, comparisons)


@device_dtype()
def test_case_004_transformers_25921_t5_answers_copies_of_one_prompt_alike(device, dtype):
    """T5 gives n copies of a prompt one and the same greedy answer and step logits, for any n."""
    model = build("t5", device, dtype, cls="AutoModelForSeq2SeqLM")
    prompt = random_ids(model, 1, 11)

    def comparisons():
        tokens, logits = generate(model, prompt, 8)
        for copies in (2, 4, 8):
            many_tokens, many_logits = generate(model, prompt.repeat(copies, 1), 8)
            yield f"tokens of {copies} copies", many_tokens, tokens.repeat(copies, 1)
            yield f"logits of {copies} copies", many_logits, logits.repeat(copies, 1, 1)

    check(model, comparisons)


def test_case_005_transformers_22707_xglm_with_an_adapter_is_refused():
    """XGLM does its attention itself, so it is refused by name, also below a LoRA adapter."""
    from peft import LoraConfig, get_peft_model

    model = build_refused("xglm")
    check_refused(model, "XGLMAttention")
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    check_refused(adapted, "XGLMAttention")


@device_dtype(gpu=())
def test_case_005_transformers_22707_adapter_answers_a_prompt_alike_beside_a_longer_one(device, dtype):
    """The same complaint on a covered family: Llama with a random LoRA adapter, a prompt beside a longer one."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(build("llama", device, dtype), lora).to(dtype).eval()
    short, long = random_ids(model, 9), random_ids(model, 16, seed=2)

    def comparisons():
        tokens, logits = generate(model, short[None], 8)
        mixed_tokens, mixed_logits = generate_rows(model, [short, long], 8)
        yield "tokens", mixed_tokens[0], tokens[0]
        yield "logits", mixed_logits[0], logits[0]

    check(model, comparisons)


@device_dtype()
def test_case_007_transformers_23017_mt5_beam_sampling_with_a_random_stream_per_row(device, dtype, monkeypatch):
    """Beam sampling gives a text the same beams in any batch, once each row draws from a stream of its own.

    generate() draws for all rows from one stream, so that equal logits alone do not give equal samples.
    """
    model = build("mt5", device, dtype, cls="AutoModelForSeq2SeqLM")
    texts = random_ids(model, 4, 9)
    multinomial = torch.multinomial
    streams: list[torch.Generator] = []

    def draw_row_by_row(probabilities, num_samples):
        while len(streams) < len(probabilities):
            streams.append(torch.Generator(device).manual_seed(5))
        rows = zip(probabilities, streams, strict=False)
        return torch.stack([multinomial(row, num_samples, generator=stream) for row, stream in rows])

    monkeypatch.setattr(torch, "multinomial", draw_row_by_row)

    def sample(rows: int):
        streams.clear()
        out = model.generate(
            texts[:rows],
            num_beams=6,
            do_sample=True,
            top_k=20,
            max_new_tokens=8,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences[0], torch.stack(out.logits, 1)[:6]

    def comparisons():
        sequence, logits = sample(1)
        for rows in (2, 4):
            together = sample(rows)
            yield f"step logits of the 6 beams, {rows} texts", together[1], logits
            yield f"tokens, {rows} texts", together[0], sequence

    check(model, comparisons)


@device_dtype(cpu=("float32", "bfloat16"))
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_case_008_unsloth_9708_prompts_answered_one_by_one_and_in_padded_batches(family, device, dtype):
    """Prompts of 12 to 16 tokens get the same answers one by one and in batches of 2, 4 and 8, every time."""
    model = build(family, device, dtype)
    prompts = [random_ids(model, length, seed=length + i) for i, length in enumerate((12, 16, 13, 15, 14, 12, 16, 13))]
    new = 16 if device == "cuda" else 4

    def comparisons():
        alone = [generate(model, prompt[None], new) for prompt in prompts]
        for rows in (1, 2, 4, 8):
            for begin in range(0, 8, rows):
                tokens, logits = generate_rows(model, prompts[begin : begin + rows], new)
                for i in range(rows):
                    yield f"tokens of {begin + i}, batches of {rows}", tokens[i], alone[begin + i][0][0]
                    yield f"logits of {begin + i}, batches of {rows}", logits[i], alone[begin + i][1][0]
        tokens, logits = generate_rows(model, prompts, new)
        again = generate_rows(model, prompts, new)
        yield "tokens, second run", again[0], tokens
        yield "logits, second run", again[1], logits

    check(model, comparisons)


def test_case_008_unsloth_9708_gated_delta_net_is_refused():
    """The reported family mixes tokens by a convolution and a gated delta rule: refused by the mixer's name."""
    check_refused(build_refused("qwen3_5"), "linear_attn")


@device_dtype()
def test_case_010_transformers_24839_losses_do_not_depend_on_the_eval_batch_size(device, dtype):
    """Twelve texts of unequal length keep their per-token losses, and their sum in a fixed order, in any batch size."""
    model = build("llama", device, dtype)
    texts = [random_ids(model, length, seed=length) for length in range(4, 16)]

    def losses(rows: int) -> list[torch.Tensor]:
        kept = []
        for begin in range(0, len(texts), rows):
            batch = Batch(texts[begin : begin + rows], "right")
            labels = batch.ids.masked_fill(batch.mask == 0, -100)
            logits = model(**batch.inputs).logits
            each = -token_log_probs(model, logits, batch.ids)
            kept += [row[label != -100] for row, label in zip(each, labels[:, 1:], strict=True)]
        return kept

    def comparisons():
        alone = torch.cat(losses(1))
        for rows in (3, 4, 12):
            together = torch.cat(losses(rows))
            yield f"losses, batches of {rows}", together, alone
            yield f"their sum, batches of {rows}", together.double().sum(), alone.double().sum()

    check(model, comparisons)


@device_dtype(gpu=())
def test_case_010_transformers_24839_mean_of_batch_means_still_depends_on_the_batch_size(device, dtype):
    """Averaging batches of unequal token counts weighs tokens unequally: no kernel cures that part of the report."""
    model = hf_batchinv.convert(build("llama", device, dtype))
    texts = [random_ids(model, length, seed=length) for length in (4, 4, 15)]

    @torch.no_grad()
    def mean_of_means(rows: int) -> float:
        batches = [Batch(texts[i : i + rows], "right") for i in range(0, len(texts), rows)]
        labels = [batch.ids.masked_fill(batch.mask == 0, -100) for batch in batches]
        means = [float(model(**batch.inputs, labels=of).loss) for batch, of in zip(batches, labels, strict=True)]
        return sum(means) / len(means)

    assert abs(mean_of_means(1) - mean_of_means(2)) > 1e-4


def test_case_010_transformers_24839_gpt_neo_is_refused():
    """GPT-Neo, also named in the report, multiplies queries and keys itself: refused by name."""
    check_refused(build_refused("gpt_neo"), "GPTNeoSelfAttention")


@device_dtype()
def test_case_011_reward_bench_137_reward_of_a_text_alone_padded_and_in_a_batch(device, dtype):
    """A reward head with one output scores a text the same alone, with five pads, and among eight texts."""
    model = build("llama", device, dtype, cls="AutoModelForSequenceClassification", num_labels=1)
    texts = [random_ids(model, length, seed=length) for length in (11, 5, 16, 8, 20, 3, 14, 9)]

    def comparisons():
        alone = model(texts[0][None]).logits
        padded = Batch(texts[:1], "right", length=16)
        yield "five pads", model(**padded.inputs).logits, alone
        batch = Batch(texts, "right")
        yield "among eight", model(**batch.inputs).logits[:1], alone
        for i, text in enumerate(texts):
            yield f"text {i}", model(**batch.inputs).logits[i], model(text[None]).logits[0]

    check(model, comparisons)


@device_dtype(cpu=("float32", "float16"))
def test_case_013_vllm_1570_greedy_text_with_two_more_prompts_in_the_call(device, dtype):
    """The greedy answer to a prompt is the same in calls with two prompts, with four, and with other counts."""
    model = build("llama", device, dtype)
    prompts = random_ids(model, 7, 10)
    new = 64 if device == "cuda" else 8

    def comparisons():
        tokens, logits = generate(model, prompts[:2], new)
        for rows in (1, 4, 7):
            other_tokens, other_logits = generate(model, prompts[:rows], new)
            yield f"tokens, {rows} prompts", other_tokens[0], tokens[0]
            yield f"logits, {rows} prompts", other_logits[0], logits[0]

    check(model, comparisons)


@device_dtype(cpu=("float32", "float16"))
def test_case_014_vllm_51187_log_probs_and_top_k_with_up_to_64_mates(device, dtype):
    """Row 0 keeps logits, log-probabilities and top-k with 1 to 64 mates (on a CPU: with the counts that matter)."""
    model = build("qwen3", device, dtype)
    texts = random_ids(model, 65, 5)
    counts = range(1, 65) if device == "cuda" else (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 44, 45, 63, 64)

    def comparisons():
        alone = model(texts[:1]).logits[0]
        alone_log_probs = log_softmax(model, alone)
        for mates in counts:
            logits = model(texts[: 1 + mates]).logits
            log_probs = log_softmax(model, logits)[0]
            yield f"logits, {mates} mates", logits[0], alone
            yield f"log-probabilities, {mates} mates", log_probs, alone_log_probs
            yield f"top 10, {mates} mates", log_probs.topk(10).values, alone_log_probs.topk(10).values

    check(model, comparisons)
