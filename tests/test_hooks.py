"""attn_implementation="batch_invariant" at every door of Transformers, and no trace at any other."""

import inspect

import pytest
import torch
import transformers as T
from torch import nn

import hf_batchinv
from hf_batchinv import UnsupportedModelError, conversion, hooks, layers
from hf_batchinv.testing import assert_same_bits
from tests.tiny_models import DECODER, depends_on_the_batch, make, run

NAME = "batch_invariant"


@pytest.fixture
def saved(tmp_path):
    make("llama").save_pretrained(tmp_path)
    return str(tmp_path)


def config():
    return T.LlamaConfig(**DECODER)


@pytest.mark.parametrize("asked", [NAME, {"": NAME}], ids=["string", "dict"])
@pytest.mark.parametrize("auto", [True, False])
def test_from_pretrained(saved, asked, auto):
    cls = T.AutoModelForCausalLM if auto else T.LlamaForCausalLM
    model = cls.from_pretrained(saved, attn_implementation=asked)
    assert conversion.is_converted(model) and hf_batchinv.audit(model).ok
    assert not depends_on_the_batch(model)
    assert_same_bits(run(hf_batchinv.revert(model)), run(make("llama")))
    assert model.config._attn_implementation == "sdpa"


def test_from_pretrained_with_everything_around_it(saved):
    want = run(hf_batchinv.convert(make("llama")))
    pair = T.LlamaForCausalLM.from_pretrained(saved, attn_implementation=NAME, output_loading_info=True)
    assert_same_bits(run(pair[0]), want)
    assert not pair[1]["missing_keys"]
    by_config = T.LlamaConfig.from_pretrained(saved, attn_implementation=NAME)
    assert_same_bits(run(T.LlamaForCausalLM.from_pretrained(saved, config=by_config)), want)
    half = T.AutoModelForCausalLM.from_pretrained(saved, attn_implementation=NAME, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and not depends_on_the_batch(half)


def test_from_pretrained_with_a_device_map_that_offloads(saved, tmp_path):
    placed = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    placed |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = T.AutoModelForCausalLM.from_pretrained(
        saved, attn_implementation=NAME, device_map=placed, offload_folder=tmp_path / "offloaded"
    )
    assert model.model.layers[1].mlp.down_proj.weight.device.type == "meta"
    assert_same_bits(run(model), run(hf_batchinv.convert(make("llama"))))


def test_from_config_and_private_from_config():
    for build in (T.AutoModelForCausalLM.from_config, T.LlamaForCausalLM._from_config):
        model = build(config(), attn_implementation=NAME).eval()
        assert conversion.is_converted(model) and not depends_on_the_batch(model)


def test_a_composite_model_is_converted_whole_and_not_in_parts():
    text = T.LlamaConfig(**DECODER)
    composite = T.EncoderDecoderConfig.from_encoder_decoder_configs(text, T.LlamaConfig(**DECODER))
    assert composite.sub_configs is not None

    class Outer(T.PreTrainedModel):
        config_class = T.LlamaConfig

        def __init__(self, config):
            super().__init__(config)
            self.inner = T.AutoModelForCausalLM.from_config(config)
            self.extra = nn.Linear(4, 4)
            self.post_init()

    asked = config()
    asked._attn_implementation = NAME
    plain = Outer(asked)  # no loading function was called: nothing may look converted
    assert not conversion.is_converted(plain.inner)
    with pytest.raises(ValueError, match=r"never converted; call hf_batchinv\.convert\(model\)"):
        run(plain.inner)
    whole = Outer._from_config(config(), attn_implementation=NAME)
    assert layers.origin_of(whole.extra).layer == "linear" and conversion.is_converted(whole.inner)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "bert", "t5"])
def test_set_attn_implementation_converts_and_reverts(name):
    model = make(name)
    stock, attention = run(model), model.config._attn_implementation
    model.set_attn_implementation(NAME)
    assert conversion.is_converted(model) and hf_batchinv.audit(model).ok
    assert not depends_on_the_batch(model)
    model.set_attn_implementation("eager")
    assert not conversion.is_converted(model)
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation(NAME)
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    if name != "t5":  # 5.17 leaves the encoder and the decoder of a T5 at "eager"
        assert_same_bits(run(model), stock)


def test_the_paged_name_of_continuous_batching_keeps_a_model_converted():
    model = hf_batchinv.convert(make("llama"))
    config = model.config
    hooks._set_attn_implementation(lambda *arguments: None, model, f"paged|{NAME}")
    assert conversion.is_converted(model)
    config._attn_implementation_internal = f"paged|{NAME}"
    model.set_attn_implementation(NAME)
    assert model.config is config and config._attn_implementation == NAME
    assert hf_batchinv.revert(model).config._attn_implementation == "sdpa"


def test_from_pretrained_of_the_package(saved):
    model = hf_batchinv.from_pretrained(saved)
    assert type(model) is T.LlamaForCausalLM
    assert_same_bits(run(model), run(hf_batchinv.convert(make("llama"))))
    assert type(hf_batchinv.from_pretrained(saved, cls=T.LlamaModel, dtype=torch.bfloat16)) is T.LlamaModel
    with pytest.raises(ValueError, match="attn_implementation must be left out or be 'batch_invariant', got 'sdpa'"):
        hf_batchinv.from_pretrained(saved, attn_implementation="sdpa")


def test_strict_reaches_the_load(tmp_path):
    T.MixtralForCausalLM(T.MixtralConfig(**DECODER, num_local_experts=4)).save_pretrained(tmp_path)
    for load in (hf_batchinv.from_pretrained, T.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(UnsupportedModelError, match="experts are not covered yet"):
            load(tmp_path, attn_implementation=NAME)
    with pytest.warns(UserWarning, match="only partly batch invariant"):
        model = hf_batchinv.from_pretrained(tmp_path, strict=False)
    assert conversion.is_converted(model)
    with pytest.raises(UnsupportedModelError):  # the flag is gone again
        T.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)


def test_models_outside_the_interface_are_refused_before_they_are_built(tmp_path):
    T.FalconForCausalLM(
        T.FalconConfig(vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    ).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="FalconForCausalLM .*outside the AttentionInterface"):
        T.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)


def test_a_refused_set_attn_implementation_changes_nothing():
    model = make("llama", head_dim=8)
    with pytest.raises(UnsupportedModelError, match="head_dim=8"):
        model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == "sdpa"


def test_use_kernels_is_refused_in_one_sentence(saved):
    message = "use_kernels=True replaces layers that attn_implementation='batch_invariant' converts"
    with pytest.raises(ValueError, match=message):
        T.AutoModelForCausalLM.from_pretrained(saved, attn_implementation=NAME, use_kernels=True)
    with pytest.raises(ValueError, match=message):
        hf_batchinv.convert(make("llama")).set_use_kernels(True)


def test_other_models_are_untouched(saved):
    for model in (
        T.AutoModelForCausalLM.from_pretrained(saved),
        T.AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager"),
        T.AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa"),
    ):
        assert not any(layers.origin_of(module) or "_batch_invariant" in vars(module) for module in model.modules())
        model.set_attn_implementation("eager")
        assert model.config._attn_implementation == "eager"
        model.extra = nn.Conv1d(1, 1, 1)


def test_installing_again_changes_nothing_and_signatures_stay():
    names = ("from_pretrained", "_from_config", "set_attn_implementation", "set_use_kernels")
    before = {name: vars(T.PreTrainedModel)[name] for name in names}
    registration = dict(nn.modules.module._global_module_registration_hooks)
    hooks.install()
    assert {name: vars(T.PreTrainedModel)[name] for name in names} == before
    assert nn.modules.module._global_module_registration_hooks == registration
    for name in names:
        wrapped = inspect.unwrap(getattr(T.PreTrainedModel, name))
        assert wrapped.__name__ == name and wrapped.__module__ == "transformers.modeling_utils"
        assert getattr(T.PreTrainedModel, name).__doc__ == wrapped.__doc__
    assert "pretrained_model_name_or_path" in inspect.signature(T.LlamaForCausalLM.from_pretrained).parameters
    assert list(inspect.signature(T.PreTrainedModel.set_attn_implementation).parameters)[1] == "attn_implementation"
