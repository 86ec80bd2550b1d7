"""Decoding with a static cache as a CUDA graph: the launches of a step are recorded once and replayed.

A recorded step runs the very kernels of an eager one, so it has its bits; a compiler would fuse elementwise code and
drop roundings. `generate` asks for a compiled call where the cache is static and the hardware allows it; for converted
models hooks.py answers with a `DecodeGraph`, which lives as long as that call of `generate`, so nothing outdated can be
replayed: neither weights nor hooks nor adapters change meanwhile.

Everything that a step reads is copied to the place that the recording reads from. What it reads beside that is checked:
a step that looks different is run eagerly.
"""

import os
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from .conversion import LENIENT
from .errors import first_line
from .mask import BatchInvariantMask

# More kinds of steps than a call of `generate` has: before and after its sliding windows are full.
MOST_RECORDINGS = 4
_COLLECTING = "transformers.utils.output_capturing"
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)

Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]


def enabled(model: nn.Module) -> bool:
    """Whether steps of a model may be recorded: unless `HF_BATCHINV_CUDA_GRAPHS=0`, or a hook wants to see them, or it
    was converted with strict=False, when stock parts might ask the host for something.

    Raises ValueError for a setting that is neither 0 nor 1.
    """
    setting = os.environ.get("HF_BATCHINV_CUDA_GRAPHS", "1")
    if setting not in ("0", "1"):
        raise ValueError(f"HF_BATCHINV_CUDA_GRAPHS: expected 0 or 1, got {setting!r}; unset it for 1")
    unseen = not _has_any_global_hook() and not any(map(_is_watched, model.modules()))
    return setting == "1" and unseen and LENIENT not in vars(model)


def _is_watched(module: nn.Module) -> bool:
    """Whether a hook wants to see every call of a module. Those that Transformers leaves behind once hidden states were
    asked for collect what the model returns: a recording has that.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return "_hf_hook" in vars(module) or any(getattr(hook, "__module__", "") != _COLLECTING for hook in hooks)


def capture_cuda_graph(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record the launches of `step()` on the current device: a function that replays them, and what it returned, whose
    tensors every replay fills anew.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # what other threads do is their own affair
        result = step()
    return graph.replay, result


class _Recording(NamedTuple):
    inputs: list[torch.Tensor]
    replay: Callable[[], None]
    outputs: Any
    counts: list[tuple[object, str, int]]  # (layer, name of its counter, what a step adds to it)


class DecodeGraph:
    """Called in place of `model`, with keyword arguments, during one call of `generate`.

    The first step of a kind is eager, which compiles and checks what is new; the second one is recorded. Without
    `capture`, steps are recorded as CUDA graphs, and on devices that have none they are eager.
    """

    def __init__(self, model: nn.Module, capture: Capture | None = None):
        self.model = model
        self.recordings: dict[tuple, _Recording] = {}
        self._capture = capture or (capture_cuda_graph if model.device.type == "cuda" else None)
        self._seen: set[tuple] = set()

    def __call__(self, **inputs: Any) -> Any:
        found = None if self._capture is None else _flatten(inputs)
        if found is None:
            return self.model(**inputs)
        kind, tensors, cache = found
        if kind in self.recordings:
            return self._replay(self.recordings[kind], tensors)
        if kind not in self._seen or len(self.recordings) >= MOST_RECORDINGS:
            if len(self._seen) < 2 * MOST_RECORDINGS:
                self._seen.add(kind)
            return self.model(**inputs)
        self.recordings[kind] = self._record(inputs, tensors, cache)
        return self._replay(self.recordings[kind], tensors, counted=True)

    def _record(self, inputs: dict, tensors: list[torch.Tensor], cache: StaticCache) -> _Recording:
        static = [tensor.clone() for tensor in tensors]
        remaining = iter(static)
        fixed = {name: _rebuild(value, remaining) for name, value in inputs.items()}
        before = _counts(cache)
        try:
            with _recordable(cache), _current(self.model.device):
                replay, outputs = self._capture(lambda: self.model(**fixed))
        except RuntimeError as error:
            raise RuntimeError(
                f"a decoding step of {type(self.model).__name__} could not be recorded as a CUDA graph "
                f"({first_line(error)}); pass disable_compile=True to generate"
            ) from error
        counts = [(layer, name, after - before[layer, name]) for (layer, name), after in _counts(cache).items()]
        return _Recording(static, replay, outputs, counts)

    def _replay(self, recording: _Recording, tensors: list[torch.Tensor], counted: bool = False) -> Any:
        """counted: Python's counters of this step were moved while it was recorded."""
        torch._foreach_copy_(recording.inputs, tensors)
        recording.replay()
        if not counted:
            for layer, name, step in recording.counts:
                setattr(layer, name, getattr(layer, name) + step)
        return _copied(recording.outputs)


def _current(device: torch.device):
    """Context in which a CUDA device is the current one, so that it is its launches that are recorded."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _flatten(inputs: dict) -> tuple[tuple, list[torch.Tensor], StaticCache] | None:
    """(kind, tensors, cache) of a decoding step: `kind` has all that a recording bakes in, `tensors` what it reads.

    None for a call that is no step of one token over a static cache, or has an argument of another type.
    """
    kind: list = []
    tensors: list[torch.Tensor] = []
    caches = [value for value in inputs.values() if isinstance(value, StaticCache)]
    ids = inputs.get("input_ids")
    if len(caches) != 1 or not isinstance(ids, torch.Tensor) or ids.shape[1:] != (1,):
        return None
    if not all(_add(name, value, kind, tensors) for name, value in inputs.items()):
        return None
    if any(tensor.device != ids.device for tensor in tensors):  # what the host reads would be baked in
        return None
    return tuple(kind), tensors, caches[0]


def _add(name: str, value: Any, kind: list, tensors: list[torch.Tensor]) -> bool:
    """Append one argument to kind and tensors; False if its type is not known here."""
    if isinstance(value, torch.Tensor):
        kind.append((name, tuple(value.shape), value.dtype, value.device))
        tensors.append(value)
    elif isinstance(value, BatchInvariantMask):
        if value.segments is not None:
            return False
        parts = _mask_tensors(value)
        kind.append((name, value.kind, value.window, value.batch_size, value.query_len, value.kv_len))
        return all(_add(f"{name}.{part}", tensor, kind, tensors) for part, tensor in parts.items())
    elif isinstance(value, StaticCache):
        return _add_cache(name, value, kind)
    elif isinstance(value, dict):
        return all(_add(f"{name}[{key}]", part, kind, tensors) for key, part in value.items())
    elif isinstance(value, _CONSTANTS):
        kind.append((name, value))
    else:
        return False
    return True


def _add_cache(name: str, cache: StaticCache, kind: list) -> bool:
    if getattr(cache, "offloading", False):  # its layers move between devices within a step
        return False
    for layer in cache.layers:
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer) or not layer.is_initialized:
            return False
        full = isinstance(layer, StaticSlidingWindowLayer) and layer.cumulative_length_int >= layer.max_cache_len
        kind.append((name, full, layer.keys.data_ptr(), layer.values.data_ptr(), layer.cumulative_length.data_ptr()))
    return True


def _mask_tensors(mask: BatchInvariantMask) -> dict[str, torch.Tensor | None]:
    """What attention reads of a mask, the key mask in the kernel's form."""
    dense = mask.dense() if mask.kind == "custom" else None
    return {
        "query_offset": mask.query_offset,
        "origin": mask.origin,
        "key_mask": mask.key_mask,
        "prepared": mask.prepared_key_mask(),
        "dense": dense,
    }


def _rebuild(value: Any, tensors) -> Any:
    """The argument with its tensors replaced by the next ones of an iterator, in the order of `_add`."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, BatchInvariantMask):
        parts = {name: None if part is None else next(tensors) for name, part in _mask_tensors(value).items()}
        return value.with_tensors(**parts)
    if isinstance(value, dict):
        return {key: _rebuild(part, tensors) for key, part in value.items()}
    return value


def _counts(cache: StaticCache) -> dict[tuple[object, str], int]:
    """Python's own counters in a cache, which a replay does not move."""
    return {
        (layer, "cumulative_length_int"): layer.cumulative_length_int
        for layer in cache.layers
        if isinstance(layer, StaticSlidingWindowLayer)
    }


@contextmanager
def _recordable(cache: StaticCache):
    """Within this context a full sliding layer takes a token without asking the host for an index."""
    sliding = [layer for layer in cache.layers if isinstance(layer, StaticSlidingWindowLayer)]
    for layer in sliding:
        layer.update = lambda key, value, *args, layer=layer, **kwargs: _update_sliding(
            layer, key, value, *args, **kwargs
        )
    try:
        yield
    finally:
        for layer in sliding:
            del layer.update


def _update_sliding(layer: StaticSlidingWindowLayer, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
    """StaticSlidingWindowLayer.update of one token; the same copies, in one piece."""
    if layer.cumulative_length_int < layer.max_cache_len:
        return StaticSlidingWindowLayer.update(layer, key, value, *args, **kwargs)
    layer.cumulative_length_int += 1
    layer.keys.copy_(torch.cat((layer.keys[:, :, 1:], key), dim=-2))
    layer.values.copy_(torch.cat((layer.values[:, :, 1:], value), dim=-2))
    return layer.keys, layer.values


def _copied(outputs: Any) -> Any:
    """A ModelOutput with tensors of its own: the next replay overwrites the recording's."""
    if isinstance(outputs, torch.Tensor):
        return outputs.clone()
    if isinstance(outputs, tuple | list):
        return type(outputs)(_copied(part) for part in outputs)
    if isinstance(outputs, dict):
        return type(outputs)(**{name: _copied(part) for name, part in outputs.items()})
    return outputs
