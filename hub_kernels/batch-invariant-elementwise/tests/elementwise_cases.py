"""Shapes and memory layouts that the tests share."""

from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """cos_rows: 1 or batch. layout: where query and key come from, see `heads_of`."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    cos_rows: int = 1
    layout: str = "tokens"

    @property
    def id(self):
        sizes = f"B{self.batch}-H{self.heads}-{self.kv_heads}-L{self.length}-D{self.dim}"
        return f"{sizes}-cos{self.cos_rows}-{self.layout}"


CASES = [
    Case(2, 4, 2, 3, 16),
    Case(2, 4, 2, 3, 16, cos_rows=2),
    Case(3, 9, 1, 1, 24, cos_rows=3),
    Case(1, 33, 3, 5, 64),
    Case(2, 3, 1, 7, 80, cos_rows=2),
    Case(2, 1, 1, 1, 2),
    Case(1, 2, 2, 70, 6),
    *(Case(2, 5, 2, 3, 24, 2, layout) for layout in ("heads", "fused", "elements apart", "one row for all")),
    Case(1, 5, 2, 3, 24, 1, "heads"),
    Case(3, 5, 2, 1, 24, 3, "fused"),
]


def heads_of(case: Case, count: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> torch.Tensor:
    """(B, count, L, D) in the memory layout of the case."""
    generator = torch.Generator().manual_seed(seed)
    batch, length, dim = case.batch, case.length, case.dim

    def randn(*shape):
        return (torch.randn(*shape, generator=generator) * 3).to(dtype).to(device)

    if case.layout == "tokens":
        return randn(batch, length, count, dim).transpose(1, 2)
    if case.layout == "heads":
        return randn(batch, count, length, dim)
    if case.layout == "fused":
        return randn(batch, length, 3 * count, dim)[:, :, count : 2 * count].transpose(1, 2)
    if case.layout == "elements apart":
        return randn(batch, length, count, 2 * dim)[..., ::2].transpose(1, 2)
    assert case.layout == "one row for all"
    return randn(1, length, count, dim).transpose(1, 2).expand(batch, -1, -1, -1)


def arguments_of(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """query, key, cos and sin; the two halves of cos and sin differ, zeros of both signs are among the values."""
    query, key = heads_of(case, case.heads, dtype, 0, device), heads_of(case, case.kv_heads, dtype, 1, device)
    generator = torch.Generator().manual_seed(2)
    shape = (2, case.cos_rows, case.length, case.dim)
    cos, sin = (torch.rand(shape, generator=generator) * 2 - 1).to(dtype).to(device)
    query[0, 0, 0, :2] = torch.tensor([0.0, -0.0])
    sin[0, 0, 0] = 0.0
    return query, key, cos, sin


def edge_gates(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Zeros, tiny and huge numbers, infinities and NaN."""
    values = [0.0, 1e-40, 1e-7, 1e-3, 1.0, 20.0, 87.0, 88.0, 89.0, 103.0, 200.0, 60000.0, float("inf")]
    return torch.tensor([*values, *(-value for value in values), float("nan")], device=device).to(dtype)
