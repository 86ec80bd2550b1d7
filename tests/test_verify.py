"""verify: every axis is walked or says why not; stock models are found guilty, converted ones are not."""

import json
import math
import re

import pytest
import torch
import transformers as T

import hf_batchinv
from hf_batchinv.testing import differing
from hf_batchinv.verify import cases
from hf_batchinv.verify.cases import AXES
from hf_batchinv.verify.compare import compare
from hf_batchinv.verify.report import DIFFERS, FAILED, NOT_APPLICABLE, SAME, AxisResult, CaseResult
from hf_batchinv.verify.run import chosen_axes
from hf_batchinv.verify.subject import VerifyError
from tests import faults
from tests.cases.models import build
from tests.test_cli_demo import save_tokenizer
from tests.tiny_models import ENCODER, make

DECODERS = set(AXES) - {"images"}
ENCODERS = {"batch-size", "mates", "place", "left-padding", "right-padding", "mask-form", "combined", "repetition"}
MODELS = {
    "llama": ("decoder", DECODERS),
    "gemma3": ("decoder", DECODERS),
    "gpt2": ("decoder", DECODERS),
    "opt": ("decoder", DECODERS),
    "bert": ("encoder", ENCODERS),
    "llama-classifier": ("encoder", ENCODERS),
    "t5": ("encoder-decoder", DECODERS),
}


def verify(model, **options):
    return hf_batchinv.verify(model, progress=False, **{"budget": 2, **options})


def by_status(report):
    found = {}
    for axis in report.axes:
        found.setdefault(axis.status, set()).add(axis.axis)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_stock_model_is_guilty_and_a_converted_one_is_not(name):
    kind, applicable = MODELS[name]
    model = make(name)
    stock = verify(model, bisect=False, budget=3)
    assert stock.subject["kind"] == kind and not stock.subject["converted"]
    assert not stock.ok and stock.differs, stock
    converted = verify(hf_batchinv.convert(model))
    assert converted.ok and converted.subject["converted"], converted
    assert by_status(converted) == {SAME: applicable, NOT_APPLICABLE: set(AXES) - applicable}
    assert [axis.axis for axis in converted.axes] == list(AXES)
    for axis in converted.axes:
        assert axis.reason if axis.status == NOT_APPLICABLE else axis.values > 0, axis


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3", "bert", "t5"])
def test_on_a_gpu_a_stock_model_is_guilty_and_a_converted_one_is_not(name):
    """In float32, where a stock product on a GPU follows the number of rows at any size."""
    model = make(name).cuda()
    stock = verify(model, bisect=False, budget=3)
    assert stock.subject["device"].startswith("cuda") and not stock.ok and stock.differs, stock
    converted = verify(hf_batchinv.convert(model))
    assert converted.ok, converted


def test_counts_are_those_of_the_bits():
    """The numbers of a model with a fault that shows on any machine, counted here once more."""
    model = hf_batchinv.convert(make("llama"))
    faults.plant(model.model.layers[0].mlp, faults.AddingInAnyOrder)
    sequence = cases.Sequence(_subject(model), 0, torch.arange(10, 51))
    case = next(AXES["batch-size"](sequence))
    with torch.no_grad():
        got, want = case.got(), model(torch.arange(10, 51)[None]).logits[0]
    found = compare(got, want, is_logits=True)
    assert found.differing == differing(got, want) > 0
    assert found.values == want.numel() == 41 * 96
    assert sum(found.per_token) == found.differing and len(found.per_token) == 41
    assert found.max_abs == (got - want).abs().max().item()
    assert found.changed_tokens == int((got.argmax(-1) != want.argmax(-1)).sum())


def _subject(model):
    from hf_batchinv.verify.subject import examine

    return examine(model, None)


# --- comparing ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_neighbouring_numbers_are_one_ulp_apart_on_both_sides_of_zero(dtype):
    x = torch.tensor([[1.0, -1.0, 0.0, 3.5]], dtype=dtype)
    up = torch.nextafter(x, torch.full_like(x, math.inf))
    assert compare(up, x, False).max_ulp == 1
    assert compare(up[:, 2:3], -x[:, 2:3], False).max_ulp == 2  # 0.0 lies between -0.0 and the smallest number
    assert compare(-x, x, False).differing == 4
    assert compare(torch.tensor([[-0.0]], dtype=dtype), torch.tensor([[0.0]], dtype=dtype), False).max_ulp == 1


def test_kl_and_greedy_tokens():
    want = torch.tensor([[0.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    got = torch.tensor([[0.0, 2.5, 2.0], [5.0, 1.0, 2.0]])
    found = compare(got, want, True)
    p, q = want[0].double().softmax(0), got[0].double().softmax(0)
    assert found.max_kl == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-12)
    assert found.changed_tokens == 1 and found.per_token == (1, 0)
    assert compare(want, want.clone(), True).max_kl == 0.0
    hidden = torch.tensor([[float("-inf"), 1.0], [0.0, 1.0]])  # a token that cannot be
    assert compare(hidden + torch.tensor([[0.0, 0.0], [0.5, 0.0]]), hidden, True).max_kl > 0


def test_nan_against_a_number_is_the_largest_difference():
    found = compare(torch.tensor([[math.nan, 1.0]]), torch.tensor([[0.0, 1.0]]), False)
    assert (found.differing, found.max_abs, found.max_ulp) == (1, math.inf, None)
    same = compare(torch.tensor([[math.nan]]), torch.tensor([[math.nan]]), False)
    assert same.differing == 0


# --- the report ---


@pytest.fixture(scope="module")
def stock_report():
    return verify(make("llama"))


def test_a_report_is_plain_data(stock_report):
    data = stock_report.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert set(data) == {"ok", "subject", "budget", "seconds", "axes"} and data["ok"] is False
    assert data["subject"]["compared"] == "logits" and data["subject"]["tokens"] == [41, 53, 37]
    for axis in data["axes"]:
        assert axis["cases_tried"] == len(axis["cases"]) <= 2
        assert axis["differing_values"] == sum(case["differing"] for case in axis["cases"])
        assert (axis["status"] == DIFFERS) == (axis["differing_cases"] > 0) == (axis["first_difference"] is not None)


def test_a_report_prints_every_axis_and_its_verdict(stock_report):
    text = str(stock_report)
    assert all(re.search(rf"^ *{axis} ", text, re.MULTILINE) for axis in AXES)
    assert "images not applicable: the model takes no images" in text
    assert "Results depend on: " in text and "first differs model.layers." in text
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 120
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(stock_report)
    assert "Results depend on: " in console.export_text()


def test_a_page_needs_nothing_from_elsewhere(stock_report):
    page = stock_report.to_html()
    assert page.startswith("<!doctype html>") and page.count("<svg") == 1
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page) and "url(http" not in page and "@import" not in page
    assert all(axis in page for axis in AXES) and "LlamaForCausalLM" in page
    assert "could not" not in page and "&lt;" not in re.sub(r"<code>.*?</code>", "", page)


def test_a_picture_is_a_png(stock_report, tmp_path):
    stock_report.save_png(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert verify(hf_batchinv.convert(make("bert")), axes="mates").to_html().count("<svg") == 1


def test_the_same_call_gives_the_same_report():
    one, two = (verify(make("bert"), bisect=False) for _ in range(2))
    assert one == two  # but for the seconds


def test_infinite_differences_are_data_too():
    nan = compare(torch.tensor([[math.nan, 1.0]]), torch.tensor([[0.0, 1.0]]), True)
    data = AxisResult("mates", DIFFERS, cases=(CaseResult("4 rows", 0, nan),)).to_json()
    assert (data["max_abs"], data["max_ulp"]) == ("inf", None)
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_a_difference_that_does_not_come_back_is_said_to_have_gone():
    """A model that varies by itself: the axis repetition sees it, and no place is made up."""
    model = hf_batchinv.convert(make("llama"))
    calls = []

    class Moody(type(model.model.layers[0].mlp)):
        def forward(self, x):
            calls.append(1)
            return super().forward(x) + (len(calls) == 5)

    model.model.layers[0].mlp.__class__ = Moody
    (axis,) = verify(model, axes="repetition").axes
    assert axis.status == DIFFERS and axis.culprit is None, axis
    assert axis.notes == ("the same forward again: it differed once and not when it was run again to name the place",)


# --- what it is asked ---


def test_texts_and_tokenizer(tmp_path):
    class Config(dict):
        pass

    size = save_tokenizer(tmp_path)
    model = hf_batchinv.convert(make("llama", vocab_size=size))
    tokenizer = T.AutoTokenizer.from_pretrained(tmp_path)
    built_in = verify(model, tokenizer=tokenizer, axes="batch-size")
    assert built_in.ok and len(built_in.subject["tokens"]) == 3
    own = verify(model, tokenizer=tokenizer, texts=["a text of nineteen.", "another text of more tokens"], axes="cache")
    assert own.subject["tokens"] == [19, 27] and own.ok
    assert {case.text for case in own.axes[0].cases} == {0, 1}
    for texts, sentence in [
        (["short"], "text 0 has 5 tokens, and verify needs at least 16"),
        ([], "at least one text, got none"),
        ("one string", "put it into a list"),
    ]:
        with pytest.raises(VerifyError, match=sentence):
            verify(model, tokenizer=tokenizer, texts=texts)
    with pytest.raises(VerifyError, match="texts need the model's tokenizer"):
        verify(model, texts=["a text of nineteen."])
    with pytest.raises(VerifyError, match=r"the tokenizer gives token \d+, and the model has 96"):
        verify(make("llama"), tokenizer=tokenizer)


def test_axes_by_name():
    assert chosen_axes("all") == list(AXES) and chosen_axes("cache,mates") == ["mates", "cache"]
    report = verify(make("bert"), axes=["mates", "place"])
    assert [axis.axis for axis in report.axes] == ["mates", "place"]
    with pytest.raises(VerifyError, match="axes must be 'all' or some of batch-size, .*, got padding"):
        verify(make("bert"), axes="mates,padding")
    with pytest.raises(VerifyError, match="got none"):
        verify(make("bert"), axes=[])


def test_the_budget_is_a_number_of_cases_shared_over_the_texts():
    for budget in (1, 3, 5):
        (axis,) = verify(make("llama"), axes="batch-size", budget=budget, bisect=False).axes
        assert len(axis.cases) == budget
        assert {case.text for case in axis.cases} == set(range(min(budget, 3)))
    for budget in (0, 2.5, True, "many"):
        with pytest.raises(VerifyError, match="budget must be a number of cases from 1"):
            verify(make("llama"), budget=budget)


@pytest.mark.parametrize(
    "model, sentence",
    [
        (lambda: torch.nn.Linear(2, 2), "model must be a Transformers model .*, got Linear; .*assert_batch_invariant"),
        (
            lambda: T.ViTModel(T.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16)),
            "ViTModel takes pixel_values, and verify runs models that take input_ids",
        ),
    ],
)
def test_a_model_that_cannot_be_asked_is_refused(model, sentence):
    with pytest.raises(VerifyError, match=sentence):
        verify(model())


def test_a_model_without_numbers_is_no_success():
    model = make("llama")
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(VerifyError, match="hold no finite number"):
        verify(model)


def test_an_axis_that_raises_is_reported_and_is_no_success(monkeypatch):
    model = hf_batchinv.convert(make("llama"))
    monkeypatch.setattr(
        type(model), "generate", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no room\nat all"))
    )
    report = verify(model, axes=["mates", "generate"])
    assert [axis.status for axis in report.axes] == [SAME, FAILED]
    assert report.axes[1].reason == "alone: no room"
    assert not report.ok and not report.differs and "No verdict, these could not run: generate." in str(report)


def test_nothing_compared_is_no_success():
    report = verify(make("bert"), axes="images")
    assert not report.ok and "nothing was compared" in str(report)


def test_the_model_is_left_as_it_was():
    model = make("llama").train()
    verify(model, axes="mates")
    assert model.training
    verify(model.eval(), axes="mates")
    assert not model.training


def test_images_are_in_the_batch_of_a_vision_language_model():
    torch.manual_seed(0)
    vision = T.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = T.LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = T.LlavaForConditionalGeneration(
        T.LlavaConfig(vision_config=vision, text_config=text, image_token_id=98)
    ).eval()
    report = verify(model, axes=["images", "chunks"])
    images, chunks = {axis.axis: axis for axis in report.axes}["images"], report.axes[0]
    assert report.subject["kind"] == "vision-language" and len(images.cases) == 2 and chunks.status == DIFFERS
    assert images.status in (SAME, DIFFERS)  # what a stock model does with images depends on the machine

    class Leaky(type(model.model.multi_modal_projector)):
        def forward(self, features):
            return super().forward(features) + features.shape[0] * 1e-3

    model.model.multi_modal_projector.__class__ = Leaky
    (guilty,) = verify(model, axes="images").axes
    assert guilty.status == DIFFERS and guilty.culprit.module == "model.multi_modal_projector", guilty.culprit


def test_positions_that_count_the_padding_are_another_question():
    config = T.BartConfig(
        vocab_size=96, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    report = verify(T.BartForConditionalGeneration(config).eval(), axes="left-padding")
    assert report.axes[0].status == NOT_APPLICABLE and "numbers the padding, too" in report.axes[0].reason


def test_a_result_taken_from_the_first_column_is_not_asked_behind_left_padding():
    """RoBERTa's classifier reads column 0; Llama's the last token, which padding on the left does not move away."""
    config = T.RobertaConfig(**ENCODER, pad_token_id=1)
    torch.manual_seed(0)
    roberta = hf_batchinv.convert(T.RobertaForSequenceClassification(config).eval())
    left, right = verify(roberta, axes=["left-padding", "right-padding"]).axes
    assert (left.status, right.status) == (NOT_APPLICABLE, SAME) and "first column" in left.reason
    assert verify(hf_batchinv.convert(make("llama-classifier")), axes="left-padding").axes[0].status == SAME


def test_packed_sequences_are_not_held_against_a_model_that_mixes_them():
    """OPT makes its mask without the positions. The probe sees that, and sees nothing of the kind in a Llama."""
    for name, packs in (("llama", True), ("opt", False)):
        (result,) = verify(make(name), axes="mask-form", budget=9).axes
        assert any(case.name == "packed position_ids" for case in result.cases) is packs
        assert any("tokens see those of other sequences" in note for note in result.notes) is not packs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_compared_in_its_own_bits(dtype):
    """generate hands out float32 copies: in ulps of the model's dtype they are at most some thousand apart."""
    report = verify(build("llama", "cpu", dtype), axes=["generate", "chunks"], bisect=False)
    assert report.subject["dtype"] == str(dtype)[6:]
    assert all(axis.max_ulp < 2**16 for axis in report.axes) and not report.ok
    assert verify(hf_batchinv.convert(build("llama", "cpu", dtype)), axes=["generate", "chunks"]).ok
