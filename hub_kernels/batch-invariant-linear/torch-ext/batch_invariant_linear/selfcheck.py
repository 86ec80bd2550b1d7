"""Do the tiles, and cuBLASLt, give equal bits on this GPU? Asked once, remembered on disk.

Tiles may follow the number of rows only because all of them give the same bits. That was tested at length on the
machines in VERIFIED; anywhere else the first use compares all tiles, and where they differ one tile serves everything.
The data has exact results of 0 (half of K repeats the other half with the weight's sign turned, in another order), so
an output is rounding noise alone and any change of order shows, also after rounding to 16 bits. Its numbers go from 1
to 1000: sums of numbers of one size are often exact where K is short, and smaller ones leave noise that float16 drops.
"""

import functools

import torch

from . import _verdicts, contract
from ._verdicts import cache_path

__all__ = ["admits", "cache_path", "cancelling", "report", "tiles_agree"]

# (compute capability, Triton's release, contract.NUMERICS_VERSION) whose tiles the whole GPU test suite has compared.
VERIFIED = {((9, 0), "3.6", 4)}
# Ragged on purpose, and more rows than the tallest tile; K is a multiple of neither 64 nor 512. The first K is one that
# float32 has tiles of its own for.
_SHAPES = ((70, 296, 200), (1, 296, 1096), (40, 520, 680), (333, 1304, 1480))
_FEWEST_OUTPUTS = 1 << 15  # that a configuration of cuBLASLt is judged by


def cancelling(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (rows, k) and weight (n, k) whose exact products are 0."""
    generator = torch.Generator(device).manual_seed(rows * 31 + n * 7 + k + 1009 * seed)
    half = k // 2
    order = torch.randperm(half, generator=generator, device=device)

    def numbers(count: int) -> torch.Tensor:
        size = torch.randint(11, (count, half), generator=generator, device=device)
        return (torch.randn(count, half, generator=generator, device=device) * torch.exp2(size)).to(dtype)

    x, weight = numbers(rows), numbers(n)
    rest = k - 2 * half
    pieces = ([x, x[:, order], x.new_zeros(rows, rest)], [weight, -weight[:, order], weight.new_zeros(n, rest)])
    return torch.cat(pieces[0], 1), torch.cat(pieces[1], 1)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


@functools.cache
def _machine(device: torch.device) -> tuple[tuple[int, int], str, int]:
    import triton

    release = ".".join(triton.__version__.split(".")[:2])
    return torch.cuda.get_device_capability(device), release, contract.NUMERICS_VERSION


def _tiles_key(dtype: torch.dtype, device: torch.device) -> str:
    (major, minor), triton, version = _machine(device)
    return f"linear tiles {str(dtype)[6:]} sm_{major}{minor} triton {triton} numerics {version}"


def tiles_agree(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether every tile for a dtype gives the same bits on this GPU. Runs the check if nobody has yet.

    Raises RuntimeError if it would have to run while a CUDA graph is captured.
    """
    if device.type != "cuda" or _machine(device) in VERIFIED:
        return True
    key = _tiles_key(dtype, device)
    if _verdicts.get(key) is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"linear: expected the tiles for {dtype} to be checked before a CUDA graph is captured, got a first "
                "call inside one; call the layer once before the capture"
            )
        differing = _differing_tiles(dtype, device)
        detail = f"{len(differing)} tiles differ: {differing}" if differing else "all tiles agree"
        _verdicts.put(key, not differing, detail)
    return _verdicts.get(key)


def _differing_tiles(dtype: torch.dtype, device: torch.device) -> list[str]:
    from . import _launch, plan  # imports triton

    differing = []
    for rows, n, k in _SHAPES:
        x, weight = cancelling(rows, n, k, dtype, device)
        splits = contract.linear_contract(n=n, k=k, dtype=dtype).splits(k)
        want = _launch.launch_linear(x, weight, None, tile=plan.only_tile(k, dtype))
        for tile in plan.all_tiles(k, dtype, _launch.gpu_of(device)):
            if not _launch.serves(tile, x, weight):
                continue
            for apart in (False, True) if splits > 1 else (False,):
                if not _same_bits(_launch.launch_linear(x, weight, None, tile=tile, apart=apart), want):
                    differing.append(f"{tile}{', splits apart' if apart else ''} at {rows}x{n}x{k}")
    return differing


def admits(product, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a cuBLASLt product (`_cublaslt.Product`) has been seen to give our bits for this weight shape.

    Runs the check if nobody has yet, unless a CUDA graph is being captured: then the answer is no for now.
    """
    if product.admitted is None:
        from . import _cublaslt

        n, k = weight.shape
        key = (
            f"linear cublaslt {_cublaslt.version()} {torch.cuda.get_device_name(x.device)} numerics "
            f"{contract.NUMERICS_VERSION} {str(x.dtype)[6:]} {n}x{k}{' bias' if bias is not None else ''} "
            f"{product.configuration}"
        )
        if _verdicts.get(key) is None:
            if torch.cuda.is_current_stream_capturing():
                return False
            _verdicts.put(key, *_compare_with_triton(product.algorithm, x, weight, bias is not None))
        product.admitted = _verdicts.get(key)
    return product.admitted


def _compare_with_triton(algorithm, like_x: torch.Tensor, like_weight: torch.Tensor, bias: bool) -> tuple[bool, str]:
    """One algorithm on cancelling data of these shapes, cut down where they are large: only K orders the sum."""
    from . import _cublaslt, _launch, plan  # imports triton

    (n, k), dtype, device = like_weight.shape, like_x.dtype, like_x.device
    rows = min(like_x.shape[0], 1024)
    n = n if n <= 8192 else 4096 + n % 4096
    # As small as the noise, so that it does not hide it; not drawn, since the user's random numbers are his.
    shift = (0.1 * torch.linspace(-1, 1, n, device=device)).to(dtype) if bias else None
    y = torch.empty(rows, n, dtype=dtype, device=device)
    try:
        product = _cublaslt.Product(rows, n, k, dtype, k, k, bias, algorithm)
    except _cublaslt.Refused as error:
        return False, f"not checked at {rows} rows of {n} weights: {error}"
    same, draws = True, min(32, -(-_FEWEST_OUTPUTS // y.numel()))
    for seed in range(draws):
        x, weight = cancelling(rows, n, k, dtype, device, seed)
        product(x, weight, shift, y)
        same = same and _same_bits(y, _launch.launch_linear(x, weight, shift, tile=plan.only_tile(k, dtype)))
    return same, f"{'equal' if same else 'other'} bits at {rows} rows, {draws} draws"


def report() -> list[dict[str, str]]:
    """What is known here: rows of name, status ("verified", "passed", "failed" or "not run") and detail."""
    rows = []
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        for dtype in contract.DTYPES:
            name = f"linear, tiles for {str(dtype)[6:]}"
            if _machine(device) in VERIFIED:
                rows.append({"name": name, "status": "verified", "detail": "by the GPU test suite"})
                continue
            passed = _verdicts.get(_tiles_key(dtype, device))
            status = {None: "not run", True: "passed", False: "failed"}[passed]
            rows.append({"name": name, "status": status, "detail": "runs at the first call"})
    verdicts = [verdict["passed"] for verdict in _verdicts.matching("linear cublaslt ").values()]
    detail = f"{sum(verdicts)} of {len(verdicts)} configurations give our bits and are used"
    rows.append({"name": "linear, cuBLASLt", "status": "passed" if verdicts else "not run", "detail": detail})
    return rows
