"""Rows of results to lines of a table: per op, dtype and group the geometric mean and the range of our speed.

Also reads rows of the first result files, which have no `case` (linear) and no `triton_us`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# linear: (most rows, name of the group)
LINEAR_GROUPS = (
    (16, "decode, 1 to 16 rows"),
    (64, "decode, 32 and 64 rows"),
    (400, "middle, 96 to 400 rows"),
    (math.inf, "prefill, 512 to 8192 rows"),
)
# (op, beginning of the group's name) -> geometric mean that we aim at, as a share of the stock op's speed.
TARGETS = {
    ("linear", ""): 1.00,
    ("grouped_linear", ""): 1.00,
    ("attention", "prefill"): 0.92,
    ("attention", "decode"): 1.00,
    ("norm", ""): 1.00,
    ("softmax", ""): 1.00,
}
FLOAT32_TARGETS = {("linear", ""): 0.90, ("softmax", ""): 1.00}
TRITON_ALONE = "linear, Triton kernel"
CUBLAS = "F.linear (cuBLAS)"
NOSPLIT = "cuBLASLt without split K"
PEERS = {
    "linear": CUBLAS,
    "grouped_linear": "the faster of grouped_mm and batched_mm",
    "attention": "the faster of SDPA's cuDNN and flash",
    "norm": "the faster of torch and eager Transformers",
    "softmax": "torch",
}
PLAIN = "our own plain causal attention"


@dataclass(frozen=True)
class Line:
    """Our speed as a share of the peer's, over the cases of a group."""

    op: str
    dtype: str
    group: str
    peer: str
    mean: float
    worst: float
    best: float
    cases: int
    target: float | None
    broken: int  # further cases, without a time because bits differ


def group_of(row: dict) -> str:
    """The group of a row, within its op."""
    if row["op"] == "linear":
        return next(name for most, name in LINEAR_GROUPS if row["M"] <= most)
    if row["op"] == "grouped_linear":
        return "decode, 1 to 64 tokens" if row["tokens"] <= 64 else "prefill, 256 to 4096 tokens"
    if row["op"] == "norm":
        return f"{row['case']}, {'1 to 64 rows' if row['rows'] <= 64 else '512 to 65536 rows'}"
    return row["case"]


def speeds(row: dict) -> Iterator[tuple[str, str, float | None]]:
    """(op as it is called in the table, peer, our speed as a share of the peer's), None where there is no time."""
    stock = row.get("stock_us") or {}
    if row["op"] == "attention" and "over_plain" in row:
        over = row["over_plain"]
        yield "attention", PLAIN, None if over is None else 1 / over
        return
    yield row["op"], PEERS[row["op"]], row["ratio"]
    if row["op"] != "linear" or not row["bits_ok"]:
        return
    if row.get("triton_us"):
        yield TRITON_ALONE, CUBLAS, stock["cublas_default"] / row["triton_us"]
    if stock.get("cublaslt_nosplit"):
        yield "linear", NOSPLIT, stock["cublaslt_nosplit"] / row["ours_us"]


def lines(rows: Iterable[dict]) -> list[Line]:
    """The lines of the table; those of one (op, dtype, peer) stand together, each in the order of first appearance.

    The Triton kernel has lines of its own only if another engine served a case.
    """
    rows = list(rows)
    one_engine = {row["engine"] for row in rows if row["op"] == "linear"} <= {"triton"}
    speeds_of: dict[tuple[str, str, str, str], list[float]] = {}
    broken: Counter[tuple[str, str, str, str]] = Counter()
    for row in rows:
        for op, peer, speed in speeds(row):
            if op == TRITON_ALONE and one_engine:
                continue
            key = (op, row["dtype"], peer, group_of(row))
            values = speeds_of.setdefault(key, [])
            values += [] if speed is None else [speed]
            broken[key] += not row["bits_ok"]
    blocks = list(dict.fromkeys(key[:3] for key in speeds_of))
    keys = sorted(speeds_of, key=lambda key: blocks.index(key[:3]))
    return [_line(*key, speeds_of[key], broken[key]) for key in keys]


def _line(op: str, dtype: str, peer: str, group: str, values: list[float], broken: int) -> Line:
    mean = math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
    worst, best = min(values, default=math.nan), max(values, default=math.nan)
    targets = FLOAT32_TARGETS if dtype == "float32" else TARGETS
    stated = {} if peer in (NOSPLIT, PLAIN) or op == TRITON_ALONE else targets
    target = next((aim for (aimed, start), aim in stated.items() if aimed == op and group.startswith(start)), None)
    return Line(op, dtype, group, peer, mean, worst, best, len(values), target, broken)
