"""RMS norms of every spelling through one batch-invariant kernel; `norm_probe` found out which one a class computes."""

import torch

from .. import hub
from ..compilation import check_compiler
from ..norm_probe import eps_of


def make_forward(stock: type, options: tuple):
    """options: those of `norm_probe.Match`."""
    variant_name, weight_name, _, eps = options
    norm = hub.load("norm")
    rms_norm = norm.rms_norm
    (kernel_options,) = (variant.options for variant in norm.variants() if variant.name == variant_name)

    def forward(self, hidden_states):
        """hidden_states (..., D) -> (..., D), in the dtype that the stock class returns."""
        if torch.compiler.is_compiling():
            check_compiler()
        weight = None if weight_name is None else getattr(self, weight_name)
        return rms_norm(hidden_states, weight, eps_of(self, eps, hidden_states), **kernel_options)

    return forward
