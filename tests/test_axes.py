"""The guarantee on tiny models of every covered family: the same sequence gives the same bits in any surrounding."""

from dataclasses import replace

import pytest
import torch

import hf_batchinv
from tests.axes import Axes, AxesPlan, failures
from tests.cases.models import build, size_for

# Room for the longest sequences; a window that the sequences outgrow.
LONG = {"max_position_embeddings": 16384}
FAMILIES = {
    "llama": LONG,
    "qwen2": LONG,
    "qwen3": LONG,
    "mistral": {**LONG, "sliding_window": 16},
    "gemma2": {**LONG, "sliding_window": 16},
    "gemma3": {**LONG, "sliding_window": 16},
    "phi3": LONG,
    "gpt2": {"n_positions": 9216},
}

CPU = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
GPU = [("cuda", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
WHERE = [
    pytest.param(device, dtype, id=f"{device}-{str(dtype)[6:]}", marks=[pytest.mark.gpu] if device == "cuda" else [])
    for device, dtype in CPU + GPU
]


def sequence(length: int) -> torch.Tensor:
    return torch.randint(3, size_for("cpu").vocab, (length,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("device, dtype", WHERE)
@pytest.mark.parametrize("family", FAMILIES)
def test_sequence_keeps_its_bits_on_every_axis(family, device, dtype):
    model = build(family, device, dtype, **FAMILIES[family])
    plan = AxesPlan(batches=(2, 3, 5, 8, 17, 33, 64, 100, 256)) if device == "cuda" else AxesPlan()
    ids = sequence(41)
    stock = failures(Axes(model, ids, plan))
    assert stock, "the stock model must fail this test somewhere, or it shows nothing"
    hf_batchinv.convert(model)
    assert failures(Axes(model, ids, plan)) == {}


def differences(model, ids: torch.Tensor, plan: AxesPlan) -> dict[str, int]:
    """As `failures`, without decoding a long text token by token from its start."""
    return failures(Axes(model, ids, replace(plan, token_by_token=False)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("border", [64, 128, 256, 512, 1024])
def test_lengths_around_tile_borders_keep_their_bits(family, border, dtype):
    model = build(family, "cuda", dtype, **FAMILIES[family])
    found = {}
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
            found[converted, length] = differences(model, sequence(length), plan)
    assert any(found[False, length] for length in (border - 1, border, border + 1)), "the stock model must fail"
    assert not any(found[True, length] for length in (border - 1, border, border + 1)), found


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_eight_thousand_tokens_keep_their_bits(family):
    model = build(family, "cuda", torch.bfloat16, **FAMILIES[family])
    plan = AxesPlan(
        batches=(2, 5), pads=(70,), chunks=((4097,), (8190,)), static_lengths=(9000,), decode_from=8195, new_tokens=3
    )
    assert differences(model, sequence(8200), plan), "the stock model must fail this test somewhere"
    hf_batchinv.convert(model)
    assert differences(model, sequence(8200), plan) == {}
