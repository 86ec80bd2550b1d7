"""Keys and values of a paged cache, and packed sequences whose first keys a sliding cache has dropped.

Both are brought into a layout that the kernels know by copying rows: a copy has the bits of what it copies, and the
sequence's origin stays where it was, so neither page numbers nor page size nor cropping reach the sums.
"""

import torch


def check_pages(op: str, name: str, pages: torch.Tensor, block_table: torch.Tensor, sequences: int, longest: int):
    """Raise unless pages (blocks, page size, Hkv, D) and block_table (S, blocks per sequence) fit `longest` keys."""
    if pages.dim() != 4 or pages.shape[0] == 0 or pages.shape[1] == 0:
        raise ValueError(
            f"{op}: expected {name} of shape (blocks, page_size, heads, head_dim) with a block_table, "
            f"got {tuple(pages.shape)}; pass the whole paged cache"
        )
    fits = block_table.dim() == 2 and block_table.shape[0] == sequences
    if not fits or block_table.dtype not in (torch.int32, torch.int64) or block_table.device != pages.device:
        raise ValueError(
            f"{op}: expected block_table to be an integer tensor of shape ({sequences}, blocks per sequence) on "
            f"{pages.device}, got {tuple(block_table.shape)}, {block_table.dtype}, {block_table.device}; "
            "give it one row per sequence"
        )
    if longest > block_table.shape[1] * pages.shape[1]:
        raise ValueError(
            f"{op}: expected block_table rows for max_seqlen_k={longest} keys, got {block_table.shape[1]} blocks of "
            f"{pages.shape[1]}; pass a wider block_table"
        )


def page_rows(block_table: torch.Tensor, page_size: int, cu_seqlens_k: torch.Tensor, longest: int) -> torch.Tensor:
    """The rows of a flat cache (blocks * page size, ...) that hold the packed keys, in order.

    int64 (S * longest,): rows behind the last sequence are arbitrary ones, since their number is not known without
    waiting for the device. Blocks that no key lies in are not read, so they may hold -1.
    """
    sequences = block_table.shape[0]
    at = torch.arange(sequences * longest, device=block_table.device, dtype=torch.int32)
    sequence = (torch.searchsorted(cu_seqlens_k, at, right=True) - 1).clamp_(max=sequences - 1)
    position = (at - cu_seqlens_k[sequence]).clamp_(0, longest - 1).long()
    return block_table[sequence, position // page_size].clamp_(min=0).long() * page_size + position % page_size


def attend_from_origins(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    origin: torch.Tensor,
    **options,
) -> torch.Tensor:
    """attention_varlen with an origin (S,) for each sequence, by calls of `attention`; causal only.

    Sequences of one query (decoding) go together, the others one by one. Reads the lengths back from the device if
    there are others.
    """
    from .attention import attention

    assert options["causal"]
    # One row more, for sequences without a query.
    out = query.new_zeros(query.shape[0] + 1, query.shape[1], value.shape[-1])
    if 0 in (origin.numel(), query.shape[0], key.shape[0], max_seqlen_q, max_seqlen_k):
        return out[:-1]
    first_q, first_k = cu_seqlens_q[:-1].long(), cu_seqlens_k[:-1].long()
    length_q, length_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    if max_seqlen_q == 1:
        at = torch.where(length_q == 1, first_q, query.shape[0])
        first_q = first_q.clamp(max=query.shape[0] - 1)
        decoded = _decode(query[first_q], key, value, first_k, length_k, max_seqlen_k, origin, options)
        return out.index_copy_(0, at, decoded)[:-1]
    edges_q, edges_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    spans = list(zip(edges_q[:-1], edges_q[1:], edges_k[:-1], edges_k[1:], strict=True))
    single = [s for s, (begin, end, _, _) in enumerate(spans) if end - begin == 1]
    if single:
        longest = max(spans[s][3] - spans[s][2] for s in single)
        chosen = torch.tensor(single, device=query.device)
        at = first_q[chosen]
        lengths, origins = length_k[chosen], origin[chosen]
        out.index_copy_(0, at, _decode(query[at], key, value, first_k[chosen], lengths, longest, origins, options))
    for s, (begin, end, begin_k, end_k) in enumerate(spans):
        if end - begin > 1:
            operands = (query[begin:end], key[begin_k:end_k], value[begin_k:end_k])
            one = attention(*(x.transpose(0, 1)[None] for x in operands), origin=origin[s : s + 1], **options)
            out[begin:end] = one[0].transpose(0, 1)
    return out[:-1]


def _decode(query, key, value, first_k, lengths, longest: int, origin, options) -> torch.Tensor:
    """query (S, Hq, D), each of which sees `lengths` packed keys from `first_k` on -> (S, Hq, Dv)."""
    from .attention import attention

    if longest == 0:
        return query.new_zeros(*query.shape[:2], value.shape[-1])
    # Behind a sequence's end lie keys of others: causality hides them.
    rows = (first_k[:, None] + torch.arange(longest, device=key.device)).clamp_(max=key.shape[0] - 1).flatten()
    key, value = (x.index_select(0, rows).view(-1, longest, *x.shape[1:]).transpose(1, 2) for x in (key, value))
    return attention(query[:, :, None], key, value, origin=origin, query_offset=lengths - 1, **options)[:, :, 0]
