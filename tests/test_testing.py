"""hf_batchinv.testing for users' own suites: what passes, what fails, and what the message says."""

import pytest
import torch
from torch import nn

import hf_batchinv
from hf_batchinv.testing import assert_batch_invariant, assert_same_bits
from tests import faults
from tests.tiny_models import make


def ids(rows=5, length=13):
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(1))


def test_a_converted_model_passes_and_the_same_model_with_a_fault_does_not():
    model = hf_batchinv.convert(make("llama"))
    inputs = {"input_ids": ids(), "attention_mask": torch.ones(5, 13, dtype=torch.long)}
    assert_batch_invariant(model, inputs)
    faults.plant(model.model.layers[1].mlp.down_proj, faults.StockProduct)
    with pytest.raises(AssertionError) as caught:
        assert_batch_invariant(model, inputs)
    message = str(caught.value)
    assert message.startswith("LlamaForCausalLM: row 0 alone differs from row 0 of 5 in output['logits']: ")
    assert "values differ in their bits, first at (" in message
    assert "first differs model.layers.1.mlp.down_proj (StockProduct), input 5x13x96 against 1x13x96" in message
    assert "in it aten.bmm" in message


def test_a_function_that_looks_at_its_batch_fails():
    assert_batch_invariant(lambda x: x * 2, torch.randn(3, 4))
    with pytest.raises(AssertionError, match=r"centre: row 0 alone differs .* 4 of 4 values differ in their bits"):
        assert_batch_invariant(lambda x: x - x.mean(0), torch.randn(3, 4), "centre")


def test_a_single_bit_in_one_row_is_seen():
    def flips(x):
        y = x.clone()
        if len(x) == 4:
            y[2, 1] = torch.nextafter(y[2, 1], torch.tensor(9.0))
        return {"a": x, "b": [y, "text", 3]}

    with pytest.raises(AssertionError, match=r"row 2 alone differs from row 2 of 4 in output\['b'\]\[0\]: 1 of 5"):
        assert_batch_invariant(flips, (torch.randn(4, 5),))


def test_order_and_half_batches_are_tried():
    x = torch.randn(4, 3)
    with pytest.raises(AssertionError, match="in reverse order"):
        assert_batch_invariant(lambda y: y + (len(y) == 4 and not torch.equal(y[0], x[0])), x)
    with pytest.raises(AssertionError, match="in the first half"):
        assert_batch_invariant(lambda y: y + (len(y) == 2), x)


def test_padding_is_not_compared():
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[0, 4:] = 0

    def noisy_padding(hidden, attention_mask):
        return hidden + (1 - attention_mask)[..., None] * len(hidden)

    assert_batch_invariant(noisy_padding, {"hidden": torch.randn(3, 6, 2), "attention_mask": mask})
    with pytest.raises(AssertionError):
        assert_batch_invariant(lambda hidden, mask: noisy_padding(hidden, mask), (torch.randn(3, 6, 2), mask))


def test_arguments_without_rows_go_along():
    assert_batch_invariant(
        lambda x, scale, flag: x * scale if flag else None, (torch.randn(3, 2), torch.ones(7, 2)[0], True)
    )


@pytest.mark.parametrize(
    "inputs, sentence",
    [
        (torch.randn(1, 3), "a tensor of at least 2 rows (dimension 0), got 1; pass a batch"),
        ({"x": 3}, "got 0; pass a batch"),
        ("text", "inputs must be a tensor, a mapping or a tuple, got str"),
    ],
)
def test_inputs_without_a_batch_are_refused(inputs, sentence):
    with pytest.raises(ValueError) as caught:
        assert_batch_invariant(lambda x: x, inputs)
    assert sentence in str(caught.value)


def test_an_output_without_rows_is_refused():
    with pytest.raises(ValueError, match="must return a tensor of 3 rows like its inputs, got none"):
        assert_batch_invariant(lambda x: x.sum(), torch.randn(3, 2))


def test_a_module_that_keeps_state_of_the_model_is_left_without_hooks():
    model = nn.Sequential(faults.StockProduct(32, 8, bias=False))
    with pytest.raises(AssertionError, match="first differs 0 \\(StockProduct\\)"):
        assert_batch_invariant(model, torch.randn(4, 3, 32))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_same_bits_says_what_differs_first():
    assert_same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    with pytest.raises(AssertionError, match="logits: 1 of 2 values differ in their bits, first at flat index 1"):
        assert_same_bits(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), "logits")
