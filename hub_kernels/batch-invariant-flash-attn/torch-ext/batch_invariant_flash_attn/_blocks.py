"""Walk KV blocks: the running state of a tile of rows taken over some of its blocks.

`masked_blocks` takes any block; `full_blocks` those that every row of the tile sees whole, and overlaps the softmax of
one block with the products of its neighbours. Both do the same arithmetic per row, so where one ends and the other
begins changes no bit. Unless SPLIT, a running split is folded into the totals when a block of the next one is due.
"""

import triton
import triton.language as tl

from ._softmax_step import add_weights, fold_split, lanes_to_weight, softmax_step, tanh


@triton.jit
def split_of(position, SPLITS: tl.constexpr):
    """contract.split_of."""
    split = position // SPLITS[0][1]
    count = 0
    for i in tl.static_range(1, len(SPLITS)):
        count += (SPLITS[i][0] - SPLITS[i - 1][0]) // SPLITS[i - 1][1]
        split = tl.where(position < SPLITS[i][0], split, count + (position - SPLITS[i][0]) // SPLITS[i][1])
    return split


@triton.jit
def split_begin(split, SPLITS: tl.constexpr):
    """contract.split_begin."""
    begin = split * SPLITS[0][1]
    count = 0
    for i in tl.static_range(1, len(SPLITS)):
        count += (SPLITS[i][0] - SPLITS[i - 1][0]) // SPLITS[i - 1][1]
        begin = tl.where(split < count, begin, SPLITS[i][0] + (split - count) * SPLITS[i][1])
    return begin


@triton.jit
def key_range(
    first_i,
    last_i,
    q_len,
    kv_len,
    origin,
    query_offset,
    window_left,
    window_right,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
):
    """(low, high, end): the keys low ... high - 1, counted from the origin, that any of the queries first_i ... last_i
    can see, none if there are no such queries; `end` is the index in memory behind the last one.
    """
    low = tl.maximum(origin, 0)
    end = kv_len
    if CAUSAL:
        end = tl.minimum(end, query_offset + last_i + 1)
    if WINDOW_RIGHT:
        end = tl.minimum(end, query_offset + last_i + window_right + 1)
    if WINDOW_LEFT:
        low = tl.maximum(low, query_offset + first_i - window_left)
    low -= origin
    return low, tl.where(first_i >= q_len, low, end - origin), end


@triton.jit
def _next_split(position, m, lanes, acc, m_total, weight_total, acc_total, split_end, SPLITS: tl.constexpr):
    """The state in front of the block at `position`: a split that ended there is folded, and a new one begun."""
    if position >= split_end:
        m_total, weight_total, acc_total = fold_split(m_total, weight_total, acc_total, m, lanes_to_weight(lanes), acc)
        m = tl.full(m.shape, float("-inf"), tl.float32)
        lanes = tl.zeros_like(lanes)
        acc = tl.zeros_like(acc)
        split_end = split_begin(split_of(position, SPLITS) + 1, SPLITS)
    return m, lanes, acc, m_total, weight_total, acc_total, split_end


@triton.jit
def _load_rows(
    desc, base, batch, head, row, first, stride, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr
):
    """Keys or values `first` ... `first` + BLOCK_N - 1, all of them real: (BLOCK_N, BLOCK_D), zeros from DIM on.

    Through the descriptor desc (B, Hkv, KV, DIM), where the sequence begins at `row`, or if None through pointers.
    """
    if desc is not None:
        return tl.reshape(desc.load([batch, head, row + first, 0]), (BLOCK_N, BLOCK_D))
    d = tl.arange(0, BLOCK_D)[None, :]
    ptrs = base + first.to(tl.int64) * stride + tl.arange(0, BLOCK_N)[:, None] * stride + d
    if DIM == BLOCK_D:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=d < DIM, other=0.0)


@triton.jit
def full_blocks(
    q,  # (R, BLOCK_D)
    key_desc,
    value_desc,
    k_base,
    v_base,
    batch,
    kv_head,
    key_row,
    origin,
    stride_kn,
    stride_vn,
    first_block,
    last_block,
    m,
    lanes,
    acc,
    m_total,
    weight_total,
    acc_total,
    split_end,
    unit,
    softcap_in,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Blocks first_block ... last_block - 1, at least one, without any mask; 16-bit dtypes only.

    The scores of the next block are there before the values of this one are multiplied: its softmax then runs beside
    that product.
    """
    if not SPLIT:
        m, lanes, acc, m_total, weight_total, acc_total, split_end = _next_split(
            first_block * BLOCK_N, m, lanes, acc, m_total, weight_total, acc_total, split_end, SPLITS
        )
    first = origin + first_block * BLOCK_N
    k = _load_rows(key_desc, k_base, batch, kv_head, key_row, first, stride_kn, BLOCK_N, BLOCK_D, HEAD_DIM)
    score = tl.dot(q, tl.trans(k))
    if SOFTCAP:
        score = tanh(score * softcap_in)
    m, p, alpha = softmax_step(m, tl.max(score, 1), score, unit)
    lanes = add_weights(lanes, alpha, p)
    p = p.to(q.dtype)
    acc = acc * alpha[:, None]
    for block in tl.range(first_block, last_block - 1):
        first = origin + block * BLOCK_N
        k = _load_rows(
            key_desc, k_base, batch, kv_head, key_row, first + BLOCK_N, stride_kn, BLOCK_N, BLOCK_D, HEAD_DIM
        )
        score = tl.dot(q, tl.trans(k))
        v = _load_rows(value_desc, v_base, batch, kv_head, key_row, first, stride_vn, BLOCK_N, BLOCK_DV, VALUE_DIM)
        acc = tl.dot(p, v, acc)
        if SOFTCAP:
            score = tanh(score * softcap_in)
        if SPLIT:
            m, p, alpha = softmax_step(m, tl.max(score, 1), score, unit)
            lanes = add_weights(lanes, alpha, p)
        else:
            due = (block + 1) * BLOCK_N >= split_end
            m_split = m
            lanes_split = lanes
            m, p, alpha = softmax_step(tl.where(due, float("-inf"), m), tl.max(score, 1), score, unit)
            lanes = add_weights(tl.where(due, 0.0, lanes), alpha, p)
            if due:
                m_total, weight_total, acc_total = fold_split(
                    m_total, weight_total, acc_total, m_split, lanes_to_weight(lanes_split), acc
                )
                acc = tl.zeros_like(acc)
                split_end = split_begin(split_of((block + 1) * BLOCK_N, SPLITS) + 1, SPLITS)
        p = p.to(q.dtype)
        acc = acc * alpha[:, None]
    first = origin + (last_block - 1) * BLOCK_N
    v = _load_rows(value_desc, v_base, batch, kv_head, key_row, first, stride_vn, BLOCK_N, BLOCK_DV, VALUE_DIM)
    acc = tl.dot(p, v, acc)
    return m, lanes, acc, m_total, weight_total, acc_total, split_end


@triton.jit
def masked_blocks(
    q,  # (R, BLOCK_D), unused if float32
    q_rows,  # (R,) pointers
    k_base,
    v_base,
    mask_base,  # (R,) pointers, if MASK
    key_mask_base,  # the keys of the row's mask, if KEY_MASK
    looked_up,  # keys before this one are looked up in it: kv_len, or 0 if none is missing
    origin,
    kv_len,
    high,
    position,  # (R,) key index at which a row stands
    inside,  # (R,) the row is a query
    stride_kn,
    stride_vn,
    stride_mn,
    first_block,
    last_block,
    m,
    lanes,
    acc,
    m_total,
    weight_total,
    acc_total,
    split_end,
    unit,
    softcap_in,
    bias_in,
    mask_floor,
    window_left,
    window_right,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    KEY_MASK: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Blocks first_block ... last_block - 1 with every mask applied; keys that no row sees are not read, since a cache
    may hold anything behind its end.
    """
    FLOAT32: tl.constexpr = k_base.dtype.element_ty == tl.float32
    PART_D: tl.constexpr = 32 if BLOCK_D > 32 else BLOCK_D
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    for block in tl.range(first_block, last_block, num_stages=STAGES):
        if not SPLIT:
            m, lanes, acc, m_total, weight_total, acc_total, split_end = _next_split(
                block * BLOCK_N, m, lanes, acc, m_total, weight_total, acc_total, split_end, SPLITS
            )
        j = origin + block * BLOCK_N + tl.arange(0, BLOCK_N)
        real = (j < kv_len) & (j >= 0) & (j < origin + high)
        if KEY_MASK:
            # Never an 8-bit load: through it the compiler takes k and v for 8-bit operands, and a matrix unit of the
            # older kind (`mma.sync`) then sums each 16 products in another order.
            real = real & (tl.load(key_mask_base + j, mask=real & (j < looked_up), other=1) != 0)
        k_rows = k_base + j.to(tl.int64)[:, None] * stride_kn
        if FLOAT32:
            # Short sums over parts of the head: one running sum over all of it would lose accuracy that shows.
            score = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
            for first in tl.static_range(0, BLOCK_D, PART_D):
                part = first + tl.arange(0, PART_D)
                in_head = (part < HEAD_DIM)[None, :]
                q_part = tl.load(q_rows[:, None] + part[None, :], mask=inside[:, None] & in_head, other=0.0)
                k_part = tl.load(k_rows + part[None, :], mask=real[:, None] & in_head, other=0.0)
                # As an fma, since `score + dot` would be folded into one running sum again.
                score = tl.fma(score, 1.0, tl.dot(q_part, tl.trans(k_part), input_precision="ieee"))
        else:
            k = tl.load(k_rows + d[None, :], mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
            score = tl.dot(q, tl.trans(k))
        v_ptrs = v_base + j.to(tl.int64)[:, None] * stride_vn + dv[None, :]
        v = tl.load(v_ptrs, mask=real[:, None] & (dv < VALUE_DIM)[None, :], other=0.0)

        visible = real[None, :] & inside[:, None]
        if CAUSAL:
            visible = visible & (j[None, :] <= position[:, None])
        if WINDOW_LEFT:
            visible = visible & (j[None, :] >= position[:, None] - window_left)
        if WINDOW_RIGHT:
            visible = visible & (j[None, :] <= position[:, None] + window_right)
        if SOFTCAP:
            score = tanh(score * softcap_in)
        if MASK != 0:
            # What lies beside is read at the edge and not used: with a predicate on every element, this load is most of
            # the kernel, fills the registers and takes a minute to compile.
            column = tl.minimum(tl.maximum(j, 0), kv_len - 1).to(tl.int64)
            extra = tl.load(mask_base[:, None] + column[None, :] * stride_mn)
            if MASK == 1:
                visible = visible & (extra != 0)
            else:
                extra = extra.to(tl.float32)
                visible = visible & (extra > mask_floor)
                # In units of the score, so that adding 0 leaves the bits of a call without a mask.
                score = tl.fma(extra, bias_in, score)
        score = tl.where(visible, score, float("-inf"))
        m, p, alpha = softmax_step(m, tl.max(score, 1), score, unit)
        lanes = add_weights(lanes, alpha, p)
        if FLOAT32:
            # The block is summed by itself: one running sum over all keys would lose accuracy that float32 can show.
            acc = tl.fma(acc, alpha[:, None], tl.dot(p, v, input_precision="ieee"))
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m, lanes, acc, m_total, weight_total, acc_total, split_end
