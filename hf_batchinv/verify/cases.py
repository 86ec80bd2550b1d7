"""The axes: every way to run a sequence that must not change the bits of its tokens' results.

An axis is a function of a `Sequence` that yields cases, the most telling ones first, and notes on what does not apply.
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
from .subject import DECODER, ENCODER, ENCODER_DECODER, VISION_LANGUAGE, Subject, decoder_ids, main_output

BATCHES = (2, 5, 3, 8, 17, 33)
PADS = (7, 1, 64)
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

    def span(self, ids: torch.Tensor, row: int, pad: int, encoded: bool = True) -> Span:
        here = Place(pad, self.n, ids.shape[1])
        if not self.seq2seq:
            return Span(row, ids.shape[0], here)
        width = self.decoded.shape[1]
        return Span(row, ids.shape[0], Place(0, width, width), here if encoded else None)

    def once(self, ids: torch.Tensor, row: int, pad: int, **inputs) -> Walk:
        """One forward without a cache; the sequence is in `row`, from column `pad`."""
        if self.seq2seq:
            inputs["decoder_input_ids"] = self.decoders(ids.shape[0], row)
        if "use_cache" in self.subject.arguments:
            inputs.setdefault("use_cache", False)
        yield {"input_ids": ids, **inputs}, self.span(ids, row, pad)

    def cached(self, ids, mask, row: int, pad: int, ends: list[int], make_cache: Callable[[], Any]) -> Walk:
        """Forwards with a cache, each up to one of the columns `ends` and one to the end."""
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
            yield inputs, Span(row, ids.shape[0], place)
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


# --- the axes ---


def batch_size(seq: Sequence) -> Iterator[Case | Note]:
    decodes = not list(seq.no_cache())
    for rows in BATCHES:
        yield seq.in_batch("batch-size", f"{rows} rows", seq.mates(rows, seq.n), rows // 2)
        if decodes and rows in (2, 5, 17):
            yield _decoding(seq, rows)


def _decoding(seq: Sequence, rows: int) -> Case:
    """The last tokens one by one in a batch, against the same alone: so few rows take other kernels."""
    ids, row = seq.mates(rows, seq.n), rows // 2
    ids[row] = seq.ids
    ends = list(range(seq.steps - DECODED, seq.steps))
    walk = _cached(seq, ids, torch.ones_like(ids), row, 0, ends, seq.dynamic)
    want = _cached(seq, seq.ids, torch.ones_like(seq.ids), 0, 0, ends, seq.dynamic)
    return seq.case("batch-size", f"{rows} rows, the last {DECODED} tokens decoded", walk, want)


def mates(seq: Sequence) -> Iterator[Case | Note]:
    yield seq.in_batch("mates", "4 rows, random mates", seq.mates(4, seq.n), 1)
    yield seq.in_batch("mates", "4 rows, copies of the sequence", seq.ids.expand(4, -1).clone(), 1)
    yield seq.in_batch("mates", "4 rows, one token repeated", seq.ids[:, :1].expand(4, seq.n).clone(), 1)
    yield seq.in_batch("mates", "4 rows, other random mates", seq.mates(4, seq.n), 1)


def place(seq: Sequence) -> Iterator[Case | Note]:
    ids = seq.mates(7, seq.n)
    for row in (6, 0, 3):
        yield seq.in_batch("place", f"row {row} of 7", ids.clone(), row)


def _padding(seq: Sequence, side: str) -> Iterator[Case | Note]:
    axis, subject = f"{side}-padding", seq.subject
    if "attention_mask" not in subject.arguments:
        yield Note("forward takes no attention_mask")
        return
    if side == "left" and (notes := list(seq.counts_padding())):
        yield from notes
        return
    decodes_behind = side == "left" and not list(seq.no_cache()) and not seq.seq2seq
    for pad in PADS:
        if not seq.fits(pad):
            yield Note(f"{pad} tokens of padding do not fit: the model takes {subject.longest}")
            continue
        ids, mask, begin = seq.padded(3, 1, pad, side)
        inputs, want = {"attention_mask": mask}, None
        if side == "left" and subject.has_positions and not seq.seq2seq:
            inputs["position_ids"] = positions(mask)
            if subject.kind == ENCODER:  # some count from another number if they are not told
                own = positions(torch.ones_like(seq.ids))
                want = _once(seq, seq.ids, 0, 0, position_ids=own)
        yield seq.case(axis, f"{pad} tokens", _once(seq, ids, 1, begin, **inputs), want)
        if decodes_behind:
            ends = list(range(pad + seq.n - DECODED, pad + seq.n))
            walk = _cached(seq, ids, mask, 1, pad, ends, seq.dynamic)
            yield seq.case(axis, f"{pad} tokens, then decoding", walk)


def _once(seq: Sequence, ids, row: int, pad: int, **inputs) -> Callable[[], Walk]:
    return lambda: seq.once(ids, row, pad, **inputs)


def _cached(seq: Sequence, ids, mask, row: int, pad: int, ends: list[int], make_cache) -> Callable[[], Walk]:
    return lambda: seq.cached(ids, mask, row, pad, ends, make_cache)


def left_padding(seq: Sequence) -> Iterator[Case | Note]:
    yield from _padding(seq, "left")


def right_padding(seq: Sequence) -> Iterator[Case | Note]:
    yield from _padding(seq, "right")


def cache(seq: Sequence) -> Iterator[Case | Note]:
    if notes := list(seq.no_cache()):
        yield from notes
        return
    mask = torch.ones_like(seq.ids)
    one_by_one = list(range(seq.steps - DECODED, seq.steps))
    yield seq.case(
        "cache", f"the last {DECODED} tokens decoded", _cached(seq, seq.ids, mask, 0, 0, one_by_one, seq.dynamic)
    )
    yield seq.case("cache", "use_cache=True in one forward", _once(seq, seq.ids, 0, 0, use_cache=True))
    if seq.seq2seq:
        return
    if seq.subject.slides:
        yield Note("a reused and cropped cache: a sliding window or a state cannot be cropped")
        return

    yield seq.case("cache", "a reused prefix, cropped", lambda: _cropped(seq))


def _cropped(seq: Sequence) -> Walk:
    """The first half and five other tokens; these are cut from the cache, and the second half follows."""
    half, extra, kept, subject = seq.n // 2, 5, seq.dynamic(), seq.subject
    inputs = {"use_cache": True, subject.cache_argument: kept}
    ids = torch.cat([seq.ids[:, :half], seq.mates(1, extra)], 1)
    yield {"input_ids": ids, **inputs}, Span(0, 1, Place(0, half, half + extra))
    kept.crop(-extra)
    if subject.has_positions:
        inputs["position_ids"] = torch.arange(half, seq.n, device=subject.device)[None]
    rest = seq.n - half
    yield {"input_ids": seq.ids[:, half:], **inputs}, Span(0, 1, Place(0, rest, rest, half))


def chunks(seq: Sequence) -> Iterator[Case | Note]:
    if notes := list(seq.no_cache()):
        yield from notes
        return
    n, mask = seq.steps, torch.ones_like(seq.ids)
    for name, ends in (("13 and the rest", [13]), ("1, 4 and the rest", [1, 5]), ("thirds", [n // 3, 2 * n // 3])):
        yield seq.case("chunks", name, _cached(seq, seq.ids, mask, 0, 0, ends, seq.dynamic))
    early = list(range(1, min(n, 12)))
    yield seq.case(
        "chunks", f"{len(early)} single tokens, then the rest", _cached(seq, seq.ids, mask, 0, 0, early, seq.dynamic)
    )


def static_cache(seq: Sequence) -> Iterator[Case | Note]:
    if notes := list(seq.no_cache()):
        yield from notes
        return
    if not getattr(seq.subject.model, "_can_compile_fullgraph", False):
        yield Note("the model says that it does not work with a static cache")
        return
    if seq.seq2seq:
        yield _generated("static-cache", seq, "generate with a static cache", 0, cache_implementation="static")
        return
    mask = torch.ones_like(seq.ids)
    for extra in (23, 64, 1):
        room = seq.n + extra
        one_by_one = list(range(seq.n - DECODED, seq.n))
        for name, ends in ((f"the last {DECODED} tokens decoded", one_by_one), ("13 and the rest", [13])):
            walk = _cached(seq, seq.ids, mask, 0, 0, ends, lambda room=room: seq.static(room))
            yield seq.case("static-cache", f"room for {room}, {name}", walk)


def generate(seq: Sequence) -> Iterator[Case | Note]:
    if not seq.subject.model.can_generate():
        yield Note("the model cannot generate")
        return
    yield _generated("generate", seq, "alone", 0)
    if not list(seq.counts_padding()):
        yield _generated("generate", seq, "3 rows, left padding 9", 9)
    if seq.subject.cache_argument is not None:
        yield _generated("generate", seq, "use_cache=False", 0, use_cache=False)
        if getattr(seq.subject.model, "_can_compile_fullgraph", False) and not seq.seq2seq:
            yield _generated("generate", seq, "static cache", 0, cache_implementation="static")


def _generated(axis: str, seq: Sequence, name: str, pad: int, **options) -> Case:
    ids, mask, row = seq.ids, torch.ones_like(seq.ids), 0
    if pad:
        ids, mask, _ = seq.padded(3, 2, pad, "left")
        row = 2
    return Generated(axis, name, seq.text, seq, seq.alone, seq.alone, ids, mask, row, pad, options)


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
            return [Span(self.row, rows, step, encoded) for step in steps]
        steps = [Place(self.pad, seq.n + i, width + i) if grows else Place(0, 1, 1, seq.n + i - 1) for i in range(NEW)]
        steps[0] = Place(self.pad, seq.n, width)
        return [Span(self.row, rows, step) for step in steps]


def mask_form(seq: Sequence) -> Iterator[Case | Note]:
    subject = seq.subject
    if "attention_mask" not in subject.arguments:
        yield Note("forward takes no attention_mask")
        return
    ones = torch.ones_like(seq.ids)
    yield seq.case("mask-form", "2-D ones instead of none", _once(seq, seq.ids, 0, 0, attention_mask=ones))
    if subject.kind not in (DECODER, VISION_LANGUAGE):
        yield Note("4-D and packed forms: for decoders only")
        return
    attention = str(subject.model.config._attn_implementation)
    visible = torch.ones(seq.n, seq.n, dtype=torch.bool, device=subject.device).tril()[None, None]
    window = getattr(subject.config, "sliding_window", None) or 0
    if subject.slides and window < seq.n:
        yield Note("4-D masks: a sliding window would have to be in them")
    elif "flash" in attention or "flex" in attention:
        yield Note(f"4-D masks: {attention} takes none")
    else:
        lowest = torch.finfo(subject.model.dtype).min
        additive = torch.zeros(visible.shape, dtype=subject.model.dtype, device=subject.device)
        additive = additive.masked_fill(~visible, lowest)
        # Some count positions by the mask if they are not told them, and can only do so in a 2-D one.
        told = {"position_ids": positions(ones)} if subject.has_positions else {}
        walk = _once(seq, seq.ids, 0, 0, attention_mask=additive, **told)
        yield seq.case("mask-form", "4-D additive", walk)
        if attention != "eager":
            walk = _once(seq, seq.ids, 0, 0, attention_mask=visible, **told)
            yield seq.case("mask-form", "4-D boolean", walk)
    if not subject.has_positions:
        yield Note("packed sequences: forward takes no position_ids")
        return
    before, after = 6, 5
    if not seq.fits(before + after):
        yield Note("packed sequences: they do not fit")
        return
    ids = torch.cat([seq.mates(1, before), seq.ids, seq.mates(1, after)], 1)
    where = torch.cat([torch.arange(part) for part in (before, seq.n, after)])[None].to(subject.device)
    packed = dict(position_ids=where)
    if _leaks(seq, ids, before, packed):
        yield Note("packed sequences: tokens see those of other sequences; the model's code does not separate them")
        return
    yield seq.case("mask-form", "packed position_ids", _once(seq, ids, 0, before, **packed))


@torch.no_grad()
def _leaks(seq: Sequence, ids: torch.Tensor, before: int, inputs: dict) -> bool:
    """Whether another first token changes the packed sequence behind it, in runs that are otherwise the same."""
    other = ids.clone()
    other[0, 0] = ids[0, before]
    one, two = (seq.run(_once(seq, each, 0, before, **inputs)) for each in (ids, other))
    return not torch.equal(one, two)


def combined(seq: Sequence) -> Iterator[Case | Note]:
    """Several axes at once."""
    if "attention_mask" not in seq.subject.arguments:
        yield Note("forward takes no attention_mask, so there is nothing to combine with the batch")
        return
    side = "right" if seq.seq2seq or list(seq.no_cache()) else "left"
    pad = next((pad for pad in (11, 3) if seq.fits(pad)), 0)
    if side == "left" and list(seq.counts_padding()):
        pad = 0
    ids, mask, begin = seq.padded(5, 3, pad, side)
    if list(seq.no_cache()):
        yield seq.case("combined", f"5 rows, right padding {pad}", _once(seq, ids, 3, begin, attention_mask=mask))
        return
    width = seq.steps if seq.seq2seq else ids.shape[1]
    ends = [width - 12, *range(width - 5, width)]
    name = f"5 rows, {side} padding {pad}, 2 chunks, 5 tokens decoded"
    yield seq.case("combined", name, _cached(seq, ids, mask, 3, begin, ends, seq.dynamic))
    if not seq.seq2seq and getattr(seq.subject.model, "_can_compile_fullgraph", False):
        walk = _cached(seq, ids, mask, 3, begin, ends, lambda: seq.static(width + 30))
        yield seq.case("combined", f"{name}, static cache", walk)


def images(seq: Sequence) -> Iterator[Case | Note]:
    """An image and the text in a batch of others; the image's tokens stand in front of the text."""
    subject = seq.subject
    if subject.kind != VISION_LANGUAGE:
        yield Note("the model takes no images")
        return
    config = subject.model.config
    size, token = getattr(config.vision_config, "image_size", None), getattr(config, "image_token_id", None)
    channels = getattr(config.vision_config, "num_channels", 3)
    if not isinstance(size, int) or token is None or "image_grid_thw" in subject.arguments:
        yield Note("the size of an image does not follow from the config (one image_size, one image_token_id)")
        return
    pixels = torch.randn(5, channels, size, size, generator=torch.Generator().manual_seed(7))
    pixels = pixels.to(subject.device, subject.model.dtype)
    with torch.no_grad():
        features = subject.model.get_image_features(pixels[:1])
    features = getattr(features, "pooler_output", features)
    count = features[0].reshape(-1, features[0].shape[-1]).shape[0]
    marks = torch.full((5, count), token, device=subject.device)
    ids = torch.cat([marks, seq.mates(5, seq.n)], 1)
    ids[:, count:][2] = seq.ids
    plain = {"use_cache": False} if "use_cache" in subject.arguments else {}

    def walk(rows: slice, row: int) -> Walk:
        inputs = {"input_ids": ids[rows], "pixel_values": pixels[rows], **plain}
        yield inputs, Span(row, len(ids[rows]), Place(0, count + seq.n, count + seq.n))

    for name, rows, row in (("5 rows", slice(0, 5), 2), ("2 rows", slice(2, 4), 0), ("3 rows", slice(0, 3), 2)):
        got = lambda rows=rows, row=row: walk(rows, row)  # noqa: E731
        yield seq.case("images", f"{name}, an image each", got, lambda: walk(slice(2, 3), 0))


def repetition(seq: Sequence) -> Iterator[Case | Note]:
    yield seq.case("repetition", "the same forward again", seq.alone)
    if seq.subject.device.type == "cuda":
        yield OnStream("repetition", "on another stream", seq.text, seq, seq.alone, seq.alone)


class OnStream(Case):
    """The plain forward on a CUDA stream of its own."""

    def got(self, watch: Watch = no_watch) -> torch.Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = self.sequence.run(self.walk, watch)
        torch.cuda.current_stream().wait_stream(stream)
        return out


AXES: dict[str, Callable[[Sequence], Iterator[Case | Note]]] = {
    "batch-size": batch_size,
    "mates": mates,
    "place": place,
    "left-padding": left_padding,
    "right-padding": right_padding,
    "cache": cache,
    "chunks": chunks,
    "static-cache": static_cache,
    "generate": generate,
    "mask-form": mask_form,
    "combined": combined,
    "images": images,
    "repetition": repetition,
}


def plan(axis: str, texts: list[Sequence], budget: int) -> tuple[list[Case], list[str]]:
    """At most `budget` cases of an axis, shared out over the texts, and the notes."""
    found = [list(AXES[axis](text)) for text in texts]
    notes = dict.fromkeys(item.text for items in found for item in items if isinstance(item, Note))
    cases = [[item for item in items if isinstance(item, Case)] for items in found]
    chosen: list[Case] = []
    for turn in range(len(texts)):  # case 0 of text 0, case 1 of text 1, ...; then the next text for each
        for index in range(max(map(len, cases))):
            of_text = cases[(index + turn) % len(texts)]
            if index < len(of_text) and len(chosen) < budget:
                chosen.append(of_text[index])
    return chosen, list(notes)
