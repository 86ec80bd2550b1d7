"""What `hf-batchinv bench` measures, as plain data: the weights and shapes of well-known models.

A unit is a list of cases that share operands: one weight over all numbers of rows, one head shape over all lengths.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

# Dtypes in the order in which they are measured.
DTYPES = ("bfloat16", "float16", "float32")

# --- linear: (N, K, model) ---

LINEAR_WEIGHTS = (
    (2048, 1024, "Qwen3-0.6B"),  # q
    (4096, 1024, "Qwen3-0.6B"),  # fused qkv
    (1024, 2048, "Qwen3-0.6B"),  # o
    (3072, 1024, "Qwen3-0.6B"),  # gate, up
    (1024, 3072, "Qwen3-0.6B"),  # down
    (151936, 1024, "Qwen3-0.6B"),  # head
    (4096, 4096, "Qwen3-8B"),
    (1024, 4096, "Qwen3-8B"),
    (12288, 4096, "Qwen3-8B"),
    (4096, 12288, "Qwen3-8B"),
    (151936, 4096, "Qwen3-8B"),
    (6144, 4096, "Llama-3.1-8B"),
    (14336, 4096, "Llama-3.1-8B"),
    (28672, 4096, "Llama-3.1-8B"),
    (4096, 14336, "Llama-3.1-8B"),
    (128256, 4096, "Llama-3.1-8B"),
    (8192, 8192, "Llama-3.1-70B"),
    (1024, 8192, "Llama-3.1-70B"),
    (28672, 8192, "Llama-3.1-70B"),
    (8192, 28672, "Llama-3.1-70B"),
    (576, 576, "SmolLM2-135M"),
    (192, 576, "SmolLM2-135M"),
    (1536, 576, "SmolLM2-135M"),
    (576, 1536, "SmolLM2-135M"),
    (49152, 576, "SmolLM2-135M"),
)
LINEAR_ROWS = {
    "decode": (1, 2, 4, 8, 16, 32, 64),
    "middle": (96, 128, 200, 256, 400),
    "prefill": (512, 1024, 2048, 4096, 8192),
}
FLOAT32_ROWS = (1, 4, 16, 64, 256, 1024, 2048)
MOST_OUTPUTS = 2**30  # a head never meets more rows than that

# --- grouped_linear: (experts, top_k, N, K, model) ---

EXPERTS = (
    (128, 8, 1536, 2048, "Qwen3-30B-A3B"),  # gate_up
    (128, 8, 2048, 768, "Qwen3-30B-A3B"),  # down
    (8, 2, 28672, 4096, "Mixtral-8x7B"),
    (8, 2, 4096, 14336, "Mixtral-8x7B"),
)
EXPERT_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)

# --- attention: (query heads, KV heads, head_dim) ---

PREFILL_HEADS = ((32, 8, 128), (16, 8, 64), (16, 16, 128), (8, 4, 256))
PREFILL_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PREFILL_TOKENS, PREFILL_BATCH = 16384, 8  # at most
VARIANT_HEADS = ((32, 8, 128), (8, 4, 256))
VARIANT_LENGTH, VARIANT_BATCH = 4096, 4
DECODE_HEADS = ((8, 8, 128), (32, 8, 128), (28, 4, 128), (64, 8, 128), (16, 8, 64), (9, 3, 64))
DECODE_BATCHES = (1, 8, 32, 128, 256)
DECODE_LENGTHS = (128, 512, 1024, 4096, 16384, 65536)
MOST_CACHE_BYTES = 24 * 10**9

# --- norm, softmax ---

NORM_ROWS = (1, 8, 64, 512, 4096, 65536)
NORM_COLUMNS = (576, 1024, 2048, 4096, 8192)
SOFTMAX_COLUMNS = 151936
SOFTMAX_ROWS = (1, 8, 32, 128, 512)


@dataclass(frozen=True)
class LinearCase:
    """A weight (N, K) and M rows."""

    dtype: str
    case: str
    M: int
    N: int
    K: int

    @property
    def unit(self) -> tuple:
        return self.dtype, self.N, self.K


@dataclass(frozen=True)
class GroupedCase:
    """Experts of shape (N, K), top_k of them for each token."""

    dtype: str
    case: str
    tokens: int
    experts: int
    top_k: int
    N: int
    K: int

    @property
    def unit(self) -> tuple:
        return self.dtype, self.experts, self.N, self.K


@dataclass(frozen=True)
class AttentionCase:
    """Causal attention; `case` is "prefill", "decode" or the name of one of VARIANTS."""

    dtype: str
    case: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int

    @property
    def unit(self) -> tuple:
        return self.heads, self.kv_heads, self.head_dim, self.q_len == 1


# Name of the case -> keyword arguments of `attention`; True stands for a tensor that attention.py makes.
VARIANTS = {
    "window 1024": {"window": (1023, 0)},
    "window 4096": {"window": (4095, 0)},
    "softcap 50": {"softcap": 50.0},
    "sinks": {"sinks": True},
    "left padding": {"origin": True},
}


@dataclass(frozen=True)
class RowsCase:
    """Rows that are normalised one by one; `case` is the function."""

    dtype: str
    case: str
    rows: int
    columns: int

    @property
    def unit(self) -> tuple:
        return self.dtype, self.case, self.columns


Case = LinearCase | GroupedCase | AttentionCase | RowsCase


def dimensions(case: Case) -> dict[str, str | int]:
    """The first keys of the case's row in the result."""
    return asdict(case)


def _linear(quick: bool) -> list[LinearCase]:
    found = []
    for dtype in DTYPES:
        # Other dtypes take the same paths on a third of the shapes.
        weights = LINEAR_WEIGHTS if dtype == "bfloat16" else LINEAR_WEIGHTS[::3]
        for n, k, _ in weights:
            if quick and (n, k) not in ((4096, 4096),) + (((4096, 1024), (14336, 4096)) * (dtype == "bfloat16")):
                continue
            for case, rows in LINEAR_ROWS.items():
                for m in rows:
                    if m * n > MOST_OUTPUTS or (dtype == "float32" and m not in FLOAT32_ROWS):
                        continue
                    if not quick or m in (1, 16, 64, 256, 2048):
                        found.append(LinearCase(dtype, case, m, n, k))
    return found


def _grouped_linear(quick: bool) -> list[GroupedCase]:
    return [
        GroupedCase("bfloat16", "decode" if tokens <= 64 else "prefill", tokens, experts, top_k, n, k)
        for experts, top_k, n, k, _ in (EXPERTS[:1] if quick else EXPERTS)
        for tokens in EXPERT_TOKENS
        if not quick or tokens in (1, 64, 1024)
    ]


def _attention(quick: bool) -> list[AttentionCase]:
    found = []
    for heads, kv_heads, head_dim in PREFILL_HEADS[:1] if quick else PREFILL_HEADS:
        for length in PREFILL_LENGTHS:
            for batch in sorted({1, min(PREFILL_BATCH, PREFILL_TOKENS // length)}):
                if not quick or (batch, length) in ((8, 1024), (1, 4096)):
                    found.append(AttentionCase("bfloat16", "prefill", batch, heads, kv_heads, length, length, head_dim))
        if (heads, kv_heads, head_dim) in VARIANT_HEADS:
            for name in list(VARIANTS)[:1] if quick else VARIANTS:
                lengths = (VARIANT_LENGTH, VARIANT_LENGTH)
                found.append(AttentionCase("bfloat16", name, VARIANT_BATCH, heads, kv_heads, *lengths, head_dim))
    for heads, kv_heads, head_dim in DECODE_HEADS[1:2] if quick else DECODE_HEADS:
        for batch in DECODE_BATCHES:
            for length in DECODE_LENGTHS:
                if batch * length * kv_heads * head_dim * 4 > MOST_CACHE_BYTES:  # keys and values, 2 bytes each
                    continue
                if not quick or (batch, length) in ((1, 1024), (1, 16384), (32, 4096)):
                    found.append(AttentionCase("bfloat16", "decode", batch, heads, kv_heads, 1, length, head_dim))
    return found


def _norm(quick: bool) -> list[RowsCase]:
    return [
        RowsCase("bfloat16", case, rows, columns)
        for case in ("rms_norm", "layer_norm")
        for columns in NORM_COLUMNS
        for rows in NORM_ROWS
        if not quick or (columns == 4096 and rows in (1, 512, 65536))
    ]


def _softmax(quick: bool) -> list[RowsCase]:
    return [
        RowsCase(dtype, case, rows, SOFTMAX_COLUMNS)
        for dtype in ("bfloat16", "float32")
        for case in ("softmax", "log_softmax")
        for rows in SOFTMAX_ROWS
        if not quick or rows in (1, 32)
    ]


_CASES = {
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "attention": _attention,
    "norm": _norm,
    "softmax": _softmax,
}
OPS = tuple(_CASES)


def units(
    op: str, dtypes: Sequence[str] = DTYPES, *, quick: bool = False, shard: tuple[int, int] = (1, 1)
) -> list[list[Case]]:
    """The cases of an op in these dtypes, grouped into units; shard (i, n) keeps every n-th unit from the i-th on."""
    wanted = [case for case in _CASES[op](quick) if case.dtype in dtypes]
    grouped = [list(group) for _, group in groupby(wanted, key=lambda case: case.unit)]
    return grouped[shard[0] - 1 :: shard[1]]
