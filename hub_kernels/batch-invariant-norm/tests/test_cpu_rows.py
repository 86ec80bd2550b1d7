"""The two engines of the CPU path: PyTorch's row kernels where a trial holds, and the tree; and the trial itself."""

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def functions(kernel, columns, dtype):
    weight = torch.linspace(0.5, 2.0, columns).to(dtype)
    return {
        "rms_norm": lambda x: kernel.rms_norm(x, weight, 1e-6),
        "layer_norm": lambda x: kernel.layer_norm(x, (columns,), weight, weight, 1e-5),
        "layer_norm_cast": lambda x: kernel.layer_norm(x, (columns,), weight, weight, 1e-5, cast_before_weight=True),
        "softmax": lambda x: kernel.softmax(x, -1),
        "log_softmax": lambda x: kernel.log_softmax(x, -1),
    }


@pytest.mark.parametrize("engine", ["rows", "tree"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("columns", [5, 576, 4097])
def test_each_engine_gives_a_row_the_same_bits(
    kernel, submodule, assert_same_bits, set_threads, engine, dtype, columns
):
    x = (torch.randn(70, columns, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    exact = torch.softmax(x.double(), -1)
    with submodule("_cpu_rows").force_engine(engine):
        for name, function in functions(kernel, columns, dtype).items():
            set_threads(1)
            alone = torch.cat([function(row) for row in x.split(1)])
            for threads in (1, 2, 3):
                set_threads(threads)
                assert_same_bits(function(x), alone, f"{name}, {threads} threads")
                assert_same_bits(function(x[3:20]), alone[3:20], f"{name}, {threads} threads, 17 rows")
        torch.testing.assert_close(kernel.softmax(x, -1).double(), exact, rtol=1e-2, atol=1e-6)


def test_unknown_engine_is_refused(submodule):
    with pytest.raises(ValueError, match="force_engine: expected name"):
        with submodule("_cpu_rows").force_engine("fast"):
            pass


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_the_trial_notices_a_kernel_whose_order_follows_the_batch(submodule, monkeypatch, dtype):
    """Negative control: another order of summation for a single row, for large batches, and beside some neighbours."""
    rows = submodule("_cpu_rows")
    stock = torch.nn.functional.layer_norm

    def other_order(x, shape, weight, bias, eps):
        wide = x.float()
        wide = wide - wide.flip(-1).cumsum(-1)[..., -1:] / shape[0]
        y = wide / torch.sqrt(wide.square().flip(-1).cumsum(-1)[..., -1:] / shape[0] + eps)
        y = y if weight is None else y * weight.float() + bias.float()
        return y.to(x.dtype)

    assert rows._try(rows._FUNCTIONS["layer_norm"], 576, dtype)
    for differs in (
        lambda x: len(x) == 1,
        lambda x: len(x) > 64,
        lambda x: len(x) == 7,
        lambda x: x.data_ptr() % 64 != 0,
    ):

        def fickle(x, *arguments, differs=differs):
            return other_order(x, *arguments) if differs(x) else stock(x, *arguments)

        monkeypatch.setattr(torch.nn.functional, "layer_norm", fickle)
        assert not rows._try(rows._FUNCTIONS["layer_norm"], 576, dtype)


def test_the_tree_serves_where_the_trial_fails(kernel, submodule, monkeypatch, assert_same_bits):
    x = torch.randn(5, 96)
    for name, function in functions(kernel, 96, torch.float32).items():
        with submodule("_cpu_rows").force_engine("tree"):
            want = function(x)
        with monkeypatch.context() as patch:
            patch.setattr(submodule("_cpu_rows"), "_known", {})
            patch.setattr(submodule("_cpu_rows"), "_try", lambda *_: False)
            assert_same_bits(function(x), want, name)


def test_autocast_does_not_leak_in(kernel, assert_same_bits):
    x = torch.randn(5, 96)
    for name, function in functions(kernel, 96, torch.float32).items():
        want = function(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same_bits(function(x), want, name)
