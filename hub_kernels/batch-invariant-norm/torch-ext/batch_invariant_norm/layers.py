"""Pure layers in the Kernels-Hub sense: no constructor and no state, only `forward` on the attributes they name.

Each replaces the forward of a module that has these attributes. They have no backward.
"""

import torch
from torch import nn

from .layer_norm import layer_norm
from .rms_norm import rms_norm, rms_norm_gated


class RMSNorm(nn.Module):
    """The norm of Llama, Qwen, Mistral: rounds to x's dtype, then multiplies by the weight."""

    weight: torch.Tensor
    variance_epsilon: float
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class RMSNormFloat32Weight(nn.Module):
    """The norm of GPT-OSS and Helium: multiplies by the weight in float32, then rounds to x's dtype."""

    weight: torch.Tensor
    variance_epsilon: float
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, cast_before_weight=False)


class RMSNormZeroCentered(nn.Module):
    """The norm of Gemma and Qwen3-Next: multiplies by 1 + weight in float32, then rounds to x's dtype."""

    weight: torch.Tensor
    eps: float
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, cast_before_weight=False, weight_offset=1.0)


class T5LayerNorm(nn.Module):
    """The norm of T5: an RMS norm that rounds to the weight's dtype."""

    weight: torch.Tensor
    variance_epsilon: float
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, cast_to_weight_dtype=True)


class RMSNormGated(nn.Module):
    """The gated norm of Qwen3-Next: the gate's silu multiplies the weighted norm."""

    weight: torch.Tensor
    variance_epsilon: float
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return rms_norm_gated(hidden_states, gate, self.weight, self.variance_epsilon)


class RMSNormGatedGrouped(nn.Module):
    """The gated norm of Mamba-2 in groups: the gate's silu multiplies x before the norm."""

    weight: torch.Tensor
    variance_epsilon: float
    group_size: int
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return rms_norm_gated(
            hidden_states, gate, self.weight, self.variance_epsilon, gate_before=True, group_size=self.group_size
        )


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    normalized_shape: tuple[int, ...]
    eps: float
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class CohereLayerNorm(nn.Module):
    """The norm of Cohere: a layer norm without bias."""

    weight: torch.Tensor
    variance_epsilon: float
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return layer_norm(hidden_states, self.weight.shape, self.weight, None, self.variance_epsilon)
