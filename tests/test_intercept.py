"""batch_invariant_mode: a row computed alone has the bits of the row in a batch, inside the block and only there."""

import threading

import pytest
import torch
import torch.nn.functional as F

from hf_batchinv.intercept import batch_invariant_mode
from hf_batchinv.testing import assert_same_bits, bits

CPU_AND_GPU = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS, K, N = 24, 136, 72

on_each_device = pytest.mark.parametrize("device", CPU_AND_GPU)
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def filled(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _layer_norm(x, y, v):
    return F.layer_norm(x, (K,), v[:K], v[:K])


def _attention(x, y, v, **kwargs):
    """Every row of x is one sequence of 8 queries of 16 dimensions, minus what is left."""
    states = x[..., :128].reshape(-1, 1, 8, 16).expand(-1, 2, -1, -1)
    return F.scaled_dot_product_attention(states, states, states, **kwargs)


def _multi_head_attention(x, y, v):
    sequences = x[..., :128].reshape(-1, 8, 16)
    layer = torch.nn.MultiheadAttention(16, 1, batch_first=True).eval()
    torch.nn.init.constant_(layer.in_proj_bias, 0.3)
    weights = filled(48, 16, dtype=x.dtype, device=x.device, seed=5) * 0.2
    layer = layer.to(x)
    layer.in_proj_weight.copy_(weights)
    layer.out_proj.weight.copy_(weights[:16])
    return layer(sequences, sequences, sequences, need_weights=False)[0]


# name: function of x (R, K), y (K, N), v (N * K,) whose result has one entry per row of x
ROWWISE = {
    "mm": lambda x, y, v: torch.mm(x, y),
    "matmul": lambda x, y, v: x @ y,
    "matmul 3-D": lambda x, y, v: x.unsqueeze(1) @ y,
    "matmul broadcast": lambda x, y, v: x[:, None, None, :] @ y.expand(3, K, N),
    "matmul vector": lambda x, y, v: x @ v[:K],
    "mv": lambda x, y, v: torch.mv(x, v[:K]),
    "addmv": lambda x, y, v: torch.addmv(x[:, 0], x, v[:K], beta=0.5, alpha=2.0),
    "addmm bias": lambda x, y, v: torch.addmm(v[:N], x, y),
    "addmm": lambda x, y, v: torch.addmm(x[:, :N], x, y, beta=0.5, alpha=-2.0),
    "bmm": lambda x, y, v: torch.bmm(x.unsqueeze(0).expand(2, -1, -1), y.expand(2, K, N))[1],
    "bmm batch": lambda x, y, v: torch.bmm(x.unsqueeze(1).expand(-1, 5, -1), y.expand(len(x), K, N)),
    "baddbmm": lambda x, y, v: torch.baddbmm(x[:, None, :N], x.unsqueeze(1), y.expand(len(x), K, N), alpha=0.5),
    "linear": lambda x, y, v: F.linear(x, y.t(), v[:N]),
    "linear without bias": lambda x, y, v: F.linear(x, y.t().contiguous()),
    "linear 3-D, strided": lambda x, y, v: F.linear(x.expand(3, -1, -1).transpose(0, 1), y.t(), v[:N]),
    "einsum": lambda x, y, v: torch.einsum("bk,kn->bn", x, y),
    "einsum, weight first": lambda x, y, v: torch.einsum("kn,bk->bn", y, x),
    "einsum, sublists": lambda x, y, v: torch.einsum(x, [0, 1], y, [1, 2], v[:N], [2]),
    "einsum of three": lambda x, y, v: torch.einsum("bk,kn,n->b", x, y, v[:N]),
    "softmax": lambda x, y, v: torch.softmax(x, -1),
    "log_softmax": lambda x, y, v: F.log_softmax(x, dim=1),
    "softmax to float32": lambda x, y, v: torch.softmax(x, -1, dtype=torch.float32),
    "mean": lambda x, y, v: x.mean(-1),
    "mean of a middle dimension": lambda x, y, v: x.reshape(-1, 17, 8).mean(1, keepdim=True),
    "sum": lambda x, y, v: x.sum(-1, keepdim=True),
    "sum in float32": lambda x, y, v: x.sum((1,), dtype=torch.float32),
    "layer_norm": _layer_norm,
    "rms_norm": lambda x, y, v: F.rms_norm(x, (K,), v[:K], 1e-6),
    "rms_norm, default eps": lambda x, y, v: F.rms_norm(x, (K,)),
    "sdpa": _attention,
    "sdpa causal": lambda x, y, v: _attention(x, y, v, is_causal=True),
    "multi-head attention": _multi_head_attention,
}
# What stock torch computes differently for a row alone in float32, whatever the device.
STOCK_FAILS = ["mm", "matmul", "addmm bias", "linear", "einsum"]


def operands(dtype, device):
    x = filled(ROWS, K, dtype=dtype, device=device)
    return x, filled(K, N, dtype=dtype, device=device, seed=1), filled(N * K, dtype=dtype, device=device, seed=2)


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("name", list(ROWWISE))
@torch.no_grad()
def test_row_has_the_same_bits_in_any_batch(name, dtype, device):
    x, y, v = operands(dtype, device)
    function = ROWWISE[name]
    with batch_invariant_mode():
        batch = function(x, y, v)
        for begin, end in ((0, 1), (5, 6), (3, 10)):
            assert_same_bits(function(x[begin:end], y, v), batch[begin:end])
    stock = function(x, y, v)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(batch, stock, atol=tolerance, rtol=tolerance)


@on_each_device
@in_each_dtype
@torch.no_grad()
def test_modes_of_execution_agree(dtype, device):
    """Inference tensors skip autograd, so composite operators arrive whole; the bits must not depend on that."""
    x, y, v = operands(dtype, device)
    for name, function in ROWWISE.items():
        if name == "multi-head attention":  # changes its weights in place
            continue
        with batch_invariant_mode():
            plain = function(x, y, v)
            with torch.inference_mode():
                inference = function(*(part.clone() for part in (x, y, v)))
        assert_same_bits(inference.clone(), plain)


@on_each_device
@pytest.mark.parametrize("name", STOCK_FAILS)
def test_stock_torch_fails_the_same_comparison(name, device):
    x, y, v = filled(64, 1000, device=device), filled(1000, 96, device=device, seed=1), filled(96, device=device)
    functions = dict(ROWWISE, **{"addmm bias": lambda x, y, v: torch.addmm(v, x, y)})
    functions["linear"] = lambda x, y, v: F.linear(x, y.t(), v)
    batch = functions[name](x, y, v)[:8]
    alone = torch.cat([functions[name](x[i : i + 1], y, v) for i in range(8)])
    assert not torch.equal(bits(alone), bits(batch))
    with batch_invariant_mode():
        batch = functions[name](x, y, v)[:8]
        assert_same_bits(torch.cat([functions[name](x[i : i + 1], y, v) for i in range(8)]), batch)


# --- semantics ---


@torch.no_grad()
def test_addmm_with_beta_zero_ignores_the_addend():
    x, y, _ = operands(torch.float32, "cpu")
    nan = torch.full((ROWS, N), float("nan"))
    with batch_invariant_mode():
        assert_same_bits(torch.addmm(nan, x, y, beta=0), x @ y)
        assert_same_bits(torch.baddbmm(nan[None], x[None], y[None], beta=0)[0], x @ y)
        assert_same_bits(torch.addmm(nan, x, y, beta=0, alpha=2), (x @ y) * 2)


@torch.no_grad()
def test_one_dimensional_products():
    x, y, v = operands(torch.float32, "cpu")
    with batch_invariant_mode():
        want = (x @ y)[0, 0]
        for got in (torch.dot(x[0], y[:, 0]), x[0] @ y[:, 0], torch.inner(x[0], y[:, 0]), torch.vdot(x[0], y[:, 0])):
            assert_same_bits(got, want)
        assert_same_bits(v[:K] @ y, (v[None, :K] @ y)[0])
        column = F.linear(x, y.t()[:1], torch.tensor([0.5]))[:, 0]
        assert_same_bits(F.linear(x, y[:, 0].contiguous(), torch.tensor(0.5)), column)


@torch.no_grad()
def test_empty_operands():
    with batch_invariant_mode():
        assert torch.mm(torch.ones(3, 0), torch.ones(0, 2)).tolist() == [[0.0, 0.0]] * 3
        assert torch.mm(torch.ones(0, 3), torch.ones(3, 2)).shape == (0, 2)
        assert F.linear(torch.ones(0, 3), torch.ones(2, 3), torch.ones(2)).shape == (0, 2)
        assert torch.addmm(torch.ones(2), torch.ones(3, 0), torch.ones(0, 2)).tolist() == [[1.0, 1.0]] * 3
        assert torch.ones(0).sum() == 0 and torch.softmax(torch.ones(0, 3), -1).shape == (0, 3)


@torch.no_grad()
def test_out_and_in_place_forms():
    x, y, v = operands(torch.float32, "cpu")
    with batch_invariant_mode():
        out = torch.empty(ROWS, N)
        assert torch.mm(x, y, out=out) is out
        assert_same_bits(out, x @ y)
        sums = torch.empty(ROWS)
        torch.sum(x, 1, out=sums)
        assert_same_bits(sums, x.sum(1))
        probabilities = torch.empty(ROWS, K)
        torch.softmax(x, -1, out=probabilities)
        assert_same_bits(probabilities, torch.softmax(x, -1))
        for name, call in {"matmul": (x, y), "addmm": (v[:N], x, y), "mv": (x, v[:K]), "log_softmax": (x, 1)}.items():
            function = getattr(torch, name)
            want = function(*call)
            assert_same_bits(function(*call, out=torch.empty_like(want)), want)
        added = x[:, :N].clone()
        assert added.addmm_(x, y) is added
        assert_same_bits(added, torch.addmm(x[:, :N], x, y))
        with pytest.raises(ValueError, match="torch.mm: out must have shape"):
            torch.mm(x, y, out=torch.empty(1))


@torch.no_grad()
def test_integers_are_left_alone():
    numbers = torch.arange(12).reshape(3, 4)
    with batch_invariant_mode():
        assert torch.equal(numbers @ numbers.t(), torch.tensor([[14, 38, 62], [38, 126, 214], [62, 214, 366]]))
        assert numbers.sum() == 66 and (numbers > 3).sum(1).tolist() == [0, 4, 4]
        assert numbers.cumsum(1)[0].tolist() == [0, 1, 3, 6]
        assert numbers.sum(1, dtype=torch.float32).tolist() == [6.0, 22.0, 38.0]


@torch.no_grad()
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_attention_masks_and_shapes(lead):
    query, key = filled(*lead, 4, 5, 16), filled(*lead, 4, 9, 16, seed=1)
    value = filled(*lead, 4, 9, 24, seed=2)
    visible = torch.rand(*lead[-1:], 1, 5, 9, generator=torch.Generator().manual_seed(3)) > 0.4
    visible[..., 0] = True
    added = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    for call in (
        {},
        {"is_causal": True},
        {"attn_mask": visible},
        {"attn_mask": added},
        {"attn_mask": torch.randn(5, 9)},
        {"attn_mask": visible[..., :1, :], "scale": 0.3},
    ):
        with batch_invariant_mode():
            got = F.scaled_dot_product_attention(query, key, value, **call)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(query, key, value, **call), atol=1e-5, rtol=1e-5)
    if not lead:
        return
    with batch_invariant_mode():
        few = F.scaled_dot_product_attention(query, key[..., :2, :, :], value[..., :2, :, :], enable_gqa=True)
    many = (part[..., [0, 0, 1, 1], :, :] for part in (key, value))
    torch.testing.assert_close(few, F.scaled_dot_product_attention(query, *many), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_attention_without_a_head_dimension():
    query, key = filled(3, 5, 16), filled(3, 9, 16, seed=1)
    mask = torch.rand(3, 5, 9) > 0.3
    for q, k, m in ((query, key, mask), (query[0], key[0], mask[0])):
        with batch_invariant_mode():
            got = F.scaled_dot_product_attention(q, k, k, m)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, k, m), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_left_padded_attention_row_has_the_bits_of_the_row_alone():
    long = [filled(1, 2, 100, 16, seed=seed) for seed in range(3)]
    states = [F.pad(part, (0, 0, 30, 0), value=5.0) for part in long]
    visible = (torch.ones(130, 130, dtype=torch.bool).tril() & (torch.arange(130) >= 30))[None, None]
    with batch_invariant_mode():
        padded = F.scaled_dot_product_attention(*states, visible)
        assert_same_bits(padded[:, :, 30:], F.scaled_dot_product_attention(*long, is_causal=True))
    stock = F.scaled_dot_product_attention(*states, visible)
    assert not torch.equal(stock[:, :, 30:], F.scaled_dot_product_attention(*long, is_causal=True))


@torch.no_grad()
def test_autocast_casts_as_usual():
    x, y, v = operands(torch.float32, "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16), batch_invariant_mode():
        got = F.linear(x, y.t(), v[:N])
        assert_same_bits(got, torch.addmm(v[:N], x, y))
        states = x[:, :128].reshape(-1, 2, 4, 16)
        assert F.scaled_dot_product_attention(states, states, states).dtype == torch.bfloat16
    with batch_invariant_mode():
        assert_same_bits(got, F.linear(x.bfloat16(), y.t().bfloat16(), v[:N].bfloat16()))


def test_matrix_products_stay_differentiable_and_the_rest_refuses_backward():
    x, y, v = operands(torch.float32, "cpu")
    with batch_invariant_mode():
        weight = y.clone().requires_grad_()
        torch.mm(x, weight).sum().backward()
        torch.testing.assert_close(weight.grad, x.sum(0)[:, None].expand(-1, N), atol=1e-4, rtol=1e-4)
        with pytest.raises(RuntimeError):
            F.linear(x, weight.t()).sum().backward()


def test_layer_norm_statistics_for_autograd():
    x, _, v = operands(torch.float32, "cpu")
    with batch_invariant_mode():
        got = torch.native_layer_norm(x, (K,), v[:K], v[:K], 1e-5)
    for ours, stock in zip(got, torch.native_layer_norm(x, (K,), v[:K], v[:K], 1e-5), strict=True):
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)


# --- refusals ---

DOUBLE = torch.ones(2, 2, dtype=torch.float64)
REFUSED = {
    "float64": (lambda: DOUBLE @ DOUBLE, ValueError, "covers torch.mm in float32, float16 and bfloat16, got float64"),
    "float64 sum": (lambda: DOUBLE.sum(), ValueError, "got float64"),
    "sum in float64": (lambda: torch.ones(2).sum(dtype=torch.float64), ValueError, "got float64"),
    "complex": (lambda: torch.ones(2, 2, dtype=torch.complex64).sum(), ValueError, "got complex64"),
    "sparse": (lambda: torch.eye(2).to_sparse() @ torch.eye(2), ValueError, "for dense tensors, got a sparse_coo one"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8).mean(),
        ValueError,
        "got a quantised one",
    ),
    "dropout": (
        lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 16)] * 3, dropout_p=0.1),
        ValueError,
        "without dropout, got dropout_p=0.1",
    ),
    "mask and is_causal": (
        lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 16)] * 3, torch.ones(4, 4) > 0, is_causal=True),
        ValueError,
        "got both; pass one",
    ),
    "heads": (
        lambda: F.scaled_dot_product_attention(torch.ones(1, 4, 2, 16), *[torch.ones(1, 2, 2, 16)] * 2),
        ValueError,
        "pass enable_gqa=True",
    ),
    "conv2d": (lambda: F.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)), ValueError, "torch.convolution"),
    "var": (lambda: torch.ones(3).var(), ValueError, "no batch-invariant form of torch.var"),
    "norm": (lambda: F.normalize(torch.ones(3, 3)), ValueError, "torch.linalg_vector_norm"),
    "cumsum": (lambda: torch.ones(3).cumsum(0), ValueError, "torch.cumsum"),
    "logsumexp": (lambda: torch.ones(3).logsumexp(0), ValueError, "torch.logsumexp"),
    "index_add_": (
        lambda: torch.zeros(3).index_add_(0, torch.tensor([0, 0]), torch.ones(2)),
        ValueError,
        "torch.index_add",
    ),
    "group_norm": (lambda: F.group_norm(torch.ones(1, 4, 2), 2), ValueError, "torch.native_group_norm"),
    "rms_norm shape": (lambda: F.rms_norm(torch.ones(2, 3), (2,)), ValueError, "must be the last dimensions"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", list(REFUSED))
@torch.no_grad()
def test_what_is_not_covered_is_refused_in_a_sentence(name):
    function, error, message = REFUSED[name]
    with batch_invariant_mode(), pytest.raises(error, match=message):
        function()
    if name not in ("mask and is_causal", "heads", "rms_norm shape"):
        function()  # nothing is refused outside


# --- the block and nothing but the block ---


def _reference_and_inside():
    """Operands, stock's result, and ours, which differs from it."""
    x, y = filled(64, 1000), filled(1000, 96, seed=1)
    stock = x @ y
    with batch_invariant_mode():
        ours = x @ y
    assert not torch.equal(bits(ours), bits(stock))
    return x, y, stock, ours


def test_outside_the_block_stock_bits_are_unchanged_also_after_an_error():
    x, y, stock, _ = _reference_and_inside()
    assert_same_bits(x @ y, stock)
    with pytest.raises(KeyError), batch_invariant_mode():
        raise KeyError
    with pytest.raises(ValueError), batch_invariant_mode():
        torch.ones(3).var()
    assert_same_bits(x @ y, stock)


def test_blocks_nest():
    x, y, stock, ours = _reference_and_inside()
    with batch_invariant_mode():
        with batch_invariant_mode():
            assert_same_bits(x @ y, ours)
            assert_same_bits(F.linear(x, y.t()), F.linear(x, y.t()))
        assert_same_bits(x @ y, ours)
        with pytest.raises(KeyError), batch_invariant_mode():
            raise KeyError
        assert_same_bits(x @ y, ours)
    assert_same_bits(x @ y, stock)


def test_other_threads_are_not_affected():
    x, y, stock, ours = _reference_and_inside()
    entered, checked = threading.Event(), threading.Event()
    results = {}

    def inside():
        with batch_invariant_mode():
            entered.set()
            checked.wait(timeout=30)
            results["inside"] = x @ y

    def outside():
        entered.wait(timeout=30)
        results["outside"] = x @ y
        checked.set()

    threads = [threading.Thread(target=target) for target in (inside, outside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same_bits(results["inside"], ours)
    # A new thread may use other kernels than this one; what counts is that it did not use ours.
    assert_same_bits(results["outside"], stock)


def test_edge_shapes_and_defaults_mean_what_they_mean_in_torch():
    x = torch.tensor([[0.01]], dtype=torch.bfloat16)
    addend, ones = torch.tensor(1.0), torch.ones(2, 3)
    query, key = torch.ones(1, 2, 3, 16), torch.ones(1, 2, 5, 16)
    with batch_invariant_mode():
        norm = F.rms_norm(x, (1,))
        sums = torch.addmm(addend, ones, torch.ones(3, 1))
        no_query = F.scaled_dot_product_attention(query[:, :, :0], key, key)
        no_key = F.scaled_dot_product_attention(query, key[:, :, :0], key[:, :, :0])
    torch.testing.assert_close(norm, F.rms_norm(x, (1,)))
    assert torch.equal(sums, torch.full((2, 1), 4.0))
    assert no_query.shape == (1, 2, 0, 16)
    assert no_key.shape == query.shape and not no_key.any()
