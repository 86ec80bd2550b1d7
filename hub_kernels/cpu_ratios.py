"""Time of the CPU paths against stock PyTorch, beside the ratios that they are to meet.

    python hub_kernels/cpu_ratios.py OUT.json [OP ...]

With OPs, the rows of the others stay in OUT.json as they are, if they come from the same machine and software.
Ours and stock take turns, call by call, so that what else the machine does hits both; a time is the first quartile of
the repeats after a warm-up, since other processes only ever add to it. On a machine that is shared, set
OMP_WAIT_POLICY=passive: threads that spin while they wait lose whole time slices to others. Before anything is timed,
the results of some rows alone must have the bits that they have in the batch; a case that fails is printed as such,
without a time.
"""

import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hf_batchinv  # noqa: E402
from hf_batchinv import hub  # noqa: E402
from hf_batchinv.bench.trial import same_bits  # noqa: E402
from hf_batchinv.smollm2 import find_smollm2  # noqa: E402

THREADS = 2
DTYPES = (torch.float32, torch.bfloat16)
# (float32, bfloat16): the most time that ours may take, stock = 1
LINEAR_BOUNDS = {1: (1.6, 1.1), 8: (1.2, 1.1), 64: (1.1, 1.6), 512: (1.2, 3.5)}
ATTENTION_BOUNDS = (2.0, 2.5)
GENERATE_BOUNDS = (1.6, 1.8)
NO_BOUND = (None, None)

WEIGHTS = ((896, 896), (4864, 896), (896, 4864), (2048, 2048), (4096, 4096))  # (N, K)
HEADS = ((14, 2, 64), (9, 3, 64), (32, 8, 128))  # (query heads, key heads, head_dim)
NEW_TOKENS = 24
PROMPTS = (
    "Explain in a few words why the sky is blue.",
    "Hi",
    "Write one line of a poem about winter and the sea at night.",
    "What is 17 times 3?",
    "Name three rivers.",
    "Tell me something about cats that few people know, please.",
    "How do I boil an egg?",
    "Say hello in French.",
)


@dataclass
class Case:
    """One row of the table; `check` says whether rows keep their bits in the batch."""

    op: str
    dtype: torch.dtype
    case: str
    bounds: tuple[float | None, float | None]
    ours: Callable[[], object]
    stock: Callable[[], object]
    check: Callable[[], bool]

    @property
    def bound(self) -> float | None:
        return self.bounds[DTYPES.index(self.dtype)]


def linear_cases() -> Iterator[Case]:
    linear = hub.load("linear").linear
    for dtype in DTYPES:
        for n, k in WEIGHTS:
            weight = (torch.randn(n, k) / k**0.5).to(dtype)
            for rows, bounds in LINEAR_BOUNDS.items():
                x = torch.randn(rows, k).to(dtype)

                def check(x=x, weight=weight, dtype=dtype):
                    mates = torch.cat([torch.randn(5, x.shape[1]).to(dtype), x])
                    y = linear(x, weight)
                    alone = torch.cat([linear(x[:1], weight), linear(x[-1:], weight)])
                    return same_bits(alone, y[[0, -1]]) and same_bits(linear(mates, weight)[5:], y)

                yield Case(
                    "linear",
                    dtype,
                    f"M={rows} N={n} K={k}",
                    bounds,
                    lambda x=x, weight=weight: linear(x, weight),
                    lambda x=x, weight=weight: F.linear(x, weight),
                    check,
                )


def attention_cases() -> Iterator[Case]:
    attention = hub.load("flash-attn").attention
    shapes = [(1, q, q) for q in (512, 1024, 2048)]
    shapes += [(batch, 1, keys) for batch in (1, 8) for keys in (200, 1000, 2048)]
    for dtype in DTYPES:
        for heads, kv_heads, dim in HEADS:
            for batch, q_len, kv_len in shapes:
                query = torch.randn(batch, heads, q_len, dim).to(dtype)
                key, value = (torch.randn(batch, kv_heads, kv_len, dim).to(dtype) for _ in range(2))

                def check(query=query, key=key, value=value):
                    y = attention(query, key, value, causal=True)
                    last = attention(query[-1:, :, -1:], key[-1:], value[-1:], causal=True)
                    mates = [torch.cat([torch.randn_like(each), each]) for each in (query, key, value)]
                    half = len(query)
                    return same_bits(last, y[-1:, :, -1:]) and same_bits(attention(*mates, causal=True)[half:], y)

                yield Case(
                    "attention",
                    dtype,
                    f"{'prefill' if q_len > 1 else 'decode'} B={batch} KV={kv_len} heads={heads}/{kv_heads}x{dim}",
                    ATTENTION_BOUNDS,
                    lambda query=query, key=key, value=value: attention(query, key, value, causal=True),
                    lambda query=query, key=key, value=value: F.scaled_dot_product_attention(
                        query, key, value, is_causal=query.shape[2] > 1, enable_gqa=True
                    ),
                    check,
                )


def llama_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As Transformers spells it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(x.dtype)


def norm_cases() -> Iterator[Case]:
    norm = hub.load("norm")
    for dtype in DTYPES:
        for columns in (896, 4096):
            weight = torch.ones(columns, dtype=dtype)
            pairs = {
                "layer_norm": (
                    lambda x, weight=weight: norm.layer_norm(x, weight.shape, weight, weight, 1e-5),
                    lambda x, weight=weight: F.layer_norm(x, weight.shape, weight, weight, 1e-5),
                ),
                "softmax": (lambda x: norm.softmax(x, -1), lambda x: torch.softmax(x, -1)),
                "rms_norm": (
                    lambda x, weight=weight: norm.rms_norm(x, weight, 1e-5),
                    lambda x, weight=weight: llama_rms_norm(x, weight),
                ),
            }
            for rows in (1, 8, 64, 512):
                x = torch.randn(rows, columns).to(dtype)
                for op, (ours, stock) in pairs.items():
                    yield Case(
                        op,
                        dtype,
                        f"M={rows} D={columns}",
                        NO_BOUND,
                        lambda x=x, ours=ours: ours(x),
                        lambda x=x, stock=stock: stock(x),
                        lambda x=x, ours=ours: same_bits(ours(x[-1:]), ours(x)[-1:]),
                    )


def generate_cases() -> Iterator[Case]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for dtype in DTYPES:
        stock, ours = (AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval() for _ in range(2))
        hf_batchinv.convert(ours)

        def generate(model, inputs):
            return model.generate(
                **inputs,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                return_dict_in_generate=True,
                output_logits=True,
            )

        def check(model=ours):
            batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
            together = torch.stack(generate(model, batch).logits, 1)
            single = (generate(model, tokenizer([prompt], return_tensors="pt")) for prompt in PROMPTS[:3])
            return same_bits(torch.cat([torch.stack(one.logits, 1) for one in single]), together[:3])

        for batch in (1, 8):
            inputs = tokenizer(list(PROMPTS[:batch]), return_tensors="pt", padding=True)
            yield Case(
                "generate",
                dtype,
                f"SmolLM2-135M B={batch}, {NEW_TOKENS} tokens",
                GENERATE_BOUNDS,
                lambda inputs=inputs, model=ours: generate(model, inputs),
                lambda inputs=inputs, model=stock: generate(model, inputs),
                check,
            )


CASES = {
    "linear": linear_cases,
    "attention": attention_cases,
    "norm": norm_cases,
    "generate": generate_cases,
}


def times(case: Case) -> tuple[float, float]:
    """Microseconds of ours and stock."""
    functions = (case.ours, case.stock)
    for function in functions:
        function()
    taken: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    while len(taken[0]) < 7 or (time.perf_counter() - begin < 1.0 and len(taken[0]) < 300):
        for function, list_ in zip(functions, taken, strict=True):
            start = time.perf_counter()
            function()
            list_.append((time.perf_counter() - start) * 1e6)
    ours, stock = (statistics.quantiles(list_, n=4)[0] for list_ in taken)
    return ours, stock


def certification_seconds() -> float:
    """What the first forward of a converted SmolLM2 takes beyond the next one, in this process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(find_smollm2(), dtype=torch.float32).eval()
    hf_batchinv.convert(model)
    tokens = torch.arange(40)[None]
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        model(tokens)
        taken.append(time.perf_counter() - start)
    return taken[0] - min(taken)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main(out: str, chosen: list[str]) -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    env = {"cpu": cpu_name(), "isa": torch.backends.cpu.get_cpu_capability(), "threads": THREADS}
    env["omp_wait_policy"] = os.environ.get("OMP_WAIT_POLICY", "default")
    env |= {"torch": torch.__version__, "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}
    rows, before = [], json.loads(Path(out).read_text()) if Path(out).exists() else {"env": {}, "rows": []}
    with torch.no_grad():
        if "generate" in chosen:
            env["certification_s"] = round(certification_seconds(), 2)
        print(f"{'op':<11}{'dtype':<9}{'case':<46}{'ours us':>10}{'stock us':>10}{'ratio':>7}{'bound':>7}  met")
        for op in chosen:
            for case in CASES[op]():
                row = {"op": case.op, "dtype": str(case.dtype)[6:], "case": case.case, "bound": case.bound}
                row["bits_ok"] = case.check()
                head = f"{row['op']:<11}{row['dtype']:<9}{row['case']:<46}"
                if row["bits_ok"]:
                    ours, stock = times(case)
                    row |= {"ours_us": round(ours, 1), "stock_us": round(stock, 1), "ratio": round(ours / stock, 2)}
                    met = "" if case.bound is None else "yes" if row["ratio"] <= case.bound else "NO"
                    bound = "-" if case.bound is None else case.bound
                    print(f"{head}{ours:>10.0f}{stock:>10.0f}{row['ratio']:>7.2f}{bound:>7}  {met}", flush=True)
                else:
                    print(f"{head} bits differ between batches: not timed", flush=True)
                rows.append(row | {"group": op})
    env["load"] = {op: round(os.getloadavg()[0], 1) for op in chosen}
    once = ("certification_s", "load")
    if all(before["env"].get(name) == value for name, value in env.items() if name not in once):
        env["load"] = before["env"]["load"] | env["load"]
        env = before["env"] | env
        rows += [row for row in before["rows"] if row["group"] not in chosen]
    Path(out).write_text(json.dumps({"env": env, "rows": rows}, indent=1) + "\n")
    bounded = [row for row in rows if row["bound"] is not None]
    met = sum(row["bits_ok"] and row["ratio"] <= row["bound"] for row in bounded)
    print(f"{met} of {len(bounded)} bounds met; env {env}")


if __name__ == "__main__":
    if len(sys.argv) < 2 or set(sys.argv[2:]) - set(CASES):
        sys.exit(f"usage: cpu_ratios.py OUT.json [{' | '.join(CASES)} ...]")
    main(sys.argv[1], sys.argv[2:] or list(CASES))
