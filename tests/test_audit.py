"""audit: every module once, with the truth about it, before and after conversion."""

import json

import pytest
import transformers as T
from torch import nn

import hf_batchinv
from hf_batchinv.audit import STATUSES, Audit, Row
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
