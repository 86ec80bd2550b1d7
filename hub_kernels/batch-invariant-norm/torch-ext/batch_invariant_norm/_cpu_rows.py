"""Whether PyTorch's own row kernels give a row the same bits in any batch, found out by trial.

They were not seen to let a row's bits depend on the batch, the thread count or the address, and their sources give no
reason to. What they sum is all the same tried out on this machine, for each row length, before it is used: rows alone,
in small and in large batches, at aligned and other addresses. Where the trial fails, the tree of `_cpu` serves.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator

import torch
import torch.nn.functional as F

ENGINES = ("rows", "tree")

_ROWS = 12
# Elements from which PyTorch deals the work out to threads; the largest batch of the trial has more for each.
_GRAIN = 1 << 15

_lock = threading.RLock()
_known: dict[Hashable, bool] = {}
_forced: str | None = None

Function = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


@contextlib.contextmanager
def force_engine(name: str) -> Iterator[None]:
    """Use one engine only, in the whole process, so that each can be tested; "tree" still serves where "rows" fails."""
    global _forced
    if name not in ENGINES:
        raise ValueError(f"force_engine: expected name in {ENGINES}, got {name!r}; pass one of these")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def holds(kind: str, columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernel `kind` may be used for rows of this length; tried when first asked for."""
    if _forced == "tree":
        return False
    key = (kind, columns, dtype, torch.get_num_threads(), torch.backends.mkldnn.enabled)
    known = _known.get(key)
    if known is None:
        with _lock:
            known = _known.get(key)
            if known is None:
                known = _known[key] = _try(_FUNCTIONS[kind], columns, dtype)
    return known


def norm(x: torch.Tensor) -> torch.Tensor:
    """The square root of the sum of squares of each row of a float32 tensor, keeping the dimension."""
    return torch.linalg.vector_norm(x.contiguous(), dim=-1, keepdim=True)


# --- the trial ---


def _norms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (norm(x),)


def _layer_norms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two results in x's dtype, and mean and 1 / deviation, in float32, in which a change of order cannot hide."""
    shape = x.shape[-1:]
    weight = torch.linspace(0.5, 2.0, shape[0])
    plain = F.layer_norm(x, shape, weight.to(x.dtype), (weight - 1).to(x.dtype), 1e-5)
    mixed = torch.native_layer_norm(x, shape, weight, weight - 1, 1e-5)
    return (plain, F.layer_norm(x, shape, None, None, 1e-5), *mixed)


def _softmaxes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.softmax(x, -1), torch.log_softmax(x, -1)


_FUNCTIONS: dict[str, Function] = {"norm": _norms, "layer_norm": _layer_norms, "softmax": _softmaxes}


def _data(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows (12, columns) whose second half cancels the first in every other row, up to rounding."""
    generator = torch.Generator().manual_seed(4321)
    x = torch.randn(_ROWS, columns, generator=generator)
    half = columns // 4
    x[::2, half : 2 * half] = -x[::2, :half].flip(-1)
    x[::2, 2 * half :] = 0
    return x.to(dtype)


def _try(function: Function, columns: int, dtype: torch.dtype) -> bool:
    x = _data(columns, dtype)
    expected = [torch.cat(each) for each in zip(*(function(row.clone()) for row in x.split(1)), strict=True)]
    many = min(-(-2 * _GRAIN * torch.get_num_threads() // columns), 4096)
    for rows in (2, 3, 7, _ROWS, many):
        order = (torch.arange(rows) * 5 + rows) % _ROWS
        memory = torch.empty(rows * columns + 1, dtype=dtype)
        for first in (0, 1):
            batch = memory[first : first + rows * columns].view(rows, columns).copy_(x[order])
            for got, want in zip(function(batch), expected, strict=True):
                if not torch.equal(_bits(got), _bits(want)[order]):
                    return False
    return True


def _bits(y: torch.Tensor) -> torch.Tensor:
    return y.view({2: torch.int16, 4: torch.int32}[y.element_size()])
