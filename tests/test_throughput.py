"""examples/throughput.py: a tiny model, stock and converted, on the CPU; the same entry that the script calls."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_batchinv import conversion
from hf_batchinv.smollm2 import HUB_ID
from hf_batchinv.throughput import command, deadline, jobs, measure, models, plot, settings
from hf_batchinv.throughput.clock import Clock
from hf_batchinv.throughput.models import Source

ROOT = Path(__file__).resolve().parents[1]
KEYS = {"op", "model", "dtype", "batch", "prompt", "cache", "ours_s", "stock_s", "ratio", "bits_ok"}
KEYS |= {"ours_peak_bytes", "stock_peak_bytes"}
TINY = ["--random-weights", "tiny", "--device", "cpu", "--dtype", "float32", "--prompt", "12", "--new-tokens", "4"]
TINY += ["--scoring", "5x16"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_call_is_timed():
    patch = pytest.MonkeyPatch()
    patch.setattr(measure, "TURNS", 1)
    patch.setattr(measure, "CALLS_A_TURN", 1)
    yield
    patch.undo()


def read(folder):
    return json.loads((folder / "tiny-random.json").read_text())


@pytest.fixture
def tiny():
    return measure.Comparison(*models.load(Source("tiny", random=True), CPU, torch.float32), "float32", Clock(CPU))


# --- a whole run ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(exit status, folder, what was written) of a run over every job."""
    folder = tmp_path_factory.mktemp("throughput")
    status = command.main([*TINY, "--batch", "1,3", "--profile", "--out", str(folder)])
    return status, folder, read(folder)


def test_a_run_has_a_row_for_every_setting_with_time_of_both_sides(finished):
    status, _, result = finished
    assert status == 0
    assert all(set(row) == KEYS for row in result["rows"])
    sizes = [(row["op"], row["batch"], row["prompt"], row["cache"]) for row in result["rows"]]
    assert sizes == [
        ("generate", 1, 12, "dynamic"),
        ("generate", 3, 12, "dynamic"),
        ("prefill", 1, 12, "dynamic"),
        ("prefill", 3, 12, "dynamic"),
        ("scoring", 5, 16, None),
        ("generate", 1, 12, "static"),
        ("generate", 3, 12, "static"),
    ]
    for row in result["rows"]:
        assert row["bits_ok"] is True and row["ours_s"] > 0 and row["stock_s"] > 0
        assert row["ratio"] == pytest.approx(row["stock_s"] / row["ours_s"])
        assert row["ours_peak_bytes"] is None and row["stock_peak_bytes"] is None  # torch counts none on a CPU


def test_the_check_of_bits_sees_stock_depend_on_the_batch(finished):
    """The control: the same check of the same settings, of stock code."""
    runs = finished[2]["runs"]
    assert all(run["bits_ok"] for run in runs if run["side"] == "ours")
    in_batch = [run for run in runs if run["side"] == "stock" and run["batch"] > 1]
    assert any(not run["bits_ok"] for run in in_batch)


def test_the_file_names_the_machine_and_the_versions(finished):
    env = finished[2]["env"]
    assert env["torch"] == torch.__version__ and env["device"].startswith("CPU") and env["threads"] > 0
    assert {"transformers", "hf_batchinv", "date", "driver"} <= set(env)


def test_profiles_are_of_decoding_and_prefill_on_both_sides(finished):
    profiles = finished[2]["profiles"]
    found = [(profile["what"], profile["side"]) for profile in profiles]
    whats = ["generate 1 x 12 dynamic", "prefill 3 x 12", "generate 1 x 12 static"]
    assert found == [(what, side) for what in whats for side in ("stock", "ours")]
    for profile in profiles:
        rows = profile["rows"]
        assert all(set(row) == {"name", "share", "calls", "us"} for row in rows)
        assert [row["us"] for row in rows] == sorted((row["us"] for row in rows), reverse=True)
        assert 0.5 < sum(row["share"] for row in rows) <= 1 + 1e-9
        assert 0 < profile["busy_us"]
    assert any("mm" in row["name"] or "linear" in row["name"] for row in profiles[0]["rows"])


def test_a_picture_is_drawn(finished):
    assert (finished[1] / "tiny-random.png").read_bytes().startswith(b"\x89PNG")
    assert not list(finished[1].glob("*.unfinished"))
    panels = plot.panels_of(finished[2]["rows"])
    titles = ["generate, dynamic cache", "generate, static cache", "prefill", "scoring"]
    assert [panel.title for panel in panels] == titles
    assert [len(panel.series[0].points) for panel in panels] == [2, 2, 2, 1]


def test_tables_fit_a_terminal(capsys, tmp_path):
    assert command.main([*TINY, "--batch", "1", "--jobs", "generate,scoring", "--profile", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 80
    assert "tiny, random weights: speed and memory" in out and "ours: busy" in out
    assert "setting" in err  # the progress bar


# --- what holds no time ---


def test_no_time_is_stated_where_bits_differ(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "convert", lambda model: model)  # as if conversion had missed everything
    assert command.main([*TINY, "--batch", "3", "--jobs", "prefill", "--out", str(tmp_path)]) == 1
    (row,) = read(tmp_path)["rows"]
    assert row["bits_ok"] is False and set(row) == KEYS
    assert row["ours_s"] is None and row["stock_s"] is None and row["ratio"] is None
    assert "differ" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


def test_nans_are_no_equal_bits():
    nan = torch.full((2, 3), float("nan"))
    assert not measure._same(nan, nan)
    assert measure._same(torch.ones(2, 3), torch.ones(4, 3))  # the steps that both have
    assert not measure._same(torch.zeros(2, 3), -torch.zeros(2, 3))


def test_a_setting_that_needs_too_much_memory_is_named_and_left_out(monkeypatch, tmp_path, capsys):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(jobs.RUN, "prefill", full)
    assert command.main([*TINY, "--batch", "2", "--cache", "dynamic", "--out", str(tmp_path)]) == 0
    assert [row["op"] for row in read(tmp_path)["rows"]] == ["generate", "scoring"]
    assert read(tmp_path)["left_out"] == [{"setting": "prefill 2 x 12", "why": "memory"}]
    assert "since they need more memory than there is: prefill 2 x 12" in capsys.readouterr().err


def test_a_setting_that_fails_does_not_end_the_run_and_is_no_success(monkeypatch, tmp_path, capsys):
    def broken(*_, **__):
        raise RuntimeError("no compiler here\nmore lines")

    monkeypatch.setitem(jobs.RUN, "prefill", broken)
    assert command.main([*TINY, "--batch", "2", "--cache", "dynamic", "--out", str(tmp_path)]) == 1
    assert [row["op"] for row in read(tmp_path)["rows"]] == ["generate", "scoring"]
    assert "after an error (RuntimeError: no compiler here): prefill 2 x 12" in capsys.readouterr().err


# --- long runs ---


def test_every_row_is_in_the_file_when_a_run_is_cut(monkeypatch, tmp_path):
    def cut(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(jobs.RUN, "prefill", cut)
    with pytest.raises(KeyboardInterrupt):
        command.main([*TINY, "--batch", "1,2", "--cache", "dynamic", "--out", str(tmp_path)])
    assert [row["op"] for row in read(tmp_path)["rows"]] == ["generate", "generate"]


def test_what_does_not_fit_in_the_time_limit_is_named_and_resumed(monkeypatch, tmp_path, capsys):
    line = [*TINY, "--batch", "1", "--jobs", "generate", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(deadline.Deadline, "_guess", lambda self, _, setting: 1e9 if setting.cache == "static" else 0.0)
        assert command.main([*line, "--time-limit", "600"]) == 0
    first = read(tmp_path)
    assert [row["cache"] for row in first["rows"]] == ["dynamic"]
    assert first["left_out"] == [{"setting": "generate 1 x 12 static", "why": "time"}]
    assert "would exceed --time-limit: generate 1 x 12 static" in capsys.readouterr().err
    assert command.main([*line, "--resume"]) == 0
    second = read(tmp_path)
    assert second["rows"][0] == first["rows"][0] and second["left_out"] == []
    assert [row["cache"] for row in second["rows"]] == ["dynamic", "static"]


def test_rows_of_another_machine_are_not_resumed(tmp_path):
    line = [*TINY, "--batch", "1", "--jobs", "prefill", "--out", str(tmp_path), "--resume"]
    assert command.main(line) == 0
    before = read(tmp_path)
    (tmp_path / "tiny-random.json").write_text(json.dumps(before | {"env": before["env"] | {"device": "other"}}))
    assert command.main(line) == 0
    after = read(tmp_path)
    assert after["env"] == before["env"] and len(after["rows"]) == 1 and after["rows"] != before["rows"]


def test_nothing_is_loaded_when_there_is_no_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    assert command.main([*TINY, "--time-limit", "0", "--out", str(tmp_path)]) == 2
    assert "no setting was measured" in capsys.readouterr().err


def test_the_time_of_a_setting_is_guessed_from_smaller_ones():
    clock = deadline.Deadline(100.0, on_gpu=True)
    small, large = (settings.Setting("prefill", batch, 128, "dynamic") for batch in (8, 32))
    static = settings.Setting("generate", 8, 128, "static", 32)
    assert clock.allows("m", large) and clock.allows("m", static)
    clock.took("m", small, 30.0)
    assert not clock.allows("m", large) and clock.allows("m", small) and clock.allows("another", large)
    assert not deadline.Deadline(50.0, on_gpu=True).allows("m", static)  # it would compile
    assert deadline.Deadline(50.0, on_gpu=False).allows("m", static)
    assert deadline.Deadline(None, on_gpu=True).allows("m", static)


def test_what_does_not_grow_with_the_tokens_is_not_multiplied():
    clock = deadline.Deadline(100.0, on_gpu=True)
    sizes = [settings.Setting("prefill", batch, 128, "dynamic") for batch in (1, 8, 32, 128)]
    for setting in sizes[:3]:
        clock.took("m", setting, 10.0)  # bound by the host
    assert clock.allows("m", sizes[3])


def test_stock_and_ours_take_turns(tiny, monkeypatch):
    monkeypatch.setattr(measure, "TURNS", 3)
    monkeypatch.setattr(measure, "CALLS_A_TURN", 2)
    seen = []
    run = tiny.measure(settings.Setting("prefill", 2, 12, "dynamic"), seen.append)
    assert seen == ["stock", "ours"] * 3
    assert [side["calls"] for side in run.runs] == [6, 6]


# --- what is asked for ---


@pytest.mark.parametrize(
    "line, sentence",
    [
        (["--batch", "0"], "--batch: expected whole numbers from 1 such as 8,32, got '0'"),
        (["--prompt", "12,x"], "--prompt: expected whole numbers from 2 such as 8,32, got '12,x'"),
        (["--new-tokens", "2"], "--new-tokens: expected a whole number from 4, got '2'"),
        (["--cache", "paged"], "--cache: expected names from dynamic, static with commas between, got 'paged'"),
        (["--jobs", "train"], "--jobs: expected names from generate, prefill, scoring with commas between"),
        (["--scoring", "64"], "--scoring: expected sequences x tokens such as 64x1024, got '64'"),
        (["--time-limit", "soon"], "--time-limit: expected seconds from 0 such as 300, got 'soon'"),
        (["--dtype", "float8"], "--dtype: invalid choice: 'float8' (choose from"),
        (["--random-weights", "Qwen9"], "--random-weights: invalid choice: 'Qwen9' (choose from"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--resume", "--json"], "--resume needs the directory that holds earlier rows, got none; add --out DIR"),
        ([*TINY, "--prompt", "253"], "--prompt plus --new-tokens must be at most 256, the positions of this model"),
        ([*TINY, "--scoring", "2x300"], "--scoring must be at most 256, the positions of this model, got 300"),
        ([str(ROOT / "tests")], "cannot load "),
    ],
)
def test_a_wrong_argument_is_one_sentence(line, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main(line) == 2
    out, err = capsys.readouterr()
    assert out == "" and sentence in err and err.startswith("throughput: ") and err.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_sentence(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert command.main([*TINY, "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "--out must be a directory that can be written, got" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence(capsys):
    assert command.main(["--random-weights", "tiny", "--device", "cuda", "--json"]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err


def test_a_model_that_cannot_be_converted_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(measure.Comparison, "measure", None)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_local_experts=2)
    config = AutoConfig.for_model("mixtral", **sizes, num_attention_heads=2, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    capsys.readouterr()
    assert command.main([str(tmp_path), *TINY[2:], "--batch", "1", "--jobs", "prefill", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "MixtralForCausalLM cannot be made batch invariant" in err.splitlines()[-1]


def test_json_is_one_object_on_standard_output(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main([*TINY, "--batch", "2", "--jobs", "prefill", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["rows"]) == 1 and set(result["rows"][0]) == KEYS and "env" in result
    assert list(tmp_path.iterdir()) == []


# --- parts ---


def test_a_plan_ends_with_what_stock_code_is_compiled_for():
    caches, scoring = ("static", "dynamic"), (64, 1024)
    found = settings.plan(settings.JOBS, (128, 1, 32, 8), (2048, 128), caches, None, scoring, True)
    assert [setting.op for setting in found] == ["generate"] * 8 + ["prefill"] * 8 + ["scoring"] + ["generate"] * 8
    assert [setting.cache for setting in found[-8:]] == ["static"] * 8
    assert {setting.new_tokens for setting in found[:8]} == {16} and {s.new_tokens for s in found[-8:]} == {32}
    profiled = [str(setting) for setting in found if setting.profiled]
    dynamic, static = ([f"generate {batch} x 128 {cache}" for batch in (1, 32)] for cache in settings.CACHES)
    assert profiled == [*dynamic, "prefill 8 x 2048", *static]


def test_the_first_and_the_last_sequence_are_the_one_that_is_run_alone():
    alone = jobs.prompts(settings.Setting("prefill", 1, 20, "dynamic"), 500, CPU)
    ids = jobs.prompts(settings.Setting("prefill", 5, 20, "dynamic"), 500, CPU)
    assert torch.equal(ids[[0]], alone) and torch.equal(ids[[-1]], alone)
    assert len(ids.unique(dim=0)) == 4


def test_a_step_takes_the_median_time_between_marks():
    marks = jobs.Marks(Clock(CPU), keep=True)
    for _ in range(4):
        marks(torch.zeros(3, 1), torch.arange(6.0).view(3, 2))
    marks.marks = [0.0, 5.0, 6.0, 8.0]
    assert marks.step_seconds() == 2.0
    assert marks.kept[0].tolist() == [[0.0, 1.0], [4.0, 5.0]]


def test_logprobs_of_scoring_are_those_of_the_model(tiny):
    setting = settings.Setting("scoring", 3, 9, None)
    ids = jobs.prompts(setting, 512, CPU)
    run = jobs.scoring(tiny.model, ids, setting, tiny.clock, ours=False)
    with torch.no_grad():
        want = torch.log_softmax(tiny.model(ids[:1]).logits.double(), -1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert run.evidence.shape == (2, 8)
    torch.testing.assert_close(run.evidence[0].double(), want, rtol=1e-5, atol=1e-5)


def test_scoring_has_the_same_bits_in_any_chunks(tiny, monkeypatch):
    setting = settings.Setting("scoring", 5, 9, None)
    ids = jobs.prompts(setting, 512, CPU)
    conversion.convert(tiny.model)
    whole = jobs.scoring(tiny.model, ids, setting, tiny.clock, ours=True).evidence
    monkeypatch.setitem(jobs.SCORING_BYTES, "cpu", 1)
    assert measure._same(jobs.scoring(tiny.model, ids, setting, tiny.clock, ours=True).evidence, whole)


def test_a_model_is_stock_after_a_setting_and_keeps_nothing_of_it(tiny, monkeypatch):
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    tiny.model._compiled_call = tiny.model.__call__
    tiny.measure(settings.Setting("generate", 2, 8, "static", 4))
    assert not conversion.is_converted(tiny.model) and tiny.model.config._attn_implementation == "sdpa"
    assert not {"_compiled_call", "_previous_max_cache_length"} & set(vars(tiny.model))
    assert resets == [1]


def test_a_model_is_stock_after_an_error(tiny, monkeypatch):
    monkeypatch.setattr(measure, "_same", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.measure(settings.Setting("prefill", 2, 8, "dynamic"))
    assert not conversion.is_converted(tiny.model)


@pytest.mark.parametrize("shape, parameters", [("Qwen3-8B", 8_190_735_360), ("Qwen3-0.6B", 596_049_920)])
def test_shapes_have_as_many_parameters_as_the_published_models(shape, parameters):
    model, name = models.load(Source(shape, random=True), torch.device("meta"), torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.dtype == torch.bfloat16 and name == f"{shape}, random weights"


def test_random_weights_are_made_in_the_dtype_and_are_the_same_every_time():
    one, other = (models.load(Source("tiny", random=True), CPU, torch.bfloat16)[0] for _ in range(2))
    for (name, parameter), same in zip(one.named_parameters(), other.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, same), name
        assert parameter.dim() == 1 or 0.01 < parameter.float().std() < 0.03, name
    assert one.model.rotary_emb.inv_freq.dtype == torch.float32


def test_files_are_named_after_models(tmp_path):
    assert Source("Qwen3-8B", random=True).file_name == "Qwen3-8B-random"
    assert Source("Qwen/Qwen3-8B").file_name == "Qwen--Qwen3-8B"
    assert Source(str(tmp_path)).file_name == tmp_path.name
    assert Source(models.SMOLLM2).file_name == HUB_ID.rpartition("/")[2]


@pytest.mark.gpu
def test_on_a_gpu_stock_is_compiled_for_a_static_cache_and_memory_is_counted(tmp_path):
    line = ["--random-weights", "tiny", "--batch", "1,3", "--prompt", "12", "--cache", "static", "--new-tokens", "8"]
    assert command.main([*line, "--scoring", "5x16", "--profile", "--out", str(tmp_path)]) == 0
    result = read(tmp_path)
    for row in result["rows"]:
        assert row["bits_ok"] and math.isfinite(row["ratio"])
        assert row["ours_peak_bytes"] > 0 and row["stock_peak_bytes"] > 0
    stock = [run for run in result["runs"] if run["side"] == "stock" and run["cache"] == "static"]
    assert len(stock) == 2 and all(run["compiled"] for run in stock)
    assert all(profile["rows"] and profile["busy_us"] > 0 for profile in result["profiles"])
