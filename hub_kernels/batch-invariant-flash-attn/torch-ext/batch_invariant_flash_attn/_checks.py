"""Argument checks: every refusal is one sentence with what was expected, what came and what to do."""

import math

import torch

from .contract import DTYPES, HEAD_DIMS
from .key_mask import HEADER, is_prepared

DEVICES = ("cpu", "cuda", "xpu", "meta")
MASK_DTYPES = (torch.bool, *DTYPES)
# Plain numbers: torch.compile cannot ask whether a symbolic size is in a range.
_LEAST, _MOST, _STEP = HEAD_DIMS.start, HEAD_DIMS[-1], HEAD_DIMS.step


def check_operands(op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, heads_dim: int) -> None:
    """Raise unless the three tensors agree in everything but lengths; `heads_dim` is where the heads are."""
    rank = query.dim()
    if query.dtype not in DTYPES:
        raise TypeError(
            f"{op}: expected query of dtype float32, float16 or bfloat16, got {query.dtype}; convert or dequantise it"
        )
    if query.device.type not in DEVICES:
        raise ValueError(f"{op}: expected query on a CPU, CUDA or XPU device, got {query.device}; move it to one")
    for name, other in (("key", key), ("value", value)):
        if other.dtype is not query.dtype:
            raise TypeError(
                f"{op}: expected {name} of the dtype of query, {query.dtype}, got {other.dtype}; convert one of the two"
            )
        if other.device != query.device:
            raise ValueError(
                f"{op}: expected {name} on the device of query, {query.device}, got {other.device}; move one of the two"
            )
        if other.dim() != rank:
            raise ValueError(
                f"{op}: expected {name} with {rank} dimensions, got shape {tuple(other.shape)}; add or remove some"
            )
    for name, size in (("head_dim", query.shape[-1]), ("value head_dim", value.shape[-1])):
        if size % _STEP or not _LEAST <= size <= _MOST:
            raise ValueError(
                f"{op}: expected {name} to be a multiple of {_STEP} in {_LEAST}..{_MOST}, got {size}; "
                "pad the heads with zeros"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{op}: expected key with the head_dim of query, {query.shape[-1]}, got {key.shape[-1]}; "
            "pass heads of one size"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{op}: expected value to have the shape of key but for its head_dim, {tuple(key.shape[:-1])}, "
            f"got {tuple(value.shape[:-1])}; pass the keys and values of one cache"
        )
    heads, kv_heads = query.shape[heads_dim], key.shape[heads_dim]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{op}: expected the number of query heads to be a multiple of that of key heads, "
            f"got {heads} and {kv_heads}; check the order of the dimensions"
        )


def check_scalars(op: str, scale: float | None, window: tuple[int, int], softcap: float, head_dim: int) -> float:
    """Return the scale to use."""
    scale = head_dim**-0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"{op}: expected scale to be positive and finite, got {scale}; pass None for 1/sqrt(head_dim)")
    if len(window) != 2 or any(int(side) != side or side < -1 for side in window):
        raise ValueError(
            f"{op}: expected window to be two integers of at least -1, got {tuple(window)}; use -1 for no limit"
        )
    if not 0 <= softcap < math.inf:
        raise ValueError(f"{op}: expected softcap to be 0 or positive and finite, got {softcap}; pass 0.0 for none")
    return scale


def check_sinks(op: str, sinks: torch.Tensor | None, query: torch.Tensor, heads: int) -> None:
    """sinks: (Hq,), any floating dtype."""
    if sinks is None:
        return
    if sinks.shape != (heads,) or sinks.dtype not in DTYPES or sinks.device != query.device:
        raise ValueError(
            f"{op}: expected sinks of shape ({heads},), a floating dtype and on {query.device}, "
            f"got {tuple(sinks.shape)}, {sinks.dtype}, {sinks.device}; pass one logit per query head"
        )


def check_integers(
    op: str, name: str, tensor: torch.Tensor | None, count: int, device: torch.device, each: str
) -> torch.Tensor | None:
    """Return an integer tensor (count,), one number for `each`, as int32 and contiguous."""
    if tensor is None:
        return None
    if tensor.shape != (count,) or tensor.dtype not in (torch.int32, torch.int64) or tensor.device != device:
        raise ValueError(
            f"{op}: expected {name} to be an integer tensor of shape ({count},) on {device}, "
            f"got {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}; pass one int32 per {each}"
        )
    return as_int32(tensor)


def as_int32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of integers, or none, as the kernels take it."""
    return None if tensor is None else tensor.to(torch.int32).contiguous()


def check_masks(
    op: str, mask: torch.Tensor | None, key_mask: torch.Tensor | None, query: torch.Tensor, kv_len: int
) -> None:
    """mask: (B|1, Hq|1, Q|1, KV) bool or floating; key_mask: (B, KV) bool, or prepared."""
    batch, heads, q_len, _ = query.shape
    if mask is not None:
        if mask.dtype not in MASK_DTYPES or mask.device != query.device:
            raise TypeError(
                f"{op}: expected mask to be bool, float32, float16 or bfloat16 on {query.device}, "
                f"got {mask.dtype} on {mask.device}; convert it (bool: True means attend)"
            )
        expected = (batch, heads, q_len)
        fits = mask.dim() == 4 and mask.shape[3] == kv_len
        if not fits or any(got not in (1, want) for got, want in zip(mask.shape[:3], expected, strict=True)):
            raise ValueError(
                f"{op}: expected mask broadcastable to {(*expected, kv_len)} with a full last dimension, "
                f"got {tuple(mask.shape)}; give it 4 dimensions and the length of the keys"
            )
    if key_mask is not None:
        prepared = is_prepared(key_mask)
        if not (prepared or key_mask.dtype == torch.bool) or key_mask.device != query.device:
            raise TypeError(
                f"{op}: expected key_mask to be bool on {query.device}, got {key_mask.dtype} on {key_mask.device}; "
                "convert it (True means a real key)"
            )
        expected = (batch, HEADER + kv_len if prepared else kv_len)
        if key_mask.shape != expected:
            raise ValueError(
                f"{op}: expected key_mask of shape {expected}, got {tuple(key_mask.shape)}; give it one column per key"
            )


def check_cu_seqlens(op: str, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, query: torch.Tensor) -> None:
    """Both int32 (S + 1,), contiguous or not; their contents are not read (that would wait for the GPU)."""
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        fits = tensor.dim() == 1 and tensor.numel() >= 1 and tensor.dtype == torch.int32
        if not fits or tensor.device != query.device:
            raise ValueError(
                f"{op}: expected {name} to be int32 of shape (sequences + 1,) on {query.device}, "
                f"got {tensor.dtype}, {tuple(tensor.shape)}, {tensor.device}; pass cumulative lengths that start at 0"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"{op}: expected cu_seqlens_q and cu_seqlens_k of one length, got {cu_seqlens_q.numel()} and "
            f"{cu_seqlens_k.numel()}; describe the same sequences in both"
        )


def no_backward(op: str):
    """An autograd formula that raises: the ops have no backward, and the reason should be readable."""

    def backward(context, *gradients):
        raise RuntimeError(
            f"{op} has no backward, got a loss that needs its gradient; train with the stock layer, or run the "
            "batch-invariant one under torch.no_grad()"
        )

    return backward
