"""Make a model batch invariant, and undo it.

    plan = plan_conversion(model)     # reads only
    apply_conversion(model, plan)     # cannot fail half-way

A module is converted by giving the instance another class (see `layers`). Every (sub)config gets the attention
implementation "batch_invariant", on copies of the configs that are this model's own, since another model may have been
built from the same objects. Every module that has submodules gets the mark `_batch_invariant`, for which the attention
function looks.
"""

import copy
import types
import warnings
from collections import Counter
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from . import layers
from .dispatch import (
    ATTENTION,
    ATTENTION_NAME,
    NOT_COVERED,
    Verdict,
    is_own_forward,
    model_refusal,
    verdict_of,
)
from .errors import Problem, UnsupportedModelError, describe
from .source_scan import scan

logger = logging.get_logger("transformers.hf_batchinv")

MARK = "_batch_invariant"
LENIENT = "_batch_invariant_lenient"
BEFORE = "_batch_invariant_attention_before"


@dataclass(frozen=True)
class Plan:
    """What conversion would do to a model, whose class is called `model`.

    modules: (name, module, verdict) for every module; problems: what is not covered; attention_stays: ids of the
    configs that must keep a stock attention implementation because the attention they choose is not covered.
    """

    model: str
    modules: tuple[tuple[str, nn.Module, Verdict], ...]
    problems: tuple[Problem, ...]
    attention_stays: frozenset[int]


def plan_conversion(model: nn.Module) -> Plan:
    """Return what conversion would do to a model, reading only."""
    modules, problems, stays = [], [], set()
    for name, module in model.named_modules():
        verdict = verdict_of(module)
        refused = model_refusal(module) if isinstance(module, PreTrainedModel) else None
        if refused is not None:
            verdict = Verdict(NOT_COVERED, refused)
        modules.append((name, module, verdict))
        if verdict.status == NOT_COVERED:
            problems.append(Problem(name, layers.stock_class(module).__name__, verdict.reason))
            if refused is not None or scan(layers.stock_class(module)).uses_attention_interface:
                stays.update(id(config) for config in _configs_of(module))
    return Plan(type(model).__name__, tuple(modules), tuple(problems), frozenset(stays))


def apply_conversion(model: nn.Module, plan: Plan, lenient: bool = False) -> None:
    """Carry out a plan made for this model; modules that the plan does not cover stay stock."""
    # All classes first: making one loads a kernel package, which is the only step here that can fail.
    swaps = [
        (module, layers.batch_invariant_class(type(module), verdict.layer, verdict.options))
        for _, module, verdict in plan.modules
        if verdict.layer is not None
    ]
    for module, cls in swaps:
        _set_class(module, cls)
    for _, module, _ in plan.modules:
        if module._modules:
            vars(module)[MARK] = True
            if lenient:
                vars(module)[LENIENT] = True
    _set_attention(model, plan)


def convert(model: nn.Module, strict: bool = True) -> nn.Module:
    """Make a model batch invariant, in place, and return it.

    Calling it again converts what was added since. `model.config` becomes a copy of itself. With strict=False, parts
    that are not covered stay stock under one warning that lists them, and results that go through them may depend on
    the batch.

    Raises TypeError if `model` is no torch.nn.Module, UnsupportedModelError with every part that is not covered.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    plan = convert_part(model, strict)
    counts = Counter(verdict.layer.replace("_", " ") for _, _, verdict in plan.modules if verdict.layer is not None)
    if counts:
        counts["attention"] = sum(verdict.status == ATTENTION for _, _, verdict in plan.modules)
        listed = ", ".join(f"{count} {layer}" for layer, count in sorted(counts.items()) if count)
        logger.info(f"hf_batchinv converted {plan.model}: {listed}")
    return model


def convert_part(module: nn.Module, strict: bool) -> Plan:
    """What `convert` does, without its INFO line; returns the plan that was carried out."""
    plan = plan_conversion(module)
    if plan.problems:
        if strict:
            raise UnsupportedModelError(plan.model, plan.problems)
        warnings.warn(f"{plan.model} is only partly batch invariant: {describe(plan.problems)}", stacklevel=3)
    apply_conversion(module, plan, lenient=not strict)
    return plan


def revert(model: nn.Module) -> nn.Module:
    """Undo `convert`, in place: classes, forwards and attention implementations are stock again. Returns the model."""
    for module in model.modules():
        if (origin := layers.origin_of(module)) is not None:
            _set_class(module, origin.stock_class)
        for config, before in vars(module).pop(BEFORE, ()):
            config._attn_implementation_internal = before
        vars(module).pop(MARK, None)
        vars(module).pop(LENIENT, None)
    for module in model.modules():
        for config in _configs_of(module):
            if str(config._attn_implementation).endswith(ATTENTION_NAME):  # it was loaded so: there is no earlier name
                config._attn_implementation_internal = _default_attention(model, module)
    return model


def is_converted(model: nn.Module) -> bool:
    """Return whether `convert` has been applied to a model."""
    return vars(model).get(MARK, False) or layers.origin_of(model) is not None


def _set_class(module: nn.Module, cls: type) -> None:
    """Change an instance's class, and the bound forwards that accelerate keeps on the instance with it."""
    attributes = vars(module)
    bound = [name for name in ("forward", "_old_forward") if is_own_forward(module, attributes.get(name))]
    module.__class__ = cls
    for name in bound:
        attributes[name] = types.MethodType(cls.forward, module)


def _set_attention(model: nn.Module, plan: Plan) -> None:
    """Set the attention implementation of every config that a module of the model holds."""
    copies: dict[int, PreTrainedConfig] = {}  # deepcopy's memo, so a config that modules share stays shared
    done: set[int] = set()
    for _, module, _ in plan.modules:
        for name, config in list(vars(module).items()):
            if not isinstance(config, PreTrainedConfig):
                continue
            tree = _tree(config)
            for ours in tree:  # "paged|batch_invariant", which continuous batching sets for a time
                if id(ours) not in plan.attention_stays and not _must_change(ours, plan):
                    ours._attn_implementation_internal = ATTENTION_NAME
            if not any(_must_change(stock, plan) for stock in tree):
                continue
            vars(module)[name] = copy.deepcopy(config, copies)
            for stock in tree:
                own = copies[id(stock)]
                if id(own) in done or not _must_change(stock, plan):
                    continue
                done.add(id(own))
                before = own._attn_implementation
                if id(stock) in plan.attention_stays:
                    own._attn_implementation_internal = _default_attention(model, module)
                    continue
                own._attn_implementation_internal = ATTENTION_NAME
                vars(module)[BEFORE] = (*vars(module).get(BEFORE, ()), (own, before))


def _must_change(config: PreTrainedConfig, plan: Plan) -> bool:
    is_ours = str(config._attn_implementation).endswith(ATTENTION_NAME)
    return is_ours if id(config) in plan.attention_stays else not is_ours


def _configs_of(module: nn.Module) -> list[PreTrainedConfig]:
    """Return every config that a module holds, nested ones included."""
    return [nested for value in vars(module).values() if isinstance(value, PreTrainedConfig) for nested in _tree(value)]


def _tree(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    nested = [getattr(config, key, None) for key in config.sub_configs]
    return [config, *(leaf for sub in nested if isinstance(sub, PreTrainedConfig) for leaf in _tree(sub))]


def _default_attention(model: nn.Module, module: nn.Module) -> str:
    """Return the implementation that transformers chooses if none is asked for."""
    owner = module if isinstance(module, PreTrainedModel) else None
    owner = owner or next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    return "sdpa" if owner is None else owner.get_correct_attn_implementation(None)
