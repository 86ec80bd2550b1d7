"""Speed and accuracy of the three ops for `kernels benchmark`: the reference that is timed beside each is stock torch.

Each workload also checks, before anything is timed, that a row alone has the bits that it has in the batch.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


def _require_same_bits(alone: torch.Tensor, in_batch: torch.Tensor) -> None:
    if not torch.equal(alone, in_batch):
        raise AssertionError(f"{(alone != in_batch).sum().item()} values of a row change with the batch")


class LinearBenchmark(Benchmark):
    """bfloat16 linear 4096 -> 4096 at three numbers of rows."""

    seed = 0

    def _setup(self, rows: int) -> None:
        self.x = torch.randn(rows, 4096, device=self.device).bfloat16()
        self.weight = (torch.randn(4096, 4096, device=self.device) / 64).bfloat16()
        self.out = torch.empty(rows, 4096, device=self.device, dtype=torch.bfloat16)
        _require_same_bits(self.kernel.linear(self.x[:1], self.weight), self.kernel.linear(self.x, self.weight)[:1])

    def setup_decode_1(self) -> None:
        self._setup(1)

    def setup_decode_32(self) -> None:
        self._setup(32)

    def setup_prefill_2048(self) -> None:
        self._setup(2048)

    def benchmark_decode_1(self) -> None:
        self.out = self.kernel.linear(self.x, self.weight)

    def benchmark_decode_32(self) -> None:
        self.out = self.kernel.linear(self.x, self.weight)

    def benchmark_prefill_2048(self) -> None:
        self.out = self.kernel.linear(self.x, self.weight)

    def verify_decode_1(self) -> torch.Tensor:
        return F.linear(self.x, self.weight)

    def verify_decode_32(self) -> torch.Tensor:
        return F.linear(self.x, self.weight)

    def verify_prefill_2048(self) -> torch.Tensor:
        return F.linear(self.x, self.weight)


class BmmBenchmark(Benchmark):
    """float32 bmm of 32 items (256, 64) @ (64, 256)."""

    seed = 0

    def setup_heads(self) -> None:
        self.x = torch.randn(32, 256, 64, device=self.device)
        self.y = torch.randn(32, 64, 256, device=self.device)
        self.out = torch.empty(32, 256, 256, device=self.device)
        alone = self.kernel.bmm(self.x[3:4, :1], self.y[3:4])
        _require_same_bits(alone, self.kernel.bmm(self.x, self.y)[3:4, :1])

    def benchmark_heads(self) -> None:
        self.out = self.kernel.bmm(self.x, self.y)

    def verify_heads(self) -> torch.Tensor:
        return torch.bmm(self.x, self.y)


class GroupedLinearBenchmark(Benchmark):
    """bfloat16 experts: 256 rows over 8 experts 1024 -> 2048, beside a loop of stock products."""

    seed = 0

    def setup_experts(self) -> None:
        self.ends = [40, 40, 100, 101, 160, 200, 230, 256]
        self.x = torch.randn(256, 1024, device=self.device).bfloat16()
        self.weight = (torch.randn(8, 2048, 1024, device=self.device) / 32).bfloat16()
        self.offsets = torch.tensor(self.ends, dtype=torch.int32, device=self.device)
        self.out = torch.empty(256, 2048, device=self.device, dtype=torch.bfloat16)
        alone = self.kernel.linear(self.x[100:101], self.weight[3])
        _require_same_bits(alone, self.kernel.grouped_linear(self.x, self.weight, self.offsets)[100:101])

    def benchmark_experts(self) -> None:
        self.out = self.kernel.grouped_linear(self.x, self.weight, self.offsets)

    def verify_experts(self) -> torch.Tensor:
        starts = [0, *self.ends[:-1]]
        parts = zip(starts, self.ends, self.weight, strict=True)
        return torch.cat([F.linear(self.x[start:end], weight) for start, end, weight in parts])
