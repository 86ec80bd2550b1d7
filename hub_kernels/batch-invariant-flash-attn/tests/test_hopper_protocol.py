"""The Hopper kernel's barriers: every order in which its loading warp and its two groups of warps can take turns.

The kernel's own source is run in plain Python, without tensors, which writes down what each of the three does with
barriers and buffers. Then all interleavings of the three lists are walked: none may stop before the end, load into a
buffer that is being read, or read what it did not wait for.
"""

import ast
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

KERNEL = Path(__file__).parents[1] / "torch-ext" / "batch_invariant_flash_attn" / "_hopper_kernel.py"
# The kernel's barriers in its own order, and the arrivals that complete a phase of each.
INITS = dict(re.findall(r"mbarrier\.init\((\w+)\.index\(i\), count=(\d+)\)", KERNEL.read_text()))
NAMES = re.search(r"\n    barriers = \((.+)\)\n", KERNEL.read_text())[1].split(", ")
COUNTS = {name: int(INITS[name]) for name in NAMES}


class Anything:
    """A tensor of which nothing matters."""

    shape, dtype, type = (64, 64), None, SimpleNamespace(layout=None)

    def _same(self, *args, **kwargs):
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = _same
    __lt__ = __gt__ = __le__ = __ge__ = __or__ = __ror__ = __and__ = __rand__ = __getitem__ = _same
    to = split = _same
    __hash__ = object.__hash__

    def __bool__(self):
        return True  # masks, splits' ends: either way the barriers are the same


ANY = Anything()


class Part:
    """A barrier or a buffer."""

    def __init__(self, trace, *name):
        self.trace, self.name, self.shape, self.dtype = trace, name, (64, 64), None

    def index(self, i):
        return Part(self.trace, *self.name, i)

    def reshape(self, shape):
        return self

    def permute(self, order):
        return self

    def store(self, value):
        self.trace.append(("store", self.name))

    def load(self, layout):
        return ANY


def lists_of(source, blocks, query_tma, rows=128):
    """What (loading warp, group, group) of the kernel do for tiles of `rows` rows and so many blocks each: events."""
    trace = []

    def wait_for_products(left, deps):
        trace.append(("products", left))
        return deps[0] if len(deps) == 1 else deps

    def load(desc, coordinates, barrier, buffer):
        trace.append(("load", barrier.name, buffer.name))

    def product(a, b, acc, use_acc=True, is_async=False):
        trace.append(("product", tuple(x.name for x in (a, b) if isinstance(x, Part))))
        if not is_async:
            trace.append(("products", 0))
        return ANY

    class Language(SimpleNamespace):
        def __getattr__(self, name):
            return lambda *args, **kwargs: ANY

    language = Language(
        constexpr=lambda x: x,
        to_tensor=lambda x: x,
        program_id=lambda axis: 0,
        num_programs=lambda axis: 1,
        static_range=range,
    )
    namespace = {
        "gluon": SimpleNamespace(jit=lambda function=None, **options: function or (lambda inner: inner)),
        "gl": language,
        "mbarrier": SimpleNamespace(
            wait=lambda barrier, parity: trace.append(("wait", barrier.name, int(parity))),
            arrive=lambda barrier, count: trace.append(("arrive", barrier.name)),
            expect=lambda barrier, nbytes: trace.append(("arrive", barrier.name)),
        ),
        "tma": SimpleNamespace(async_copy_global_to_shared=load),
        "warpgroup_mma": product,
        "warpgroup_mma_wait": wait_for_products,
        "fence_async_shared": lambda: None,
        "softmax_step": lambda *args: (ANY, ANY, ANY),
        "fold_split": lambda *args: (ANY, ANY, ANY),
        **dict.fromkeys(("add_weights", "finish", "lane_sums", "split_begin", "split_of", "tanh"), lambda *args: ANY),
    }
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(tree, str(KERNEL), "exec"), namespace)
    for name in ("_at_once", "_pack", "_unpack", "_highest", "_weight", "_masked"):
        namespace[name] = lambda *args: ANY
    sequence = (ANY,) * 7

    def tile(number, *args):
        count = blocks[number] if number < len(blocks) else 0
        return number, ANY, sequence, ANY, ANY, 0, count

    namespace["_tile"] = tile
    desc = SimpleNamespace(block_type=SimpleNamespace(nbytes=1))
    flags = (True, False, False, False, False, False, False, False, False)
    sizes = (flags, None, 4 if query_tma else 7, 128, 128, 64, rows, query_tma)
    barriers = tuple(Part(trace, name) for name in COUNTS)
    queries, buffers = Part(trace, "q"), (Part(trace, "k"), Part(trace, "v"))
    query_ptr = SimpleNamespace(dtype=SimpleNamespace(element_ty=None))
    tensors, problem = (query_ptr, *[ANY] * 7), (ANY,) * 8

    def traced(function, *args):
        trace.clear()
        namespace[function](*args)
        return tuple(trace)

    rest = (tensors, (ANY,) * 3, problem, (ANY, ANY), queries, buffers, barriers, len(blocks))
    loads = traced("_load_blocks", (desc,) * 3, tensors, problem, queries, buffers, barriers, len(blocks), sizes)
    return loads, *(traced("_attend", *rest, half, sizes) for half in (0, 1))


def walk(lists):
    """Every interleaving, as states: where each list is, barriers (phase, arrivals, loads under way), loads under way,
    how often each buffer was filled, products under way of each list, waits that each list has passed. Raises
    AssertionError with what is wrong.
    """
    fills = {event[2]: event[1] for events in lists for event in events if event[0] == "load"}
    start = ((0, 0, 0), (), frozenset(), (), ((), (), ()), ((), (), ()))
    seen, todo = {start}, [start]
    while todo:
        at, barriers, loads, filled, products, passed = todo.pop()
        following = []
        for load in loads:  # one that is under way arrives
            _, barrier, buffer = load
            phase, arrived, under_way = dict(barriers)[barrier]
            following.append(
                (
                    at,
                    put(barriers, barrier, settled(barrier, phase, arrived, under_way - 1)),
                    loads - {load},
                    put(filled, buffer, dict(filled).get(buffer, 0) + 1),
                    products,
                    passed,
                )
            )
        for who, events in enumerate(lists):
            if at[who] == len(events):
                continue
            kind, *what = events[at[who]]
            after = at[:who] + (at[who] + 1,) + at[who + 1 :]
            now, now_loads, now_filled, now_products, now_passed = barriers, loads, filled, products, passed
            if kind == "wait":
                barrier, parity = what
                phase = dict(barriers).get(barrier, (0, 0, 0))[0]
                waits = dict(passed[who]).get(barrier, 0)
                if phase & 1 == parity:
                    continue
                now_passed = replaced(passed, who, put(passed[who], barrier, waits + 1))
            elif kind == "arrive":
                (barrier,) = what
                phase, arrived, under_way = dict(barriers).get(barrier, (0, 0, 0))
                # What the loading warp expects comes with its next events: they count from here on.
                if who == 0 and barrier[0] in ("k_ready", "v_ready", "q_ready"):
                    under_way += sum(1 for _ in itertools.takewhile(lambda e: e[0] == "load", events[at[0] + 1 :]))
                arrived += 1
                assert arrived <= COUNTS[barrier[0]], f"{barrier} has too many arrivals"
                now = put(barriers, barrier, settled(barrier, phase, arrived, under_way))
            elif kind == "load":
                barrier, buffer = what
                reading = [group for group in products if any(buffer in product for product in group)]
                assert not reading, f"{buffer} is loaded while it is read"
                now_loads = loads | {("load", barrier, buffer)}
            elif kind == "store":
                (buffer,) = what
                if buffer[0] == "q":
                    now_filled = put(filled, buffer, dict(filled).get(buffer, 0) + 1)
            elif kind == "product":
                (buffers,) = what
                for buffer in buffers:
                    assert not any(load[2] == buffer for load in loads), f"{buffer} is read while it is loaded"
                    ready = fills.get(buffer, ("q_ready", buffer[1]))
                    waits = dict(passed[who]).get(ready, 0)
                    assert dict(filled).get(buffer, 0) == waits, f"{buffer} holds something else"
                now_products = replaced(products, who, (*products[who], buffers))
            else:
                (left,) = what
                now_products = replaced(products, who, products[who][len(products[who]) - left :])
            following.append((after, now, now_loads, now_filled, now_products, now_passed))
        ended = all(place == len(events) for place, events in zip(at, lists, strict=True))
        assert following or ended, f"stopped at {[e[p] for p, e in zip(at, lists, strict=True) if p < len(e)]}"
        for each in following:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return len(seen)


def put(pairs, key, value):
    return tuple(sorted((dict(pairs) | {key: value}).items()))


def replaced(items, index, value):
    return items[:index] + (value,) + items[index + 1 :]


def settled(barrier, phase, arrived, under_way):
    """A barrier's state once a phase that is complete has given way to the next."""
    return (phase + 1, 0, 0) if arrived == COUNTS[barrier[0]] and under_way == 0 else (phase, arrived, under_way)


# Blocks of the tiles that one program takes, one after the other.
TILES = [
    counts for length, most in ((1, 4), (2, 3), (3, 2)) for counts in itertools.product(range(most + 1), repeat=length)
]


@pytest.mark.parametrize("rows", [128, 64])
@pytest.mark.parametrize("query_tma", [True, False], ids=["queries loaded", "queries stored"])
def test_no_order_of_the_warps_stops_or_mixes_up_buffers(query_tma, rows):
    for counts in TILES:
        assert walk(lists_of(KERNEL.read_text(), counts, query_tma, rows)) > 10 * len(counts), counts


PRODUCTS = "        acc, _ = warpgroup_mma_wait(0, deps=(acc_token, p))\n"
LET_GO = "        mbarrier.arrive(free.index(slot), count=1)\n"
# Faults: (what it is, what stands in the kernel, what stands there instead, whether queries are loaded).
FAULTS = [
    (
        "a wait for groups that nothing holds back",  # as the kernel once had it
        "        if QUERY_TMA:\n            for half in gl.static_range(2):\n",
        "        for half in gl.static_range(2):\n            mbarrier.wait(q_free.index(half), (turn & 1) ^ 1)\n"
        "        if QUERY_TMA:\n            for half in gl.static_range(0):\n",
        False,
    ),
    ("values not waited for", "mbarrier.wait(free.index(before), filled)", "pass", True),
    ("keys not waited for", "mbarrier.wait(free.index(slot), filled ^ 1)", "pass", True),
    ("queries not waited for", "mbarrier.wait(q_free.index(half), (turn & 1) ^ 1)", "pass", True),
    ("a buffer let go too early", PRODUCTS + LET_GO, LET_GO + PRODUCTS, True),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_a_fault_in_the_kernel_is_found(fault):
    _, stands, instead, query_tma = fault
    source = KERNEL.read_text()
    assert source.count(stands) == 1
    with pytest.raises(AssertionError, match="stopped at|is loaded while|holds something else|too many arrivals"):
        for counts in TILES:
            walk(lists_of(source.replace(stands, instead), counts, query_tma))
