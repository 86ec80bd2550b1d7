"""Attention with fixed KV blocks and splits, for prefill, chunked prefill and decode alike.

Stock kernels cut the KV axis by the size of the problem, and the cut decides the order in which softmax partials meet,
hence the last bits. Here the cut is a function of the distance from the row's first real key (contract.py). One program
takes a tile of packed rows (query, head of the group) of one KV head and either walks all splits, folding each into a
total as it ends, or (SPLIT) takes a single split and leaves the same folding to `combine_kernel`.
"""

import triton
import triton.language as tl

from ._softmax_step import merge, merge_scales, normalise, sink_scales, step, tanh, to_log2


@triton.jit
def split_of(position):
    """contract.split_of."""
    return tl.where(
        position < 8192,
        position // 512,
        tl.where(position < 32768, 16 + (position - 8192) // 1024, 40 + (position - 32768) // 4096),
    )


@triton.jit
def split_begin(split):
    """contract.split_begin."""
    return tl.where(
        split < 16, split * 512, tl.where(split < 40, 8192 + (split - 16) * 1024, 32768 + (split - 40) * 4096)
    )


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
    out_ptr,  # (B, Q, Hq, Dv) contiguous
    part_out_ptr,  # (B, Hkv, row tiles * BLOCK_R, splits, Dv) float32, if SPLIT
    part_state_ptr,  # (B, Hkv, row tiles * BLOCK_R, splits, 2) float32: maximum, sum
    sinks_ptr,  # (Hq,)
    mask_ptr,  # (B, Hq, Q, KV) with broadcast strides
    key_mask_ptr,  # (B, KV)
    origin_ptr,  # (B,)
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
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    LANES: tl.constexpr = 16
    FLOAT32: tl.constexpr = key_ptr.dtype.element_ty == tl.float32
    PART_D: tl.constexpr = 32 if BLOCK_D > 32 else BLOCK_D
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
        origin = tl.load(origin_ptr + batch)
    query_offset = kv_len - q_len
    if QUERY_OFFSET:
        query_offset = tl.load(query_offset_ptr + batch)

    rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    i = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    inside = i < q_len
    position = query_offset + i

    # The keys that any row of the tile can see, and the blocks that hold them, counted from the origin.
    first_i = (tile * BLOCK_R) // GROUP
    last_i = tl.minimum((tile * BLOCK_R + BLOCK_R - 1) // GROUP, q_len - 1)
    low = tl.maximum(origin, 0)
    high = kv_len
    if CAUSAL:
        high = tl.minimum(high, query_offset + last_i + 1)
    if WINDOW_RIGHT:
        high = tl.minimum(high, query_offset + last_i + window_right + 1)
    if WINDOW_LEFT:
        low = tl.maximum(low, query_offset + first_i - window_left)
    low -= origin
    high -= origin
    high = tl.where(first_i >= q_len, low, high)
    first_split = split_of(low)
    if SPLIT:
        split = tl.program_id(1)
        low = tl.maximum(low, split_begin(first_split + split))
        high = tl.minimum(high, split_begin(first_split + split + 1))
    first_block = low // BLOCK_N
    last_block = tl.where(high > low, tl.cdiv(high, BLOCK_N), first_block)

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_rows = query_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64)[:, None] * stride_qh
    q_rows += (query_row + i.to(tl.int64))[:, None] * stride_qm
    if not FLOAT32:
        q = tl.load(q_rows + d[None, :], mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    k_base = key_ptr + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh + key_row * stride_kn
    v_base = value_ptr + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh + key_row * stride_vn

    m = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_R, LANES), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_DV), tl.float32)
    if not SPLIT:
        m_total = tl.full((BLOCK_R,), float("-inf"), tl.float32)
        weight_total = tl.zeros((BLOCK_R, LANES), tl.float32)
        acc_total = tl.zeros((BLOCK_R, BLOCK_DV), tl.float32)
        split_end = split_begin(first_split + 1)
    for block in range(first_block, last_block):
        if not SPLIT:
            if block * BLOCK_N >= split_end:
                m_total, scale_total, scale = merge_scales(m_total, m)
                weight_total = merge(weight_total, scale_total[:, None], weight, scale[:, None])
                acc_total = merge(acc_total, scale_total[:, None], acc, scale[:, None])
                m = tl.full((BLOCK_R,), float("-inf"), tl.float32)
                weight = tl.zeros((BLOCK_R, LANES), tl.float32)
                acc = tl.zeros((BLOCK_R, BLOCK_DV), tl.float32)
                split_end = split_begin(split_of(block * BLOCK_N) + 1)
        j = origin + block * BLOCK_N + tl.arange(0, BLOCK_N)
        # Keys that no row of the tile sees are not read: a cache may hold anything behind its end.
        real = (j < kv_len) & (j >= 0) & (j < origin + high)
        if KEY_MASK:
            real = real & (tl.load(key_mask_ptr + batch.to(tl.int64) * stride_kmb + j, mask=real, other=0) != 0)
        k_rows = k_base + j.to(tl.int64)[:, None] * stride_kn
        if FLOAT32:
            # Short sums over parts of the head: one running sum over all of it would lose accuracy that shows.
            score = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
            for first in tl.static_range(0, BLOCK_D, PART_D):
                part = first + tl.arange(0, PART_D)
                in_head = (part < HEAD_DIM)[None, :]
                q = tl.load(q_rows + part[None, :], mask=inside[:, None] & in_head, other=0.0)
                k = tl.load(k_rows + part[None, :], mask=real[:, None] & in_head, other=0.0)
                # As an fma, since `score + dot` would be folded into one running sum again.
                score = tl.fma(
                    score, tl.full(score.shape, 1.0, tl.float32), tl.dot(q, tl.trans(k), input_precision="ieee")
                )
        else:
            k = tl.load(k_rows + d[None, :], mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
            score = tl.dot(q, tl.trans(k))

        visible = real[None, :] & inside[:, None]
        if CAUSAL:
            visible = visible & (j[None, :] <= position[:, None])
        if WINDOW_LEFT:
            visible = visible & (j[None, :] >= position[:, None] - window_left)
        if WINDOW_RIGHT:
            visible = visible & (j[None, :] <= position[:, None] + window_right)
        if SOFTCAP:
            score = tanh(score * softcap_in)
        bias = 0.0
        if MASK != 0:
            mask_ptrs = mask_ptr + batch.to(tl.int64) * stride_mb + head.to(tl.int64)[:, None] * stride_mh
            mask_ptrs += i.to(tl.int64)[:, None] * stride_mm + j.to(tl.int64)[None, :] * stride_mn
            extra = tl.load(mask_ptrs, mask=visible, other=0)
            if MASK == 1:
                visible = visible & (extra != 0)
            else:
                visible = visible & (extra.to(tl.float32) > mask_floor)
                bias = extra.to(tl.float32) * LOG2E
        score = to_log2(score, unit, bias)
        score = tl.where(visible, score, float("-inf"))
        v_ptrs = v_base + j.to(tl.int64)[:, None] * stride_vn + dv[None, :]
        v = tl.load(v_ptrs, mask=real[:, None] & (dv < VALUE_DIM)[None, :], other=0.0)
        m, weight, acc = step(m, weight, acc, score, v, LANES)

    if SPLIT:
        slot = ((sequence.to(tl.int64) * kv_heads + kv_head) * (row_tiles * BLOCK_R) + rows) * splits + split
        tl.store(part_state_ptr + slot * 2, m)
        tl.store(part_state_ptr + slot * 2 + 1, tl.max(weight, 1))
        if last_block > first_block:
            part_ptrs = part_out_ptr + slot[:, None] * VALUE_DIM + dv[None, :]
            tl.store(part_ptrs, acc, mask=inside[:, None] & (dv < VALUE_DIM)[None, :])
    else:
        m_total, scale_total, scale = merge_scales(m_total, m)
        # The lanes are equal: their maximum is any of them.
        weight_total = tl.max(merge(weight_total, scale_total[:, None], weight, scale[:, None]), 1)
        acc_total = merge(acc_total, scale_total[:, None], acc, scale[:, None])
        if SINKS:
            sink = to_log2(tl.load(sinks_ptr + head).to(tl.float32), LOG2E, 0.0)
            scale_out, weight_total = sink_scales(m_total, weight_total, sink)
            acc_total = acc_total * scale_out[:, None]
        result = normalise(acc_total, weight_total[:, None])
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
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Fold the splits of one row from left to right, with the arithmetic of `attention_kernel`'s own folding."""
    LOG2E: tl.constexpr = 1.4426950408889634
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
                m = tl.load(part_state_ptr + at * 2, mask=(split + one) < splits, other=float("-inf"))
                weight = tl.load(part_state_ptr + at * 2 + 1, mask=(split + one) < splits, other=0.0)
                # An empty split wrote no output: leave its memory alone.
                filled = (m > float("-inf"))[:, None] & (dv < VALUE_DIM)[None, :]
                acc = tl.load(part_out_ptr + at[:, None] * VALUE_DIM + dv[None, :], mask=filled, other=0.0)
                m_total, scale_total, scale = merge_scales(m_total, m)
                weight_total = merge(weight_total, scale_total, weight, scale)
                acc_total = merge(acc_total, scale_total[:, None], acc, scale[:, None])
        if SINKS:
            sink = to_log2(tl.load(sinks_ptr + head + one).to(tl.float32), LOG2E, 0.0)
            scale_out, weight_total = sink_scales(m_total, weight_total, sink)
            acc_total = acc_total * scale_out[:, None]
        result = normalise(acc_total, weight_total[:, None])
        out_ptrs = out_ptr + (out_row * (kv_heads * GROUP) + head) * VALUE_DIM + dv[None, :] + one[:, None]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=(dv < VALUE_DIM)[None, :] & (one == 0)[:, None])
