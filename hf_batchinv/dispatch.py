"""Say what each module of a model is, and which batch-invariant layer it becomes.

`DISPATCHERS` are asked in order; each answers with a Verdict or with None ("not mine"). Types and behaviour decide,
never the name of a model.
"""

import types
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from . import layers, norm_probe, source_scan
from .layers import gated_mlp, rotary
from .layers.activation import formula_of

CONVERTED = "converted"
ELEMENTWISE = "elementwise"
ATTENTION = "attention"
CONTAINER = "container"
NOT_COVERED = "not covered"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ATTENTION_NAME = "batch_invariant"

# Where attention modules of the model library keep the width of a head.
_HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim", "qk_head_dim", "v_head_dim")
# These take their frequencies from the longest row of the batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Verdict:
    """status: one of the five above; reason: detail or refusal; layer and options: what the module becomes, if that."""

    status: str
    reason: str = ""
    layer: str | None = None
    options: tuple = ()


def refuse(reason: str) -> Verdict:
    return Verdict(NOT_COVERED, reason)


def becomes(layer: str, options: tuple = ()) -> Verdict:
    return Verdict(CONVERTED, describe_layer(layer, options), layer, options)


def describe_layer(layer: str, options: tuple) -> str:
    """Return a layer's name for people, with its first option, which says which of its formulas it is."""
    return layer.replace("_", " ") + (f" ({options[0]})" if options else "")


def verdict_of(module: nn.Module) -> Verdict:
    """Return what one module is; its submodules are not looked at."""
    for dispatch in DISPATCHERS:
        if (verdict := dispatch(module)) is not None:
            return verdict
    raise AssertionError("the last dispatcher answers always")


# --- the dispatchers, first match wins ---


def dispatch_compiled(module):
    if type(module).__module__.startswith("torch._dynamo"):
        return refuse("is compiled; convert the model first, and compile it then if its backend keeps roundings")


def dispatch_tensor_parallel(module):
    if any(type(parameter).__name__ == "DTensor" for parameter in module._parameters.values()):
        return refuse("has its weights sharded over devices (DTensor); load the model without tensor parallelism")


def dispatch_foreign_forward(module):
    if not has_known_forward(module):
        return refuse(
            "has a forward of its own on the instance (tensor parallelism, a hub kernel or a patch), which would go "
            "around the converted class; convert before patching, or remove the patch"
        )


def dispatch_converted(module):
    if (origin := layers.origin_of(module)) is not None:
        uses_interface = source_scan.scan(origin.stock_class).uses_attention_interface
        return Verdict(ATTENTION if uses_interface else CONVERTED, describe_layer(origin.layer, origin.options))


def dispatch_experts(module):
    if source_scan.scan(type(module)).uses_experts_interface:
        return refuse("is a mixture-of-experts layer, and experts are not covered yet")


def dispatch_quantized(module):
    if module._modules or isinstance(module, nn.Linear):
        return None
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.dim() >= 2 and buffer.dtype in _INTEGERS:
            return refuse(f"looks quantised (integer buffer {name!r}); load the model without quantisation")


def dispatch_linear(module):
    if not isinstance(module, nn.Linear):
        return None
    if type(module).forward is not nn.Linear.forward or isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return refuse("is a linear layer with a forward of its own (quantised or patched); load it as torch.nn.Linear")
    return _unless_dtype(module, becomes("linear"))


def dispatch_conv1d(module):
    if isinstance(module, Conv1D) and type(module).forward is Conv1D.forward:
        return _unless_dtype(module, becomes("conv1d"))


def dispatch_layer_norm(module):
    if isinstance(module, nn.LayerNorm) and type(module).forward is nn.LayerNorm.forward:
        return _unless_dtype(module, becomes("layer_norm"))


def dispatch_activation(module):
    if (formula := formula_of(module)) is not None:
        return becomes("activation", (formula,))


def dispatch_dropout(module):
    if type(module) is nn.Dropout:
        return becomes("dropout") if module.p > 0 else Verdict(ELEMENTWISE)


def dispatch_embedding(module):
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return refuse("renormalises its weights at every call (max_norm); build it with max_norm=None")
    if type(module) is nn.Embedding:
        return Verdict(ELEMENTWISE)


def dispatch_torch_nn(module):
    kind = type(module)
    if kind in _CONTAINERS:
        return Verdict(CONTAINER)
    if kind in source_scan.ELEMENTWISE_NN:
        return Verdict(ELEMENTWISE)
    if kind.__module__ == "torch.nn.modules.loss":
        return Verdict(ELEMENTWISE, "loss, about the whole batch by definition")
    if kind.__module__.startswith("torch.nn.modules") and kind not in (nn.RMSNorm, nn.Module):
        return refuse(f"is a torch.nn.{kind.__name__}, which is not covered")


def dispatch_rope(module):
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    for kind in kinds:
        if kind in _BATCH_DEPENDENT_ROPE:
            return refuse(
                f"takes its rotary frequencies from the longest row of the batch (rope type {kind!r}); load the model "
                "with another rope type in config.rope_parameters"
            )


def dispatch_norm(module):
    if not _is_norm_shaped(module):
        return None
    reductions = _reductions(module)
    if type(module) is not nn.RMSNorm and not reductions:
        return None
    found = norm_probe.recognise(module)
    if isinstance(found, str):
        return refuse(f"calls {_listed(reductions)}, and as a norm it {found}")
    return _unless_dtype(module, becomes(found.layer, found.options))


def dispatch_adapter_variant(module):
    if variants := getattr(module, "lora_variant", None):
        return refuse(f"uses a variant of LoRA for {sorted(variants)}; only plain LoRA is covered")


def dispatch_held_functions(module):
    if names := source_scan.held_reductions(module):
        return refuse(f"holds {', '.join(f'torch function {name!r}' for name in names)}, which is not covered")


def dispatch_by_source(module):
    kind = type(module)
    scan = source_scan.scan(kind)
    if scan.unreadable is not None:
        return refuse(f"has a forward whose source cannot be read ({scan.unreadable})")
    if reductions := _reductions(module):
        return refuse(f"calls {_listed(reductions)}, which is not covered")
    findings = source_scan.findings_in(module, kind)
    if scan.uses_attention_interface:
        return _attention(module, "functional" if findings else "rotary" if rotary.recognises(kind) else None)
    if findings:
        return becomes("functional")
    if gated_mlp.recognises(module):
        return becomes("gated_mlp", ("silu",))
    if not module._modules and module._parameters and not _is_known_elementwise(module):
        return refuse("has parameters and is none of the layers known here")
    return Verdict(CONTAINER if module._modules else ELEMENTWISE)


DISPATCHERS = (
    dispatch_compiled,
    dispatch_tensor_parallel,
    dispatch_foreign_forward,
    dispatch_converted,
    dispatch_experts,
    dispatch_quantized,
    dispatch_linear,
    dispatch_conv1d,
    dispatch_layer_norm,
    dispatch_activation,
    dispatch_dropout,
    dispatch_embedding,
    dispatch_torch_nn,
    dispatch_rope,
    dispatch_norm,
    dispatch_adapter_variant,
    dispatch_held_functions,
    dispatch_by_source,
)


# --- what concerns a whole (sub)model ---


def model_refusal(model: PreTrainedModel) -> str | None:
    """Return why a PreTrainedModel cannot be covered whatever its modules are, or None."""
    if getattr(model, "use_kernels", False):
        return "was loaded with use_kernels=True, whose kernels replace ours; load it without"
    if getattr(model, "_tp_size", None) is not None:
        return "is tensor parallel; load it without tp_plan"
    if not model._can_set_attn_implementation():
        return "computes attention outside the AttentionInterface, where no other implementation can be set"
    return None


# --- helpers ---


def has_known_forward(module: nn.Module) -> bool:
    """Return whether calling the module ends in its class's forward: nothing on the instance but accelerate's hook."""
    attributes = vars(module)
    forward = attributes.get("forward")
    if forward is None or is_own_forward(module, forward):
        return True
    hooked = isinstance(forward, partial) and "_hf_hook" in attributes
    return hooked and is_own_forward(module, attributes.get("_old_forward"))


def is_own_forward(module: nn.Module, forward: object) -> bool:
    """Return whether an instance attribute is the forward of the module's class, bound to the module."""
    return (
        isinstance(forward, types.MethodType)
        and forward.__self__ is module
        and forward.__func__ is getattr(type(module).forward, "__func__", type(module).forward)
    )


def _reductions(module: nn.Module) -> list[source_scan.Finding]:
    found = source_scan.findings_in(module, type(module))
    return [finding for finding in found if finding.kind == source_scan.REDUCTION]


def _listed(findings: list[source_scan.Finding]) -> str:
    calls = dict.fromkeys(f"`{finding.call}` in {finding.where}" for finding in findings)
    return ", ".join(calls) or "a fused norm"


def _unless_dtype(module: nn.Module, verdict: Verdict) -> Verdict:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dtype not in DTYPES:
            return refuse(f"has a {name} of {parameter.dtype}; load the model in float32, float16 or bfloat16")
    return verdict


def _is_norm_shaped(module: nn.Module) -> bool:
    """At most two parameters, vectors both, no submodules, no buffers, a forward of one argument."""
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if module._modules or module._buffers or len(parameters) > 2 or any(p.dim() != 1 for p in parameters):
        return False
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and code.co_argcount == 2


def _is_known_elementwise(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.PReLU)) or type(module).__module__ == "transformers.activations"


def _attention(module: nn.Module, layer: str | None) -> Verdict:
    for name in _HEAD_DIMS:
        head_dim = getattr(module, name, None)
        if isinstance(head_dim, int) and not (16 <= head_dim <= 256 and head_dim % 8 == 0):
            return refuse(f"has {name}={head_dim}; attention covers head dims from 16 to 256 that are multiples of 8")
    return Verdict(ATTENTION, describe_layer(layer, ()) if layer else "", layer)
