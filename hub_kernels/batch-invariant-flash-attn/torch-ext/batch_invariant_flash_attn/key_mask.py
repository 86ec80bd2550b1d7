"""A padding mask in the form that the kernels read: once for all layers, without waiting for the GPU.

Most padding is a run of real keys with nothing missing in it. Two numbers say that, so a row without holes is as fast
as one without padding, and only rows with holes read their keys one by one.
"""

import torch

from ._dispatch import call_on, kind_of, remember, runs_directly

# Columns in front of the keys: index behind the last key, and whether a key before it is missing.
HEADER = 2


def prepare_key_mask(key_mask: torch.Tensor, origin: torch.Tensor | None = None) -> torch.Tensor:
    """Prepare (B, KV) bool, True for real keys, for any number of calls with this `origin` (B,) or None: (B, 2 + KV).

    int32, also the keys: an 8-bit load makes Triton order the operands of a small tile's products otherwise, and with
    them the sum. On the CPU there is nothing to prepare, and key_mask comes back.
    """
    if key_mask.device.type == "cpu":
        return key_mask
    if not (runs_directly(key_mask, origin) and key_mask.is_cuda):
        return prepared(key_mask, origin)
    kinds = (kind_of(key_mask), kind_of(origin))
    call = _gpu_calls.get(kinds)
    if call is None:
        from ._launch import key_mask_call  # imports triton

        call = remember(_gpu_calls, kinds, key_mask_call(key_mask, origin))
    return call_on(key_mask, call, (key_mask, origin))


# What calls on a GPU come to, by all that they depend on but addresses and values.
_gpu_calls: dict = {}


def prepared(key_mask: torch.Tensor, origin: torch.Tensor | None) -> torch.Tensor:
    """`prepare_key_mask` in torch operators, on any device."""
    rows, kv_len = key_mask.shape
    if kv_len == 0:
        return key_mask.new_zeros(rows, HEADER, dtype=torch.int32)
    keys = key_mask.to(torch.int32)
    if origin is not None:
        keys = keys * (torch.arange(kv_len, device=keys.device) >= origin[:, None])
    begin = 0 if origin is None else origin.clamp(min=0)
    end = kv_len - keys.flip(1).argmax(1)  # KV in a row without keys, which then counts as one with holes
    holes = keys.sum(1) < end - begin
    return torch.cat([end[:, None].to(torch.int32), holes[:, None].to(torch.int32), keys], 1)


def is_prepared(key_mask: torch.Tensor) -> bool:
    return key_mask.dtype == torch.int32
