"""What a remembered call may be used for again, and which calls are not for the direct way to the kernels."""

import ctypes
import importlib
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import hf_batchinv
from hf_batchinv import hub
from hf_batchinv.layers import fused


def part(package: str, module: str):
    return importlib.import_module(f"{hub.load(package).__name__}.{module}")


def aligned(*shape, dtype=torch.float16):
    return torch.randn(*shape).to(dtype)


def odd(*shape, dtype=torch.float16):
    """A contiguous tensor whose address is not a multiple of 16."""
    count = torch.Size(shape).numel()
    tensor = torch.randn(count + 1).to(dtype)[1:].view(shape)
    assert tensor.data_ptr() % 16
    return tensor


# --- remembered calls ---


@pytest.fixture
def hopper(monkeypatch):
    """The Triton interpreter with the plan of a GPU that has tensor descriptors; remembered calls are forgotten."""
    pytest.importorskip("triton")
    for package in ("linear", "flash-attn"):
        launch, plan = part(package, "_launch"), part(package, "plan")
        monkeypatch.setattr(launch, "gpu_of", lambda device, plan=plan: plan.Gpu((9, 0), 4))
    for package, module in (("linear", "linear"), ("flash-attn", "attention")):
        monkeypatch.setattr(part(package, module), "_gpu_calls", {})


def test_linear_s_one_bit_of_alignment_is_not_enough(hopper):
    """An odd bias and an odd x have one key; the first call takes descriptors, which the second one may not."""
    linear, launch = part("linear", "linear"), part("linear", "_launch")
    weight = aligned(128, 512)
    first = aligned(300, 512), weight, odd(128)
    second = odd(300, 512), weight, aligned(128)
    tile = launch._choose_tile(first[0], 300, 128, 512, launch._describable(*first[:2]))
    assert tile.tma, "the premise: such a call is served through descriptors"
    linear._recalled(*first)
    call = linear._recalled(*second)
    call(*second)  # AssertionError: base must be 16-byte aligned


def test_a_cublaslt_product_is_not_recalled_for_an_odd_weight(hopper, monkeypatch):
    """x that must be copied is aligned behind the copy, whatever its own address: so the key of an odd x with an
    aligned weight gets a product of cuBLASLt, and an odd weight with an aligned x then gets the same one.
    """
    linear, launch, lt = part("linear", "linear"), part("linear", "_launch"), part("linear", "_cublaslt")
    given = []

    class Product:
        admitted = True

        def __init__(self, *args):
            pass

        def __call__(self, x, weight, bias, y):
            given.append([tensor.data_ptr() % 16 for tensor in (x, weight)])

    monkeypatch.setattr(lt, "Product", Product)
    monkeypatch.setattr(lt, "_library", lambda: object())
    monkeypatch.setattr(lt._thread, "products", {})
    monkeypatch.setattr(launch, "_second_engine", lambda *operands: (lt.product(*operands), True))
    first = odd(3, 64, 2).transpose(1, 2)[:, :, :64], aligned(64, 64), None
    second = aligned(3, 64, 2).transpose(1, 2)[:, :, :64], odd(64, 64), None
    for operands in (first, second):
        linear._recalled(*operands)(*operands)
    assert given[0] == [0, 0] and all(rest == [0, 0] for rest in given)


def test_attention_s_one_bit_of_alignment_is_not_enough(hopper):
    attention = part("flash-attn", "attention")

    def run(key, value):
        query = aligned(1, 1, 128, 64)
        arguments = (query, key, value, None, None, None, None, None)
        call = attention._recalled(*arguments, True, None, (-1, -1), 0.0)
        return call(*arguments)

    spread = aligned(1, 1, 128, 64, 2)
    odd_spread = odd(1, 1, 128, 64, 2)
    run(odd_spread[..., 0], aligned(1, 1, 128, 64))
    run(spread[..., 0], odd(1, 1, 128, 64))  # AssertionError: base must be 16-byte aligned


def test_a_scale_in_a_tensor_is_read_at_every_call(hopper):
    """`float(scale)` takes a tensor; as a key it is compared by identity, so the first value stays for good."""
    attention = part("flash-attn", "attention")
    query, key, value = (aligned(1, 1, 16, 64, dtype=torch.float32) for _ in range(3))
    arguments = (query, key, value, None, None, None, None, None)
    scale = torch.tensor(0.1)
    before = attention._recalled(*arguments, True, scale, (-1, -1), 0.0)(*arguments)
    scale.fill_(2.0)
    after = attention._recalled(*arguments, True, scale, (-1, -1), 0.0)(*arguments)
    want = attention._recalled(*arguments, True, 2.0, (-1, -1), 0.0)(*arguments)
    assert not torch.equal(before, want)
    assert torch.equal(after, want)


@pytest.mark.parametrize("shape", ["strided", "expanded"])
def test_any_strides_of_a_bias(hopper, shape):
    """The kernels read bias and sinks as if they were contiguous: other values, and memory behind the tensor."""
    linear = part("linear", "linear")
    x, weight = torch.randn(5, 32), torch.randn(16, 32)
    bias = torch.randn(32)[::2] if shape == "strided" else torch.randn(1).expand(16)
    got = linear._recalled(x, weight, bias)(x, weight, bias)
    torch.testing.assert_close(got, x @ weight.t() + bias, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", ["strided", "expanded"])
def test_any_strides_of_sinks(hopper, shape):
    attention, query = part("flash-attn", "attention"), torch.randn(1, 4, 6, 32)
    sinks = torch.randn(8)[::2] if shape == "strided" else torch.randn(1).expand(4)
    arguments = (query, query, query, sinks, None, None, None, None)
    got = attention._recalled(*arguments, True, None, (-1, -1), 0.0)(*arguments).transpose(1, 2)
    want = attention.attention(query, query, query, causal=True, sinks=sinks)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


class FakeLibrary:
    """cuBLASLt that counts what is created and destroyed, and offers no algorithm."""

    def __init__(self):
        self.alive = []

    def __getattr__(self, name):
        def call(*arguments):
            if "Create" in name:
                self.alive.append(name.replace("Create", ""))
                if isinstance(target := arguments[0], type(ctypes.byref(ctypes.c_void_p()))):
                    target._obj.value = len(self.alive)
            elif "Destroy" in name:
                self.alive.remove(name.replace("Destroy", ""))
            return 0

        return call


@pytest.fixture
def library(monkeypatch):
    lt, fake = part("linear", "_cublaslt"), FakeLibrary()
    monkeypatch.setattr(lt, "_library", lambda: fake)
    monkeypatch.setattr(lt, "_thread", lt._Thread())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return fake


def test_a_refused_product_gives_its_descriptions_back(library):
    lt = part("linear", "_cublaslt")
    with pytest.raises(lt.Refused):
        lt.Product(8, 64, 64, torch.float16, 64, 64, False)
    assert [name for name in library.alive if name != "cublasLt"] == []


def test_a_thread_that_ends_leaves_no_handle_behind(library):
    """`Thread(target=model.generate)` for every request is how Transformers documents streaming."""
    lt = part("linear", "_cublaslt")
    for _ in range(3):
        thread = threading.Thread(target=lt._handle)
        thread.start()
        thread.join()
    assert library.alive.count("cublasLt") <= 1


# --- when an op may run directly ---


def test_forward_mode_gradients_are_not_dropped_in_silence():
    linear, weight = hub.load("linear").linear, torch.randn(16, 32)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(3, 32), torch.ones(3, 32))
        with pytest.raises(RuntimeError, match="no forward-mode derivative, got a tensor with a tangent"):
            linear(x, weight)


def test_a_traced_layer_is_the_layer():
    """`torch.jit.trace` sees no dispatch mode; on a GPU it would record an empty result, since a launch is no operator.

    On the CPU it is a TypeError in the planning of tiles.
    """
    layer = hf_batchinv.convert(torch.nn.Sequential(torch.nn.Linear(32, 16)).eval())
    with torch.no_grad():
        traced = torch.jit.trace(layer, torch.randn(3, 32), check_trace=False)
        x = torch.randn(3, 32)
        assert torch.equal(traced(x), layer(x))


def test_tracing_does_not_run_directly():
    runs_directly, seen = part("linear", "_dispatch").runs_directly, []

    def function(x):
        seen.append((runs_directly(x), fused.runs_fused(x)))
        return x + 1

    with torch.no_grad():
        torch.jit.trace(function, torch.randn(3), check_trace=False)
    assert not any(direct for direct, _ in seen)
