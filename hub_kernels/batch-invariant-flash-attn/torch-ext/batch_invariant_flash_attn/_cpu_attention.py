"""Attention on the CPU: PyTorch's flash kernel in certified calls (`_cpu_flash`), and what it does not do in blocks.

Softcap, sinks and values of another head_dim, and machines without a certificate, take blocks of 64 keys from each
row's origin, added in ascending order. Which of the two it is depends on the model only. A tile of query rows is scored
against all blocks that any of them sees. Then come each row's maximum over all its keys (a maximum has no rounding, so
no order either), the weights exp(score - maximum), and for block after block

    total += weights @ values        lanes[0..63] += weights

and last a halving tree over the 64 lanes gives the sum of the weights. A block or key that a row does not see has
weight 0 and changes nothing, so it makes no difference whether it is skipped, hidden, or not there. All of it is
float32 and rounded once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from . import _cpu_flash, _cpu_products
from ._cpu_blocks import clear_hidden_keys, gather, view_of_blocks
from ._cpu_exp import tanh_, weights_
from ._cpu_products import BLOCK
from ._cpu_scratch import scratch
from ._dispatch import plain_torch
from .contract import mask_floor
from .key_mask import HEADER, is_prepared

# Bytes of scores per thread that a tile aims at (they should stay in the second-level cache), and the most bytes that
# the scores of one item may take before its tile gets lower.
_SCORES_PER_THREAD = 6 << 20
_SCORES_PER_ITEM = 16 << 20
# Bytes per thread of keys that are copied at a time when they are used once.
_PIECE_PER_THREAD = 1 << 20
# The maximum of a row that sees nothing: -inf less this is still -inf, where -inf less -inf is NaN.
_LEAST_MAXIMUM = -3e38
# Multiplied twice: takes -1 to -inf and 0 to 0.
_HUGE = 1e38


@dataclass(slots=True)
class Call:
    """The arguments of one call and what follows from them for each row of the batch, in keys from its origin."""

    query: torch.Tensor  # (B, Hq, Q, D)
    key: torch.Tensor  # (B, Hkv, KV, D)
    value: torch.Tensor  # (B, Hkv, KV, Dv)
    scale: float
    softcap: float
    sinks: torch.Tensor | None  # (Hq,) float32
    mask: torch.Tensor | None
    key_mask: torch.Tensor | None
    left: int | None  # query at p sees keys from p - left ...
    right: int | None  # ... to p + right
    origins: list[int]
    offsets: list[int]  # where query 0 stands
    begins: list[int]  # first key
    ends: list[int]  # behind the last key that any query sees

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def limits(self, rows: slice) -> list[int]:
        """The index in `key` behind the last key of each row."""
        return [end + origin for end, origin in zip(self.ends[rows], self.origins[rows], strict=True)]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    origin: torch.Tensor | None,
    query_offset: torch.Tensor | None,
) -> torch.Tensor:
    """query (B, Hq, Q, D), key (B, Hkv, KV, D), value (B, Hkv, KV, Dv) -> (B, Q, Hq, Dv), new and contiguous."""
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    if key_mask is not None and is_prepared(key_mask):
        key_mask = key_mask[:, HEADER:].bool()
    if 0 in (batch, heads, q_len, kv_len, value.shape[-1]):
        return query.new_zeros(batch, q_len, heads, value.shape[-1])
    with plain_torch():
        origins = origin.tolist() if origin is not None else [0] * batch
        offsets = query_offset.tolist() if query_offset is not None else [kv_len - q_len] * batch
        right = min(0, window_right) if causal and window_right >= 0 else 0 if causal else window_right
        right = None if right < 0 else right
        offsets = [offset - start for offset, start in zip(offsets, origins, strict=True)]
        ends = [kv_len - start for start in origins]
        if right is not None:
            ends = [min(end, offset + q_len + right) for end, offset in zip(ends, offsets, strict=True)]
        call = Call(
            query,
            key,
            value,
            scale,
            softcap,
            None if sinks is None else sinks.float(),
            mask,
            key_mask,
            window_left if window_left >= 0 else None,
            right,
            origins,
            offsets,
            [max(0, -start) for start in origins],
            ends,
        )
        plan = _cpu_flash.plan_of(call)
        if plan is not None:
            return _cpu_flash.run(call, plan)
        out = query.new_zeros(batch, q_len, heads, value.shape[-1])
        _run(call, out)
    return out


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: torch.Tensor | None,
    origin: torch.Tensor | None,
) -> torch.Tensor:
    """query (Tq, Hq, D), key (Tk, Hkv, D), value (Tk, Hkv, Dv), cu_seqlens (S + 1,), origin (S,) -> (Tq, Hq, Dv)."""
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    settings = (causal, scale, window_left, window_right, softcap, sinks, None, None)
    for sequence in range(len(queries) - 1):
        of_query = slice(queries[sequence], queries[sequence + 1])
        of_key = slice(keys[sequence], keys[sequence + 1])
        operands = (query[of_query], key[of_key], value[of_key])
        start = None if origin is None else origin[sequence : sequence + 1]
        out[of_query] = attention(*(packed.transpose(0, 1)[None] for packed in operands), *settings, start, None)[0]
    return out


def _run(call: Call, out: torch.Tensor) -> None:
    """Cut the call into slabs (rows of the batch x KV heads) and these into tiles of queries."""
    batch, kv_heads, kv_len, head_dim = call.key.shape
    q_len, group = call.query.shape[2], call.group
    plan = _cpu_products.plan_for(head_dim, call.value.shape[-1])
    if group > plan.heights[-1]:
        return _run_part_of_each_group(call, out, plan.heights[-1])
    height = max(_tile_height(plan.heights, q_len * group, kv_len), next(h for h in plan.heights if h >= group))
    queries = height // group
    item_bytes = height * (kv_len + 2 * BLOCK) * 4
    items = max(1, _SCORES_PER_THREAD * torch.get_num_threads() // item_bytes)
    rows_step, heads_step = max(1, items // kv_heads), -(-kv_heads // -(-kv_heads // items))
    for row in range(0, batch, rows_step):
        for head in range(0, kv_heads, heads_step):
            rows, heads = (row, min(row + rows_step, batch)), (head, min(head + heads_step, kv_heads))
            slab = _Slab(call, plan, slice(*rows), slice(*heads))
            slab.keep_keys(queries < q_len)
            for first in range(0, q_len, queries):
                slab.tile(first, min(first + queries, q_len), height, out)


def _run_part_of_each_group(call: Call, out: torch.Tensor, most: int) -> None:
    """More query heads per KV head than a tile has rows: take some of each group at a time."""
    kv_heads, group = call.key.shape[1], call.group
    for first in range(0, group, most):
        heads = slice(first, min(first + most, group))

        def of_heads(tensor: torch.Tensor | None, dim: int, heads: slice = heads) -> torch.Tensor | None:
            if tensor is None or tensor.shape[dim] == 1:
                return tensor
            grouped = tensor.unflatten(dim, (kv_heads, group)).movedim(dim + 1, 0)
            return grouped[heads].movedim(0, dim + 1).flatten(dim, dim + 1)

        part = replace(call, query=of_heads(call.query, 1), sinks=of_heads(call.sinks, 0), mask=of_heads(call.mask, 1))
        part_out = of_heads(out, 2).clone(memory_format=torch.contiguous_format)
        _run(part, part_out)
        out.unflatten(2, (kv_heads, group))[:, :, :, heads] = part_out.unflatten(2, (kv_heads, -1))


def _tile_height(heights: Sequence[int], rows: int, kv_len: int) -> int:
    """Rows per tile: speed only."""
    fitting = [height for height in heights if height * kv_len * 4 <= _SCORES_PER_ITEM] or heights[:1]
    return next((height for height in fitting if height >= rows), fitting[-1])


class _Slab:
    """Some rows of the batch x some KV heads: (row, KV head) pairs are the items of the products."""

    def __init__(self, call: Call, plan: _cpu_products.Plan, rows: slice, heads: slice):
        self.call, self.plan, self.rows = call, plan, rows
        self.key, self.value = call.key[rows, heads], call.value[rows, heads]
        self.count, self.kv_heads = self.key.shape[:2]
        query_heads = slice(heads.start * call.group, (heads.start + self.kv_heads) * call.group)
        self.query_heads = query_heads
        self.origins, self.limits = call.origins[rows], call.limits(rows)
        self.offsets, self.begins, self.ends = call.offsets[rows], call.begins[rows], call.ends[rows]
        self.kept: tuple[int, torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def keep_keys(self, keep: bool) -> None:
        """Gather all keys and values now (several tiles need them) or piece by piece when needed."""
        if not keep:
            return
        first, last = self._blocks_in_sight(0, self.call.query.shape[2])
        if first < last:
            keys, values = (self._take(source, first, last - first, None) for source in (self.key, self.value))
            self.kept = first, keys, values.split(BLOCK, 1)

    def tile(self, first: int, last: int, height: int, out: torch.Tensor) -> None:
        """Compute queries first ... last - 1 of all heads and rows of the slab."""
        call, group, queries = self.call, self.call.group, last - first
        start, end = self._blocks_in_sight(first, last)
        if start >= end:
            return  # nothing to see: the output is zeros already
        items, used = self.count * self.kv_heads, group * queries
        query = scratch("query", items, height, call.query.shape[-1]).zero_()
        seen = call.query[self.rows, self.query_heads, first:last].unflatten(1, (self.kv_heads, group))
        query.view(self.count, self.kv_heads, height, -1)[:, :, :used].unflatten(2, (group, queries)).copy_(seen)
        query.mul_(call.scale)

        scores = scratch("scores", items, height, (end - start) * BLOCK)
        for block, blocks in self._pieces(start, end):
            columns = slice((block - start) * BLOCK, (block - start + blocks) * BLOCK)
            _cpu_products.scores(self.plan, query, self._keys(block, blocks), scores[:, :, columns])
        if call.softcap:
            tanh_(scores.div_(call.softcap)).mul_(call.softcap)
        self._hide(scores, first, last, start, end)

        maximum = scores.amax(-1)
        sinks = self._sinks(height, queries)
        if sinks is not None:
            maximum = torch.maximum(maximum, sinks)
        maximum.clamp_(min=_LEAST_MAXIMUM)
        weights = weights_(scores.sub_(maximum[..., None])).split(BLOCK, 2)

        head_dim = call.value.shape[-1]
        total = scratch("total", items, height, head_dim).zero_()
        lanes = scratch("lanes", items, height, BLOCK).zero_()
        for block, blocks in self._pieces(start, end):
            for number, value in enumerate(self._values(block, blocks), block - start):
                _cpu_products.add_values(self.plan, total, weights[number], value)
                lanes += weights[number]
        weight_sum = _tree_sum(lanes)
        if sinks is not None:
            weight_sum += weights_(sinks - maximum)[..., None]
        weight_sum.clamp_(min=1.0)  # the largest weight is 1, so this changes a row that sees nothing only: 0 / 1
        result = total.div_(weight_sum).view(self.count, self.kv_heads, height, head_dim)[:, :, :used]
        result = result.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4)
        out[self.rows, first:last, self.query_heads].unflatten(2, (self.kv_heads, group)).copy_(result)

    # --- what is seen ---

    def _sight(self, first: int, last: int) -> list[tuple[int, int, int, int]]:
        """Per row: first and last key that the first query sees, and the same for the last one."""
        sight = []
        for offset, begin, end in zip(self.offsets, self.begins, self.ends, strict=True):
            low, high = [], []
            for position in (offset + first, offset + last - 1):
                low.append(begin if self.call.left is None else max(begin, position - self.call.left))
                high.append(end - 1 if self.call.right is None else min(end - 1, position + self.call.right))
            sight.append((low[0], high[0], low[1], high[1]))
        return sight

    def _blocks_in_sight(self, first: int, last: int) -> tuple[int, int]:
        """The blocks that any query of the tile sees: first, behind the last."""
        sight = [(low, high) for low, _, _, high in self._sight(first, last) if low <= high]
        if not sight:
            return 0, 0
        return min(low for low, _ in sight) // BLOCK, max(high for _, high in sight) // BLOCK + 1

    def _hide(self, scores: torch.Tensor, first: int, last: int, start: int, end: int) -> None:
        """Add the mask, and -inf where a query does not see a key."""
        sight = self._sight(first, last)
        clear_from = -(-max(low for _, _, low, _ in sight) // BLOCK)
        clear_to = max((min(high for _, high, _, _ in sight) + 1) // BLOCK, start)
        spans = [(start, end)]
        if self.call.mask is None and self.call.key_mask is None and clear_from < clear_to:
            spans = [(start, min(clear_from, end)), (max(clear_to, start), end)]
        for begin, finish in spans:
            if begin < finish:
                columns = slice((begin - start) * BLOCK, (finish - start) * BLOCK)
                self._hide_blocks(scores[:, :, columns], first, last, begin, finish - begin)

    def _beyond_the_edges(self, first: int, last: int, block: int, blocks: int) -> torch.Tensor:
        """(rows | 1, queries | 1, keys): 0 where causality, window and length let a query see a key, below 0 elsewhere.

        Arithmetic, since a CPU selects by booleans ten times slower than it adds.
        """
        call, edges = self.call, list(zip(self.offsets, self.begins, self.ends, strict=True))
        edges = edges[:1] if len(set(edges)) == 1 else edges
        offset, begin, end = torch.tensor(edges, dtype=torch.float32).t()[..., None, None]  # each (rows | 1, 1, 1)
        start, stop = block * BLOCK, (block + blocks) * BLOCK
        at = torch.arange(start, stop, dtype=torch.float32)
        position = offset + torch.arange(first, last, dtype=torch.float32)[:, None]
        sight = self._sight(first, last)
        hidden = torch.zeros(1, 1, stop - start)
        if max(low for _, _, low, _ in sight) > start:
            low = begin if call.left is None else torch.maximum(begin, position - call.left)
            hidden = (at - low).clamp_(-1, 0)
        if min(high for _, high, _, _ in sight) < stop - 1:
            high = end - 1 if call.right is None else torch.minimum(end - 1, position + call.right)
            hidden = hidden + (high - at).clamp_(-1, 0)
        return hidden

    def _hide_blocks(self, scores: torch.Tensor, first: int, last: int, block: int, blocks: int) -> None:
        call, queries = self.call, last - first
        hidden = self._beyond_the_edges(first, last, block, blocks)
        if call.key_mask is not None:
            hidden = hidden + (self._present(block, blocks)[:, None] - 1)
        hidden = hidden[:, None, None]  # (rows, KV heads, group, queries, keys)
        target = scores[:, : call.group * queries]
        target = target.view(self.count, self.kv_heads, -1, target.shape[-1]).unflatten(2, (call.group, queries))
        if call.mask is not None:
            mask = call.mask
            mask = mask[self.rows] if mask.shape[0] > 1 else mask.expand(self.count, -1, -1, -1)
            mask = mask[:, self.query_heads] if mask.shape[1] > 1 else mask
            mask = mask[:, :, first:last] if mask.shape[2] > 1 else mask
            boolean = mask.dtype == torch.bool
            floor = 0.0 if boolean else mask_floor(mask.dtype)
            mask = gather(mask, 3, block * BLOCK, blocks * BLOCK, self.origins, self.limits)
            mask = mask.unflatten(1, (self.kv_heads, call.group)) if mask.shape[1] > 1 else mask[:, :, None]
            if boolean:
                hidden = hidden + (mask - 1)
            else:
                target += torch.nn.functional.threshold_(mask, floor, float("-inf"))
        target += hidden.mul_(_HUGE).mul_(_HUGE)

    def _present(self, block: int, blocks: int) -> torch.Tensor:
        """key_mask of some blocks, (rows, keys): 1.0 or 0.0."""
        return gather(self.call.key_mask[self.rows], 1, block * BLOCK, blocks * BLOCK, self.origins, self.limits)

    def _sinks(self, height: int, queries: int) -> torch.Tensor | None:
        """The sink of each row of the tile, (items, height)."""
        if self.call.sinks is None:
            return None
        sinks = self.call.sinks[self.query_heads].view(self.kv_heads, self.call.group, 1)
        padded = torch.zeros(self.count, self.kv_heads, height)
        padded[:, :, : self.call.group * queries] = sinks.expand(-1, -1, queries).flatten(1)
        return padded.view(-1, height)

    # --- keys and values ---

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut a span of blocks into those that are taken at a time: (first, number)."""
        if self.kept is not None:
            yield start, end - start
            return
        block_bytes = self.count * self.kv_heads * BLOCK * self.call.key.shape[-1] * 4
        step = max(1, _PIECE_PER_THREAD * torch.get_num_threads() // block_bytes)
        # Blocks that are whole in every row need no copy: keep them apart from the others.
        whole = (min(max(start, -(-max(self.begins) // BLOCK)), end), max(start, min(end, min(self.ends) // BLOCK)))
        for first, last in ((start, whole[0]), whole, (max(whole), end)):
            for block in range(first, last, step):
                yield block, min(step, last - block)

    def _keys(self, block: int, blocks: int) -> torch.Tensor:
        """Some blocks of keys: (items, blocks * 64, D) float32."""
        if self.kept is None:
            return self._take(self.key, block, blocks, "keys")
        first = block - self.kept[0]
        return self.kept[1][:, first * BLOCK : (first + blocks) * BLOCK]

    def _values(self, block: int, blocks: int) -> tuple[torch.Tensor, ...]:
        """Some blocks of values, each (items, 64, Dv) float32."""
        if self.kept is None:
            return self._take(self.value, block, blocks, "values").split(BLOCK, 1)
        first = block - self.kept[0]
        return self.kept[2][first : first + blocks]

    def _take(self, source: torch.Tensor, block: int, blocks: int, name: str | None) -> torch.Tensor:
        """Some blocks of keys or values, (items, blocks * 64, D) float32: in place if they lie there like that."""
        if self.plan.views and self.call.key_mask is None:
            view = view_of_blocks(source, block, blocks, self.origins, self.limits)
            if view is not None:
                return view
        found = gather(source, 2, block * BLOCK, blocks * BLOCK, self.origins, self.limits, name)
        if self.call.key_mask is not None:
            clear_hidden_keys(found, self._present(block, blocks))
        return found.flatten(0, 1)


def _tree_sum(lanes: torch.Tensor) -> torch.Tensor:
    """(..., 64) -> (..., 1), halves added to halves."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes
