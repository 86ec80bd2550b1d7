"""A text and the means to run it: forward by forward, with or without a cache, in a batch, padded, or by `generate`.

A case is run by walking its forwards, a generator of (inputs, where the sequence is in them); it can be walked again.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from .align import Place, Span
from .subject import ENCODER_DECODER, Subject, decoder_ids, main_output

DECODED = 8  # tokens that are fed one by one at the end of a sequence
NEW = 6  # tokens that generate adds

Walk = Generator[tuple[dict, Span], Any, None]
Watch = Callable[[Span], None]


def no_watch(span: Span) -> None:
    """Nobody looks."""


@dataclass(frozen=True)
class Note:
    """Why something is not run."""

    text: str


@dataclass
class Case:
    """One way to run a text: the forwards of the case, and those of what it is compared with."""

    axis: str
    name: str
    text: int
    sequence: "Sequence"
    walk: Callable[[], Walk]
    alone: Callable[[], Walk]

    def got(self, watch: Watch = no_watch) -> torch.Tensor:
        """Results (tokens, ...) in this case; `watch(span)` is told before each forward where the sequence is."""
        return self.sequence.run(self.walk, watch)

    def want(self, watch: Watch = no_watch) -> torch.Tensor:
        """Results of the same tokens in the reference."""
        if self.alone == self.sequence.alone and watch is no_watch:
            return self.sequence.plain
        return self.sequence.run(self.alone, watch)


@dataclass
class Sequence:
    """One text's token ids (tokens,) and the means to run it."""

    subject: Subject
    text: int
    ids: torch.Tensor
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1234))

    def __post_init__(self):
        if self.seq2seq and len(self.ids) == self.decoded.shape[1]:
            self.ids = self.ids[:-1]  # tokens of encoder and decoder are told apart by their number
        self.ids = self.ids[None]

    @property
    def n(self) -> int:
        return self.ids.shape[1]

    @property
    def seq2seq(self) -> bool:
        return self.subject.kind == ENCODER_DECODER

    @cached_property
    def decoded(self) -> torch.Tensor:
        return decoder_ids(self.subject)

    def mates(self, rows: int, length: int) -> torch.Tensor:
        return self.subject.random_ids(rows, length, self.random)

    def decoders(self, rows: int, row: int) -> torch.Tensor:
        """(rows, tokens) ids for the decoder, the sequence's in `row`; the same at every call."""
        ids = self.subject.random_ids(rows, self.decoded.shape[1], torch.Generator().manual_seed(99))
        ids[row] = self.decoded
        return ids

    # --- running ---

    def run(self, walk: Callable[[], Walk], watch: Watch = no_watch) -> torch.Tensor:
        """Results of the sequence's tokens (tokens, ...), forward by forward."""
        requests, pieces, output = walk(), [], None
        try:
            while True:
                inputs, span = requests.send(output)
                watch(span)
                output = self.subject.model(**inputs)
                pieces.append(span.of(main_output(output)).values)
        except StopIteration:
            return torch.cat(pieces)

    @cached_property
    def plain(self) -> torch.Tensor:
        """The sequence alone in one plain forward: what everything is compared with."""
        return self.run(self.alone)

    def alone(self) -> Walk:
        yield from self.once(self.ids, 0, 0)

    def span(self, ids: torch.Tensor, row: int, pad: int) -> Span:
        here, keys = Place(pad, self.n, ids.shape[1]), (ids.shape[1],) if pad else ()
        if not self.seq2seq:
            return Span(row, ids.shape[0], here, keys=keys)
        width = self.decoded.shape[1]
        return Span(row, ids.shape[0], Place(0, width, width), here, keys)

    def once(self, ids: torch.Tensor, row: int, pad: int, **inputs) -> Walk:
        """One forward without a cache; the sequence is in `row`, from column `pad`."""
        if self.seq2seq:
            inputs["decoder_input_ids"] = self.decoders(ids.shape[0], row)
        if "use_cache" in self.subject.arguments:
            inputs.setdefault("use_cache", False)
        yield {"input_ids": ids, **inputs}, self.span(ids, row, pad)

    def cached(
        self, ids, mask, row: int, pad: int, ends: list[int], make_cache: Callable[[], Any], room: int = 0
    ) -> Walk:
        """Forwards with a cache, each up to one of the columns `ends` and one to the end; room: of a static cache."""
        if self.seq2seq:
            yield from self._cached_decoder(ids, mask, row, pad, ends, make_cache)
            return
        subject, cache, begin = self.subject, make_cache(), 0
        places = positions(mask)
        for end in [*ends, ids.shape[1]]:
            inputs = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], "use_cache": True}
            inputs[subject.cache_argument] = cache
            if subject.has_positions:
                inputs["position_ids"] = places[:, begin:end]
            first = max(begin, pad)
            place = Place(first - begin, end - first, end - begin, first - pad)
            keys = (end, room) if pad else ()  # attention runs over all of a static cache
            yield inputs, Span(row, ids.shape[0], place, keys=keys)
            begin = end

    def _cached_decoder(self, ids, mask, row, pad, ends, make_cache) -> Walk:
        """The same of an encoder-decoder: the encoder once, then the decoder's tokens."""
        rows, width = ids.shape[0], self.decoded.shape[1]
        tokens = self.decoders(rows, row)
        cache, begin, encoder = make_cache(), 0, {"input_ids": ids}
        for end in [*ends, width]:
            inputs = {**encoder, "attention_mask": mask, "decoder_input_ids": tokens[:, begin:end], "use_cache": True}
            inputs[self.subject.cache_argument] = cache
            place = Place(0, end - begin, end - begin, begin)
            output = yield inputs, Span(row, rows, place, Place(pad, self.n, ids.shape[1]))
            encoder = {"encoder_outputs": BaseModelOutput(output.encoder_last_hidden_state)}
            begin = end

    def padded(self, rows: int, row: int, pad: int, side: str) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(ids, mask) of a batch whose mates are `pad` tokens longer, and the column where the sequence begins."""
        ids = self.mates(rows, self.n + pad)
        mask = torch.ones_like(ids)
        begin = pad if side == "left" else 0
        ids[row], mask[row] = self.subject.pad, 0
        ids[row, begin : begin + self.n] = self.ids
        mask[row, begin : begin + self.n] = 1
        return ids, mask, begin

    # --- cases ---

    def case(self, axis: str, name: str, walk: Callable[[], Walk], want: Callable[[], Walk] | None = None) -> Case:
        """A case that is walked forward by forward; want: what it is compared with, if not the plain forward."""
        return Case(axis, name, self.text, self, walk, want or self.alone)

    def in_batch(self, axis: str, name: str, ids: torch.Tensor, row: int) -> Case:
        ids[row] = self.ids
        return self.case(axis, name, lambda: self.once(ids, row, 0))

    def dynamic(self) -> Any:
        cache = DynamicCache(config=self.subject.config)
        return EncoderDecoderCache(cache, DynamicCache(config=self.subject.config)) if self.seq2seq else cache

    def static(self, room: int) -> StaticCache:
        return StaticCache(config=self.subject.config, max_cache_len=room)

    @property
    def steps(self) -> int:
        """How many tokens are decoded: those of the text, or the decoder's."""
        return self.decoded.shape[1] if self.seq2seq else self.n

    def no_cache(self) -> Iterator[Note]:
        subject = self.subject
        if not subject.decodes:
            yield Note("nothing is decoded: an output sees the whole sequence, or there is one for all of it")
        elif subject.cache_argument is None:
            yield Note("forward takes no cache of keys and values")

    def fits(self, pad: int) -> bool:
        return self.subject.longest is None or self.n + pad + NEW <= self.subject.longest

    def counts_padding(self) -> Iterator[Note]:
        """Without position_ids, learned positions number the padding, too: another question."""
        subject = self.subject
        if not subject.has_positions:
            names = [name for name, _ in subject.model.named_modules() if "position" in name and "relative" not in name]
            if names:
                yield Note(f"{names[0]} numbers the padding, too, and forward takes no position_ids")


def positions(mask: torch.Tensor) -> torch.Tensor:
    """The position_ids that `generate` derives from a mask (rows, tokens)."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


@dataclass
class Generated(Case):
    """Step logits of `generate` against one forward on the text that it finished."""

    ids: torch.Tensor
    mask: torch.Tensor
    row: int
    pad: int
    options: dict
    finished: torch.Tensor | None = None

    def got(self, watch: Watch = no_watch) -> torch.Tensor:
        model = self.sequence.subject.model
        spans = iter(self._spans())
        # Before each forward of the root; an encoder runs before the first of them.
        watch(first := next(spans))
        upcoming = iter([first, *spans])

        def begins(*_):
            if (span := next(upcoming, None)) is not None:  # more forwards than tokens: the rest is not looked at
                watch(span)

        handle = model.register_forward_pre_hook(begins, prepend=True)  # before the hooks of whoever watches
        try:
            out = model.generate(
                self.ids,
                attention_mask=self.mask,
                do_sample=False,
                num_beams=1,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                output_logits=True,
                return_dict_in_generate=True,
                pad_token_id=self.sequence.subject.pad,
                disable_compile=True,
                **self.options,
            )
        finally:
            handle.remove()
        self.finished = out.sequences[self.row : self.row + 1]
        steps = torch.stack([step[self.row] for step in out.logits])
        own = steps.to(model.dtype)  # generate hands out float32 copies of the model's logits
        return own if torch.equal(own.to(steps.dtype), steps) else steps

    def want(self, watch: Watch = no_watch) -> torch.Tensor:
        seq = self.sequence
        plain = {"use_cache": False} if "use_cache" in seq.subject.arguments else {}
        if seq.seq2seq:
            watch(Span(0, 1, Place(0, NEW, NEW), Place(0, seq.n, seq.n)))
            inputs = {"input_ids": seq.ids, "decoder_input_ids": self.finished[:, :-1]}
            return main_output(seq.subject.model(**inputs, **plain))[0]
        text = self.finished[:, self.pad :]
        watch(Span(0, 1, Place(0, text.shape[1], text.shape[1])))
        return main_output(seq.subject.model(input_ids=text, **plain))[0, seq.n - 1 : -1]

    def _spans(self) -> list[Span]:
        seq, rows, width = self.sequence, self.ids.shape[0], self.ids.shape[1]
        grows = self.options.get("use_cache") is False or seq.subject.cache_argument is None
        if seq.seq2seq:
            encoded = Place(self.pad, seq.n, width)
            steps = [Place(0, i + 1, i + 1) if grows else Place(0, 1, 1, i) for i in range(NEW)]
            return [Span(self.row, rows, step, encoded, (width,) if self.pad else ()) for step in steps]
        steps = [Place(self.pad, seq.n + i, width + i) if grows else Place(0, 1, 1, seq.n + i - 1) for i in range(NEW)]
        steps[0] = Place(self.pad, seq.n, width)
        return [Span(self.row, rows, step, keys=(width + i,) if self.pad else ()) for i, step in enumerate(steps)]


class OnStream(Case):
    """The plain forward on a CUDA stream of its own."""

    def got(self, watch: Watch = no_watch) -> torch.Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = self.sequence.run(self.walk, watch)
        torch.cuda.current_stream().wait_stream(stream)
        return out
