"""Section D: chunked prefill, and prefixes taken from a cache."""

import copy
import itertools

import torch
from transformers import DynamicCache

from tests.cases.models import build, build_refused
from tests.cases.support import (
    check,
    check_refused,
    device_dtype,
    in_pieces,
    log_softmax,
    random_ids,
)


@device_dtype()
def test_case_043_vllm_5543_cold_and_warm_prefixes_and_a_chain_of_twelve(device, dtype):
    """The last logits do not tell how much of the text came from a cache, nor after how many reuses in a row."""
    model = build("qwen3", device, dtype)
    text = random_ids(model, 1, 120)

    def comparisons():
        cold = model(text, use_cache=False).logits
        for warm in (0, 1, 15, 16, 64, 100):
            yield f"{warm} tokens from the cache", in_pieces(model, text, [warm])[:, -1], cold[:, -1]
        cache = DynamicCache(config=model.config)
        for link in range(12):
            cache = copy.deepcopy(cache)
            ids = text[:, 10 * link : 10 * link + 10]
            logits = model(ids, past_key_values=cache, use_cache=True).logits
            yield f"link {link} of the chain", logits[:, -1], cold[:, 10 * link + 9]

    check(model, comparisons)


@device_dtype()
def test_case_044_vllm_46592_any_chunk_boundaries_give_the_logits_of_one_prefill(device, dtype):
    """A prompt of 300 tokens, cut once at any multiple of 7 or 64, or cut into pieces of 7 or 64, ends the same.

    A CPU takes every sixth of the single cuts.
    """
    model = build("llama", device, dtype)
    text = random_ids(model, 1, 300)
    cuts = sorted({*range(7, 300, 7), *range(64, 300, 64)})
    cuts = cuts if device == "cuda" else cuts[::6]

    def comparisons():
        whole = model(text, use_cache=False).logits
        for size in (7, 64):
            yield f"pieces of {size}", in_pieces(model, text, range(size, 300, size)), whole
        for cut in cuts:
            yield f"cut at {cut}", in_pieces(model, text, [cut]), whole

    check(model, comparisons)


def test_case_046_sglang_13309_gated_delta_rule_is_refused():
    """A gated delta rule sums in chunks that a prefix's end would shift: refused by the mixer's name."""
    check_refused(build_refused("qwen3_next"), "linear_attn")


class PrefixScorer:
    """Scores prompts through one cache: keeps the keys and logits of the last prompt, reuses the common beginning."""

    def __init__(self, model):
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.ids: list[int] = []
        self.logits = None

    def score(self, prompt: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (T - 1,) of a prompt's tokens; prompt (T,)."""
        ids = prompt.tolist()
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, ids, strict=False))
        common = min(sum(1 for _ in pairs), len(ids) - 1)
        if surplus := len(self.ids) - common:
            self.cache.crop(-surplus)
        rest = self.model(prompt[None, common:], past_key_values=self.cache, use_cache=True).logits[0]
        self.logits = rest if self.logits is None else torch.cat([self.logits[:common], rest])
        self.ids = ids
        log_probs = log_softmax(self.model, self.logits[:-1])
        return log_probs.gather(-1, prompt[1:, None])[:, 0]


@device_dtype()
def test_case_047_vllm_42245_prompt_scores_through_one_cache_do_not_depend_on_the_order(device, dtype):
    """Three overlapping prompts, scored in all six orders through one prefix cache, get the scores of a cold run."""
    model = build("llama", device, dtype)
    shared = random_ids(model, 30)
    tails = [random_ids(model, length, seed=length) for length in (4, 9, 17)]
    prompts = [torch.cat([shared[:kept], tail]) for kept, tail in zip((30, 22, 30), tails, strict=True)]

    def comparisons():
        cold = [PrefixScorer(model).score(prompt) for prompt in prompts]
        for order in itertools.permutations(range(3)):
            scorer = PrefixScorer(model)
            for i in order:
                yield f"prompt {i} in order {order}", scorer.score(prompts[i]), cold[i]

    check(model, comparisons)
