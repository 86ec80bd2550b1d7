"""The attention mask as a description instead of a (B, 1, Q, KV) tensor.

Transformers hands the result of the registered mask function to the attention function untouched, so it may be any
object. Ours says what the pattern is and, for every row of the batch, at which key the row begins (`origin`): that is
where the attention kernel starts counting its blocks of keys, so that padding, a cropped cache or a longer cache do not
change the order in which a row is summed.

Everything per row is computed once here, not once per layer, and without reading a value back from the device.
Positions are stored relative to the keys at hand (`local`): no attribute grows with the length of a cached text, which
would make a compiled decoding step recompile for every token.
"""

from typing import NamedTuple

import torch
from transformers import masking_utils

from . import hub

_flash_attn = hub.load("flash-attn")

# A float mask value at or below this hides a key. It is half of float16's lowest number, so that masks made with the
# lowest number of any dtype, with -inf, or with -1e9 are all understood, also after a cast to a wider dtype.
HIDDEN_BELOW = torch.finfo(torch.float16).min / 2

NO_WINDOW = (-1, -1)


class Pattern(NamedTuple):
    """What a transformers mask function lets a query see, next to the padding.

    kind: "causal", "bidirectional", or "custom" for everything that has no name here.
    left, right: how far a query sees to either side, itself excluded; None is no limit.
    segments: (B, Q) integers, equal within one packed document, or None.
    """

    kind: str
    left: int | None = None
    right: int | None = None
    segments: torch.Tensor | None = None


class BatchInvariantMask:
    """Who may attend to whom, for queries (B, Q) and keys (B, KV).

    kind: "causal", "bidirectional" or "custom" (then only `dense()` tells).
    window: (left, right) inclusive, -1 is no limit.
    query_offset: (B,) int32, index of the key at which query 0 stands; None means KV - Q.
    origin: (B,) int32, index of the row's first real key; None means 0. Negative when a sliding cache has dropped it.
    key_mask: (B, KV) bool, False for padding, or None.
    segments: (B, Q) integers, equal within one packed document, or None.

    It passes for a boolean (B, 1, Q, KV) tensor only where transformers, generate() and accelerate need that. An
    attention that adds it to its scores bypasses the attention interface and gets a TypeError.
    """

    ndim = 4
    dtype = torch.bool

    def __init__(
        self,
        *,
        kind: str,
        batch_size: int,
        query_len: int,
        kv_len: int,
        device: torch.device | str,
        window: tuple[int, int] = NO_WINDOW,
        query_offset: torch.Tensor | None = None,
        origin: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        dense: torch.Tensor | None = None,
    ):
        assert kind in ("causal", "bidirectional", "custom"), kind
        assert kind != "custom" or dense is not None
        self.kind = kind
        self.batch_size = batch_size
        self.query_len = query_len
        self.kv_len = kv_len
        self.device = torch.device(device)
        self.window = window
        self.query_offset = query_offset
        self.origin = origin
        self.key_mask = key_mask
        self.segments = segments
        self._dense = dense
        self._documents = None
        self._prepared_key_mask = None

    # --- what the attention function asks for ---

    def dense(self) -> torch.Tensor:
        """Return the mask as bool (B, 1, Q, KV), True = attend; computed at the first call."""
        if self._dense is None:
            self._dense = self._build_dense()
        return self._dense

    def documents(self) -> tuple[torch.Tensor, int]:
        """Return (S + 1,) int32 bounds of the packed documents in the rows laid end to end, and the longest length.

        Reads the number of documents back from the device, once per forward; under torch.compile the bounds are padded
        with empty documents instead.
        """
        assert self.segments is not None
        if self._documents is None:
            self._documents = _document_bounds(self.segments)
        return self._documents

    def prepared_key_mask(self) -> torch.Tensor | None:
        """Return the key mask in the attention kernel's own form; computed at the first call, for all layers."""
        if self.key_mask is None:
            return None
        if self._prepared_key_mask is None:
            self._prepared_key_mask = _flash_attn.prepare_key_mask(self.key_mask, self.origin)
        return self._prepared_key_mask

    def for_batch(self, batch_size: int) -> "BatchInvariantMask":
        """Return the mask for a batch of this size: itself, or its only row repeated."""
        if self.batch_size == batch_size:
            return self
        if self.batch_size != 1:
            raise ValueError(
                f"attention_mask must have the batch size {batch_size} of the keys or 1, got {self.batch_size}; "
                "build the mask from inputs of the same batch"
            )
        return self._replace(
            batch_size=batch_size,
            **{
                name: None if value is None else value.expand(batch_size, *value.shape[1:]).contiguous()
                for name, value in self._tensors().items()
                if name != "dense"
            },
            dense=None if self._dense is None else self._dense.expand(batch_size, -1, -1, -1),
        )

    def with_tensors(self, *, query_offset, origin, key_mask, prepared, dense) -> "BatchInvariantMask":
        """Return the mask with these tensors in place of its own, `prepared` being its `prepared_key_mask()`."""
        mask = self._replace(query_offset=query_offset, origin=origin, key_mask=key_mask, dense=dense)
        mask._prepared_key_mask = prepared
        return mask

    # --- what makes it pass for a tensor ---

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch_size, 1, self.query_len, self.kv_len))

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 4

    def contiguous(self) -> "BatchInvariantMask":
        """Return the mask itself (generate() of transformers 5.22 asks for it before a compiled step)."""
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "BatchInvariantMask":
        """Return the mask on a device (accelerate's hooks call this). A dtype is refused: that is a tensor's use."""
        if isinstance(device, torch.dtype):
            raise _used_as_tensor("to(dtype)")
        device = torch.device(device)
        if device == self.device:
            return self
        moved = self._replace(
            device=device,
            **{
                name: None if value is None else value.to(device, non_blocking=non_blocking)
                for name, value in self._tensors().items()
            },
        )
        if self._documents is not None:
            bounds, longest = self._documents
            moved._documents = (bounds.to(device, non_blocking=non_blocking), longest)
        return moved

    def __getitem__(self, index) -> "BatchInvariantMask | torch.Tensor":
        """Cut queries or keys out ([:, :, -k:, :], [..., :n]) and stay a mask; any other index gives dense()[index].

        A dense cut would lose the origin: the first key that the remaining queries see need not be the row's first.
        """
        cut = _query_and_key_range(index, self.query_len, self.kv_len)
        if cut is None or self.segments is not None:
            return self.dense()[index]
        queries, keys = cut
        offset = self.kv_len - self.query_len if self.query_offset is None else self.query_offset
        return self._replace(
            query_len=len(queries),
            kv_len=len(keys),
            query_offset=_per_row(
                offset + queries.start - keys.start, len(keys) - len(queries), self.batch_size, self.device
            ),
            origin=_per_row((0 if self.origin is None else self.origin) - keys.start, 0, self.batch_size, self.device),
            key_mask=None if self.key_mask is None else self.key_mask[:, keys.start : keys.stop].contiguous(),
            dense=None if self._dense is None else self._dense[index],
        )

    def __and__(self, other):
        return self.dense() & _densify(other)

    def __or__(self, other):
        return self.dense() | _densify(other)

    def __eq__(self, other):
        if isinstance(other, (int, float, torch.Tensor)):
            raise _used_as_tensor("==")
        return NotImplemented

    __hash__ = object.__hash__

    def _refuse_arithmetic(self, other=None):
        raise _used_as_tensor("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __invert__ = _refuse_arithmetic

    def __getattr__(self, name: str):
        if not name.startswith("_") and hasattr(torch.Tensor, name):
            raise _used_as_tensor(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Let boolean uses see the dense mask and refuse the rest: scores + mask must not pass in silence."""
        if func not in _BOOLEAN_USES:
            raise _used_as_tensor(getattr(func, "__name__", str(func)))
        return func(*map(_densify, args), **{name: _densify(value) for name, value in (kwargs or {}).items()})

    def __repr__(self) -> str:
        window = "" if self.window == NO_WINDOW else f", window={self.window}"
        return f"{type(self).__name__}({self.kind}, shape={tuple(self.shape)}{window}, device={self.device})"

    # --- internals ---

    def _tensors(self) -> dict[str, torch.Tensor | None]:
        return {
            "query_offset": self.query_offset,
            "origin": self.origin,
            "key_mask": self.key_mask,
            "segments": self.segments,
            "dense": self._dense,
        }

    def _replace(self, **changes) -> "BatchInvariantMask":
        fields = {
            "kind": self.kind,
            "batch_size": self.batch_size,
            "query_len": self.query_len,
            "kv_len": self.kv_len,
            "device": self.device,
            "window": self.window,
            **self._tensors(),
        }
        return BatchInvariantMask(**{**fields, **changes})

    def _build_dense(self) -> torch.Tensor:
        offset = self.kv_len - self.query_len if self.query_offset is None else self.query_offset[:, None, None, None]
        query = torch.arange(self.query_len, device=self.device)[None, None, :, None] + offset
        key = torch.arange(self.kv_len, device=self.device)[None, None, None, :]
        left, right = self.window
        visible = key <= query if self.kind == "causal" else torch.ones_like(key <= query)
        if left >= 0:
            visible = visible & (key >= query - left)
        if right >= 0:
            visible = visible & (key <= query + right)
        if self.key_mask is not None:
            visible = visible & self.key_mask[:, None, None, :]
        if self.segments is not None:
            visible = visible & (self.segments[:, None, :, None] == self.segments[:, None, None, :])
        return visible.expand(self.batch_size, 1, self.query_len, self.kv_len)


_BOOLEAN_USES = {
    torch.where,
    torch.logical_and,
    torch.logical_or,
    torch.logical_not,
    torch.Tensor.__and__,
    torch.Tensor.__or__,
    torch.Tensor.logical_and,
    torch.Tensor.logical_or,
}


def _densify(value):
    return value.dense() if isinstance(value, BatchInvariantMask) else value


def _used_as_tensor(use: str) -> TypeError:
    return TypeError(
        f"the batch-invariant attention mask was used as a tensor ({use}): this attention bypasses the transformers "
        "AttentionInterface; load the model without attn_implementation='batch_invariant'"
    )


def batch_invariant_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function=masking_utils.causal_mask_function,
    attention_mask: "torch.Tensor | BatchInvariantMask | None" = None,
    device: torch.device | str = "cpu",
    **kwargs,
) -> BatchInvariantMask:
    """Build the mask of one forward pass (the function registered in AttentionMaskInterface).

    Args:
        q_offset, kv_offset: position of the first query and of the first key at hand. kv_offset > 0 when a sliding
            cache has dropped keys.
        mask_function: the pattern, built by transformers.masking_utils.
        attention_mask: (B, positions so far) padding mask, nonzero = real, shorter or longer than the keys at hand; or
            a mask made here before, which generate() feeds back.
        kwargs: what transformers passes to its own mask functions; only use_vmap matters here.

    Never returns None: with None the attention function would have to guess causality.
    """
    if isinstance(attention_mask, BatchInvariantMask):
        return attention_mask
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask must have 2 dimensions here, got shape {tuple(attention_mask.shape)}; "
            "pass (batch, length) or a full (batch, heads, queries, keys) mask to the model"
        )
    pattern = classify(mask_function)
    window = tuple(-1 if side is None else side for side in (pattern.left, pattern.right))
    padding = key_mask = None
    first_position: int | torch.Tensor = 0
    if attention_mask is not None:
        padding = attention_mask.to(device=device, dtype=torch.bool).expand(batch_size, -1)
        key_mask = _local_key_mask(padding, kv_length, kv_offset)
        first_position = padding.to(torch.int32).argmax(dim=1)
    query_offset = None
    if pattern.kind == "causal" or window != NO_WINDOW:
        # The sum is a new tensor, on purpose: a static cache's q_offset is its counter, which it bumps in place.
        query_offset = _per_row(q_offset - kv_offset, kv_length - q_length, batch_size, device)
    dense = None
    if pattern.kind == "custom":
        dense = masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=padding,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=kwargs.get("use_vmap", False),
            device=device,
        )
        if torch.compiler.is_compiling() and attention_mask is None and q_length == kv_length:
            _assert_not_packed(dense)
    return BatchInvariantMask(
        kind=pattern.kind,
        batch_size=batch_size,
        query_len=q_length,
        kv_len=kv_length,
        device=device,
        window=NO_WINDOW if pattern.kind == "custom" else window,
        query_offset=query_offset,
        origin=_per_row(first_position - kv_offset, 0, batch_size, device),
        key_mask=key_mask,
        segments=pattern.segments,
        dense=dense,
    )


def classify(mask_function) -> Pattern:
    """Recognise a mask function by how transformers.masking_utils composed it; whatever is unknown is "custom"."""
    if mask_function is masking_utils.causal_mask_function:
        return Pattern("causal")
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern("bidirectional")
    if torch.compiler.is_compiling():  # the closures read below do not exist for dynamo; dense is slower, same bits
        return Pattern("custom")
    name = getattr(mask_function, "__qualname__", "")
    if getattr(mask_function, "__module__", "") != masking_utils.__name__ or not name.endswith("_mask"):
        return Pattern("custom")
    enclosed = _enclosed(mask_function)
    maker = name.partition(".")[0]
    if maker == "and_masks":
        parts = [classify(part) for part in enclosed["mask_functions"]]
        kinds = [part.kind for part in parts]
        kind = next(kind for kind in ("custom", "causal", "bidirectional") if kind in kinds)
        return Pattern(
            kind,
            min((part.left for part in parts if part.left is not None), default=None),
            min((part.right for part in parts if part.right is not None), default=None),
            next((part.segments for part in parts if part.segments is not None), None),
        )
    if maker == "sliding_window_overlay":  # key > query - window
        return Pattern("bidirectional", left=int(enclosed["sliding_window"]) - 1)
    if maker == "sliding_window_bidirectional_overlay":  # |query - key| <= window
        return Pattern("bidirectional", left=int(enclosed["sliding_window"]), right=int(enclosed["sliding_window"]))
    if maker == "packed_sequence_mask_function":
        return Pattern("bidirectional", segments=enclosed["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":  # within a document: indices shifted by a constant
        return classify(enclosed["mask_function"])
    return Pattern("custom")


def _enclosed(function) -> dict[str, object]:
    """The variables that a nested function took from the one around it."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _assert_not_packed(visible: torch.Tensor) -> None:
    """Stop a compiled graph in which a token does not see the one before it: its document would have its own origin."""
    torch._assert_async(
        visible[:, 0].diagonal(offset=-1, dim1=1, dim2=2).all(),
        "packed position_ids (or chunked attention) without a cache cannot be compiled together with the building of "
        "the mask; pass cu_seq_lens_q and cu_seq_lens_k, or do not compile",
    )


def visible_and_origin(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare a user's dense mask (B, H, Q, KV), bool (True = attend) or float (additive), for the kernel.

    Returns the mask, with a float mask's hiding values made -inf, and the (B,) int32 index of the first key that any
    query of the row may see. The pair is kept on the mask tensor, since every layer gets the same one, and recomputed
    after a change in place.
    """
    if mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(
            "attention_mask must be a bool or floating point tensor of shape (batch, heads, queries, keys), "
            f"got {mask.dtype} {tuple(mask.shape)}; convert it"
        )
    cacheable = not (mask.is_inference() or torch.compiler.is_compiling())
    if cacheable and (kept := getattr(mask, "_batch_invariant_prepared", None)) and kept[0] == mask._version:
        return mask if kept[1] is None else kept[1], kept[2]
    visible = mask if mask.dtype == torch.bool else mask > HIDDEN_BELOW
    origin = visible.any(dim=2).any(dim=1).to(torch.int32).argmax(dim=1).to(torch.int32)
    prepared = None if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))
    if cacheable:  # never the mask itself: a reference cycle would keep it in device memory
        mask._batch_invariant_prepared = (mask._version, prepared, origin)
    return mask if prepared is None else prepared, origin


def _per_row(
    value: int | torch.Tensor, default: int, batch_size: int, device: torch.device | str
) -> torch.Tensor | None:
    """Return (B,) int32 of one value or of a (B,) tensor; None for an int that is the default."""
    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=torch.int32).expand(batch_size).contiguous()
    return None if value == default else torch.full((batch_size,), value, dtype=torch.int32, device=device)


def _local_key_mask(padding: torch.Tensor, kv_len: int, kv_offset: int | torch.Tensor) -> torch.Tensor:
    """Cut (B, positions) to the keys at hand, (B, KV); keys without an entry (free slots of a cache) are hidden."""
    if isinstance(kv_offset, torch.Tensor):
        position = torch.arange(kv_len, device=padding.device) + kv_offset.to(padding.device)
        last = padding.shape[1] - 1
        return padding[:, position.clamp(max=last)] & (position <= last)
    missing = kv_offset + kv_len - padding.shape[1]
    if missing > 0:
        padding = torch.nn.functional.pad(padding, (0, missing))
    return padding[:, kv_offset : kv_offset + kv_len].contiguous()


def _document_bounds(segments: torch.Tensor) -> tuple[torch.Tensor, int]:
    rows, length = segments.shape
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = first.flatten()
    total = rows * length
    if torch.compiler.is_compiling():
        document = first.cumsum(0) - 1
        return torch.searchsorted(document, torch.arange(total + 1, device=segments.device)).to(torch.int32), length
    starts = first.nonzero().flatten()
    bounds = torch.cat([starts, starts.new_full((1,), total)]).to(torch.int32)
    return bounds, int(bounds.diff().max())


def _query_and_key_range(index, query_len: int, kv_len: int) -> tuple[range, range] | None:
    """Return the query and key ranges of an index that only cuts these two dimensions, else None."""
    index = index if isinstance(index, tuple) else (index,)
    at = next((i for i, part in enumerate(index) if part is Ellipsis), None)
    if at is not None:
        index = index[:at] + (slice(None),) * (5 - len(index)) + index[at + 1 :]
    index = index + (slice(None),) * (4 - len(index))
    if len(index) != 4 or not all(isinstance(part, slice) for part in index):
        return None
    if index[0] != slice(None) or index[1] != slice(None):
        return None
    queries, keys = range(query_len)[index[2]], range(kv_len)[index[3]]
    return (queries, keys) if queries.step == keys.step == 1 else None
