"""The public surface, and what importing it costs."""

import inspect
import re
import subprocess
import sys

import transformers

import hf_batchinv


def test_names():
    assert set(hf_batchinv.__all__) == {
        "UnsupportedModelError",
        "__version__",
        "audit",
        "batch_invariant_mode",
        "convert",
        "from_pretrained",
        "revert",
        "verify",
    }
    assert all(hasattr(hf_batchinv, name) for name in hf_batchinv.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", hf_batchinv.__version__)


def test_signatures():
    functions = {name: getattr(hf_batchinv, name) for name in hf_batchinv.__all__[2:]}
    parameters = {name: list(inspect.signature(function).parameters) for name, function in functions.items()}
    assert parameters == {
        "audit": ["model", "example_inputs"],
        "batch_invariant_mode": [],
        "convert": ["model", "strict"],
        "from_pretrained": ["name", "cls", "strict", "kwargs"],
        "revert": ["model"],
        "verify": ["model", "tokenizer", "texts", "axes", "budget", "max_tokens", "bisect", "progress"],
    }
    assert inspect.signature(hf_batchinv.convert).parameters["strict"].default is True


def test_every_public_function_is_documented():
    for name in hf_batchinv.__all__:
        if name != "__version__":
            assert getattr(hf_batchinv, name).__doc__


def test_importing_registers_attention_and_mask():
    assert "batch_invariant" in transformers.AttentionInterface().valid_keys()
    assert "batch_invariant" in transformers.AttentionMaskInterface().valid_keys()


def test_importing_needs_neither_triton_nor_kernels_nor_rich():
    code = (
        "import sys\n"
        "for name in ('triton', 'kernels', 'rich', 'typer', 'peft', 'accelerate'):\n"
        "    sys.modules[name] = None\n"  # importing it now raises
        "import hf_batchinv\n"
        "print(hf_batchinv.__version__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == hf_batchinv.__version__, done.stderr
