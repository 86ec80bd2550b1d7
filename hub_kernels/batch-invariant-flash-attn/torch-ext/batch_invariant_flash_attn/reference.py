"""The order of reduction on a GPU, stated as plainly as it can be: one query row at a time, in float32.

    blocks    kv_block keys each, counted from the row's origin; a block keeps the running maximum, sum and output
    splits    blocks up to the next fixed position (contract.split_begin) share one running state
    folding   the splits' states, from left to right; then the sink; then one division and one rounding

Nothing here knows a batch size, a number of queries or a cache length. The kernels agree with this up to the rounding
of a block's products and of exp2; they agree with each other bit for bit.
"""

import math

import torch

from .contract import attention_contract, mask_floor, split_begin, split_of

LOG2E = math.log2(math.e)


def attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    origin: torch.Tensor | None = None,
    query_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result of `attention`."""
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len, value_head_dim = key.shape[1], key.shape[2], value.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    kv_block = attention_contract(head_dim=head_dim, value_head_dim=value_head_dim, dtype=query.dtype).kv_block
    if mask is not None:
        mask = mask.expand(batch, heads, q_len, kv_len)
    out = torch.zeros(batch, q_len, heads, value_head_dim, dtype=query.dtype)
    for b in range(batch):
        start = 0 if origin is None else int(origin[b])
        offset = kv_len - q_len if query_offset is None else int(query_offset[b])
        keys = torch.arange(max(start, 0), kv_len)
        if key_mask is not None:
            keys = keys[key_mask[b, keys]]
        for h in range(heads):
            k, v = key[b, h // (heads // kv_heads)].float(), value[b, h // (heads // kv_heads)]
            for i in range(q_len):
                seen = keys
                if causal:
                    seen = seen[seen <= offset + i]
                if window[0] >= 0:
                    seen = seen[seen >= offset + i - window[0]]
                if window[1] >= 0:
                    seen = seen[seen <= offset + i + window[1]]
                score = (k[seen] @ query[b, h, i].float()) * scale
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                if mask is not None and mask.dtype == torch.bool:
                    seen, score = seen[mask[b, h, i, seen]], score[mask[b, h, i, seen]]
                elif mask is not None:
                    extra = mask[b, h, i, seen].float()
                    visible = extra > mask_floor(mask.dtype)
                    seen, score = seen[visible], (score + extra)[visible]
                sink = None if sinks is None else float(sinks[h]) * LOG2E
                out[b, i, h] = _one_row(seen - start, score * LOG2E, v[seen], kv_block, sink)
    return out.transpose(1, 2)


def _one_row(
    position: torch.Tensor, score: torch.Tensor, value: torch.Tensor, kv_block: int, sink: float | None
) -> torch.Tensor:
    """position (n,) of the seen keys, from the origin; score (n,) in log2 units; value (n, Dv) -> (Dv,) float32."""
    nothing = (torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(value.shape[-1]))  # maximum, sum, output
    total = nothing
    for split in range(split_of(int(position[-1])) + 1 if len(position) else 0):
        part = nothing
        for begin in range(split_begin(split), split_begin(split + 1), kv_block):
            block = (position >= begin) & (position < begin + kv_block)
            if block.any():
                part = _step(part, score[block], value[block])
        total = _fold(total, part)
    maximum, weight_sum, output = total
    if sink is not None:
        maximum, weight_sum, output = _fold(total, (torch.tensor(sink), torch.tensor(1.0), nothing[2]))
    return output / weight_sum if weight_sum > 0 else output


def _step(state, score: torch.Tensor, value: torch.Tensor):
    """Take one block into a running state (maximum, sum of the weights, sum of the weighted values)."""
    maximum, weight_sum, output = state
    new_maximum = torch.maximum(maximum, score.max())
    weights = torch.exp2(score - new_maximum)
    shrink = torch.exp2(maximum - new_maximum)
    # A product with the values needs weights of their dtype; the sum of the weights does not.
    rounded = weights.to(value.dtype).float()
    return new_maximum, weight_sum * shrink + weights.sum(), output * shrink + rounded @ value.float()


def _fold(total, part):
    """Fold the next state into the running one."""
    maximum = torch.maximum(total[0], part[0])
    if maximum == -math.inf:
        return total
    shrink_total, shrink_part = torch.exp2(total[0] - maximum), torch.exp2(part[0] - maximum)
    return (maximum, *(a * shrink_total + b * shrink_part for a, b in zip(total[1:], part[1:], strict=True)))
