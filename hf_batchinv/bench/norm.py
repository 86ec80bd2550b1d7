"""rms_norm and layer_norm beside torch's functions, and beside the module of an eager Qwen3."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .. import hub
from .cases import RowsCase
from .rows import rows_trial
from .trial import Trial

EPS = 1e-6


def trials(cases: Sequence[RowsCase], device: str) -> Iterator[Trial]:
    """One trial per number of rows of one width."""
    package = hub.load("norm")
    columns, dtype = cases[0].columns, getattr(torch, cases[0].dtype)
    weight, bias = torch.randn(2, columns, device=device, dtype=dtype)
    if cases[0].case == "rms_norm":
        eager = Qwen3RMSNorm(columns, EPS).to(device, dtype)
        eager.weight.data.copy_(weight)
        stock = {"torch": lambda x: F.rms_norm(x, (columns,), weight, EPS), "eager": eager}

        def ours(x: torch.Tensor) -> torch.Tensor:
            return package.rms_norm(x, weight, EPS)
    else:
        stock = {"torch": lambda x: F.layer_norm(x, (columns,), weight, bias, EPS)}

        def ours(x: torch.Tensor) -> torch.Tensor:
            return package.layer_norm(x, columns, weight, bias, EPS)

    for case in cases:
        yield rows_trial(case, device, ours, stock)
