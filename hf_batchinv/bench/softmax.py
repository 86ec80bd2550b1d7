"""softmax and log_softmax over a vocabulary, beside torch's functions."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from .. import hub
from .cases import RowsCase
from .rows import rows_trial
from .trial import Trial


def trials(cases: Sequence[RowsCase], device: str) -> Iterator[Trial]:
    """One trial per number of rows."""
    name = cases[0].case
    function, stock = getattr(hub.load("norm"), name), getattr(F, name)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return function(x, -1)

    for case in cases:
        yield rows_trial(case, device, ours, {"torch": lambda x: stock(x, -1)})
