"""From a setting to a row of the result: stock, then ours, on the same weights in the same process."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from ..bench.trial import same_bits
from ..conversion import convert, revert
from . import jobs, profiling
from .clock import Clock
from .settings import Setting

SIDES = ("stock", "ours")
# Timed calls of one side: until they took this long together, but no more than so many.
ENOUGH_S, MOST_CALLS = 1.5, 5


@dataclass
class Outcome:
    """A row, what the calls behind it took, and the profiles if they were asked for."""

    row: dict
    runs: list[dict] = field(default_factory=list)
    profiles: list[dict] = field(default_factory=list)


class Comparison:
    """One model, of which a setting is measured stock and converted."""

    def __init__(self, model: PreTrainedModel, name: str, dtype: str, clock: Clock):
        self.model, self.name, self.dtype, self.clock = model, name, dtype, clock
        self.references: dict[tuple, torch.Tensor] = {}

    def measure(self, setting: Setting, progress: Callable[[str], None] = lambda side: None) -> Outcome:
        """The row holds no time if a sequence of ours has other bits in the batch than alone.

        Raises torch.OutOfMemoryError.
        """
        sides, profiles = {}, []
        try:
            for side in SIDES:
                progress(side)
                sides[side] = self._side(setting, side, profiles)
        finally:
            revert(self.model)
            self._start_afresh()
        bits_ok = sides["ours"]["bits_ok"]
        row = {"op": setting.op, "model": self.name, "dtype": self.dtype, "batch": setting.batch}
        row |= {"prompt": setting.prompt, "cache": setting.cache}
        row |= {f"{side}_s": sides[side].pop("seconds") if bits_ok else None for side in reversed(SIDES)}
        row |= {"ratio": row["stock_s"] / row["ours_s"] if bits_ok else None, "bits_ok": bits_ok}
        row |= {f"{side}_peak_bytes": sides[side].pop("peak_bytes") for side in reversed(SIDES)}
        return Outcome(row, [_dimensions(setting) | sides[side] for side in SIDES], profiles)

    def _side(self, setting: Setting, side: str, profiles: list[dict]) -> dict:
        ours = side == "ours"
        self._start_afresh()
        if ours:
            convert(self.model)
        reference = self._reference(setting, side)
        ids = jobs.prompts(setting, self.model.config.get_text_config().vocab_size, self.clock.device)

        def call(**options) -> jobs.Run:
            return jobs.RUN[setting.op](self.model, ids, setting, self.clock, ours=ours, **options)

        first = call(keep=True)  # compiles, checks and allocates what later calls find there
        bits_ok = all(_same(got, reference) for got in first.evidence)
        result = {"side": side, "bits_ok": bits_ok, "first_s": first.whole_s, "compiled": self._is_compiled()}
        del first
        self.clock.forget_peak()
        timed: list[jobs.Run] = []
        while not timed or (len(timed) < MOST_CALLS and sum(run.whole_s for run in timed) < ENOUGH_S):
            timed.append(replace(call(), evidence=None))
        result |= {"calls": len(timed), "whole_s": statistics.median(run.whole_s for run in timed)}
        result |= {"seconds": statistics.median(run.seconds for run in timed), "peak_bytes": self.clock.peak_bytes()}
        if setting.profiled:
            profiles.append({"what": str(setting), "side": side} | profiling.profile(call, setting, self.clock))
        return result

    def _reference(self, setting: Setting, side: str) -> torch.Tensor:
        """What the first sequence gets alone, with a dynamic cache; computed once for every length."""
        key = (side, setting.op, setting.prompt)
        known = self.references.get(key)
        if known is None or setting.op == "generate" and len(known) < setting.new_tokens:
            alone = replace(setting, batch=1, cache="dynamic")
            ids = jobs.prompts(alone, self.model.config.get_text_config().vocab_size, self.clock.device)
            run = jobs.RUN[setting.op](self.model, ids, alone, self.clock, ours=side == "ours", keep=True)
            self.references[key] = run.evidence[0]
        return self.references[key]

    def _is_compiled(self) -> bool:
        return "_compiled_call" in vars(self.model)

    def _start_afresh(self) -> None:
        """Drop what `generate` keeps on a model: a compiled forward, which Dynamo would widen to dynamic shapes at the
        second size that it sees, and the length of the longest static cache so far, which later ones would get."""
        vars(self.model).pop("_previous_max_cache_length", None)
        if self._is_compiled():
            del self.model._compiled_call
            torch.compiler.reset()
        self.clock.free()


def _dimensions(setting: Setting) -> dict:
    return {name: getattr(setting, name) for name in ("op", "batch", "prompt", "cache", "new_tokens")}


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether the bits are the same; equal NaNs show nothing and count as different."""
    steps = min(len(got), len(want))
    return not bool(got.isnan().any()) and same_bits(got[:steps], want[:steps])
