"""The guarantee on tiny models of every covered family: the same sequence gives the same bits in any surrounding."""

import pytest
import torch

import hf_batchinv
from tests.axes import Axes, AxesPlan, failures
from tests.families import FAMILIES, tiny_model

CPU = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
GPU = [("cuda", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
WHERE = [
    pytest.param(device, dtype, id=f"{device}-{str(dtype)[6:]}", marks=[pytest.mark.gpu] if device == "cuda" else [])
    for device, dtype in CPU + GPU
]


def sequence(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("device, dtype", WHERE)
@pytest.mark.parametrize("family", FAMILIES)
def test_sequence_keeps_its_bits_on_every_axis(family, device, dtype):
    model = tiny_model(family, dtype, device)
    plan = AxesPlan(batches=(2, 3, 5, 8, 17, 33, 64, 100, 256)) if device == "cuda" else AxesPlan()
    ids = sequence(41)
    stock = failures(Axes(model, ids, plan))
    assert stock, "the stock model must fail this test somewhere, or it shows nothing"
    hf_batchinv.convert(model)
    assert failures(Axes(model, ids, plan)) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("border", [64, 128, 256, 512, 1024])
def test_lengths_around_tile_borders_keep_their_bits(family, border, dtype):
    model = tiny_model(family, dtype, "cuda")
    stock = {}
    for converted in (False, True):
        if converted:
            hf_batchinv.convert(model)
        for length in (border - 1, border, border + 1):
            plan = AxesPlan(
                batches=(2, 9, 33),
                pads=(1, 70),
                chunks=((border // 2 + 1,), (13, border - 2)),
                static_lengths=(border + 64,),
                decode_from=length - 5,
            )
            axes = Axes(model, sequence(length), plan)
            axes.cache = lambda axes=axes: (case for case in Axes.cache(axes) if "token by token" not in case[0])
            failed = {axis: count for axis, got, want in axes if (count := int((got != want).sum()))}
            if converted:
                assert failed == {}, length
            else:
                stock.update(failed)
    assert stock, "the stock model must fail this test somewhere, or it shows nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_eight_thousand_tokens_keep_their_bits(family):
    model = tiny_model(family, torch.bfloat16, "cuda")
    ids = sequence(8200)
    plan = AxesPlan(
        batches=(2, 5), pads=(70,), chunks=((4097,), (8190,)), static_lengths=(9000,), decode_from=8195, new_tokens=3
    )
    found = []
    for converted in (False, True):
        if converted:
            hf_batchinv.convert(model)
        axes = Axes(model, ids, plan)
        axes.cache = lambda axes=axes: (case for case in Axes.cache(axes) if "token by token" not in case[0])
        found.append({axis: count for axis, got, want in axes if (count := int((got != want).sum()))})
    assert found[0], "the stock model must fail this test somewhere, or it shows nothing"
    assert found[1] == {}
