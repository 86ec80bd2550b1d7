"""Recorded decoding steps have the bits of eager ones.

Without a GPU a step is recorded as the list of its aten operations, which bakes in what a CUDA graph bakes in: Python
numbers, addresses, and the branches that were taken.
"""

import contextlib
import inspect
import types

import pytest
import torch
import transformers
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import StaticCache

import hf_batchinv
from hf_batchinv import decode_graph
from hf_batchinv.decode_graph import DecodeGraph
from hf_batchinv.testing import differing
from tests.tiny_models import make

NEW = 24
# transformers 5.24 renamed the argument.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
WHERE = [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)]
WHERE += [pytest.param("cuda", torch.float16, marks=pytest.mark.gpu)]


def capture_aten(cache):
    """A `Capture` for the CPU. Tracing runs the step, so what it wrote is put back, as capturing would not write."""

    def capture(step):
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values, layer.cumulative_length)]
        kept = [tensor.clone() for tensor in tensors]
        outputs = []

        def traced():
            outputs.append(step())
            return outputs[-1].logits

        graph = make_fx(traced)()
        torch._foreach_copy_(tensors, kept)
        result = outputs[-1]
        result["logits"] = result.logits.clone()

        def replay():
            result["logits"].copy_(graph())

        return replay, result

    return capture


def sequences(model, *lengths):
    """Left-padded token ids and mask of sequences of these lengths."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) >= torch.tensor([[max(lengths) - length] for length in lengths])
    return ids.to(model.device), mask.long().to(model.device)


def generate(model, ids, mask, **extra):
    run = dict(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, output_logits=True, pad_token_id=0)
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **run, **extra)
    return out.sequences, torch.stack(out.logits, 1)


@pytest.fixture
def recorded(monkeypatch):
    """Let `generate` record on any device; the DecodeGraph of every call is put into the list."""
    made = []
    monkeypatch.setenv("HF_BATCHINV_CUDA_GRAPHS", "1")

    class Spy(DecodeGraph):
        def __init__(self, model):
            super().__init__(model)
            made.append(self)

        def __call__(self, **inputs):
            cache = next(value for value in inputs.values() if isinstance(value, StaticCache))
            if self.model.device.type == "cpu":
                self._capture = capture_aten(cache)
            return super().__call__(**inputs)

    monkeypatch.setattr(decode_graph, "DecodeGraph", Spy)
    return made


def compile_everywhere():
    """Make `generate` ask for a compiled call on a CPU, too."""
    config = transformers.CompileConfig()
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize("device, dtype", WHERE, ids=str)
@pytest.mark.parametrize("lengths", [(5,), (9, 4, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2"])
def test_a_recorded_step_has_the_bits_of_an_eager_one(recorded, family, lengths, device, dtype):
    """Sliding windows of 8 fill up on the way: before and after that a step is another recording."""
    model = hf_batchinv.convert(make(family, dtype).to(device))
    ids, mask = sequences(model, *lengths)
    want_ids, want = generate(model, ids, mask)
    eager_ids, eager = generate(model, ids, mask, cache_implementation="static", disable_compile=True)
    assert not recorded
    extra = {"compile_config": compile_everywhere()} if device == "cpu" else {}
    got_ids, got = generate(model, ids, mask, cache_implementation="static", **extra)
    for ids_, logits in ((eager_ids, eager), (got_ids, got)):
        assert torch.equal(ids_, want_ids) and differing(logits, want) == 0
    (graph,) = recorded
    assert len(graph.recordings) == (2 if family.startswith("gemma") and max(lengths) < 8 else 1)


def test_what_is_no_step_of_one_token_over_a_static_cache_runs_eagerly():
    model = hf_batchinv.convert(make("llama"))
    graph = DecodeGraph(model, capture=None)  # would raise if it were called
    ids, mask = sequences(model, 5)
    cache = StaticCache(config=model.config, max_cache_len=16)
    for _ in range(3):
        graph(input_ids=ids, attention_mask=mask)
    with torch.no_grad():
        graph(input_ids=ids, **{CACHE: cache})
        assert decode_graph._flatten({"input_ids": ids[:, :1], CACHE: cache, "strange": object()}) is None
        assert decode_graph._flatten({"input_ids": ids[:, :1], CACHE: cache}) is not None
        assert decode_graph._flatten({"input_ids": ids, CACHE: cache}) is None
    assert not graph.recordings


def test_a_replay_leaves_the_outputs_of_the_one_before_alone():
    model = hf_batchinv.convert(make("llama"))
    ids, _ = sequences(model, 6)
    cache = StaticCache(config=model.config, max_cache_len=16)
    graph = DecodeGraph(model, capture_aten(cache))
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache})
        steps = [graph(input_ids=ids[:, i : i + 1], **{CACHE: cache}).logits for i in range(4)]
        alone = model(input_ids=torch.cat([ids, ids[:, :4]], 1)).logits
    assert len(graph.recordings) == 1
    assert differing(torch.cat(steps, 1), alone[:, 6:]) == 0


def test_a_hooked_model_is_not_recorded(monkeypatch):
    model = hf_batchinv.convert(make("llama"))
    assert decode_graph.enabled(model)
    monkeypatch.setenv("HF_BATCHINV_CUDA_GRAPHS", "0")
    assert not decode_graph.enabled(model)
    monkeypatch.setenv("HF_BATCHINV_CUDA_GRAPHS", "1")
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    assert not decode_graph.enabled(model)
    handle.remove()
    monkeypatch.setenv("HF_BATCHINV_CUDA_GRAPHS", "yes")
    with pytest.raises(ValueError, match="HF_BATCHINV_CUDA_GRAPHS: expected 0 or 1, got 'yes'; unset it for 1"):
        decode_graph.enabled(model)


def test_a_step_that_cannot_be_recorded_says_so_in_one_sentence():
    model = hf_batchinv.convert(make("llama"))

    def capture(step):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graph = DecodeGraph(model, capture)
    ids, mask = sequences(model, 5)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache})
        graph(input_ids=ids[:, :1], **{CACHE: cache})
        with pytest.raises(RuntimeError) as error:
            graph(input_ids=ids[:, :1], **{CACHE: cache})
    assert str(error.value) == (
        "a decoding step of LlamaForCausalLM could not be recorded as a CUDA graph (operation not permitted when "
        "stream is capturing); pass disable_compile=True to generate"
    )


# --- where and how a step is recorded ---


class OnAnotherGpu(torch.nn.Module):
    """A model that says it is on cuda:1, and runs here."""

    device = torch.device("cuda", 1)

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, **inputs):
        return self.inner(**inputs)


@pytest.fixture
def fake_capture(monkeypatch):
    """What torch.cuda.graph was entered with: the current device, and its keywords."""
    current, found = [0], []

    @contextlib.contextmanager
    def device(which):
        current.append(torch.device(which).index if not isinstance(which, int) else which)
        yield
        current.pop()

    @contextlib.contextmanager
    def graph(graph, **keywords):
        found.append((current[-1], keywords))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    return found


def record(model):
    inner = getattr(model, "inner", model)
    ids, _ = sequences(inner, 5)
    cache = StaticCache(config=inner.config, max_cache_len=16)
    graph = DecodeGraph(model)
    with torch.no_grad():
        inner(input_ids=ids, **{CACHE: cache})
        for _ in range(2):
            graph(input_ids=ids[:, :1], **{CACHE: cache})


def test_a_step_is_recorded_on_the_model_s_device(fake_capture):
    """Else the launches go to cuda:1 while cuda:0 records: an empty graph, and every later step repeats old logits."""
    record(OnAnotherGpu(hf_batchinv.convert(make("llama"))))
    assert [device for device, _ in fake_capture] == [1]


def test_recording_does_not_forbid_other_threads_their_allocations(fake_capture):
    """The default mode, "global", makes cudaMalloc of any other thread fail, and the recording with it."""
    record(OnAnotherGpu(hf_batchinv.convert(make("llama"))))
    assert [keywords.get("capture_error_mode") for _, keywords in fake_capture] == ["thread_local"]


def test_a_device_without_cuda_graphs_decodes_eagerly():
    """An XPU gets here with nothing but a static cache; a CPU with this compile_config."""
    model = hf_batchinv.convert(make("llama"))
    ids, mask = sequences(model, 5)
    want, _ = generate(model, ids, mask)
    got, _ = generate(model, ids, mask, cache_implementation="static", compile_config=compile_everywhere())
    assert torch.equal(got, want)


def inputs_of_a_step():
    """What a converted model gets for one token after a prefill into a static cache."""
    model = hf_batchinv.convert(make("llama"))
    ids, _ = sequences(model, 5)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache})
    return {"input_ids": ids[:, :1], CACHE: cache}


def test_an_offloaded_static_cache_is_not_recorded():
    """Its layers go to the CPU and come back within a step, on another stream: that cannot be captured."""
    inputs = inputs_of_a_step()
    inputs[CACHE].offloading = True
    assert decode_graph._flatten(inputs) is None


def test_a_model_with_stock_parts_is_not_recorded():
    model = make("llama")
    model.model.layers[0].mlp.act_fn = torch.nn.RReLU()
    with pytest.warns(UserWarning, match="only partly batch invariant"):
        hf_batchinv.convert(model, strict=False)
    assert not decode_graph.enabled(model)


def test_a_step_with_a_tensor_elsewhere_is_not_recorded():
    found = inputs_of_a_step()
    assert decode_graph._flatten(found | {"logits_to_keep": torch.tensor([0], device="meta")}) is None
    assert decode_graph._flatten(found | {"logits_to_keep": torch.tensor([0])}) is not None


def test_a_global_forward_hook_sees_every_step():
    model = hf_batchinv.convert(make("llama"))
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert not decode_graph.enabled(model)
    finally:
        handle.remove()


def test_asking_for_hidden_states_once_does_not_end_recording():
    """Transformers leaves the hooks that collect outputs on the modules; they do nothing unless asked again."""
    model = hf_batchinv.convert(make("llama"))
    assert decode_graph.enabled(model)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    assert decode_graph.enabled(model)
