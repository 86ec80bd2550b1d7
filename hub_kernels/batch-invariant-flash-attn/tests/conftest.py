"""Loading of the kernel package, one sequence in many layouts, bitwise comparison, and the rule for GPU tests."""

import importlib
import math
import os
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

REPO_ID = "hf-batchinv/batch-invariant-flash-attn"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pytest_collection_modifyitems(items):
    if HAS_CUDA:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def kernel():
    """The kernel package: the build that LOCAL_KERNELS names, or the sources."""
    if REPO_ID in os.environ.get("LOCAL_KERNELS", ""):
        from kernels import get_kernel

        return get_kernel(REPO_ID, version=1)
    from hf_batchinv import hub

    return hub.load("flash-attn")


@pytest.fixture(scope="session")
def module(kernel):
    """Give a private module of the package by name: module("_cpu_products")."""
    return lambda name: importlib.import_module(f"{kernel.__name__}.{name}")


def _exact_masked_attention(query, key, value, call, query_offset, key_mask=None, origin=None, mask=None):
    """float64, (B, Hq, Q, D) -> (B, Q, Hq, Dv)."""
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    query, key, value = query.double(), *(t.double().repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
    score = query @ key.mT * call["scale"]
    if call["softcap"]:
        score = call["softcap"] * torch.tanh(score / call["softcap"])
    position = (query_offset[:, None] + torch.arange(q_len))[:, None, :, None]
    j = torch.arange(kv_len)
    visible = torch.ones(batch, 1, q_len, kv_len, dtype=torch.bool)
    if call["causal"]:
        visible &= j <= position
    if call["window_left"] >= 0:
        visible &= j >= position - call["window_left"]
    if call["window_right"] >= 0:
        visible &= j <= position + call["window_right"]
    if key_mask is not None:
        visible &= key_mask[:, None, None]
    if origin is not None:
        visible &= (j >= origin[:, None])[:, None, None]
    if mask is not None:
        visible = visible & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
        score = score if mask.dtype == torch.bool else score + mask
    score = score.masked_fill(~visible, -math.inf)
    if call["sinks"] is not None:
        column = call["sinks"].double()[None, :, None, None].expand(batch, heads, q_len, 1)
        return (torch.cat([score, column], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)
    return (score.softmax(-1).nan_to_num(0) @ value).transpose(1, 2)


@pytest.fixture(scope="session")
def exact_masked_attention():
    """Attention in float64, with the settings of a `call` of `launch_attention`."""
    return _exact_masked_attention


@pytest.fixture(autouse=True)
def _one_thread():
    """Small problems gain nothing from threads; tests about threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _differing(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, got.dtype, want.shape, want.dtype)
    integers = _INTEGERS[got.element_size()]
    return (got.contiguous().view(integers) != want.contiguous().view(integers)).flatten().nonzero().flatten()


@pytest.fixture(scope="session")
def count_differing_bits():
    """Number of elements whose bit patterns differ."""
    return lambda got, want: len(_differing(got, want))


@pytest.fixture(scope="session")
def assert_same_bits():
    """Unlike torch.equal this tells 0.0 from -0.0."""

    def check(got, want, what=""):
        differing = _differing(got, want)
        if len(differing):
            i = int(differing[0])
            raise AssertionError(
                f"{what}: {len(differing)} of {got.numel()} values differ, first at flat index {i}: "
                f"{got.flatten()[i].item()!r} != {want.flatten()[i].item()!r}"
            )

    return check


@dataclass(frozen=True)
class Heads:
    """The shape of the heads; sequences and batches come on top."""

    query: int = 4
    kv: int = 2
    dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


@dataclass
class Sequence:
    """query (Hq, T, D), key (Hkv, T, D), value (Hkv, T, Dv) of one sequence, and how to attend."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: dict = field(default_factory=lambda: {"causal": True})

    def __len__(self):
        return self.query.shape[1]

    def alone(self, kernel):
        """(Hq, T, Dv): the whole sequence at once, nothing else in the batch."""
        return kernel.attention(self.query[None], self.key[None], self.value[None], **self.options)[0]

    def chunk(self, kernel, first, last, *, left=0, tail=0, mates=0, place=0, cropped=0, seed=0):
        """(Hq, last - first, Dv): the queries first ... last - 1, with the keys before `last` in a cache.

        left: places in front of the first key; tail: places behind the last one. mates: other rows of the batch, with
        other origins; place: which row is ours. cropped: keys that the cache has forgotten (a window must hide them).
        """
        assert not (left and cropped), "places in front of a cropped cache would count as keys"
        generator = torch.Generator(self.query.device).manual_seed(seed)

        def noise(like, *shape):
            return torch.randn(*shape, generator=generator, device=like.device).to(like.dtype)

        batch, place = mates + 1, place % (mates + 1)
        kv_len = left + last - cropped + tail
        query = noise(self.query, batch, self.query.shape[0], last - first, self.query.shape[2])
        key = 3 * noise(self.key, batch, self.key.shape[0], kv_len, self.key.shape[2])
        value = 100 * noise(self.value, batch, self.value.shape[0], kv_len, self.value.shape[2])
        query[place] = self.query[:, first:last]
        key[place, :, left : left + last - cropped] = self.key[:, cropped:last]
        value[place, :, left : left + last - cropped] = self.value[:, cropped:last]
        key[place, :, :left] = value[place, :, :left] = float("nan")  # never read as numbers
        origin = torch.randint(0, max(1, kv_len // 2), (batch,), generator=generator, device=query.device)
        offset = torch.randint(0, kv_len + 1, (batch,), generator=generator, device=query.device)
        origin[place], offset[place] = left - cropped, left + first - cropped
        out = kernel.attention(query, key, value, origin=origin, query_offset=offset.int(), **self.options)
        return out[place]


@pytest.fixture(scope="session")
def make_sequence():
    def make(length, heads=None, seed=0, **options):
        heads = heads or Heads()
        generator = torch.Generator(heads.device).manual_seed(seed)
        shapes = ((heads.query, heads.dim), (heads.kv, heads.dim), (heads.kv, heads.value_dim))
        tensors = (torch.randn(h, length, d, generator=generator, device=heads.device) for h, d in shapes)
        return Sequence(*(tensor.to(heads.dtype) for tensor in tensors), {"causal": True, **options})

    return make


@pytest.fixture(scope="session")
def heads():
    """The class Heads."""
    return Heads


@pytest.fixture(scope="session")
def exact_attention():
    """float64 attention for arguments without padding: what accuracy is measured against."""

    def exact(query, key, value, *, causal, scale=None, window=(-1, -1), softcap=0.0, sinks=None):
        group = query.shape[1] // key.shape[1]
        query, key, value = query.double(), key.double(), value.double()
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        score = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        i = torch.arange(query.shape[2], device=query.device)[:, None] + key.shape[2] - query.shape[2]
        j = torch.arange(key.shape[2], device=query.device)
        seen = (j <= i) if causal else (j == j) & (i == i)
        if window[0] >= 0:
            seen = seen & (j >= i - window[0])
        if window[1] >= 0:
            seen = seen & (j <= i + window[1])
        score = score.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.double().view(1, -1, 1, 1).expand(*score.shape[:3], 1)
            return torch.cat([score, column], -1).softmax(-1)[..., :-1] @ value
        return score.softmax(-1).nan_to_num(0.0) @ value

    return exact


@pytest.fixture(scope="session")
def stock_attention():
    """Stock SDPA with grouped heads, causal from the bottom right."""

    def stock(query, key, value):
        i = torch.arange(query.shape[2], device=query.device)[:, None] + key.shape[2] - query.shape[2]
        mask = None if query.shape[2] == 1 else torch.arange(key.shape[2], device=query.device) <= i
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    return stock
