"""Rotary embeddings and gated MLPs of converted models: what is recognised, and when the one launch is used.

Without a GPU `fused.DEVICES` is made to say that the CPU is one: then the kernel package's functions run, whose CPU
path has the bits of the operators that they stand for.
"""

import copy
import functools
import importlib
import pickle
from collections import Counter

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from transformers.activations import ACT2FN

import hf_batchinv
from hf_batchinv import dispatch, hub, layers
from hf_batchinv.layers import fused, gated_mlp, rotary
from hf_batchinv.testing import assert_same_bits
from tests.tiny_models import make, run

# name -> what its attention and its MLP become
EXPECTED = {
    "llama": ("rotary", "gated_mlp"),
    "qwen3": ("rotary", "gated_mlp"),
    "mistral": ("rotary", "gated_mlp"),
    "gemma2": ("rotary", None),  # its activation is a gelu
    "phi3": ("rotary", None),  # gate and up are one projection
    "gpt2": (None, None),
}


def layer_of(module):
    origin = layers.origin_of(module)
    return origin and origin.layer


def modeling(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


@pytest.fixture
def calls(monkeypatch):
    """The CPU counts as a GPU; a count of the calls that reach the kernel package."""
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    cpu, counted = importlib.import_module(f"{hub.load('elementwise').__name__}._cpu"), Counter()

    def counting(name, function):
        def call(*args):
            counted[name] += 1
            return function(*args)

        return call

    for name in ("rotary", "gated"):
        monkeypatch.setattr(cpu, name, counting(name, getattr(cpu, name)))
    return counted


@pytest.fixture
def unfused(monkeypatch):
    """A function that converts a model as if nothing were recognised here."""

    def convert(model):
        with monkeypatch.context() as patch:
            patch.setattr(rotary, "recognises", lambda cls: False)
            patch.setattr(gated_mlp, "recognises", lambda module: False)
            return hf_batchinv.convert(model)

    return convert


# --- conversion ---


@pytest.mark.parametrize("name", EXPECTED)
def test_modules_become_what_they_are_and_come_back(name):
    model = make(name)
    before = {key: type(module) for key, module in model.named_modules()}
    hf_batchinv.convert(model)
    found = [
        {layer_of(module) for key, module in model.named_modules() if key.endswith(ends)}
        for ends in ((".attn", ".self_attn"), ".mlp")
    ]
    assert found == [{layer} for layer in EXPECTED[name]]
    assert {key: layers.stock_class(module) for key, module in model.named_modules()} == before
    hf_batchinv.revert(model)
    assert {key: type(module) for key, module in model.named_modules()} == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXPECTED)
def test_bits_on_a_cpu_are_those_without_it_and_no_launch_is_tried(name, dtype, unfused, calls, monkeypatch):
    monkeypatch.setattr(fused, "DEVICES", ("cuda", "xpu"))
    model = hf_batchinv.convert(make(name, dtype))
    calls.clear()  # a rotary function that is new here was asked what it computes
    assert_same_bits(run(model), run(unfused(make(name, dtype))))
    assert not calls


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def can_be_pickled(module):
    try:
        pickle.dumps(module)
    except AttributeError:  # the `kernels` library puts objects of local classes into attention modules
        return False
    return True


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
def test_copies_are_converted_too_and_can_be_reverted(how):
    model = make("llama")
    if how is pickled and not can_be_pickled(model):
        pytest.skip("the stock model cannot be pickled")
    hf_batchinv.convert(model)
    again = how(model)
    for key in ("self_attn", "mlp"):
        one, other = (getattr(each.model.layers[0], key) for each in (model, again))
        assert type(one) is type(other) and layer_of(other) is not None
    assert_same_bits(run(again), run(model))
    hf_batchinv.revert(again)
    assert layer_of(again.model.layers[0].mlp) is None and layer_of(model.model.layers[0].mlp) == "gated_mlp"


def test_audit_names_them_before_and_after():
    model = make("llama")
    for _ in range(2):
        rows = {row.name: (row.status, row.reason) for row in hf_batchinv.audit(model).rows}
        assert rows["model.layers.1.self_attn"] == ("attention", "rotary")
        assert rows["model.layers.1.mlp"] == ("converted", "gated mlp (silu)")
        hf_batchinv.convert(model)


# --- when the launch is used ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXPECTED)
def test_every_layer_uses_it_once_a_forward_with_the_same_bits(name, dtype, unfused, calls):
    model = hf_batchinv.convert(make(name, dtype))
    calls.clear()
    got = run(model)
    assert calls == {key: 2 for key, layer in zip(("rotary", "gated"), EXPECTED[name], strict=True) if layer}
    assert_same_bits(got, run(unfused(make(name, dtype))))


def test_generate_uses_it_in_every_step(calls):
    model = hf_batchinv.convert(make("llama"))
    calls.clear()
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert calls == {"rotary": 8, "gated": 8}


def test_an_operator_audit_sees_the_registered_operator(calls):
    model = hf_batchinv.convert(make("llama"))
    found = hf_batchinv.audit(model, {"input_ids": torch.tensor([[5, 6, 7]])})
    rotations = [row for row in found.operators if row.operator.endswith(".rotary")]
    assert [(row.module, row.status) for row in rotations] == [
        (f"model.layers.{index}.self_attn", "our kernel") for index in range(2)
    ]
    assert found.ok


def test_a_gradient_keeps_the_stock_operators(calls):
    model = hf_batchinv.convert(make("llama"))
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    x = torch.randn(1, 3, 64, requires_grad=True)
    for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        hf_batchinv.revert(part)  # our linear has no backward
    mlp(x).sum().backward()
    assert x.grad.abs().sum() > 0
    cos = torch.randn(1, 3, 16)
    query = torch.randn(1, 4, 3, 16, requires_grad=True)
    rotated = global_of(attention)(query, query, cos, cos)
    rotated[0].sum().backward()
    assert not calls
    with torch.no_grad():
        global_of(attention)(query, query, cos, cos)
    assert calls == {"rotary": 1}


def global_of(attention):
    """The rotary function that a converted attention module calls."""
    twins = [cell.cell_contents for cell in type(attention).forward.__closure__]
    twin = twins[type(attention).forward.__code__.co_freevars.index("twin")]
    while hasattr(twin, "__wrapped__"):
        twin = twin.__wrapped__
    return twin.__globals__[rotary.NAME]


def test_other_arguments_reach_the_stock_function(calls):
    function = global_of(hf_batchinv.convert(make("llama")).model.layers[0].self_attn)
    stock = modeling("llama").apply_rotary_pos_emb
    query, cos = torch.randn(2, 4, 3, 16), torch.randn(2, 3, 16)
    heads_last = query.transpose(1, 2)
    others = [
        (heads_last, heads_last, cos, cos, 2),
        (query, query, cos.double(), cos.double()),
        (query[0], query[0], cos[:1], cos[:1]),
    ]
    for args in others:
        for got, want in zip(function(*args), stock(*args), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)
    assert not calls
    function(query, query, cos, cos, unsqueeze_dim=1)
    assert calls == {"rotary": 1}


def test_a_compiled_model_is_traced_through_the_stock_operators(calls):
    torch._dynamo.reset()
    model = hf_batchinv.convert(make("llama"))
    expected = run(model)
    calls.clear()
    model.compile(backend="aot_eager")
    assert_same_bits(run(model), expected)
    assert not calls


def test_functorch_and_tensor_subclasses_keep_the_stock_operators(calls):
    class Subclass(torch.Tensor):
        pass

    x = torch.randn(2, 3, 64)
    mlp = hf_batchinv.convert(make("llama")).model.layers[0].mlp
    for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        hf_batchinv.revert(part)  # our linear has no rule for vmap
    with torch.no_grad():
        mlp(x.as_subclass(Subclass))
        torch.func.vmap(mlp)(x)
        assert not calls
        mlp(x)
        assert calls == {"gated": 1}


# --- what somebody changes after the conversion ---


def test_hooks_and_another_activation_are_honoured(calls):
    model = hf_batchinv.convert(make("llama"))
    mlp, x, seen = model.model.layers[0].mlp, torch.randn(1, 3, 64), []
    with torch.no_grad():
        expected = mlp(x)
        handle = mlp.act_fn.register_forward_hook(lambda *args: seen.append(args))
        assert_same_bits(mlp(x), expected)
        handle.remove()
        assert len(seen) == 1 and calls == {"gated": 1}
        mlp.act_fn = ACT2FN["relu"]
        want = mlp.down_proj(mlp.gate_proj(x).relu() * mlp.up_proj(x))
        assert_same_bits(mlp(x), want)
        assert_same_bits(mlp(x=x), want)
    assert calls == {"gated": 1}


def test_a_rotary_function_that_is_put_in_later_is_used(calls, monkeypatch):
    model = hf_batchinv.convert(make("llama"))
    monkeypatch.setattr(modeling("llama"), rotary.NAME, lambda q, k, cos, sin, unsqueeze_dim=1: (q * 0, k * 0))
    changed = run(model)
    assert "rotary" not in calls
    monkeypatch.undo()
    assert (run(model) != changed).any()


def test_a_forward_that_is_put_in_later_is_used(calls, monkeypatch):
    model = hf_batchinv.convert(make("llama"))
    llama = modeling("llama")
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: x * 0)
    monkeypatch.setattr(llama.LlamaAttention, "forward", lambda self, hidden_states, **_: (hidden_states, None))
    run(model)
    assert not calls


# --- recognition ---


@pytest.mark.parametrize(
    ("family", "plain"),
    [("llama", True), ("qwen3", True), ("gemma2", True), ("cohere", False), ("glm", False), ("gpt_oss", False)],
)
def test_rotary_functions_are_recognised_by_their_bits(family, plain):
    assert rotary.computes_plain_formula(modeling(family).apply_rotary_pos_emb) is plain


def halves(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def in_float32(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple((x.float() * cos + halves(x).float() * sin).to(x.dtype) for x in (q, k))


def key_only_half(q, k, cos, sin, unsqueeze_dim=1):
    q_out, k_out = modeling("llama").apply_rotary_pos_emb(q, k, cos, sin)
    return q_out, torch.cat((k_out[..., :8], k[..., 8:]), dim=-1)


def in_a_list(q, k, cos, sin, unsqueeze_dim=1):
    return list(modeling("llama").apply_rotary_pos_emb(q, k, cos, sin))


def other_parameters(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return modeling("llama").apply_rotary_pos_emb(q, k, cos, sin)


def other_default(q, k, cos, sin, unsqueeze_dim=2):
    return modeling("llama").apply_rotary_pos_emb(q, k, cos, sin)


@pytest.mark.parametrize("function", [in_float32, key_only_half, in_a_list, other_parameters, other_default, torch.add])
def test_near_misses_are_not_the_plain_formula(function):
    assert not rotary.computes_plain_formula(function)


def test_a_rotary_function_in_a_module_is_asked_unless_it_was_replaced():
    class Function(nn.Module):  # as the `kernels` library makes them
        def forward(self, q, k, cos, sin, unsqueeze_dim=1):
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            return q * cos + halves(q) * sin, k * cos + halves(k) * sin

    assert rotary.computes_plain_formula(Function())
    replaced = Function()
    replaced.forward = lambda *args: 1 / 0
    assert not rotary.computes_plain_formula(replaced)


VALUE = 1


def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 100

    return wrapper


def hiding(function):
    held = [function]

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return held[0](*args, **kwargs)

    return wrapper


class Base:
    def read(self):
        return 10


class Derived(Base):
    def read(self, extra=5, *, more=0):
        return super().read() + VALUE + extra + more

    @wrapping
    @wrapping
    def twice(self, more=0):
        return VALUE + more

    @hiding
    def hidden(self):
        return VALUE

    def without(self):
        return 3


def test_a_global_is_replaced_under_decorators_and_closures():
    twin = rotary.with_global(Derived.read, "VALUE", 2)
    assert (twin(Derived()), twin(Derived(), 0, more=1), Derived().read()) == (17, 13, 16)
    twin = rotary.with_global(Derived.twice, "VALUE", 2)
    assert (twin(Derived()), twin(Derived(), more=5), Derived().twice()) == (202, 207, 201)
    assert twin.__wrapped__.__wrapped__.__globals__["VALUE"] == 2


@pytest.mark.parametrize(
    "function",
    [Derived.hidden, Derived.without, len, functools.partial(Derived.read)],
    ids=["staticmethod", "no global", "builtin", "partial"],
)
def test_what_cannot_be_rebuilt_is_left_alone(function):
    assert rotary.with_global(function, "VALUE", 2) is None


class Gated(nn.Module):
    """The parts; subclasses say what is computed from them."""

    def __init__(self, act_fn="silu"):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = ACT2FN[act_fn]


class InOneLine(Gated):
    def forward(self, hidden_state):
        """With a docstring."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))


class UpFirst(Gated):
    def forward(self, x):
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))


class WithMore(Gated):
    def forward(self, x):
        x = x * 2
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Borrowed(Gated):
    forward = functools.partialmethod(InOneLine.forward)


class WithAScale(Gated):
    def forward(self, x, scale=1):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        (InOneLine(), "gated_mlp"),
        (InOneLine("gelu"), None),
        (UpFirst(), None),
        (WithMore(), None),
        (WithAScale(), None),
        (Borrowed(), None),
    ],
    ids=["silu", "gelu", "up first", "more", "a scale", "borrowed"],
)
def test_gated_mlps_are_recognised_by_their_source(module, layer):
    assert gated_mlp.recognises(module) is (layer is not None)
    assert dispatch.verdict_of(module).layer == layer
    hf_batchinv.convert(module)
    assert dispatch.verdict_of(module).status == ("converted" if layer else "container")


def test_a_module_without_the_parts_is_not_one():
    module = InOneLine()
    module.act_fn = None
    assert dispatch.verdict_of(module).layer is None


# --- what somebody else does to a converted model ---


def test_an_activation_that_is_a_plain_function_still_works():
    """Also on the CPU: the converted forward reads `_modules["act_fn"]` before anything else."""
    model = hf_batchinv.convert(make("llama"))
    mlp, x = model.model.layers[0].mlp, torch.randn(1, 3, 64)
    with torch.no_grad():
        want = mlp.down_proj(torch.relu(mlp.gate_proj(x)) * mlp.up_proj(x))
        del mlp.act_fn
        mlp.act_fn = torch.relu
        assert torch.equal(mlp(x), want)


def test_a_global_forward_hook_sees_the_activation(monkeypatch):
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    model, seen = hf_batchinv.convert(make("llama")), set()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(module))
    try:
        with torch.no_grad():
            model(torch.tensor([[5, 6, 7]]))
    finally:
        handle.remove()
    assert model.model.layers[0].mlp.gate_proj in seen
    assert model.model.layers[0].mlp.act_fn in seen


def test_globals_that_are_patched_later_reach_a_converted_attention(monkeypatch):
    """The twin has a copy of the file's globals from when its class was made."""
    from transformers.models.llama import modeling_llama

    stock, converted, asked = make("llama", attn_implementation="sdpa"), hf_batchinv.convert(make("llama")), []

    class Watched:
        def get_interface(self, name, default):
            asked.append(name)
            return real.get_interface(name, default)

    real = modeling_llama.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Watched())
    with torch.no_grad():
        stock(torch.tensor([[5, 6, 7]]))
        assert asked == ["sdpa"] * 2
        converted(torch.tensor([[5, 6, 7]]))
    assert asked[2:] == ["batch_invariant"] * 2


def test_forward_mode_gradients_do_not_take_the_fused_launch(monkeypatch):
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(3, 32), torch.ones(3, 32))
        assert not fused.runs_fused(x)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_on_a_gpu_a_model_has_the_bits_that_it_has_without_it(name, dtype, unfused):
    ids = torch.randint(3, 90, (5, 13), generator=torch.Generator().manual_seed(1)).cuda()
    with torch.no_grad():
        got = hf_batchinv.convert(make(name, dtype).cuda())(ids).logits
        want = unfused(make(name, dtype).cuda())(ids).logits
    assert_same_bits(got, want)
    one, other = (convert(make(name, dtype).cuda()) for convert in (hf_batchinv.convert, unfused))
    tokens = [each.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False) for each in (one, other)]
    assert torch.equal(*tokens)
