"""attention beside the cuDNN and flash backends of SDPA; features that SDPA lacks beside our own plain attention."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import hub
from . import timing
from .cases import VARIANTS, AttentionCase
from .trial import Trial, same_bits

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def origins(batch: int, length: int) -> list[int]:
    """First real key of each row, for left padding of up to 3/4 of the length, off any block's edge."""
    return [row * length * 3 // (4 * batch) + 5 * (row > 0) for row in range(batch)]


def options_of(case: AttentionCase, device: str) -> dict:
    """Keyword arguments of `attention` for a case."""
    options = {"causal": True} | VARIANTS.get(case.case, {})
    if "sinks" in options:
        options["sinks"] = torch.randn(case.heads, device=device, dtype=getattr(torch, case.dtype))
    if "origin" in options:
        options["origin"] = torch.tensor(origins(case.batch, case.kv_len), dtype=torch.int32, device=device)
    return options


def work(case: AttentionCase) -> tuple[int, int]:
    """(bytes, flops) of one call: what its masks leave over."""
    itemsize = getattr(torch, case.dtype).itemsize
    left = VARIANTS.get(case.case, {}).get("window", (case.kv_len, 0))[0]
    starts = origins(case.batch, case.kv_len) if case.case == "left padding" else [0] * case.batch
    pairs = sum(_pairs(case.q_len - start if case.q_len > 1 else 1, case.kv_len - start, left) for start in starts)
    keys = sum(case.kv_len - start for start in starts)
    elements = 2 * case.batch * case.heads * case.q_len + 2 * keys * case.kv_heads
    return elements * case.head_dim * itemsize, 4 * pairs * case.heads * case.head_dim


def _pairs(queries: int, keys: int, left: int) -> int:
    """How many keys the last `queries` of `keys` positions see together, each itself and `left` before it."""
    full = max(0, min(queries, keys - left))  # queries that see left + 1 keys
    rest = queries - full  # the first ones: query i sees keys - queries + i + 1
    return full * (left + 1) + rest * (keys - queries) + rest * (rest + 1) // 2


def trials(cases: Sequence[AttentionCase], device: str) -> Iterator[Trial]:
    """One trial per case of a head shape."""
    for case in cases:
        yield _trial(case, device)


def _trial(case: AttentionCase, device: str) -> Trial:
    attention = hub.load("flash-attn").attention
    dtype = getattr(torch, case.dtype)
    keys = (case.batch, case.kv_heads, case.kv_len, case.head_dim)
    sets = timing.rotation(2 * case.batch * case.kv_heads * case.kv_len * case.head_dim * dtype.itemsize, device)
    query = torch.randn(case.batch, case.heads, case.q_len, case.head_dim, device=device, dtype=dtype)
    caches = torch.randn(sets, 2, *keys, device=device, dtype=dtype)
    options = options_of(case, device)

    def check() -> bool:
        """The first and the last sequence alone: decode and a chunk from the middle against the whole batch."""
        whole = attention(query, *caches[0], **options)
        for row in {0, case.batch - 1}:
            mine = slice(row, row + 1)
            alone = options | ({"origin": options["origin"][mine]} if "origin" in options else {})
            middle = (case.kv_len - case.q_len) + -(-case.q_len * 7 // 8)
            for end, queries in ((case.kv_len, 1), (middle, min(7, case.q_len))):
                stop = end - (case.kv_len - case.q_len)
                chosen = slice(stop - queries, stop)
                part = attention(query[mine, :, chosen], *caches[0, :, mine, :, :end], **alone)
                if not same_bits(part, whole[mine, :, chosen]):
                    return False
        return True

    def sdpa(backend: SDPBackend, i: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, *caches[i], is_causal=case.q_len > 1, enable_gqa=True)

    variant = case.case in VARIANTS
    stock = {name: lambda i, backend=backend: sdpa(backend, i) for name, backend in BACKENDS.items()}
    nbytes, flops = work(case)
    return Trial(
        case,
        nbytes,
        flops,
        sets=sets,
        check=check,
        ours=lambda i: attention(query, *caches[i], **options),
        stock={} if variant else stock,
        plain=(lambda i: attention(query, *caches[i], causal=True)) if variant else None,
    )
