"""The axes: every way to run a sequence that must not change the bits of its tokens' results.

An axis is a function of a `Sequence` that yields cases, the most telling ones first, and notes on what does not apply.
"""

from collections.abc import Callable, Iterator

import torch

from .align import Place, Span
from .sequence import DECODED, Case, Generated, Note, OnStream, Sequence, Walk, positions
from .subject import DECODER, ENCODER, VISION_LANGUAGE

BATCHES = (2, 5, 3, 8, 17, 33)
PADS = (7, 1, 64)


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
        if side == "left" and _reads_padding(seq, ids, begin, inputs):
            yield Note("the one result of a sequence is taken from its first column, which padding on the left fills")
            return
        yield seq.case(axis, f"{pad} tokens", _once(seq, ids, 1, begin, **inputs), want)
        if decodes_behind:
            ends = list(range(pad + seq.n - DECODED, pad + seq.n))
            walk = _cached(seq, ids, mask, 1, pad, ends, seq.dynamic)
            yield seq.case(axis, f"{pad} tokens, then decoding", walk)


@torch.no_grad()
def _reads_padding(seq: Sequence, ids: torch.Tensor, begin: int, inputs: dict) -> bool:
    """Whether the result for a whole sequence changes with the tokens under the padding, in runs otherwise the same."""
    if len(seq.plain) == seq.n or seq.seq2seq:  # a result for each token
        return False
    other = ids.clone()
    other[1, :begin] = seq.ids[0, 0]
    one, two = (seq.run(_once(seq, each, 1, begin, **inputs)) for each in (ids, other))
    return not torch.equal(one, two)


def _once(seq: Sequence, ids, row: int, pad: int, **inputs) -> Callable[[], Walk]:
    return lambda: seq.once(ids, row, pad, **inputs)


def _cached(seq: Sequence, ids, mask, row: int, pad: int, ends: list[int], cache, room: int = 0) -> Callable[[], Walk]:
    return lambda: seq.cached(ids, mask, row, pad, ends, cache, room)


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
        walk = _cached(seq, ids, mask, 3, begin, ends, lambda: seq.static(width + 30), width + 30)
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
