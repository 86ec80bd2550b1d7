"""audit: every module once, with the truth about it, before and after conversion."""

import json

import pytest
import torch
import transformers as T
from torch import nn

import hf_batchinv
from hf_batchinv.audit import STATUSES, Audit, Row
from hf_batchinv.op_audit import audit_operators, harmless
from tests.tiny_models import DECODER, MODELS, make


@pytest.mark.parametrize("name", MODELS)
def test_audit_says_the_same_before_and_after_conversion(name):
    model = make(name)
    kinds = [(n, type(m).__name__) for n, m in model.named_modules()]
    before = hf_batchinv.audit(model)
    after = hf_batchinv.audit(hf_batchinv.convert(model))
    assert before.ok and after.ok
    assert not before.converted and after.converted
    assert before.rows == after.rows
    assert [(row.name, row.module) for row in before.rows] == kinds
    assert {row.status for row in before.rows} == set(STATUSES) - {"not covered"}
    assert hf_batchinv.audit(hf_batchinv.revert(model)) == before


def test_rows_of_a_llama():
    rows = {row.name: row for row in hf_batchinv.audit(make("llama")).rows}
    assert rows["lm_head"] == Row("lm_head", "Linear", "converted", "linear")
    assert rows["model.norm"] == Row("model.norm", "LlamaRMSNorm", "converted", "rms norm (cast_then_weight)")
    assert rows["model.layers.0.self_attn"].status == "attention"
    assert rows["model.layers.1.mlp.act_fn"].reason == "activation (silu)"
    assert rows["model.embed_tokens"].status == "elementwise"
    assert rows["model.layers.0"].status == rows[""].status == "container"


def test_uncovered_parts_carry_their_reason():
    model = T.MixtralForCausalLM(T.MixtralConfig(**DECODER, num_local_experts=4))
    report = hf_batchinv.audit(model)
    assert not report.ok
    (first, *_) = [row for row in report.rows if row.module == "MixtralExperts"]
    assert first.status == "not covered" and "experts are not covered yet" in first.reason
    with pytest.warns(UserWarning):
        hf_batchinv.convert(model, strict=False)
    after = hf_batchinv.audit(model)
    assert after.converted and not after.ok and after.rows == report.rows


def test_as_data_and_as_a_table():
    report = hf_batchinv.audit(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Conv1d(1, 1, 1)))
    assert json.loads(json.dumps(report.to_json())) == {
        "model": "Sequential",
        "converted": False,
        "ok": False,
        "rows": [
            {"name": "", "module": "Sequential", "status": "container", "reason": ""},
            {"name": "0", "module": "Linear", "status": "converted", "reason": "linear"},
            {"name": "1", "module": "Linear", "status": "converted", "reason": "linear"},
            {
                "name": "2",
                "module": "Conv1d",
                "status": "not covered",
                "reason": "is a torch.nn.Conv1d, which is not covered",
            },
        ],
    }
    text = str(report)
    assert text.startswith("Sequential is stock; this is what convert would do")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert rows == [  # what is not covered comes first
        ["not covered", "1", "Conv1d", "is a torch.nn.Conv1d, which is not covered", "2"],
        ["converted", "2", "Linear", "linear", "0"],
        ["container", "1", "Sequential", "", "(the model itself)"],
    ]
    assert "\x1b" not in text


def test_audit_is_frozen_and_reads_only():
    report = hf_batchinv.audit(make("bert"))
    assert isinstance(report, Audit)
    with pytest.raises(AttributeError):
        report.model = "other"
    with pytest.raises(AttributeError):
        report.rows[0].status = "other"
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got dict"):
        hf_batchinv.audit({})


# --- operators of a run ---


def inputs_of(model):
    ids = torch.randint(3, 90, (2, 13), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, :3] = 0
    return {**inputs, "decoder_input_ids": ids[:, :7]} if model.config.is_encoder_decoder else inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_leaves_no_operator_on_a_stock_kernel(name, dtype):
    model = make(name, dtype)
    inputs = inputs_of(model)
    stock = hf_batchinv.audit(model, inputs)
    assert not stock.ok and {row.kind for row in stock.leftover} & {"Linear", "Conv1D"}, stock
    converted = hf_batchinv.audit(hf_batchinv.convert(model), inputs)
    assert converted.ok and converted.leftover == (), converted.leftover
    assert {row.status for row in converted.operators} == {"our kernel", "exact or elementwise"}


def test_operators_are_counted_by_the_module_that_calls_them():
    rows = {
        (row.operator, row.module): row for row in hf_batchinv.audit(make("llama"), inputs_of(make("llama"))).leftover
    }
    product = rows["aten.mm", "model.layers.1.mlp.down_proj"]
    assert (product.count, product.kind, product.shapes) == (1, "Linear", ((26, 96), (96, 64)))
    assert ("aten.mm", "lm_head") in rows and rows["aten.mean", "model.norm"].kind == "LlamaRMSNorm"
    assert sum(operator == "aten.mm" for operator, _ in rows) == 15


def test_one_stock_module_in_a_converted_model_is_seen():
    """What the static table takes for covered by its class is watched while it runs."""
    model = hf_batchinv.convert(make("llama"))
    model.model.layers[1].mlp.down_proj.__class__ = nn.Linear
    report = hf_batchinv.audit(model, inputs_of(model))
    assert [(row.operator, row.module, row.status) for row in report.leftover] == [
        ("aten.mm", "model.layers.1.mlp.down_proj", "stock kernel")
    ]
    assert not report.ok


# What a module computes -> the operator that must be reported, by name, whatever PyTorch calls it below.
GUILTY = {
    "matmul": lambda x: x @ x.transpose(1, 2),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "cumsum": lambda x: x.cumsum(-1),
    "prod": lambda x: x.prod(-1),
    "layer_norm": lambda x: torch.layer_norm(x, (8,)),
    "rms_norm": lambda x: torch.rms_norm(x, (8,)),
    "group_norm": lambda x: torch.group_norm(x, 2),
    "conv1d": lambda x: torch.conv1d(x, torch.ones(3, 4, 2)),
    "avg_pool": lambda x: torch.nn.functional.avg_pool1d(x, 2),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "index_add_": lambda x: torch.zeros(3, 4, 8).index_add_(0, torch.tensor([0, 0]), x),
    "scatter_add": lambda x: torch.zeros(2, 4, 8).scatter_add(2, torch.zeros(2, 4, 8, dtype=torch.long), x),
    "index_put accumulate": lambda x: torch.zeros(4, 8).index_put((torch.tensor([0, 0]),), x[0, :2], accumulate=True),
    "scatter_reduce": lambda x: torch.zeros(2, 4, 8).scatter(
        2, torch.zeros(2, 4, 8, dtype=torch.long), x, reduce="add"
    ),
    "fft": lambda x: torch.fft.fft(x),
    "silu": lambda x: torch.nn.functional.silu(x),
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "random numbers": lambda x: torch.rand_like(x),
    "cdist": lambda x: torch.cdist(x, x),
    "trace": lambda x: torch.trace(x[0]),
}
INNOCENT = {
    "elementwise": lambda x: (x * 2 + 1).exp() / x.cos().abs().clamp(min=0.1),
    "moves": lambda x: torch.cat([x.transpose(1, 2).flip(0), x.reshape(2, 8, 4)], -1)[:, 1:].contiguous(),
    "order": lambda x: x.topk(3).values + x.amax(-1, keepdim=True) + x.sort().values[..., :3],
    "counting": lambda x: (x > 0).sum() + torch.arange(9).cumsum(0)[0],
    "index_put": lambda x: torch.zeros(4, 8).index_put((torch.tensor([0, 1]),), x[0, :2]),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([1, 2]), x[0]),
}


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("name", GUILTY)
def test_what_may_vary_is_never_taken_for_harmless(name):
    rows = audit_operators(Calls(GUILTY[name]), torch.randn(2, 4, 8))
    assert any(not harmless(row.status) for row in rows), rows


@pytest.mark.parametrize("name", INNOCENT)
def test_what_cannot_vary_is_not_reported(name):
    rows = audit_operators(Calls(INNOCENT[name]), torch.randn(2, 4, 8))
    assert rows and all(harmless(row.status) for row in rows), rows


def test_an_operator_in_no_list_is_unknown():
    with torch.library._scoped_library("audit_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        (row,) = audit_operators(Calls(torch.ops.audit_test.twice), torch.randn(2, 3))
    assert (row.operator, row.status) == ("audit_test.twice", "unknown")


def test_operators_as_data_and_as_a_table():
    model = make("llama")
    report = hf_batchinv.audit(model, inputs_of(model))
    data = json.loads(json.dumps(report.to_json()))
    assert {"operator", "module", "kind", "count", "status", "shapes"} == set(data["operators"][0])
    assert "operators" not in hf_batchinv.audit(model).to_json()
    text = str(report)
    assert "operators of one run of the stock model" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert any(row[:4] == ["stock kernel", "15", "aten.mm", "Linear"] for row in rows), text
    with pytest.raises(TypeError, match="example_inputs must be a tensor, a mapping .*, got str"):
        hf_batchinv.audit(model, "text")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
