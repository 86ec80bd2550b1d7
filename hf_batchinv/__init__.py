"""Transformers models whose results do not depend on the batch, bit for bit.

Importing the package makes `attn_implementation="batch_invariant"` known to Transformers, for loading and for
`set_attn_implementation`: such a model is converted whole. `convert(model)` does the same to a model at hand.
"""

from typing import Any

__version__ = "0.1.0"

from . import hooks, registry
from .audit import audit
from .conversion import convert, revert
from .errors import UnsupportedModelError
from .intercept import batch_invariant_mode
from .verify import verify

__all__ = [
    "UnsupportedModelError",
    "__version__",
    "audit",
    "batch_invariant_mode",
    "convert",
    "from_pretrained",
    "revert",
    "verify",
]


def from_pretrained(name: str, cls: Any = None, strict: bool = True, **kwargs) -> Any:
    """Load a model and convert it.

    Args:
        name: what `cls.from_pretrained` takes, a directory or a name on the Hub.
        cls: model or auto class; AutoModelForCausalLM if None.
        strict: as in `convert`.
        kwargs: passed on to `cls.from_pretrained`.

    Raises ValueError if kwargs ask for another attn_implementation, UnsupportedModelError as `convert` does.
    """
    if kwargs.setdefault("attn_implementation", "batch_invariant") != "batch_invariant":
        asked = kwargs["attn_implementation"]
        raise ValueError(f"attn_implementation must be left out or be 'batch_invariant', got {asked!r}; leave it out")
    if cls is None:
        from transformers import AutoModelForCausalLM as cls
    with hooks.strict_loading(strict):
        return cls.from_pretrained(name, **kwargs)


registry.register()
hooks.install()
