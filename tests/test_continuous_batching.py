"""generate_batch of a converted model: each request gets the tokens and the bits that `generate` gives it alone."""

import functools
import types
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from transformers import AttentionInterface, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

import hf_batchinv
from hf_batchinv import continuous_batching, hooks, paged
from hf_batchinv.attention import batch_invariant_attention
from hf_batchinv.dispatch import ATTENTION_NAME
from hf_batchinv.testing import bits
from tests.tiny_models import make

# Tokens per page; renamed in transformers 5.18.
PAGE = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
NEW_TOKENS = 6
GREEDY = dict(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
# Windows that cut blocks of 64 keys anywhere; gemma3's third layer sees everything.
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 40},
    "gemma3": {
        "sliding_window": 24,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}
LENGTHS = (5, 31, 90, 17)
COMMON = 65  # tokens that three more prompts begin with, more than four pages of 16


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    random = torch.Generator().manual_seed(3)
    several = [torch.randint(3, 90, (length,), generator=random).tolist() for length in (*LENGTHS, COMMON)]
    *different, common = several
    return tuple(map(tuple, (*different, [*common, 7, 8], [*common, 9], common)))


@functools.cache
def model(family: str, dtype: torch.dtype = torch.float32, converted: bool = True):
    stock = make(family, dtype, max_position_embeddings=1024, **FAMILIES[family])
    stock.generation_config.eos_token_id = None
    return hf_batchinv.convert(stock) if converted else stock


@dataclass
class Results:
    """Of each request: tokens, and the bits of the log-probabilities; and the bits of every row of logits seen."""

    tokens: list
    logprobs: list
    rows: set = field(default_factory=set)


def row_bits(logits: torch.Tensor) -> set[bytes]:
    """logits (..., vocabulary)."""
    return {row.numpy().tobytes() for row in bits(logits.float().cpu()).flatten(0, -2)}


def logprob_bits(value: float) -> int:
    return int(bits(torch.tensor(value)))


@torch.no_grad()
def run(model, requests, generation=None, **config) -> Results:
    """generate_batch, failing if any request did."""
    rows = set()

    def see(module, args, kwargs, output):
        logits = output.logits if "logits_to_keep" in kwargs else output.logits[:, kwargs["logits_indices"]]
        rows.update(row_bits(logits))

    handle = model.register_forward_hook(see, with_kwargs=True)
    config = {"num_blocks": 64, "max_batch_tokens": 256, PAGE: 16, "return_logprobs": True, **config}
    try:
        outputs = model.generate_batch(
            inputs=[list(request) for request in requests],
            generation_config=generation or GenerationConfig(**GREEDY, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(**config),
        )
    finally:
        handle.remove()
    assert len(outputs) == len(requests)
    assert [output.error for output in outputs.values()] == [None] * len(requests)
    tokens = [output.generated_tokens for output in outputs.values()]
    return Results(tokens, [[*map(logprob_bits, output.logprobs)] for output in outputs.values()], rows)


@functools.cache
def alone(family: str, dtype: torch.dtype = torch.float32, converted: bool = True) -> Results:
    """Every prompt by itself through `generate`; log-probabilities by the formula of continuous batching."""
    results = Results([], [])
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model(family, dtype, converted).generate(
            ids, attention_mask=torch.ones_like(ids), **GREEDY, output_logits=True, return_dict_in_generate=True
        )
        results.tokens.append(out.sequences[0, ids.shape[1] :].tolist())
        chosen = (step[0].float().softmax(-1).max().log() for step in out.logits)
        results.logprobs.append([logprob_bits(float(value)) for value in chosen])
        results.rows.update(row_bits(torch.cat(out.logits)))
    return results


def assert_as_alone(got: Results, want: Results, order: list[int] | None = None) -> None:
    order = list(range(len(want.tokens))) if order is None else order
    assert got.tokens == [want.tokens[i] for i in order]
    assert got.logprobs == [want.logprobs[i] for i in order]
    assert want.rows <= got.rows


# name -> settings. With 256 tokens the prompts do not fit into one step, with 16 every long one is cut; 12 blocks hold
# one or two requests at a time; 4 is the smallest page.
LOADS = {
    "all at once": {"max_batch_tokens": 512},
    "chunks of 256": {"max_batch_tokens": 256},
    "chunks of 16": {"max_batch_tokens": 16},
    "two at a time": {"max_requests_per_batch": 2},
    "no graphs, few blocks": {"use_cuda_graph": False, "num_blocks": 12, "max_batch_tokens": 64},
    "no shared prefixes": {"allow_block_sharing": False, "max_batch_tokens": 48},
    "pages of 4": {PAGE: 4, "num_blocks": 256, "max_batch_tokens": 70},
    "pages of 64": {PAGE: 64, "num_blocks": 32, "max_batch_tokens": 70},
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_request_has_the_bits_of_generate_alone_at_any_load(family, load):
    assert_as_alone(run(model(family), prompts(), **load), alone(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_request_has_the_bits_of_generate_alone_in_bfloat16(family):
    for load in ("chunks of 256", "chunks of 16"):
        got = run(model(family, torch.bfloat16), prompts(), **LOADS[load])
        assert_as_alone(got, alone(family, torch.bfloat16))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_order_of_submission_changes_no_bit(family):
    count = len(prompts())
    for order in ([*reversed(range(count))], [3, 0, 6, 2, 5, 1, 4]):
        got = run(model(family), [prompts()[i] for i in order], max_batch_tokens=80)
        want = alone(family)
        assert_as_alone(got, want, order)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_request_that_arrives_later_and_finds_a_warm_cache_has_the_same_bits(family):
    want = alone(family)
    settings = {"num_blocks": 64, "max_batch_tokens": 128, PAGE: 16, "return_logprobs": True}
    with model(family).continuous_batching_context_manager(
        generation_config=GenerationConfig(**GREEDY, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
    ) as manager:
        for index in (6, 4, 5, 0, 4):  # after the first, these begin with pages that are there already
            manager.add_request(list(prompts()[index]), max_new_tokens=NEW_TOKENS)
            output = manager.get_result(timeout=30)
            assert output.error is None and output.generated_tokens == want.tokens[index]
            assert [*map(logprob_bits, output.logprobs)] == want.logprobs[index]
        shared = getattr(manager.batch_processor.cache, "_total_prefix_length", None)
    if family == "llama" and shared is not None:  # only models without sliding layers share prefixes
        assert shared > 0


def test_request_that_was_put_out_and_started_again_has_the_same_bits(monkeypatch):
    """Two requests that fit when they begin and not when they end: one loses its cache and is computed anew."""
    put_out = []
    offload = OffloadingManager.offload_requests
    monkeypatch.setattr(
        OffloadingManager, "offload_requests", lambda self: put_out.append(offload(self)) or put_out[-1]
    )
    long = GenerationConfig(**{**GREEDY, "max_new_tokens": 60}, eos_token_id=-1)
    several = [prompts()[i] for i in (1, 3)]
    want = [run(model("llama"), [prompt], long) for prompt in several]
    assert not put_out
    got = run(model("llama"), several, long, num_blocks=8, safety_margin=0.0)
    assert any(put_out)
    assert got.tokens == [one.tokens[0] for one in want]
    assert got.logprobs == [one.logprobs[0] for one in want]


def test_stock_model_fails_the_same_comparison():
    """In float32 its tokens may agree; the bits of what they were chosen by do not."""
    got, want = run(model("gemma3", converted=False), prompts()), alone("gemma3", converted=False)
    assert got.logprobs != want.logprobs
    assert not want.rows <= got.rows


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_origin_of_a_cropped_cache_is_what_keeps_the_bits(family, monkeypatch):
    """Without it a sliding layer would count its blocks from the first key that is left, and this is where it shows:
    blocks of the CPU's path hold up to 512 keys.
    """
    prompt = torch.randint(3, 90, (1, 520), generator=torch.Generator().manual_seed(5))
    settings = dict(GREEDY, output_logits=True, return_dict_in_generate=True)
    out = model(family).generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    want = row_bits(torch.cat(out.logits))
    requests = [prompt[0].tolist(), *prompts()[:2]]
    assert want <= run(model(family), requests).rows

    def no_origin(*args):
        causal, window, _ = paged.requests_pattern(*args)
        return causal, window, None

    monkeypatch.setattr("hf_batchinv.attention.requests_pattern", no_origin)
    assert not want <= run(model(family), requests).rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("family", FAMILIES)
def test_request_has_the_bits_of_generate_alone_on_a_gpu(family, dtype):
    on_gpu = hf_batchinv.convert(make(family, dtype, max_position_embeddings=1024, **FAMILIES[family]).cuda())
    on_gpu.generation_config.eos_token_id = None
    settings = dict(GREEDY, output_logits=True, return_dict_in_generate=True)
    want = set()
    for prompt in prompts():
        ids = torch.tensor([prompt], device="cuda")
        out = on_gpu.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        want |= row_bits(torch.cat(out.logits))
    for load in LOADS.values():
        assert want <= run(on_gpu, prompts(), **load).rows


def test_model_runs_as_before_afterwards_and_again():
    for _ in range(2):
        before = model("llama").config._attn_implementation
        got = run(model("llama"), prompts()[:3])
        assert model("llama").config._attn_implementation == before == ATTENTION_NAME
        want = alone("llama")
        assert (got.tokens, got.logprobs) == (want.tokens[:3], want.logprobs[:3])
        ids = torch.tensor([prompts()[1]])
        again = model("llama").generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        assert again[0, ids.shape[1] :].tolist() == want.tokens[1]


def test_flash_attention_is_never_put_in(monkeypatch):
    """Where FlashAttention is installed, Transformers swaps other implementations for it."""
    asked = []
    for name in ("is_flash_attn_3_available", "is_flash_attn_2_available"):
        monkeypatch.setattr(continuous_api, name, lambda **_: asked.append(0) or True)
    assert_as_alone(run(model("llama"), prompts()), alone("llama"))
    assert not asked
    with pytest.raises((ImportError, ValueError)):  # negative control: a stock model is switched, which fails here
        run(model("llama", converted=False), prompts()[:1])
    model("llama", converted=False).set_attn_implementation("sdpa")
    assert asked


# --- what is refused ---


def test_unknown_internals_are_refused_and_other_models_untouched(monkeypatch):
    class Arguments(dict):
        __annotations__ = {"input_ids": torch.Tensor, "page_list": torch.Tensor}

    want = run(model("llama", converted=False), prompts()[:2])
    monkeypatch.setattr(continuous_batching.input_outputs, "PagedAttentionArgs", Arguments)
    message = "tried with transformers 5.17 to 5.24, whose internals differ from those of transformers"
    with pytest.raises(RuntimeError, match=message):
        continuous_batching._kind(continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn._hf_batchinv)
    with pytest.raises(RuntimeError, match=message):
        model("llama").init_continuous_batching(GenerationConfig(**GREEDY, eos_token_id=-1))
    assert model("llama").config._attn_implementation == ATTENTION_NAME
    monkeypatch.undo()
    assert run(model("llama", converted=False), prompts()[:2]).tokens == want.tokens


def test_uninstall_gives_the_stock_methods_back():
    manager = continuous_api.ContinuousBatchingManager
    wrapped = manager.switch_to_cb_friendly_attn
    try:
        continuous_batching.uninstall()
        assert manager.switch_to_cb_friendly_attn is wrapped._hf_batchinv
        continuous_batching.uninstall()
        assert not hasattr(manager.switch_to_cb_friendly_attn, "_hf_batchinv")
    finally:
        hooks.install()
    assert hasattr(manager.switch_to_cb_friendly_attn, "_hf_batchinv")
    wrapped = manager.switch_to_cb_friendly_attn
    hooks.install()
    assert manager.switch_to_cb_friendly_attn is wrapped


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default_compile_level": 1}, "drops roundings, got default_compile_level=1"),
        ({"varlen_compile_config": transformers.CompileConfig()}, "drops roundings, got varlen_compile_config"),
        ({"decode_compile_config": transformers.CompileConfig()}, "drops roundings, got decode_compile_config"),
        ({"use_cuda_graph": (False, True)}, "not tried with CUDA graphs, got use_cuda_graph"),
        ({"q_padding_interval_size": 8}, "not tried with CUDA graphs, got q_padding_interval_size=8"),
    ],
    ids=lambda settings: next(iter(settings)) if isinstance(settings, dict) else "",
)
def test_compilation_and_graphs_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        run(model("llama"), prompts()[:1], **settings)
    assert model("llama").config._attn_implementation == ATTENTION_NAME


def test_converted_model_under_another_attention_is_refused():
    ours = hf_batchinv.convert(make("llama"))
    ours.config._attn_implementation_internal = "sdpa"
    with pytest.raises(ValueError, match="needs attn_implementation='batch_invariant', got 'sdpa'"):
        run(ours, prompts()[:1])


class Attention(torch.nn.Module):
    _batch_invariant = True
    layer_idx = 0

    def __init__(self, **config):
        super().__init__()
        self.config = types.SimpleNamespace(**config)


def requests(**changes):
    """A step with two requests, of 3 and 1 queries, as continuous batching passes it."""
    bounds_q, bounds_k = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 3, 9], dtype=torch.int32)
    call = dict(
        module=Attention(),
        query=torch.randn(1, 4, 4, 16, generator=torch.Generator().manual_seed(0)),
        key=torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(1)),
        value=torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(2)),
        attention_mask=None,
        cu_seq_lens_q=bounds_q,
        cu_seq_lens_k=bounds_k,
        max_length_q=3,
        max_length_k=6,
        read_index=torch.arange(9),
        position_ids=torch.tensor([[0, 1, 2, 5]]),
    )
    return {**call, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 9, dtype=torch.bool)}, "without a mask, got attention_mask"),
        ({"module": Attention(sliding_window=4)}, "passes no sliding_window"),
        ({"module": Attention(layer_types=["sliding_attention"])}, "passes no sliding_window"),
        ({"sliding_window": 4, "position_ids": None}, "must pass position_ids of shape"),
        ({"sliding_window": 4, "position_ids": torch.zeros(3, 1, 4)}, "must pass position_ids of shape"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "passes block_table"),
        ({"cache": object()}, "updates no cache but that of generate_batch, got object"),
    ],
)
def test_what_a_step_cannot_be_is_refused_in_a_sentence(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        batch_invariant_attention(**requests(**changes))
    assert "\n" not in str(error.value)


def test_paged_name_is_registered_and_needs_a_paged_cache():
    registered = AttentionInterface()[continuous_batching.PAGED_NAME]
    assert registered is continuous_batching.paged_batch_invariant_attention
    with pytest.raises(ValueError, match="expects the paged cache of generate_batch, got none"):
        registered(**requests())
