"""torch.nn.LayerNorm, and classes that `norm_probe` has found to compute a layer norm, through one kernel."""

import torch

from .. import hub
from ..compilation import check_compiler
from ..norm_probe import eps_of


def make_forward(stock: type, options: tuple):
    """options: () for torch.nn.LayerNorm, else those of `norm_probe.Match`."""
    norm = hub.load("norm")
    layer_norm = norm.layer_norm
    if not options:

        def forward(self, input):
            """input (..., *normalized_shape) -> same shape and dtype; weight and bias may be None."""
            if torch.compiler.is_compiling():
                check_compiler()
            return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

        return forward

    variant_name, weight_name, bias_name, eps = options
    (kernel_options,) = (variant.options for variant in norm.layer_norm_variants() if variant.name == variant_name)

    def forward(self, hidden_states):
        """hidden_states (..., D) -> (..., D), in the dtype that the stock class returns."""
        if torch.compiler.is_compiling():
            check_compiler()
        weight = None if weight_name is None else getattr(self, weight_name)
        bias = None if bias_name is None else getattr(self, bias_name)
        value = eps_of(self, eps, hidden_states)
        return layer_norm(hidden_states, hidden_states.shape[-1:], weight, bias, value, **kernel_options)

    return forward
