"""The mask object: it describes exactly what transformers' own dense masks say, and where each row begins."""

import inspect
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    masking_utils,
)
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_batchinv
from hf_batchinv.mask import BatchInvariantMask, batch_invariant_mask, classify, visible_and_origin

WINDOW = 5
TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)
DECODER = dict(TINY, num_key_value_heads=1, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
CONFIGS = {
    "llama": lambda: LlamaConfig(**DECODER),
    "mistral": lambda: MistralConfig(**DECODER, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(**DECODER, sliding_window=WINDOW, attn_logit_softcapping=None),
    "gemma3": lambda: Gemma3TextConfig(
        **DECODER, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "bert": lambda: BertConfig(**TINY),
}
DECODERS = [name for name in CONFIGS if name != "bert"]
# The keyword and output field that hold the cache; renamed in transformers 5.24.
_PARAMETERS = inspect.signature(masking_utils._preprocess_mask_arguments).parameters
CACHE = "cache" if "cache" in _PARAMETERS else "past_key_values"


class _Both:
    """What the probe attention gets: our mask beside transformers' own dense one."""

    def __init__(self, ours, stock):
        self.ours, self.stock = ours, stock
        self.shape, self.ndim = ours.shape, 4

    def contiguous(self):
        return self


compared = []


def _probe_mask(*, attention_mask=None, allow_is_causal_skip=True, allow_is_bidirectional_skip=False, **kwargs):
    if isinstance(attention_mask, _Both):
        return attention_mask
    stock = masking_utils.sdpa_mask(
        attention_mask=attention_mask, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs
    )
    return _Both(batch_invariant_mask(attention_mask=attention_mask, **kwargs), stock)


def _probe_attention(module, query, key, value, attention_mask, **kwargs):
    # Compared here, after the cache was updated: a mask that still pointed at the cache's counter would be off.
    assert torch.equal(attention_mask.ours.dense(), attention_mask.stock)
    assert attention_mask.ours.shape == (key.shape[0], 1, query.shape[2], key.shape[2])
    compared.append(attention_mask.ours)
    return sdpa_attention_forward(module, query, key, value, attention_mask.stock, **kwargs)


def _probed(name):
    AttentionInterface.register("mask_probe", _probe_attention)
    AttentionMaskInterface.register("mask_probe", _probe_mask)
    compared.clear()
    auto = AutoModel if name == "bert" else AutoModelForCausalLM
    return auto.from_config(CONFIGS[name](), attn_implementation="mask_probe").eval()


IDS = torch.arange(3, 33).reshape(3, 10)
LEFT_PADDED = torch.tensor([[0] * 4 + [1] * 6, [1] * 10, [0] * 7 + [1] * 3])


@pytest.mark.parametrize("padding", [None, LEFT_PADDED, LEFT_PADDED.flip(1)], ids=["none", "left", "right"])
@pytest.mark.parametrize("name", list(CONFIGS))
@torch.no_grad()
def test_dense_mask_of_a_forward_pass(name, padding):
    _probed(name)(IDS, attention_mask=padding)
    assert len(compared) == 2
    first = torch.zeros(3) if padding is None else padding.argmax(1)
    for mask in compared:
        assert torch.equal(first, torch.zeros(3) if mask.origin is None else mask.origin.float())
        assert mask.kind == ("bidirectional" if name == "bert" else "causal")


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_dense_mask_in_generation_past_the_window(name, cache):
    _probed(name).generate(
        IDS, attention_mask=LEFT_PADDED, max_new_tokens=5, min_new_tokens=5, do_sample=False, cache_implementation=cache
    )
    assert len(compared) == 2 * 5
    assert all(mask.kind == "causal" for mask in compared)
    assert any((mask.origin < 0).any() for mask in compared) == (name != "llama")


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_dense_mask_of_chunked_prefill(name):
    model, seen = _probed(name), {}
    for begin, end in ((0, 4), (4, 9), (9, 10)):
        out = model(IDS[:, begin:end], attention_mask=LEFT_PADDED[:, :end], use_cache=True, **seen)
        seen = {CACHE: out[CACHE]}
    assert len(compared) == 2 * 3


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_dense_mask_of_packed_documents(name):
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0], [0, 1] * 5])
    _probed(name)(IDS, position_ids=positions, use_cache=False)
    bounds, longest = compared[0].documents()
    assert bounds.tolist() == [0, 3, 10, 19, 20, 22, 24, 26, 28, 30] and bounds.dtype == torch.int32
    assert longest == 9


# --- positions ---


def _mask(query_len, kv_len, **kwargs):
    return batch_invariant_mask(batch_size=2, q_length=query_len, kv_length=kv_len, **kwargs)


def test_plain_causal_mask_holds_no_tensor():
    mask = _mask(3, 7, q_offset=4)
    assert (mask.origin, mask.query_offset, mask.key_mask, mask.segments, mask._dense) == (None,) * 5


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
def test_origin_counts_from_the_first_key_at_hand(as_tensor):
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1, 1]])
    offset = torch.tensor(5) if as_tensor else 5
    mask = _mask(1, 4, q_offset=8, kv_offset=offset, attention_mask=padding)
    assert mask.origin.tolist() == [-3, 2] and mask.origin.dtype == torch.int32
    assert mask.key_mask.tolist() == [[True] * 4, [False, False, True, True]]
    assert _mask(1, 4, q_offset=8, kv_offset=offset).origin.tolist() == [-5, -5]


def test_keys_beyond_the_padding_mask_are_hidden():
    for offset in (0, torch.tensor(0)):
        mask = _mask(2, 6, q_offset=0, kv_offset=offset, attention_mask=torch.tensor([[1, 1], [0, 1]]))
        assert mask.key_mask.tolist() == [[True, True] + [False] * 4, [False, True] + [False] * 4]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_mask_of_any_dtype(dtype):
    padding = torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert torch.equal(_mask(3, 3, attention_mask=padding.to(dtype)).key_mask, padding.bool())


def test_static_cache_counter_is_not_aliased():
    counter = torch.tensor(4)
    mask = _mask(1, 8, q_offset=counter)
    before = mask.dense().clone()
    counter.add_(1)
    mask._dense = None
    assert torch.equal(mask.dense(), before)
    assert torch.equal(before[0, 0, 0], torch.arange(8) <= 4)


@pytest.mark.parametrize("layer", ["dynamic sliding", "static", "static sliding"])
def test_origin_and_offset_agree_with_the_keys_a_cache_returns(layer):
    """Keys carry their own position as their value, so the test sees which key lies at which index."""
    cache = {
        "dynamic sliding": lambda: DynamicSlidingWindowLayer(sliding_window=WINDOW),
        "static": lambda: StaticLayer(max_cache_len=16),
        "static sliding": lambda: StaticSlidingWindowLayer(max_cache_len=16, sliding_window=WINDOW),
    }[layer]()
    seen = 0
    for length in (3, 1, 1, 1, 3, 1):
        q_offset = cache.get_seq_length()
        kv_len, kv_offset = cache.get_mask_sizes(length)
        mask = _mask(length, kv_len, q_offset=q_offset, kv_offset=kv_offset)
        positions = torch.arange(seen, seen + length, dtype=torch.float32).view(1, 1, -1, 1)
        keys, _ = cache.update(positions, positions)
        assert keys.shape[2] == kv_len
        query_at = kv_len - length if mask.query_offset is None else int(mask.query_offset[0])
        assert keys[0, 0, query_at, 0] == seen  # the first query stands at its own key
        origin = 0 if mask.origin is None else int(mask.origin[0])
        if origin >= 0:
            assert keys[0, 0, origin, 0] == 0
        else:
            assert keys[0, 0, 0, 0] == -origin  # the first key at hand is that many keys after the row's first
        seen += length


# --- classification ---


def test_patterns_are_recognised():
    mu = masking_utils
    assert classify(mu.causal_mask_function) == ("causal", None, None, None)
    assert classify(mu.bidirectional_mask_function) == ("bidirectional", None, None, None)
    assert classify(mu.sliding_window_causal_mask_function(5)) == ("causal", 4, None, None)
    assert classify(mu.sliding_window_bidirectional_mask_function(5)) == ("bidirectional", 5, 5, None)
    left_padding = torch.zeros(1, dtype=torch.int64)
    for custom in (
        mu.chunked_causal_mask_function(4, left_padding),
        mu.or_masks(mu.causal_mask_function, mu.bidirectional_mask_function),
        mu.and_masks(mu.causal_mask_function, lambda b, h, q, k: k >= 0),
        lambda b, h, q, k: k <= q,
    ):
        assert classify(custom).kind == "custom"


def test_custom_pattern_keeps_the_origin():
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    function = masking_utils.chunked_causal_mask_function(2, padding.argmax(1))
    mask = _mask(6, 6, mask_function=function, attention_mask=padding)
    stock = masking_utils.sdpa_mask(
        2, 6, 6, mask_function=function, attention_mask=padding.bool(), allow_is_causal_skip=False
    )
    assert mask.kind == "custom" and mask.window == (-1, -1)
    assert torch.equal(mask.dense(), stock)
    assert mask.origin.tolist() == [2, 0]


# --- a user's dense mask ---


def _dense_pair(dtype, hidden):
    visible = torch.ones(3, 1, 10, 10, dtype=torch.bool).tril() & LEFT_PADDED[:, None, None, :].bool()
    return visible if dtype == torch.bool else torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, hidden)


@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [
        (torch.bool, None),
        (torch.float32, float("-inf")),
        (torch.float32, torch.finfo(torch.float32).min),
        (torch.float32, torch.finfo(torch.float16).min),
        (torch.float32, -1e9),
        (torch.float16, torch.finfo(torch.float16).min),
        (torch.bfloat16, torch.finfo(torch.bfloat16).min),
    ],
)
def test_origin_of_a_dense_mask(dtype, hidden):
    mask = _dense_pair(dtype, hidden)
    prepared, origin = visible_and_origin(mask)
    assert origin.tolist() == [4, 0, 7] and origin.dtype == torch.int32
    again, _ = visible_and_origin(mask)
    assert again is prepared  # computed once per forward pass
    mask[2, :, :, 0] = True if dtype == torch.bool else 0
    assert visible_and_origin(mask)[1].tolist() == [4, 0, 0]  # a change in place is seen
    with torch.inference_mode():
        assert visible_and_origin(mask.clone())[1].tolist() == [4, 0, 0]


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.bool)])
def test_dense_mask_of_another_kind_is_refused(mask):
    with pytest.raises(TypeError, match="attention_mask must be a bool or floating point tensor of shape"):
        visible_and_origin(mask)


# --- passing for a tensor ---


@pytest.fixture
def padded():
    return batch_invariant_mask(
        3, 10, 10, mask_function=masking_utils.sliding_window_causal_mask_function(4), attention_mask=LEFT_PADDED
    )


USES = {
    "scores + mask": lambda mask: torch.zeros(3, 1, 10, 10) + mask,
    "mask + scores": lambda mask: mask + torch.zeros(3, 1, 10, 10),
    "1 - mask": lambda mask: 1.0 - mask,
    "-mask": lambda mask: -mask,
    "~mask": lambda mask: ~mask,
    "mask == 0": lambda mask: mask == 0,
    "to(dtype)": lambda mask: mask.to(torch.float32),
    "float()": lambda mask: mask.float(),
    "masked_fill": lambda mask: torch.zeros(3, 1, 10, 10).masked_fill(mask, 0.0),
    "sdpa": lambda mask: torch.nn.functional.scaled_dot_product_attention(*[torch.zeros(3, 1, 10, 16)] * 3, mask),
}


@pytest.mark.parametrize("use", list(USES))
def test_use_as_a_tensor_is_a_type_error_with_a_remedy(padded, use):
    with pytest.raises(TypeError, match="this attention bypasses the transformers AttentionInterface"):
        USES[use](padded)


def test_boolean_uses_see_the_dense_mask(padded):
    dense = padded.dense()
    some = torch.rand(3, 1, 10, 10) > 0.5
    assert torch.equal(padded & some, dense & some) and torch.equal(some & padded, dense & some)
    assert torch.equal(padded | some, dense | some) and torch.equal(some | padded, dense | some)
    assert torch.equal(torch.where(padded, 0.0, 1.0), torch.where(dense, 0.0, 1.0))
    assert torch.equal(padded[:, 0], dense[:, 0])
    assert padded.ndim == padded.dim() == 4 and padded.dtype == torch.bool and padded.size(2) == 10


@pytest.mark.parametrize("kind", ["sliding", "custom"])
@pytest.mark.parametrize(
    "cut",
    [
        (slice(None), slice(None), slice(-3, None), slice(None)),
        (slice(None), slice(None), slice(None), slice(0, 7)),
        (Ellipsis, slice(2, 5), slice(3, None)),
        (Ellipsis, slice(8)),
    ],
)
def test_cutting_queries_or_keys_keeps_the_origin(padded, kind, cut):
    if kind == "custom":
        function = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.causal_mask_function)
        padded = batch_invariant_mask(3, 10, 10, mask_function=function, attention_mask=LEFT_PADDED)
    part = padded[cut]
    assert isinstance(part, BatchInvariantMask)
    assert torch.equal(part.dense(), padded.dense()[cut])
    first_key = range(10)[cut[-1]].start
    assert part.origin.tolist() == [4 - first_key, 0 - first_key, 7 - first_key]


def test_moving_pickling_and_feeding_back(padded):
    assert padded.to("cpu") is padded and padded.to(torch.device("cpu"), non_blocking=True) is padded
    assert torch.equal(pickle.loads(pickle.dumps(padded)).dense(), padded.dense())
    moved = padded.to("meta")
    assert moved.origin.is_meta and moved.key_mask.is_meta and moved.device.type == "meta"
    assert batch_invariant_mask(3, 10, 10, attention_mask=padded) is padded
    assert not hasattr(padded, "_no_such_attribute") and not hasattr(padded, "no_such_attribute")


def test_one_row_serves_any_batch_and_other_sizes_are_refused(padded):
    one = batch_invariant_mask(1, 10, 10, attention_mask=LEFT_PADDED[:1])
    three = one.for_batch(3)
    assert torch.equal(three.dense(), one.dense().expand(3, -1, -1, -1)) and three.origin.tolist() == [4, 4, 4]
    with pytest.raises(ValueError, match="batch size 2 of the keys or 1, got 3"):
        padded.for_batch(2)


def test_a_3d_mask_is_refused():
    with pytest.raises(ValueError, match="attention_mask must have 2 dimensions here"):
        batch_invariant_mask(1, 2, 2, attention_mask=torch.ones(1, 2, 2))


# --- memory ---

LONG = 8192


def _long_padding():
    padding = torch.ones(2, LONG, dtype=torch.int64)
    padding[0, :100] = 0
    return padding


class _Largest(TorchDispatchMode):
    """Remembers the most elements that any operator's result has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_a_padded_mask_is_not_spread_over_queries_and_keys():
    with _Largest() as seen:
        mask = _mask(LONG, LONG, attention_mask=_long_padding()).for_batch(2)
    assert 0 < seen.elements <= 2 * LONG
    with seen:
        mask.dense()
    assert seen.elements >= 2 * LONG * LONG  # what it would be


@pytest.mark.gpu
@torch.no_grad()
def test_a_padded_forward_of_8k_tokens_takes_less_memory_than_such_a_mask():
    config = LlamaConfig(**DECODER | dict(hidden_size=128, head_dim=64, max_position_embeddings=LONG))
    padding = _long_padding().cuda()
    ids = torch.full((2, LONG), 3, device="cuda")

    def peak(model):
        for _ in range(2):  # the first call compiles and checks
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            model.model(ids, attention_mask=padding, use_cache=False)
        return torch.cuda.max_memory_allocated() - before

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()
    of_a_mask = 2 * LONG * LONG
    assert peak(model) > of_a_mask  # stock
    assert peak(hf_batchinv.convert(model)) < of_a_mask / 2


@pytest.mark.gpu
def test_no_value_is_read_back_from_the_gpu():
    padding, counter = LEFT_PADDED.cuda(), torch.tensor(9, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for offset in (9, counter):
            for mask_2d in (None, padding):
                batch_invariant_mask(3, 1, 12, q_offset=offset, kv_offset=2, attention_mask=mask_2d, device="cuda")
        visible_and_origin(torch.ones(3, 1, 4, 4, dtype=torch.bool, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
