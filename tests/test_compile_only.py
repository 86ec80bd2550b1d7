"""Every kernel that the packages launch on a GPU that is not here compiles, and its shared memory fits."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from hf_batchinv import hub
from tests.compile_only import loose_arrivals

SCRIPT = Path(__file__).with_name("compile_only.py")
# The rest is slow: 8.0 and 8.9 run the tiles of 8.6, which has the least memory; so does 12.0, save for attention's
# descriptors; and the tiles of the norms and of elementwise chains are the same everywhere.
QUICK = {("linear", "8.6"), ("linear", "9.0"), ("linear", "10.0"), ("norm", "8.6"), ("norm", "10.0")}
QUICK |= {("flash-attn", "8.6"), ("flash-attn", "9.0"), ("flash-attn", "10.0"), ("flash-attn", "12.0")}
QUICK |= {("elementwise", "8.6"), ("elementwise", "10.0")}
CASES = [
    pytest.param(package, capability, marks=[] if (package, capability) in QUICK else [pytest.mark.slow])
    for capability in ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
    for package in ("linear", "flash-attn", "norm", "elementwise")
]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, whose compiler runs without a GPU"
)


def compile_only(*arguments):
    """What the script found, from a process of its own: the interpreter's switch must be off when triton comes in."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    return json.loads(done.stdout)


def describe(found):
    return "\n".join(
        f"{one['kernel']} ({one['tile']}) of {one['call']}: {one['error']} {one['shared']} of {one['limit']} bytes"
        for one in found
        if not one["fits"]
    )


@pytest.mark.parametrize(("package", "capability"), CASES)
def test_every_kernel_compiles_and_its_shared_memory_fits(package, capability):
    found = compile_only(package, "--capability", capability)
    assert not describe(found), describe(found)
    # Sixteen bits: pairs. Another width is another order of summation, in tiles that use `mma.sync`.
    halves = [one for one in found if "float32" not in one["call"] and one["operand_widths"] not in ([], [2])]
    assert not halves, [(one["call"], one["tile"], one["operand_widths"]) for one in halves]
    loose = [one for one in found if one["loose_arrivals"]]
    assert not loose, [(one["call"], one["kernel"], one["loose_arrivals"]) for one in loose]
    kernels = {one["kernel"] for one in found}
    expected = {
        "linear": {"linear_kernel", "grouped_linear_kernel"},
        "flash-attn": {"attention_kernel", "combine_kernel"},
        "norm": {"rms_norm_rows", "rms_norm_chunk_finish", "layer_norm_rows", "softmax_rows", "sum_rows"},
        "elementwise": {"rotary_kernel", "gated_kernel"},
    }[package]
    if capability == "9.0" and package == "linear":
        expected.add("linear_tma_kernel")
    if capability == "9.0" and package == "flash-attn" and version("triton").startswith("3.6."):
        expected.add("hopper_attention_kernel")  # other releases go without
    assert expected <= kernels, expected - kernels
    if package in ("linear", "flash-attn"):
        assert max(one["shared"] for one in found) > 32 * 1024  # tiles were seen, not only stubs


def test_an_arrival_without_a_barrier_is_seen():
    product, wait = "wgmma.mma_async.sync.aligned.m64n64k16 {};", "wgmma.wait_group.sync.aligned 0;"
    barrier, arrive = "bar.sync 2, 128;", "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];"
    assert loose_arrivals("\n".join([product, wait, barrier, arrive, product, wait, barrier, arrive])) == 0
    assert loose_arrivals("\n".join([product, barrier, wait, arrive, product, wait, arrive])) == 2


@pytest.mark.parametrize(("package", "tile"), [("linear", "128,256,64,8,4"), ("flash-attn", "128,8,5")])
def test_a_tile_that_is_too_large_is_reported(package, tile):
    """The control: bytes and limit of a tile that 8.6 cannot run."""
    found = compile_only(package, "--capability", "8.6", "--tile", tile)
    assert [one["fits"] for one in found] == [False] and not found[0]["error"]
    assert found[0]["shared"] > found[0]["limit"] == 99 * 1024
    assert f"{found[0]['shared']} of 101376 bytes" in describe(found)


def test_a_tile_that_does_not_compile_is_reported():
    found = compile_only("linear", "--capability", "8.6", "--tile", "64,64,8,4,2")  # tl.dot wants 16 elements of K
    assert [one["fits"] for one in found] == [False] and found[0]["error"], found


def test_limits_know_every_capability_that_is_named_in_the_tables():
    """A new entry of TUNED needs its limit, and a place in CASES above."""
    tested = {case.values[1] for case in CASES}
    for family in ("linear", "flash-attn"):
        tiles = __import__(f"{hub.load(family).__name__}.tiles", fromlist=["tiles"])
        assert {f"{major}.{minor}" for major, minor in tiles.TUNED} <= tested
