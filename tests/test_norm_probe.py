"""The recogniser of norms: right or silent, never wrong."""

import importlib
import re
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from hf_batchinv import hub, norm_probe
from hf_batchinv.layers import batch_invariant_class, origin_of
from tests.tiny_models import make

DIM = 96
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def norm_classes():
    """Classes of the model library that are called norms, one of each that is copied from model to model."""
    seen = set()
    for path in sorted(Path(transformers.__path__[0], "models").glob("*/modeling_*.py")):
        blocks = re.findall(r"^class (\w*Norm\w*)(\(.*?)(?=^\S)", path.read_text(), flags=re.M | re.S)
        new = [name for name, body in blocks if body.replace(name, "") not in seen]
        seen.update(body.replace(name, "") for name, body in blocks)
        if new:
            try:
                module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            except ImportError:  # the model needs a library that is not installed here
                continue
            for name in new:
                yield f"{path.parent.name}.{name}", getattr(module, name)


def build(cls):
    for arguments in ((DIM,), ()):
        try:
            module = cls(*arguments)
        except Exception:  # noqa: S112 (takes a config or more: not for this sweep)
            continue
        return module if isinstance(module, nn.Module) and not module._modules else None
    return None


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.8)


def test_every_norm_class_of_the_library_is_matched_rightly_or_not_at_all():
    torch.manual_seed(0)
    matched = {}
    for name, cls in norm_classes():
        module = build(cls)
        if module is None or isinstance(match := norm_probe.recognise(module), str):
            continue
        matched[name] = match
        ours = batch_invariant_class(cls, match.layer, match.options)
        randomise(module)
        for x_dtype in DTYPES[:2]:
            for dtype in DTYPES[:2]:
                module.to(dtype)
                x = torch.cat([torch.randn(6, DIM) * scale for scale in (1e-4, 1.0, 50.0)]).to(x_dtype)
                with torch.no_grad():
                    try:
                        want = module(x)
                    except RuntimeError:  # torch's layer norm on dtypes that it does not mix
                        continue
                    module.__class__ = ours
                    got = module(x)
                    module.__class__ = cls
                assert got.dtype == want.dtype, name
                rounding = max(torch.finfo(dtype).eps for dtype in (x_dtype, dtype))
                torch.testing.assert_close(got, want, rtol=4 * rounding, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert len(matched) > 20
    assert {match.layer for match in matched.values()} == {"rms_norm", "layer_norm"}
    assert len({match.variant for match in matched.values()}) >= 5


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", "cast_then_weight"),
        ("qwen2", "cast_then_weight"),
        ("qwen3", "cast_then_weight"),
        ("mistral", "cast_then_weight"),
        ("phi3", "cast_then_weight"),
        ("gemma2", "one_plus_weight"),
        ("gemma3", "one_plus_weight"),
        ("t5", "t5"),
    ],
)
def test_norms_of_the_tested_families(family, variant):
    norms = [m for m in make(family).modules() if "Norm" in type(m).__name__ and type(m) is not nn.LayerNorm]
    assert len(norms) >= 5
    for norm in norms:
        match = norm_probe.recognise(norm)
        assert (match.layer, match.variant, match.weight_name) == ("rms_norm", variant, "weight")


def test_families_without_rms_norms_have_none():
    for family in ("gpt2", "bert", "bert-mlm", "opt"):
        assert not [m for m in make(family).modules() if "RMSNorm" in type(m).__name__]


@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("affine", [True, False])
def test_torch_rms_norm(eps, affine):
    norm = nn.RMSNorm(DIM, eps=eps, elementwise_affine=affine)
    match = norm_probe.recognise(norm)
    assert match.layer == "rms_norm" and match.weight_name == ("weight" if affine else None)
    assert match.eps == "eps" if eps else match.eps in norm_probe._DEFAULT_EPS
    for dtype in DTYPES:
        x = (torch.randn(5, DIM) * 1e-3).to(dtype)  # eps decides
        norm.to(dtype).__class__ = nn.RMSNorm
        with torch.no_grad():
            want = norm(x)
            norm.__class__ = batch_invariant_class(nn.RMSNorm, match.layer, match.options)
            torch.testing.assert_close(norm(x), want)


def test_the_module_may_be_anywhere_and_is_only_read():
    module = make("llama").model.norm
    weight = module.weight.clone()
    state = torch.get_rng_state()
    on_cpu = norm_probe.recognise(module)
    assert norm_probe.recognise(module.to("meta")) == on_cpu
    assert norm_probe.recognise(make("llama").bfloat16().model.norm) == on_cpu
    assert torch.equal(make("llama").model.norm.weight, weight)
    torch.set_rng_state(state)
    norm_probe._recognise(module)
    assert torch.equal(torch.get_rng_state(), state)


class Norm(nn.Module):
    """Llama's norm, with one detail to be changed by each subclass."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.epsilon = eps

    def factor(self, x):
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)

    def forward(self, x):
        return self.scale * (x.float() * self.factor(x.float())).to(x.dtype)


class MeanAbsolute(Norm):
    def factor(self, x):
        return 1 / (x.abs().mean(-1, keepdim=True) + self.epsilon)


class TwiceEps(Norm):
    def factor(self, x):
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.epsilon)


class EpsOutside(Norm):
    def factor(self, x):
        return 1 / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.epsilon)


class InputPrecision(Norm):
    def forward(self, x):
        return self.scale * (x * self.factor(x))


class HalfThePlusOne(Norm):
    def forward(self, x):
        return (0.5 + self.scale) * (x.float() * self.factor(x.float())).to(x.dtype)


class OtherAxis(Norm):
    def factor(self, x):
        return torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.epsilon)


def test_names_of_classes_and_attributes_do_not_count():
    match = norm_probe.recognise(Norm())
    assert (match.variant, match.weight_name, match.eps) == ("cast_then_weight", "scale", "epsilon")


@pytest.mark.parametrize("cls", [MeanAbsolute, TwiceEps, EpsOutside, InputPrecision, HalfThePlusOne, OtherAxis])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8])
def test_a_norm_that_differs_in_one_detail_is_not_matched(cls, eps):
    assert norm_probe.recognise(cls(eps)) == "computes no norm formula that is known here"


def test_what_cannot_be_asked_is_said():
    class Failing(Norm):
        def forward(self, x):
            raise KeyError("no table")

    class Pair(Norm):
        def forward(self, x):
            return x, x

    assert "does not run on a random torch.float32 tensor (KeyError: 'no table')" in norm_probe.recognise(Failing())
    assert norm_probe.recognise(Pair()) == "returns tuple instead of one tensor"
    assert "parameters other than" in norm_probe.recognise(nn.LayerNorm((4, DIM)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_recognised_norm_gives_a_row_the_same_bits_in_any_batch(dtype):
    norm = Norm().to(dtype)
    randomise(norm)
    match = norm_probe.recognise(norm)
    norm.__class__ = batch_invariant_class(Norm, match.layer, match.options)
    assert origin_of(norm).options == match.options
    x = torch.randn(33, DIM).to(dtype)
    with torch.no_grad():
        together = norm(x)
        assert all(torch.equal(norm(x[row : row + 1]), together[row : row + 1]) for row in range(33))


def test_variants_of_the_norm_package_differ_pairwise_unless_they_share_their_options():
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0)) * 3
    weight = torch.randn(DIM, generator=torch.Generator().manual_seed(1)) * 0.3 + 0.8
    variants = hub.load("norm").variants()
    for i, one in enumerate(variants):
        for other in variants[i + 1 :]:
            if one.weighted != other.weighted or one.options == other.options:
                continue
            w = weight if one.weighted else None
            same = []
            for x_dtype, dtype in product(DTYPES, repeat=2):
                a, b = (v.stock(x.to(x_dtype), None if w is None else w.to(dtype), 1e-6) for v in (one, other))
                same.append(a.dtype == b.dtype and torch.equal(a, b))
            assert not all(same), (one.name, other.name)
