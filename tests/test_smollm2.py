"""The guarantee on a real model: SmolLM2-135M-Instruct."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_batchinv
from hf_batchinv.smollm2 import find_smollm2
from tests.axes import Axes, AxesPlan, failures

TEXT = (
    "Richard Feynman liked to say that the first principle is that you must not fool yourself, and that you are the "
    "easiest person to fool; so he checked every sum twice, in two different orders."
)
CPU_PLAN = AxesPlan(batches=(2, 7, 33), pads=(7, 70), chunks=((13, 29),), static_lengths=(64,), new_tokens=4)
GPU_PLAN = AxesPlan(batches=(2, 7, 16, 33, 64, 128, 256))


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, dtype",
    [
        ("cpu", torch.bfloat16),
        ("cpu", torch.float32),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    ],
)
def test_smollm2_keeps_its_bits_on_every_axis(device, dtype):
    name = find_smollm2()
    ids = torch.tensor(AutoTokenizer.from_pretrained(name)(TEXT).input_ids)
    plan = GPU_PLAN if device == "cuda" else CPU_PLAN
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    some = AxesPlan(batches=(2, 7), pads=(7,), chunks=((13, 29),), static_lengths=(64,), token_by_token=False)
    assert failures(Axes(model, ids, some)), "the stock model must fail this test somewhere, or it shows nothing"
    hf_batchinv.convert(model)
    assert failures(Axes(model, ids, plan)) == {}
