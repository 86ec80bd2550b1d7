"""Errors against float64 are no larger than those of stock torch, and every variant agrees with its stock formula."""

import pytest
import torch
import torch.nn.functional as F

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Relative size of one unit in the last place.
ULP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Stock and ours may both sit at half a unit from the truth; float32 sums of other orders differ by a little more.
FLOOR = {torch.float32: 2.0, torch.float16: 0.01, torch.bfloat16: 0.01}


def random(shape, dtype, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * 3).to(dtype)


def assert_no_less_accurate(ours, stock, exact, dtype):
    error, stock_error = ((t.double() - exact).abs().max().item() for t in (ours, stock))
    floor = FLOOR[dtype] * ULP[dtype] * exact.abs().max().item()
    assert error <= 1.1 * stock_error + floor, f"our error {error:.3e}, stock {stock_error:.3e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("columns", [5, 128, 1000, 4096, 20000])
def test_error_is_at_most_that_of_stock(kernel, columns, dtype):
    check_errors(kernel, columns, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("columns", [128, 4096, 16385, 151936])
def test_error_is_at_most_that_of_stock_on_gpu(kernel, columns, dtype):
    check_errors(kernel, columns, dtype, "cuda")


def check_errors(kernel, columns, dtype, device):
    x = random((6, columns), dtype, device)
    weight, bias = random((columns,), dtype, device, 1), random((columns,), dtype, device, 2)
    d, shape = x.double(), (columns,)
    xhat = d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + 1e-6)
    pairs = [
        (
            kernel.rms_norm(x, weight, 1e-6, cast_before_weight=False),
            (weight.float() * x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype),
            xhat * weight.double(),
        ),
        (
            kernel.layer_norm(x, shape, weight, bias, 1e-5),
            F.layer_norm(x, shape, weight, bias, 1e-5),
            F.layer_norm(d, shape, weight.double(), bias.double(), 1e-5),
        ),
        (kernel.softmax(x, -1), torch.softmax(x, -1), torch.softmax(d, -1)),
        (kernel.log_softmax(x, -1), torch.log_softmax(x, -1), torch.log_softmax(d, -1)),
        (kernel.mean(x.abs(), -1), x.abs().mean(-1), d.abs().mean(-1)),
        (kernel.sum(x.abs() / 64, -1), (x.abs() / 64).sum(-1), (x.abs() / 64).double().sum(-1)),
    ]
    for ours, stock, exact in pairs:
        assert ours.dtype == stock.dtype == dtype
        assert_no_less_accurate(ours, stock, exact, dtype)


def test_mean_far_from_zero_does_not_spoil_layer_norm(kernel):
    x = random((4, 20001), torch.float32) + 1000
    ours = kernel.layer_norm(x, (20001,), None, None, 1e-5)
    exact = F.layer_norm(x.double(), (20001,), eps=1e-5)
    # x deviates by 3 from its mean of 1000, which float32 holds to half a unit; allow for a whole one.
    assert (ours.double() - exact).abs().max() <= ULP[torch.float32] * 1000 / 3


def assert_within_ulps(got, want, ulps, coarsest=torch.float32, absolute=False):
    """Equal dtypes, and differences of at most `ulps` units in the last place of the coarser of got and `coarsest`.

    `absolute`: units of the largest element, for results of a cancellation.
    """
    assert got.dtype == want.dtype and got.shape == want.shape
    size = want.double().abs()
    unit = max(ULP[got.dtype], ULP[coarsest]) * (size.max() if absolute else size) + torch.finfo(got.dtype).tiny
    worst = ((got.double() - want.double()).abs() / unit).max().item()
    assert worst <= ulps, f"{worst:.1f} units in the last place"


DTYPE_PAIRS = [(x, w) for x in DTYPES for w in DTYPES]


ACTIVATIONS = ("silu", "swish", "sigmoid", "relu")


@pytest.mark.kernels_ci
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=lambda p: f"x-{str(p[0])[6:]}-weight-{str(p[1])[6:]}")
def test_every_variant_agrees_with_its_stock_formula(kernel, dtypes):
    check_variants(kernel, *dtypes, "cpu", None, ACTIVATIONS)
    check_variants(kernel, *dtypes, "cpu", 24, ACTIVATIONS)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_every_variant_agrees_with_its_stock_formula_on_gpu(kernel, weight_dtype):
    check_variants(kernel, torch.bfloat16, weight_dtype, "cuda", 24, ("silu", "sigmoid"))


def check_variants(kernel, dtype, weight_dtype, device, group_size, activations):
    x, gate = random((40, 96), dtype, device), random((40, 96), dtype, device, 1)
    weight = random((96,), weight_dtype, device, 2)
    coarsest = max(dtype, weight_dtype, key=ULP.get)  # a last bit that tips the rounding of xhat shows in this dtype
    for variant in kernel.variants():
        got = variant(x, weight if variant.weighted else None, 1e-6, group_size)
        assert_within_ulps(got, variant.stock(x, weight, 1e-6, group_size), 4, coarsest)
    for variant in kernel.gated_variants():
        for activation in activations:
            got = variant(x, gate, weight, 1e-6, group_size, activation)
            assert_within_ulps(got, variant.stock(x, gate, weight, 1e-6, group_size, activation), 8, coarsest)
    if dtype != weight_dtype:
        return  # torch's layer_norm takes one dtype
    for variant in kernel.layer_norm_variants():
        for parameter in (weight, None):
            got, want = variant(x, parameter, parameter, 1e-5), variant.stock(x, parameter, parameter, 1e-5)
            assert_within_ulps(got, want, 4, absolute=True)


def test_variants_are_told_apart_by_their_stock_formulas(kernel, count_different_bits):
    """With 16-bit x and both kinds of weight, variants with other options give other bits."""
    x = random((40, 96), torch.bfloat16)
    weights = random((96,), torch.bfloat16, seed=1), random((96,), torch.float32, seed=1)
    for weighted in (True, False):
        group = [v for v in kernel.variants() if v.weighted == weighted and v.name != "torch"]
        for first in group:
            for second in group:
                if first.options != second.options:
                    a, b = ([v.stock(x, w, 1e-6) for w in weights] for v in (first, second))
                    same = all(p.dtype == q.dtype and not count_different_bits(p, q) for p, q in zip(a, b, strict=True))
                    assert not same, (first.name, second.name)


@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=lambda d: str(d)[6:] or "none")
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "sum", "mean"])
def test_dtype_argument_is_that_of_torch(kernel, function, dtype):
    for x_dtype in DTYPES:
        x = random((3, 50), x_dtype)
        got = getattr(kernel, function)(x, -1, dtype=dtype)
        assert_within_ulps(got, getattr(torch, function)(x, -1, dtype=dtype), 4, absolute=True)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 2), (2, 0), (-1, 1), (0, 1, 2), ()], ids=str)
def test_shapes_are_those_of_torch(kernel, dim, keepdim):
    x = random((3, 4, 5), torch.float32)
    for name in ("sum", "mean"):
        got, want = getattr(kernel, name)(x, dim, keepdim), getattr(torch, name)(x, dim, keepdim)
        assert got.shape == want.shape and torch.allclose(got, want, atol=1e-5)


def test_scalars_and_empty_tensors_are_those_of_torch(kernel):
    scalar = torch.tensor(2.5)
    for name in ("softmax", "log_softmax"):
        assert torch.equal(getattr(kernel, name)(scalar, 0), getattr(torch, name)(scalar, 0))
        for shape in ((0, 4), (4, 0)):
            assert getattr(kernel, name)(torch.empty(shape), -1).shape == shape
    for name in ("sum", "mean"):
        assert torch.equal(getattr(kernel, name)(scalar), scalar)
        for shape in ((0, 4), (4, 0)):
            got, want = getattr(kernel, name)(torch.empty(shape), -1), getattr(torch, name)(torch.empty(shape), -1)
            assert got.shape == want.shape and torch.equal(got.isnan(), want.isnan())
    empty = torch.empty(0, 3, 8)
    assert kernel.rms_norm(empty, torch.ones(8), 1e-6).shape == empty.shape
    assert kernel.rms_norm_gated(empty, empty, torch.ones(8), 1e-6).shape == empty.shape
    assert kernel.layer_norm(empty, (8,), None, None, 1e-5).shape == empty.shape
    assert kernel.rms_norm(torch.empty(3, 0), torch.ones(0), 1e-6).shape == (3, 0)


def test_sums_of_integers_are_left_to_torch(kernel):
    x = torch.arange(2**40, 2**40 + 12).view(3, 4)
    assert torch.equal(kernel.sum(x, 1), x.sum(1)) and kernel.sum(x).dtype is torch.int64
    mask = torch.tensor([[True, False, True]])
    assert torch.equal(kernel.sum(mask, -1), mask.sum(-1)) and kernel.sum(mask, -1).dtype is torch.int64
    assert kernel.sum(mask, -1, dtype=torch.float32).item() == 2.0


def test_masked_softmax_row_is_nan_as_in_torch(kernel):
    x = torch.full((2, 40), float("-inf"))
    x[1, :3] = 1.0
    got = kernel.softmax(x, -1)
    assert got[0].isnan().all() and torch.equal(got[1, 3:], torch.zeros(37)) and not got[1].isnan().any()


def test_layers_run_on_the_attributes_they_name(kernel):
    """What a conversion does: put the layer's forward on a module that has weight, eps and so on."""
    x = random((3, 24), torch.bfloat16)
    module = torch.nn.Module()
    module.weight, module.bias = random((24,), torch.bfloat16, seed=1), None
    module.variance_epsilon = module.eps = 1e-6
    module.normalized_shape, module.group_size = (24,), 12
    arguments = {"RMSNormGated": (x, x), "RMSNormGatedGrouped": (x, x)}
    names = [n for n, c in vars(kernel.layers).items() if isinstance(c, type) and issubclass(c, torch.nn.Module)]
    assert len(names) == 8
    for name in names:
        layer = getattr(kernel.layers, name)
        assert layer.forward(module, *arguments.get(name, (x,))).shape == x.shape
        assert set(vars(layer)) - {"__module__", "__doc__", "__annotations__", "__static_attributes__"} <= {
            "forward",
            "can_torch_compile",
            "has_backward",
            "__firstlineno__",
            "__annotate_func__",
            "__annotations_cache__",
        }
