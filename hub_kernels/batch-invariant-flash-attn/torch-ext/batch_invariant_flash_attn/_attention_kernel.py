"""Attention with fixed KV blocks and splits, for prefill, chunked prefill and decode alike.

Stock kernels cut the KV axis by the size of the problem, and the cut decides the order in which softmax partials meet,
hence the last bits. Here the cut is a function of the distance from the row's first real key (contract.py). One program
takes a tile of packed rows (query, head of the group) of one KV head and either walks all splits, folding each into a
total as it ends, or (SPLIT) takes a single split and leaves the same folding to `combine_kernel`.
"""

import triton
import triton.language as tl

from ._blocks import full_blocks, key_range, masked_blocks, split_begin, split_of
from ._softmax_step import LANES, finish, fold_split, lanes_to_weight


# Sizes that change from call to call are not specialised: one compilation serves every length.
@triton.jit(
    do_not_specialize=[
        *("q_len", "kv_len", "row_tiles", "splits", "window_left", "window_right"),
        *("stride_mb", "stride_mh", "stride_mm", "stride_kmb"),
    ]
)
def attention_kernel(
    query_ptr,  # (B, Hq, Q, D), or (T, Hq, D) as (1, Hq, T, D) if VARLEN
    key_ptr,  # (B, Hkv, KV, D)
    value_ptr,  # (B, Hkv, KV, Dv)
    key_desc,  # tensor descriptors of the same, or None
    value_desc,
    out_ptr,  # (B, Q, Hq, Dv) contiguous
    part_out_ptr,  # (B, Hkv, row tiles * BLOCK_R, splits, Dv) float32, if SPLIT
    part_state_ptr,  # (B, Hkv, row tiles * BLOCK_R, splits, 2) float32: maximum, sum
    sinks_ptr,  # (Hq,)
    mask_ptr,  # (B, Hq, Q, KV) with broadcast strides
    key_mask_ptr,  # (B, 2 + KV) int32, see key_mask.py
    origin_ptr,  # (B,), or (S,) if VARLEN
    query_offset_ptr,  # (B,)
    cu_query_ptr,  # (S + 1,)
    cu_key_ptr,  # (S + 1,)
    q_len,
    kv_len,
    kv_heads,
    row_tiles,
    splits,
    unit,  # log2(e) times scale, or times softcap
    softcap_in,  # scale / softcap
    bias_in,  # 1 / scale, or 1 / softcap
    mask_floor,
    window_left,
    window_right,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_kmb,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    MASK: tl.constexpr,  # 0 none, 1 boolean, 2 additive
    KEY_MASK: tl.constexpr,
    ORIGIN: tl.constexpr,
    QUERY_OFFSET: tl.constexpr,
    VARLEN: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,  # contract.SPLIT_STRETCHES
    FULL: tl.constexpr,  # blocks that every row sees whole are walked without masks
    PDL: tl.constexpr,  # the combine kernel may start early
    ONLY_HOLES: tl.constexpr,  # rows whose keys are one run were done by another kernel
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # Heads of one sequence run side by side and the last (longest, if causal) row tiles start first.
    pid = tl.program_id(0)
    tile = row_tiles - 1 - pid % row_tiles
    kv_head = (pid // row_tiles) % kv_heads
    batch = pid // (row_tiles * kv_heads)

    query_row = tl.cast(0, tl.int64)
    key_row = tl.cast(0, tl.int64)
    sequence = batch
    if VARLEN:
        query_row = tl.load(cu_query_ptr + sequence).to(tl.int64)
        key_row = tl.load(cu_key_ptr + sequence).to(tl.int64)
        q_len = (tl.load(cu_query_ptr + sequence + 1) - query_row).to(tl.int32)
        kv_len = (tl.load(cu_key_ptr + sequence + 1) - key_row).to(tl.int32)
        batch = sequence * 0
    origin = 0
    if ORIGIN:
        origin = tl.load(origin_ptr + sequence)
    query_offset = kv_len - q_len
    if QUERY_OFFSET:
        query_offset = tl.load(query_offset_ptr + batch)
    key_mask_base = key_mask_ptr
    holes = 0
    if KEY_MASK:
        key_mask_base += batch.to(tl.int64) * stride_kmb
        kv_len = tl.minimum(kv_len, tl.load(key_mask_base))
        holes = tl.load(key_mask_base + 1)
        key_mask_base += 2
        if ONLY_HOLES and holes == 0:
            return

    rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    i = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    inside = i < q_len
    position = query_offset + i

    # The keys that any row of the tile can see, and the blocks that hold them, counted from the origin.
    first_i = (tile * BLOCK_R) // GROUP
    last_i = tl.minimum((tile * BLOCK_R + BLOCK_R - 1) // GROUP, q_len - 1)
    low, high, _ = key_range(
        first_i,
        last_i,
        q_len,
        kv_len,
        origin,
        query_offset,
        window_left,
        window_right,
        CAUSAL,
        WINDOW_LEFT,
        WINDOW_RIGHT,
    )
    first_split = split_of(low, SPLITS)
    if SPLIT:
        split = splits - 1 - tl.program_id(1)  # the long ones first
        low = tl.maximum(low, split_begin(first_split + split, SPLITS))
        high = tl.minimum(high, split_begin(first_split + split + 1, SPLITS))
    first_block = low // BLOCK_N
    last_block = tl.where(high > low, tl.cdiv(high, BLOCK_N), first_block)

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_rows = query_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    q_rows += (query_row + i.to(tl.int64)) * stride_qm
    q = tl.load(q_rows[:, None] + d[None, :], mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    k_base = key_ptr + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh + key_row * stride_kn
    v_base = value_ptr + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh + key_row * stride_vn
    mask_base = mask_ptr
    if MASK != 0:
        mask_base = mask_ptr + batch.to(tl.int64) * stride_mb + head.to(tl.int64) * stride_mh
        mask_base += tl.minimum(i, q_len - 1).to(tl.int64) * stride_mm

    m = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    lanes = tl.zeros((BLOCK_R, LANES), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_DV), tl.float32)
    m_total, weight_total, acc_total, split_end = 0.0, 0.0, 0.0, 0
    if not SPLIT:
        m_total = tl.full((BLOCK_R,), float("-inf"), tl.float32)
        weight_total = tl.zeros((BLOCK_R,), tl.float32)
        acc_total = tl.zeros((BLOCK_R, BLOCK_DV), tl.float32)
        split_end = split_begin(first_split + 1, SPLITS)

    # Blocks in the middle are seen whole by every row of the tile.
    full_begin = last_block
    full_end = last_block
    if FULL:
        seen = kv_len
        if CAUSAL:
            seen = tl.minimum(seen, query_offset + first_i + 1)
        if WINDOW_RIGHT:
            seen = tl.minimum(seen, query_offset + first_i + window_right + 1)
        full_end = tl.maximum(first_block, tl.minimum(last_block, tl.maximum(seen - origin, 0) // BLOCK_N))
        full_begin = tl.cdiv(low, BLOCK_N)
        if WINDOW_LEFT:
            unseen = query_offset + last_i - window_left - origin
            full_begin = tl.maximum(full_begin, tl.cdiv(tl.maximum(unseen, 0), BLOCK_N))
        if KEY_MASK:
            full_end = tl.where(holes != 0, first_block, full_end)
        full_begin = tl.minimum(full_begin, full_end)
    leading_end = full_begin if FULL else last_block
    state = (m, lanes, acc, m_total, weight_total, acc_total, split_end)
    for part in tl.static_range(2 if FULL else 1):
        if part == 1 and FULL:
            if full_begin < full_end:
                state = full_blocks(
                    q,
                    key_desc,
                    value_desc,
                    k_base,
                    v_base,
                    batch,
                    kv_head,
                    key_row.to(tl.int32),
                    origin,
                    stride_kn,
                    stride_vn,
                    full_begin,
                    full_end,
                    *state,
                    unit,
                    softcap_in,
                    SOFTCAP,
                    SPLIT,
                    SPLITS,
                    HEAD_DIM,
                    VALUE_DIM,
                    BLOCK_N,
                    BLOCK_D,
                    BLOCK_DV,
                )
        if part == 1 or not FULL or WINDOW_LEFT or ORIGIN:
            state = masked_blocks(
                q,
                q_rows,
                k_base,
                v_base,
                mask_base,
                key_mask_base,
                holes * kv_len,
                origin,
                kv_len,
                high,
                position,
                inside,
                stride_kn,
                stride_vn,
                stride_mn,
                first_block if part == 0 else full_end,
                leading_end if part == 0 else last_block,
                *state,
                unit,
                softcap_in,
                bias_in,
                mask_floor,
                window_left,
                window_right,
                CAUSAL,
                WINDOW_LEFT,
                WINDOW_RIGHT,
                SOFTCAP,
                MASK,
                KEY_MASK,
                SPLIT,
                SPLITS,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_R,
                BLOCK_N,
                BLOCK_D,
                BLOCK_DV,
                1 if FULL else None,
            )
    m, lanes, acc, m_total, weight_total, acc_total, split_end = state

    weight = lanes_to_weight(lanes)
    if SPLIT:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        slot = ((sequence.to(tl.int64) * kv_heads + kv_head) * (row_tiles * BLOCK_R) + rows) * splits + split
        tl.store(part_state_ptr + slot * 2, m)
        tl.store(part_state_ptr + slot * 2 + 1, weight)
        if last_block > first_block:
            part_ptrs = part_out_ptr + slot[:, None] * VALUE_DIM + dv[None, :]
            tl.store(part_ptrs, acc, mask=inside[:, None] & (dv < VALUE_DIM)[None, :])
    else:
        m_total, weight_total, acc_total = fold_split(m_total, weight_total, acc_total, m, weight, acc)
        sink = tl.load(sinks_ptr + head) if SINKS else m_total
        result = finish(m_total, weight_total, acc_total, sink, SINKS)
        out_row = (batch.to(tl.int64) * q_len + query_row + i) * (kv_heads * GROUP) + head
        out_ptrs = out_ptr + out_row[:, None] * VALUE_DIM + dv[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (dv < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["q_len", "max_q_len", "padded_rows", "splits"])
def combine_kernel(
    part_out_ptr,  # (B, Hkv, padded rows, splits, Dv) float32
    part_state_ptr,  # (B, Hkv, padded rows, splits, 2) float32
    sinks_ptr,
    out_ptr,  # (B, Q, Hq, Dv) contiguous
    cu_query_ptr,
    q_len,
    max_q_len,
    kv_heads,
    padded_rows,
    splits,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    VARLEN: tl.constexpr,
    PDL: tl.constexpr,  # this kernel was started before the one that it waits for had ended
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Fold the splits of one row from left to right, with the arithmetic of `attention_kernel`'s own folding."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid % (max_q_len * GROUP)
    kv_head = (pid // (max_q_len * GROUP)) % kv_heads
    batch = pid // (max_q_len * GROUP * kv_heads)
    i = row // GROUP
    head = kv_head * GROUP + row % GROUP
    out_row = batch * q_len + i
    if VARLEN:
        begin = tl.load(cu_query_ptr + batch).to(tl.int64)
        out_row = begin + i
        q_len = (tl.load(cu_query_ptr + batch + 1) - begin).to(tl.int32)
    if i < q_len:
        if PDL:
            tl.extra.cuda.gdc_wait()
        slot = ((batch * kv_heads + kv_head) * padded_rows + row) * splits
        dv = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
        m_total = tl.full((1,), float("-inf"), tl.float32)
        weight_total = tl.zeros((1,), tl.float32)
        acc_total = tl.zeros((1, BLOCK_DV), tl.float32)
        one = tl.arange(0, 1)
        for first in range(0, splits, BLOCK_S):
            for s in tl.static_range(BLOCK_S):
                split = first + s
                at = slot + split + one
                there = (split + one) < splits
                m = tl.load(part_state_ptr + at * 2, mask=there, other=float("-inf"))
                weight = tl.load(part_state_ptr + at * 2 + 1, mask=there, other=0.0)
                columns = there[:, None] & (dv < VALUE_DIM)[None, :]
                acc = tl.load(part_out_ptr + at[:, None] * VALUE_DIM + dv[None, :], mask=columns, other=0.0)
                # An empty split wrote no output, so anything may be there. Not in the load's mask, which would make it
                # wait for m.
                acc = tl.where((m > float("-inf"))[:, None], acc, 0.0)
                m_total, weight_total, acc_total = fold_split(m_total, weight_total, acc_total, m, weight, acc)
        sink = tl.load(sinks_ptr + head + one) if SINKS else m_total
        result = finish(m_total, weight_total, acc_total, sink, SINKS)
        out_ptrs = out_ptr + (out_row * (kv_heads * GROUP) + head) * VALUE_DIM + dv[None, :] + one[:, None]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=(dv < VALUE_DIM)[None, :] & (one == 0)[:, None])
