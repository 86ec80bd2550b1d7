"""The axes of the guarantee: one sequence, run in every way that must not change its bits.

Iterating over `Axes(model, ids, plan)` gives (axis, got, want): logits of the sequence's real tokens in some
surrounding, and those of the sequence alone in one plain forward.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import DynamicCache, StaticCache

from hf_batchinv.testing import differing


@dataclass(frozen=True)
class AxesPlan:
    """How far each axis is walked."""

    batches: tuple[int, ...] = (2, 3, 5, 8, 17, 33)
    pads: tuple[int, ...] = (1, 7, 64, 70)
    chunks: tuple[tuple[int, ...], ...] = ((1,), (13, 14), (5, 20, 33))
    static_lengths: tuple[int, ...] = (64, 97)
    decode_from: int = 17
    new_tokens: int = 6
    token_by_token: bool = True


def positions(mask: torch.Tensor) -> torch.Tensor:
    """The position_ids that `generate` derives from a mask."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


class Axes:
    def __init__(self, model, ids: torch.Tensor, plan: AxesPlan):
        """ids (n,) token ids of the sequence, n > 33."""
        self.model, self.plan = model, plan
        self.ids = ids[None].to(model.device)
        self.length = ids.numel()
        self.random = torch.Generator().manual_seed(1234)
        with torch.no_grad():
            self.want = model(self.ids, use_cache=False).logits[0]

    def mates(self, rows: int, length: int) -> torch.Tensor:
        """Other sequences (rows, length)."""
        ids = torch.randint(3, self.model.config.vocab_size, (rows, length), generator=self.random)
        return ids.to(self.ids.device)

    def batch(self) -> Iterator:
        for rows in self.plan.batches:
            at = int(torch.randint(rows, (1,), generator=self.random))
            ids = self.mates(rows, self.length)
            ids[at] = self.ids
            yield f"batch {rows}, position {at}", self.model(ids).logits[at], self.want

    def padding(self) -> Iterator:
        """Longer mates, padding on either side; then the rest of the text decoded behind the padding."""
        n = self.length
        for pad in self.plan.pads:
            for side in ("right", "left"):
                real = slice(0, n) if side == "right" else slice(pad, pad + n)
                ids = self.mates(3, n + pad)
                mask = torch.ones_like(ids)
                ids[1] = 0
                ids[1, real] = self.ids
                mask[1] = 0
                mask[1, real] = 1
                run = dict(attention_mask=mask, position_ids=positions(mask))
                yield f"{side} padding {pad}", self.model(ids, **run).logits[1, real], self.want
                if side == "left":
                    first = pad + self.plan.decode_from
                    got = self.steps(ids, mask, [first, *range(first + 1, n + pad)], DynamicCache(config=self.config))
                    yield f"left padding {pad}, decoded", got[1, real], self.want

    @property
    def config(self):
        return self.model.config.get_text_config(decoder=True)

    def steps(self, ids, mask, ends, cache) -> torch.Tensor:
        """Forward `ids` in pieces that end at `ends` (and at the end of the ids), with a cache."""
        logits, begin = [], 0
        for end in [*ends, ids.shape[1]]:
            if end > begin:
                run = dict(attention_mask=mask[:, :end], position_ids=positions(mask)[:, begin:end])
                logits.append(self.model(ids[:, begin:end], past_key_values=cache, use_cache=True, **run).logits)
                begin = end
        return torch.cat(logits, 1)

    def cache(self) -> Iterator:
        yield "use_cache", self.model(self.ids, use_cache=True).logits[0], self.want
        mask = torch.ones_like(self.ids)
        one_by_one = tuple(range(1, self.length))
        for ends in (*self.plan.chunks, *([one_by_one] if self.plan.token_by_token else [])):
            name = "token by token" if ends == one_by_one else f"chunks {ends}"
            got = self.steps(self.ids, mask, ends, DynamicCache(config=self.config))
            yield f"dynamic cache, {name}", got[0], self.want
        for room in self.plan.static_lengths:
            for ends in (self.plan.chunks[-1], range(self.plan.decode_from, self.length)):
                cache = StaticCache(config=self.config, max_cache_len=max(room, self.length))
                got = self.steps(self.ids, mask, ends, cache)
                yield f"static cache {room}, {len(ends)} steps", got[0], self.want

    def generate(self) -> Iterator:
        """Step logits of `generate`, alone and left padded in a batch, against one forward on the finished text."""
        n, new = self.length, self.plan.new_tokens
        run = dict(do_sample=False, max_new_tokens=new, min_new_tokens=new, output_logits=True)
        run.update(return_dict_in_generate=True, pad_token_id=0)
        if not getattr(self.model, "_batch_invariant", False):
            run["disable_compile"] = True  # the stock model differs without it, too, and compiling takes a minute
        for pad, extra in ((0, {}), (0, {"use_cache": False}), (0, {"cache_implementation": "static"}), (9, {})):
            ids = self.mates(3, n + pad) if pad else self.ids
            at = 2 if pad else 0
            mask = torch.ones_like(ids)
            if pad:
                ids[at, :pad], ids[at, pad:] = 0, self.ids
                mask[at, :pad] = 0
            out = self.model.generate(ids, attention_mask=mask, **run, **extra)
            want = self.model(out.sequences[at : at + 1, pad:], use_cache=False).logits[0, n - 1 : -1]
            got = torch.stack([step[at] for step in out.logits])
            # generate hands float32 logits out
            yield f"generate {extra or 'dynamic cache'}, padding {pad}", got.float(), want.float()

    def __iter__(self) -> Iterator:
        with torch.no_grad():
            for axis in (self.batch, self.padding, self.cache, self.generate):
                yield from axis()


def failures(axes: Axes) -> dict[str, int]:
    """axis -> number of logits with differing bits, for the axes that have any."""
    counts = {axis: differing(got, want) for axis, got, want in axes}
    walked = {axis.split()[0] for axis in counts}
    assert walked == {"batch", "right", "left", "use_cache", "dynamic", "static", "generate"}, walked
    return {axis: count for axis, count in counts.items() if count}
