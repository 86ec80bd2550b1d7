"""The kernel packages in the Kernels-Hub format: built, loaded in every way, and the same functions each time."""

import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn

from hf_batchinv import hub
from hf_batchinv.testing import differing

kernels = pytest.importorskip("kernels", reason="the Hub format is checked with the kernels library")

ROOT = Path(__file__).resolve().parents[1]
ORG = "hf-batchinv"
PACKAGES = {name: hub.package_name(name) for name in hub.FAMILIES}
# Files that only a GPU call imports, so that nothing else here would miss them.
LATE_FILES = {
    "batch-invariant-linear": ("_cublaslt.py", "_launch.py", "_verdicts.py", "selfcheck.py", "tiles.py"),
    "batch-invariant-flash-attn": ("_blocks.py", "_hopper_kernel.py", "_verdicts.py", "selfcheck.py", "tiles.py"),
    "batch-invariant-norm": ("_launch.py",),
    "batch-invariant-elementwise": ("_gated_kernel.py", "_launch.py", "_rotary_kernel.py"),
}

spec = importlib.util.spec_from_file_location("hub_kernels_build", ROOT / "hub_kernels" / "build.py")
builder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(builder)


def same_bits(got, want):
    return differing(got, want) == 0


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a build of each package."""
    out = tmp_path_factory.mktemp("built")
    for package in PACKAGES.values():
        builder.build(ROOT / "hub_kernels" / package, out)
    return out


@pytest.fixture
def local_kernels(built, monkeypatch):
    """LOCAL_KERNELS: the Hub ids of the packages name the builds."""
    entries = [f"{ORG}/{package}={built / package}" for package in PACKAGES.values()]
    monkeypatch.setenv("LOCAL_KERNELS", ":".join(entries))


def calls(name, module):
    """One small call of each main function of a package, by function name."""
    x, weight, bias = randn(3, 32), randn(24, 32), randn(24)
    query, key, value = randn(2, 4, 5, 16), randn(2, 2, 9, 16, seed=1), randn(2, 2, 9, 16, seed=2)
    lengths_q, lengths_k = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 6, 18], dtype=torch.int32)
    packed = randn(10, 4, 16), randn(18, 2, 16, seed=1), randn(18, 2, 16, seed=2)
    if name == "linear":
        return {
            "linear": lambda: module.linear(x, weight, bias),
            "bmm": lambda: module.bmm(randn(2, 3, 32), randn(2, 32, 8)),
            "grouped_linear": lambda: module.grouped_linear(
                x, randn(2, 24, 32), torch.tensor([1, 3], dtype=torch.int32)
            ),
        }
    if name == "norm":
        return {
            "rms_norm": lambda: module.rms_norm(x, randn(32), 1e-6),
            "rms_norm_gated": lambda: module.rms_norm_gated(x, randn(3, 32, seed=1), randn(32), 1e-6),
            "layer_norm": lambda: module.layer_norm(x, (32,), randn(32), randn(32, seed=1), 1e-5),
            "softmax": lambda: module.softmax(x, -1),
            "log_softmax": lambda: module.log_softmax(x, -1),
            "mean": lambda: module.mean(x, -1),
            "sum": lambda: module.sum(x, -1),
        }
    if name == "elementwise":
        angles = randn(1, 5, 16), randn(1, 5, 16, seed=1)
        return {
            "rotary": lambda: torch.cat(module.rotary(query, query[:, :2], *angles), dim=1),
            "gated": lambda: module.gated(x, randn(3, 32, seed=1)),
        }
    flash = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return {
        "attention": lambda: module.attention(query, key, value, causal=True),
        "attention_varlen": lambda: module.attention_varlen(*packed, lengths_q, lengths_k, 6, 12, causal=True),
        "flash_attn_func": lambda: module.flash_attn_func(*flash, causal=True),
        "flash_attn_varlen_func": lambda: module.flash_attn_varlen_func(
            *packed, lengths_q, lengths_k, 6, 12, causal=True
        ),
    }


# --- the builds ---


@pytest.mark.parametrize("package", PACKAGES.values())
def test_build_is_deterministic_and_its_digest_holds(package, built, tmp_path):
    again = builder.build(ROOT / "hub_kernels" / package, tmp_path)
    first = built / package / "build"
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert all((first / path).read_bytes() == (again / path).read_bytes() for path in files)

    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    for variant in sorted(again.glob("torch-*")):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    (variant / "__init__.py").write_text("")  # negative control: a changed file is noticed
    with pytest.raises(DigestValidationError):
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


@pytest.mark.parametrize("package", PACKAGES.values())
def test_build_has_one_variant_per_backend_with_an_id_of_its_own(package, built):
    variants = sorted((built / package / "build").glob("torch-*"))
    assert [variant.name for variant in variants] == ["torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu"]
    ids = [json.loads((variant / "metadata.json").read_text())["id"] for variant in variants]
    assert len(set(ids)) == len(ids)
    for variant, build_id in zip(variants, ids, strict=True):
        assert f'_NAMESPACE = "{build_id}"' in (variant / "_ops.py").read_text()
        assert not list(variant.rglob("tests"))


@pytest.mark.parametrize("package", PACKAGES.values())
def test_every_variant_has_every_source_file(package, built):
    source = ROOT / "hub_kernels" / package / "torch-ext" / package.replace("-", "_")
    files = {path.relative_to(source) for path in source.rglob("*.py") if path.name != "_ops.py"}
    assert {Path(name) for name in LATE_FILES[package]} <= files
    for variant in (built / package / "build").glob("torch-*"):
        assert files <= {path.relative_to(variant) for path in variant.rglob("*.py")}, variant.name


@pytest.mark.parametrize("package", PACKAGES.values())
def test_card_renders_without_leftovers(package, built):
    card = (built / package / "build" / "CARD.md").read_text(encoding="utf-8")
    assert "{{" not in card and "{%" not in card and "{#" not in card
    assert f"{ORG}/{package}" in card
    assert "library_name: kernels" in card


@pytest.mark.parametrize("name", PACKAGES)
def test_built_package_gives_the_bits_of_the_shipped_one(name, built):
    shipped = hub.load(name, "")
    loaded = kernels.get_local_kernel(built / PACKAGES[name])
    assert loaded is not shipped
    assert loaded.__all__ == shipped.__all__
    expected = calls(name, shipped)
    for function, call in calls(name, loaded).items():
        assert function in shipped.__all__
        assert same_bits(call(), expected[function]()), function


@pytest.mark.parametrize("name", PACKAGES)
def test_built_and_shipped_ops_have_different_namespaces(name, built):
    shipped, loaded = hub.load(name, ""), kernels.get_local_kernel(built / PACKAGES[name])
    prefixes = {sys.modules[f"{m.__name__}._ops"].add_op_namespace_prefix("op") for m in (shipped, loaded)}
    assert prefixes == {f"_{PACKAGES[name].replace('-', '_')}_packaged::op", f"{loaded.__name__}::op"}


@pytest.mark.parametrize("name", PACKAGES)
def test_builds_load_without_the_kernels_library(name, built, monkeypatch):
    with_kernels = kernels.get_local_kernel(built / PACKAGES[name])
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _: None)
    assert hub.load(name, str(built)) is with_kernels  # same id, so it is found among the loaded modules
    monkeypatch.delitem(sys.modules, with_kernels.__name__)
    again = hub._load_variant(built / PACKAGES[name] / "build" / f"torch-{hub.torch_backend()}")
    assert again is not with_kernels and again.__all__ == with_kernels.__all__


# --- layers ---


def layers_of(built, name):
    loaded = kernels.get_local_kernel(built / PACKAGES[name])
    if not hasattr(loaded, "layers"):
        return {}
    return {
        attribute: layer
        for attribute, layer in vars(loaded.layers).items()
        if isinstance(layer, type) and issubclass(layer, nn.Module) and layer.__module__ == loaded.layers.__name__
    }


@pytest.mark.parametrize("name", PACKAGES)
def test_kernelize_accepts_every_layer(name, built):
    assert name in ("flash-attn", "elementwise") or layers_of(built, name), "the package exports no layers"
    for layer_name, layer in layers_of(built, name).items():
        host_class = type("Host", (nn.Module,), {"forward": _same_parameters(layer.forward)})
        kernels.replace_kernel_forward_from_hub(host_class, layer_name)
        repository = kernels.LocalLayerRepository(built / PACKAGES[name], layer_name=layer_name)
        host = nn.Sequential(host_class())
        with kernels.use_kernel_mapping({layer_name: {"cpu": repository}}, inherit_mapping=False):
            kernels.kernelize(host, mode=kernels.Mode.INFERENCE, device="cpu")
        assert host[0].forward.__func__ is layer.forward, layer_name


def _same_parameters(forward):
    """A function with the parameters of `forward`, which kernelize compares."""

    def stock_forward(*args, **kwargs):
        raise AssertionError("the stock forward ran")

    stock_forward.__signature__ = inspect.signature(forward)
    return stock_forward


def test_kernelized_linear_gives_the_bits_of_the_function(built):
    class Host(nn.Linear):
        pass

    kernels.replace_kernel_forward_from_hub(Host, "Linear")
    model, x = nn.Sequential(Host(32, 24)), randn(5, 32)
    repository = kernels.LocalLayerRepository(built / PACKAGES["linear"], layer_name="Linear")
    with kernels.use_kernel_mapping({"Linear": {"cpu": repository}}, inherit_mapping=False), torch.no_grad():
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
        assert same_bits(model(x), hub.load("linear", "").linear(x, model[0].weight, model[0].bias))
        assert same_bits(model(x)[2:3], model(x[2:3]))


# --- the Hub, offline ---


@pytest.mark.parametrize("name", PACKAGES)
def test_hub_source_resolves_through_local_kernels(name, built, local_kernels, monkeypatch):
    monkeypatch.setattr(hub, "_loaded", {})
    monkeypatch.setenv("HF_BATCHINV_KERNELS", f"hub:{ORG}@v1")
    loaded = hub.load(name)
    assert loaded is kernels.get_kernel(f"{ORG}/{PACKAGES[name]}", version=1)
    assert loaded is kernels.get_local_kernel(built / PACKAGES[name])
    assert hub.load(name, "") is not loaded


def test_hub_source_loads_from_the_hub_cache_without_network(built, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    for package in PACKAGES.values():
        repository = tmp_path / f"kernels--{ORG}--{package}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "v1").write_text(commit)
        shutil.copytree(built / package / "build", repository / "snapshots" / commit / "build")
    code = (
        "from hf_batchinv import hub\n"
        "for name in hub.FAMILIES:\n"
        "    module = hub.load(name)\n"
        f"    assert module.__file__.startswith({str(tmp_path)!r}), module\n"
    )
    environment = {
        **os.environ,
        "KERNELS_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "HF_BATCHINV_KERNELS": f"hub:{ORG}@v1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# --- the Hub id as attn_implementation ---


def _gate():
    from transformers.utils import is_kernels_available

    return is_kernels_available()


def _tiny(family):
    import transformers

    sizes = dict(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        head_dim=16,
    )
    config = getattr(transformers, f"{family}Config")(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    return model_class._from_config(config, attn_implementation=f"{ORG}/{PACKAGES['flash-attn']}").eval()


def _borrow_layers(model):
    """Convert the rest of a tiny model with the pure layers alone: attention is what is under test."""
    linear, norm = hub.load("linear", "").layers, hub.load("norm", "")

    def rms_norm(self, hidden_states):
        return norm.rms_norm(hidden_states, self.weight, self.variance_epsilon)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = MethodType(linear.Linear.forward, module)
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(rms_norm, module)
    return model


@pytest.mark.hub_string
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
class TestHubString:
    @pytest.fixture(autouse=True)
    def open_gate(self, local_kernels):
        if not _gate():
            import transformers

            pytest.skip(
                f"transformers {transformers.__version__} turns Hub kernels off with kernels {kernels.__version__}; "
                "5.20 to 5.22 with kernels 0.17.2 turn them on"
            )

    def test_left_padded_row_has_the_bits_of_the_row_alone(self, family):
        model = _borrow_layers(_tiny(family))
        assert model.config._attn_implementation == f"{ORG}/{PACKAGES['flash-attn']}"
        row = torch.randint(2, 99, (1, 7), generator=torch.Generator().manual_seed(3))
        mate = torch.randint(2, 99, (1, 12), generator=torch.Generator().manual_seed(4))
        padded = torch.cat([torch.cat([torch.zeros(1, 5, dtype=torch.long), row], 1), mate])
        mask = torch.ones_like(padded)
        mask[0, :5] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            alone = model(row).logits
            crowd = model(padded, attention_mask=mask, position_ids=positions).logits
            unmasked = model(padded, position_ids=positions).logits
        assert same_bits(crowd[0, 5:], alone[0])
        assert not same_bits(unmasked[0, 5:], alone[0])  # negative control: the mask does reach the kernel

    def test_generate_has_the_same_tokens_and_logits_in_a_padded_batch(self, family):
        model = _borrow_layers(_tiny(family))
        row = torch.randint(2, 99, (1, 5), generator=torch.Generator().manual_seed(5))
        mate = torch.randint(2, 99, (1, 9), generator=torch.Generator().manual_seed(6))
        padded = torch.cat([torch.cat([torch.zeros(1, 4, dtype=torch.long), row], 1), mate])
        mask = torch.ones_like(padded)
        mask[0, :4] = 0
        settings = dict(max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
        alone = model.generate(row, attention_mask=torch.ones_like(row), **settings)
        crowd = model.generate(padded, attention_mask=mask, **settings)
        assert torch.equal(alone.sequences[0, 5:], crowd.sequences[0, 9:])
        for step_alone, step_crowd in zip(alone.logits, crowd.logits, strict=True):
            assert same_bits(step_alone[0], step_crowd[0])

    def test_generate_step_has_the_bits_of_forward_on_the_finished_text(self, family):
        model = _borrow_layers(_tiny(family))
        row = torch.randint(2, 99, (1, 5), generator=torch.Generator().manual_seed(7))
        out = model.generate(row, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)
        with torch.no_grad():
            finished = model(out.sequences).logits[0, 4:-1]
        assert same_bits(torch.cat(out.logits), finished)

    def test_request_of_continuous_batching_has_the_bits_of_generate_alone(self, family):
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        model, rows = _borrow_layers(_tiny(family)), []
        random = torch.Generator().manual_seed(8)
        prompts = [torch.randint(2, 99, (length,), generator=random).tolist() for length in (5, 40, 90)]
        prompts.append(prompts[2][:70])  # begins with pages of another request
        greedy = dict(max_new_tokens=5, do_sample=False)
        alone = [
            model.generate(
                torch.tensor([prompt]), **greedy, output_logits=True, return_dict_in_generate=True, eos_token_id=None
            )
            for prompt in prompts
        ]
        model.register_forward_hook(lambda *arguments: rows.extend(arguments[-1].logits[0]))
        for tokens in (16, 256):
            rows.clear()
            config = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=tokens)
            with torch.no_grad():
                outputs = model.generate_batch(prompts, GenerationConfig(**greedy, eos_token_id=-1), config).values()
            got = [output.generated_tokens for output in outputs]
            assert got == [out.sequences[0, -5:].tolist() for out in alone]
            for out in alone:
                for step in out.logits:
                    assert any(same_bits(step[0], row) for row in rows)


# --- what the builder refuses (on a toy package) ---

BUILD_TOML = """
[general]
name = "toy-kernel"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[general.hub]
repo-id = "org/toy-kernel"

[torch-noarch]
pyext = ["py", "json"]
"""
TOY = """
import torch

from ._ops import add_op_namespace_prefix

__all__ = ["double"]


@torch.library.custom_op(add_op_namespace_prefix("double"), mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""
LAYERS = "from torch import nn\n\n\nclass Double(nn.Module):\n"


@pytest.fixture
def toy(tmp_path):
    """A folder with the sources of a small correct package."""
    root = tmp_path / "toy-kernel"
    source = root / "torch-ext" / "toy_kernel"
    source.mkdir(parents=True)
    (root / "build.toml").write_text(BUILD_TOML)
    (root / "CARD.md").write_text("{% for f in functions %}{{ f }}{% endfor %} of {{ repo_id }}\n")
    (source / "__init__.py").write_text(TOY)
    (source / "table.json").write_text("{}")
    (source / "notes.txt").write_text("not shipped")
    return root


def test_toy_package_builds_and_runs(toy, tmp_path):
    target = builder.build(toy, tmp_path / "out")
    assert sorted(path.name for path in target.iterdir()) == ["CARD.md", "torch-cpu", "torch-cuda"]
    shipped = sorted(path.name for path in (target / "torch-cpu").iterdir())
    assert shipped == ["__init__.py", "_ops.py", "metadata.json", "table.json"]
    assert (target / "CARD.md").read_text() == "double of org/toy-kernel\n"
    module = kernels.get_local_kernel(target)
    assert torch.equal(module.double(torch.ones(2)), torch.full((2,), 2.0))


def test_id_follows_the_sources(toy):
    before = builder.Package(toy).unique_id()
    assert builder.Package(toy).unique_id() == before
    (toy / "torch-ext" / "toy_kernel" / "notes.txt").write_text("still not shipped")
    assert builder.Package(toy).unique_id() == before
    (toy / "torch-ext" / "toy_kernel" / "table.json").write_text("[]")
    assert builder.Package(toy).unique_id() != before


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("__init__.py", TOY.replace('add_op_namespace_prefix("double")', '"toy::double"'), "under a name of its own"),
        ("more.py", 'import torch\ntorch.library.custom_op("toy::f", mutates_args=())(print)\n', "toy::f"),
        ("more.py", "@op.register_kernel('cpu')\ndef f(x): ...\n", "under a name of its own"),
        ("more.py", "import numpy as np\n", "imports numpy"),
        ("more.py", "def f():\n    from transformers import AutoModel\n", "imports transformers"),
        ("more.py", "from toy_kernel import double\n", "import it relatively"),
        ("more.py", "from ..other import thing\n", "must stand alone"),
        ("layers.py", LAYERS + "    def __init__(self): ...\n", "layer Double defines __init__"),
        ("layers.py", LAYERS + "    def helper(self): ...\n", "layer Double defines helper"),
        ("layers.py", LAYERS + "    scale: float = 2.0\n", "layer Double defines scale"),
        ("layers.py", LAYERS + "    scale = 2.0\n", "layer Double defines scale"),
        ("__init__.py", "from .more import *\n", "needs a literal list `__all__`"),
        ("toy_kernel/__init__.py", "", "must not contain an entry called toy_kernel"),
    ],
)
def test_builder_refuses_in_one_sentence_and_writes_nothing(toy, tmp_path, file, text, message):
    path = toy / "torch-ext" / "toy_kernel" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(builder.BuildError, match=message) as error:
        builder.build(toy, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1", "", "is not valid"),
        ("edition = 5", "edition = 6", "is not valid"),
        ('name = "toy-kernel"', 'name = "other-kernel"', "must have the name 'toy-kernel'"),
        ("[torch-noarch]\npyext", "[general.nothing]\npyext", "is not valid"),
    ],
)
def test_builder_refuses_a_wrong_build_toml(toy, tmp_path, old, new, message):
    (toy / "build.toml").write_text(BUILD_TOML.replace(old, new))
    with pytest.raises(builder.BuildError, match=message):
        builder.build(toy, tmp_path / "out")


def test_command_line_checks_all_packages_and_names_unknown_ones(capsys):
    assert builder.main(["--check"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [f"{p}: sources are fine" for p in sorted(PACKAGES.values())]
    with pytest.raises(SystemExit):
        builder.main(["batch-invariant-nothing"])
    assert "known packages: batch-invariant-elementwise" in capsys.readouterr().err
