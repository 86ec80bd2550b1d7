"""Do the tiles of attention give equal bits on this GPU? Asked once per head shape, remembered on disk.

Tiles may follow the number of queries only because all of them give the same bits. That was tested at length on the
machines in VERIFIED; anywhere else the first use of a head shape compares all tiles, with and without a program per
split, and where they differ one tile without shortcuts serves everything.
"""

import functools

import torch

from . import _verdicts, contract
from ._verdicts import cache_path

__all__ = ["cache_path", "report", "tiles_agree"]

# (compute capability, Triton's release, contract.NUMERICS_VERSION) whose tiles the whole GPU test suite has compared.
VERIFIED = {((9, 0), "3.6", 2)}


@functools.cache
def _machine(device: torch.device) -> tuple[tuple[int, int], str, int]:
    import triton

    release = ".".join(triton.__version__.split(".")[:2])
    return torch.cuda.get_device_capability(device), release, contract.NUMERICS_VERSION


def _key(head_dim: int, value_head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    (major, minor), triton, version = _machine(device)
    return (
        f"attention tiles {head_dim} {value_head_dim} {str(dtype)[6:]} sm_{major}{minor} triton {triton} "
        f"numerics {version}"
    )


def tiles_agree(*, head_dim: int, value_head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether every tile for a head shape gives the same bits on this GPU. Runs the check if nobody has yet.

    Raises RuntimeError if it would have to run while a CUDA graph is captured.
    """
    if device.type != "cuda" or _machine(device) in VERIFIED:
        return True
    key = _key(head_dim, value_head_dim, dtype, device)
    if _verdicts.get(key) is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"attention: expected the tiles for heads of {head_dim} to be checked before a CUDA graph is captured, "
                "got a first call inside one; run the model once before the capture"
            )
        differing = _differing_tiles(head_dim, value_head_dim, dtype, device)
        detail = f"{len(differing)} differ: {differing}" if differing else "all tiles agree"
        _verdicts.put(key, not differing, detail)
    return _verdicts.get(key)


def _differing_tiles(head_dim: int, value_head_dim: int, dtype: torch.dtype, device: torch.device) -> list[str]:
    from . import _launch, plan  # imports triton

    generator = torch.Generator(device).manual_seed(0)
    shape = dict(head_dim=head_dim, value_head_dim=value_head_dim, dtype=dtype)

    def states(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(2, heads, length, dim, generator=generator, device=device).to(dtype)

    # Values in pairs of opposite sign: what is left of a sum is small, and its rounding shows.
    query, key, half = states(4, 300, head_dim), states(2, 1100, head_dim), states(2, 550, value_head_dim)
    value = torch.cat([half, -half], dim=2)
    origin = torch.tensor([0, 37], dtype=torch.int32, device=device)
    call = dict(causal=True, scale=head_dim**-0.5, window_left=-1, window_right=-1, softcap=0.0, sinks=None)
    call |= dict(mask=None, key_mask=None, origin=origin, query_offset=None)
    want = _launch.launch_attention(query, key, value, **call, tile=plan.only_tile(**shape), split=False)
    differing = []
    for tile in plan.all_tiles(**shape, gpu=_launch.gpu_of(device)):
        for split in (False,) if tile.hopper else (False, True):
            for last in (1,) if tile.decode else (1, query.shape[2]):
                got = _launch.launch_attention(query[:, :, -last:], key, value, **call, tile=tile, split=split)
                if not _same_bits(got, want[:, -last:]):
                    differing.append(f"{tile} split {split}, {last} queries")
    return differing


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def report() -> list[dict[str, str]]:
    """What is known here: rows of name, status ("verified", "passed", "failed" or "not run") and detail."""
    if not torch.cuda.is_available():
        return []
    device = torch.device("cuda", torch.cuda.current_device())
    if _machine(device) in VERIFIED:
        return [{"name": "attention, tiles", "status": "verified", "detail": "by the GPU test suite"}]
    (major, minor), triton, version = _machine(device)
    here = f"sm_{major}{minor} triton {triton} numerics {version}"
    rows = [
        {"name": key, "status": "passed" if verdict["passed"] else "failed", "detail": verdict["detail"]}
        for key, verdict in _verdicts.matching("attention tiles ").items()
        if key.endswith(here)
    ]
    return rows or [{"name": "attention, tiles", "status": "not run", "detail": "runs at the first call"}]
