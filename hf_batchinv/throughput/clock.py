"""Time and memory of a device."""

import gc
import time

import torch


class Clock:
    """Marks in the work of a device: events in a GPU's stream, which cost the host no wait, or the time of a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"

    def mark(self) -> torch.cuda.Event | float:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        """The time between two marks; waits for the second."""
        if not self.on_gpu:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def forget_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """The most memory that torch's tensors held since `forget_peak`, weights included; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None

    def free(self) -> None:
        """Give memory that nothing holds any more back to the GPU."""
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
