"""The attention function as transformers calls it: same bits for a row in every batch, padding, cache and mask form."""

import inspect

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    T5Config,
    T5Model,
    masking_utils,
)

from hf_batchinv import registry
from hf_batchinv.attention import batch_invariant_attention
from hf_batchinv.mask import batch_invariant_mask
from hf_batchinv.testing import assert_same_bits, bits

# The keyword that holds the cache; renamed in transformers 5.24.
_PARAMETERS = inspect.signature(masking_utils._preprocess_mask_arguments).parameters
CACHE = "cache" if "cache" in _PARAMETERS else "past_key_values"

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS = (150, 90, 128)  # real tokens of each row, more than one block of keys
LONGEST = max(LENGTHS)
CPU_AND_GPU = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]

on_each_device = pytest.mark.parametrize("device", CPU_AND_GPU)
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


class Attention(torch.nn.Module):
    is_causal = True
    _batch_invariant = True


MODULE = Attention().eval()


def attend(query, key, value, mask, **kwargs):
    out, weights = batch_invariant_attention(MODULE, query, key, value, mask, **kwargs)
    assert weights is None and out.is_contiguous()
    assert out.shape == (key.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return out


def rows(device, dtype, seed=0):
    """One (1, heads, length, dim) query, key and value for each row."""
    random = torch.Generator().manual_seed(seed)
    for length in LENGTHS:
        shapes = ((1, heads, length, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        yield [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]


def padded_batch(sequences, side):
    """(query, key, value) of all rows, with junk where there is no token, and the 2-D padding mask."""
    device = sequences[0][0].device
    padding = torch.zeros(len(sequences), LONGEST, dtype=torch.int64, device=device)
    states = [torch.full((len(sequences), part.shape[1], LONGEST, DIM), 3.0) for part in sequences[0]]
    states = [part.to(sequences[0][0]) for part in states]
    for index, parts in enumerate(sequences):
        at = real(index, side)
        padding[index, at] = 1
        for whole, part in zip(states, parts, strict=True):
            whole[index, :, at] = part[0]
    return states, padding


def real(index, side):
    """Where row `index` has its tokens."""
    return slice(LONGEST - LENGTHS[index], None) if side == "left" else slice(0, LENGTHS[index])


def pattern(name):
    return {
        "causal": masking_utils.causal_mask_function,
        "sliding": masking_utils.sliding_window_causal_mask_function(40),
        "bidirectional": masking_utils.bidirectional_mask_function,
    }[name]


def mask_of(query, key, name, padding=None, **kwargs):
    return batch_invariant_mask(
        key.shape[0],
        query.shape[2],
        key.shape[2],
        mask_function=pattern(name),
        attention_mask=padding,
        device=key.device,
        **kwargs,
    )


def dense_mask(form, mask, dtype):
    """The same mask as a user would pass it."""
    if form == "2-D":
        return mask
    visible = mask.dense().clone()
    if form == "4-D bool":
        return visible
    hidden = float("-inf") if form == "4-D -inf" else torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, hidden)


@on_each_device
@in_each_dtype
@pytest.mark.parametrize(
    ("form", "side"),
    [
        ("2-D", "left"),
        ("2-D", "right"),
        ("4-D bool", "left"),
        ("4-D bool", "right"),
        ("4-D -inf", "left"),
        ("4-D lowest", "left"),
    ],
)
@pytest.mark.parametrize("name", ["causal", "sliding", "bidirectional"])
def test_padded_row_has_the_bits_of_the_row_alone(device, dtype, form, side, name):
    sequences = list(rows(device, dtype))
    (query, key, value), padding = padded_batch(sequences, side)
    batch = attend(query, key, value, dense_mask(form, mask_of(query, key, name, padding), dtype))
    for index, (q, k, v) in enumerate(sequences):
        alone = attend(q, k, v, mask_of(q, k, name))
        assert_same_bits(batch[index : index + 1, real(index, side)], alone)


@on_each_device
def test_stock_attention_fails_the_same_comparisons(device):
    """Left padding against the row alone, or one query against all of them; not every backend fails both."""
    same = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sequences = list(rows(device, dtype))
        (query, key, value), padding = padded_batch(sequences, "left")
        dense = mask_of(query, key, "causal", padding).dense()
        batch = scaled_dot_product_attention(query, key, value, dense, enable_gqa=True)
        q, k, v = sequences[1]
        alone = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        last = scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True)
        same.append(torch.equal(bits(batch[1:2, :, real(1, "left")]), bits(alone)))
        same.append(torch.equal(bits(last), bits(alone[:, :, -1:])))
    assert not all(same)


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("name", ["causal", "sliding"])
def test_decode_and_chunks_have_the_bits_of_prefill(device, dtype, name):
    q, k, v = next(rows(device, dtype))
    whole = attend(q, k, v, mask_of(q, k, name))
    for begin, end in ((0, 50), (50, 51), (51, 117), (117, 118), (118, 150)):
        first = max(0, begin - 39) if name == "sliding" else 0  # what a sliding cache still holds
        keys, values = k[:, :, first:end], v[:, :, first:end]
        mask = mask_of(q[:, :, begin:end], keys, name, q_offset=begin, kv_offset=first)
        assert_same_bits(attend(q[:, :, begin:end], keys, values, mask), whole[:, begin:end])


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("begin", [0, 60, 149])
def test_static_cache_has_the_bits_of_a_dynamic_one(device, dtype, begin):
    q, k, v = next(rows(device, dtype))
    whole = attend(q, k, v, mask_of(q, k, "causal"))
    free = (0, 0, 0, 41)  # slots that no token has filled yet
    keys, values = (torch.nn.functional.pad(part, free, value=7.0) for part in (k, v))
    mask = mask_of(q[:, :, begin:], keys, "causal", q_offset=torch.tensor(begin, device=device))
    assert_same_bits(attend(q[:, :, begin:], keys, values, mask), whole[:, begin:])


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("form", ["position_ids", "position_ids, custom", "cu_seq_lens"])
@pytest.mark.parametrize("name", ["causal", "sliding"])
def test_packed_document_has_the_bits_of_the_document_alone(device, dtype, form, name):
    documents = list(rows(device, dtype))
    query, key, value = (torch.cat(parts, dim=2) for parts in zip(*documents, strict=True))
    edges = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    if form == "cu_seq_lens":
        bounds = torch.tensor(edges, dtype=torch.int32, device=device)
        call = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        if name == "sliding":
            call |= {"sliding_window": 40}
        batch = attend(query, key, value, None, **call)
        described = attend(query, key, value, mask_of(query, key, name), **call, max_length_q=150, max_length_k=150)
        assert_same_bits(described, batch)
    else:
        segments = torch.cat([torch.full((1, length), i) for i, length in enumerate(LENGTHS)], dim=1).to(device)
        parts = [pattern(name), masking_utils.packed_sequence_mask_function(segments)]
        if form == "position_ids, custom":
            parts.append(lambda b, h, q, k: k <= q)
        mask = batch_invariant_mask(
            1, query.shape[2], key.shape[2], mask_function=masking_utils.and_masks(*parts), device=device
        )
        batch = attend(query, key, value, mask)
    for (q, k, v), begin, end in zip(documents, edges[:-1], edges[1:], strict=True):
        assert_same_bits(batch[:, begin:end], attend(q, k, v, mask_of(q, k, name)))


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("form", ["2-D", "4-D bool", "4-D lowest"])
def test_position_bias_under_padding(device, dtype, form):
    random = torch.Generator().manual_seed(1)
    relative = torch.randn(HEADS, 2 * LONGEST, generator=random)
    index = torch.arange(LONGEST)[:, None] - torch.arange(LONGEST)[None, :] + LONGEST
    bias = relative[:, index][None].to(device, dtype)
    sequences = list(rows(device, dtype))
    (query, key, value), padding = padded_batch(sequences, "left")
    mask = dense_mask(form, mask_of(query, key, "bidirectional", padding), dtype)
    batch = attend(query, key, value, mask, position_bias=bias)
    for row, (q, k, v) in enumerate(sequences):
        alone = attend(q, k, v, mask_of(q, k, "bidirectional"), position_bias=bias[..., : LENGTHS[row], : LENGTHS[row]])
        assert_same_bits(batch[row : row + 1, real(row, "left")], alone)


def test_without_a_mask_causality_comes_from_the_caller():
    q, k, v = next(rows("cpu", torch.float32))
    causal, full = (attend(q, k, v, mask_of(q, k, name)) for name in ("causal", "bidirectional"))
    assert_same_bits(attend(q, k, v, None), causal)
    assert_same_bits(attend(q, k, v, None, is_causal=False), full)
    assert_same_bits(attend(q[:, :, -1:], k, v, None), causal[:, -1:])
    assert_same_bits(attend(q, k, v, None, sliding_window=40), attend(q, k, v, mask_of(q, k, "sliding")))
    assert_same_bits(attend(q, k, v, None, is_causal=False, sliding_window=LONGEST), full)


def test_one_query_serves_a_batch_of_keys():
    sequences = list(rows("cpu", torch.float32))
    (query, key, value), padding = padded_batch(sequences, "right")
    mask = mask_of(query, key, "bidirectional", padding)
    many = attend(query[:1].expand(3, -1, -1, -1), key, value, mask)
    assert_same_bits(attend(query[:1], key, value, mask), many)
    one = mask_of(query[:1], key[:1], "causal")
    assert_same_bits(attend(query, key, value, one), attend(query, key, value, mask_of(query, key, "causal")))


class Bare(torch.nn.Module):
    _batch_invariant = True


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"module": torch.nn.Identity()}, ValueError, "never converted; call hf_batchinv.convert"),
        ({"module": Attention().train(), "dropout": 0.1}, ValueError, "no dropout, got dropout=0.1 in training"),
        ({"output_attentions": True}, ValueError, "does not compute attention weights"),
        ({"indices": torch.zeros(1)}, ValueError, "Attention passes indices"),
        ({"block_indices": torch.zeros(1)}, ValueError, "Attention passes block_indices"),
        ({"s_aux": torch.zeros(HEADS), "sinks": torch.zeros(HEADS)}, ValueError, "got both; pass one"),
        ({"sinks": torch.zeros(1, HEADS, 4, 1)}, ValueError, "attention sinks must have shape"),
        ({"module": Bare()}, ValueError, "Bare passes neither attention_mask nor is_causal"),
        ({"is_causal": False, "sliding_window": 2}, ValueError, "sliding_window=2 without a mask"),
        ({"attention_mask": "causal"}, TypeError, "attention_mask must be None, a tensor or the batch-invariant mask"),
        ({"attention_mask": batch_invariant_mask(1, 4, 9)}, ValueError, "the mask is for 4 queries and 9 keys"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, ValueError, "need both cu_seq_lens_q and cu_seq_lens_k"),
        (
            {
                "attention_mask": batch_invariant_mask(1, 4, 4, attention_mask=torch.ones(1, 4)),
                "cu_seq_lens_q": torch.tensor([0, 4]),
                "cu_seq_lens_k": torch.tensor([0, 4]),
            },
            ValueError,
            "cu_seq_lens_q cannot be combined with a padding mask",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(kwargs, error, message):
    query, key = torch.zeros(1, HEADS, 4, DIM), torch.zeros(1, KV_HEADS, 4, DIM)
    call = {"module": MODULE, "query": query, "key": key, "value": key, "attention_mask": None, **kwargs}
    with pytest.raises(error, match=message):
        batch_invariant_attention(**call)


def test_dropout_outside_training_and_unknown_keywords_are_ignored():
    q, k, v = next(rows("cpu", torch.float32))
    plain = attend(q, k, v, None)
    assert_same_bits(attend(q, k, v, None, dropout=0.5, position_ids=torch.zeros(1), use_cache=True), plain)


# --- whole models ---

TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=128,
)
DECODER = dict(TINY, num_key_value_heads=1, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def both(config, auto=AutoModelForCausalLM):
    """The same model under stock eager attention and under ours, only the attention marked as converted."""
    registry.register()
    torch.manual_seed(0)
    stock = auto.from_config(config, attn_implementation="eager") if auto is not T5Model else T5Model(config)
    stock.set_attn_implementation("eager")
    config = type(config)(**config.to_dict())
    config._attn_implementation = registry.NAME
    ours = auto.from_config(config, attn_implementation=registry.NAME) if auto is not T5Model else T5Model(config)
    ours.load_state_dict(stock.state_dict())
    for module in ours.modules():
        module._batch_invariant = True
    return stock.eval(), ours.eval()


IDS = torch.arange(3, 27).reshape(2, 12)
PADDING = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**DECODER), Gemma2Config(**DECODER, sliding_window=5), BertConfig(**TINY)],
    ids=lambda config: config.model_type,
)
@torch.no_grad()
def test_model_computes_what_eager_attention_does(config, side):
    stock, ours = both(config, AutoModel)
    padding = PADDING if side == "left" else PADDING.flip(1)
    want = stock(IDS, attention_mask=padding).last_hidden_state
    got = ours(IDS, attention_mask=padding).last_hidden_state
    torch.testing.assert_close(got[padding.bool()], want[padding.bool()], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("config", [LlamaConfig(**DECODER), Gemma2Config(**DECODER, sliding_window=5)])
@torch.no_grad()
def test_generate_gives_the_tokens_of_eager_attention(config, cache):
    call = dict(attention_mask=PADDING, max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation=cache)
    stock, ours = both(config)
    assert torch.equal(ours.generate(IDS, **call), stock.generate(IDS, **call))


@torch.no_grad()
def test_t5_position_bias():
    config = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    stock, ours = both(config, T5Model)
    call = dict(input_ids=IDS, attention_mask=PADDING, decoder_input_ids=IDS[:, :6])
    torch.testing.assert_close(ours(**call).last_hidden_state, stock(**call).last_hidden_state, atol=1e-5, rtol=1e-4)


def test_registration_is_idempotent_and_covers_both_interfaces():
    registry.register()
    registry.register()
    assert AttentionInterface()[registry.NAME] is batch_invariant_attention
    assert AttentionMaskInterface()[registry.NAME] is batch_invariant_mask


@torch.no_grad()
def test_unconverted_model_is_refused():
    registry.register()
    config = LlamaConfig(**DECODER)
    config._attn_implementation = registry.NAME
    model = LlamaForCausalLM(config).eval()
    with pytest.raises(ValueError, match="LlamaAttention uses attn_implementation='batch_invariant' but its model was"):
        model(IDS)


@pytest.mark.parametrize(
    ("config", "prepared", "most_graphs"),
    [
        pytest.param(LlamaConfig(**DECODER), True, 1, id="llama, mask made outside as generate does"),
        # Made inside, the 2-D mask grows and a sliding static cache counts in an int: symbols in the second graph.
        pytest.param(LlamaConfig(**DECODER), False, 2, id="llama, mask made inside"),
        pytest.param(Gemma2Config(**DECODER, sliding_window=5), False, 2, id="gemma2, mask made inside"),
    ],
)
@torch.no_grad()
def test_compiled_static_decoding_has_the_bits_of_eager(config, prepared, most_graphs):
    _, ours = both(config)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    def decode(model):
        cache = {CACHE: StaticCache(config=ours.config, max_cache_len=24)}
        padding = torch.nn.functional.pad(PADDING, (0, 12), value=1)
        logits = [ours(IDS, attention_mask=PADDING, **cache).logits[:, -1:]]
        for token in range(6):
            mask = padding[:, : 13 + token]
            if prepared:
                empty = torch.empty(2, 1, 0)
                mask = masking_utils.create_causal_mask(ours.config, empty, attention_mask=mask, **cache)
            logits.append(model(IDS[:, token : token + 1], attention_mask=mask, **cache).logits)
        return torch.cat(logits, dim=1)

    torch._dynamo.reset()
    eager = decode(ours)
    compiled = decode(torch.compile(ours, backend=count, fullgraph=True))
    assert_same_bits(compiled, eager)
    assert len(graphs) <= most_graphs


@torch.no_grad()
def test_packed_documents_are_refused_where_dynamo_hides_them():
    _, ours = both(LlamaConfig(**DECODER))
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    positions = torch.arange(12)[None].expand(2, -1)
    assert_same_bits(
        compiled(IDS, position_ids=positions, use_cache=False).logits,
        ours(IDS, position_ids=positions, use_cache=False).logits,
    )
    with pytest.raises(RuntimeError, match="packed position_ids"):
        compiled(IDS, position_ids=positions % 5, use_cache=False)
