"""Load whatever the command line was given: a directory, a Hub name or a GGUF file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel

from .demo import UsageError
from .errors import first_line

_FEWEST_TOKENS = 10  # of a tokenizer that can tell texts apart


def source_of(name: str, revision: str | None = None) -> dict[str, Any]:
    """Arguments for `from_pretrained` that lead to a model: its directory, Hub name, or the file in a directory.

    Raises UsageError for a path that leads nowhere, another kind of file, or a file with a revision.
    """
    path = Path(name)
    if path.suffix.lower() != ".gguf":
        if name.startswith(("/", "./", "../", "~")) and not path.exists():
            raise UsageError(f"cannot load {name!r}: there is no such directory")
        if path.is_file():
            raise UsageError(f"cannot load {name!r}: expected a directory, a Hub name or a GGUF file, got another file")
        return {"pretrained_model_name_or_path": name, **({"revision": revision} if revision else {})}
    if not path.is_file():
        raise UsageError(f"cannot load {name!r}: there is no such file")
    if revision is not None:
        raise UsageError(f"--revision is for models on the Hub, and {name!r} is a file; leave it out")
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def load_model(
    name: str, *, revision: str | None = None, dtype: str = "auto", device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Return a stock model in eval mode, of the class that its config names.

    dtype: "auto" for that of the weights, or a name such as "bfloat16". A GGUF file's weights are unpacked.
    Raises UsageError of one sentence if the model is missing, broken or of an unknown kind.
    """
    source = source_of(name, revision)
    with _explained(name):
        config = AutoConfig.from_pretrained(**source)
        architecture = (getattr(config, "architectures", None) or ["AutoModel"])[0]
        cls = getattr(transformers, architecture, AutoModel)
        if "gguf_file" in source:
            from transformers import AutoModelForCausalLM, GgufConfig

            cls = AutoModelForCausalLM if cls is AutoModel else cls
            source["quantization_config"] = GgufConfig(dequantize=True)
        return cls.from_pretrained(**source, dtype=dtype).to(device).eval()


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """Return a model's tokenizer; raises UsageError of one sentence if it has none, or one that is broken."""
    with _explained(name, "the tokenizer of "):
        tokenizer = AutoTokenizer.from_pretrained(**source_of(name, revision))
    # Transformers makes an empty one for a directory without a tokenizer's files.
    if len(tokenizer) < _FEWEST_TOKENS:
        raise UsageError(f"cannot load the tokenizer of {name!r}: it has {len(tokenizer)} tokens")
    return tokenizer


@contextmanager
def _explained(name: str, what: str = "") -> Iterator[None]:
    """Whatever the libraries raise for the user's files is the user's to hear, in one sentence."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"cannot load {what}{name!r}: {first_line(error)}") from error
