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
# Stock and ours take turns, so that a host that slows down for a while slows both. A side is timed until its calls took
# this long together, but for no more than so many calls.
TURNS, CALLS_A_TURN = 3, 2
ENOUGH_S = 1.5


@dataclass
class Outcome:
    """A row, what the calls behind it took, and the profiles if they were asked for."""

    row: dict
    runs: list[dict] = field(default_factory=list)
    profiles: list[dict] = field(default_factory=list)


@dataclass
class Side:
    """What is known of one side so far. bits_ok, first_s, compiled: of its first call, which is not timed."""

    name: str
    bits_ok: bool | None = None
    first_s: float = 0.0
    compiled: bool = False
    timed: list[jobs.Run] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def enough(self) -> bool:
        return sum(run.whole_s for run in self.timed) >= ENOUGH_S

    def summary(self) -> dict:
        known = {"side": self.name, "bits_ok": self.bits_ok, "first_s": self.first_s, "compiled": self.compiled}
        known |= {"calls": len(self.timed), "whole_s": statistics.median(run.whole_s for run in self.timed)}
        return known | {"seconds": statistics.median(run.seconds for run in self.timed), "peak_bytes": self.peak_bytes}


class Comparison:
    """One model, of which a setting is measured stock and converted."""

    def __init__(self, model: PreTrainedModel, name: str, dtype: str, clock: Clock):
        self.model, self.name, self.dtype, self.clock = model, name, dtype, clock
        self.references: dict[tuple, torch.Tensor] = {}

    def measure(self, setting: Setting, progress: Callable[[str], None] = lambda side: None) -> Outcome:
        """The row holds no time if a sequence of ours has other bits in the batch than alone.

        Raises torch.OutOfMemoryError.
        """
        known, profiles = [Side(name) for name in SIDES], []
        # Stock code that was compiled for a setting would have to be compiled again.
        turns = 1 if setting.cache == "static" and self.clock.on_gpu else TURNS
        try:
            for turn in range(turns):
                for side in known:
                    progress(side.name)
                    self._take_turn(setting, side, calls=TURNS * CALLS_A_TURN // turns)
                    if setting.profiled and turn == 0:
                        found = profiling.profile(self._call_of(setting, side.name), setting, self.clock)
                        profiles.append({"what": str(setting), "side": side.name} | found)
                if all(side.enough for side in known):
                    break
        finally:
            revert(self.model)
            self._start_afresh()
        sides = {side.name: side.summary() for side in known}
        bits_ok = sides["ours"]["bits_ok"]
        row = {"op": setting.op, "model": self.name, "dtype": self.dtype, "batch": setting.batch}
        row |= {"prompt": setting.prompt, "cache": setting.cache}
        row |= {f"{side}_s": sides[side].pop("seconds") if bits_ok else None for side in reversed(SIDES)}
        row |= {"ratio": row["stock_s"] / row["ours_s"] if bits_ok else None, "bits_ok": bits_ok}
        row |= {f"{side}_peak_bytes": sides[side].pop("peak_bytes") for side in reversed(SIDES)}
        return Outcome(row, [_dimensions(setting) | sides[side] for side in SIDES], profiles)

    def _take_turn(self, setting: Setting, side: Side, calls: int) -> None:
        """Up to so many timed calls, after one that compiles, checks and allocates what they find there."""
        revert(self.model)
        self._start_afresh()
        if side.name == "ours":
            convert(self.model)
        call = self._call_of(setting, side.name)
        if side.bits_ok is None:
            reference = self._reference(setting, side.name)
            first = call(keep=True)
            side.bits_ok = all(_same(got, reference) for got in first.evidence)
            side.first_s, side.compiled = first.whole_s, self._is_compiled()
            del first
        else:
            call()
        self.clock.forget_peak()
        for _ in range(calls):
            side.timed.append(replace(call(), evidence=None))
            if side.enough:
                break
        peak_bytes = self.clock.peak_bytes()
        if peak_bytes is not None:
            side.peak_bytes = max(peak_bytes, side.peak_bytes or 0)

    def _call_of(self, setting: Setting, side: str) -> Callable[..., jobs.Run]:
        ids = jobs.prompts(setting, self.model.config.get_text_config().vocab_size, self.clock.device)

        def call(**options) -> jobs.Run:
            return jobs.RUN[setting.op](self.model, ids, setting, self.clock, ours=side == "ours", **options)

        return call

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
