"""The Hopper kernel's logic on a CPU, against float64: its own source with torch in the place of Gluon.

Triton's interpreter does not run Gluon. Here tensors are torch's, shared memory is a buffer that holds NaN until it is
written, and the parts of `warp_specialize` are threads that wait for each other at its mbarriers. Copies and products
are done when they are asked for; orders that this leaves out are walked by test_hopper_protocol.py. A read or write
outside of a tensor is an error. Bits say nothing here.
"""

import ast
import inspect
import itertools
import math
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests run the compiled kernels"),
]
SOURCES = Path(__file__).parents[1] / "torch-ext" / "batch_invariant_flash_attn"
MBARRIER = object()
# Kernels that Triton's own interpreter runs.
INTERPRETED = ("attention_kernel", "key_mask_kernel")


class Tensor(torch.Tensor):
    """A torch tensor that has a layout, of which nothing depends on it."""

    type = SimpleNamespace(layout=SimpleNamespace(parent=None))


def tensor(x) -> Tensor:
    """Integers are 32-bit ones, as in the kernels: they wrap, and what does not fit is an error."""
    return torch.as_tensor(x, dtype=torch.int32 if type(x) is int else None).as_subclass(Tensor)


class Pointer:
    """Elements of a tensor's memory, from its first one on."""

    def __init__(self, of: torch.Tensor, at=0, memory=None):
        self.of, self.at, self.dtype = of, at, SimpleNamespace(element_ty=of.dtype)
        left = of.untyped_storage().nbytes() // of.element_size() - of.storage_offset()
        self.memory = of.as_strided((left,), (1,)) if memory is None else memory

    def __add__(self, offset):
        return Pointer(self.of, self.at + offset, self.memory)


def places(pointer, mask):
    """Indices into the pointer's memory, and which of them are wanted; those must be inside."""
    at = tensor(pointer.at)
    mask = torch.ones_like(at, dtype=torch.bool) if mask is None else tensor(mask)
    at, mask = torch.broadcast_tensors(at, mask)
    wanted = at[mask]
    assert ((wanted >= 0) & (wanted < len(pointer.memory))).all(), "outside of the tensor"
    return at, mask


def load(pointer, mask=None, other=0.0):
    at, mask = places(pointer, mask)
    return tensor(
        torch.where(mask, pointer.memory[torch.where(mask, at, 0)], torch.tensor(other, dtype=pointer.of.dtype))
    )


def store(pointer, value, mask=None):
    at, mask = places(pointer, mask)
    pointer.memory[at[mask]] = tensor(value).expand(at.shape)[mask].to(pointer.of.dtype)


class Buffer:
    """Shared memory."""

    def __init__(self, data):
        self.data, self.shape, self.dtype = data, data.shape, data.dtype

    def index(self, i):
        return Buffer(self.data[int(i)])

    def reshape(self, shape):
        return Buffer(self.data.view(shape))

    def permute(self, order):
        return Buffer(self.data.permute(order))

    def store(self, value):
        self.data.copy_(value)

    def load(self, layout):
        return tensor(self.data.clone())


class Copies:
    """What a program asked the copy units for, in groups.

    early: done when asked for, which writes to buffers as soon as may be; else only when waited for, which leaves them
    unwritten as long as may be.
    """

    def __init__(self, early: bool):
        self.early, self.groups, self.current = early, [], []

    def ask(self, buffer, pointer, mask):
        def copy():
            buffer.data.copy_(load(pointer, mask))

        copy() if self.early else self.current.append(copy)

    def commit(self):
        self.groups.append(self.current)
        self.current = []

    def wait(self, but):
        while len(self.groups) > but:
            for copy in self.groups.pop(0):
                copy()


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced are there."""

    def __init__(self):
        self.count = self.arrived = self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def arrive(self, arrivals, nbytes):
        with self.changed:
            self.arrived, self.bytes = self.arrived + arrivals, self.bytes + nbytes
            assert self.arrived <= self.count
            if self.arrived == self.count and self.bytes == 0:
                self.arrived, self.phase = 0, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != int(parity), timeout=60), "nobody comes"


class Barriers:
    def __init__(self, number):
        self.each = [Barrier() for _ in range(number)]

    def index(self, i):
        return self.each[int(i)]


class Descriptor:
    """Tiles of a tensor, zeros where it ends."""

    def __init__(self, real):
        self.real, self.layout = real, None
        self.block_type = SimpleNamespace(
            shape=real.block_shape, nbytes=math.prod(real.block_shape) * real.base.element_size()
        )

    def tile(self, coordinates):
        source = self.real.base.as_strided(self.real.shape, self.real.strides)
        out = torch.zeros(self.real.block_shape, dtype=source.dtype)
        from_, to = [], []
        for at, size, block in zip(map(int, coordinates), self.real.shape, self.real.block_shape, strict=True):
            begin, end = min(max(at, 0), size), max(min(at + block, size), 0)
            from_.append(slice(begin, max(begin, end)))
            to.append(slice(begin - at, begin - at + max(0, end - begin)))
        out[tuple(to)] = source[tuple(from_)]
        return out


def copy_by_tma(desc, coordinates, barrier, buffer):
    buffer.data.copy_(desc.tile(coordinates))
    barrier.arrive(0, -desc.block_type.nbytes)


def product(a, b, acc, use_acc=True, is_async=False):
    a, b = (x.data if isinstance(x, Buffer) else x for x in (a, b))
    result = a.float() @ b.float()
    return tensor(acc + result if use_acc else result)


def specialize(parts, *_):
    """Run (function, arguments) side by side."""
    failed = []

    def run(function, arguments):
        try:
            function(*arguments)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def language(program: list, grid: tuple):
    """What the kernels' source calls `gl` and `tl`; `program` holds the indices of the one that runs."""

    class Layout:
        def __call__(self, *args, **kwargs):
            return None

        get_default_for = __call__

    class Language(SimpleNamespace):
        def __getattr__(self, name):
            return Layout()

    def allocate(dtype, shape, layout):
        if layout is MBARRIER:
            return Barriers(shape[0])
        return Buffer(torch.full(tuple(shape), float("nan"), dtype=dtype))

    def both(function):
        return lambda a, b: function(*torch.broadcast_tensors(tensor(a), tensor(b)))

    def asm(source, constraints, args, dtype, is_pure, pack):
        raise AssertionError("the test has another function for what is assembly")

    return Language(
        constexpr=lambda x: x,
        to_tensor=tensor,
        program_id=lambda axis: tensor(program[axis]),
        extra=SimpleNamespace(cuda=SimpleNamespace(gdc_launch_dependents=lambda: None, gdc_wait=lambda: None)),
        num_programs=lambda axis: tensor(grid[axis]),
        static_range=range,
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        bfloat16=torch.bfloat16,
        arange=lambda begin, end, layout=None: tensor(torch.arange(begin, end, dtype=torch.int32)),
        full=lambda shape, value, dtype, layout=None: tensor(torch.full(tuple(shape), value, dtype=dtype)),
        zeros=lambda shape, dtype, layout=None: tensor(torch.zeros(tuple(shape), dtype=dtype)),
        zeros_like=torch.zeros_like,
        where=lambda condition, a, b: tensor(torch.where(tensor(condition), a, b)),
        minimum=both(torch.minimum),
        maximum=both(torch.maximum),
        cdiv=lambda a, b: -(-a // b),
        sum=lambda x, axis: x.sum(axis),
        max=lambda x, axis: x.amax(axis),
        reshape=lambda x, shape: x.reshape(tuple(shape)),
        permute=lambda x, order: x.permute(order),
        split=lambda x: (x[..., 0], x[..., 1]),
        join=lambda a, b: torch.stack((a, b), -1),
        convert_layout=lambda x, layout: x,
        fma=lambda a, b, c: a * b + c,
        math=SimpleNamespace(exp2=lambda x: torch.exp2(tensor(x))),
        load=load,
        store=store,
        allocate_shared_memory=allocate,
        warp_specialize=specialize,
        inline_asm_elementwise=asm,
    )


def functions(program: list, grid: tuple, early: bool) -> dict:
    """The functions of the kernels' source files, as plain Python."""
    gl, copies = language(program, grid), Copies(early)

    def jit(function=None, **options):
        return function or (lambda inner: inner)

    found = {
        "gluon": SimpleNamespace(jit=jit),
        "triton": SimpleNamespace(jit=jit),
        "gl": gl,
        "tl": gl,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: MBARRIER,
            init=lambda barrier, count: setattr(barrier, "count", count),
            wait=lambda barrier, parity: barrier.wait(parity),
            arrive=lambda barrier, count: barrier.arrive(count, 0),
            expect=lambda barrier, nbytes: barrier.arrive(1, nbytes),
        ),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=copies.ask, commit_group=copies.commit, wait_group=copies.wait
        ),
        "tma": SimpleNamespace(async_copy_global_to_shared=copy_by_tma),
        "warpgroup_mma": product,
        "warpgroup_mma_wait": lambda left, deps: deps[0] if len(deps) == 1 else deps,
        "fence_async_shared": lambda: None,
    }
    for name in ("_softmax_step", "_blocks", "_attention_kernel", "_hopper_kernel", "_hopper_decode_kernel"):
        tree = ast.parse((SOURCES / f"{name}.py").read_text())
        tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(tree, f"{name}.py", "exec"), found)
    # What is assembly.
    found["_at_once"] = found["_place_at_once"] = lambda x: x
    found["_pack"] = lambda weights, dtype: weights.to(dtype).view(torch.int16)
    found["_unpack"] = lambda packed, dtype: packed.to(torch.int16).view(dtype)
    return found


class Launch:
    """In the place of the package's own, for kernels that are emulated."""

    early = True

    def __init__(self, kernel, grid, numbers, **options):
        self.name, self.grid, self.numbers, self.options = kernel.__name__, grid, numbers, options

    def __call__(self, *tensors):
        program, grid = [0, 0], (*self.grid, 1)[:2]
        kernel = functions(program, grid, self.early)[self.name]
        names = inspect.signature(kernel).parameters
        arguments = [
            Pointer(each) if isinstance(each, torch.Tensor) else None if each is None else Descriptor(each)
            for each in tensors
        ]
        options = {name: value for name, value in self.options.items() if name in names}
        for program[:] in itertools.product(*map(range, grid)):
            kernel(*arguments, *self.numbers, **options)


# batch, query heads, KV heads, Q, KV, D, Dv
SHAPES = {
    "causal": (1, 4, 1, 100, 100, 64, 64),
    "several heads and splits": (2, 2, 2, 150, 390, 64, 64),
    "four splits": (1, 2, 1, 140, 900, 64, 64),
    "groups of 3": (1, 3, 1, 70, 70, 64, 64),
    "wide values": (1, 4, 2, 40, 300, 64, 256),
}
# Settings of `launch_attention`, and what is changed in them; origins and offsets for the first sequences.
PLAIN = dict(causal=True, scale=0.125, window_left=-1, window_right=-1, softcap=0.0, sinks=None)
CHANGES = {
    "plain": {},
    "window": {"window_left": 70},
    "right window": {"causal": False, "window_right": 5},
    "both sides, sinks": {"causal": False, "window_left": 90, "window_right": 3, "sinks": True},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "origin": {"origin": [3, 77]},
    "origin in front": {"origin": [-70, -1]},
    "offset": {"query_offset": [5, 200]},
    "far window": {"causal": False, "window_left": 2**31 - 2, "window_right": 2**31 - 2, "query_offset": [5, 200]},
    "window beyond 32 bits": {"window_left": 2**31, "window_right": 2**40, "query_offset": [5, 200]},
    "right padding": {"key_mask": True},
}
CASES = [(shape, "plain") for shape in SHAPES] + [("several heads and splits", change) for change in CHANGES]
CASES += [(shape, "origin") for shape in ("four splits", "groups of 3", "wide values")]
CASES += [("wide values", "window"), ("causal", "sinks")]


@pytest.fixture
def launch(module, monkeypatch):
    launch, plan = module("_launch"), module("plan")
    try:
        module("_hopper_decode_kernel")
    except ImportError as error:
        pytest.skip(f"this Triton release has another Gluon: {error}")
    gpu = plan.Gpu((9, 0), multiprocessors=3, hopper_kernel=True, shared_kib=227)
    monkeypatch.setattr(launch, "gpu_of", lambda device: gpu)
    real = launch.Launch

    def emulated(kernel, *args, **options):
        return (real if kernel.__name__ in INTERPRETED else Launch)(kernel, *args, **options)

    monkeypatch.setattr(launch, "Launch", emulated)
    return launch


def problem(module, exact_masked_attention, sizes, change):
    """(query, key, value), the settings and further tensors of `launch_attention`, and what comes out."""
    batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(*size, generator=generator).bfloat16()

    query, key = random(batch, q_len, heads, head_dim).transpose(1, 2), random(batch, kv_heads, kv_len, head_dim)
    value = random(batch, kv_heads, kv_len + 9, value_dim)
    value[:, :, kv_len:] = math.nan
    value = value[:, :, :kv_len]
    changes = (CHANGES | DECODE_CHANGES)[change]
    call = PLAIN | dict(scale=head_dim**-0.5) | {name: changes[name] for name in changes if name in PLAIN}
    extra = dict.fromkeys(("mask", "key_mask", "origin", "query_offset"))
    for name in ("origin", "query_offset"):
        if name in changes:
            extra[name] = torch.tensor(changes[name][:batch], dtype=torch.int32)
    if call["sinks"]:
        call["sinks"] = random(heads)
    offset = torch.full((batch,), kv_len - q_len) if extra["query_offset"] is None else extra["query_offset"]
    present = None
    if change in ("right padding", "holes"):
        present = torch.arange(kv_len) < torch.tensor([kv_len - 20, 260][:batch])[:, None]
        if change == "holes":
            present[0, torch.arange(7, kv_len, 5)] = False
        extra["key_mask"] = module("key_mask").prepared(present, None)
        value.masked_fill_(~present[:, None, :, None], math.nan)
    if change.startswith("all but one"):
        value[:, :, 127] = 20  # the one that is hidden from the first query
    want = exact_masked_attention(query, key, value.nan_to_num(0), call, offset, present, extra["origin"])
    return (query, key, value), call, extra, want


@pytest.mark.parametrize("shape, change", CASES)
def test_the_hopper_kernel_computes_attention(module, launch, exact_masked_attention, shape, change):
    states, call, extra, want = problem(module, exact_masked_attention, SHAPES[shape], change)
    head_dim, value_dim = SHAPES[shape][-2:]
    tiles = module("plan").all_tiles(
        head_dim=head_dim, value_head_dim=value_dim, dtype=torch.bfloat16, gpu=launch.gpu_of(states[0].device)
    )
    tiles = [tile for tile in tiles if tile.hopper]
    assert tiles
    for tile in tiles:
        got = launch.launch_attention(*states, **call, **extra, tile=tile, split=False)
        assert (got.double() - want).abs().max() < 0.03, tile


@pytest.mark.parametrize("persistent", [True, False])
def test_sections_of_heads_follow_each_other(module, launch, exact_masked_attention, monkeypatch, persistent):
    """Ten heads of two row tiles, four of which the cache holds: on three programs, or on one for each tile."""
    plan = module("plan")
    states = torch.randn(3, 2, 5, 130, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    monkeypatch.setattr(plan, "L2_WHOLE", 0)
    monkeypatch.setattr(plan, "L2_SHARE", 4 * 130 * (64 + 64) * 2)
    monkeypatch.setattr(plan, "MOST_UNEVEN", 9.0 if persistent else 0.0)
    monkeypatch.setattr(plan, "_unevenness", lambda row_tiles, heads, size, *_: 1.0 if size == 4 else 2.0)
    found, plan_anew = [], plan.hopper_grid.__wrapped__  # not the remembered one
    monkeypatch.setattr(plan, "hopper_grid", lambda **problem: found.append(plan_anew(**problem)) or found[-1])
    nothing = dict.fromkeys(("mask", "key_mask", "origin", "query_offset"))
    tile = plan.Tile(128, warps=4, stages=2, hopper=True)
    got = launch.launch_attention(*states, **PLAIN, **nothing, tile=tile, split=False)
    assert found == [(3 if persistent else 20, 4)]
    want = exact_masked_attention(*states, PLAIN, torch.zeros(2, dtype=torch.int64))
    assert (got.double() - want).abs().max() < 0.03


def test_rows_with_holes_in_their_key_mask_are_done_over(module, launch, exact_masked_attention):
    """By the other kernel, in Triton's interpreter, for which the states are float16."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(3, 2, length, 64, generator=generator).half() for length in (150, 390, 390))
    present = torch.arange(390) < torch.tensor([390, 260, 390])[:, None]
    present[0, 5] = present[2, 100:300] = False
    value.masked_fill_(~present[:, None, :, None], math.nan)
    extra = dict(mask=None, key_mask=present, origin=None, query_offset=None)
    tile = module("plan").Tile(128, warps=4, stages=2, hopper=True)
    got = launch.launch_attention(query, key, value, **PLAIN, **extra, tile=tile, split=False)
    offset = torch.full((3,), 390 - 150)
    want = exact_masked_attention(query, key, value.nan_to_num(0), PLAIN, offset, present)
    assert (got.double() - want).abs().max() < 0.004


def test_the_hopper_kernel_computes_packed_attention(module, launch, exact_masked_attention):
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, head_dim = 4, 2, 64
    ends_q, ends_k = [0, 90, 90, 97, 240], [0, 90, 95, 400, 543]
    query = torch.randn(ends_q[-1], heads, head_dim, generator=generator).bfloat16()
    key, value = torch.randn(2, ends_k[-1], kv_heads, head_dim, generator=generator).bfloat16()
    bounds = [torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_k)]
    tile = module("plan").Tile(128, warps=4, stages=2, hopper=True)
    longest = (143, 305)
    got = launch.launch_attention_varlen(
        query, key, value, *bounds, *longest, **PLAIN, origin=None, tile=tile, split=False
    )
    for s in (0, 2, 3):
        q, k = slice(ends_q[s], ends_q[s + 1]), slice(ends_k[s], ends_k[s + 1])
        alone = [t.transpose(0, 1)[None] for t in (query[q], key[k], value[k])]
        offset = torch.tensor([alone[1].shape[2] - alone[0].shape[2]])
        want = exact_masked_attention(*alone, PLAIN, offset)
        assert (got[q].double() - want[0]).abs().max() < 0.03


def test_the_decode_kernel_computes_packed_attention(module, launch, exact_masked_attention):
    generator = torch.Generator().manual_seed(1)
    ends_q, ends_k = [0, 1, 1, 8, 17], [0, 290, 295, 295, 900]  # the third sequence has queries and no keys
    query = torch.randn(ends_q[-1], 6, 128, generator=generator).bfloat16()
    key, value = torch.randn(2, ends_k[-1], 2, 128, generator=generator).bfloat16()
    bounds = [torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_k)]
    tile = module("plan").Tile(32, warps=4, stages=2, decode=True)
    first = torch.tensor([7, 0, 0, 300], dtype=torch.int32)
    for origin, split in ((None, False), (None, True), (None, 512), (first, False), (first, True)):
        got = launch.launch_attention_varlen(
            query, key, value, *bounds, 9, 605, **PLAIN, origin=origin, tile=tile, split=split
        )
        assert (got[1:8] == 0).all()
        for s in (0, 3):
            q, k = slice(ends_q[s], ends_q[s + 1]), slice(ends_k[s], ends_k[s + 1])
            alone = [t.transpose(0, 1)[None] for t in (query[q], key[k], value[k])]
            offset = torch.tensor([alone[1].shape[2] - alone[0].shape[2]])
            want = exact_masked_attention(*alone, PLAIN, offset, None, None if origin is None else origin[s : s + 1])
            assert (got[q].double() - want[0]).abs().max() < 0.03


def test_sequences_that_are_longer_than_told_write_nothing_elsewhere(module, launch):
    """One sequence and head, so that the emulator finds what lies outside of the partial results."""
    call = PLAIN | dict(origin=None)
    tile = module("plan").Tile(32, warps=4, stages=2, decode=True)
    for queries, keys, max_q, max_k, split in ((3, 300, 1, 300, True), (1, 1000, 1, 600, 512), (1, 1000, 1, 600, True)):
        query, (key, value) = torch.randn(queries, 2, 64).bfloat16(), torch.randn(2, keys, 1, 64).bfloat16()
        bounds = [torch.tensor([0, length], dtype=torch.int32) for length in (queries, keys)]
        launch.launch_attention_varlen(query, key, value, *bounds, max_q, max_k, **call, tile=tile, split=split)


def test_no_keys_at_all_give_zeros(launch):
    """Nothing can describe such keys to the copy engine."""
    query, key = torch.randn(1, 4, 70, 64).bfloat16(), torch.empty(1, 1, 0, 64, dtype=torch.bfloat16)
    call = PLAIN | dict(causal=False)
    nothing = dict.fromkeys(("mask", "key_mask", "origin", "query_offset"))
    tile = launch.plan.Tile(64, warps=4, stages=2)
    assert (launch.launch_attention(query, key, key, **call, **nothing, tile=tile, split=False) == 0).all()


# batch, query heads, KV heads, Q, KV, D, Dv
DECODE_SHAPES = {
    "a step": (2, 4, 2, 1, 700, 64, 64),
    "heads of 128": (2, 7, 1, 1, 330, 128, 128),
    "several queries": (2, 6, 2, 9, 400, 64, 64),
    "wide values": (1, 2, 1, 2, 300, 64, 128),
    "long": (1, 2, 1, 1, 5700, 64, 64),
    "1100 keys": (1, 2, 1, 1, 1100, 64, 64),
    "rows across blocks": (1, 6, 2, 5, 453, 128, 128),
}
# Blocks are 128 keys for heads of 64, and 64 for heads of 128.
DECODE_CHANGES = {
    "holes": {"key_mask": True},
    "wide window": {"window_left": 600},
    "all but one of a block": {"query_offset": [126, 126]},
    "all but one to the right": {"causal": False, "window_right": 5, "query_offset": [121, 121]},
    "first rows see more": {"causal": False, "window_left": 63, "origin": [-63], "query_offset": [63]},
}
DECODE_CASES = [(shape, "plain") for shape in DECODE_SHAPES]
DECODE_CASES += [("several queries", change) for change in (*CHANGES, "holes") if change != "plain"]
DECODE_CASES += [("long", "wide window"), ("1100 keys", "wide window"), ("rows across blocks", "first rows see more")]
DECODE_CASES += [("several queries", change) for change in ("all but one of a block", "all but one to the right")]
DECODE_CASES += [("a step", change) for change in ("window", "origin in front", "holes")]
DECODE_CASES += [("long", change) for change in ("window", "origin", "offset")]


@pytest.mark.parametrize("shape, change", DECODE_CASES)
def test_the_decode_kernel_computes_attention(module, launch, monkeypatch, exact_masked_attention, shape, change):
    """Copies are done as early as may be, when they are asked for, and as late, when they are waited for."""
    plan = module("plan")
    states, call, extra, want = problem(module, exact_masked_attention, DECODE_SHAPES[shape], change)
    splits = [(2, False), (3, True), (2, 1024)]
    if extra["origin"] is None and call["window_left"] < 0 and states[1].shape[2] <= 4096:
        splits.append((3, 512))
    for number, (stages, split) in enumerate(splits):
        monkeypatch.setattr(Launch, "early", number % 2 == 0)
        rows = 32 if number % 3 else 64
        tile = plan.Tile(rows, warps=4, stages=stages, decode=True)
        got = launch.launch_attention(*states, **call, **extra, tile=tile, split=split)
        assert (got.double() - want).abs().max() < 0.03, (tile, split)
