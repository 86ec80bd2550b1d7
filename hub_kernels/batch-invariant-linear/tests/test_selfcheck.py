"""Verdicts of self-checks: kept over processes, robust against what may lie in their place; engines and plans."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

KEYS = {"name", "status", "detail"}
STATES = {"verified", "passed", "failed", "not run"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def verdicts(module, monkeypatch, tmp_path):
    """The verdicts of a process that has asked nothing yet, with a cache of its own."""
    monkeypatch.setenv("HF_BATCHINV_CACHE", str(tmp_path / "cache"))
    loaded = module("_verdicts")
    loaded._known.cache_clear()
    yield loaded
    loaded._known.cache_clear()


def in_a_new_process(verdicts, code):
    """What `code` prints in a fresh process, with `verdicts` at hand."""
    load = (
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('verdicts', {verdicts.__file__!r})\n"
        "verdicts = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(verdicts)\n"
    )
    done = subprocess.run([sys.executable, "-c", load + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_verdict_survives_the_process(verdicts):
    assert verdicts.get("a") is None
    verdicts.put("a", True, "all agree")
    verdicts.put("b", False, "one differs")
    assert (verdicts.get("a"), verdicts.get("b"), verdicts.get("c")) == (True, False, None)
    code = "print(verdicts.get('a'), verdicts.get('b'), verdicts.get('c'), *verdicts.matching('b'))"
    assert in_a_new_process(verdicts, code) == ["True", "False", "None", "b"]


def test_two_processes_keep_each_others_verdicts(verdicts):
    assert verdicts.get("mine") is None  # from here on this process has read the file
    in_a_new_process(verdicts, "verdicts.put('theirs', True, '')")
    verdicts.put("mine", True, "")
    assert set(json.loads(verdicts.cache_path().read_text())) == {"mine", "theirs"}
    assert [path.name for path in verdicts.cache_path().parent.iterdir()] == ["selfcheck.json"]  # nothing left over


@pytest.mark.parametrize("content", ["", "{", "not json", '{"a": '])
def test_a_broken_file_is_ignored_and_replaced(verdicts, content):
    verdicts.cache_path().parent.mkdir(parents=True)
    verdicts.cache_path().write_text(content)
    assert verdicts.get("a") is None
    verdicts.put("a", True, "")
    assert in_a_new_process(verdicts, "print(verdicts.get('a'))") == ["True"]


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", '{"a": 1}', '{"a": {}}', '{"a": {"passed": true}}', b"\xff\xfe"]
)
def test_a_file_of_another_form_is_ignored(verdicts, content):
    verdicts.cache_path().parent.mkdir(parents=True)
    verdicts.cache_path().write_bytes(content if isinstance(content, bytes) else content.encode())
    assert verdicts.get("a") is None and verdicts.matching("") == {}
    verdicts.put("b", True, "")
    assert in_a_new_process(verdicts, "print(verdicts.get('b'))") == ["True"]


def test_a_place_that_cannot_be_written_keeps_the_verdict_for_the_process(verdicts, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_BATCHINV_CACHE", str(tmp_path / "file"))  # mkdir and open fail, also for root
    assert verdicts.get("a") is None
    verdicts.put("a", True, "")
    assert verdicts.get("a") is True


def test_without_a_home_the_verdict_holds_for_the_process(verdicts, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HF_BATCHINV_CACHE")
    monkeypatch.setattr(verdicts.Path, "home", no_home)
    verdicts.put("a", True, "")
    assert verdicts.get("a") is True


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_directory_does_not_raise(verdicts):
    directory = verdicts.cache_path().parent
    directory.mkdir(parents=True)
    directory.chmod(0o500)
    verdicts.put("a", True, "")
    directory.chmod(0o700)
    assert verdicts.get("a") is True and not verdicts.cache_path().exists()


def test_the_cache_is_where_the_environment_says_or_in_the_home(verdicts, monkeypatch, tmp_path):
    assert verdicts.cache_path() == tmp_path / "cache" / "selfcheck.json"
    monkeypatch.setenv("HF_BATCHINV_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verdicts.cache_path() == tmp_path / ".cache" / "hf_batchinv" / "selfcheck.json"


def check_report(rows):
    for row in rows:
        assert set(row) == KEYS and row["status"] in STATES and all(isinstance(text, str) for text in row.values()), row
    json.dumps(rows)  # `hf-batchinv doctor --json` prints them


def test_report_has_rows_of_name_status_and_detail(module, verdicts):
    check_report(module("selfcheck").report())


# --- of this package ---


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_tiles_agree_without_a_gpu_and_nothing_is_written(module, verdicts, dtype):
    assert module("selfcheck").tiles_agree(dtype, torch.device("cpu")) is True
    assert not verdicts.cache_path().exists()


def test_report_counts_the_configurations_that_serve(module, verdicts):
    assert module("selfcheck").report()[-1]["status"] == "not run"
    verdicts.put("linear cublaslt 1 GPU a", True, "")
    verdicts.put("linear cublaslt 1 GPU b", False, "")
    verdicts.put("attention tiles", True, "")
    row = module("selfcheck").report()[-1]
    assert row["status"] == "passed" and row["detail"].startswith("1 of 2 ")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_the_self_check_has_products_of_nothing_but_rounding(module, dtype):
    """Exact products are 0 in float64; a change of order shows in what rounding leaves of them in float32."""
    x, weight = module("selfcheck").cancelling(40, 24, 681, dtype, torch.device("cpu"))
    assert x.shape == (40, 681) and weight.shape == (24, 681) and x.dtype == weight.dtype == dtype
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert (exact.abs() / size).max() < 1e-13
    products = (x.float()[:, None] * weight.float()[None]).unbind(-1)
    ascending, descending = (functools.reduce(torch.add, order) for order in (products, products[::-1]))
    assert (ascending.to(dtype) != descending.to(dtype)).float().mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda dtype: str(dtype)[6:])
def test_the_self_check_sees_a_matrix_unit_of_another_width_over_a_short_k(module, dtype):
    """What float16 dropped and short sums hid: eight terms at a time instead of sixteen."""
    x, weight = module("selfcheck").cancelling(16, 24, 64, dtype, torch.device("cpu"))
    products = (x.double()[:, None] * weight.double()[None]).unflatten(2, (-1, 8)).sum(3)
    eights = functools.reduce(lambda total, term: (total + term).float().double(), products.unbind(-1))
    sixteens = functools.reduce(
        lambda total, term: (total + term).float().double(), products.unflatten(2, (-1, 2)).sum(3).unbind(-1)
    )
    assert (eights.to(dtype) != sixteens.to(dtype)).float().mean() > 0.1


# --- engine and plan ---


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_engine_is_what_the_environment_says(module, monkeypatch, name):
    monkeypatch.setenv("HF_BATCHINV_ENGINE", name)
    assert module("plan").engine() == name


def test_engine_is_auto_by_default(module, monkeypatch):
    monkeypatch.delenv("HF_BATCHINV_ENGINE", raising=False)
    assert module("plan").engine() == "auto"


@pytest.mark.parametrize("name", ["cublaslt", "Triton", "", " auto"])
def test_an_unknown_engine_is_refused_in_one_sentence(module, monkeypatch, name):
    monkeypatch.setenv("HF_BATCHINV_ENGINE", name)
    with pytest.raises(ValueError) as error:
        module("plan").engine()
    assert str(error.value) == f"HF_BATCHINV_ENGINE: expected one of auto, triton, got {name!r}; unset it for auto"


def test_engine_of_a_cpu_tensor_is_the_cpu(module, monkeypatch):
    monkeypatch.setenv("HF_BATCHINV_ENGINE", "nonsense")  # does not matter there
    assert module("linear").engine_of(torch.randn(2, 8), torch.randn(4, 8)) == "cpu"


def test_triton_is_preferred_for_many_waves_of_the_largest_tile_only(module):
    plan = module("plan")
    hopper = plan.Gpu(capability=(9, 0), multiprocessors=132)
    few, many = plan.TRITON_FROM_ROWS - 1, plan.TRITON_FROM_ROWS
    assert not plan.prefers_triton(rows=few, n=10**6, k=4096, gpu=hopper)
    assert plan.prefers_triton(rows=many, n=10**6, k=4096, gpu=hopper)
    assert not plan.prefers_triton(rows=many, n=10**6, k=576, gpu=hopper)
    largest = module("tiles").TUNED[9, 0].many_tma[-1]
    programs = plan.TRITON_FROM_WAVES * hopper.multiprocessors
    columns = -(-programs // (8192 // largest.m))
    assert plan.prefers_triton(rows=8192, n=columns * largest.n, k=4096, gpu=hopper)
    assert not plan.prefers_triton(rows=8192, n=(columns - 1) * largest.n, k=4096, gpu=hopper)


@pytest.mark.parametrize(
    ("rows", "n", "k", "preferred"),
    [(1, 128256, 4096, True), (64, 151936, 4096, True), (65, 151936, 4096, False), (8, 151936, 1024, False)]
    + [(8, 28672, 8192, False)],
)
def test_triton_is_preferred_for_decode_steps_through_a_vocabulary(module, rows, n, k, preferred):
    plan = module("plan")
    assert plan.prefers_triton(rows=rows, n=n, k=k, gpu=plan.Gpu((9, 0), multiprocessors=132)) == preferred
    assert not plan.prefers_triton(rows=rows, n=n, k=k, gpu=plan.Gpu((8, 0), multiprocessors=108))


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 6), (10, 0)], ids=str)
def test_triton_is_not_preferred_where_no_tile_uses_descriptors(module, capability):
    plan = module("plan")
    gpu = plan.Gpu(capability=capability, multiprocessors=100)
    assert not plan.prefers_triton(rows=10**5, n=10**5, k=4096, gpu=gpu)
