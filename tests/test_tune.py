"""Attention's tuning script knows every tile and split that the plan can choose."""

import importlib.util
from pathlib import Path

import pytest
import torch

from hf_batchinv.bench import cases

SCRIPT = Path(__file__).parents[1] / "hub_kernels" / "batch-invariant-flash-attn" / "benchmarks" / "tune.py"


@pytest.fixture(scope="module")
def tune():
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location("tune", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=str)
@pytest.mark.parametrize("unit", cases.units("attention"), ids=lambda unit: str(unit[0].unit))
def test_what_the_plan_chooses_is_among_the_choices(tune, unit, capability):
    _, plan, contract = tune.modules()
    gpu = plan.Gpu(capability, 132, hopper_kernel=True, shared_kib=227 if capability == (9, 0) else 163)
    for case in unit:
        if case.case not in ("prefill", "decode"):
            continue
        keys, shape = case.kv_len, dict(head_dim=case.head_dim, value_head_dim=case.head_dim, dtype=torch.bfloat16)
        call = dict(rows=case.q_len * case.heads // case.kv_heads, heads=case.batch * case.kv_heads, keys=keys)
        call |= dict(blocks=-(-keys // contract.attention_contract(**shape).kv_block), plain=True, aligned=True)
        call |= dict(splits=contract.split_of(keys - 1) + 1 if keys > 256 else 1, split_bytes=4 * (case.head_dim + 2))
        call |= dict(split_keys=contract.split_multiple(keys))
        chosen = plan.attention_tile(**call, **shape, gpu=gpu)
        found = list(tune.choices(case, gpu))
        assert len({name for name, *_ in found}) == len(found)
        if capability == (9, 0):
            assert chosen in [(tile, split) for _, tile, split, _ in found], case
        for _, tile, split, grid in found:
            assert (grid is not None) == tile.hopper
            assert split in (False, True) or split % call["split_keys"] == 0
