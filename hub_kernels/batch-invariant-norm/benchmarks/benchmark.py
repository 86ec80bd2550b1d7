"""Times of the main operators; `kernels benchmark` runs it and compares with the stock operator's time.

    kernels benchmark hub_kernels/batch-invariant-norm

Before anything is timed, `setup` checks that rows have the same bits alone and in the batch: a failure gives no times.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

BITS = {2: torch.int16, 4: torch.int32}


def assert_rows_have_same_bits(function, x):
    whole = function(x)
    for rows in (1, 2, 7, x.shape[0] - 1):
        part = function(x[-rows:])
        if not torch.equal(part.view(BITS[part.element_size()]), whole[-rows:].view(BITS[part.element_size()])):
            raise AssertionError(
                f"{rows} rows of {tuple(x.shape)} have other bits than in the batch; no times are given"
            )


class _Rows:
    """The operators on one shape, no benchmark by itself (the runner runs every Benchmark it finds); float32 suits the
    runner's fixed tolerance."""

    seed = 0
    rows: int
    columns: int

    def setup(self):
        shape = (self.rows, self.columns)
        self.x = torch.randn(shape, device=self.device)
        self.weight = torch.rand(self.columns, device=self.device) + 0.5
        self.bias = torch.randn(self.columns, device=self.device)
        self.out = torch.empty(shape, device=self.device)
        for function in (self._rms_norm, self._layer_norm, self._log_softmax):
            assert_rows_have_same_bits(function, self.x)
            assert_rows_have_same_bits(function, self.x.bfloat16())

    def _rms_norm(self, x):
        return self.kernel.rms_norm(x, self.weight.to(x.dtype), 1e-6)

    def _layer_norm(self, x):
        return self.kernel.layer_norm(x, (self.columns,), self.weight, self.bias, 1e-5)

    def _log_softmax(self, x):
        return self.kernel.log_softmax(x, -1)

    def benchmark_rms_norm(self):
        self.out = self._rms_norm(self.x)

    def verify_rms_norm(self) -> torch.Tensor:
        return F.rms_norm(self.x, (self.columns,), self.weight, 1e-6)

    def benchmark_layer_norm(self):
        self.out = self._layer_norm(self.x)

    def verify_layer_norm(self) -> torch.Tensor:
        return F.layer_norm(self.x, (self.columns,), self.weight, self.bias, 1e-5)

    def benchmark_log_softmax(self):
        self.out = self._log_softmax(self.x)

    def verify_log_softmax(self) -> torch.Tensor:
        return torch.log_softmax(self.x, -1)


class DecodeBenchmark(_Rows, Benchmark):
    """A few tokens of a 4096-wide model."""

    rows, columns = 8, 4096


class PrefillBenchmark(_Rows, Benchmark):
    """A prompt of a 4096-wide model."""

    rows, columns = 512, 4096
