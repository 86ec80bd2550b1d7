"""grouped_linear beside the products of Transformers' experts implementations "grouped_mm" and "batched_mm".

Both sides get the same rows, sorted by expert. batched_mm gathers a weight for every row; that is part of its time.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from .. import hub
from .cases import GroupedCase
from .trial import Trial, same_bits

SKEW = 0.7  # expert r is chosen in proportion to 1 / (r + 1) ** SKEW
TURNS = 8  # calls before the same experts come again
MOST_GATHERED_BYTES = 8 * 10**9  # of batched_mm; beyond that nobody would call it


def expert_counts(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """(experts,) rows of each expert when every token draws top_k different experts from a skewed distribution."""
    generator = torch.Generator().manual_seed(tokens)
    likely = torch.arange(1, experts + 1).pow(-SKEW).expand(tokens, experts)
    chosen = torch.multinomial(likely, top_k, generator=generator)
    return torch.bincount(chosen.flatten(), minlength=experts)


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """What Transformers' "grouped_mm" calls: x (T, K) sorted, weight (E, N, K), offsets (E,)."""
    function = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return function(x, weight.transpose(-2, -1), offs=offsets)


def batched_mm(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """What Transformers' "batched_mm" calls: x (T, K), weight (E, N, K), experts (T,)."""
    return torch.bmm(weight[experts], x.unsqueeze(-1)).squeeze(-1)


def trials(cases: Sequence[GroupedCase], device: str) -> Iterator[Trial]:
    """One trial per number of tokens. Turns choose other experts each, so that weights come from memory."""
    package = hub.load("linear")
    first = cases[0]
    dtype = getattr(torch, first.dtype)
    experts, n, k = first.experts, first.N, first.K
    weight = torch.randn(experts, n, k, device=device, dtype=dtype)
    inputs = torch.randn(max(case.tokens for case in cases) * first.top_k, k, device=device, dtype=dtype)
    for case in cases:
        rows = case.tokens * case.top_k
        x = inputs[:rows]
        counts = expert_counts(case.tokens, experts, case.top_k)
        shifted = [counts.roll(turn * experts // TURNS) for turn in range(TURNS)]
        offsets = [c.cumsum(0).to(device, torch.int32) for c in shifted]
        chosen = [torch.arange(experts).repeat_interleave(c).to(device) for c in shifted]

        def check(x=x, offsets=offsets[0], chosen=chosen[0], rows=rows) -> bool:
            whole = package.grouped_linear(x, weight, offsets)
            for row in {0, rows // 3, rows // 2, rows - 1}:
                alone = (torch.arange(experts, device=device) >= chosen[row]).int()
                one = x[row : row + 1]
                if not same_bits(package.grouped_linear(one, weight, alone), whole[row : row + 1]):
                    return False
                if not same_bits(package.linear(one, weight[chosen[row]]), whole[row : row + 1]):
                    return False
            return True

        stock = {"grouped_mm": lambda i, x=x, offsets=offsets: grouped_mm(x, weight, offsets[i])}
        gathers = rows * n * k * dtype.itemsize <= MOST_GATHERED_BYTES
        if gathers:
            stock["batched_mm"] = lambda i, x=x, chosen=chosen: batched_mm(x, weight, chosen[i])
        touched = int((counts > 0).sum())
        yield Trial(
            case,
            nbytes=(touched * n * k + rows * (n + k)) * dtype.itemsize,
            flops=2 * rows * n * k,
            sets=TURNS,
            check=check,
            ours=lambda i, x=x, offsets=offsets: package.grouped_linear(x, weight, offsets[i]),
            stock=stock,
            timed={} if gathers else {"batched_mm": None},
        )
