"""`key_mask.prepared` in one launch instead of fourteen."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["kv_len", "stride_b"])
def key_mask_kernel(
    key_mask_ptr,  # (B, KV) bool
    origin_ptr,  # (B,) int32
    out_ptr,  # (B, 2 + KV) int32, see key_mask.py
    kv_len,
    stride_b,
    stride_k,
    ORIGIN: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin = 0
    if ORIGIN:
        begin = tl.load(origin_ptr + row)
    out_ptr += row * (kv_len + HEADER)
    end = 0
    count = 0
    for first in range(0, kv_len, BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < kv_len
        key = tl.load(key_mask_ptr + row * stride_b + j.to(tl.int64) * stride_k, mask=inside, other=0).to(tl.int32)
        key = tl.where(j >= begin, key, 0)
        tl.store(out_ptr + HEADER + j, key, mask=inside)
        end = tl.maximum(end, tl.max(key * (j + 1)))
        count += tl.sum(key)  # order-free: integers
    end = tl.where(count == 0, kv_len, end)
    tl.store(out_ptr, end)
    tl.store(out_ptr + 1, (count < end - tl.maximum(begin, 0)).to(tl.int32))
