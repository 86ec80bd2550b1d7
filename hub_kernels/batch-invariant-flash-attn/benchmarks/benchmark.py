"""Attention beside stock SDPA: `kernels benchmark hub_kernels/batch-invariant-flash-attn`.

Wall-clock times with a warm cache, for a first look; `hf-batchinv bench --op attention` measures properly.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class AttentionBenchmark(Benchmark):
    """32 query and 8 KV heads of 128; bfloat16 on a GPU, float32 on a CPU."""

    seed = 0

    def _setup(self, batch: int, q_len: int, kv_len: int) -> None:
        dtype = torch.float32 if torch.device(self.device).type == "cpu" else torch.bfloat16
        self.query = torch.randn(batch, 32, q_len, 128, device=self.device, dtype=dtype)
        self.key, self.value = (torch.randn(batch, 8, kv_len, 128, device=self.device, dtype=dtype) for _ in range(2))
        self._run()
        last = self.kernel.attention(self.query[:1, :, -1:], self.key[:1], self.value[:1], causal=True)
        if not torch.equal(last, self.out[:1, :, -1:]):
            raise AssertionError("the last query has other bits alone than in the batch")

    def _run(self) -> None:
        self.out = self.kernel.attention(self.query, self.key, self.value, causal=True)

    def _stock(self) -> torch.Tensor:
        causal = self.query.shape[2] > 1
        return F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=causal, enable_gqa=True)

    def setup_decode(self) -> None:
        self._setup(8, 1, 1024)

    def benchmark_decode(self) -> None:
        self._run()

    def verify_decode(self) -> torch.Tensor:
        return self._stock()

    def setup_prefill(self) -> None:
        self._setup(1, 1024, 1024)

    def benchmark_prefill(self) -> None:
        self._run()

    def verify_prefill(self) -> torch.Tensor:
        return self._stock()
