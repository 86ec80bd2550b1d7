"""What is measured, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

JOBS = ("generate", "prefill", "scoring")
CACHES = ("dynamic", "static")
# A step of an eager model takes its time on the host, a compiled one a tenth of it: so many new tokens are enough.
NEW_TOKENS = {"dynamic": 16, "static": 32}
LEAST_NEW_TOKENS = 4
PROFILED_BATCHES = (1, 32)
MOST_PROFILED_PREFILL = 8


@dataclass(frozen=True)
class Setting:
    """One line of the table; prompt is the length of every sequence, cache is None where nothing is cached."""

    op: str
    batch: int
    prompt: int
    cache: str | None
    new_tokens: int = 0
    profiled: bool = False

    @property
    def key(self) -> tuple:
        """What tells two settings of a model apart."""
        return self.op, self.batch, self.prompt, self.cache

    def __str__(self) -> str:
        return f"{self.op} {self.batch} x {self.prompt}" + ("" if self.op != "generate" else f" {self.cache}")


def plan(
    jobs: Sequence[str],
    batches: Sequence[int],
    prompts: Sequence[int],
    caches: Sequence[str],
    new_tokens: int | None,
    scoring: tuple[int, int],
    profile: bool,
) -> list[Setting]:
    """The settings of a model, those last for which stock code has to be compiled first."""
    batches, prompts = sorted(set(batches)), sorted(set(prompts))
    small = [batch for batch in batches if batch <= MOST_PROFILED_PREFILL] or batches[:1]

    def decoding(cache: str) -> list[Setting]:
        if "generate" not in jobs or cache not in caches:
            return []
        tokens = new_tokens or NEW_TOKENS[cache]
        return [
            Setting("generate", batch, prompt, cache, tokens, profile and prompt == prompts[0] and _is_profiled(batch))
            for prompt in prompts
            for batch in batches
        ]

    settings = decoding("dynamic")
    if "prefill" in jobs:
        settings += [
            Setting("prefill", batch, prompt, "dynamic", 0, profile and (batch, prompt) == (small[-1], prompts[-1]))
            for prompt in prompts
            for batch in batches
        ]
    if "scoring" in jobs:
        settings.append(Setting("scoring", *scoring, cache=None))
    return settings + decoding("static")


def _is_profiled(batch: int) -> bool:
    return batch in PROFILED_BATCHES
