"""verify names the first module and operator that differ: planted faults exactly, stock models truly."""

import pytest
import torch
from torch import nn

import hf_batchinv
from hf_batchinv import layers
from hf_batchinv.testing import bits
from hf_batchinv.verify.align import NO_TOKENS, ROW, TOKENS, Place, Span, fingerprint
from tests import faults
from tests.cases.models import build


def converted(family, cls="AutoModelForCausalLM"):
    return hf_batchinv.convert(build(family, "cpu", torch.float32, cls=cls))


def verify(model, *axes, **options):
    return hf_batchinv.verify(model, axes=axes, progress=False, **{"budget": 3, **options})


def culprit(model, axis):
    """Where an axis first differs; the model without its fault must be fine on that axis, which the caller shows."""
    (result,) = verify(model, axis).axes
    assert result.status == "differs", result
    return result.culprit


# --- planted faults: (family, model class, name of the module, how to plant, axis, operator) ---

FAULTS = {
    "stock product": ("llama", "model.layers.1.mlp.down_proj", faults.StockProduct, "batch-size", "aten.bmm"),
    "row-count switch": ("llama", "model.layers.1.input_layernorm", faults.RowCountNorm, "batch-size", "aten.sum"),
    "split by length": ("llama", "model.layers.1.self_attn", None, "cache", "aten.bmm"),
    "index_add_": ("llama", "model.layers.0.mlp", faults.AddingInAnyOrder, "batch-size", "aten.index_add_"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_exactly(fault):
    family, name, cls, axis, operator = FAULTS[fault]
    model = converted(family)
    assert verify(model, axis).ok, "without the fault there is nothing to name"
    module = model.get_submodule(name)
    faults.plant_split(module) if cls is None else faults.plant(module, cls)
    found = culprit(model, axis)
    assert (found.module, found.operator) == (name, operator), found
    assert found.kind == layers.stock_class(module).__name__ and found.tokens > 0
    assert name in str(found) and operator in str(found)


def test_a_mask_that_forgets_right_padding_is_named_exactly():
    model = converted("bert", "AutoModel")
    assert verify(model, "right-padding", "batch-size").ok
    name = "encoder.layer.1.attention.self"
    faults.plant(model.get_submodule(name), faults.UnmaskedAttention)
    found = culprit(model, "right-padding")
    assert found.module == name and found.operator.endswith(".attention"), found
    assert verify(model, "batch-size").ok, "without padding the fault does not show"


def test_shapes_of_the_culprit_are_those_of_both_runs():
    model = converted("llama")
    faults.plant(model.model.layers[1].mlp.down_proj, faults.StockProduct)
    found = culprit(model, "batch-size")
    rows, tokens, width = found.inputs[0]
    assert rows > 2 and found.inputs_alone == ((1, tokens, width),) and width == 704
    varied, alone = found.operator_shapes
    assert varied == ((rows, tokens, 234), (rows, 234, 256)) and alone == ((1, tokens, 704), (1, 704, 256))


def test_the_earlier_of_two_faults_is_named():
    model = converted("llama")
    faults.plant(model.model.layers[1].mlp.down_proj, faults.StockProduct)
    faults.plant(model.model.layers[0].mlp, faults.AddingInAnyOrder)
    assert culprit(model, "batch-size").module == "model.layers.0.mlp"


def test_a_fault_in_the_encoder_is_named():
    model = converted("t5", "AutoModelForSeq2SeqLM")
    assert verify(model, "batch-size", "generate").ok
    name = "encoder.block.1.layer.0.SelfAttention.v"
    faults.plant(model.get_submodule(name), faults.StockProduct)
    for axis in ("batch-size", "generate"):
        report = verify(model, axis)
        assert report.axes[0].culprit.module == name, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stock_llama_is_guilty_by_a_linear_or_its_attention(dtype):
    report = hf_batchinv.verify(build("llama", "cpu", dtype), budget=2, progress=False)
    guilty = {axis.axis: axis.culprit for axis in report.axes if axis.status == "differs"}
    assert len(guilty) >= 3 and not report.ok, report
    products = ("aten.mm", "aten.addmm", "aten.linear", "mkldnn._linear_pointwise")
    for found in guilty.values():
        kinds = {
            "Linear": found.operator in products,
            "LlamaAttention": "attention" in found.operator or found.operator == "aten.bmm",
            "LlamaRMSNorm": found.operator in ("aten.mean", "aten.rsqrt", "aten._fused_rms_norm"),
            "SiLUActivation": found.operator == "aten.silu",
        }
        assert kinds.get(found.kind), found


def test_the_model_itself_is_named_for_what_no_submodule_does():
    """Also in a later step of generate, where only the model's own forward adds something."""
    model = converted("llama")

    class Adds(type(model)):
        def forward(self, input_ids=None, **kwargs):
            output = super().forward(input_ids=input_ids, **kwargs)
            output.logits = output.logits + 0.1 * (input_ids.shape[1] == 1)
            return output

    model.__class__ = Adds
    found = culprit(model, "generate")
    assert (found.module, found.operator, found.call) == ("", "aten.add", 1), found


def test_without_bisection_nothing_is_named():
    model = converted("llama")
    faults.plant(model.model.layers[1].mlp.down_proj, faults.StockProduct)
    (result,) = verify(model, "batch-size", bisect=False).axes
    assert result.status == "differs" and result.culprit is None


def test_hooks_are_gone_afterwards():
    model = converted("llama")
    faults.plant(model.model.layers[1].mlp.down_proj, faults.StockProduct)
    verify(model, "batch-size", "generate")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# --- its parts ---


def test_a_fingerprint_sees_every_changed_bit_and_nothing_else():
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(3, 50, generator=random).to(dtype)
        want = fingerprint(x)
        assert torch.equal(fingerprint(x.clone()), want)
        for bit in range(x.element_size() * 8 - 1):
            for column in (0, 1, 31, 49):
                y = x.clone()
                bits(y)[1, column] ^= 1 << bit  # `bits` is a view of a contiguous tensor
                assert (fingerprint(y) == want).tolist() == [True, False, True]
    minus, plus = torch.tensor([[-0.0]]), torch.tensor([[0.0]])
    assert not torch.equal(fingerprint(minus), fingerprint(plus))
    swapped = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    assert fingerprint(swapped)[0] != fingerprint(swapped)[1]


ROWS, WIDTH = 3, 7
SPAN = Span(1, ROWS, Place(2, 5, WIDTH))


@pytest.mark.parametrize(
    "shape, moved",
    [
        ((ROWS, WIDTH, 4), lambda x: x[1, 2:]),
        ((1, WIDTH, 4), lambda x: x[0, 2:]),
        ((ROWS, WIDTH), lambda x: x[1, 2:]),
        ((ROWS * WIDTH, 4), lambda x: x.view(ROWS, WIDTH, 4)[1, 2:]),
        ((ROWS, 2, WIDTH, 4), lambda x: x[1, :, 2:].transpose(0, 1)),
        ((ROWS * 2, WIDTH, 4), lambda x: x.view(ROWS, 2, WIDTH, 4)[1, :, 2:].transpose(0, 1)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)
def test_the_tokens_of_a_sequence_are_found_by_the_sizes(shape, moved):
    x = torch.randn(shape)
    found = SPAN.of(x)
    assert found.scope == TOKENS and found.first == 0 and torch.equal(found.values, moved(x))


def test_what_is_about_no_token_is_left_out_or_compared_as_a_row():
    assert SPAN.of(torch.randn(11, 5)) is None and SPAN.of(torch.tensor(1.0)) is None
    x = torch.randn(ROWS, 1, 9)  # the head, asked for the last token alone
    assert SPAN.of(x).scope == TOKENS and SPAN.of(x).first == 4
    x = torch.randn(ROWS, 9)  # one vector for each sequence
    assert SPAN.of(x).scope == ROW and torch.equal(SPAN.of(x).values, x[1:2])
    anything = Span(1, ROWS, NO_TOKENS)
    assert anything.of(torch.randn(ROWS, 5, 5)).scope == ROW and anything.of(torch.randn(4, 5)) is None


def test_scores_along_keys_that_padding_has_moved_are_left_out():
    """53 keys of which 7 are padding are not the 53 keys of another run."""
    moved = Span(1, ROWS, Place(0, 1, 1, first=45), keys=(53,))
    still = Span(1, ROWS, Place(0, 1, 1, first=45))
    for shape in ((ROWS, 1, 1, 53), (ROWS, 4, 1, 53)):  # a mask, scores
        assert moved.of(torch.randn(shape)) is None and still.of(torch.randn(shape)) is not None
    assert moved.of(torch.randn(ROWS, 1, 53)).scope == TOKENS  # a hidden state may be as wide


def test_eager_attention_is_named_behind_padding_that_makes_two_texts_equally_long():
    """The mask of 46 tokens behind 7 of padding has the size of another text's, which is 53 tokens long."""
    model = build("llama", "cpu", torch.float32, attn_implementation="eager")
    report = verify(model, "left-padding", budget=6)
    assert report.axes[0].status == "differs"
    assert report.axes[0].culprit.module.startswith("model.layers.0.self_attn"), report


def test_one_token_of_one_row_keeps_its_heads():
    """(1, heads, 1, head) in decoding has the sizes of a flattened tensor, too."""
    x = torch.randn(1, 4, 1, 16)
    found = Span(0, 1, Place(0, 1, 1, first=33)).of(x)
    assert found.first == 33 and found.values.shape == (1, 4, 16)


def test_modules_that_run_twice_are_told_apart():
    """One weight used twice in a forward: the second use is compared with the second use."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = faults.StockProduct(32, 32, bias=False)

        def forward(self, x):
            return self.inner(self.inner(x)[:1].expand_as(x))

    from hf_batchinv.testing import assert_batch_invariant

    with pytest.raises(AssertionError, match=r"first differs inner \(StockProduct\), input 3x4x32 against 1x4x32"):
        assert_batch_invariant(Twice(), torch.randn(3, 4, 32))
