"""Launch the Triton kernels: look the tile up, size grid and workspace. Imported at the first GPU call."""

import functools
import math
from collections.abc import Callable

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from . import contract, plan, selfcheck
from ._attention_kernel import attention_kernel, combine_kernel
from ._checks import as_int32
from ._key_mask_kernel import key_mask_kernel
from ._relaunch import Launch
from .key_mask import HEADER, is_prepared, prepared

# Elements between keys: within a block the decode kernel counts them with 32 bits.
FARTHEST_ROWS = 2**24
LOG2E = math.log2(math.e)
# The Hopper kernel is written in Triton's experimental dialect: only for releases that it was run with.
HOPPER_KERNEL = triton.__version__.startswith("3.6.")
# A window that reaches so far hides nothing. The kernels add positions, which are far below it, to it in 32 bits.
FAR = 2**30


@functools.cache
def gpu_of(device: torch.device) -> plan.Gpu:
    """What the plan needs to know of a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return plan.Gpu(capability=(0, 0), multiprocessors=1)
    properties = torch.cuda.get_device_properties(device)
    return plan.Gpu(
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,  # order-free: whether splits run in one program or several
        hopper_kernel=HOPPER_KERNEL,
        shared_kib=getattr(properties, "shared_memory_per_block_optin", 99 * 1024) // 1024,
    )


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides, with a valid one where a dimension of size 1 does not use its own."""
    return [stride if size > 1 else 8 for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False)] + [1]


def _describable(tensor: torch.Tensor, columns: int) -> bool:
    """Whether a tensor descriptor can serve tiles of `columns` columns of tensor (B, H, L, D)."""
    strides = _strides(tensor)
    return (
        tensor.shape[-1] == columns
        and tensor.shape[2] > 0
        and tensor.data_ptr() % 16 == 0
        and all(stride % 8 == 0 and stride > 0 for stride in strides[:-1])
    )


def _descriptor_of(tensor: torch.Tensor, rows: int) -> Callable[[torch.Tensor], TensorDescriptor]:
    """Makes descriptors, for tiles (1, 1, rows, D), of tensors laid out like this (B, H, L, D)."""
    shape, strides, block = list(tensor.shape), _strides(tensor), [1, 1, rows, tensor.shape[-1]]
    return lambda tensor: TensorDescriptor(tensor, shape, strides, block)


def _hopper_descriptor_of(tensor: torch.Tensor, rows: int, columns: int) -> Callable:
    """As `_descriptor_of`, for the Hopper kernel."""
    return _gluon_descriptor_of(list(tensor.shape), _strides(tensor), [1, 1, rows, columns], tensor.dtype)


def _query_descriptor_of(query: torch.Tensor, group: int, rows: int) -> Callable:
    """Makes descriptors of tensors laid out like query (B, Hq, Q, D) for `rows` pairs of a query and one of the `group`
    heads that share a KV head; None where that is no whole number of queries.
    """
    batch, heads, q_len, head_dim = query.shape
    if rows % group or not _describable(query, head_dim):
        return lambda query: None
    stride_b, stride_h, stride_m, _ = _strides(query)
    shape = [batch, heads // group, q_len, group, head_dim]
    strides = [stride_b, stride_h * group, stride_m, stride_h, 1]
    return _gluon_descriptor_of(shape, strides, [1, 1, rows // group, group, head_dim], query.dtype)


def _gluon_descriptor_of(shape: list[int], strides: list[int], block: list[int], dtype: torch.dtype) -> Callable:
    """Makes the Hopper kernel's descriptors, for tiles `block`, of tensors of this shape, strides and dtype."""
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    layout = NVMMASharedLayout.get_default_for(block, bfloat16 if dtype == torch.bfloat16 else float16)
    return lambda tensor: GluonDescriptor(tensor, shape, strides, block, layout)


def _dense_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def launch_attention(
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
    *,
    tile: plan.Tile | None = None,
    split: bool | int | None = None,
) -> torch.Tensor:
    """query (B, Hq, Q, D), key (B, Hkv, KV, D), value (B, Hkv, KV, Dv) -> (B, Q, Hq, Dv) contiguous.

    `tile` and `split`, given together, override the plan (tests, tuning); the bits are the same for every choice.
    split: whether each split has a program of its own; for decode tiles also the keys, whole splits of them, of each.
    """
    tensors = (query, key, value, sinks, mask, key_mask, origin, query_offset)
    settings = (causal, scale, window_left, window_right, softcap)
    return attention_call(*tensors, *settings, tile=tile, split=split)(*tensors)


def attention_call(
    query, key, value, sinks, mask, key_mask, origin, query_offset, causal, scale, left, right, softcap, **override
) -> Callable:
    """The function of the first eight arguments that `attention` comes to, for all tensors of these shapes, strides,
    dtypes, device and alignment.
    """
    batch, heads, q_len, _ = query.shape
    shape = (batch, q_len, heads, value.shape[-1])
    launch = _prepare(
        query,
        key,
        value,
        sequences=batch,
        q_len=q_len,
        kv_len=key.shape[2],
        causal=causal,
        scale=scale,
        window=(left, right),
        softcap=softcap,
        sinks=sinks,
        mask=mask,
        key_mask=key_mask,
        origin=origin,
        query_offset=query_offset,
        **override,
    )

    def call(query, key, value, sinks, mask, key_mask, origin, query_offset):
        out = query.new_empty(shape)
        launch(query, key, value, out, sinks, mask, key_mask, origin, query_offset, None, None)
        return out

    return call


def launch_attention_varlen(
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
    *,
    tile: plan.Tile | None = None,
    split: bool | int | None = None,
) -> torch.Tensor:
    """query (Tq, Hq, D), key (Tk, Hkv, D), value (Tk, Hkv, Dv), cu_seqlens (S + 1,) and origin
    (S,) int32 -> (Tq, Hq, Dv).
    """
    total, heads, _ = query.shape
    query, key, value = query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    launch = _prepare(
        query,
        key,
        value,
        sequences=cu_seqlens_q.numel() - 1,
        q_len=max_seqlen_q,
        kv_len=max_seqlen_k,
        causal=causal,
        scale=scale,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=sinks,
        origin=origin,
        varlen=True,
        tile=tile,
        split=split,
    )
    # zeros: rows that belong to no sequence are nobody's output
    out = torch.zeros((total, heads, value.shape[-1]), dtype=query.dtype, device=query.device)
    launch(query, key, value, out, sinks, None, None, origin, None, cu_seqlens_q, cu_seqlens_k)
    return out


def _most_splits(span: int, anywhere: bool) -> int:
    """How many splits `span` neighbouring keys can touch, from the origin on or (`anywhere`) from any position."""
    return contract.split_of(max(span, 1) - 1) + (2 if anywhere else 1)


def _prepare(
    query,
    key,
    value,
    *,
    sequences,
    q_len,
    kv_len,
    causal,
    scale,
    window,
    softcap,
    sinks,
    mask=None,
    key_mask=None,
    origin=None,
    query_offset=None,
    varlen=False,
    tile=None,
    split=None,
    only_holes=False,
) -> Callable:
    """The function of (query, key, value, out, sinks, mask, key_mask, origin, query_offset, cu_seqlens_q, cu_seqlens_k)
    that fills `out`, (B, Q, Hq, Dv) or (Tq, Hq, Dv), contiguous.

    only_holes: leave rows alone whose key_mask has none.
    """
    heads, head_dim = query.shape[1], query.shape[3]
    kv_heads, value_dim = key.shape[1], value.shape[3]
    if 0 in (*query.shape, sequences, q_len, value_dim):
        return lambda *tensors: None
    query, key, value = _dense_last(query), _dense_last(key), _dense_last(value)
    device, group = query.device, heads // kv_heads
    shape = dict(head_dim=head_dim, value_head_dim=value_dim, dtype=query.dtype)
    gpu = gpu_of(device)
    kv_block = contract.attention_contract(**shape).kv_block
    block_d, block_dv = triton.next_power_of_2(head_dim), triton.next_power_of_2(value_dim)
    # Small heads keep to the masked walk: with head_dim 16 the other one was seen to give wrong values on an H200.
    full = mask is None and query.dtype != torch.float32 and min(block_d, block_dv) >= 64
    # In front of a packed sequence lie values of another one, which a load by descriptor would bring along.
    whole = not varlen or origin is None
    describable = full and _describable(key, block_d) and _describable(value, block_dv)
    descriptors = gpu.descriptors and whole and describable
    near = max(key.stride(2), value.stride(2)) < FARTHEST_ROWS
    aligned = describable and near and _describable(query, block_d)

    window = tuple(min(side, FAR) for side in window)
    if query_offset is None and window[0] >= kv_len - 1:
        window = (-1, window[1])  # reaches behind the first key
    seen = dict(kv_len=kv_len, causal=causal, window=window)
    span = plan.visible_keys(q_len, **seen)
    anywhere = origin is not None or window[0] >= 0
    splits = _most_splits(span, anywhere=anywhere)
    # Fewer keys than a split has are walked by one program, wherever they lie: a second one would not be faster.
    worth = splits if span > contract.SPLIT_STRETCHES[0][1] else 1
    problem = dict(
        rows=q_len * group,
        heads=sequences * kv_heads,
        keys=span,
        blocks=triton.cdiv(plan.visible_keys(min(q_len, triton.cdiv(plan.MOST_ROWS, group)), **seen), kv_block),
        splits=worth,
        split_bytes=(value_dim + 2) * 4,
        split_keys=contract.split_multiple(None if anywhere else kv_len),
        gpu=gpu,
    )
    if tile is None:
        free = selfcheck.tiles_agree(device=device, **shape)
        full, descriptors, aligned = full and free, descriptors and free, aligned and free
        tile, split = plan.attention_tile(**problem, **shape, plain=descriptors, aligned=aligned)
        tile = tile if free else plan.only_tile(**shape)
    assert not tile.hopper or (descriptors and not split), tile
    assert not tile.decode or (aligned and q_len * group <= tile.rows), tile
    row_tiles = triton.cdiv(q_len * group, tile.rows)
    programs = sequences * kv_heads * row_tiles
    options = dict(
        GROUP=group,
        CAUSAL=causal,
        WINDOW_LEFT=window[0] >= 0,
        WINDOW_RIGHT=window[1] >= 0,
        SOFTCAP=softcap > 0,
        SINKS=sinks is not None,
        KEY_MASK=key_mask is not None,
        ORIGIN=origin is not None,
        QUERY_OFFSET=query_offset is not None,
        VARLEN=varlen,
        SPLITS=contract.SPLIT_STRETCHES,
    )
    scales = ((softcap or scale) * LOG2E, scale / softcap if softcap else 0.0)

    if tile.hopper:
        from ._hopper_kernel import hopper_attention_kernel

        grid, heads_at_once = plan.hopper_grid(
            row_tiles=row_tiles,
            heads=sequences * kv_heads,
            blocks=problem["blocks"],
            bytes_each=kv_len * (head_dim + value_dim) * key.element_size(),
            gpu=gpu,
        )
        numbers = (q_len, kv_len, kv_heads, row_tiles, sequences * kv_heads, heads_at_once)
        launch = Launch(
            hopper_attention_kernel,
            (grid,),
            (*numbers, *scales, *window, *query.stride()[:3]),
            **options,
            ROWS=tile.rows,
            num_warps=4,
            maxnreg=168,
        )
        query_of = _query_descriptor_of(query, group, 64)
        key_of = _hopper_descriptor_of(key, kv_block, head_dim)
        value_of = _hopper_descriptor_of(value, kv_block, value_dim * tile.rows // 128)
        if key_mask is not None:
            # It takes no key mask but a run of keys; rows with holes are done over, all others end at once.
            do_holes_over = _prepare(
                query,
                key,
                value,
                sequences=sequences,
                q_len=q_len,
                kv_len=kv_len,
                causal=causal,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                key_mask=key_mask,
                origin=origin,
                query_offset=query_offset,
                tile=plan.attention_tile(**problem, **shape, plain=False, aligned=False)[0],
                split=False,
                only_holes=True,
            )

        def call_hopper(query, key, value, out, sinks, mask, key_mask, origin, query_offset, cu_query, cu_key):
            query, key, value = _dense_last(query), _dense_last(key), _dense_last(value)
            key_mask, sinks = _prepared(key_mask, origin), _dense(sinks)
            rest = (sinks, origin, query_offset, cu_query, cu_key, key_mask)
            launch(query, query_of(query), key_of(key), value_of(value), out, *rest)
            if key_mask is not None:
                do_holes_over(query, key, value, out, sinks, mask, key_mask, origin, query_offset, cu_query, cu_key)

        return call_hopper

    padded_rows = q_len * group if tile.decode else row_tiles * tile.rows
    pdl = bool(split) and gpu.descriptors
    descriptors = descriptors and tile.rows >= 64  # a decode step is too short to pay for making them
    key_of = _descriptor_of(key, kv_block) if descriptors else _no_descriptor
    value_of = _descriptor_of(value, kv_block) if descriptors else _no_descriptor
    mask_kind, floor, mask_strides = 0, 0.0, (0, 0, 0, 0)
    if mask is not None:
        mask_kind = 1 if mask.dtype == torch.bool else 2
        floor = 0.0 if mask_kind == 1 else contract.mask_floor(mask.dtype)
        mask_strides = _mask(mask).expand(sequences, heads, q_len, kv_len).stride()
    if tile.decode:
        from ._hopper_decode_kernel import hopper_decode_kernel

        program_keys = 0 if split is True else int(split)
        assert program_keys % problem["split_keys"] == 0, program_keys
        parts = triton.cdiv(max(span, 1), program_keys) + anywhere if program_keys else splits
        launch = Launch(
            hopper_decode_kernel,
            (programs, parts if split else 1),
            (
                *(q_len, kv_len, kv_heads, padded_rows, splits, program_keys, *scales, *window),
                *(stride // 8 for tensor in (query, key, value) for stride in _strides(tensor)[:3]),
                kv_len + HEADER if key_mask is not None else 0,
            ),
            **options,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            SPLIT=bool(split),
            SEVERAL=program_keys > 0,
            PDL=pdl,
            ROWS=tile.rows,
            BLOCK_N=kv_block,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    else:
        launch = Launch(
            attention_kernel,
            (programs, splits if split else 1),
            (
                q_len,
                kv_len,
                kv_heads,
                row_tiles,
                splits,
                *scales,
                1 / (softcap or scale),
                floor,
                *window,
                *query.stride()[:3],
                *key.stride()[:3],
                *value.stride()[:3],
                *mask_strides,
                kv_len + HEADER if key_mask is not None else 0,
            ),
            **options,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            MASK=mask_kind,
            SPLIT=split,
            FULL=full,
            PDL=pdl,
            ONLY_HOLES=only_holes,
            BLOCK_R=tile.rows,
            BLOCK_N=kv_block,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if split:
        parts = (sequences, kv_heads, padded_rows, splits)
        columns = min(64, block_dv)
        combine = Launch(
            combine_kernel,
            (sequences * kv_heads * q_len * group, triton.cdiv(value_dim, columns)),
            (q_len, q_len, kv_heads, padded_rows, splits),
            GROUP=group,
            VALUE_DIM=value_dim,
            SINKS=sinks is not None,
            VARLEN=varlen,
            PDL=pdl,
            BLOCK_S=4 if splits <= 4 else 16,  # loaded at once
            BLOCK_DV=columns,
            num_warps=1,
            **({"launch_pdl": True} if pdl else {}),
        )

    def call(query, key, value, out, sinks, mask, key_mask, origin, query_offset, cu_query, cu_key):
        query, key, value, sinks = _dense_last(query), _dense_last(key), _dense_last(value), _dense(sinks)
        part_out = part_state = None
        if split:
            part_out = query.new_empty((*parts, value_dim), dtype=torch.float32)
            part_state = query.new_empty((*parts, 2), dtype=torch.float32)
        results, rest = (out, part_out, part_state, sinks), (origin, query_offset, cu_query, cu_key)
        key_mask = _prepared(key_mask, origin)
        if tile.decode:
            launch(query, key, value, *results, key_mask, *rest)
        else:
            launch(query, key, value, key_of(key), value_of(value), *results, _mask(mask), key_mask, *rest)
        if split:
            combine(part_out, part_state, sinks, out, cu_query)

    return call


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _no_descriptor(tensor: torch.Tensor) -> None:
    return None


def _mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as the kernel reads it; see `masked_blocks`: no 8-bit load."""
    return mask.to(torch.int16) if mask is not None and mask.dtype == torch.bool else mask


def _prepared(key_mask: torch.Tensor | None, origin: torch.Tensor | None) -> torch.Tensor | None:
    if key_mask is None:
        return None
    return key_mask.contiguous() if is_prepared(key_mask) else launch_key_mask(key_mask, origin)


def launch_key_mask(key_mask: torch.Tensor, origin: torch.Tensor | None) -> torch.Tensor:
    """key_mask (B, KV) bool, origin (B,) integers or None -> what `key_mask.prepared` makes of them."""
    return key_mask_call(key_mask, origin)(key_mask, origin)


def key_mask_call(key_mask: torch.Tensor, origin: torch.Tensor | None) -> Callable:
    """The function of (key_mask, origin) that `launch_key_mask` comes to, for all tensors of these kinds."""
    rows, kv_len = key_mask.shape
    if 0 in key_mask.shape:
        return prepared
    launch = Launch(
        key_mask_kernel,
        (rows,),
        (kv_len, *key_mask.stride()),
        ORIGIN=origin is not None,
        HEADER=HEADER,
        BLOCK=1024,
        num_warps=4,
    )

    def call(key_mask, origin):
        out = key_mask.new_empty((rows, HEADER + kv_len), dtype=torch.int32)
        launch(key_mask, as_int32(origin), out)
        return out

    return call
