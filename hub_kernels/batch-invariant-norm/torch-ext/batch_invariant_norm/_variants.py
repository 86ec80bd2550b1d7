"""The norm variants that models use, each with its formula in stock torch.

A recogniser runs a module on random input, compares the bits with each `stock`, and gets the options of ours that
round in the same places. Use 16-bit x with 16-bit and with float32 weights: many variants coincide in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from .layer_norm import layer_norm
from .rms_norm import rms_norm, rms_norm_gated

Formula = Callable[..., torch.Tensor]


def _in_groups(x: torch.Tensor, group_size: int | None) -> torch.Tensor:
    return x if group_size is None else x.unflatten(-1, (-1, group_size))


def _xhat(x: torch.Tensor, eps: float, group_size: int | None = None) -> torch.Tensor:
    groups = _in_groups(x.float(), group_size)
    return (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).reshape(x.shape)


@dataclass(frozen=True)
class RMSNormVariant:
    """One RMS norm: `stock(x, weight, eps, group_size=None)` states it, `variant(x, weight, eps, ...)` computes ours.

    `weighted`: whether it has a weight. `serves`: model families. The other fields are the options of `rms_norm`.
    """

    name: str
    serves: str
    weighted: bool
    stock: Formula = field(repr=False)
    cast_before_weight: bool = True
    weight_offset: float = 0.0
    cast_to_weight_dtype: bool = False
    offset_in_weight_dtype: bool = False
    round_factor: bool = False

    @property
    def options(self) -> dict[str, bool | float]:
        return {
            "cast_before_weight": self.cast_before_weight,
            "weight_offset": self.weight_offset,
            "cast_to_weight_dtype": self.cast_to_weight_dtype,
            "offset_in_weight_dtype": self.offset_in_weight_dtype,
            "round_factor": self.round_factor,
        }

    def __call__(self, x, weight, eps, group_size=None):
        return rms_norm(x, weight, eps, group_size=group_size, **self.options)


def _cast_then_weight(x, weight, eps, group_size=None):
    return weight * _xhat(x, eps, group_size).to(x.dtype)


def _weight_then_cast(x, weight, eps, group_size=None):
    return (weight.float() * _xhat(x, eps, group_size)).to(x.dtype)


def _power(x, weight, eps, group_size=None):
    groups = _in_groups(x.float(), group_size)
    xhat = (groups * torch.pow(groups.pow(2).mean(-1, keepdim=True) + eps, -0.5)).reshape(x.shape)
    return (xhat * weight.float()).to(x.dtype)


def _torch(x, weight, eps, group_size=None):
    if group_size is not None:
        return _weight_then_cast(x, weight, eps, group_size)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _one_plus_weight(x, weight, eps, group_size=None):
    return (_xhat(x, eps, group_size) * (1.0 + weight.float())).to(x.dtype)


def _one_plus_weight_rounded(x, weight, eps, group_size=None):
    return (_xhat(x, eps, group_size) * (1.0 + weight).float()).to(x.dtype)


def _t5(x, weight, eps, group_size=None):
    xhat = _xhat(x, eps, group_size)
    if weight.dtype in (torch.float16, torch.bfloat16):
        xhat = xhat.to(weight.dtype)
    return weight * xhat


def _weightless(x, weight, eps, group_size=None):
    return _xhat(x, eps, group_size).to(x.dtype)


def _weightless_power(x, weight, eps, group_size=None):
    groups = _in_groups(x.float(), group_size)
    return (groups * torch.pow(groups.pow(2).mean(-1, keepdim=True) + eps, -0.5)).reshape(x.shape).to(x.dtype)


def _weightless_rounded_factor(x, weight, eps, group_size=None):
    groups = _in_groups(x, group_size)
    factor = torch.rsqrt(groups.float().square().mean(-1, keepdim=True) + eps)
    return (groups * factor.to(x.dtype)).reshape(x.shape)


_RMS_NORM = (
    RMSNormVariant("cast_then_weight", "Llama, Qwen, Mistral and most others", True, _cast_then_weight),
    RMSNormVariant("weight_then_cast", "GPT-OSS, Helium, OLMo", True, _weight_then_cast, cast_before_weight=False),
    RMSNormVariant("power", "Gemma 3n, Gemma 4", True, _power, cast_before_weight=False),
    RMSNormVariant("torch", "torch.nn.RMSNorm", True, _torch, cast_before_weight=False),
    RMSNormVariant(
        "one_plus_weight",
        "Gemma 1 to 3, Qwen3-Next, Qwen3.5",
        True,
        _one_plus_weight,
        cast_before_weight=False,
        weight_offset=1.0,
    ),
    RMSNormVariant(
        "one_plus_weight_rounded",
        "Muse Spark",
        True,
        _one_plus_weight_rounded,
        cast_before_weight=False,
        weight_offset=1.0,
        offset_in_weight_dtype=True,
    ),
    RMSNormVariant("t5", "T5, mT5, UMT5, Pix2Struct, Switch", True, _t5, cast_to_weight_dtype=True),
    RMSNormVariant("weightless", "Llama 4 (query and key), nanochat", False, _weightless),
    RMSNormVariant("weightless_power", "Gemma 3n and 4 without scale", False, _weightless_power),
    RMSNormVariant("weightless_rounded_factor", "DeepSeek-V4", False, _weightless_rounded_factor, round_factor=True),
)


def variants() -> tuple[RMSNormVariant, ...]:
    """All RMS norms without a gate, most frequent first; several may share their options of ours."""
    return _RMS_NORM


@dataclass(frozen=True)
class RMSNormGatedVariant:
    """One gated RMS norm: `stock(x, gate, weight, eps, group_size=None, activation="silu")`; calling computes ours."""

    name: str
    serves: str
    stock: Formula = field(repr=False)
    gate_before: bool = False
    cast_before_weight: bool = True

    @property
    def options(self) -> dict[str, bool]:
        return {"gate_before": self.gate_before, "cast_before_weight": self.cast_before_weight}

    def __call__(self, x, gate, weight, eps, group_size=None, activation="silu"):
        return rms_norm_gated(x, gate, weight, eps, group_size=group_size, activation=activation, **self.options)


def _act(gate, activation):
    functions = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid, "relu": F.relu}
    return functions[activation](gate.float())


def _gate_norm_cast_weight(x, gate, weight, eps, group_size=None, activation="silu"):
    return weight * _xhat(x.float() * _act(gate, activation), eps, group_size).to(x.dtype)


def _gate_norm_weight_cast(x, gate, weight, eps, group_size=None, activation="silu"):
    return (weight * _xhat(x.float() * _act(gate, activation), eps, group_size)).to(x.dtype)


def _norm_cast_weight_gate(x, gate, weight, eps, group_size=None, activation="silu"):
    return (weight * _xhat(x, eps, group_size).to(x.dtype) * _act(gate, activation)).to(x.dtype)


def _norm_weight_gate_cast(x, gate, weight, eps, group_size=None, activation="silu"):
    return (weight.float() * _xhat(x, eps, group_size) * _act(gate, activation)).to(x.dtype)


_GATED = (
    RMSNormGatedVariant("norm_cast_weight_gate", "Qwen3-Next, Qwen3.5, OLMo hybrid", _norm_cast_weight_gate),
    RMSNormGatedVariant(
        "norm_weight_gate_cast",
        "Kimi-Linear, Bailing hybrid, Falcon-H1 (norm first)",
        _norm_weight_gate_cast,
        cast_before_weight=False,
    ),
    RMSNormGatedVariant(
        "gate_norm_cast_weight",
        "Mamba-2, Bamba, Granite hybrid, Zamba-2, Nemotron-H",
        _gate_norm_cast_weight,
        gate_before=True,
    ),
    RMSNormGatedVariant(
        "gate_norm_weight_cast", "Falcon-H1", _gate_norm_weight_cast, gate_before=True, cast_before_weight=False
    ),
)


def gated_variants() -> tuple[RMSNormGatedVariant, ...]:
    """All gated RMS norms."""
    return _GATED


@dataclass(frozen=True)
class LayerNormVariant:
    """One layer norm over the last dimension: `stock(x, weight, bias, eps)` states it, calling it computes ours."""

    name: str
    serves: str
    stock: Formula = field(repr=False)
    cast_before_weight: bool = False

    @property
    def options(self) -> dict[str, bool]:
        return {"cast_before_weight": self.cast_before_weight}

    def __call__(self, x, weight, bias, eps):
        return layer_norm(x, x.shape[-1:], weight, bias, eps, **self.options)


def _layer_norm_torch(x, weight, bias, eps):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _centred(x, eps, divide):
    difference = x.float() - x.float().mean(-1, keepdim=True)
    variance = difference.pow(2).mean(-1, keepdim=True)
    return difference / torch.sqrt(variance + eps) if divide else difference * torch.rsqrt(variance + eps)


def _layer_norm_cohere(x, weight, bias, eps):
    y = _centred(x, eps, divide=False)
    y = y if weight is None else weight.float() * y
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _layer_norm_deberta(x, weight, bias, eps):
    y = _centred(x, eps, divide=True).to(x.dtype)
    y = y if weight is None else weight * y
    return y if bias is None else y + bias


def _layer_norm_then_affine(x, weight, bias, eps):
    y = F.layer_norm(x, x.shape[-1:], None, None, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


_LAYER_NORM = (
    LayerNormVariant("torch", "torch.nn.LayerNorm", _layer_norm_torch),
    LayerNormVariant("cohere", "Cohere", _layer_norm_cohere),
    LayerNormVariant("deberta", "DeBERTa", _layer_norm_deberta, cast_before_weight=True),
    LayerNormVariant("then_affine", "Chameleon", _layer_norm_then_affine, cast_before_weight=True),
)


def layer_norm_variants() -> tuple[LayerNormVariant, ...]:
    """All layer norms over the last dimension."""
    return _LAYER_NORM
