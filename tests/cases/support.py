"""What the tests of the cases share: where they run, how rows are padded, and the check itself."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from transformers import DynamicCache

import hf_batchinv
from hf_batchinv import UnsupportedModelError, hub
from hf_batchinv.conversion import is_converted
from hf_batchinv.testing import differing
from tests.cases.models import PAD

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Comparison = tuple[str, torch.Tensor, torch.Tensor]


def device_dtype(cpu: Sequence[str] = ("float32", "bfloat16"), gpu: Sequence[str] = tuple(DTYPES)):
    """Parametrise a test over (device, dtype): some dtypes on the CPU, and their `gpu`-marked twins."""
    places = [pytest.param("cpu", DTYPES[name], id=f"cpu-{name}") for name in cpu]
    places += [pytest.param("cuda", DTYPES[name], id=f"cuda-{name}", marks=pytest.mark.gpu) for name in gpu]
    return pytest.mark.parametrize("device, dtype", places)


# --- inputs ---


def random_ids(model, *shape: int, seed: int = 1) -> torch.Tensor:
    """Token ids (shape), none of them the padding token."""
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocab, shape, generator=torch.Generator().manual_seed(seed))
    return ids.to(model.device)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """position_ids (B, T) that count a row's real tokens, as `generate` does."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


class Batch:
    """Rows of token ids of several lengths, padded on one side to the longest, or to `length`.

    Token ids and mask are (B, T); `inputs` has them with position_ids made from the mask.
    """

    def __init__(self, rows: Sequence[torch.Tensor], side: str, length: int = 0):
        length = max(length, *(len(row) for row in rows))
        self.ids = torch.full((len(rows), length), PAD, device=rows[0].device)
        self.mask = torch.zeros_like(self.ids)
        self.spans = []
        for i, row in enumerate(rows):
            begin = length - len(row) if side == "left" else 0
            self.spans.append(slice(begin, begin + len(row)))
            self.ids[i, self.spans[i]] = row
            self.mask[i, self.spans[i]] = 1

    @property
    def masked(self) -> dict:
        return dict(input_ids=self.ids, attention_mask=self.mask)

    @property
    def inputs(self) -> dict:
        return dict(self.masked, position_ids=positions(self.mask))

    def real(self, output: torch.Tensor, i: int) -> torch.Tensor:
        """Row i of an output (B, T, ...) at its real tokens."""
        return output[i, self.spans[i]]


# --- runs ---


def generate(model, ids: torch.Tensor, new: int, **arguments):
    """Greedy generation of `new` tokens. Returns (new tokens (B, new), step logits (B, new, V))."""
    out = model.generate(
        ids, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True, **arguments
    )
    return out.sequences[:, -new:], torch.stack(out.logits, 1)


def generate_rows(model, rows: Sequence[torch.Tensor], new: int, **arguments):
    """`generate` for rows of several lengths, left padded."""
    batch = Batch(rows, "left")
    return generate(model, batch.ids, new, attention_mask=batch.mask, **arguments)


def in_pieces(model, ids: torch.Tensor, ends: Sequence[int], mask: torch.Tensor | None = None, cache=None):
    """Logits (B, T, V) of a text that is fed through a cache in pieces ending at `ends` and at its end."""
    mask = torch.ones_like(ids) if mask is None else mask
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits, begin = [], 0
    for end in [*ends, ids.shape[1]]:
        if end > begin:
            out = model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions(mask)[:, begin:end],
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(out.logits)
            begin = end
    return torch.cat(logits, 1)


def log_softmax(model, logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities in float32: the user's own `torch` on a stock model, ours on a converted one."""
    softmax = hub.load("norm").log_softmax if is_converted(model) else torch.log_softmax
    return softmax(logits.float(), -1)


def token_log_probs(model, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (..., T - 1) of tokens 1 ... T - 1, from logits (..., T, V) and ids (..., T)."""
    return log_softmax(model, logits[..., :-1, :]).gather(-1, ids[..., 1:, None])[..., 0]


# --- checks ---


def failures(comparisons: Iterator[Comparison]) -> dict[str, int]:
    """what -> how many values differ in their bits, of the comparisons in which any do."""
    with torch.no_grad():
        counts = {what: differing(got, want) for what, got, want in comparisons}
    assert counts, "nothing was compared"
    return {what: count for what, count in counts.items() if count}


def control_is_certain(model) -> bool:
    """Whether stock torch is bound to differ somewhere: in float32 it is. Small half-precision products are not: the
    matrix units of a CPU or GPU sum a row in one order unless the library splits K, which it does for larger ones."""
    return next(model.parameters()).dtype == torch.float32


def check(model, comparisons: Callable[[], Iterator[Comparison]]) -> None:
    """Assert that a stock model fails some of the comparisons, and the same model, converted, none.

    comparisons: makes an iterator of (what, got, want).
    """
    stock = failures(comparisons())
    assert stock or not control_is_certain(model), "stock torch passes, so this test would show nothing"
    hf_batchinv.convert(model)
    assert failures(comparisons()) == {}


def check_logic(model, comparisons: Callable[[], Iterator[Comparison]]) -> None:
    """Assert that a converted model fails none of the comparisons, for reports that are not about rounding."""
    hf_batchinv.convert(model)
    assert failures(comparisons()) == {}


def check_refused(model, part: str) -> None:
    """Assert that conversion refuses a model with an error that names `part`, and leaves the model stock."""
    before = {module: type(module) for module in model.modules()}
    attention = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError) as caught:
        hf_batchinv.convert(model)
    named = {name for problem in caught.value.problems for name in (problem.module, *problem.name.split("."))}
    assert part in named
    assert part in str(caught.value)
    assert not is_converted(model)
    assert {module: type(module) for module in model.modules()} == before
    assert model.config._attn_implementation == attention
