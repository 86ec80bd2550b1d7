"""The model under test: what kind it is, what its forward takes, and the token ids it is asked."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .. import conversion
from ..errors import first_line

TEXTS = (
    "The tide tables for the harbour were printed once a year, and nobody had thought to check them against the water "
    "itself until the winter when the lower quay flooded on a calm night. Why did it happen?",
    "def merge(left, right):\n    out = []\n    while left and right:\n        out.append((left if left[0] <= right[0] "
    "else right).pop(0))\n    return out + left + right\n\nprint(merge([1, 4, 9], [2, 3, 11]))",
    "Question: A train leaves at 9:40 and arrives at 13:05. It stops for 12 minutes on the way. How long does it move? "
    "Answer: From 9:40 to 13:05 there are 3 hours and 25 minutes, less the stop of 12 minutes, so it moves for",
)
RANDOM_LENGTHS = (41, 53, 37)
DECODER, ENCODER, ENCODER_DECODER, VISION_LANGUAGE = "decoder", "encoder", "encoder-decoder", "vision-language"
FEWEST_TOKENS = 16
_DECODED = 19  # decoder tokens of an encoder-decoder
_SEED = 20


class VerifyError(ValueError):
    """`verify` cannot run with what it was given; the message says what to change."""


@dataclass
class Subject:
    """A model and what is known about it. kind: one of the four above."""

    model: nn.Module
    kind: str
    arguments: frozenset[str]
    vocabulary: int
    pad: int
    longest: int | None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def config(self):
        return self.model.config.get_text_config(decoder=True)

    @property
    def cache_argument(self) -> str | None:
        """The name under which this release's forward takes a cache, or None."""
        return next((name for name in ("cache", "past_key_values") if name in self.arguments), None)

    @property
    def has_positions(self) -> bool:
        return "position_ids" in self.arguments

    @property
    def decodes(self) -> bool:
        return self.kind != ENCODER

    @cached_property
    def converted(self) -> bool:
        return conversion.is_converted(self.model)

    @cached_property
    def slides(self) -> bool:
        """Whether some layer sees a window of the keys only, or keeps a state instead of keys."""
        types = set(getattr(self.config, "layer_types", None) or ())
        return bool(getattr(self.config, "sliding_window", None)) or bool(types - {"full_attention"})

    def random_ids(self, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """(rows, length) token ids, none of them special by the usual order of vocabularies, nor the padding's."""
        first = min(10, self.vocabulary // 4)
        ids = torch.randint(first, self.vocabulary, (rows, length), generator=generator)
        other = first if self.pad != first else first + 1
        for special in (self.pad, getattr(self.model.config, "image_token_id", None)):
            ids[ids == special] = other
        return ids.to(self.device)

    def describe(self) -> dict:
        """Plain data for the report's head."""
        config = self.model.config
        return {
            "model": type(self.model).__name__,
            "kind": self.kind,
            "converted": self.converted,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": _device_name(self.device),
            "attention": str(config._attn_implementation),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type


def examine(model: nn.Module, tokenizer: Any) -> Subject:
    """Return what is known about a model; raises VerifyError if it is of a kind that cannot be verified."""
    if not isinstance(model, PreTrainedModel):
        raise VerifyError(
            f"model must be a Transformers model (PreTrainedModel), got {type(model).__name__}; for any other function "
            "or module use hf_batchinv.testing.assert_batch_invariant"
        )
    arguments = frozenset(inspect.signature(model.forward).parameters)
    if model.main_input_name != "input_ids" or "input_ids" not in arguments:
        raise VerifyError(
            f"{type(model).__name__} takes {model.main_input_name}, and verify runs models that take input_ids; use "
            "hf_batchinv.testing.assert_batch_invariant with inputs of your own"
        )
    config = model.config.get_text_config(decoder=True)
    embeddings = model.get_input_embeddings()
    vocabulary = getattr(config, "vocab_size", None) or embeddings.num_embeddings
    pad = next(
        (
            value
            for value in (getattr(tokenizer, "pad_token_id", None), getattr(config, "pad_token_id", None))
            if value is not None
        ),
        0,
    )
    if model.config.is_encoder_decoder:
        kind = ENCODER_DECODER
    elif "pixel_values" in arguments and getattr(model.config, "vision_config", None) is not None:
        kind = VISION_LANGUAGE
    else:
        kind = DECODER  # until its outputs say otherwise
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    limits = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    subject = Subject(model, kind, arguments, vocabulary, pad, min(limits) if limits else None)
    if kind == DECODER and _sees_what_follows(subject):
        subject.kind = ENCODER
    return subject


@torch.no_grad()
def _sees_what_follows(subject: Subject) -> bool:
    """Whether the last token changes the first one's output, in runs that are otherwise the same."""
    ids = subject.random_ids(1, 6, torch.Generator().manual_seed(_SEED))
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    one, two = (main_output(forward(subject, input_ids=each)) for each in (ids, other))
    if one.dim() < 3:  # one vector per sequence: nothing can be decoded from it
        return True
    return not torch.equal(one[0, 0], two[0, 0])


def forward(subject: Subject, **inputs):
    """Call the model once; anything it raises becomes a VerifyError."""
    try:
        return subject.model(**inputs)
    except Exception as error:
        raise VerifyError(f"{type(subject.model).__name__} cannot run a plain forward: {first_line(error)}") from error


def main_output(output) -> torch.Tensor:
    """The logits, the last hidden state or, in a tuple, the first tensor of a model's output."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(value := getattr(output, name, None), torch.Tensor):
            return value
    first = output[0] if isinstance(output, (tuple, list)) or hasattr(output, "to_tuple") else output
    if not isinstance(first, torch.Tensor):
        raise VerifyError(f"the model's output must hold logits or a last_hidden_state, got {type(output).__name__}")
    return first


def sequences(subject: Subject, tokenizer: Any, texts: Sequence[str] | None, max_tokens: int) -> list[torch.Tensor]:
    """The token ids (tokens,) of every sequence that is run, on the model's device."""
    if max_tokens < FEWEST_TOKENS:
        raise VerifyError(f"max_tokens must be at least {FEWEST_TOKENS}, got {max_tokens}")
    if texts is not None and tokenizer is None:
        raise VerifyError("texts need the model's tokenizer, got none; pass tokenizer=, or leave texts out")
    if isinstance(texts, str):
        raise VerifyError("texts must be a list of strings, got one string; put it into a list")
    longest = max_tokens if subject.longest is None else min(max_tokens, subject.longest // 2)
    if longest < FEWEST_TOKENS:
        raise VerifyError(f"the model takes {subject.longest} tokens, and verify needs room for {2 * FEWEST_TOKENS}")
    if tokenizer is None:
        generator = torch.Generator().manual_seed(_SEED)
        return [subject.random_ids(1, min(n, longest), generator)[0] for n in RANDOM_LENGTHS]
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
    found = []
    for index, text in enumerate(TEXTS if texts is None else texts):
        ids = torch.tensor(tokenizer(text)["input_ids"][:longest], dtype=torch.long)
        if len(ids) < FEWEST_TOKENS:
            raise VerifyError(
                f"text {index} has {len(ids)} tokens, and verify needs at least {FEWEST_TOKENS} of each; give longer "
                "texts, or leave them out for the built-in ones"
            )
        if int(ids.max()) >= subject.vocabulary:
            raise VerifyError(
                f"the tokenizer gives token {int(ids.max())}, and the model has {subject.vocabulary}; pass the model's "
                "own tokenizer"
            )
        found.append(ids.to(subject.device))
    if not found:
        raise VerifyError("texts must hold at least one text, got none; leave it out for the built-in ones")
    return found


def decoder_ids(subject: Subject) -> torch.Tensor:
    """(1, tokens) ids for the decoder of an encoder-decoder: its start token, then random ones."""
    ids = subject.random_ids(1, _DECODED, torch.Generator().manual_seed(_SEED + 1))
    start = getattr(subject.model.config, "decoder_start_token_id", None)
    ids[0, 0] = start if start is not None else subject.pad
    return ids


def example_inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """Keyword arguments for one forward of a model: two rows of random ids, one of them padded on the left.

    Raises VerifyError for a model that does not take input_ids.
    """
    subject = examine(model, None)
    ids = subject.random_ids(2, 24, torch.Generator().manual_seed(_SEED))
    inputs = {"input_ids": ids}
    if "attention_mask" in subject.arguments:
        ids[0, :5] = subject.pad
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, :5] = 0
    if subject.kind == ENCODER_DECODER:
        inputs["decoder_input_ids"] = decoder_ids(subject).expand(2, -1)
    return inputs
