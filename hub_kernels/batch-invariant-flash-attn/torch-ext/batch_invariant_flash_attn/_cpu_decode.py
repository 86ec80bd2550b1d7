"""A decode step on the CPU whose rows see all of their keys: what a model asks for once a layer and token.

At some hundred keys PyTorch's kernel takes 25 microseconds, and what Python does around it took three times that. So
what such a call comes to is worked out once for its shapes and remembered, as calls on a GPU are, and operands that
have to be filled up with zeros go to memory of this thread that is filled up already.
"""

import threading
from collections.abc import Callable

import torch

from . import _cpu_flash, _cpu_products
from ._cpu_flash_plan import environment
from ._dispatch import kind_of, remember

DecodeCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_MOST_BYTES = 64 << 20  # of filled-up keys of a call: with more, the copy is what counts and nothing is remembered
_MOST_KEPT = 64 << 20  # bytes of filled-up operands that a thread keeps, if they are of several shapes

_calls: dict = {}
_local = threading.local()


def recalled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> DecodeCall | None:
    """The function of query (B, Hq, 1, D), key and value (B, Hkv, KV, D) -> (B, Hq, 1, D) that serves calls like this;
    None if there is none, or if it is not known yet whether the arguments are right (see `prepare`).
    """
    return _calls.get(_call_key(query, key, value, scale))


def prepare(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> DecodeCall | None:
    """Remember what a call with these arguments, which have been checked, comes to, and return it like `recalled`."""
    call_key = _call_key(query, key, value, scale)
    if call_key in _calls:
        return _calls.get(call_key)  # it may be forgotten meanwhile
    return remember(_calls, call_key, _decode_call(query, key, value, scale))


def _call_key(query, key, value, scale) -> tuple:
    scale = None if scale is None else float(scale)  # a tensor would be one key whatever it holds
    allowed = _cpu_products.allows("flash")
    return kind_of(query), kind_of(key), kind_of(value), scale, allowed, *environment()


def _decode_call(query, key, value, scale) -> DecodeCall | None:
    batch, heads, _, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    if 0 in (batch, heads, kv_len):
        return None
    group = heads // kv_heads
    plan = _cpu_flash.plan_of_heads(dim, value.shape[-1], query.dtype)
    dense = query.is_contiguous() and key.stride(-1) == value.stride(-1) == 1
    if plan is None or not dense or not plan.views or _cpu_flash.filled_dim(dim, query.dtype) != dim:
        return None
    length = plan.length(group)
    count = plan.padded(kv_len, length)
    if length < group or batch * kv_heads * count * dim * key.element_size() > _MOST_BYTES:
        return None
    scale = dim**-0.5 if scale is None else float(scale)
    rows_shape, out_shape = (batch, kv_heads, group, dim), (batch, heads, 1, dim)
    place = (batch, kv_heads, length, count if count > kv_len else 0, dim, query.dtype)

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, mask = query.view(rows_shape), None
        if length > group or count > kv_len:
            memory = _memory(place)
            if length > group:
                rows = memory.with_queries(rows)
            if count > kv_len:
                key, value, mask = memory.with_keys(key, value)
        out = _cpu_flash.run_kernel(rows, key, value, False, mask, scale)
        return out.narrow(2, 0, group).reshape(out_shape).contiguous()

    return call


class _Memory:
    """Operands of one shape, zeros wherever nothing was written, and the mask of the keys that were not.

    count: 0 if keys need no filling up.
    """

    def __init__(self, batch: int, kv_heads: int, length: int, count: int, dim: int, dtype: torch.dtype):
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            self.rows = torch.zeros(batch, kv_heads, length, dim, dtype=dtype)
            self.keys, self.values = (torch.zeros(batch, kv_heads, count, dim, dtype=dtype) for _ in range(2))
            self.hidden = torch.zeros(1, 1, 1, count, dtype=torch.float32)
        self.mask = self.hidden.expand(-1, -1, length, -1)
        self.nbytes = sum(each.nbytes for each in (self.rows, self.keys, self.values, self.hidden))
        self.group = self.kv_len = 0
        self.used_rows = self.used_keys = self.used_values = None

    def with_queries(self, rows: torch.Tensor) -> torch.Tensor:
        group = rows.shape[2]
        if group != self.group:
            self.rows.zero_()
            self.group, self.used_rows = group, self.rows.narrow(2, 0, group)
        self.used_rows.copy_(rows)
        return self.rows

    def with_keys(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kv_len = key.shape[2]
        if kv_len != self.kv_len:
            for kept in (self.keys, self.values):
                kept[:, :, kv_len : max(self.kv_len, kv_len)].zero_()
            self.used_keys, self.used_values = (kept.narrow(2, 0, kv_len) for kept in (self.keys, self.values))
            self.hidden[..., :kv_len].zero_()
            self.hidden[..., kv_len:].fill_(-torch.inf)
            self.kv_len = kv_len
        self.used_keys.copy_(key)
        self.used_values.copy_(value)
        return self.keys, self.values, self.mask


def _memory(place: tuple) -> _Memory:
    kept = _local.__dict__.setdefault("kept", {})
    memory = kept.get(place)
    if memory is None:
        memory = _Memory(*place)
        if memory.nbytes + sum(each.nbytes for each in kept.values()) > _MOST_KEPT:
            kept.clear()
        kept[place] = memory
    return memory
