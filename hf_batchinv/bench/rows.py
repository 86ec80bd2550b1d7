"""What norms and softmaxes share: functions of rows that read every row once and write it once."""

from collections.abc import Callable

import torch

from . import timing
from .cases import RowsCase
from .trial import Trial, same_bits

RowFunction = Callable[[torch.Tensor], torch.Tensor]


def rows_trial(case: RowsCase, device: str, ours: RowFunction, stock: dict[str, RowFunction]) -> Trial:
    """The trial of a function (rows, columns) -> (rows, columns); single rows and half of them are compared."""
    dtype = getattr(torch, case.dtype)
    nbytes = case.rows * case.columns * dtype.itemsize
    sets = timing.rotation(nbytes, device)
    inputs = torch.randn(sets, case.rows, case.columns, device=device, dtype=dtype)

    def check() -> bool:
        whole = ours(inputs[0])
        parts = [slice(row, row + 1) for row in {0, case.rows // 2, case.rows - 1}] + [slice(case.rows // 2, None)]
        return all(same_bits(ours(inputs[0, part]), whole[part]) for part in parts)

    return Trial(
        case,
        nbytes=2 * nbytes,
        flops=0,
        sets=sets,
        check=check,
        ours=lambda i: ours(inputs[i]),
        stock={name: lambda i, function=function: function(inputs[i]) for name, function in stock.items()},
    )
