"""Make `attn_implementation="batch_invariant"` do the whole job, wherever Transformers takes it.

Importing hf_batchinv wraps, once, `from_pretrained`, `_from_config`, `set_attn_implementation` and `set_use_kernels` of
PreTrainedModel, the questions whether and how `generate` should compile, and what `continuous_batching` needs. A model
whose attention is "batch_invariant" is converted when loading has ended, after accelerate has placed its hooks; any
other model goes through the stock code and nothing else.

A second, inert hook sees modules being registered. If a submodule is put into a converted model (an adapter, a resized
head), it is converted too, so that no stock layer gets in unseen.
"""

import contextvars
import inspect
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import _global_module_registration_hooks, register_module_module_registration_hook
from transformers import GenerationMixin, PreTrainedModel

from . import continuous_batching, conversion, decode_graph
from .dispatch import ATTENTION_NAME
from .errors import Problem, UnsupportedModelError
from .wrapping import is_wrapped, wrapped

_USE_KERNELS = (
    "use_kernels=True replaces layers that attn_implementation='batch_invariant' converts, so both cannot be had; "
    "drop one of the two arguments"
)

_strict: contextvars.ContextVar[bool] = contextvars.ContextVar("hf_batchinv_strict", default=True)
# True while a model is being loaded: models built inside of it are parts, converted with the whole.
_loading: contextvars.ContextVar[bool] = contextvars.ContextVar("hf_batchinv_loading", default=False)


@contextmanager
def strict_loading(strict: bool):
    """Within this context, models converted at load time are converted with this `strict`."""
    token = _strict.set(strict)
    try:
        yield
    finally:
        _strict.reset(token)


def install() -> None:
    """Put the hooks in place; again is a no-op."""
    _wrap_classmethod("from_pretrained", _from_pretrained)
    _wrap_classmethod("_from_config", _from_config)
    _wrap_method("set_attn_implementation", _set_attn_implementation)
    _wrap_method("set_use_kernels", _set_use_kernels)
    _wrap_method("_valid_auto_compile_criteria", _valid_auto_compile_criteria, GenerationMixin)
    _wrap_method("get_compiled_call", _get_compiled_call)
    continuous_batching.install()
    if _convert_new_submodule not in _global_module_registration_hooks.values():
        register_module_module_registration_hook(_convert_new_submodule)


def _wrap_classmethod(name: str, wrapper) -> None:
    original = vars(PreTrainedModel)[name].__func__
    if not is_wrapped(original):
        setattr(PreTrainedModel, name, classmethod(wrapped(original, wrapper)))


def _wrap_method(name: str, wrapper, cls: type = PreTrainedModel) -> None:
    original = vars(cls)[name]
    if not is_wrapped(original):
        setattr(cls, name, wrapped(original, wrapper))


# --- what the wrapped functions do ---


def _from_pretrained(original, cls, *args, **kwargs):
    if _loading.get():
        return original(cls, *args, **kwargs)
    asked = kwargs.get("attn_implementation", getattr(kwargs.get("config"), "_attn_implementation", None))
    if _top(asked) == ATTENTION_NAME:
        _check_before_loading(cls, kwargs)
    with _load():
        result = original(cls, *args, **kwargs)
    _convert_if_asked(result[0] if isinstance(result, tuple) else result)  # output_loading_info=True gives a pair
    return result


def _from_config(original, cls, config, *args, **kwargs):
    if _loading.get() or _inside_a_constructor():
        return original(cls, config, *args, **kwargs)
    if _top(kwargs.get("attn_implementation", config._attn_implementation)) == ATTENTION_NAME:
        _check_before_loading(cls, kwargs)
    with _load():
        model = original(cls, config, *args, **kwargs)
    _convert_if_asked(model)
    return model


def _set_attn_implementation(original, self, attn_implementation, *args, **kwargs):
    asked = _top(attn_implementation)
    if asked == ATTENTION_NAME:
        conversion.convert(self, strict=_strict.get())
        return None
    if not str(asked).endswith(ATTENTION_NAME) and conversion.is_converted(self):
        conversion.revert(self)
    return original(self, attn_implementation, *args, **kwargs)


def _set_use_kernels(original, self, use_kernels, *args, **kwargs):
    if use_kernels and conversion.is_converted(self):
        raise ValueError(_USE_KERNELS)
    return original(self, use_kernels, *args, **kwargs)


def _valid_auto_compile_criteria(original, self, *args, **kwargs):
    # With a static cache on a GPU, generate() compiles decoding on its own: Inductor fuses elementwise code, drops
    # roundings in between, and decoding no longer has the bits of the eager prefill. A recorded step keeps them.
    allowed = not conversion.is_converted(self) or decode_graph.enabled(self)
    return allowed and original(self, *args, **kwargs)


def _get_compiled_call(original, self, *args, **kwargs):
    return decode_graph.DecodeGraph(self) if conversion.is_converted(self) else original(self, *args, **kwargs)


def _convert_new_submodule(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    attributes = vars(module)
    if submodule is not None and conversion.MARK in attributes and not _loading.get():
        conversion.convert_part(submodule, strict=conversion.LENIENT not in attributes)


# --- helpers ---


@contextmanager
def _load():
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


def _top(attn_implementation: str | dict | None) -> str | None:
    """Return what an attn_implementation argument asks for the model itself."""
    return attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation


def _check_before_loading(cls: type[PreTrainedModel], kwargs: dict) -> None:
    """Refuse what would fail later with a less helpful message, or after a long load."""
    if kwargs.get("use_kernels") or kwargs.get("kernel_config") is not None:
        raise ValueError(_USE_KERNELS)
    if _strict.get() and not cls._can_set_attn_implementation():
        reason = "computes attention outside the AttentionInterface, where no other implementation can be set"
        raise UnsupportedModelError(cls.__name__, (Problem("", cls.__name__, reason),))


def _convert_if_asked(model: nn.Module) -> None:
    if model.config._attn_implementation == ATTENTION_NAME:
        conversion.convert(model, strict=_strict.get())


def _inside_a_constructor() -> bool:
    """Return whether a module is being constructed further up the stack: what it builds now is a part of it.

    Parts must not be converted alone, or the whole would look converted to the attention function.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False
