"""The registered ops: schema, fake tensors, torch.compile, modes and autograd."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def arguments(dtype=torch.float32, rows=5):
    x, weight, bias = torch.randn(rows, 64), torch.randn(24, 64), torch.randn(24)
    x, weight, bias = (t.to(dtype) for t in (x, weight, bias))
    offsets = torch.tensor([1, 4], dtype=torch.int32)
    return {
        "linear": (x, weight, bias),
        "bmm": (x.expand(2, rows, 64), weight.t().expand(2, 64, 24)),
        "grouped_linear": (x, weight.view(2, 12, 64), offsets),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ["linear", "bmm", "grouped_linear"])
def test_opcheck(module, name, dtype):
    torch.library.opcheck(getattr(module(name), f"_{name}_op"), arguments(dtype)[name])


def test_opcheck_without_bias_and_with_leading_dimensions(module):
    x, weight, _ = arguments()["linear"]
    torch.library.opcheck(module("linear")._linear_op, (x.view(1, 5, 64), weight, None))
    torch.library.opcheck(module("linear")._linear_op, (x[0], weight, None))
    torch.library.opcheck(module("linear")._linear_op, (x[:0], weight, None))


@pytest.mark.parametrize("name", ["linear", "bmm", "grouped_linear"])
def test_compiled_has_the_bits_of_eager(kernel, assert_same_bits, name):
    torch._dynamo.reset()
    op = getattr(kernel, name)
    compiled = torch.compile(lambda *args: op(*args) + 0, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9, 33):
        args = arguments(rows=rows)[name]
        assert_same_bits(compiled(*args), op(*args) + 0, f"{rows} rows")


def test_compiled_layers(kernel, assert_same_bits):
    torch._dynamo.reset()
    for layer_class, shape in ((kernel.layers.Linear, (24, 64)), (kernel.layers.Conv1D, (64, 24))):
        layer = layer_class()
        layer.weight, layer.bias = torch.nn.Parameter(torch.randn(shape)), torch.nn.Parameter(torch.randn(24))
        x = torch.randn(3, 64)
        want = layer(x)
        assert_same_bits(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), want, layer_class.__name__)


@pytest.mark.parametrize("name", ["linear", "bmm", "grouped_linear"])
def test_a_dispatch_mode_sees_one_op(kernel, assert_same_bits, name):
    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(function.name())
            return function(*args, **(kwargs or {}))

    op, args = getattr(kernel, name), arguments()[name]
    want = op(*args)
    with Record() as record:
        got = op(*args)
    assert_same_bits(got, want)
    assert len(record.names) == 1 and record.names[0].endswith(f"::{name}")


@pytest.mark.parametrize("name", ["linear", "bmm", "grouped_linear"])
def test_backward_is_refused(kernel, assert_same_bits, name):
    op, args = getattr(kernel, name), arguments()[name]
    want = op(*args)
    with torch.enable_grad():
        args = (args[0].clone().requires_grad_(), *args[1:])
        with torch.no_grad():
            assert_same_bits(op(*args), want)
        y = op(*args)
        assert_same_bits(y.detach(), want)
        with pytest.raises(RuntimeError, match="has no backward"):
            y.sum().backward()
    with torch.inference_mode():
        assert_same_bits(op(*args), want)


def test_trained_weight_can_be_used_without_grad(kernel, assert_same_bits):
    x, weight, bias = arguments()["linear"]
    want = kernel.linear(x, weight, bias)
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    assert_same_bits(kernel.linear(x, weight, bias), want)
    with torch.inference_mode():
        assert_same_bits(kernel.linear(x, weight, bias), want)


def test_public_names(kernel):
    assert kernel.__all__ == ["linear", "bmm", "grouped_linear", "engine_of", "layers"]


def test_contract_functions_do_not_see_the_batch(module):
    """What fixes the order of a sum may know the weight's shape and the dtype, nothing else."""
    contract = module("contract")
    functions = [
        function
        for _, function in inspect.getmembers(contract, inspect.isfunction)
        if function.__module__ == contract.__name__
    ]
    assert functions
    for function in functions:
        assert set(inspect.signature(function).parameters) <= {"n", "k", "dtype", "weight", "experts"}, function


def test_ops_compute_what_the_reference_says(kernel, module):
    reference = module("reference")
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-1)):
        for name, args in arguments(dtype).items():
            got, want = getattr(kernel, name)(*args), getattr(reference, f"{name}_reference")(*args)
            torch.testing.assert_close(got, want, atol=tolerance, rtol=0)
