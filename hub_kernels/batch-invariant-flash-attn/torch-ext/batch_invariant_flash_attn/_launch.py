"""Launch the Triton kernels: look the tile up, size grid and workspace. Imported at the first GPU call."""

import functools
import math

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from . import contract, plan, selfcheck
from ._attention_kernel import attention_kernel, combine_kernel
from .key_mask import is_prepared, prepared

LOG2E = math.log2(math.e)
# The Hopper kernel is written in Triton's experimental dialect: only for releases that it was run with.
HOPPER_KERNEL = triton.__version__.startswith("3.6.")


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
    )


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides, with a valid one where a dimension of size 1 does not use its own."""
    return [stride if size > 1 else 8 for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False)] + [1]


def _describable(tensor: torch.Tensor, columns: int) -> bool:
    """Whether a tensor descriptor can serve tiles of `columns` columns of tensor (B, H, L, D)."""
    strides = _strides(tensor)
    return (
        tensor.shape[-1] == columns
        and tensor.data_ptr() % 16 == 0
        and all(stride % 8 == 0 and stride > 0 for stride in strides[:-1])
    )


def _descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """For tiles (1, 1, rows, D) of tensor (B, H, L, D)."""
    return TensorDescriptor(tensor, list(tensor.shape), _strides(tensor), [1, 1, rows, tensor.shape[-1]])


def _hopper_descriptor(tensor: torch.Tensor, rows: int):
    """As `_descriptor`, for the Hopper kernel."""
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    block = [1, 1, rows, tensor.shape[-1]]
    layout = NVMMASharedLayout.get_default_for(block, bfloat16 if tensor.dtype == torch.bfloat16 else float16)
    return GluonDescriptor(tensor, list(tensor.shape), _strides(tensor), block, layout)


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
    split: bool | None = None,
) -> torch.Tensor:
    """query (B, Hq, Q, D), key (B, Hkv, KV, D), value (B, Hkv, KV, Dv) -> (B, Q, Hq, Dv) contiguous.

    `tile` and `split`, given together, override the plan (tests, tuning); the bits are the same for every choice.
    """
    batch, heads, q_len, _ = query.shape
    return _launch(
        query,
        key,
        value,
        torch.empty((batch, q_len, heads, value.shape[-1]), dtype=query.dtype, device=query.device),
        sequences=batch,
        q_len=q_len,
        kv_len=key.shape[2],
        causal=causal,
        scale=scale,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=sinks,
        mask=mask,
        key_mask=key_mask,
        origin=origin,
        query_offset=query_offset,
        tile=tile,
        split=split,
    )


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
    split: bool | None = None,
) -> torch.Tensor:
    """query (Tq, Hq, D), key (Tk, Hkv, D), value (Tk, Hkv, Dv), cu_seqlens (S + 1,) and origin
    (S,) int32 -> (Tq, Hq, Dv).
    """
    total, heads, _ = query.shape
    return _launch(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        # zeros: rows that belong to no sequence are nobody's output
        torch.zeros((total, heads, value.shape[-1]), dtype=query.dtype, device=query.device),
        sequences=cu_seqlens_q.numel() - 1,
        q_len=max_seqlen_q,
        kv_len=max_seqlen_k,
        causal=causal,
        scale=scale,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=sinks,
        origin=origin,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
        tile=tile,
        split=split,
    )


def _most_splits(span: int, anywhere: bool) -> int:
    """How many splits `span` neighbouring keys can touch, from the origin on or (`anywhere`) from any position."""
    return contract.split_of(max(span, 1) - 1) + (2 if anywhere else 1)


def _launch(
    query,
    key,
    value,
    out,
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
    cu_seqlens=None,
    tile=None,
    split=None,
    only_holes=False,
):
    """only_holes: leave rows alone whose key_mask has none."""
    if out.numel() == 0:
        return out
    query, key, value = _dense_last(query), _dense_last(key), _dense_last(value)
    heads, head_dim = query.shape[1], query.shape[3]
    kv_heads, value_dim = key.shape[1], value.shape[3]
    group = heads // kv_heads
    shape = dict(head_dim=head_dim, value_head_dim=value_dim, dtype=query.dtype)
    gpu = gpu_of(query.device)
    kv_block = contract.attention_contract(**shape).kv_block
    block_d, block_dv = triton.next_power_of_2(head_dim), triton.next_power_of_2(value_dim)
    # Small heads keep to the masked walk: with head_dim 16 the other one was seen to give wrong values on an H200.
    full = mask is None and query.dtype != torch.float32 and min(block_d, block_dv) >= 64
    # In front of a packed sequence lie values of another one, which a load by descriptor would bring along.
    whole = cu_seqlens is None or origin is None
    descriptors = gpu.descriptors and full and whole and _describable(key, block_d) and _describable(value, block_dv)

    if query_offset is None and window[0] >= kv_len - 1:
        window = (-1, window[1])  # reaches behind the first key
    span = kv_len
    if window[0] >= 0 and (causal or window[1] >= 0):
        span = min(kv_len, window[0] + max(window[1], 0) + q_len)
    splits = _most_splits(span, anywhere=origin is not None or window[0] >= 0)
    problem = dict(rows=q_len * group, heads=sequences * kv_heads, splits=splits, split_bytes=(value_dim + 2) * 4)
    if tile is None:
        free = selfcheck.tiles_agree(device=query.device, **shape)
        full, descriptors = full and free, descriptors and free
        tile, split = plan.attention_tile(**problem, **shape, plain=descriptors, gpu=gpu)
        tile = tile if free else plan.only_tile(**shape)
    assert not tile.hopper or (descriptors and not split), tile
    row_tiles = triton.cdiv(q_len * group, tile.rows)
    programs = sequences * kv_heads * row_tiles
    padded_rows = row_tiles * tile.rows
    part_out = part_state = None
    if split:
        parts = (sequences, kv_heads, padded_rows, splits)
        part_out = torch.empty((*parts, value_dim), dtype=torch.float32, device=query.device)
        part_state = torch.empty((*parts, 2), dtype=torch.float32, device=query.device)

    if mask is not None:
        mask_kind = 1 if mask.dtype == torch.bool else 2
        floor = 0.0 if mask_kind == 1 else contract.mask_floor(mask.dtype)
        mask = mask.to(torch.int16) if mask_kind == 1 else mask  # see `masked_blocks`: no 8-bit load
        mask_strides = mask.expand(sequences, heads, q_len, kv_len).stride()
    else:
        mask_kind, floor, mask_strides = 0, 0.0, (0, 0, 0, 0)
    if key_mask is not None:
        key_mask = (key_mask if is_prepared(key_mask) else prepared(key_mask, origin)).contiguous()
    cu_query, cu_key = cu_seqlens or (None, None)

    pdl = bool(split) and gpu.descriptors
    descriptors = descriptors and tile.rows >= 64  # a decode step is too short to pay for making them
    if tile.hopper:
        from ._hopper_kernel import hopper_attention_kernel

        grid, heads_at_once = plan.hopper_grid(
            tiles=programs,
            heads=sequences * kv_heads,
            blocks=triton.cdiv(kv_len, kv_block),
            bytes_each=kv_len * (head_dim + value_dim) * key.element_size(),
            gpu=gpu,
        )
        hopper_attention_kernel[(grid,)](
            query,
            _hopper_descriptor(key, kv_block),
            _hopper_descriptor(value, kv_block),
            out,
            sinks,
            origin,
            query_offset,
            cu_query,
            cu_key,
            key_mask,
            q_len,
            kv_len,
            kv_heads,
            row_tiles,
            sequences * kv_heads,
            heads_at_once,
            (softcap or scale) * LOG2E,
            scale / softcap if softcap else 0.0,
            *window,
            *query.stride()[:3],
            GROUP=group,
            CAUSAL=causal,
            WINDOW_LEFT=window[0] >= 0,
            WINDOW_RIGHT=window[1] >= 0,
            SOFTCAP=softcap > 0,
            SINKS=sinks is not None,
            ORIGIN=origin is not None,
            QUERY_OFFSET=query_offset is not None,
            VARLEN=cu_seqlens is not None,
            KEY_MASK=key_mask is not None,
            SPLITS=contract.SPLIT_STRETCHES,
            STAGES=tile.stages,
            num_warps=4,
            maxnreg=168,
        )
        if key_mask is None:
            return out
        # It takes no key mask but a run of keys; rows with holes are done over, all others end at once.
        tile, _ = plan.attention_tile(**problem, **shape, plain=False, gpu=gpu)
        return _launch(
            query,
            key,
            value,
            out,
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
            tile=tile,
            split=False,
            only_holes=True,
        )
    attention_kernel[(programs, splits if split else 1)](
        query,
        key,
        value,
        _descriptor(key, kv_block) if descriptors else None,
        _descriptor(value, kv_block) if descriptors else None,
        out,
        part_out,
        part_state,
        sinks,
        mask,
        key_mask,
        origin,
        query_offset,
        cu_query,
        cu_key,
        q_len,
        kv_len,
        kv_heads,
        row_tiles,
        splits,
        (softcap or scale) * LOG2E,
        scale / softcap if softcap else 0.0,
        1 / (softcap or scale),
        floor,
        window[0],
        window[1],
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *mask_strides,
        key_mask.stride(0) if key_mask is not None else 0,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        CAUSAL=causal,
        WINDOW_LEFT=window[0] >= 0,
        WINDOW_RIGHT=window[1] >= 0,
        SOFTCAP=softcap > 0,
        SINKS=sinks is not None,
        MASK=mask_kind,
        KEY_MASK=key_mask is not None,
        ORIGIN=origin is not None,
        QUERY_OFFSET=query_offset is not None,
        VARLEN=cu_seqlens is not None,
        SPLIT=split,
        SPLITS=contract.SPLIT_STRETCHES,
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
        block_dv = min(64, block_dv)
        combine_kernel[(sequences * kv_heads * q_len * group, triton.cdiv(value_dim, block_dv))](
            part_out,
            part_state,
            sinks,
            out,
            cu_query,
            q_len,
            q_len,
            kv_heads,
            padded_rows,
            splits,
            GROUP=group,
            VALUE_DIM=value_dim,
            SINKS=sinks is not None,
            VARLEN=cu_seqlens is not None,
            PDL=pdl,
            BLOCK_S=16,
            BLOCK_DV=block_dv,
            num_warps=1,
            **({"launch_pdl": True} if pdl else {}),
        )
    return out
