"""The FlashAttention-2 functions, by their names and parameters, over the same two ops.

Transformers reads these signatures to learn what is supported, so every parameter is spelt out; what this package does
not do is refused.
"""

import torch

from ._checks import check_cu_seqlens
from ._paged import check_pages, page_rows
from .attention import attention, attention_varlen


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """q (B, Q, Hq, D), k (B, KV, Hkv, D), v (B, KV, Hkv, Dv) -> (B, Q, Hq, Dv).

    `causal` and `window_size` count from the bottom right corner; s_aux (Hq,) are the sinks of `attention`, whose bits
    these are. `deterministic` changes nothing. Raises ValueError for dropout, ALiBi and returned probabilities, and as
    `attention` does.
    """
    _refuse("flash_attn_func", dropout_p, alibi_slopes, return_attn_probs)
    query, key, value = (tensor.transpose(1, 2) if tensor.dim() == 4 else tensor for tensor in (q, k, v))
    out = attention(
        query,
        key,
        value,
        causal=causal,
        scale=softmax_scale,
        window=window_size,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), packed -> (Tq, Hq, Dv).

    Each sequence gets the bits that `flash_attn_func` gives it alone.

    block_table: integers (S, blocks); k and v are then paged caches (blocks, page size, Hkv, D) and (..., Dv), in which
        the key at position p of sequence s is row p % page size of block block_table[s, p // page size]. Copies
        S * max_seqlen_k rows out of each; any table and page size give the bits of packed keys.

    Raises as `flash_attn_func` does, and ValueError for a table that does not fit.
    """
    _refuse("flash_attn_varlen_func", dropout_p, alibi_slopes, return_attn_probs)
    if block_table is not None:
        check_cu_seqlens("flash_attn_varlen_func", cu_seqlens_q, cu_seqlens_k, q)
        sequences, longest = cu_seqlens_k.numel() - 1, int(max_seqlen_k)
        for name, pages in (("k", k), ("v", v)):
            check_pages("flash_attn_varlen_func", name, pages, block_table, sequences, longest)
        if k.shape[:2] != v.shape[:2]:
            raise ValueError(
                "flash_attn_varlen_func: expected v to have the blocks and page size of k, "
                f"{tuple(k.shape[:2])}, got {tuple(v.shape[:2])}; pass the two caches of one layer"
            )
        rows = page_rows(block_table, k.shape[1], cu_seqlens_k, longest)
        k, v = (pages.flatten(0, 1).index_select(0, rows) for pages in (k, v))
    return attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        scale=softmax_scale,
        window=window_size,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )


def _refuse(op: str, dropout_p: float, alibi_slopes: torch.Tensor | None, return_attn_probs: bool) -> None:
    if dropout_p:
        raise ValueError(
            f"{op}: expected dropout_p=0, got {dropout_p}; call model.eval() or set attention_dropout to 0"
        )
    if alibi_slopes is not None:
        raise ValueError(f"{op}: expected alibi_slopes=None, got slopes; pass the biases as the mask of `attention`")
    if return_attn_probs:
        raise ValueError(f"{op}: expected return_attn_probs=False, got True; probabilities are never stored")
