"""convert and revert: what changes, what stays, and what is refused."""

import copy
import functools
import io
import pickle
import threading

import accelerate
import peft
import pytest
import torch
import transformers as T
from torch import matmul as product
from torch import nn
from torch.nn import functional as F

import hf_batchinv
from hf_batchinv import UnsupportedModelError, conversion, layers
from hf_batchinv.layers.activation import FORMULAS
from hf_batchinv.testing import assert_same_bits, differing
from tests.tiny_models import DECODER, ENCODER, MODELS, depends_on_the_batch, make, run

DTYPES = (torch.float32, torch.bfloat16)


def snapshot(model):
    """Everything that revert must put back."""
    return {
        name: (type(module), sorted(set(vars(module)) - {"config"}), vars(module).get("forward"))
        for name, module in model.named_modules()
    }


def names_of(model):
    return {conf._attn_implementation for module in model.modules() for conf in conversion._configs_of(module)}


# --- the models of the issue ---


@pytest.mark.parametrize("name", MODELS)
def test_converted_model_agrees_with_stock_and_no_longer_with_the_batch(name):
    model = make(name)
    stock = run(model)
    assert hf_batchinv.convert(model) is model
    torch.testing.assert_close(run(model), stock, atol=2e-5, rtol=1e-4)
    assert not depends_on_the_batch(model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_a_stock_model_depends_on_the_batch(name):
    assert depends_on_the_batch(make(name))


@pytest.mark.parametrize("name", MODELS)
def test_revert_leaves_classes_forwards_attributes_attention_and_bits_as_they_were(name):
    model = make(name)
    before, attention, stock = snapshot(model), names_of(model), run(model)
    hf_batchinv.convert(model)
    assert names_of(model) == {"batch_invariant"}
    run(model)
    assert hf_batchinv.revert(model) is model
    assert snapshot(model) == before
    assert names_of(model) == attention
    assert_same_bits(run(model), stock)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_half_precision_models_convert(name, dtype):
    model = hf_batchinv.convert(make(name, dtype))
    assert not depends_on_the_batch(model)
    assert run(model).dtype == dtype


def test_converted_modules_are_still_what_they_were():
    model = make("llama")
    keys, kinds = list(model.state_dict()), {name: type(module) for name, module in model.named_modules()}
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    hf_batchinv.convert(model)
    assert list(model.state_dict()) == keys
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == weights
    for name, module in model.named_modules():
        assert isinstance(module, kinds[name])
        assert type(module).__module__ == kinds[name].__module__
        if module._modules:
            assert module._batch_invariant
            assert (type(module) is kinds[name]) == (not name.endswith(("self_attn", "mlp")))
    assert "BatchInvariantLlamaRMSNorm((64,), eps=1e-06)" in repr(model)


def test_classes_are_made_once_and_by_behaviour():
    first, second = (hf_batchinv.convert(make("llama")) for _ in range(2))
    assert type(first.lm_head) is type(second.lm_head)
    assert layers.origin_of(first.model.norm).layer == "rms_norm"
    assert layers.origin_of(first.model.layers[0].mlp.act_fn) == layers.Origin(
        type(make("llama").model.layers[0].mlp.act_fn), "activation", ("silu",)
    )
    assert layers.origin_of(make("llama").lm_head) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("formula", FORMULAS)
def test_activation_formulas_have_no_tail_on_the_cpu_and_are_as_accurate_as_stock(formula, dtype):
    stock = {
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "softplus": F.softplus,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "mish": F.mish,
        "sqrt_softplus": lambda x: F.softplus(x).sqrt(),
    }[formula]
    x = (torch.randn(20011, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)

    def ours(x):
        return FORMULAS[formula](x.float()).to(x.dtype)

    for length in (1, 3, 7, 15, 33, 61, 997):
        assert_same_bits(ours(x[5 : 5 + length]), ours(x)[5 : 5 + length])
    assert_same_bits(ours(x[::2]), ours(x)[::2])
    if dtype == torch.float32 and formula != "quick_gelu":  # the control: stock's tail is not its vector body
        whole = stock(x)
        tails = sum(differing(stock(x[5 : 5 + n]), whole[5 : 5 + n]) for n in range(1, 200))
        assert tails or differing(stock(x[::2]), whole[::2])
    exact = stock(x.double())
    error, stock_error = ((f(x).double() - exact).abs().max() for f in (ours, stock))
    assert error <= 1.1 * stock_error + 2e-7


# --- more than once, more than one, more than one thread ---


def test_convert_twice_is_convert_once():
    model = hf_batchinv.convert(make("llama"))
    kinds, out, config = {n: type(m) for n, m in model.named_modules()}, run(model), model.config
    hf_batchinv.convert(model)
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    assert model.config is config
    assert_same_bits(run(model), out)
    assert hf_batchinv.revert(model).config._attn_implementation == "sdpa"
    before = snapshot(model)
    hf_batchinv.revert(model)
    assert snapshot(model) == before


def test_a_second_model_of_the_same_config_object_stays_stock():
    config = T.LlamaConfig(**DECODER)
    first, second = T.LlamaForCausalLM(config).eval(), T.LlamaForCausalLM(config).eval()
    stock = run(second)
    hf_batchinv.convert(first)
    assert config._attn_implementation == second.config._attn_implementation == "sdpa"
    assert first.config is first.model.config is first.model.layers[0].self_attn.config is not config
    assert_same_bits(run(second), stock)


def test_threads_run_converted_and_stock_models_at_once():
    converted, stock = hf_batchinv.convert(make("llama")), make("qwen2")
    want = {id(model): run(model) for model in (converted, stock)}
    got = []

    def work(model):
        got.extend((id(model), run(model)) for _ in range(5))

    threads = [threading.Thread(target=work, args=(model,)) for model in (converted, stock, converted, stock)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 20
    for key, out in got:
        assert_same_bits(out, want[key])


def test_tied_and_untied_heads_convert():
    for tied in (True, False):
        model = hf_batchinv.convert(make("llama", tie_word_embeddings=tied))
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert layers.origin_of(model.lm_head).layer == "linear"
        assert not depends_on_the_batch(model)


def test_one_info_line_says_what_was_converted(monkeypatch):
    lines = []
    monkeypatch.setattr(conversion.logger, "info", lines.append)
    hf_batchinv.convert(hf_batchinv.convert(make("llama")))
    assert len(lines) == 1
    assert conversion.logger.name.startswith("transformers.")
    assert lines[0].startswith("hf_batchinv converted LlamaForCausalLM: 2 activation, 2 attention,")
    assert "15 linear" in lines[0] and "5 rms norm" in lines[0]


# --- copies and files ---


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


# Where the `kernels` library is in use, stock Llamas cannot be pickled, so it is not among those.
@pytest.mark.parametrize(
    ("name", "through"),
    [
        ("llama", copy.deepcopy),
        ("t5", copy.deepcopy),
        ("gpt2", copy.deepcopy),
        ("t5", through_pickle),
        ("gpt2", through_pickle),
    ],
)
def test_pickle_and_deepcopy_keep_a_model_converted(name, through):
    model = hf_batchinv.convert(make(name))
    want = run(model)
    twin = through(model)
    assert {n: type(m) for n, m in twin.named_modules()} == {n: type(m) for n, m in model.named_modules()}
    assert_same_bits(run(twin), want)
    assert names_of(hf_batchinv.revert(twin)) == {"sdpa"}
    assert names_of(model) == {"batch_invariant"}
    assert_same_bits(run(model), want)


def test_torch_save_of_a_converted_model():
    model = hf_batchinv.convert(make("gpt2"))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_same_bits(run(torch.load(file, weights_only=False)), run(model))


@pytest.mark.parametrize("name", ["llama", "gemma3", "bert-mlm"])
def test_save_pretrained_and_from_pretrained(name, tmp_path):
    model = hf_batchinv.convert(make(name))
    model.save_pretrained(tmp_path)
    assert "batch_invariant" not in (tmp_path / "config.json").read_text()
    assert_same_bits(run(type(model).from_pretrained(tmp_path, attn_implementation="batch_invariant")), run(model))
    assert_same_bits(run(type(model).from_pretrained(tmp_path)), run(hf_batchinv.revert(model)))


# --- wrappers ---


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("convert_first", [True, False])
def test_accelerate_offloading_before_and_after_conversion(name, convert_first):
    want, stock = run(hf_batchinv.convert(make(name))), run(make(name))
    model = make(name)
    if convert_first:
        hf_batchinv.convert(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    if not convert_first:
        hf_batchinv.convert(model)
    assert_same_bits(run(model), want)
    hf_batchinv.revert(model)
    assert_same_bits(run(model), stock)
    hf_batchinv.convert(model)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert_same_bits(run(model), want)
    hf_batchinv.revert(model)
    assert_same_bits(run(model), stock)


def test_accelerate_disk_offload_and_meta_weights(tmp_path):
    model = make("llama")
    want = run(hf_batchinv.convert(make("llama")))
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert model.lm_head.weight.device.type == "meta"
    assert_same_bits(run(hf_batchinv.convert(model)), want)


def test_a_model_on_the_meta_device_can_be_planned():
    with torch.device("meta"):
        model = T.LlamaForCausalLM(T.LlamaConfig(**DECODER))
    assert not conversion.plan_conversion(model).problems


def lora(model):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def test_lora_before_and_after_conversion_gives_the_same_bits():
    before = hf_batchinv.convert(lora(make("llama")))
    want = run(before)
    assert not depends_on_the_batch(before)
    after = lora(hf_batchinv.convert(make("llama")))  # new layers are converted as they come in
    kinds = {type(module).__name__ for module in after.modules()}
    assert (
        "BatchInvariantLinear" in kinds
        and type(after.model.model.layers[0].mlp.down_proj.lora_A["default"]) is not nn.Linear
    )
    assert_same_bits(run(after), want)
    after.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0))
    assert all(layers.origin_of(module) for module in after.modules() if isinstance(module, nn.Linear))
    merged = after.merge_and_unload()
    assert not depends_on_the_batch(merged)


def test_a_resized_head_is_converted_as_it_comes_in():
    model = hf_batchinv.convert(make("llama", tie_word_embeddings=False))
    model.resize_token_embeddings(101, mean_resizing=False)
    assert layers.origin_of(model.lm_head).layer == "linear"
    assert not depends_on_the_batch(model)


def test_compiled_converted_model_equals_eager():
    model = hf_batchinv.convert(make("llama"))
    want = run(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert_same_bits(run(compiled), want)


@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead", "fullgraph": True}], ids=str)
@pytest.mark.parametrize("part", ["", "model.layers.0.mlp", "model.layers.0.self_attn.q_proj", "model.norm"])
@torch.no_grad()
def test_inductor_is_refused(part, options):
    """Whole models and parts; a converted model runs as before afterwards."""
    model = hf_batchinv.convert(make("llama"))
    want = run(model)
    torch._dynamo.reset()
    compiled = torch.compile(model.get_submodule(part), **options)
    refusal = r"torch\.compile: expected a backend that keeps every rounding \(eager, aot_eager\) .* got inductor;"
    with pytest.raises(RuntimeError, match=refusal):
        run(compiled) if part == "" else compiled(torch.randn(2, 3, model.config.hidden_size))
    assert_same_bits(run(model), want)


def test_a_model_that_compiles_itself_with_inductor_is_refused():
    model = hf_batchinv.convert(make("llama"))
    torch._dynamo.reset()
    model.compile()
    with pytest.raises(RuntimeError, match="call generate with cache_implementation='static'"):
        run(model)


def test_dropout_is_identity_in_eval_and_refused_in_training():
    model = hf_batchinv.convert(make("gpt2"))
    run(model)
    with pytest.raises(ValueError, match=r"cannot run dropout \(p=0\.1\) in training mode.*call model\.eval\(\)"):
        run(model.train())
    run(hf_batchinv.revert(model))


def test_functional_activations_and_single_products_keep_the_stock_forward():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(64, 61)

        def forward(self, x):
            return torch.sigmoid(self.proj(x)) * F.silu(x[..., :61])

    gate = Gate()
    x = torch.randn(7, 64)
    with torch.no_grad():
        stock = gate(x)
        hf_batchinv.convert(gate)
        assert layers.origin_of(gate).layer == "functional"
        torch.testing.assert_close(gate(x), stock)
        assert_same_bits(gate(x[3:4]), gate(x)[3:4])
        assert_same_bits(hf_batchinv.revert(gate)(x), stock)


# --- refusals ---


class Reducing(nn.Module):
    def forward(self, x):
        return helper(x) + self.other(x)

    def other(self, x):
        return x.cumsum(-1)


def helper(x):
    return x.mean(-1, keepdim=True)


class OddNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.eps = 1e-6

    def forward(self, x):
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class FunctionalHead(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(8, 8, dtype=torch.int32))

    def forward(self, x):
        return unknown_kernel(x, self.qweight)  # noqa: F821


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4, 64))

    def forward(self, x):
        return x * self.factor


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x


class Opaque(nn.Module):
    def forward(self, x):
        return Squares.apply(torch.ops.aten.relu(x))


def patched(module):
    module.forward = lambda x: x
    return module


PARTS = {
    "experts and routers": (
        lambda: T.MixtralForCausalLM(T.MixtralConfig(**DECODER, num_local_experts=4)),
        [
            ("model.layers.0.mlp.experts", "MixtralExperts", "experts are not covered yet"),
            ("model.layers.0.mlp.gate", "MixtralTopKRouter", "F.linear"),
        ],
    ),
    "state space": (
        lambda: T.MambaForCausalLM(T.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=1)),
        [
            ("backbone.layers.0.mixer.conv1d", "Conv1d", "is a torch.nn.Conv1d, which is not covered"),
            ("backbone.layers.0.mixer", "MambaMixer", "matmul"),
        ],
    ),
    "attention outside the interface": (
        lambda: T.BloomForCausalLM(T.BloomConfig(vocab_size=96, hidden_size=64, n_layer=1, n_head=4)),
        [("", "BloomForCausalLM", "computes attention outside the AttentionInterface")],
    ),
    "narrow heads": (
        lambda: make("llama", num_attention_heads=8),
        [("model.layers.0.self_attn", "LlamaAttention", "head_dim=8; attention covers head dims from 16 to 256")],
    ),
    "odd heads": (
        lambda: make("llama", head_dim=20),
        [("model.layers.1.self_attn", "LlamaAttention", "head_dim=20; attention covers")],
    ),
    "wide heads": (
        lambda: make("llama", head_dim=264),
        [("model.layers.1.self_attn", "LlamaAttention", "head_dim=264; attention covers")],
    ),
    "dynamic rope": (
        lambda: make("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        [("model.rotary_emb", "LlamaRotaryEmbedding", "longest row of the batch (rope type 'dynamic')")],
    ),
    "longrope": (
        lambda: make(
            "phi3",
            rope_parameters={
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            },
        ),
        [("model.rotary_emb", "Phi3RotaryEmbedding", "longest row of the batch (rope type 'longrope')")],
    ),
    "multi-head attention": (
        lambda: nn.Sequential(nn.MultiheadAttention(64, 4)),
        [("0", "MultiheadAttention", "is a torch.nn.MultiheadAttention, which is not covered")],
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2)),
        [("0", "Conv2d", "is a torch.nn.Conv2d, which is not covered")],
    ),
    "pooling over the sequence": (
        lambda: T.ModernBertForSequenceClassification(T.ModernBertConfig(**ENCODER, pad_token_id=0)),
        [("", "ModernBertForSequenceClassification", ".sum(di")],
    ),
    "functional reductions": (
        lambda: nn.Sequential(Reducing()),
        [
            ("0", "Reducing", "`x.mean(-1, keepdim=True)` in helper"),
            ("0", "Reducing", "`x.cumsum(-1)` in Reducing.other"),
        ],
    ),
    "opaque calls": (
        lambda: nn.Sequential(Opaque()),
        [("0", "Opaque", "`torch.ops.aten.relu(x)` in Opaque.forward"), ("0", "Opaque", "`Squares.apply(")],
    ),
    "unknown norm": (lambda: OddNorm(), [("", "OddNorm", "computes no norm formula that is known here")]),
    "linear with its own forward": (
        lambda: nn.Sequential(FunctionalHead(4, 4)),
        [("0", "FunctionalHead", "is a linear layer with a forward of its own")],
    ),
    "lazy linear": (lambda: nn.Sequential(nn.LazyLinear(4)), [("0", "LazyLinear", "a forward of its own")]),
    "quantised leaf": (lambda: nn.Sequential(Quantised()), [("0", "Quantised", "integer buffer 'qweight'")]),
    "float64": (
        lambda: make("llama").double(),
        [("lm_head", "Linear", "has a weight of torch.float64; load the model in")],
    ),
    "float8": (
        lambda: nn.Sequential(nn.Linear(16, 16)).to(torch.float8_e4m3fn),
        [("0", "Linear", "has a weight of torch.float8_e4m3fn")],
    ),
    "patched forward": (
        lambda: nn.Sequential(patched(nn.Linear(4, 4))),
        [("0", "Linear", "has a forward of its own on")],
    ),
    "unknown parameters": (
        lambda: nn.Sequential(Scale()),
        [("0", "Scale", "has parameters and is none of the layers")],
    ),
    "compiled": (lambda: torch.compile(nn.Linear(4, 4)), [("", "OptimizedModule", "convert the model first")]),
    "renormalising embedding": (
        lambda: nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)),
        [("0", "Embedding", "(max_norm); build it with max_norm=None")],
    ),
    "DoRA": (
        lambda: peft.get_peft_model(
            make("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, lora_dropout=0.0)
        ),
        [("base_model.model.model.layers.0.self_attn.q_proj", "Linear", "uses a variant of LoRA for ['default']")],
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_is_not_covered_is_refused_by_name_and_the_model_is_untouched(part):
    build, expected = PARTS[part]
    model = build()
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError) as caught:
        hf_batchinv.convert(model)
    for name, kind, reason in expected:
        assert any(
            (problem.name, problem.module) == (name, kind) and reason in problem.reason
            for problem in caught.value.problems
        ), caught.value.problems
        assert reason in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert snapshot(model) == before
    assert not hf_batchinv.audit(model).ok


def test_use_kernels_and_tensor_parallel_models_are_refused():
    model = make("llama")
    model._use_kernels = True
    with pytest.raises(UnsupportedModelError, match="use_kernels=True, whose kernels replace ours; load it without"):
        hf_batchinv.convert(model)
    model = make("llama")
    model._tp_size = 2
    with pytest.raises(UnsupportedModelError, match="is tensor parallel; load it without tp_plan"):
        hf_batchinv.convert(model)


def test_sharded_weights_are_refused():
    class DTensor(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(4, 4))
    model[0]._parameters["weight"] = DTensor(torch.ones(4, 4))
    assert type(model[0].weight).__name__ == "DTensor"
    with pytest.raises(UnsupportedModelError, match=r"sharded over devices \(DTensor\)"):
        hf_batchinv.convert(model)


def test_all_problems_are_listed_at_once_with_equal_ones_folded():
    model = nn.Sequential(*(nn.Conv1d(1, 1, 1) for _ in range(5)), OddNorm())
    with pytest.raises(UnsupportedModelError) as caught:
        hf_batchinv.convert(model)
    assert len(caught.value.problems) == 6
    text = str(caught.value)
    assert text.startswith(
        "Sequential cannot be made batch invariant: Conv1d (0, 1, 2 and 2 more) is a torch.nn.Conv1d"
    )
    assert "; OddNorm (5) " in text
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_strict_false_warns_with_the_list_and_converts_the_rest():
    model = T.MixtralForCausalLM(T.MixtralConfig(**DECODER, num_local_experts=4)).eval()
    stock = run(model)
    with pytest.warns(UserWarning, match="only partly batch invariant: .*MixtralExperts .*experts are not covered"):
        hf_batchinv.convert(model, strict=False)
    assert layers.origin_of(model.model.layers[0].self_attn.q_proj) and not layers.origin_of(model.model.layers[0].mlp)
    assert names_of(model) == {"batch_invariant"}
    torch.testing.assert_close(run(model), stock, atol=1e-5, rtol=1e-4)
    assert_same_bits(run(hf_batchinv.revert(model)), stock)


def test_strict_false_leaves_attention_stock_where_it_is_not_covered():
    for model in (
        make("llama", head_dim=8),
        T.BloomForCausalLM(T.BloomConfig(vocab_size=96, hidden_size=64, n_layer=1)),
    ):
        stock = run(model.eval())
        with pytest.warns(UserWarning, match="only partly"):
            hf_batchinv.convert(model, strict=False)
        assert names_of(model) <= {"sdpa", "eager"}
        torch.testing.assert_close(run(model), stock, atol=1e-5, rtol=1e-4)


def test_a_refused_submodule_cannot_be_put_into_a_converted_model():
    model = hf_batchinv.convert(make("llama"))
    with pytest.raises(UnsupportedModelError, match="Conv1d"):
        model.model.layers[0].extra = nn.Conv1d(1, 1, 1)


def test_convert_takes_modules_only():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got str; pass the model itself"):
        hf_batchinv.convert("gpt2")


class HoldsAPartial(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = functools.partial(torch.fft.fftn, dim=(1, 2))

    def forward(self, x):
        return self.mix(x).real


class CallsByAnotherName(nn.Module):
    def forward(self, x, y, z):
        f = torch.softmax
        return f(x, -1)


class CallsAnImport(nn.Module):
    def forward(self, x, y, z):
        return product(x, y)


@pytest.mark.parametrize("kind", [HoldsAPartial, CallsByAnotherName, CallsAnImport])
def test_reduction_under_another_name_is_refused(kind):
    with pytest.raises(UnsupportedModelError, match="not covered"):
        hf_batchinv.convert(kind())


def test_fnet_is_refused_for_its_fourier_transform():
    config = T.FNetConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match="fft_fftn"):
        hf_batchinv.convert(T.FNetModel(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_changed_behind_autograd_are_seen(dtype):
    """`.data`, fused optimizers and dtype round trips change values without a new tensor version."""

    def fused_step(model):
        weight = model.lm_head.weight
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=0.1, fused=True).step()

    changes = [
        fused_step,
        lambda model: model.lm_head.weight.data.zero_(),
        lambda model: model.lm_head.weight.data[5].add_(1),
        lambda model: model.lm_head.weight.data[:, 5].add_(1),
        lambda model: model.half().to(dtype),
    ]
    for change in changes:
        model = hf_batchinv.convert(make("llama", dtype))
        before = run(model)
        change(model)
        after = run(model)
        assert differing(after, run(copy.deepcopy(model))) == 0
        assert differing(after, before) or change is changes[-1]


def test_merged_adapter_is_seen():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(hf_batchinv.convert(make("llama")), config).eval()
    run(model)
    model.merge_adapter()
    assert differing(run(model), run(copy.deepcopy(model))) == 0


def test_autocast_is_refused():
    model = hf_batchinv.convert(make("llama"))
    with pytest.raises(ValueError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        run(model)
