"""The clock, the machine, and how fast it copies and multiplies."""

import datetime
import importlib.metadata
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

# Operands rotate over so many bytes more than the L2 cache holds.
BEYOND_L2 = 200_000_000
MOST_SETS = 256
# A graph holds calls worth about so much work, so that its own launch does not count.
GRAPH_FLOPS, GRAPH_BYTES, MOST_TURNS = 1e12, 1e9, 20


def driver_version() -> str | None:
    """The version of the NVIDIA driver, None where nvidia-smi is missing or finds no device."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.split()[0]


def environment(device: str = "cuda") -> dict[str, str | int | None]:
    """The machine and software of a measurement, for the head of a result file; device is "cuda" or "cpu"."""
    versions = {name: _version(name) for name in ("torch", "triton", "transformers")}
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    if device == "cpu":
        machine = {"device": f"CPU ({platform.machine()})", "threads": torch.get_num_threads()}
        return machine | {"driver": None, "cuda": None} | versions | {"date": date}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        **versions,
        "date": date,
    }


def _version(name: str) -> str | None:
    """The version of an installed package as it calls itself (torch with its build), None if it is missing."""
    if name == "torch":
        return torch.__version__
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def graph_time(calls: Sequence[Callable[[], object]], replays: int = 5) -> float:
    """Median microseconds a call, of a CUDA graph that holds all of them once.

    Give each call inputs of its own, so that together they exceed the L2 cache.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def rotation(bytes_each: int, device: str) -> int:
    """How many sets of inputs to rotate so that none is in the L2 cache when its turn comes."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
    return min(MOST_SETS, (l2 + BEYOND_L2) // bytes_each + 1)


def turns(sets: int, nbytes: int, flops: int) -> int:
    """How many calls of so much work a graph holds: each set of inputs once, and more of small ones."""
    enough = min(MOST_TURNS, GRAPH_BYTES // max(nbytes, 1), GRAPH_FLOPS // max(flops, 1))
    return max(sets, 2, int(enough))


def rotated(call: Callable[[int], object], sets: int, count: int) -> list[Callable[[], object]]:
    """`count` calls of call(i), where i walks through the sets."""
    return [partial(call, i % sets) for i in range(count)]


@dataclass(frozen=True)
class Rates:
    """What this GPU reaches: bytes copied (read and written), and stock matrix products."""

    copy_tb_s: float
    matmul_tflop_s: float
    matmul_float32_tflop_s: float

    def floor_us(self, nbytes: int, flops: int, dtype: str) -> float:
        """The time that so many bytes and flops take at least."""
        matmul = self.matmul_float32_tflop_s if dtype == "float32" else self.matmul_tflop_s
        return max(nbytes / self.copy_tb_s, flops / matmul) / 1e6


def measure_rates(device: str = "cuda") -> Rates:
    """Copy 1 GiB, and multiply 8192 x 8192 in bfloat16 (4096 x 4096 in float32, without TF32).

    The copy flips bits, so that a kernel does it: a plain copy in a graph goes another, slower way.
    """
    source = torch.empty(2**28, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy_us = graph_time(rotated(lambda _: torch.bitwise_not(source, out=target), 1, 4))

    def matmul_us(size: int, dtype: torch.dtype) -> float:
        x, weight = torch.randn(2, size, size, device=device, dtype=dtype)
        return graph_time(rotated(lambda _: F.linear(x, weight), 1, 4))

    return Rates(
        copy_tb_s=2 * 2**30 / copy_us / 1e6,
        matmul_tflop_s=2 * 8192**3 / matmul_us(8192, torch.bfloat16) / 1e6,
        matmul_float32_tflop_s=2 * 4096**3 / matmul_us(4096, torch.float32) / 1e6,
    )
