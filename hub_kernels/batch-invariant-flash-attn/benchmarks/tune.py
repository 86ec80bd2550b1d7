"""Time what could serve a case of the benchmark: every tile, split and grid beside the plan's choice and cuDNN.

    python hub_kernels/batch-invariant-flash-attn/benchmarks/tune.py decode --out decode.json

For whoever edits tiles.py or plan.py: a line for each case, fastest first, and all times as JSON. Bits are compared by
the GPU tests, for every tile, and not here. Compiles in parallel processes first. Needs a GPU and hf_batchinv.
"""

import argparse
import importlib
import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[3]))

from hf_batchinv import hub  # noqa: E402
from hf_batchinv.bench import cases, timing  # noqa: E402

# Choices with more programs than this are left out: they are many and slow.
MOST_PROGRAMS = 8000
SECTIONS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def modules() -> tuple:
    """The package's modules _launch, plan and contract."""
    package = hub.load("flash-attn").__name__
    return tuple(importlib.import_module(f"{package}.{name}") for name in ("_launch", "plan", "contract"))


def choices(case: cases.AttentionCase, gpu) -> Iterator[tuple[str, object, bool | int, tuple[int, int] | None]]:
    """(name, tile, split, grid) of all that may serve a plain causal case; grid: for the Hopper kernel, else None."""
    _, plan, contract = modules()
    rows, heads = case.q_len * case.heads // case.kv_heads, case.batch * case.kv_heads
    shape = dict(head_dim=case.head_dim, value_head_dim=case.head_dim, dtype=getattr(torch, case.dtype))
    splits = contract.split_of(case.kv_len - 1) + 1
    for tile in plan.all_tiles(**shape, gpu=gpu):
        tiles = -(-rows // tile.rows) * heads
        kind = "hopper" if tile.hopper else "decode" if tile.decode else "plain"
        name = f"{kind} {tile.rows}x{tile.warps}x{tile.stages}"
        if tile.hopper:
            for side_by_side in sorted({min(heads, size) for size in (*SECTIONS, heads)} if rows > 64 else ()):
                for programs in sorted({min(tiles, gpu.multiprocessors), tiles}):
                    yield f"{name} {programs}/{side_by_side}", tile, False, (programs, side_by_side)
            continue
        if rows > tile.rows and (tile.decode or case.q_len > 1 and plan.all_tiles(**shape, gpu=gpu)[-1].hopper):
            continue  # it cannot, or the Hopper kernel is for it
        yield f"{name} whole", tile, False, None
        if 1 < splits and tiles * splits <= MOST_PROGRAMS:
            yield f"{name} splits", tile, True, None
        keys = max(512, contract.split_multiple(case.kv_len))
        while tile.decode and keys < case.kv_len:
            if tiles * -(-case.kv_len // keys) <= MOST_PROGRAMS:
                yield f"{name} {keys} keys", tile, keys, None
            keys *= 2


def call_of(query, key, value, tile=None, split=None, grid=None):
    """The function of (query, key, value) with these choices, the plan's where they are None."""
    launch, plan, _ = modules()
    chosen, plan.hopper_grid = plan.hopper_grid, (lambda **_: grid) if grid else plan.hopper_grid
    try:
        settings = (True, query.shape[-1] ** -0.5, -1, -1, 0.0)
        call = launch.attention_call(query, key, value, *[None] * 5, *settings, tile=tile, split=split)
    finally:
        plan.hopper_grid = chosen
    return lambda query, key, value: call(query, key, value, *[None] * 5)


def compile_one(job: tuple[cases.AttentionCase, object, bool | int]) -> None:
    case, tile, split = job
    shapes = (case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len)
    states = [torch.randn(1, h, n, case.head_dim, device="cuda", dtype=getattr(torch, case.dtype)) for h, n in shapes]
    call_of(*states, tile, split)(*states)
    torch.cuda.synchronize()


def measure(case: cases.AttentionCase, gpu, most_gb: float) -> dict[str, float] | None:
    """Microseconds by name; None where keys and values take more than most_gb."""
    bytes_each = 4 * case.batch * case.kv_heads * case.kv_len * case.head_dim
    if bytes_each > most_gb * 1e9:
        return None
    dtype, sets = getattr(torch, case.dtype), timing.rotation(bytes_each, "cuda")
    query = torch.randn(case.batch, case.heads, case.q_len, case.head_dim, device="cuda", dtype=dtype)
    keys = (case.batch, case.kv_heads, case.kv_len, case.head_dim)
    caches = torch.randn(sets, 2, *keys, device="cuda", dtype=dtype)
    flops = 4 * case.batch * case.heads * case.q_len * case.kv_len * case.head_dim
    count = timing.turns(sets, bytes_each, flops)

    def time(call) -> float:
        return timing.graph_time(timing.rotated(lambda i: call(query, *caches[i]), sets, count), replays=3)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        causal = case.q_len > 1
        found = {
            "cudnn": time(lambda *states: F.scaled_dot_product_attention(*states, is_causal=causal, enable_gqa=True))
        }
    for name, tile, split, grid in choices(case, gpu):
        found[name] = time(call_of(query, *caches[0], tile, split, grid))
    return found | {"plan": time(call_of(query, *caches[0]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", choices=("decode", "prefill"))
    parser.add_argument("--heads", help="only these heads, such as 32/8x128")
    parser.add_argument("--most-gb", type=float, default=5.0, help="leave out cases with larger keys and values")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written after every case")
    asked = parser.parse_args()
    gpu = modules()[0].gpu_of(torch.device("cuda", torch.cuda.current_device()))
    wanted = [
        case
        for (*_, is_decode), unit in ((unit[0].unit, unit) for unit in cases.units("attention"))
        if is_decode == (asked.case == "decode")
        for case in unit
        if case.case == asked.case and asked.heads in (None, f"{case.heads}/{case.kv_heads}x{case.head_dim}")
    ]
    jobs = {}
    for case in wanted:
        for _, tile, split, _ in choices(case, gpu):
            jobs.setdefault((case.unit, tile, type(split), bool(split)), (case, tile, split))
    with ProcessPoolExecutor(asked.processes, multiprocessing.get_context("spawn")) as pool:
        for _ in tqdm(pool.map(compile_one, jobs.values()), total=len(jobs), desc="compile"):
            pass
    rows = []
    for case in wanted:
        if (found := measure(case, gpu, asked.most_gb)) is not None:
            rows.append(asdict(case) | {"us": found})
            asked.out.write_text(json.dumps({"env": timing.environment(), "rows": rows}, indent=1))
            what = f"{case.heads}/{case.kv_heads}x{case.head_dim} {case.batch} x {case.kv_len}"
            print(what, ", ".join(f"{name} {us:.1f}" for name, us in sorted(found.items(), key=lambda item: item[1])))


if __name__ == "__main__":
    main()
