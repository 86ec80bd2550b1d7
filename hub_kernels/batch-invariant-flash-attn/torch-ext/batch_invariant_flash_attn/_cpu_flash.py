"""Attention through PyTorch's CPU flash kernel, keys counted from each row's origin, in certified calls only.

`_cpu_flash_plan` says which calls those are. What is left to do here: lay keys, queries and masks out so that each row
starts at its origin, fill up to a certified number of queries and keys, and leave out keys that no query sees. A whole
prefill is one call with the kernel's own causal mask; other patterns go in tiles of queries with a mask in memory. With
few queries, those of all heads that share a key head become rows of one tile, so that keys are read once.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from . import _cpu_products
from ._cpu_blocks import clear_hidden_keys, gather
from ._cpu_flash_plan import STEP, Plan, flash, plan_for
from ._cpu_scratch import scratch
from .contract import mask_floor

if TYPE_CHECKING:
    from ._cpu_attention import Call

_TILE = 256  # queries per call where a mask in memory hides keys: speed only
_PACKED_ROWS = 32  # most rows of a tile that holds several heads: speed only
_ITEM_ROWS = 32  # queries that the kernel takes at a time, in calls of few
_MOST_CACHED = 1 << 20  # elements of a mask that is kept for the next layer
_MOST_INDEXED = 1 << 18  # keys of all rows and heads that are collected by an index, which is kept like a mask
_MOST_FRESH = 1 << 18  # bytes of keys that go to new memory, which takes fewer operators than memory that is kept

# bfloat16 GEMMs take terms in blocks of 32; a ragged head_dim is filled up with zeros.
_BFLOAT16_DIM_MULTIPLE = 32

Edges = tuple[tuple[int, int, int], ...]  # per row: where query 0 stands, first key, behind the last key


def plan_of(call: Call) -> Plan | None:
    """The plan to run a call by, or None if it is for the block engine. Nothing but the model decides."""
    if call.softcap or call.sinks is not None:
        return None
    return plan_of_heads(call.query.shape[-1], call.value.shape[-1], call.query.dtype)


def plan_of_heads(head_dim: int, value_head_dim: int, dtype: torch.dtype) -> Plan | None:
    """`plan_of` a call without softcap and sinks."""
    if value_head_dim != head_dim or not _cpu_products.allows("flash"):
        return None
    return plan_for(filled_dim(head_dim, dtype), dtype)


def filled_dim(dim: int, dtype: torch.dtype) -> int:
    return dim + -dim % _BFLOAT16_DIM_MULTIPLE if dtype == torch.bfloat16 else dim


def run(call: Call, plan: Plan) -> torch.Tensor:
    """The attention of a call: (B, Q, Hq, D), new and contiguous."""
    dim = call.query.shape[-1]
    if missing := filled_dim(dim, call.query.dtype) - dim:
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (call.query, call.key, call.value))
        return run(replace(call, query=query, key=key, value=value), plan)[..., :dim].contiguous()
    if call.key_mask is not None and max(call.ends) > 0:
        at, there = _positions(tuple(call.origins), tuple(call.limits(slice(None))), 0, max(call.ends))
        if torch.equal(call.key_mask.gather(1, at) & there, there):  # it hides what the origin hides already
            call = replace(call, key_mask=None)
    if call.query.shape[2] == 1 and call.mask is None and call.key_mask is None and call.left is None:
        if not any(call.begins) and max(call.ends) > 0:
            return _decode(call, plan)
    if call.right is not None and call.mask is None:
        early = [max(0, -offset - call.right) for offset in call.offsets]
        if any(early):
            return _run_without_early_queries(call, plan, early)
    return _run(call, plan)


def _decode(call: Call, plan: Plan) -> torch.Tensor:
    """What `_run` does, for the most frequent call, in few steps: one query a row, which sees all keys."""
    batch, heads, _, dim = call.query.shape
    group = call.group
    length = plan.length(group)
    if length < group:
        return _run(call, plan)
    count = plan.padded(max(call.ends), length)
    keys, values = _lay_out(call, plan, 0, count)
    query = call.query.reshape(batch, -1, group, dim)
    if length > group:
        query = torch.constant_pad_nd(query, (0, 0, 0, length - group))
    edges = tuple((0, 0, end) for end in call.ends)
    mask = _edge_mask(edges[:1] if len(set(edges)) == 1 else edges, None, None, 0, 1, 0, count)
    if mask is not None:
        mask = mask.expand(-1, -1, length, -1)
    out = run_kernel(query, keys, values, False, mask, call.scale)
    return out[:, :, :group].reshape(batch, 1, heads, dim).contiguous()


def _run_without_early_queries(call: Call, plan: Plan, early: list[int]) -> torch.Tensor:
    """Queries that stand before their row's first key (left padding) see nothing: leave them out, give zeros."""
    query = call.query
    batch, heads, q_len, dim = query.shape
    out = query.new_zeros(batch, q_len, heads, dim)
    if min(early) >= q_len:
        return out
    left = query.new_zeros(batch, heads, q_len - min(early), dim)
    for row, first in enumerate(early):
        left[row, :, : max(0, q_len - first)] = query[row, :, first:]
    offsets = [offset + first for offset, first in zip(call.offsets, early, strict=True)]
    found = _run(replace(call, query=left, offsets=offsets), plan)
    for row, first in enumerate(early):
        out[row, first:] = found[row, : max(0, q_len - first)]
    return out


def _run(call: Call, plan: Plan) -> torch.Tensor:
    batch, heads, q_len, dim = call.query.shape
    edges = tuple(zip(call.offsets, call.begins, call.ends, strict=True))
    own_mask = _kernel_masks(call, plan, edges)
    rows = q_len * call.group
    packed = (rows <= _PACKED_ROWS and not own_mask) or (q_len == 1 and plan.length(rows) >= rows)
    most = _PACKED_ROWS // call.group if packed else q_len if own_mask or _sees_all(call) else _TILE
    most = min(max(most, 1), max(plan.length(most), 1) if not packed else max(most, 1))
    start, end = _span(call, edges, 0, q_len)
    if start >= end:
        return call.query.new_zeros(batch, q_len, heads, dim)
    kept = plan.padded(end - start)
    keys, values = _lay_out(call, plan, start, kept)
    out = None
    for first in range(0, q_len, most):
        last = min(first + most, q_len)
        begin, finish = (start, end) if own_mask else _span(call, edges, first, last)
        if begin >= finish:
            found = call.query.new_zeros(batch, last - first, heads, dim)
        else:
            count = plan.padded(finish - begin)
            columns = slice(begin - start, begin - start + count)
            operands = (keys, values) if count == kept else (keys[:, :, columns], values[:, :, columns])
            if not plan.views:
                operands = tuple(operand.contiguous() for operand in operands)
            mask = None if own_mask else _mask(call, edges, first, last, begin, count)
            tile = _packed_tile if packed else _tile
            found = tile(call, plan, first, last, *operands, mask, own_mask)
        if last - first == q_len:
            return found.contiguous()
        out = call.query.new_empty(batch, q_len, heads, dim) if out is None else out
        out[:, first:last] = found
    return out


def _kernel_masks(call: Call, plan: Plan, edges: Edges) -> bool:
    """Whether the kernel's own causal mask is the whole pattern, in one call."""
    if not plan.causal or call.right != 0 or call.left is not None or call.mask is not None:
        return False
    q_len = call.query.shape[2]
    aligned = all(offset == 0 and begin == 0 and end == q_len for offset, begin, end in edges)
    return aligned and call.key_mask is None and q_len > 1 and plan.length(q_len) >= q_len


def _sees_all(call: Call) -> bool:
    """Whether every query sees the same keys."""
    return call.left is None and call.right is None and (call.mask is None or call.mask.shape[2] == 1)


def _span(call: Call, edges: Edges, first: int, last: int) -> tuple[int, int]:
    """Keys from the origin that queries first ... last - 1 may see: a multiple of STEP, and behind the last one."""
    lows, highs = [], []
    for offset, begin, end in edges:
        low = begin if call.left is None else max(begin, offset + first - call.left)
        high = end if call.right is None else min(end, offset + last + call.right)
        if low < high:
            lows.append(low)
            highs.append(high)
    return (min(lows) // STEP * STEP, max(highs)) if lows else (0, 0)


def _lay_out(call: Call, plan: Plan, start: int, count: int) -> list[torch.Tensor]:
    """Keys and values start ... of each row, (B, Hkv, count, D): in place if they lie there, zeros where none is."""
    origins, limits = call.origins, call.limits(slice(None))
    batch, heads, kv_len, dim = call.key.shape
    sources, first = (call.key, call.value), origins[0] + start
    alike = call.key_mask is None and len(set(origins)) == 1 and len(set(limits)) == 1
    if call.key_mask is None and len(set(origins)) == 1 and first >= 0:
        end = min(limits)
        if first + count <= end and plan.views and call.key.stride(-1) == call.value.stride(-1) == 1:
            return [source[:, :, first : first + count] for source in sources]
        if alike and count * call.key[:, :, :1].nbytes <= _MOST_FRESH:
            rest = (0, 0, 0, first + count - min(end, first + count))
            return [torch.constant_pad_nd(source[:, :, first : min(end, first + count)], rest) for source in sources]
    in_memory = call.key.is_contiguous() and call.value.is_contiguous()
    if not alike and in_memory and batch * heads * count <= _MOST_INDEXED:
        index, missing = _flat_index(tuple(origins), tuple(limits), start, count, heads, kv_len)
        if call.key_mask is not None:
            missing = (~_present(call, start, count))[:, None].expand(-1, heads, -1).flatten().nonzero().flatten()
        found = [scratch(name, len(index), dim, dtype=call.key.dtype) for name in ("keys", "values")]
        for each, source in zip(found, sources, strict=True):
            torch.index_select(source.view(-1, dim), 0, index, out=each)
        return [each.index_fill_(0, missing, 0.0).view(batch, heads, count, dim) for each in found]
    found = [
        gather(source, 2, start, count, origins, limits, name, source.dtype)
        for name, source in zip(("keys", "values"), sources, strict=True)
    ]
    if call.key_mask is not None:
        for each in found:
            clear_hidden_keys(each, _present(call, start, count))
    return found


@functools.lru_cache(maxsize=16)
def _positions(
    origins: tuple[int, ...], limits: tuple[int, ...], start: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where keys start ... of each row lie, (B, count), and whether there is one, bool; 0 where there is none."""
    at = torch.tensor(origins)[:, None] + torch.arange(start, start + count)
    there = (at >= 0) & (at < torch.tensor(limits)[:, None])
    return at * there, there


@functools.lru_cache(maxsize=16)
def _flat_index(
    origins: tuple[int, ...], limits: tuple[int, ...], start: int, count: int, heads: int, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_positions` in a flattened (B, heads, kv_len), for all heads, and which of these are not there."""
    at, there = _positions(origins, limits, start, count)
    lines = torch.arange(len(origins) * heads).view(-1, heads, 1) * kv_len
    missing = (~there)[:, None].expand(-1, heads, -1).flatten().nonzero().flatten()
    return (lines + at[:, None]).flatten(), missing


def _present(call: Call, start: int, count: int) -> torch.Tensor:
    """key_mask from the origin on, (B, count) bool."""
    at, there = _positions(tuple(call.origins), tuple(call.limits(slice(None))), start, count)
    return call.key_mask.gather(1, at) & there


# --- masks ---


def _hiding(hidden: torch.Tensor) -> torch.Tensor:
    """The mask that the kernel adds to the scores: float32, whatever torch's default is."""
    return torch.zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, -torch.inf)


def _mask(call: Call, edges: Edges, first: int, last: int, start: int, count: int) -> torch.Tensor | None:
    """(B | 1, Hq | 1, queries | 1, keys) float32, added to the scores; None if nothing is hidden."""
    edges = edges[:1] if len(set(edges)) == 1 else edges
    size = len(edges) * count * (1 if call.left is None and call.right is None else last - first)
    make = _edge_mask if size <= _MOST_CACHED else _edge_mask.__wrapped__
    mask = make(edges, call.left, call.right, first, last, start, count)
    if call.key_mask is not None:
        hidden = ~_present(call, start, count)[:, None, None]
        mask = _hiding(hidden) + (0.0 if mask is None else mask)
    if call.mask is not None:
        mask = _given_mask(call, first, last, start, count) + (0.0 if mask is None else mask)
    return mask


@functools.lru_cache(maxsize=16)
def _edge_mask(
    edges: Edges, left: int | None, right: int | None, first: int, last: int, start: int, count: int
) -> torch.Tensor | None:
    """Causality, window and length: (rows, 1, queries | 1, keys), 0 or -inf. All layers of a model ask for the same."""
    offset, begin, end = torch.tensor(edges).t()[..., None, None]  # each (rows, 1, 1)
    at = torch.arange(start, start + count)
    position = offset + torch.arange(first, last)[:, None]
    low = begin if left is None else torch.maximum(begin, position - left)
    high = end - 1 if right is None else torch.minimum(end - 1, position + right)
    if int(low.max()) <= start and int(high.min()) >= start + count - 1:
        return None
    hidden = ((at < low) | (at > high))[:, None]
    return _hiding(hidden)


def _given_mask(call: Call, first: int, last: int, start: int, count: int) -> torch.Tensor:
    """The caller's mask (B | 1, Hq | 1, queries | 1, keys), 0 beyond a row's keys."""
    mask, origins = call.mask, call.origins
    mask = mask[:, :, first:last] if mask.shape[2] > 1 else mask
    if len(set(origins)) == 1 and mask.shape[0] == 1:
        origins = origins[:1]
    mask = mask.expand(len(origins), -1, -1, -1)
    # One limit for all: what lies beyond a row's own keys is hidden by the edges.
    limits = [mask.shape[3]] * len(origins)
    found = gather(mask, 3, start, count, origins, limits)
    if mask.dtype == torch.bool:
        return _hiding(found == 0)
    return F.threshold_(found, mask_floor(mask.dtype), -torch.inf)


# --- calls ---


def _call_flash(
    call: Call,
    plan: Plan,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """query (B, H, rows, D) of any number of rows that a length holds -> (B, H, rows, D), memory as (B, rows, H, D)."""
    rows = query.shape[2]
    length = plan.length(rows)
    if length > rows:
        query = F.pad(query, (0, 0, 0, length - rows))
    elif not plan.views:
        query = query.contiguous()
    if mask is not None:
        if mask.shape[2] > 1 and length > rows:
            mask = F.pad(mask, (0, 0, 0, length - rows))
        mask = mask.expand(-1, -1, length, -1)
    return run_kernel(query, keys, values, causal, mask, call.scale)[:, :, :rows]


def run_kernel(query, keys, values, causal: bool, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """The kernel's output. It takes neighbours in a row for neighbours in memory, whatever the last stride says."""
    query, keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, keys, values))
    alone = _is_alone(query)
    if alone:
        query, keys, values = (each.expand(2, -1, -1, -1) for each in (query, keys, values))
    out, _ = flash(query, keys, values, 0.0, causal, attn_mask=mask, scale=scale)
    return out[:1] if alone else out


def _is_alone(query: torch.Tensor) -> bool:
    """Whether a call would be a single item of work. The kernel then runs outside of its own parallel region, and its
    GEMMs take several threads each and cut sums otherwise. With a copy beside it, each item has one, as in the trials.
    """
    batch, heads, length, _ = query.shape
    return batch * heads == 1 and length <= _ITEM_ROWS and torch.get_num_threads() > 1


def _tile(call, plan, first, last, keys, values, mask, causal) -> torch.Tensor:
    """Queries first ... last - 1 of each head: (B, queries, Hq, D)."""
    return _call_flash(call, plan, call.query[:, :, first:last], keys, values, mask, causal).transpose(1, 2)


def _packed_tile(call, plan, first, last, keys, values, mask, causal) -> torch.Tensor:
    """Queries first ... last - 1, those of a group of heads as rows of one tile: (B, queries, Hq, D)."""
    batch, heads, _, dim = call.query.shape
    group, queries = call.group, last - first
    rows = call.query[:, :, first:last].reshape(batch, -1, group * queries, dim)
    if mask is not None and (mask.shape[1] > 1 or mask.shape[2] > 1):
        mask = mask.expand(-1, heads, queries, -1).reshape(len(mask), -1, group * queries, mask.shape[-1])
    out = _call_flash(call, plan, rows, keys, values, mask, causal)
    return out.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, dim)
