"""On a GPU the kernels have the bits of the chains of torch operators."""

import pytest
import torch
from elementwise_cases import CASES, DTYPES, Case, arguments_of, edge_gates

pytestmark = pytest.mark.gpu

LARGE = [
    Case(1, 32, 8, 1, 128),
    Case(8, 32, 8, 1, 128, cos_rows=8),
    Case(2, 32, 8, 1000, 128, cos_rows=2),
    Case(1, 14, 2, 4096, 64),
    Case(512, 9, 3, 1, 64, cos_rows=512, layout="fused"),
    Case(2, 8, 1, 77, 256, cos_rows=2),
    Case(2, 16, 16, 33, 72),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda c: c.id)
def test_rotary_has_the_bits_and_the_layout_of_the_chain(kernel, submodule, assert_same_bits, case, dtype):
    arguments = arguments_of(case, dtype, "cuda")
    for got, want in zip(kernel.rotary(*arguments), submodule("reference").rotary(*arguments), strict=True):
        assert_same_bits(got, want, case.id)
        sizes = got.shape
        assert all(a == b for a, b, size in zip(got.stride(), want.stride(), sizes, strict=True) if size > 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_gated_has_the_bits_of_the_chain_for_every_16_bit_gate(kernel, submodule, assert_same_bits, dtype):
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    for scale in (1.0, 0.37, -113.0):
        up = torch.full_like(gate, scale)
        assert_same_bits(kernel.gated(gate, up), submodule("reference").gated(gate, up, "silu"), f"up = {scale}")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(1, 1, 14336), (8, 1, 4864), (2, 300, 1536), (3, 5, 1001)], ids=str)
def test_gated_has_the_bits_of_the_chain(kernel, submodule, assert_same_bits, shape, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    gate, up = ((torch.randn(shape, generator=generator, device="cuda") * 5).to(dtype) for _ in range(2))
    gate.view(-1)[: len(edge_gates(dtype))] = edge_gates(dtype, "cuda")
    want = submodule("reference").gated(gate, up, "silu")
    assert_same_bits(kernel.gated(gate, up), want)
    assert_same_bits(kernel.gated(gate.transpose(0, -1), up.transpose(0, -1)), want.transpose(0, -1).contiguous())


def test_the_registered_operators_run_the_same_kernels(kernel, submodule, assert_same_bits):
    arguments = arguments_of(LARGE[1], torch.bfloat16, "cuda")
    for got, want in zip(submodule("rotary")._rotary_op(*arguments), kernel.rotary(*arguments), strict=True):
        assert_same_bits(got, want)
    gate = torch.randn(5, 1001, device="cuda").bfloat16()
    assert_same_bits(submodule("gated")._gated_op(gate, gate, "silu"), kernel.gated(gate, gate))


def test_a_recorded_call_has_the_bits_of_an_eager_one(kernel, assert_same_bits):
    query, key, cos, sin = arguments_of(LARGE[1], torch.bfloat16, "cuda")
    want = (*kernel.rotary(query, key, cos, sin), kernel.gated(query, query))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = (*kernel.rotary(query, key, cos, sin), kernel.gated(query, query))
    graph.replay()
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)
