"""With its tuned table hidden, the GPU that the tables were measured on gets the same tiles, so the same speed."""

import importlib

import pytest
import torch

from hf_batchinv import hub
from hf_batchinv.bench import cases

SHARED_KIB = {(9, 0): 227}
# Not the same: heads of 256 in prefill, where a default must also fit GPUs with tensor memory.
WIDEST = 128


def package_of(family):
    name = hub.load(family).__name__
    return importlib.import_module(f"{name}.plan"), importlib.import_module(f"{name}.tiles")


def all_cases(op):
    return [case for unit in cases.units(op, ("bfloat16", "float16")) for case in unit]


def linear_tiles(plan, gpu):
    for case in all_cases("linear"):
        for descriptors in (True, False):
            shape = dict(rows=case.M, n=case.N, k=case.K, dtype=getattr(torch, case.dtype))
            yield plan.linear_tile(**shape, descriptors=descriptors, gpu=gpu)


def grouped_tiles(plan, gpu):
    for case in all_cases("grouped_linear"):
        shape = dict(rows=case.tokens * case.top_k, experts=case.experts, n=case.N, k=case.K)
        yield plan.grouped_tile(**shape, dtype=getattr(torch, case.dtype), descriptors=True, gpu=gpu)


def attention_tiles(plan, gpu):
    for case in all_cases("attention"):
        if case.head_dim > WIDEST and case.q_len > 1:
            continue
        rows, heads = case.q_len * case.heads // case.kv_heads, case.batch * case.kv_heads
        shape = dict(head_dim=case.head_dim, value_head_dim=case.head_dim, dtype=getattr(torch, case.dtype))
        for splits in (1, -(-case.kv_len // 256)):
            call = dict(rows=rows, heads=heads, keys=case.kv_len, blocks=case.kv_len // 64, splits=splits, plain=True)
            call |= dict(aligned=True, split_keys=256, split_bytes=4 * (case.head_dim + 2))
            yield plan.attention_tile(**call, **shape, gpu=gpu)


@pytest.mark.parametrize(
    ("family", "tiles_of"),
    [("linear", linear_tiles), ("linear", grouped_tiles), ("flash-attn", attention_tiles)],
    ids=["linear", "grouped_linear", "attention"],
)
def test_the_default_has_the_tuned_tiles_for_every_case_of_the_benchmark(monkeypatch, family, tiles_of):
    plan, tiles = package_of(family)
    for capability in tiles.TUNED:
        gpu = plan.Gpu(capability=capability, multiprocessors=132, shared_kib=SHARED_KIB[capability])
        tuned = list(tiles_of(plan, gpu))
        assert len(set(tuned)) >= 3  # the table is asked
        with monkeypatch.context() as hidden:
            hidden.setattr(tiles, "TUNED", {})
            assert list(tiles_of(plan, gpu)) == tuned
            small = plan.Gpu(capability=(8, 6), multiprocessors=132)
            assert list(tiles_of(plan, small)) != tuned
