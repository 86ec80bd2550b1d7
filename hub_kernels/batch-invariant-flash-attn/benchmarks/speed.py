"""attention against SDPA's backends in one run: `python .../batch-invariant-flash-attn/benchmarks/speed.py OUT.json`.

Refuses to print a time where the bits of decode and prefill differ.
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "hub_kernels")]

from measure import copies, environment, graph_time  # noqa: E402

from hf_batchinv import hub  # noqa: E402

HEADS = [(32, 8, 128), (16, 8, 64), (9, 3, 64)]  # query heads, KV heads, head_dim
DECODE = [(1, 128), (1, 512), (1, 4096), (1, 32768), (8, 1024), (32, 512), (32, 4096), (128, 512), (256, 1024)]
PREFILL = [(1, 512), (8, 512), (4, 2048), (1, 4096), (1, 16384)]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def measure(heads: int, kv_heads: int, head_dim: int, batch: int, q_len: int, kv_len: int) -> dict:
    attention = hub.load("flash-attn").attention

    def states(count: int, length: int) -> torch.Tensor:
        return torch.randn(batch, count, length, head_dim, device="cuda").bfloat16()

    query = states(heads, q_len)
    sets = copies(batch * kv_heads * kv_len * head_dim * 4, at_most=8)
    caches = [(states(kv_heads, kv_len), states(kv_heads, kv_len)) for _ in range(sets)]
    key, value = caches[0]
    last = attention(query[:1, :, -1:], key[:1], value[:1], causal=True)
    whole = attention(query, key, value, causal=True)[:1, :, -1:]
    row = {"op": "attention", "dtype": "bfloat16", "case": "decode" if q_len == 1 else "prefill", "batch": batch}
    row |= {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "q_len": q_len, "kv_len": kv_len}
    row["bits_ok"] = torch.equal(last.contiguous().view(torch.int16), whole.contiguous().view(torch.int16))
    if not row["bits_ok"]:
        return row
    turns = [caches[i % sets] for i in range(8 if q_len == 1 else 2)]
    row["ours_us"] = graph_time([lambda kv=kv: attention(query, *kv, causal=True) for kv in turns])
    row["stock_us"] = {}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            stock = [
                lambda kv=kv: F.scaled_dot_product_attention(query, *kv, is_causal=q_len > 1, enable_gqa=True)
                for kv in turns
            ]
            try:
                row["stock_us"][name] = graph_time(stock)
            except RuntimeError as error:  # this backend does not take the case
                row["stock_us"][name] = None
                print(f"{name} refuses {row}: {error}", file=sys.stderr)
    row["ratio"] = min(time for time in row["stock_us"].values() if time) / row["ours_us"]
    return row


def main() -> int:
    torch.manual_seed(0)
    cases = [(*shape, batch, 1, kv_len) for shape in HEADS for batch, kv_len in DECODE]
    cases += [(*shape, batch, length, length) for shape in HEADS for batch, length in PREFILL]
    rows = [measure(*case) for case in tqdm(cases, desc="cases")]
    Path(sys.argv[1]).write_text(json.dumps({"env": environment(), "rows": rows}, indent=1))
    for row in rows:
        shape = f"{row['heads']}/{row['kv_heads']} D={row['head_dim']} batch {row['batch']}"
        ratio = f"{row['ratio']:.2f}" if row["bits_ok"] else "bits differ"
        print(f"{row['case']} {shape} q {row['q_len']} kv {row['kv_len']}: {ratio}")
    return 0 if all(row["bits_ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
