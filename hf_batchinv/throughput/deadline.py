"""Whether a setting still fits in the time limit."""

import time

from .settings import Setting

COMPILING_S = 60.0  # what a first compiled decoding is taken to need
MARGIN = 1.5


class Deadline:
    """Knows how long earlier settings took, and from that whether there is time for one more."""

    def __init__(self, limit_s: float | None, on_gpu: bool):
        self.limit_s, self.on_gpu = limit_s, on_gpu
        self.start = time.monotonic()
        self.taken: dict[tuple, list[tuple[int, float]]] = {}

    def allows(self, model: str, setting: Setting) -> bool:
        """Whether a setting of a model will be done in time, as far as one can tell."""
        if self.limit_s is None:
            return True
        return time.monotonic() - self.start + self._guess(model, setting) < self.limit_s

    def passed(self) -> bool:
        return self.limit_s is not None and time.monotonic() - self.start >= self.limit_s

    def took(self, model: str, setting: Setting, seconds: float) -> None:
        """Remember a setting that is done."""
        kind = (model, setting.op, setting.cache)
        self.taken.setdefault(kind, []).append((setting.batch * setting.prompt, seconds))

    def _guess(self, model: str, setting: Setting) -> float:
        known = self.taken.get((model, setting.op, setting.cache))
        if known is None:
            return COMPILING_S if setting.cache == "static" and self.on_gpu else 0.0
        longest = max(seconds for _, seconds in known)
        if setting.op != "prefill":
            return MARGIN * longest
        # What compiles or is bound by the host does not grow with the tokens: the best rate so far is what does.
        rate = min(seconds / tokens for tokens, seconds in known)
        return max(longest, MARGIN * rate * setting.batch * setting.prompt)
