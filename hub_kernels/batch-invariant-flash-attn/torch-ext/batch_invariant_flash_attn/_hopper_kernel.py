"""The prefill kernel for Hopper: one warp loads, two groups of four warps multiply, each 64 rows of the tile, or all 64
rows of it and half of the values' columns (ROWS).

Same contract and, through `_softmax_step`, the same arithmetic as `attention_kernel`; only who waits for what is spelt
out here. A group overlaps the softmax of one block with the products of its neighbours, and the two groups drift apart
until one multiplies while the other exponentiates. Method: Shah et al. 2024, "FlashAttention-3".
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._blocks import key_range, split_begin, split_of
from ._softmax_step import LANES, add_weights, finish, fold_split, lane_sums, softmax_step, tanh

# Rows that a group of warps multiplies.
HALF_ROWS = gl.constexpr(64)


@gluon.jit
def _slot(block):
    """The buffer of a block, counted over all tiles from 0, and the parity of how often it was filled before."""
    return block & 1, (block >> 1) & 1


@gluon.jit
def _sequence(tensors, problem, batch, FLAGS: gl.constexpr):
    """Where a sequence's queries and keys lie: batch index, first query row, first key row, q_len, kv_len, origin and
    the key at which query 0 stands. A row of a key mask with holes counts as one without keys.
    """
    ORIGIN: gl.constexpr = FLAGS[5]
    QUERY_OFFSET: gl.constexpr = FLAGS[6]
    VARLEN: gl.constexpr = FLAGS[7]
    KEY_MASK: gl.constexpr = FLAGS[8]
    _, _, _, origin_ptr, query_offset_ptr, cu_query_ptr, cu_key_ptr, key_mask_ptr = tensors
    q_len, kv_len, _, _, _, _, _, _ = problem
    query_row = batch * 0
    key_row = batch * 0
    if VARLEN:
        query_row = gl.load(cu_query_ptr + batch)
        key_row = gl.load(cu_key_ptr + batch)
        q_len = gl.load(cu_query_ptr + batch + 1) - query_row
        kv_len = gl.load(cu_key_ptr + batch + 1) - key_row
        batch = batch * 0
    origin = batch * 0
    if ORIGIN:
        origin = gl.load(origin_ptr + batch)
    query_offset = kv_len - q_len
    if QUERY_OFFSET:
        query_offset = gl.load(query_offset_ptr + batch)
    if KEY_MASK:
        header = key_mask_ptr + batch.to(gl.int64) * (kv_len + 2)
        kv_len = gl.where(gl.load(header + 1) != 0, 0, gl.minimum(kv_len, gl.load(header)))
    return batch, query_row, key_row, q_len, kv_len, origin, query_offset


@gluon.jit
def _tile(number, tensors, problem, sizes: gl.constexpr):
    """Row tile `number` of the launch: its sequence, and the keys that any of its rows can see as blocks counted from
    the origin (first, end) and as a last key position.
    """
    FLAGS: gl.constexpr = sizes[0]
    GROUP: gl.constexpr = sizes[2]
    BLOCK_N: gl.constexpr = sizes[5]
    ROWS: gl.constexpr = sizes[6]
    CAUSAL: gl.constexpr = FLAGS[0]
    LEFT: gl.constexpr = FLAGS[1]
    RIGHT: gl.constexpr = FLAGS[2]
    _, _, kv_heads, row_tiles, all_heads, heads_at_once, window_left, window_right = problem
    # Programs take turns forwards and backwards, so that each gets its share of long and short tiles.
    programs = gl.num_programs(0)  # order-free: it deals out whole tiles
    wave = number // programs
    turn = number % programs
    number = wave * programs + gl.where(wave % 2 == 0, turn, programs - 1 - turn)
    # As many heads side by side as fit the cache, and of these the last (longest, if causal) row tiles first.
    section = number // (heads_at_once * row_tiles)
    side_by_side = gl.maximum(gl.minimum(heads_at_once, all_heads - section * heads_at_once), 1)
    rest = number - section * heads_at_once * row_tiles
    there = number < all_heads * row_tiles
    head = gl.where(there, section * heads_at_once + rest % side_by_side, 0)
    tile = gl.where(there, row_tiles - 1 - rest // side_by_side, row_tiles)  # past the end: no query is in it
    kv_head = head % kv_heads
    sequence = _sequence(tensors, problem, head // kv_heads, FLAGS)
    _, _, _, q_len, kv_len, origin, query_offset = sequence
    first_i = (tile * ROWS) // GROUP
    last_i = gl.minimum((tile * ROWS + ROWS - 1) // GROUP, q_len - 1)
    low, high, end = key_range(
        first_i, last_i, q_len, kv_len, origin, query_offset, window_left, window_right, CAUSAL, LEFT, RIGHT
    )
    first_block = low // BLOCK_N
    blocks = gl.where(high > low, gl.cdiv(high, BLOCK_N) - first_block, 0)
    return tile, kv_head, sequence, low, end, first_block, blocks


@gluon.jit
def _load_blocks(descs, tensors, problem, q_buffers, buffers, barriers, tiles, sizes: gl.constexpr):
    """The loading warp: queries of all tiles, keys and values of all of their blocks, as buffers come free.

    One barrier says that a block's keys and the values of the block before it are used.
    """
    GROUP: gl.constexpr = sizes[2]
    BLOCK_N: gl.constexpr = sizes[5]
    ROWS: gl.constexpr = sizes[6]
    PARTS: gl.constexpr = 2 * HALF_ROWS // ROWS
    COLUMNS: gl.constexpr = sizes[4] // PARTS
    QUERY_TMA: gl.constexpr = sizes[7]
    query_desc, key_desc, value_desc = descs
    k_buffers, v_buffers = buffers
    k_ready, v_ready, free, q_ready, q_free = barriers
    loaded = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):  # order-free: whole tiles
        tile, kv_head, sequence, _, _, first_block, blocks = _tile(number, tensors, problem, sizes)
        batch, query_row, key_row, _, _, origin, _ = sequence
        # Only where it brings queries is a group kept from running ahead over tiles without blocks. Waiting for its
        # arrival elsewhere could begin when the one after it is there already, which looks as if none were.
        if QUERY_TMA:
            for half in gl.static_range(2):
                mbarrier.wait(q_free.index(half), (turn & 1) ^ 1)
                at = query_row + (tile * ROWS + half * (ROWS - HALF_ROWS)) // GROUP
                mbarrier.expect(q_ready.index(half), query_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    query_desc, [batch, kv_head, at, 0, 0], q_ready.index(half), q_buffers.index(half)
                )
        turn += 1
        at = key_row + origin + first_block * BLOCK_N
        for i in range(blocks + 1):
            # The keys of block i, and the values of the one before it.
            if i < blocks:
                slot, filled = _slot(loaded + i)
                mbarrier.wait(free.index(slot), filled ^ 1)
                mbarrier.expect(k_ready.index(slot), key_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    key_desc, [batch, kv_head, at + i * BLOCK_N, 0], k_ready.index(slot), k_buffers.index(slot)
                )
            if i > 0:
                # Its buffer held the values of two blocks before it, which are used when the block before it is.
                block = loaded + i - 1
                if block > 0:
                    before, filled = _slot(block - 1)
                    mbarrier.wait(free.index(before), filled)
                slot = block & 1
                mbarrier.expect(v_ready.index(slot), PARTS * value_desc.block_type.nbytes)
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        value_desc,
                        [batch, kv_head, at + (i - 1) * BLOCK_N, part * COLUMNS],
                        v_ready.index(slot),
                        v_buffers.index(PARTS * slot + part),
                    )
        loaded += blocks


@gluon.jit
def _masked(score, first, position, limits, FLAGS: gl.constexpr):
    """score (R, N) of the keys from `first` on, -inf where hidden."""
    CAUSAL: gl.constexpr = FLAGS[0]
    LEFT: gl.constexpr = FLAGS[1]
    RIGHT: gl.constexpr = FLAGS[2]
    ORIGIN: gl.constexpr = FLAGS[5]
    end, window_left, window_right = limits
    column = gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, score.type.layout))[None, :]
    until = gl.zeros_like(position) + (end - first)
    if CAUSAL:
        until = gl.minimum(until, position + (1 - first))
    if RIGHT:
        until = gl.minimum(until, position + (window_right + 1 - first))
    visible = column < until[:, None]
    if LEFT or ORIGIN:  # an origin may lie in front of the keys
        since = gl.zeros_like(position) - first
        if LEFT:
            since = gl.maximum(since, position - (window_left + first))
        visible = visible & (column >= since[:, None])
    return gl.where(visible, score, float("-inf"))


@gluon.jit
def _weight(lanes, layout: gl.constexpr):
    """`lanes_to_weight` where each thread of a row has one lane: neighbours first, then pairs."""
    pairs = gl.sum(gl.reshape(lanes, (lanes.shape[0], LANES // 2, 2)), axis=2)
    return gl.convert_layout(gl.sum(pairs, axis=1), layout)


@gluon.jit
def _at_once(x):
    """x, computed before what follows in the program.

    ptxas would otherwise wait for the values' product first and begin the softmax afterwards, since nothing in it needs
    that product: the two would no longer overlap. A store that depends on x and is never done keeps the order; no
    number in x has these bits.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred never;
            .reg .b32 bits;
            mov.b32 bits, $1;
            setp.eq.b32 never, bits, 0xffc0dead;
            @never st.shared.b32 [bits], bits;
            mov.b32 $0, bits;
        }
        """,
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _place_at_once(place):
    """`_at_once` for what `_tile` gives (a sum of its numbers is never that negative)."""
    tile, kv_head, _, low, end, first_block, blocks = place
    _at_once((tile + kv_head + low + end + first_block + blocks).to(gl.float32, bitcast=True))
    return place


@gluon.jit
def _pack(weights, dtype: gl.constexpr):
    """weights (R, N) rounded to dtype, two to an int32 (R, N / 2)."""
    even, odd = gl.split(gl.reshape(weights, (weights.shape[0], weights.shape[1] // 2, 2)))
    instruction: gl.constexpr = (
        "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    )
    return gl.inline_asm_elementwise(instruction, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(packed, dtype: gl.constexpr):
    """The weights (R, N) that `_pack` rounded."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    both = gl.join(even.to(dtype, bitcast=True), odd.to(dtype, bitcast=True))
    return gl.reshape(both, (packed.shape[0], 2 * packed.shape[1]))


@gluon.jit
def _highest(score):
    """Maximum of each row (R,), by chains of comparisons that need not wait for each other: one for every column that a
    thread holds of each 8."""
    columns = gl.max(gl.reshape(score, (score.shape[0], score.shape[1] // 8, 8)), axis=1)
    return gl.convert_layout(gl.max(columns, axis=1), gl.SliceLayout(1, score.type.layout))


@gluon.jit
def _steps(
    q,
    buffers,
    barriers,
    state,
    count,
    done,
    first,
    first_block,
    position,
    limits,
    full,
    units,
    FLAGS: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Scores of blocks 1 ... count - 1 of the tile, values of the blocks before them; `done` blocks came before.

    full: the blocks (first, end) that every row sees whole.
    """
    SOFTCAP: gl.constexpr = FLAGS[3]
    k_buffers, v_buffers = buffers
    k_ready, v_ready, free = barriers[0], barriers[1], barriers[2]
    unit, softcap_in = units
    m, lanes, acc, packed, m_total, weight_total, acc_total, split_end = state
    dtype: gl.constexpr = q.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    BLOCK_D: gl.constexpr = q.shape[1]
    BLOCK_DV: gl.constexpr = acc.shape[1]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    full_begin, full_end = full
    for i in range(1, count):
        slot, filled = _slot(done + i)
        mbarrier.wait(k_ready.index(slot), filled)
        k = k_buffers.index(slot).reshape((BLOCK_N, BLOCK_D))
        score = gl.zeros((HALF_ROWS, BLOCK_N), gl.float32, score_layout)
        score_token = warpgroup_mma(q, k.permute((1, 0)), score, use_acc=False, is_async=True)
        before, filled = _slot(done + i - 1)
        mbarrier.wait(v_ready.index(before), filled)
        v = v_buffers.index(PARTS * before + PART).reshape((BLOCK_N, BLOCK_DV))
        p = gl.convert_layout(_unpack(packed, dtype), p_layout)
        acc_token = warpgroup_mma(p, v, acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=(score_token,))
        if SOFTCAP:
            score = tanh(score * softcap_in)
        if (i < full_begin) | (i >= full_end):
            score = _masked(score, first + i * BLOCK_N, position, limits, FLAGS)
        due = (first_block + i) * BLOCK_N >= split_end
        m_split = m
        lanes_split = lanes
        m, weights, alpha = softmax_step(gl.where(due, float("-inf"), m), _highest(score), score, unit)
        lane_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, lanes.type.layout))
        lanes = _at_once(add_weights(gl.where(due, 0.0, lanes), lane_alpha, weights))
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))
        acc, _ = warpgroup_mma_wait(0, deps=(acc_token, p))
        mbarrier.arrive(free.index(slot), count=1)
        if due:
            row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
            m_total, weight_total, acc_total = fold_split(
                m_total,
                weight_total,
                acc_total,
                gl.convert_layout(m_split, row),
                _weight(lanes_split, row),
                acc,
            )
            acc = gl.zeros_like(acc)
            split_end = split_begin(split_of((first_block + i) * BLOCK_N, SPLITS) + 1, SPLITS)
        else:
            acc = acc * alpha[:, None]
        packed = _pack(weights, dtype)
    return m, lanes, acc, packed, m_total, weight_total, acc_total, split_end


@gluon.jit
def _attend(
    tensors, strides, problem, units, q_buffers, buffers, barriers, tiles, HALF: gl.constexpr, sizes: gl.constexpr
):
    """Four warps: one half of the rows of each tile over all of its blocks."""
    done = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    place = _tile(gl.program_id(0), tensors, problem, sizes)
    programs = gl.num_programs(0)  # order-free: it deals out whole tiles
    for number in range(gl.program_id(0), tiles, programs):
        blocks = place[6]
        place = _attend_tile(
            place,
            number + programs,
            tensors,
            strides,
            problem,
            units,
            q_buffers.index(HALF),
            buffers,
            barriers,
            done,
            turn,
            HALF,
            sizes,
        )
        done += blocks
        turn += 1


@gluon.jit
def _attend_tile(
    place,
    following,
    tensors,
    strides,
    problem,
    units,
    q_buffer,
    buffers,
    barriers,
    done,
    turn,
    HALF: gl.constexpr,
    sizes: gl.constexpr,
):
    """The tile at `place`; the place of the tile `following`, which is worked out while products are under way."""
    FLAGS: gl.constexpr = sizes[0]
    SPLITS: gl.constexpr = sizes[1]
    GROUP: gl.constexpr = sizes[2]
    HEAD_DIM: gl.constexpr = sizes[3]
    VALUE_DIM: gl.constexpr = sizes[4]
    BLOCK_N: gl.constexpr = sizes[5]
    ROWS: gl.constexpr = sizes[6]
    PARTS: gl.constexpr = 2 * HALF_ROWS // ROWS
    PART: gl.constexpr = HALF if PARTS == 2 else 0
    COLUMNS: gl.constexpr = VALUE_DIM // PARTS
    QUERY_TMA: gl.constexpr = sizes[7]
    CAUSAL: gl.constexpr = FLAGS[0]
    LEFT: gl.constexpr = FLAGS[1]
    RIGHT: gl.constexpr = FLAGS[2]
    SOFTCAP: gl.constexpr = FLAGS[3]
    SINKS: gl.constexpr = FLAGS[4]
    query_ptr, out_ptr, sinks_ptr, _, _, _, _, _ = tensors
    stride_qb, stride_qh, stride_qm = strides
    tile, kv_head, sequence, low, end, first_block, count = place
    batch, query_row, _, q_len, _, origin, query_offset = sequence
    _, _, kv_heads, _, _, _, window_left, window_right = problem
    unit, softcap_in = units
    k_buffers, v_buffers = buffers
    k_ready, v_ready, free, q_ready, q_free = barriers

    dtype: gl.constexpr = query_ptr.dtype.element_ty
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout)
    # 16 bytes a thread, for reading and writing memory.
    query_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    value_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])

    # The tile's rows are (query, head of the group) pairs.
    tile_row = tile * ROWS + HALF * (ROWS - HALF_ROWS)
    queries = q_buffer.reshape((HALF_ROWS, HEAD_DIM))
    if not QUERY_TMA:
        rows = tile_row + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, query_rows))
        d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, query_rows))
        q_ptrs = query_ptr + batch.to(gl.int64) * stride_qb + query_row.to(gl.int64) * stride_qm
        offsets = (kv_head * GROUP + rows % GROUP).to(gl.int64) * stride_qh + (rows // GROUP).to(gl.int64) * stride_qm
        q = gl.load(q_ptrs + offsets[:, None] + d[None, :], mask=(rows // GROUP < q_len)[:, None], other=0.0)
        queries.store(q)
        fence_async_shared()
        mbarrier.arrive(q_ready.index(HALF), count=1)

    # Blocks in the middle are seen whole by every row, counted from the tile's first block.
    first = origin + first_block * BLOCK_N
    position = query_offset + (tile_row + gl.arange(0, HALF_ROWS, layout=score_rows)) // GROUP
    first_position = query_offset + tile_row // GROUP
    last_position = query_offset + gl.minimum((tile_row + HALF_ROWS - 1) // GROUP, q_len - 1)
    limits = (end, window_left, window_right)
    seen = end
    if CAUSAL:
        seen = gl.minimum(seen, first_position + 1)
    if RIGHT:
        seen = gl.minimum(seen, first_position + window_right + 1)
    full_end = gl.minimum(count, gl.maximum(seen - first, 0) // BLOCK_N)
    full_begin = gl.cdiv(low, BLOCK_N) - first_block
    if LEFT:
        full_begin = gl.maximum(full_begin, gl.cdiv(gl.maximum(last_position - window_left - first, 0), BLOCK_N))

    m = gl.full((HALF_ROWS,), float("-inf"), gl.float32, score_rows)
    # Zeros, in the layout of such sums.
    lanes = lane_sums(gl.zeros((HALF_ROWS, BLOCK_N), gl.float32, score_layout))
    acc = gl.zeros((HALF_ROWS, COLUMNS), gl.float32, out_layout)
    m_total = gl.full((HALF_ROWS,), float("-inf"), gl.float32, out_rows)
    weight_total = gl.zeros((HALF_ROWS,), gl.float32, out_rows)
    acc_total = gl.zeros((HALF_ROWS, COLUMNS), gl.float32, out_layout)
    split_end = split_begin(split_of(first_block * BLOCK_N, SPLITS) + 1, SPLITS)
    mbarrier.wait(q_ready.index(HALF), turn & 1)
    if count > 0:
        slot, filled = _slot(done)
        mbarrier.wait(k_ready.index(slot), filled)
        k = k_buffers.index(slot).reshape((BLOCK_N, HEAD_DIM))
        score = gl.zeros((HALF_ROWS, BLOCK_N), gl.float32, score_layout)
        score = warpgroup_mma(queries, k.permute((1, 0)), score, use_acc=False)
        mbarrier.arrive(free.index(slot), count=1)
        if SOFTCAP:
            score = tanh(score * softcap_in)
        if (full_begin > 0) | (full_end < 1):
            score = _masked(score, first, position, limits, FLAGS)
        m, weights, alpha = softmax_step(m, _highest(score), score, unit)
        lanes = add_weights(lanes, gl.convert_layout(alpha, gl.SliceLayout(1, lanes.type.layout)), weights)
        packed = _pack(weights, dtype)
        full_end = gl.maximum(full_end, 1)
        full_begin = gl.minimum(gl.maximum(full_begin, 1), full_end)
        state = (m, lanes, acc, packed, m_total, weight_total, acc_total, split_end)
        fixed = (done, first, first_block, position, limits, (full_begin, full_end), units)
        state = _steps(queries, buffers, barriers, state, count, *fixed, FLAGS, SPLITS, BLOCK_N, PART, PARTS)
        m, lanes, acc, packed, m_total, weight_total, acc_total, split_end = state
        mbarrier.arrive(q_free.index(HALF), count=1)
        slot, filled = _slot(done + count - 1)
        mbarrier.wait(v_ready.index(slot), filled)
        v = v_buffers.index(PARTS * slot + PART).reshape((BLOCK_N, COLUMNS))
        real = end - (first + (count - 1) * BLOCK_N)
        if real < BLOCK_N:
            # A cache may hold anything behind its end, and 0 times NaN is NaN. Groups that share a buffer write the
            # same to it.
            there = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, value_rows)) < real
            values = v.load(value_rows)
            v.store(gl.where(there[:, None], values, gl.zeros_like(values)))
            fence_async_shared()
        p = gl.convert_layout(_unpack(packed, dtype), p_layout)
        acc_token = warpgroup_mma(p, v, acc, is_async=True)
        place = _place_at_once(_tile(following, tensors, problem, sizes))
        acc = warpgroup_mma_wait(0, deps=(acc_token, p))[0]
    else:
        mbarrier.arrive(q_free.index(HALF), count=1)
        place = _tile(following, tensors, problem, sizes)

    weight = _weight(lanes, out_rows)
    m_total, weight_total, acc_total = fold_split(
        m_total, weight_total, acc_total, gl.convert_layout(m, out_rows), weight, acc
    )
    sink = m_total
    if SINKS:
        head = kv_head * GROUP + (tile_row + gl.arange(0, HALF_ROWS, layout=out_rows)) % GROUP
        sink = gl.load(sinks_ptr + head)
    result = finish(m_total, weight_total, acc_total, sink, SINKS).to(dtype)
    rows = tile_row + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, value_rows))
    dv = PART * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, value_rows))
    heads = kv_heads * GROUP
    out_row = batch.to(gl.int64) * q_len + query_row + rows // GROUP
    offsets = (out_row * heads + kv_head * GROUP + rows % GROUP) * VALUE_DIM
    result = gl.convert_layout(result, value_rows)
    gl.store(out_ptr + offsets[:, None] + dv[None, :], result, mask=(rows // GROUP < q_len)[:, None])
    return place


# Sizes that change from call to call are not specialised: one compilation serves every length.
@gluon.jit(
    do_not_specialize=[
        "q_len",
        "kv_len",
        "kv_heads",
        "row_tiles",
        "all_heads",
        "heads_at_once",
        "window_left",
        "window_right",
    ]
)
def hopper_attention_kernel(
    query_ptr,  # (B, Hq, Q, D), or (T, Hq, D) as (1, Hq, T, D) if VARLEN
    query_desc,  # the same as (B, Hkv, Q, GROUP, D); None where half a tile is not a whole number of queries
    key_desc,  # (B, Hkv, KV, D)
    value_desc,  # (B, Hkv, KV, Dv)
    out_ptr,  # (B, Q, Hq, Dv) contiguous
    sinks_ptr,  # (Hq,)
    origin_ptr,  # (B,)
    query_offset_ptr,  # (B,)
    cu_query_ptr,  # (S + 1,)
    cu_key_ptr,  # (S + 1,)
    key_mask_ptr,  # (B, 2 + KV) int32, see key_mask.py
    q_len,
    kv_len,
    kv_heads,
    row_tiles,
    all_heads,  # KV heads of all sequences
    heads_at_once,  # of them, how many share the cache
    unit,  # log2(e) times scale, or times softcap
    softcap_in,  # scale / softcap
    window_left,
    window_right,
    stride_qb,
    stride_qh,
    stride_qm,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW_LEFT: gl.constexpr,
    WINDOW_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    ORIGIN: gl.constexpr,
    QUERY_OFFSET: gl.constexpr,
    VARLEN: gl.constexpr,
    KEY_MASK: gl.constexpr,
    SPLITS: gl.constexpr,  # contract.SPLIT_STRETCHES
    ROWS: gl.constexpr,  # 128: each group of warps takes half of a tile's rows. 64: half of the values' columns
    num_warps: gl.constexpr,
):
    BLOCK_N: gl.constexpr = key_desc.block_type.shape[2]
    HEAD_DIM: gl.constexpr = key_desc.block_type.shape[3]
    PARTS: gl.constexpr = 2 * HALF_ROWS // ROWS
    COLUMNS: gl.constexpr = value_desc.block_type.shape[3]
    VALUE_DIM: gl.constexpr = PARTS * COLUMNS
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    QUERY_TMA: gl.constexpr = query_desc is not None
    k_buffers = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_N, HEAD_DIM], key_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [2 * PARTS, 1, 1, BLOCK_N, COLUMNS], value_desc.layout)
    if QUERY_TMA:
        q_buffers = gl.allocate_shared_memory(dtype, [2] + query_desc.block_type.shape, query_desc.layout)
    else:
        q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_ROWS, HEAD_DIM], dtype)
        q_buffers = gl.allocate_shared_memory(dtype, [2, HALF_ROWS, HEAD_DIM], q_layout)
    # All of them are in use until the last tile: the memory of a barrier that is not is given to other data, and a GPU
    # that stops this kernel for another process was seen to change it there.
    k_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    fence_async_shared()

    # gl.to_tensor: integers that are 1 arrive as constants, which cannot be handed to other warps.
    tensors = (query_ptr, out_ptr, sinks_ptr, origin_ptr, query_offset_ptr, cu_query_ptr, cu_key_ptr, key_mask_ptr)
    strides = (gl.to_tensor(stride_qb), gl.to_tensor(stride_qh), gl.to_tensor(stride_qm))
    problem = (
        gl.to_tensor(q_len),
        gl.to_tensor(kv_len),
        gl.to_tensor(kv_heads),
        gl.to_tensor(row_tiles),
        gl.to_tensor(all_heads),
        gl.to_tensor(heads_at_once),
        gl.to_tensor(window_left),
        gl.to_tensor(window_right),
    )
    units = (gl.to_tensor(unit), gl.to_tensor(softcap_in))
    buffers = (k_buffers, v_buffers)
    barriers = (k_ready, v_ready, free, q_ready, q_free)
    descs = (query_desc, key_desc, value_desc)
    programs = gl.num_programs(0)  # order-free: it deals out whole tiles
    tiles = gl.cdiv(row_tiles * all_heads, programs) * programs
    FLAGS: gl.constexpr = (CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, SINKS, ORIGIN, QUERY_OFFSET, VARLEN, KEY_MASK)
    sizes: gl.constexpr = (FLAGS, SPLITS, GROUP, HEAD_DIM, VALUE_DIM, BLOCK_N, ROWS, QUERY_TMA)
    gl.warp_specialize(
        [
            (_attend, (tensors, strides, problem, units, q_buffers, buffers, barriers, tiles, 0, sizes)),
            (_attend, (tensors, strides, problem, units, q_buffers, buffers, barriers, tiles, 1, sizes)),
            (_load_blocks, (descs, tensors, problem, q_buffers, buffers, barriers, tiles, sizes)),
        ],
        [4, 1],
        [240, 24],
    )
