"""Keys and values of a paged cache, brought into a layout that the kernels know by copying rows.

A copy has the bits of what it copies, so neither page numbers nor the page size reach the sums.
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
