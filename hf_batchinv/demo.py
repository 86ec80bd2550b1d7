"""One prompt, asked alone and in many batches: how many answers does a model give, stock and converted?

The first run asks the prompt alone; it is the reference. Every other run mixes copies of the prompt with chat prompts
of other lengths, left padded, at random positions, and each copy is compared with the reference bit by bit: the logits
of every step up to the first token that differs, then the tokens.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from . import smollm2
from .conversion import convert
from .errors import first_line
from .testing import bits

PROMPT = "Tell me about Richard Feynman"
MATES = (
    "Hi!",
    "What is 17 times 23?",
    "Name three rivers in Africa.",
    "Write a haiku about a lighthouse in the fog.",
    "Explain to a ten-year-old why the sky is blue and the sunset is red.",
    "My sourdough starter smells of nail polish remover. What went wrong, and can I still save it?",
    "Translate into French: The train to Lyon leaves at a quarter past nine from platform seven, without a dining car.",
    "I have two job offers, one in a small town by the sea with a modest salary, one in a capital with a long commute. "
    "List the questions that I should ask myself before I choose, and say which matter most in the first year.",
    "Here is a note from our weekly meeting. The importer now handles files with a byte order mark. Two customers see "
    "time stamps that are off by an hour after the clocks change. The new search page is live for one customer in "
    "ten, and the error rate is flat. Nobody has looked at the backup alarm of last Thursday. Turn this into four "
    "bullet points with an owner for each, and add one line on what we should do about the alarm.",
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CPU_BATCHES, CPU_TOKENS = (1, 2, 3, 5, 8), 16
CUDA_BATCHES, CUDA_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256), 120


class UsageError(ValueError):
    """A command cannot run with what the user asked for; the message says what to change."""


@dataclass(frozen=True)
class Batch:
    """Chat prompts that are generated together; `rows` are those that hold PROMPT."""

    prompts: list[str]
    rows: list[int]


def run_demo(
    model: str | None = None,
    *,
    device: str = "auto",
    dtype: str = "bfloat16",
    tokens: int | None = None,
    batches: Sequence[int] | None = None,
    completions: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> dict:
    """Run the prompt through the stock model and the converted one, and return what differed as plain data.

    `model` is a directory or Hub name of a causal language model (default SmolLM2-135M-Instruct); `completions` asks
    for at least so many copies of the prompt in each arm. The keys are model, device, dtype, stock and batch_invariant;
    each of the last two holds completions, unique (texts), first_difference_token (index from 0, or None),
    differing_logit_values and seconds.
    Raises UsageError, smollm2.ModelUnavailableError or the conversion's UnsupportedModelError.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    device = pick_device(device)
    name = model or smollm2.find_smollm2()
    network, tokenizer = load(name, device, DTYPES[dtype])
    on_gpu = device.type == "cuda"
    tokens = tokens or (CUDA_TOKENS if on_gpu else CPU_TOKENS)
    plan = plan_batches(batches or (CUDA_BATCHES if on_gpu else CPU_BATCHES), completions or 1, seed)

    with tqdm(total=2 * len(plan), unit="batch", disable=not progress) as bar:
        bar.set_description("stock")
        stock = run_arm(network, tokenizer, plan, tokens, bar)
        convert(network)
        bar.set_description("batch invariant")
        converted = run_arm(network, tokenizer, plan, tokens, bar)
    return {
        "model": model or smollm2.label(name),
        "device": f"cuda ({torch.cuda.get_device_name(device)})" if on_gpu else device.type,
        "dtype": dtype,
        "stock": stock,
        "batch_invariant": converted,
    }


def load(name: str, device: torch.device, dtype: torch.dtype):
    """Return (network in eval mode with stock SDPA attention, tokenizer that pads on the left)."""
    with explain_loading(name):
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        network = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return network.to(device).eval(), tokenizer


@contextmanager
def explain_loading(name: str) -> Iterator[None]:
    """Turn what Transformers raises for a missing, foreign or broken model into a UsageError of one sentence."""
    try:
        yield
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"cannot load {name!r}: {first_line(error)}") from error


def plan_batches(sizes: Sequence[int], completions: int, seed: int) -> list[Batch]:
    """PROMPT alone, then every batch size, and again with new mates and positions until PROMPT was asked often enough.

    Half of a batch's rows hold PROMPT, at random positions; the other rows are drawn from MATES.
    """
    rng = random.Random(seed)
    plan, asked = [Batch([PROMPT], [0])], 1
    sizes = [size for size in sizes if size > 1]
    for turn, size in enumerate(itertools.chain(sizes, itertools.cycle(sizes or [1]))):
        if turn >= len(sizes) and asked >= completions:
            break
        rows = sorted(rng.sample(range(size), max(1, size // 2)))
        plan.append(Batch([PROMPT if row in rows else rng.choice(MATES) for row in range(size)], rows))
        asked += len(rows)
    return plan


def run_arm(network: PreTrainedModel, tokenizer, plan: list[Batch], tokens: int, bar: tqdm) -> dict:
    """Generate every batch of `plan` greedily and count what differs from its first one, the prompt alone."""
    start = time.perf_counter()
    reference, completions = Reference(), []
    for batch in plan:
        prompts = encode(tokenizer, batch.prompts, network.device)
        width = prompts["input_ids"].shape[1]
        reference.expect(width, torch.tensor(batch.rows, device=network.device))
        generated = network.generate(
            **prompts,
            do_sample=False,
            num_beams=1,
            max_new_tokens=tokens,
            pad_token_id=tokenizer.pad_token_id,
            logits_processor=LogitsProcessorList([reference]),
        )
        answers = generated[batch.rows, width:]
        if reference.tokens is None:
            reference.tokens = answers[0]
        completions += [_until_end(answer, network.generation_config.eos_token_id) for answer in answers.tolist()]
        bar.update()
    differences = [index for answer in completions if (index := _first_difference(answer, completions[0])) is not None]
    return {
        "completions": len(completions),
        "unique": len(set(tokenizer.batch_decode(completions))),
        "first_difference_token": min(differences, default=None),
        "differing_logit_values": int(reference.differing),
        "seconds": round(time.perf_counter() - start, 2),
    }


class Reference(LogitsProcessor):
    """Keeps the logits of the first run and counts, on the device, the values whose bits differ in later runs.

    A row is compared as long as its tokens are those of the first run: after that it answers another question.
    Only the rows of the prompt are looked at, so nothing of the size batch x steps x vocabulary is kept.
    """

    def __init__(self):
        self.logits: list[torch.Tensor] = []
        self.tokens: torch.Tensor | None = None
        self.differing: torch.Tensor | int = 0

    def expect(self, width: int, rows: torch.Tensor) -> None:
        """Say what comes next: prompts padded to `width` tokens, with the prompt in `rows`."""
        self.width, self.rows = width, rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self.width
        if self.tokens is None:
            self.logits.append(scores[0].clone())
        elif step < len(self.logits):
            same_so_far = (input_ids[self.rows, self.width :] == self.tokens[:step]).all(dim=1)
            differing = (bits(scores[self.rows]) != bits(self.logits[step])).sum(dim=1)
            self.differing = self.differing + (differing * same_so_far).sum()
        return scores


def encode(tokenizer, prompts: list[str], device: torch.device) -> dict[str, torch.Tensor]:
    """Left-padded input_ids and attention_mask (prompts, width); through the chat template if the model has one."""
    is_chat = tokenizer.chat_template is not None
    if is_chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(prompts, padding=True, add_special_tokens=not is_chat, return_tensors="pt")
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


def pick_device(name: str) -> torch.device:
    """The device of that name, for "auto" a GPU if there is one; raises UsageError if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("device is 'cuda' but torch finds no CUDA device here; use --device cpu")
    return torch.device(name)


def _until_end(tokens: list[int], end: int | list[int] | None) -> list[int]:
    """Cut after the first end token: what follows it in a batch is padding."""
    ends = {end} if isinstance(end, int) else set(end or ())
    return next((tokens[: index + 1] for index, token in enumerate(tokens) if token in ends), tokens)


def _first_difference(tokens: list[int], reference: list[int]) -> int | None:
    """Index of the first token that is not the reference's; the shorter one's length if it is a prefix of the other."""
    if tokens == reference:
        return None
    pairs = zip(tokens, reference, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(reference)))
