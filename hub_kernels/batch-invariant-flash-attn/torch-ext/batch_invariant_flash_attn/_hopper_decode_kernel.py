"""The decode kernel for Hopper: up to 64 rows of a KV head, whose keys and values are on their way before they are due.

Same contract and, through `_softmax_step`, the same arithmetic as `attention_kernel`. There, a step waits for queries,
the first keys and the last values one after the other; here all copies that buffers have room for are asked for at
once, and renewed as buffers come free. Each warp holds whole rows of scores, so the four of them meet but once or twice
a block, and its softmax runs beside the product with the values of the block before it.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._blocks import key_range, split_begin, split_of
from ._hopper_kernel import _at_once, _highest, _masked, _pack, _unpack, _weight
from ._softmax_step import add_weights, finish, fold_split, lane_sums, softmax_step, tanh

# The height of a product. A thread holds elements of rows r and r + 8 of each 16: with 32 rows to a tile, all that it
# does with the second one is left out.
HEIGHT = gl.constexpr(64)


@gluon.jit
def _halves(product):
    """(HEIGHT, N) -> the tile's rows and the others, (HEIGHT / 2, N) each."""
    N: gl.constexpr = product.shape[1]
    first, second = gl.split(gl.permute(gl.reshape(product, (HEIGHT // 16, 2, 8, N)), (0, 2, 3, 1)))
    return gl.reshape(first, (HEIGHT // 2, N)), gl.reshape(second, (HEIGHT // 2, N))


@gluon.jit
def _joined(first, second, layout: gl.constexpr):
    """What `_halves` takes apart, in a layout."""
    N: gl.constexpr = first.shape[1]
    first, second = gl.reshape(first, (HEIGHT // 16, 8, N)), gl.reshape(second, (HEIGHT // 16, 8, N))
    both = gl.permute(gl.join(first, second), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(both, (HEIGHT, N)), layout)


@gluon.jit
def _rows_of(product, ROWS: gl.constexpr):
    """(HEIGHT, N) -> (ROWS, N): the tile's rows."""
    if ROWS < HEIGHT:
        product, _ = _halves(product)
    return product


@gluon.jit
def _scaled(product, scale, layout: gl.constexpr):
    """The tile's rows of a product times scale (ROWS,)."""
    if scale.shape[0] < HEIGHT:
        first, second = _halves(product)
        product = _joined(first * scale[:, None], second, layout)
    else:
        product = product * scale[:, None]
    return product


@gluon.jit
def _weights_of(packed, zero, dtype: gl.constexpr, layout: gl.constexpr):
    """The weights that `_pack` rounded, (ROWS, N), as the left operand of a product; zeros in the rows beside a tile's.

    zero: 0, which the compiler must not know. It would have one register hold all zeros, move it into place in front of
    each instruction, and let these wait for each other (C7511).
    """
    if packed.shape[0] < HEIGHT:
        p = _joined(_unpack(packed, dtype), _unpack(packed & zero, dtype), layout)
    else:
        p = gl.convert_layout(_unpack(packed, dtype), layout)
    return p


@gluon.jit
def _copy(buffer, base, offsets, there):
    """Ask for rows of memory, base + 8 * offsets, as the rows of a buffer; zeros, unread, where not `there`."""
    DIM: gl.constexpr = buffer.shape[1]
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, offsets.type.layout.parent))
    # The compiler has to see that addresses are 16 bytes apart.
    async_copy.async_copy_global_to_shared(buffer, base + ((offsets * 8)[:, None] + d[None, :]), mask=there[:, None])


@gluon.jit
def _copy_block(buffer, base, first, stop, stride, key_mask, looked_up, KEY_MASK: gl.constexpr):
    """Ask for keys or values first ... of a sequence; zeros in front of it, from `stop` on and where the mask hides."""
    BLOCK_N: gl.constexpr = buffer.shape[0]
    DIM: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    there = (row >= -first) & (row < stop - first)
    if KEY_MASK:
        there = there & (gl.load(key_mask + first + row, mask=there & (row < looked_up - first), other=1) != 0)
    # One 64-bit sum for the block, and 32 bits for the row in it, which is the same in every block.
    _copy(buffer, base + first.to(gl.int64) * stride * 8, row * stride, there)


@gluon.jit
def _finished(score, i, mask, softcap_in, FLAGS: gl.constexpr):
    """Block i's products as scores, -inf where hidden."""
    SOFTCAP: gl.constexpr = FLAGS[3]
    KEY_MASK: gl.constexpr = FLAGS[8]
    first, position, limits, full_begin, full_end, key_mask, holes = mask
    at = first + i * score.shape[1]
    if SOFTCAP:
        score = tanh(score * softcap_in)
    if (i < full_begin) | (i >= full_end):
        score = _masked(score, at, position, limits, FLAGS)
        if KEY_MASK:
            if holes != 0:
                j = at + gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, score.type.layout))
                kept = gl.load(key_mask + j, mask=(j >= 0) & (j < limits[0]), other=0) != 0
                score = gl.where(kept[None, :], score, float("-inf"))
    return score


@gluon.jit
def _store_state(part_state_ptr, slot, inside, m, weight):
    """Leave a split (by row: its place, whether there is such a row) to the combine kernel, which reads outputs only
    where m is not -inf.
    """
    gl.store(part_state_ptr + slot * 2, m, mask=inside)
    gl.store(part_state_ptr + slot * 2 + 1, weight, mask=inside)


@gluon.jit
def _store_part(part_out_ptr, part_state_ptr, slot, inside, m, weight, acc):
    """The same with its output."""
    _store_state(part_state_ptr, slot, inside, m, weight)
    VALUE_DIM: gl.constexpr = acc.shape[1]
    dv = gl.arange(0, VALUE_DIM, layout=gl.SliceLayout(0, acc.type.layout))
    gl.store(part_out_ptr + (slot * VALUE_DIM)[:, None] + dv[None, :], acc, mask=inside[:, None])


# Sizes that change from call to call are not specialised: one compilation serves every length.
@gluon.jit(
    do_not_specialize=[
        *("q_len", "kv_len", "kv_heads", "padded_rows", "splits", "program_keys"),
        *("window_left", "window_right", "stride_kmb"),
    ]
)
def hopper_decode_kernel(
    query_ptr,  # (B, Hq, Q, D), or (T, Hq, D) as (1, Hq, T, D) if VARLEN
    key_ptr,  # (B, Hkv, KV, D)
    value_ptr,  # (B, Hkv, KV, Dv)
    out_ptr,  # (B, Q, Hq, Dv) contiguous
    part_out_ptr,  # (B, Hkv, padded rows, splits, Dv) float32, if SPLIT
    part_state_ptr,  # (B, Hkv, padded rows, splits, 2) float32: maximum, sum
    sinks_ptr,  # (Hq,)
    key_mask_ptr,  # (B, 2 + KV) int32, see key_mask.py
    origin_ptr,  # (B,), or (S,) if VARLEN
    query_offset_ptr,  # (B,)
    cu_query_ptr,  # (S + 1,)
    cu_key_ptr,  # (S + 1,)
    q_len,
    kv_len,
    kv_heads,
    padded_rows,  # at least Q * GROUP
    splits,
    program_keys,
    unit,  # log2(e) times scale, or times softcap
    softcap_in,  # scale / softcap
    window_left,
    window_right,
    stride_qb,  # all strides but the mask's in steps of 8 elements
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_kmb,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW_LEFT: gl.constexpr,
    WINDOW_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    KEY_MASK: gl.constexpr,
    ORIGIN: gl.constexpr,
    QUERY_OFFSET: gl.constexpr,
    VARLEN: gl.constexpr,
    SPLIT: gl.constexpr,
    SEVERAL: gl.constexpr,  # a program takes all splits of program_keys keys, not one; if SPLIT
    SPLITS: gl.constexpr,  # contract.SPLIT_STRETCHES
    PDL: gl.constexpr,  # the combine kernel may start early
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    FLAGS: gl.constexpr = (CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, SINKS, ORIGIN, QUERY_OFFSET, VARLEN, KEY_MASK)
    FOLDS: gl.constexpr = SEVERAL or not SPLIT  # splits end within the program
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, HEAD_DIM], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, VALUE_DIM], dtype)
    q_buffer = gl.allocate_shared_memory(dtype, [HEIGHT, HEAD_DIM], q_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], k_layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, VALUE_DIM], v_layout)

    kv_head = gl.program_id(0) % kv_heads
    sequence = gl.program_id(0) // kv_heads
    batch = sequence
    query_row = sequence * 0
    key_row = sequence * 0
    q_len = gl.to_tensor(q_len)
    kv_len = gl.to_tensor(kv_len)
    if VARLEN:
        query_row = gl.load(cu_query_ptr + sequence)
        key_row = gl.load(cu_key_ptr + sequence)
        q_len = gl.load(cu_query_ptr + sequence + 1) - query_row
        kv_len = gl.load(cu_key_ptr + sequence + 1) - key_row
        batch = sequence * 0
    origin = sequence * 0
    if ORIGIN:
        origin = gl.load(origin_ptr + sequence)
    query_offset = kv_len - q_len
    if QUERY_OFFSET:
        query_offset = gl.load(query_offset_ptr + batch)
    holes = sequence * 0
    key_mask = holes  # where there is none
    if KEY_MASK:
        key_mask = key_mask_ptr + batch.to(gl.int64) * stride_kmb
        kv_len = gl.minimum(kv_len, gl.load(key_mask))
        holes = gl.load(key_mask + 1)
        key_mask += 2

    # The blocks that hold the keys that any row can see, counted from the origin, and where they end in memory.
    low, high, _ = key_range(
        sequence * 0,
        q_len - 1,
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
    split = gl.to_tensor(0)
    end_split = gl.to_tensor(0)
    if SPLIT:
        part = gl.num_programs(1) - 1 - gl.program_id(1)  # order-free: the long ones first
        split = part
        end_split = part + 1
        begin = split_begin(first_split + part, SPLITS)
        end = split_begin(first_split + part + 1, SPLITS)
        if SEVERAL:
            begin = (low // program_keys + part) * program_keys
            end = begin + program_keys
            # The splits that this program answers for, counted from the first one of the rows.
            split = gl.maximum(split_of(begin, SPLITS) - first_split, 0)
            is_last = part == gl.num_programs(1) - 1  # order-free: it answers for what is left
            end_split = gl.where(is_last, splits, gl.minimum(splits, split_of(end, SPLITS) - first_split))
        low = gl.maximum(low, begin)
        # Of a sequence that is longer than the launch was told, no more than there is room for.
        high = gl.minimum(gl.minimum(high, end), split_begin(first_split + splits, SPLITS))
    first_block = low // BLOCK_N
    count = gl.where(high > low, gl.cdiv(high, BLOCK_N) - first_block, 0)
    first = origin + first_block * BLOCK_N
    stop = gl.where(high > low, origin + high, 0)

    # Everything that there is room for is asked for at once: first what the first scores need.
    copy_rows: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    )
    rows = gl.arange(0, HEIGHT, layout=copy_rows)
    there = rows >= 0
    if ROWS < HEIGHT:
        there = rows % 16 < 8
        rows = rows // 16 * 8 + rows % 8
    q_base = query_ptr + (batch.to(gl.int64) * stride_qb + query_row.to(gl.int64) * stride_qm) * 8
    offsets = (kv_head * GROUP + rows % GROUP).to(gl.int64) * stride_qh + (rows // GROUP).to(gl.int64) * stride_qm
    _copy(q_buffer, q_base, offsets, there & (rows // GROUP < q_len))
    at = batch.to(gl.int64) * stride_kb + kv_head.to(gl.int64) * stride_kh + key_row.to(gl.int64) * stride_kn
    k_base = key_ptr + at * 8
    at = batch.to(gl.int64) * stride_vb + kv_head.to(gl.int64) * stride_vh + key_row.to(gl.int64) * stride_vn
    v_base = value_ptr + at * 8
    looked_up = holes * kv_len
    zero = gl.to_tensor(kv_heads) >> 31
    for s in gl.static_range(STAGES):
        at = first + s * BLOCK_N
        _copy_block(k_buffers.index(s), k_base, at, stop, stride_kn, key_mask, looked_up, KEY_MASK)
        async_copy.commit_group()
        _copy_block(v_buffers.index(s), v_base, at, stop, stride_vn, key_mask, looked_up, KEY_MASK)
    async_copy.commit_group()

    # The running state, by the tile's rows.
    no_scores = _rows_of(gl.zeros((HEIGHT, BLOCK_N), gl.float32, score_layout), ROWS)
    acc = gl.zeros((HEIGHT, VALUE_DIM), gl.float32, out_layout)
    acc_total = _rows_of(acc, ROWS)
    score_rows: gl.constexpr = gl.SliceLayout(1, no_scores.type.layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, acc_total.type.layout)
    m = gl.full((ROWS,), float("-inf"), gl.float32, score_rows)
    lanes = lane_sums(no_scores)  # zeros, in the layout of such sums
    m_total = gl.full((ROWS,), float("-inf"), gl.float32, out_rows)
    weight_total = gl.zeros((ROWS,), gl.float32, out_rows)

    # Blocks in the middle are seen whole by every row.
    position = query_offset + gl.arange(0, ROWS, layout=score_rows) // GROUP
    limits = (stop, window_left, window_right)
    seen = stop
    if CAUSAL:
        seen = gl.minimum(seen, query_offset + 1)
    if WINDOW_RIGHT:
        seen = gl.minimum(seen, query_offset + window_right + 1)
    full_end = gl.maximum(seen - first, 0) // BLOCK_N
    full_begin = gl.cdiv(gl.maximum(-first, 0), BLOCK_N)
    if WINDOW_LEFT:
        unseen = query_offset + q_len - 1 - window_left - first
        full_begin = gl.maximum(full_begin, gl.cdiv(gl.maximum(unseen, 0), BLOCK_N))
    if KEY_MASK:
        full_end = gl.where(holes != 0, 0, full_end)

    split_end = split_begin(first_split + split + 1, SPLITS)
    rows = gl.arange(0, ROWS, layout=out_rows)
    inside = (rows // GROUP < q_len) & (rows < padded_rows)
    slots = ((sequence.to(gl.int64) * kv_heads + kv_head) * padded_rows + rows) * splits
    mask = (first, position, limits, full_begin, full_end, key_mask, holes)
    if count > 0:
        async_copy.wait_group(STAGES)
        fence_async_shared()
        score = gl.zeros((HEIGHT, BLOCK_N), gl.float32, score_layout)
        score = warpgroup_mma(q_buffer, k_buffers.index(0).permute((1, 0)), score, use_acc=False)
        score = _finished(_rows_of(score, ROWS), 0, mask, softcap_in, FLAGS)
        m, weights, alpha = softmax_step(m, _highest(score), score, unit)
        lanes = add_weights(lanes, gl.convert_layout(alpha, gl.SliceLayout(1, lanes.type.layout)), weights)
        packed = _pack(weights, dtype)
        slot = gl.to_tensor(0)
        before = gl.to_tensor(STAGES - 1)
        for i in range(1, count):
            last = before
            before = slot
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
            # All copies but the last so many are done: the keys of this block and the values of the one before it are
            # there. And all warps are, so what the turn before used is free.
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            score = gl.zeros((HEIGHT, BLOCK_N), gl.float32, score_layout)
            k = k_buffers.index(slot).permute((1, 0))
            score_token = warpgroup_mma(q_buffer, k, score, use_acc=False, is_async=True)
            p = _weights_of(packed, zero, dtype, p_layout)
            acc_token = warpgroup_mma(p, v_buffers.index(before), acc, is_async=True)
            at = first + (i - 1 + STAGES) * BLOCK_N
            _copy_block(k_buffers.index(before), k_base, at, stop, stride_kn, key_mask, looked_up, KEY_MASK)
            if i > 1:
                at -= BLOCK_N
                _copy_block(v_buffers.index(last), v_base, at, stop, stride_vn, key_mask, looked_up, KEY_MASK)
            async_copy.commit_group()
            score = warpgroup_mma_wait(1, deps=(score_token,))
            score = _finished(_rows_of(score, ROWS), i, mask, softcap_in, FLAGS)
            if FOLDS:
                due = (first_block + i) * BLOCK_N >= split_end
                m_split = m
                lanes_split = lanes
                m = gl.where(due, float("-inf"), m)
                lanes = gl.where(due, 0.0, lanes)
            m, weights, alpha = softmax_step(m, _highest(score), score, unit)
            lane_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, lanes.type.layout))
            lanes = _at_once(add_weights(lanes, lane_alpha, weights))
            acc, token = warpgroup_mma_wait(0, deps=(acc_token, p))
            scale = gl.convert_layout(alpha, out_rows)
            if FOLDS:
                if due:
                    done = (gl.convert_layout(m_split, out_rows), _weight(lanes_split, out_rows), _rows_of(acc, ROWS))
                    if SPLIT:
                        _store_part(part_out_ptr, part_state_ptr, slots + split, inside, *done)
                        split += 1
                    else:
                        m_total, weight_total, acc_total = fold_split(m_total, weight_total, acc_total, *done)
                    acc = gl.zeros_like(acc)
                    split_end = split_begin(split_of((first_block + i) * BLOCK_N, SPLITS) + 1, SPLITS)
                else:
                    acc = _scaled(acc, scale, out_layout)
            else:
                acc = _scaled(acc, scale, out_layout)
            packed = _pack(weights, dtype)
        async_copy.wait_group(0)
        fence_async_shared()
        acc = warpgroup_mma(_weights_of(packed, zero, dtype, p_layout), v_buffers.index(slot), acc)
    async_copy.wait_group(0)  # nothing may be written to buffers whose memory is used for other things from here on

    acc = _rows_of(acc, ROWS)
    weight = _weight(lanes, out_rows)
    m = gl.convert_layout(m, out_rows)
    if SPLIT:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        if count > 0:
            _store_part(part_out_ptr, part_state_ptr, slots + split, inside, m, weight, acc)
            split += 1
        while split < end_split:  # of no keys
            _store_state(part_state_ptr, slots + split, inside, gl.zeros_like(m) + float("-inf"), gl.zeros_like(m))
            split += 1
    else:
        m_total, weight_total, acc_total = fold_split(m_total, weight_total, acc_total, m, weight, acc)
        sink = m_total
        if SINKS:
            sink = gl.load(sinks_ptr + kv_head * GROUP + rows % GROUP)
        result = finish(m_total, weight_total, acc_total, sink, SINKS).to(dtype)
        out_row = batch.to(gl.int64) * q_len + query_row + rows // GROUP
        offsets = (out_row * (kv_heads * GROUP) + kv_head * GROUP + rows % GROUP) * VALUE_DIM
        dv = gl.arange(0, VALUE_DIM, layout=gl.SliceLayout(0, acc.type.layout))
        gl.store(out_ptr + offsets[:, None] + dv[None, :], result, mask=inside[:, None])
