"""`hf-batchinv bench` with a fake clock: real operands, calls and checks of bits, tiny cases, on the CPU."""

import io
import json
import math
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from hf_batchinv import cli, hub
from hf_batchinv.bench import attention, cases, command, linear, plot, run, starved, summary, timing, trial
from hf_batchinv.bench.cases import AttentionCase, GroupedCase, LinearCase, RowsCase

ROOT = Path(__file__).resolve().parents[1]
RATES = timing.Rates(copy_tb_s=4.0, matmul_tflop_s=800.0, matmul_float32_tflop_s=40.0)
ENV = {"device": "fake GPU", "driver": "1.2", "torch": "2.9", "triton": "3.6", "date": "2026-11-30"}
ENV |= {"copy_tb_s": 4.0, "matmul_tflop_s": 800.0}
DIMENSIONS = {
    "linear": {"M", "N", "K"},
    "grouped_linear": {"tokens", "experts", "top_k", "N", "K"},
    "attention": {"batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"},
    "norm": {"rows", "columns"},
    "softmax": {"rows", "columns"},
}
STOCK = {
    "linear": {"cublas_default", "cublaslt_nosplit"},
    "grouped_linear": {"grouped_mm", "batched_mm"},
    "attention": {"cudnn", "flash"},
    "norm": {"torch", "eager"},
    "softmax": {"torch"},
}
KEYS = {"op", "dtype", "case", "ours_us", "engine", "triton_us", "stock_us", "floor_us", "ratio", "bits_ok"}
TINY = {
    "linear": [
        [LinearCase("bfloat16", "decode", m, 48, 32) for m in (1, 5)],
        [LinearCase("float32", "decode", 3, 8, 16)],
    ],
    "grouped_linear": [[GroupedCase("bfloat16", "decode", tokens, 4, 2, 16, 32) for tokens in (1, 6)]],
    "attention": [
        [AttentionCase("bfloat16", "prefill", 2, 4, 2, 24, 24, 16)],
        [AttentionCase("bfloat16", name, 3, 4, 2, 24, 24, 16) for name in cases.VARIANTS],
        [AttentionCase("bfloat16", "decode", 2, 4, 2, 1, 40, 16)],
    ],
    "norm": [[RowsCase("bfloat16", "rms_norm", n, 32) for n in (1, 7)], [RowsCase("bfloat16", "layer_norm", 3, 32)]],
    "softmax": [[RowsCase("float32", "softmax", 4, 50)], [RowsCase("bfloat16", "log_softmax", 4, 50)]],
}


@pytest.fixture
def fake_gpu(monkeypatch):
    """Everything but the clock, the machine and the process without split K is real, on the CPU. Returns the clock."""
    clock = SimpleNamespace(graphs=0)

    def graph_time(calls, replays=5):
        calls[0]()
        clock.graphs += 1
        return 10.0 + clock.graphs % 3

    monkeypatch.setattr(timing, "graph_time", graph_time)
    monkeypatch.setattr(timing, "BEYOND_L2", 0)
    monkeypatch.setattr(run, "require_gpu", lambda: None)
    monkeypatch.setattr(run, "start", lambda: (ENV, RATES))
    monkeypatch.setattr(run, "run_op", partial(run.run_op, device="cpu"))
    monkeypatch.setattr(run, "units", lambda op, *_, **__: TINY[op])
    monkeypatch.setattr(linear, "nosplit_times", lambda cases, progress: dict.fromkeys(cases, 9.0))
    return clock


def bench(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


# --- the command ---


def test_without_a_gpu_it_says_so_and_measures_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = bench("--json", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "no CUDA device here; run this on a machine with a GPU" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--op", "conv"], "conv"),
        (["--dtype", "bfloat16,int8"], "expected names from float32, float16, bfloat16"),
        (["--shard", "5/4"], "expected part/parts such as 1/4, got '5/4'"),
        (["--shard", "one"], "expected part/parts such as 1/4, got 'one'"),
        (["--op", "attention", "--dtype", "float32"], "have cases in bfloat16 only"),
    ],
)
def test_a_user_error_is_one_sentence_and_exit_code_2(arguments, sentence, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    result = bench(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stdout == ""


def test_every_op_gives_rows_with_the_stated_keys(fake_gpu):
    result = bench("--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert set(data) == {"env", "rows"} and data["env"] == ENV
    assert [row["op"] for row in data["rows"]] == [op for op in TINY for unit in TINY[op] for _ in unit]
    for row in data["rows"]:
        op = row["op"]
        variant = op == "attention" and row["case"] in cases.VARIANTS
        assert set(row) == KEYS | DIMENSIONS[op] | ({"plain_us", "over_plain"} if variant else set()), row
        assert row["bits_ok"] is True, row
        assert row["ours_us"] > 0 and row["floor_us"] > 0
        assert row["engine"] in ("triton", "cpu") and row["triton_us"] == row["ours_us"]
        if variant:
            assert row["stock_us"] is None and row["ratio"] is None
            assert row["over_plain"] == row["ours_us"] / row["plain_us"]
        else:
            assert row["ratio"] > 0
            assert set(row["stock_us"]) == (STOCK[op] - {"eager"} if row["case"] == "layer_norm" else STOCK[op])
            assert [name for name, us in row["stock_us"].items() if us is None] == ["cudnn"] * (op == "attention")


def test_a_stock_op_that_refuses_a_case_is_named_and_has_no_time(fake_gpu):
    result = bench("--json", "--op", "attention")
    decode = json.loads(result.stdout)["rows"][-1]
    assert decode["stock_us"]["cudnn"] is None  # it takes no CPU tensors; flash does
    assert decode["ratio"] == decode["stock_us"]["flash"] / decode["ours_us"]
    assert "cudnn does not take AttentionCase(dtype='bfloat16', case='decode'" in result.stderr


def test_files_table_and_pictures(fake_gpu, tmp_path):
    from PIL import Image

    result = bench("--op", "norm", "--op", "linear", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "linear.json",
        "linear.png",
        "norm.json",
        "norm.png",
    ]
    for op in ("linear", "norm"):
        data = json.loads((tmp_path / "out" / f"{op}.json").read_text())
        assert data["env"] == ENV and {row["op"] for row in data["rows"]} == {op}
        with Image.open(tmp_path / "out" / f"{op}.png") as picture:
            assert picture.size[0] > 1000
            assert len(picture.convert("RGB").getcolors(1 << 20)) > 50
    assert "linear, bfloat16, beside F.linear (cuBLAS)" in result.stdout and "fake GPU" in result.stdout
    assert str(tmp_path / "out") in result.stdout.replace("\n", "")
    assert "norm" in result.stderr  # the progress bar


def test_without_matplotlib_the_rows_are_written_and_the_remedy_is_named(fake_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "can_draw", lambda: False)
    result = bench("--op", "softmax", "--out", tmp_path)
    assert result.exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["softmax.json"]
    assert "no PNG without matplotlib; run `pip install hf_batchinv[bench]`" in result.stderr


def test_a_directory_that_cannot_be_made_is_named(fake_gpu, tmp_path):
    (tmp_path / "file").touch()
    result = bench("--out", tmp_path / "file" / "inside")
    assert result.exit_code == 2
    assert "--out must be a directory that can be written" in result.stderr


def test_differing_bits_have_no_time_and_exit_code_1(fake_gpu, tmp_path, monkeypatch):
    norm = hub.load("norm")
    monkeypatch.setattr(norm, "rms_norm", lambda x, weight, eps: x * (1 + x.shape[0]))
    result = bench("--op", "norm", "--out", tmp_path)
    assert result.exit_code == 1
    rows = json.loads((tmp_path / "norm.json").read_text())["rows"]
    bad = [row for row in rows if not row["bits_ok"]]
    assert [(row["case"], row["rows"]) for row in bad] == [("rms_norm", 7)]
    for row in bad:
        assert row["ours_us"] is row["triton_us"] is row["ratio"] is None
        assert row["stock_us"] == {"torch": None, "eager": None}
    assert fake_gpu.graphs == 3 + 2  # rms_norm of one row beside two, layer_norm beside one
    assert "bits differ between batch sizes, so there is no time: op norm, dtype bfloat16, case rms_norm" in " ".join(
        result.stdout.split()
    )


def test_a_case_that_does_not_fit_is_named_and_left_out(fake_gpu, monkeypatch):
    def too_large(trial_, *_):
        if trial_.case.rows == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"bits_ok": True}

    monkeypatch.setattr(run, "measure", lambda op, *rest: too_large(*rest))
    result = bench("--op", "norm", "--json")
    assert len(json.loads(result.stdout)["rows"]) == 2
    assert "left out for lack of memory on this GPU: RowsCase(" in result.stderr
    assert "rows=7" in result.stderr


def test_an_op_without_a_case_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = bench("--op", "attention", "--op", "linear", "--dtype", "float32")
    assert "--dtype and --shard leave no case of attention" in result.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_quick_run_on_a_gpu(tmp_path):
    line = [sys.executable, "-m", "hf_batchinv", "bench", "--quick", "--dtype", "bfloat16", "--json"]
    line += ["--out", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert {row["op"] for row in data["rows"]} == set(cases.OPS)
    assert all(row["bits_ok"] and row["ours_us"] > 0 for row in data["rows"])
    assert all(row["stock_us"]["cublaslt_nosplit"] for row in data["rows"] if row["op"] == "linear")


def test_a_run_that_is_stopped_leaves_what_it_measured(fake_gpu, monkeypatch, tmp_path):
    first, trials = TINY["norm"][0], run._TRIALS["norm"]

    def stop_at_the_second(unit, device):
        if unit is not first:
            raise KeyboardInterrupt
        return trials(unit, device)

    monkeypatch.setitem(run._TRIALS, "norm", stop_at_the_second)
    monkeypatch.setattr(run, "units", lambda op, *_, **__: [first, list(first)])
    with pytest.raises(KeyboardInterrupt):
        command.run_bench(["norm"], ["bfloat16"], quick=True, shard=(1, 1), out=tmp_path)
    data = json.loads((tmp_path / "norm.json").read_text())
    assert data["env"] == ENV
    assert len(data["rows"]) == len(first)


# --- the engines of linear ---


def test_a_second_engine_is_timed_beside_the_triton_kernel(fake_gpu, monkeypatch):
    seen = []

    def product(x, weight):
        seen.append(os.environ["HF_BATCHINV_ENGINE"])
        return x @ weight.T

    package = SimpleNamespace(linear=hub.load("linear").linear, engine_of=lambda x, weight, bias=None: "cublaslt")
    monkeypatch.setattr(linear.hub, "load", lambda name: package)
    monkeypatch.setenv("HF_BATCHINV_ENGINE", "of the user")
    monkeypatch.setattr(package, "linear", lambda x, w, stock=package.linear: (product(x, w), stock(x, w))[1])
    (first, *_) = run.run_op("linear", TINY["linear"], RATES, progress=False)
    assert first["engine"] == "cublaslt"
    assert first["triton_us"] != first["ours_us"]
    assert set(seen) == {"auto", "triton"}
    assert os.environ["HF_BATCHINV_ENGINE"] == "of the user"


def test_engines_that_disagree_have_no_time(fake_gpu, monkeypatch):
    stock = hub.load("linear").linear

    def product(x, weight):
        return stock(x, weight) * (2 if os.environ["HF_BATCHINV_ENGINE"] == "auto" else 1)

    package = SimpleNamespace(linear=product, engine_of=lambda x, weight, bias=None: "cublaslt")
    monkeypatch.setattr(linear.hub, "load", lambda name: package)
    rows = run.run_op("linear", TINY["linear"], RATES, progress=False)
    assert not any(row["bits_ok"] or row["ours_us"] for row in rows)


# --- the process without split K ---


def test_starved_answers_in_the_order_of_the_question(monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "BEYOND_L2", 0)
    monkeypatch.setattr(timing, "graph_time", lambda calls, replays=5: asked.append(calls[0]().shape) or 7.0)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name: asked.append(name))
    for name, value in linear.STARVED_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    listed = [["bfloat16", 48, 32, 1], ["bfloat16", 48, 32, 5], ["float32", 8, 16, 3]]
    answer = io.StringIO()
    assert starved.main(io.StringIO(json.dumps({"progress": False, "cases": listed})), answer, device="cpu") == 0
    assert json.loads(answer.getvalue()) == [7.0, 7.0, 7.0]
    assert asked == ["cublaslt", (1, 48), (5, 48), (3, 8)]


def test_starved_refuses_an_environment_that_does_not_starve():
    environment = {name: value for name, value in os.environ.items() if name not in linear.STARVED_ENVIRONMENT}
    line = [sys.executable, "-m", linear.STARVED]
    done = subprocess.run(line, input="{}", env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "expected CUBLAS_WORKSPACE_CONFIG=:16:8 in the environment, got None" in done.stderr


def test_the_process_is_started_once_with_its_environment(monkeypatch):
    started = []

    def fake_run(line, *, input, env, **_):
        started.append((line[1:], {name: env[name] for name in linear.STARVED_ENVIRONMENT}))
        return SimpleNamespace(returncode=0, stdout=json.dumps([float(m) for *_, m in json.loads(input)["cases"]]))

    monkeypatch.setattr(linear.subprocess, "run", fake_run)
    wanted = [case for unit in TINY["linear"] for case in unit]
    assert linear.nosplit_times(wanted, progress=False) == {case: float(case.M) for case in wanted}
    assert started == [(["-m", "hf_batchinv.bench.starved"], linear.STARVED_ENVIRONMENT)]


def test_a_process_that_fails_ends_the_command(fake_gpu, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(linear.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stdout=""))
    monkeypatch.setattr(run, "require_gpu", lambda: None)
    monkeypatch.setattr(run, "start", lambda: (ENV, RATES))
    result = bench("--op", "linear", "--quick", "--json")
    assert result.exit_code == 2
    assert "`python -m hf_batchinv.bench.starved` must end with status 0, got 1" in result.stderr


# --- cases and work ---


def test_cases_are_those_that_were_asked_for():
    everything = {op: [case for unit in cases.units(op) for case in unit] for op in cases.OPS}
    bf16 = {(case.M, case.N, case.K) for case in everything["linear"] if case.dtype == "bfloat16"}
    rows = (1, 2, 4, 8, 16, 32, 64, 96, 128, 200, 256, 400, 512, 1024, 2048, 4096, 8192)
    shapes = [(n, k) for n, k, _ in cases.LINEAR_WEIGHTS]
    assert len(set(shapes)) == 25 and (151936, 4096) in shapes and (8192, 28672) in shapes and (576, 576) in shapes
    assert bf16 == {(m, n, k) for m in rows for n, k in shapes if m * n <= 2**30}
    for dtype in ("float16", "float32"):
        assert len({(case.N, case.K) for case in everything["linear"] if case.dtype == dtype}) == 9
    assert {case.M for case in everything["linear"] if case.dtype == "float32"} == {1, 4, 16, 64, 256, 1024, 2048}

    grouped = {(case.experts, case.top_k, case.N, case.K, case.tokens) for case in everything["grouped_linear"]}
    assert len(grouped) == 4 * 7 and (128, 8, 1536, 2048, 1) in grouped and (8, 2, 4096, 14336, 4096) in grouped

    prefill = [case for case in everything["attention"] if case.case == "prefill"]
    assert {case.q_len for case in prefill} == {512, 1024, 2048, 4096, 8192, 16384}
    assert all(case.batch <= 8 and (case.batch == 1 or case.batch * case.q_len <= 16384) for case in prefill)
    assert {case.case for case in everything["attention"]} == {"prefill", "decode", *cases.VARIANTS}
    decode = [case for case in everything["attention"] if case.case == "decode"]
    assert {case.heads // case.kv_heads for case in decode if case.head_dim == 128} == {1, 4, 7, 8}
    assert {case.batch for case in decode} == {1, 8, 32, 128, 256} and max(case.kv_len for case in decode) == 65536
    assert all(case.batch * case.kv_len * case.kv_heads * case.head_dim * 4 <= 24e9 for case in decode)

    norms = {(case.case, case.rows, case.columns) for case in everything["norm"]}
    assert len(norms) == 2 * 6 * 5
    assert {(case.dtype, case.case) for case in everything["softmax"]} == {
        (dtype, case) for dtype in ("bfloat16", "float32") for case in ("softmax", "log_softmax")
    }


def test_quick_cases_and_shards_are_parts_of_the_whole():
    for op in cases.OPS:
        whole = cases.units(op)
        flat = {case for unit in whole for case in unit}
        quick = [case for unit in cases.units(op, quick=True) for case in unit]
        assert 0 < len(quick) <= 25 and set(quick) <= flat
        shards = [unit for part in (1, 2, 3) for unit in cases.units(op, shard=(part, 3))]
        assert sorted(map(str, shards)) == sorted(map(str, whole))


@pytest.mark.parametrize(
    ("queries", "keys", "left"), [(1, 9, 9), (7, 7, 7), (7, 7, 2), (3, 9, 4), (1, 9, 3), (5, 5, 0)]
)
def test_attention_counts_the_pairs_of_its_mask(queries, keys, left):
    seen = [min(position, left) + 1 for position in range(keys - queries, keys)]
    assert attention._pairs(queries, keys, left) == sum(seen)


def test_graphs_hold_every_set_once_and_more_of_small_calls():
    assert timing.turns(sets=200, nbytes=10**6, flops=10**6) == 200
    assert timing.turns(sets=1, nbytes=10**6, flops=10**6) == timing.MOST_TURNS
    assert timing.turns(sets=1, nbytes=10**10, flops=1) == 2
    calls = timing.rotated(lambda i: i, 3, 5)
    assert [call() for call in calls] == [0, 1, 2, 0, 1]


def test_floor_is_the_slower_of_copy_and_product():
    assert RATES.floor_us(4 * 10**6, 0, "bfloat16") == 1.0
    assert RATES.floor_us(0, 8 * 10**8, "float16") == 1.0
    assert RATES.floor_us(0, 8 * 10**8, "float32") == 20.0


def test_bits_are_compared_not_values():
    assert not trial.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert trial.same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))


# --- the summary ---


def linear_row(m, ratio, engine="triton", **more):
    row = {"op": "linear", "dtype": "bfloat16", "case": "decode", "M": m, "N": 8, "K": 8, "engine": engine}
    row |= {"ours_us": 10.0, "triton_us": 20.0, "ratio": ratio, "bits_ok": True, "floor_us": 5.0}
    return row | {"stock_us": {"cublas_default": 10.0 * ratio, "cublaslt_nosplit": 8.0}} | more


def test_lines_hold_mean_range_and_target():
    bad = linear_row(4, 1.0) | dict.fromkeys(("ours_us", "triton_us", "ratio")) | {"bits_ok": False}
    rows = [linear_row(1, 0.5), linear_row(16, 2.0, "cublaslt"), bad]
    found = {(line.op, line.peer): line for line in summary.lines(rows)}
    ours = found["linear", summary.CUBLAS]
    assert (ours.mean, ours.worst, ours.best, ours.cases, ours.broken) == (1.0, 0.5, 2.0, 2, 1)
    assert ours.group == "decode, 1 to 16 rows" and ours.target == 1.0
    assert found[summary.TRITON_ALONE, summary.CUBLAS].mean == pytest.approx(0.5)
    assert found["linear", summary.NOSPLIT].mean == pytest.approx(0.8)
    assert found["linear", summary.NOSPLIT].target is None
    assert len(found) == 3
    assert len(summary.lines(rows[:1])) == 2  # one engine: no lines of its own


def test_features_of_attention_are_compared_with_our_own_plain_attention():
    row = {"op": "attention", "dtype": "bfloat16", "case": "sinks", "ratio": None, "stock_us": None, "bits_ok": True}
    (line,) = summary.lines([row | {"over_plain": 1.25}])
    assert (line.group, line.peer, line.mean) == ("sinks", summary.PLAIN, 0.8)


def test_cost_table_reads_old_and_new_files(monkeypatch, tmp_path, capsys):
    source = ROOT / "hub_kernels" / "cost_table.py"
    table = runpy.run_path(str(source))
    for package, rows in (
        ("norm", [{"op": "norm", "dtype": "bfloat16", "case": "rms_norm", "rows": 8, "ratio": 1.5, "bits_ok": True}]),
        ("linear", [linear_row(600, 0.9, "cublaslt"), linear_row(600, 0.9, dtype="float16")]),
        ("flash-attn", [{"op": "attention", "dtype": "bfloat16", "case": "decode", "ratio": 0.5, "bits_ok": True}]),
    ):
        folder = tmp_path / package / "benchmarks" / "results"
        folder.mkdir(parents=True)
        env = ENV | {"copy_tb_s": len(rows)} | ({"date": "2026-12-02"} if package == "norm" else {})
        (folder / "h200.json").write_text(json.dumps({"env": env, "rows": rows}))
    monkeypatch.setitem(table["load_results"].__globals__, "HERE", tmp_path)
    assert table["cost_table"]().splitlines() == [
        "fake GPU, bfloat16, torch 2.9, Triton 3.6, driver 1.2, 2026-11-30 to 2026-12-02:",
        "",
        "| op | stock | speed, stock = 1 | worst ... best case | cases | target |",
        "|---|---|---|---|---|---|",
        "| linear, prefill, 512 to 8192 rows | F.linear (cuBLAS) | 0.90 | 0.90 ... 0.90 | 1 | 1.00 |",
        "| linear, Triton kernel, prefill, 512 to 8192 rows | F.linear (cuBLAS) | 0.45 | 0.45 ... 0.45 | 1 |  |",
        "| attention, decode | the faster of SDPA's cuDNN and flash | 0.50 | 0.50 ... 0.50 | 1 | 1.00 |",
        "| norm, rms_norm, 1 to 64 rows | the faster of torch and eager Transformers | 1.50 | 1.50 ... 1.50 | 1 "
        "| 1.00 |",
    ]
    assert "float16" in table["cost_table"](everything=True)


# --- pictures ---


@pytest.mark.parametrize("op", cases.OPS)
def test_panels_hold_every_row_that_has_a_time(op, fake_gpu, tmp_path):
    rows = run.run_op(op, TINY[op], RATES, progress=False)
    panels = plot.panels_of(op, rows)
    drawn = sum(len(series.points) for panel in panels for series in panel.series)
    bars = sum(len(panel.bars) for panel in panels)
    assert bars == (len(cases.VARIANTS) if op == "attention" else 0)
    assert drawn == 2 * (len(rows) - bars)  # speed and roofline
    rows[0] |= dict.fromkeys(("ours_us", "ratio"))
    assert sum(len(series.points) for panel in plot.panels_of(op, rows) for series in panel.series) == drawn - 2
    plot.draw(op, rows, ENV, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000


def test_the_module_runs_as_a_command_without_matplotlib():
    code = (
        "import runpy, sys\n"
        "sys.modules['matplotlib'] = None\n"  # importing it now raises
        "sys.argv = ['hf_batchinv', 'bench', '--quick', '--json']\n"
        "runpy.run_module('hf_batchinv', run_name='__main__')\n"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("hf-batchinv: torch finds no CUDA device here")
    assert command.DEFAULT_OUT not in os.listdir(ROOT)
