"""What the speed scripts of the kernel packages share: where a number was measured, and how."""

import datetime
import importlib.metadata
import statistics
import subprocess
from collections.abc import Callable, Sequence

import torch


def environment() -> dict[str, str | int]:
    """The machine and software of a measurement, for the head of a result file."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": driver.stdout.split()[0],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


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


def copies(bytes_each: int, at_most: int = 40) -> int:
    """How many sets of inputs to rotate so that none is in the L2 cache when its turn comes."""
    return max(1, min(at_most, 300_000_000 // bytes_each + 1))
