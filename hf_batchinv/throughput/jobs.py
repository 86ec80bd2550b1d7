"""The work that is timed, each as one function that both sides run with the same arguments.

Every job returns its time and, as evidence, what it computed for the first and the last sequence. Both hold the same
tokens (`prompts`), so that one run of that sequence alone is the reference of both.

Time of generate: a logits processor marks every step, on a GPU with an event in the stream, and the result is the
median time from one mark to the next. So neither the prefill nor the set-up of `generate` is in it, nor the step in
which stock code records its CUDA graph anew in every call: it is the speed of a long answer.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..intercept import batch_invariant_mode
from .clock import Clock
from .settings import Setting

# Logits and log-probabilities of one chunk of sequences together take at most so much memory.
SCORING_BYTES = {"cuda": 16e9, "cpu": 1e9}


@dataclass
class Run:
    """seconds: of a step (generate) or of the whole call; whole_s: of the call as the host sees it.

    evidence: (2, ...) results of the first and last sequence, None if it was not asked for.
    """

    seconds: float
    whole_s: float
    evidence: torch.Tensor | None


def prompts(setting: Setting, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Random tokens (batch, prompt); the first sequence depends on the length only, and the last is a copy of it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (setting.batch, setting.prompt), generator=generator)
    ids[-1] = ids[0]
    return ids.to(device)


class Marks(LogitsProcessor):
    """Marks the time at which the logits of every step are there, and keeps those of two sequences if asked to."""

    def __init__(self, clock: Clock, keep: bool):
        self.clock, self.keep = clock, keep
        self.marks: list = []
        self.kept: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.marks.append(self.clock.mark())
        if self.keep:
            self.kept.append(scores[[0, -1]])  # indexing with a list copies
        return scores

    def step_seconds(self) -> float:
        marks = zip(self.marks, self.marks[1:], strict=False)
        return statistics.median(self.clock.seconds(begin, end) for begin, end in marks)


def generate(
    model: PreTrainedModel,
    ids: torch.Tensor,
    setting: Setting,
    clock: Clock,
    *,
    ours: bool,
    keep: bool = False,
    watch: LogitsProcessor | None = None,
) -> Run:
    """Greedy decoding; `watch` is one more processor, which sees every step. Evidence: (2, steps, vocabulary)."""
    marks = Marks(clock, keep)
    clock.wait()
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        min_new_tokens=setting.new_tokens,
        max_new_tokens=setting.new_tokens,
        pad_token_id=0,
        cache_implementation=None if setting.cache == "dynamic" else setting.cache,
        logits_processor=LogitsProcessorList([marks] if watch is None else [marks, watch]),
    )
    clock.wait()
    whole_s = time.perf_counter() - start
    return Run(marks.step_seconds(), whole_s, torch.stack(marks.kept, dim=1) if keep else None)


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: torch.Tensor, setting: Setting, clock: Clock, *, ours: bool, **_) -> Run:
    """One forward that fills a cache and returns the last position's logits. Evidence: (2, vocabulary)."""
    clock.wait()
    begin = clock.mark()
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    seconds = clock.seconds(begin, clock.mark())
    return Run(seconds, seconds, out.logits[[0, -1], -1])


@torch.no_grad()
def scoring(model: PreTrainedModel, ids: torch.Tensor, setting: Setting, clock: Clock, *, ours: bool, **_) -> Run:
    """The log-probability of every token given those before it. Evidence: (2, prompt - 1).

    Stock log_softmax is outside of the model, so our side takes it from `batch_invariant_mode`.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    bytes_each = setting.prompt * vocabulary * (model.dtype.itemsize + torch.float32.itemsize)
    at_once = max(1, int(SCORING_BYTES[ids.device.type] // bytes_each))
    clock.wait()
    begin = clock.mark()
    scores = []
    for chunk in ids.split(at_once):
        logits = model(input_ids=chunk, use_cache=False).logits
        with batch_invariant_mode() if ours else nullcontext():
            logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        scores.append(logprobs[:, :-1].gather(-1, chunk[:, 1:, None]).squeeze(-1))
        del logits, logprobs
    scores = torch.cat(scores)
    seconds = clock.seconds(begin, clock.mark())
    return Run(seconds, seconds, scores[[0, -1]])


RUN: dict[str, Callable[..., Run]] = {"generate": generate, "prefill": prefill, "scoring": scoring}
