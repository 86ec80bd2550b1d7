"""Times of the two functions; `kernels benchmark` runs it and compares with the time of the torch operators.

    kernels benchmark hub_kernels/batch-invariant-elementwise

Before anything is timed, `setup` checks that a sequence has the same bits alone and in the batch, and that `rotary` has
those of the torch operators: a failure gives no times.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class _Llama8B:
    """The two steps of one layer, no benchmark by itself (the runner runs every Benchmark it finds)."""

    seed = 0
    rows: int
    length: int

    def setup(self):
        def randn(*shape):
            return torch.randn(*shape, device=self.device).bfloat16()

        tokens = self.rows, self.length
        self.query, self.key = (randn(*tokens, heads, 128).transpose(1, 2) for heads in (32, 8))
        self.cos, self.sin = randn(1, self.length, 128), randn(1, self.length, 128)
        self.gate, self.up = randn(*tokens, 14336), randn(*tokens, 14336)
        self.benchmark_rotary()
        if not torch.equal(self.out, self.verify_rotary()):
            raise AssertionError("rotary has other bits than the torch operators; no times are given")
        self.benchmark_gated()
        if not torch.equal(self.kernel.gated(self.gate[-1:], self.up[-1:]), self.out[-1:]):
            raise AssertionError("gated has other bits alone than in the batch; no times are given")

    def benchmark_rotary(self):
        self.out, self.key_out = self.kernel.rotary(self.query, self.key, self.cos, self.sin)

    def verify_rotary(self) -> torch.Tensor:
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        query, _ = ((x * cos) + (rotate_half(x) * sin) for x in (self.query, self.key))
        return query

    def benchmark_gated(self):
        self.out = self.kernel.gated(self.gate, self.up)

    def verify_gated(self) -> torch.Tensor:
        return F.silu(self.gate) * self.up


class DecodeBenchmark(_Llama8B, Benchmark):
    """One token of eight sequences."""

    rows, length = 8, 1


class PrefillBenchmark(_Llama8B, Benchmark):
    """A prompt."""

    rows, length = 1, 512
