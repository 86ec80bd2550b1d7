"""The engine that needs no certificate: a product without any rounding, in which no order can matter.

Each operand row is scaled by a power of two and split into two integers of 22 bits. Products of such integers, summed
over 256 elements of K, are integers below 2**53, which float64 holds exactly whatever the order of summation. The
blocks of K are then added in ascending order. What is dropped (low times low) is 2**-44 of the largest product.
"""

from typing import NamedTuple

import torch

_BITS = 22
_K_BLOCK = 256


class Split(NamedTuple):
    """A float32 matrix (rows, K) as (high + low * 2**-22) * scale, all float64; rows with inf or NaN are zeroed."""

    high: torch.Tensor
    low: torch.Tensor
    scale: torch.Tensor  # (rows, 1)
    not_finite: torch.Tensor  # (rows,) bool


def split(matrix: torch.Tensor) -> Split:
    """Split each row of a matrix (rows, K) into integers."""
    values = matrix.double()
    not_finite = ~values.isfinite().all(-1)
    values = values.masked_fill(not_finite[:, None], 0.0)
    exponent = torch.frexp(values.abs().amax(-1, keepdim=True)).exponent
    scaled = torch.ldexp(values, _BITS - exponent)
    high = scaled.round()
    low = torch.ldexp(scaled - high, torch.tensor(_BITS)).round()
    return Split(high, low, torch.ldexp(torch.ones_like(values[:, :1]), exponent - _BITS), not_finite)


def matmul(x: torch.Tensor, weight: torch.Tensor, weight_split: Split) -> torch.Tensor:
    """x (M, K) @ weight (N, K).T -> (M, N) float32; `weight_split` is `split(weight)`."""
    a, b = split(x), weight_split
    total = a.high.new_zeros(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[1], _K_BLOCK):
        k = slice(start, start + _K_BLOCK)
        total += a.high[:, k] @ b.high[:, k].t()
        crossed = torch.cat([a.high[:, k], a.low[:, k]], 1) @ torch.cat([b.low[:, k], b.high[:, k]], 1).t()
        total += crossed * 2.0**-_BITS
    y = (total * a.scale * b.scale.t()).float()
    if a.not_finite.any():
        y[a.not_finite] = _not_finite(x[a.not_finite], weight)
    if b.not_finite.any():
        y[:, b.not_finite] = _not_finite(x, weight[b.not_finite])
    return y


def _not_finite(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Products in which every sum has an inf or NaN term: the sum is inf or NaN in any order; NaNs get one pattern."""
    y = (x.double() @ weight.double().t()).float()
    return y.masked_fill(y.isnan(), float("nan"))
