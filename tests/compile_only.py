"""Compile what the kernel packages would launch on GPUs that are not here, and compare its memory with theirs.

    python tests/compile_only.py linear --capability 8.6 --json

The packages' own launch code runs on tensors without data (the meta device), under a driver that names another GPU, and
every launch compiles and is written down instead. No GPU is needed; what comes out says nothing about results or speed.
Run it as a process of its own: it replaces Triton's driver, and TRITON_INTERPRET must be unset.
"""

import argparse
import contextlib
import importlib
import json
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("linear", "flash-attn", "norm", "elementwise")
# Compute capability -> KiB of shared memory that one block may use (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"), and the multiprocessors of one such GPU, which the plans look at.
SHARED_KIB = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
MULTIPROCESSORS = {"8.0": 108, "8.6": 84, "8.9": 128, "9.0": 132, "10.0": 148, "12.0": 170}
# Columns of tensor memory that one block may use, on GPUs that have some.
TENSOR_MEMORY_COLUMNS = 512
# Launch arguments that tell tiles apart, as far as a kernel has them.
_TILE = ("SWAP", "EVEN_K", "PARTS", "SPLIT", "MASK", "STAGES", "LOG", "CHUNK", "PARTIALS", "num_warps", "num_stages")


@dataclass(frozen=True)
class Compiled:
    """One kernel: the call that wanted it, the launch arguments that tell tiles apart, what it needs and may have.

    error: the compiler's words if there is no kernel. operand_widths: neighbouring elements of K that a thread holds of
    the matrix products' operands, which is part of the order of summation. loose_arrivals: see that function.
    """

    call: str
    kernel: str
    tile: str
    shared: int
    limit: int
    tensor_memory: int = 0
    error: str = ""
    seconds: float = 0.0
    operand_widths: tuple[int, ...] = ()
    loose_arrivals: int = 0

    @property
    def fits(self) -> bool:
        return not self.error and self.shared <= self.limit and self.tensor_memory <= TENSOR_MEMORY_COLUMNS

    def __str__(self) -> str:
        what = f"{self.kernel} ({self.tile}) of {self.call}"
        if self.error:
            return f"{what}: does not compile: {self.error}"
        columns = f", {self.tensor_memory} of {TENSOR_MEMORY_COLUMNS} columns" if self.tensor_memory else ""
        return f"{what}: {self.shared} of {self.limit} bytes of shared memory{columns}"


class _DidNotCompile(Exception):
    """The rest of a call is given up: its kernel is written down with the compiler's error."""


class _Driver:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, capability: str):
        self.arch = int(capability.replace(".", ""))

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass
class Recorder:
    """Everything that was compiled for a GPU, each kernel once."""

    capability: str
    call: str = ""
    compiled: list[Compiled] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    @contextlib.contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """Within this context every launch in the process compiles for the GPU and launches nothing."""
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def compile_and_record(function, *args, grid, warmup, **kwargs):
            begin = time.perf_counter()
            try:
                kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
            except Exception as error:  # whatever the compiler raises is the finding
                self._add(function, kwargs, begin, error=f"{type(error).__name__}: {error}")
                raise _DidNotCompile from error
            if kernel.hash not in self._seen:
                self._seen.add(kernel.hash)
                metadata = kernel.metadata
                columns = getattr(metadata, "tmem_size", None) or 0
                widths = sorted({int(width) for width in re.findall(r"kWidth = (\d+)", kernel.asm["ttgir"])})
                order = dict(operand_widths=tuple(widths), loose=loose_arrivals(kernel.asm["ptx"]))
                self._add(function, kwargs, begin, metadata.shared, columns, **order)
            return kernel

        driver.set_active(_Driver(self.capability))
        JITFunction.run = compile_and_record
        try:
            yield self
        finally:
            JITFunction.run = run

    def compile(self, call: str, function: Callable[[], object]) -> None:
        """Run one call of a package's launch code."""
        self.call = call
        try:
            function()
        except _DidNotCompile:
            print(f"{call}: does not compile", file=sys.stderr)

    def _add(
        self,
        kernel,
        kwargs: dict,
        begin: float,
        shared: int = 0,
        tensor_memory: int = 0,
        error: str = "",
        operand_widths: tuple[int, ...] = (),
        loose: int = 0,
    ) -> None:
        shown = [name for name in kwargs if name in _TILE or name.startswith(("BLOCK_", "TILE_"))]
        tile = " ".join(f"{name}={kwargs[name]}" for name in shown)
        limit = SHARED_KIB[self.capability] * 1024
        seconds = round(time.perf_counter() - begin, 2)
        name = kernel.__name__
        found = Compiled(self.call, name, tile, shared, limit, tensor_memory, error, seconds, operand_widths, loose)
        self.compiled.append(found)


def loose_arrivals(ptx: str) -> int:
    """How many arrivals at an mbarrier, which one thread makes for its group of warps, have no barrier of the group
    behind the last product that was waited for: another warp of the group might still read what is given back.
    """
    loose, together = 0, True
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line or "wgmma.wait_group" in line:
            together = False
        elif "bar.sync" in line:
            together = True
        elif "mbarrier.arrive.shared" in line and not together:
            loose += 1
    return loose


# --- the packages ---


def load(package: str, *modules: str) -> list[types.ModuleType]:
    """Modules of a kernel package, from this checkout and without importing transformers."""
    if "hf_batchinv" not in sys.modules:
        bare = types.ModuleType("hf_batchinv")
        bare.__path__ = [str(ROOT / "hf_batchinv")]
        sys.modules["hf_batchinv"] = bare
    loaded = importlib.import_module("hf_batchinv.hub").load(package, "")
    return [importlib.import_module(f"{loaded.__name__}.{module}") for module in modules]


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _name(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


@contextlib.contextmanager
def _self_check_failed(selfcheck) -> Iterator[None]:
    agree, selfcheck.tiles_agree = selfcheck.tiles_agree, lambda *args, **kwargs: False
    try:
        yield
    finally:
        selfcheck.tiles_agree = agree


def compile_linear(recorder: Recorder, tile: list[int] | None, exhaustive: bool) -> None:
    launch, plan, selfcheck, tiles = load("linear", "_launch", "plan", "selfcheck", "tiles")
    major, minor = map(int, recorder.capability.split("."))
    gpu = plan.Gpu((major, minor), MULTIPROCESSORS[recorder.capability], SHARED_KIB[recorder.capability])
    launch.gpu_of = lambda device: gpu

    def linear(rows: int, n: int, dtype: torch.dtype, k: int = 4096, bias: bool = False, tile=None) -> None:
        x, weight = _meta(rows, k, dtype=dtype), _meta(n, k, dtype=dtype)
        if tile is None or launch.serves(tile, x, weight):
            call = f"linear {_name(dtype)} {rows}x{n}x{k}{' bias' if bias else ''}"
            shift = _meta(n, dtype=dtype) if bias else None
            recorder.compile(call, lambda: launch.launch_linear(x, weight, shift, tile))

    def grouped(rows: int, n: int, dtype: torch.dtype, k: int = 2048, experts: int = 32, tile=None) -> None:
        x, weight = _meta(rows, k, dtype=dtype), _meta(experts, n, k, dtype=dtype)
        offsets = _meta(experts, dtype=torch.int32)
        if tile is None or launch.serves(tile, x, weight[0]):
            call = f"grouped_linear {_name(dtype)} {experts}x{rows}x{n}x{k}"
            recorder.compile(call, lambda: launch.launch_grouped_linear(x, weight, offsets, tile))

    def bmm(rows: int, n: int, dtype: torch.dtype, k: int = 128) -> None:
        x, y = _meta(8, rows, k, dtype=dtype), _meta(8, k, n, dtype=dtype)
        recorder.compile(f"bmm {_name(dtype)} {rows}x{n}x{k}", lambda: launch.launch_bmm(x, y))

    if tile:
        m, n, k, warps, stages = tile
        return linear(300, 4096, torch.bfloat16, tile=plan.Tile(m, n, k, warps, stages))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        twin = dtype == torch.float16 and not exhaustive  # as large as bfloat16: one size of each op
        for rows in (5000,) if twin else (1, 16, 64, 300, 5000):
            for n in (4096,) if twin else (512, 4096, 20000):
                linear(rows, n, dtype)
                if exhaustive or plan.table_of(gpu) is tiles.ROOMY:
                    linear(rows, n + 1, dtype)  # descriptors cannot describe the result's rows
                if exhaustive:
                    linear(rows, n, dtype, k=1000)
                    linear(rows, n, dtype, k=4095)
                    linear(rows, n, dtype, bias=True)
            bmm(rows, 512, dtype)
            grouped(rows, 1024, dtype)
        with _self_check_failed(selfcheck):
            linear(300, 4096, dtype)
            grouped(300, 1024, dtype)
        # A short K has tiles of its own in float32.
        for k in () if twin else (64, 4096) if dtype == torch.float32 else (4096,):
            for each in plan.all_tiles(k, dtype, gpu):
                linear(300, 4096, dtype, k=k, bias=True, tile=each)
                if exhaustive:
                    grouped(300, 1024, dtype, k=k, tile=each)
    return None


def compile_attention(recorder: Recorder, tile: list[int] | None, exhaustive: bool) -> None:
    launch, plan, selfcheck = load("flash-attn", "_launch", "plan", "selfcheck")
    major, minor = map(int, recorder.capability.split("."))
    gpu = plan.Gpu(
        (major, minor),
        MULTIPROCESSORS[recorder.capability],
        hopper_kernel=launch.HOPPER_KERNEL,
        shared_kib=SHARED_KIB[recorder.capability],
    )
    launch.gpu_of = lambda device: gpu
    plain = dict(causal=True, scale=0.1, window_left=-1, window_right=-1, softcap=0.0, sinks=None)
    plain |= dict(mask=None, key_mask=None, origin=None, query_offset=None)
    extras = dict(window_left=300, softcap=20.0)
    heads, kv_heads = 32, 8

    def attention(what: str, dim: int, dtype: torch.dtype, batch: int, q_len: int, *, tile=None, split=None, **change):
        kv_len = 4096 if q_len == 1 else q_len
        shapes = (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
        states = [_meta(batch, count, length, dim, dtype=dtype) for count, length in shapes]
        call = f"{what} {_name(dtype)} head_dim {dim}"
        recorder.compile(call, lambda: launch.launch_attention(*states, **plain | change, tile=tile, split=split))

    if tile:
        return attention("prefill", 128, torch.bfloat16, 1, 2048, tile=plan.Tile(*tile), split=False)
    per_row = _meta(1, dtype=torch.int32)
    seen = _meta(1, 1, 2048, 2048, dtype=torch.bool)
    for dim in (64, 128, 256, 16, 80) if exhaustive else (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            sinks, widest = _meta(heads, dtype=dtype), dim == 256
            if dtype == torch.float32 and not (widest or exhaustive):
                continue
            attention("prefill", dim, dtype, 1, 2048, origin=per_row)
            if dtype != torch.float32 or exhaustive:  # float32 has one tile for a head size
                attention("decode, split", dim, dtype, 1, 1, origin=per_row, query_offset=per_row)
            if dim != 256 and dtype == torch.bfloat16:
                attention("decode, unsplit", dim, dtype, 256, 1)
            if dim == 64 and dtype == torch.bfloat16:
                keys, row = _meta(1, 4096, dtype=torch.bool), _meta(1, 1, 1, 4096, dtype=torch.bool)
                attention("decode, key mask", dim, dtype, 1, 1, key_mask=keys)
                attention("decode, boolean mask", dim, dtype, 1, 1, mask=row)
            if widest or exhaustive:
                attention("prefill, boolean mask", dim, dtype, 1, 2048, mask=seen)
            if dim == 128 or exhaustive:
                attention("prefill, sinks, softcap, window", dim, dtype, 1, 2048, sinks=sinks, **extras)
            if not exhaustive:
                continue
            attention("decode, unsplit", dim, dtype, 256, 1)
            attention("prefill, key mask", dim, dtype, 1, 2048, key_mask=_meta(1, 2048, dtype=torch.bool))
            with _self_check_failed(selfcheck):
                attention("prefill, self-check failed", dim, dtype, 1, 2048)
            for each in plan.all_tiles(head_dim=dim, value_head_dim=dim, dtype=dtype, gpu=gpu):
                for split in (False, True, 1024) if each.decode else (False,):
                    what, queries = ("decode", 1) if each.decode else ("prefill", 2048)
                    attention(f"{what}, every tile", dim, dtype, 1, queries, tile=each, split=split, origin=per_row)
    return None


def compile_norm(recorder: Recorder, tile: list[int] | None, exhaustive: bool) -> None:
    if tile:
        raise ValueError("--tile: expected linear or flash-attn, got norm, whose tiles are part of its contract")
    launch, contract = load("norm", "_launch", "contract")
    launch.device_of = lambda x: contextlib.nullcontext()

    def rms_norm(columns: int, dtype: torch.dtype) -> None:
        x, weight = _meta(8, columns, dtype=dtype), _meta(columns, dtype=dtype)
        options = dict(cast_before_weight=True, cast_to_weight_dtype=False, offset_in_weight_dtype=False)
        rounding = contract.rms_norm_rounding(dtype, dtype, **options, round_factor=False, gate_last=False)
        arguments = dict(gate=None, eps=1e-6, group_size=columns, weight_offset=0.0, gate_before=False)
        arguments |= dict(weight=weight, activation="silu", rounding=rounding)
        recorder.compile(f"rms_norm {_name(dtype)} {columns}", lambda: launch.rms_norm(x, **arguments))

    def layer_norm(columns: int, dtype: torch.dtype) -> None:
        x, weight = _meta(8, columns, dtype=dtype), _meta(columns, dtype=dtype)
        arguments = (x, weight, weight, 1e-5, columns, torch.float32, torch.float32, dtype)
        recorder.compile(f"layer_norm {_name(dtype)} {columns}", lambda: launch.layer_norm(*arguments))

    def softmax(columns: int, dtype: torch.dtype) -> None:
        x = _meta(8, columns, dtype=dtype)
        recorder.compile(f"softmax {_name(dtype)} {columns}", lambda: launch.softmax(x, False, torch.empty_like(x)))

    def total(columns: int, dtype: torch.dtype) -> None:
        x, out = _meta(8, columns, dtype=dtype), _meta(8, dtype=dtype)
        recorder.compile(f"sum {_name(dtype)} {columns}", lambda: launch.reduce(x, False, out))

    sizes = (128, 4096, 151936) + ((16, 1000, 8192, 16384, 16385) if exhaustive else ())
    for dtype in (torch.bfloat16, torch.float32, *([torch.float16] if exhaustive else [])):
        for columns in sizes:
            rms_norm(columns, dtype)
            layer_norm(columns, dtype)
            softmax(columns, dtype)
            total(columns, dtype)


def compile_elementwise(recorder: Recorder, tile: list[int] | None, exhaustive: bool) -> None:
    if tile:
        raise ValueError("--tile: expected linear or flash-attn, got elementwise, which has one tile for a head size")
    (launch,) = load("elementwise", "_launch")
    launch.device_of = lambda x: contextlib.nullcontext()

    def rotary(dim: int, dtype: torch.dtype, heads: int = 32, kv_heads: int = 8) -> None:
        query, key = (_meta(8, 5, count, dim, dtype=dtype).transpose(1, 2) for count in (heads, kv_heads))
        cos = _meta(1, 5, dim, dtype=dtype)
        recorder.compile(f"rotary {_name(dtype)} {dim}", lambda: launch.rotary(query, key, cos, cos))

    def gated(columns: int, dtype: torch.dtype) -> None:
        gate = _meta(8, columns, dtype=dtype)
        recorder.compile(f"gated {_name(dtype)} {columns}", lambda: launch.gated(gate, gate, "silu"))

    for dtype in (torch.bfloat16, torch.float32, *([torch.float16] if exhaustive else [])):
        for dim in (64, 128, 256, 16, 72, 80) if exhaustive else (64, 128, 72):
            rotary(dim, dtype)
        rotary(64, dtype, heads=1, kv_heads=1)
        gated(14336, dtype)
        gated(1001, dtype)


_COMPILE = {
    "linear": compile_linear,
    "flash-attn": compile_attention,
    "norm": compile_norm,
    "elementwise": compile_elementwise,
}


def compile_package(
    package: str, capability: str, *, tile: list[int] | None = None, exhaustive: bool = False
) -> list[Compiled]:
    """What a package launches on a GPU of this compute capability, each kernel once.

    tile: compile one call with this tile alone. exhaustive: every option of the calls, not only the largest kernels.
    """
    recorder = Recorder(capability)
    with recorder.recording():
        _COMPILE[package](recorder, tile, exhaustive)
    return recorder.compiled


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--capability", choices=SHARED_KIB, required=True)
    parser.add_argument(
        "--tile", help="m,n,k,warps,stages (linear) or rows,warps,stages (flash-attn): compile it alone"
    )
    parser.add_argument("--exhaustive", action="store_true", help="every option of the calls: minutes")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    asked = parser.parse_args(arguments)
    tile = [int(part) for part in asked.tile.split(",")] if asked.tile else None
    found = compile_package(asked.package, asked.capability, tile=tile, exhaustive=asked.exhaustive)
    if asked.json:
        print(json.dumps([{**asdict(one), "fits": one.fits} for one in found], indent=1))
    else:
        for one in found:
            print("fits        " if one.fits else "DOES NOT FIT", one)
    return 0 if all(one.fits for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
