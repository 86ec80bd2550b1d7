"""linear against F.linear in one run: `python hub_kernels/batch-invariant-linear/benchmarks/speed.py OUT.json`.

Refuses to print a time where the bits differ between batch sizes.
"""

import functools
import json
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "hub_kernels")]

from measure import copies, environment, graph_time  # noqa: E402

from hf_batchinv import hub  # noqa: E402

# (N, K): projections of an 8B model, its lm_head, and of a 0.6B and a 135M model.
SHAPES = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (151936, 4096), (1024, 3072), (576, 576)]
ROWS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 200, 256, 400, 512, 1024, 2048, 4096, 8192]


def measure(n: int, k: int, dtype: torch.dtype) -> list[dict]:
    linear = hub.load("linear").linear
    weights = [torch.randn(n, k, device="cuda").to(dtype) for _ in range(copies(n * k * 2))]
    inputs = torch.randn(ROWS[-1], k, device="cuda").to(dtype)
    alone = linear(inputs[:1], weights[0])
    rows = []
    for m in ROWS:
        if n * m > 2**30:  # an lm_head never meets that many rows
            continue
        x = inputs[:m]
        bits_ok = torch.equal(linear(x, weights[0])[:1].view(torch.int16), alone.view(torch.int16))
        count = max(len(weights), 20 if m <= 512 else 4)
        turns = [weights[i % len(weights)] for i in range(count)]
        times = {}
        for name, function in (("ours", linear), ("cublas_default", F.linear)):
            calls = [functools.partial(function, x, w) for w in turns]
            times[name] = graph_time(calls) if bits_ok else None
        row = {"op": "linear", "dtype": str(dtype)[6:], "M": m, "N": n, "K": k, "bits_ok": bits_ok}
        row |= {"ours_us": times["ours"], "stock_us": {"cublas_default": times["cublas_default"]}, "engine": "triton"}
        row["ratio"] = times["cublas_default"] / times["ours"] if bits_ok else None
        rows.append(row)
    return rows


def main() -> int:
    torch.manual_seed(0)
    rows = []
    for n, k in tqdm(SHAPES, desc="weights"):
        rows += measure(n, k, torch.bfloat16)
    Path(sys.argv[1]).write_text(json.dumps({"env": environment(), "rows": rows}, indent=1))
    for row in rows:
        ratio = "bits differ" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(f"{row['N']}x{row['K']} M={row['M']}: {ratio}")
    return 0 if all(row["bits_ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
