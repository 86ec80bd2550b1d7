"""Which operations the time of a setting goes to, from torch's profiler."""

import os
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from transformers import LogitsProcessor

from .clock import Clock
from .settings import Setting

MOST_STEPS = 4  # of decoding
MOST_ROWS, MOST_LETTERS = 15, 120
# A second profile after CUDA graphs have run may crash otherwise; torch sets the same where it knows of the graphs.
CUPTI = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}


class Window(LogitsProcessor):
    """Runs the profiler over some steps in the middle of `generate`."""

    def __init__(self, profiler: torch.profiler.profile, new_tokens: int, clock: Clock):
        self.profiler, self.clock = profiler, clock
        self.first = new_tokens // 2
        self.steps = min(MOST_STEPS, new_tokens - 1 - self.first)
        self.step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.step == self.first:
            self.clock.wait()
            self.profiler.start()
            self.begin = self.clock.mark()
        elif self.step == self.first + self.steps:
            self.end = self.clock.mark()
            self.clock.wait()
            self.profiler.stop()
        self.step += 1
        return scores


def profile(call: Callable[..., object], setting: Setting, clock: Clock) -> dict:
    """{steps, wall_us, busy_us, rows}, the largest first; `share` is of busy_us, the sum over all operations.

    On a GPU the operations are kernels and copies, and what busy_us lacks to wall_us is the device waiting for the
    host; on a CPU they are torch's operators.
    """
    for name, value in CUPTI.items():
        os.environ.setdefault(name, value)
    activity = ProfilerActivity.CUDA if clock.on_gpu else ProfilerActivity.CPU
    profiler = torch.profiler.profile(activities=[activity])
    if setting.op == "generate":
        window = Window(profiler, setting.new_tokens, clock)
        call(watch=window)
        steps, wall_s = window.steps, clock.seconds(window.begin, window.end)
    else:
        with profiler:
            steps, wall_s = 1, call().seconds
    rows = sorted(_rows(profiler, clock.on_gpu), key=lambda row: -row["us"])
    busy_us = sum(row["us"] for row in rows)
    for row in rows:
        row["share"] = row["us"] / busy_us
    return {"steps": steps, "wall_us": 1e6 * wall_s, "busy_us": busy_us, "rows": rows[:MOST_ROWS]}


def _rows(profiler: torch.profiler.profile, on_gpu: bool) -> list[dict]:
    where = DeviceType.CUDA if on_gpu else DeviceType.CPU
    rows = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.device_type == where and us > 0 and not getattr(event, "is_user_annotation", False):
            rows.append({"name": event.key[:MOST_LETTERS], "share": 0.0, "calls": event.count, "us": us})
    return rows
