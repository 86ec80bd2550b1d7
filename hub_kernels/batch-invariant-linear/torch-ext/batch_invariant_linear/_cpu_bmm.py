"""bmm on the CPU: K and N are cut into blocks of 64, so one certificate serves every shape.

A block product is (height, 64) @ (64, 64) at a certified height; the blocks of K are added in ascending order. Hence a
column's bits do not depend on how many columns there are, and zeros appended to K (a longer, masked neighbour) change
nothing. `y` is an activation here, so nothing is cached.
"""

import torch
import torch.nn.functional as F

from . import _cpu_exact
from ._cpu_plan import Call, Plan, allows, certify, plan_for, trial_operands
from ._dispatch import plain_torch

_BLOCK = 64
_ITEMS = 8  # block products per call of torch.bmm
_HEIGHTS = ((4, 16, 64, 256),)


def bmm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x (B, M, K), y (B, K, N), one dtype, any strides -> (B, M, N), new and contiguous."""
    with plain_torch():
        batch, rows, k = x.shape
        if 0 in (batch, rows, k, y.shape[2]):
            return x.new_zeros(batch, rows, y.shape[2])
        plan = _plan()
        out = _exact(x.float(), y.float()) if plan.engine == "exact" else _blocked(plan, x, y)
        return out.to(x.dtype)


def _plan() -> Plan:
    def make_trial() -> tuple[Call, torch.Tensor]:
        x, y = trial_operands(_BLOCK, _BLOCK, torch.float32)
        filled = y.t().expand(_ITEMS, _BLOCK, _BLOCK).contiguous()

        def call(tile: torch.Tensor) -> torch.Tensor:
            items = torch.bmm(tile.expand(_ITEMS, *tile.shape).contiguous(), filled)
            # An item that differs from the others is reported by making its rows differ from anything.
            return items[0] if torch.equal(items, items[:1].expand_as(items)) else torch.rand_like(items[0])

        return call, x

    def make() -> Plan:
        plan = certify("tiled", _HEIGHTS, make_trial) if allows("tiled") else None
        return plan or Plan("exact")

    return plan_for(("bmm",), make)


def _pad(tensor: torch.Tensor, amounts: tuple[int, ...]) -> torch.Tensor:
    return F.pad(tensor, amounts) if any(amounts) else tensor  # F.pad copies even if there is nothing to add


def _aligned(blocks: torch.Tensor) -> torch.Tensor:
    """The trial ran on aligned memory only, so blocks that still are a view of the caller's may need a copy."""
    return blocks if blocks.data_ptr() % 64 == 0 else blocks.clone()


def _blocked(plan: Plan, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    batch, rows, k = x.shape
    n = y.shape[2]
    k_blocks, n_blocks = -(-k // _BLOCK), -(-n // _BLOCK)
    items = batch * n_blocks
    padding = -items % _ITEMS

    # (k block, item, 64, 64), an item being one n block of one batch entry
    y = _pad(y.float(), (0, n_blocks * _BLOCK - n, 0, k_blocks * _BLOCK - k))
    y = y.reshape(batch, k_blocks, _BLOCK, n_blocks, _BLOCK).permute(1, 0, 3, 2, 4)
    y = _aligned(_pad(y.reshape(k_blocks, items, _BLOCK, _BLOCK), (0, 0, 0, 0, 0, padding)))

    out = x.new_empty(batch, rows, n, dtype=torch.float32)
    for start, height in plan.tiles(rows):
        end = min(start + height, rows)
        tile = _pad(x[:, start:end].float(), (0, k_blocks * _BLOCK - k, 0, height - (end - start)))
        tile = tile.reshape(batch, height, k_blocks, _BLOCK).permute(2, 0, 1, 3)
        tile = tile[:, :, None].expand(k_blocks, batch, n_blocks, height, _BLOCK)
        tile = _aligned(_pad(tile.reshape(k_blocks, items, height, _BLOCK), (0, 0, 0, 0, 0, padding)))
        total = torch.cat([_sum_of_blocks(tile, y, first) for first in range(0, items + padding, _ITEMS)])[:items]
        total = total.view(batch, n_blocks, height, _BLOCK).permute(0, 2, 1, 3).reshape(batch, height, -1)
        out[:, start:end] = total[:, : end - start, :n]
    return out


def _sum_of_blocks(x: torch.Tensor, y: torch.Tensor, first: int) -> torch.Tensor:
    """The products of `_ITEMS` items, summed over the blocks of K in ascending order."""
    chosen = slice(first, first + _ITEMS)
    total = torch.bmm(x[0, chosen], y[0, chosen])
    for block in range(1, len(x)):
        total += torch.bmm(x[block, chosen], y[block, chosen])
    return total


def _exact(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = y.transpose(1, 2)
    return torch.stack([_cpu_exact.matmul(a, b, _cpu_exact.split(b)) for a, b in zip(x, weight, strict=True)])
