"""exp and tanh on the CPU with bits that depend on the argument alone.

Elementwise functions come in a vector form and a scalar form for what is left over at the end of a thread's share, and
the two may differ in the last bit. Whether they do is tried out once; where they do, a polynomial in float64 made of
single IEEE operations takes their place.
"""

import functools

import torch

# Below this a weight counts as nothing. It also keeps exp away from subnormal results, which take a CPU (and the
# product that follows) a hundred times as long.
LEAST_EXPONENT = -80.0
_LEAST_WEIGHT = 2e-35  # a little more than exp(-80)

_LOG2E = 1.4426950408889634
# ln 2 in two parts, the first short enough for its product with an integer to be exact
_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10


def weights_(scores: torch.Tensor) -> torch.Tensor:
    """exp of scores <= 0 (float32), in place, with exact zeros where exp is below 2e-35; NaN stays NaN."""
    scores.clamp_(min=LEAST_EXPONENT)
    if holds("exp"):
        scores.exp_()
    else:
        scores.copy_(_exp(scores.double()))
    return torch.nn.functional.threshold_(scores, _LEAST_WEIGHT, 0.0)


def tanh_(x: torch.Tensor) -> torch.Tensor:
    """tanh (float32), in place."""
    if holds("tanh"):
        return x.tanh_()
    wide = x.double().clamp(-20.0, 20.0)
    twice = _exp(2.0 * wide)
    return x.copy_((twice - 1.0) / (twice + 1.0))


@functools.cache
def holds(name: str) -> bool:
    """Whether the stock function gives an element the same bits in a vector, at its end, and alone."""
    function = getattr(torch, name)
    x = torch.linspace(LEAST_EXPONENT, 0.0, 1 << 11) if name == "exp" else torch.linspace(-9.0, 9.0, 1 << 11)
    expected = function(x).view(torch.int32)
    # Pieces of 1, 7 and 15 elements lie in a vector's tail as a whole.
    pieces = (torch.cat([function(piece.clone()) for piece in x.split(length)]) for length in (1, 7, 15))
    return all(torch.equal(got.view(torch.int32), expected) for got in pieces)


def _exp(x: torch.Tensor) -> torch.Tensor:
    """exp of float64 in about -700..700 from additions and multiplications, good to a few units of 2**-52."""
    power = torch.round(x * _LOG2E)
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    series = torch.ones_like(rest)
    for n in range(13, 0, -1):
        series = series * rest
        series = series / n
        series = series + 1.0
    power = power.nan_to_num(0.0)  # the series is NaN already
    return series * ((power.long() + 1023) << 52).view(torch.float64)
