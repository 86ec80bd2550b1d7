"""Where a sequence's real tokens are in the tensors that a forward pass moves through a model.

Inside a model the same token sits in row 3, column 12 of a (batch, tokens, hidden) tensor, in row 3 * tokens + 12 of a
flattened one, behind the heads of a third. `Span.of` finds it by the sizes alone; tensors whose sizes say nothing about
tokens (weights, masks over keys, scalars) are left out.
"""

from dataclasses import dataclass

import torch

ROW = "row"  # one vector for the whole sequence
TOKENS = "tokens"
ENCODED = "encoder tokens"


@dataclass(frozen=True)
class Place:
    """`count` real tokens at `start` of a token axis of `width`; the first is token `first` of the sequence."""

    start: int
    count: int
    width: int
    first: int = 0


NO_TOKENS = Place(0, 0, -1)  # no axis of tokens is known: whole rows are compared


@dataclass(frozen=True)
class Aligned:
    """values (count, ...): the real tokens of a tensor, the first of them token `first`; scope as above."""

    scope: str
    first: int
    values: torch.Tensor


@dataclass(frozen=True)
class Span:
    """Where the sequence is in one forward: its row of `rows`, its place among the tokens and the encoder's tokens.

    keys: sizes of axes of keys, if padding on the left has moved them: scores and masks of such a size line up with no
    others, so they are left out.
    """

    row: int
    rows: int
    tokens: Place
    encoded: Place | None = None
    keys: tuple[int, ...] = ()

    def of(self, tensor: torch.Tensor) -> Aligned | None:
        """Return a tensor's real tokens, or None if its sizes do not tell where they are."""
        if tensor.dim() >= 4 and tensor.shape[-1] in self.keys:  # (batch, heads, tokens, keys)
            return None
        places = [(TOKENS, self.tokens), *([(ENCODED, self.encoded)] if self.encoded else [])]
        for find in (self._with_axes, self._flattened):  # a flattened tensor is known by one size only: it comes last
            for scope, place in places:
                if (values := find(tensor, place)) is not None:
                    return Aligned(scope, place.first, values)
        return self._last_token_or_row(tensor)

    def _with_axes(self, tensor: torch.Tensor, place: Place) -> torch.Tensor | None:
        shape, columns = tensor.shape, slice(place.start, place.start + place.count)
        if tensor.dim() < 2 or shape[0] not in (self.rows, 1):
            return None
        row = self.row if shape[0] == self.rows else 0
        if shape[1] == place.width:  # (batch, tokens, ...)
            return tensor[row, columns]
        if tensor.dim() >= 4 and shape[2] == place.width:  # (batch, heads, tokens, ...)
            return tensor[row].transpose(0, 1)[columns]
        return None

    def _flattened(self, tensor: torch.Tensor, place: Place) -> torch.Tensor | None:
        shape, columns = tensor.shape, slice(place.start, place.start + place.count)
        if tensor.dim() >= 1 and shape[0] == self.rows * place.width:  # (batch * tokens, ...)
            return tensor.unflatten(0, (self.rows, place.width))[self.row, columns]
        if tensor.dim() >= 3 and shape[-1] in self.keys:
            return None
        if tensor.dim() >= 3 and shape[0] % self.rows == 0 and shape[1] == place.width:  # (batch * heads, tokens, ...)
            return tensor.unflatten(0, (self.rows, -1))[self.row].transpose(0, 1)[columns]
        return None

    def _last_token_or_row(self, tensor: torch.Tensor) -> Aligned | None:
        place = self.tokens
        if tensor.dim() >= 2 and tensor.shape[0] == self.rows:
            at_end = place.start + place.count == place.width
            if tensor.dim() >= 3 and tensor.shape[1] == 1 and at_end:  # a head that is asked for the last token alone
                return Aligned(TOKENS, place.first + place.count - 1, tensor[self.row])
            return Aligned(ROW, 0, tensor[self.row][None])
        return None


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """One int64 for each of the tokens of `values` (tokens, ...), equal if and (but for chance) only if the bits are.

    A sum of integers modulo 2^64 with odd factors: no rounding, so it does not depend on an order, and a single changed
    element always changes it.
    """
    from ..testing import bits

    whole = bits(values).reshape(values.shape[0], -1).long()
    factors = torch.arange(1, 2 * whole.shape[1], 2, device=whole.device) * -7046029254386353131  # 2^64 / golden ratio
    factors = factors ^ (factors >> 29)
    return ((whole + 1) * (factors * 2654435769 | 1)).sum(1)
