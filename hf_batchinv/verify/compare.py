"""Two results for the same tokens: how many bits patterns differ, and by how much."""

import math
from dataclasses import dataclass

import torch

from ..testing import bits, differing

_CHUNK_TOKENS = 64  # KL needs the vocabulary in float64: so many tokens at a time


@dataclass(frozen=True)
class Difference:
    """What differs between two results.

    values and differing: how many were compared, and how many have other bits. per_token: differing values of each
    token. max_abs, max_ulp: of the largest difference; infinite and None where a NaN meets a number. max_kl (nats) and
    changed_tokens (other argmax): None if the results are no logits.
    """

    values: int
    differing: int
    per_token: tuple[int, ...]
    max_abs: float
    max_ulp: int | None
    max_kl: float | None
    changed_tokens: int | None


def compare(got: torch.Tensor, want: torch.Tensor, is_logits: bool) -> Difference:
    """Compare (tokens, ...) with (tokens, ...) of the same dtype, bit by bit.

    Raises AssertionError if shapes or dtypes differ.
    """
    got = got.to(want.device)
    count = differing(got, want)
    unequal = (bits(got) != bits(want)).flatten(1) if got.dim() > 1 else (bits(got) != bits(want))[:, None]
    per_token = tuple(unequal.sum(1).tolist())
    if not count:
        return Difference(want.numel(), 0, per_token, 0.0, 0, 0.0 if is_logits else None, 0 if is_logits else None)
    rows = unequal.any(1)
    got, want_rows = got[rows], want[rows]
    apart = (got.double() - want_rows.double()).abs()
    apart = apart[bits(got) != bits(want_rows)]  # elsewhere inf - inf would give NaN
    has_nan = bool(apart.isnan().any())
    kl = changed = None
    if is_logits:
        parts = zip(got.split(_CHUNK_TOKENS), want_rows.split(_CHUNK_TOKENS), strict=True)
        kl = max(_kl(mine, theirs) for mine, theirs in parts)
        changed = int((got.argmax(-1) != want_rows.argmax(-1)).sum())
    return Difference(
        want.numel(),
        count,
        per_token,
        math.inf if has_nan else float(apart.max()),
        None if has_nan else int((_ordered(got) - _ordered(want_rows)).abs().max()),
        kl,
        changed,
    )


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers (int64) in the order of the floats, neighbours one apart; 0.0 and -0.0 are one apart too."""
    whole = bits(tensor).long()
    lowest = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(whole < 0, lowest - whole - 1, whole)


def _kl(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest KL(want || got) over tokens, logits (tokens, vocabulary) in any float dtype."""
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))  # what has no probability adds nothing
    worst = float(terms.sum(-1).max())
    return math.inf if math.isnan(worst) else max(worst, 0.0)
