"""`hf-batchinv verify` and what it shares with `audit`: exit codes, files, and every way to name a model."""

import json
import subprocess
import sys

import pytest
import torch
import transformers

from hf_batchinv import loading
from hf_batchinv.verify import command
from hf_batchinv.verify.cases import AXES
from tests.test_cli_demo import ROOT, run, save_model
from tests.tiny_models import make

FAST = ("--axes", "mates,cache,chunks", "--budget", 1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), transformers.LlamaConfig)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("mixtral"), transformers.MixtralConfig, num_local_experts=2)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A Llama of one layer in float32, and no tokenizer."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    hidden, inner, vocabulary, heads = 64, 96, 100, 4
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocabulary)
    shapes = {"token_embd": (vocabulary, hidden), "output": (vocabulary, hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (inner, hidden), "blk.0.ffn_up": (inner, hidden), "blk.0.ffn_down": (hidden, inner)}
    shapes |= {"blk.0.attn_norm": (hidden,), "blk.0.ffn_norm": (hidden,)}
    random = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (torch.randn(shape, generator=random) * 0.3).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_a_converted_model_exits_with_0_and_a_stock_one_with_1(llama):
    done = run("verify", llama, *FAST)
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM (decoder), converted" in done.stdout
    assert "Same bits on every axis that applies." in done.stdout
    stock = run("verify", llama, "--stock", *FAST)
    assert stock.exit_code == 1, stock.output
    assert "stock, float32" in stock.stdout and ": first differs " in stock.stdout
    assert max(map(len, stock.stdout.splitlines())) <= 120


def test_json_is_one_object_and_the_files_are_written(llama, tmp_path):
    html, png = tmp_path / "report.html", tmp_path / "report.png"
    arguments = ["verify", llama, "--stock", "--json", "--html", html, "--png", png, *FAST, "--dtype", "bfloat16"]
    program = "from hf_batchinv.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)  # fails if anything else is on standard output
    assert (report["name"], report["subject"]["dtype"], report["budget"]) == (llama, "bfloat16", 1)
    assert [axis["axis"] for axis in report["axes"]] == ["mates", "cache", "chunks"]
    assert html.read_text().startswith("<!doctype html>") and png.read_bytes().startswith(b"\x89PNG")
    assert "3/3" in done.stderr  # the progress bar


def test_texts_come_from_a_file(llama, tmp_path):
    (tmp_path / "texts.txt").write_text("A first paragraph,\nof two lines.\n\n\nAnd a second one, here.\n")
    (tmp_path / "texts.json").write_text('["One text of a JSON list.", "Another text of the list."]')
    assert command.read_texts(tmp_path / "texts.txt") == [
        "A first paragraph,\nof two lines.",
        "And a second one, here.",
    ]
    for name, lengths in (("texts.txt", [32, 23]), ("texts.json", [24, 25])):
        done = run("verify", llama, "--texts", tmp_path / name, "--axes", "mates", "--json")
        assert json.loads(done.stdout)["subject"]["tokens"] == lengths, done.output


def test_a_gguf_file_is_verified_and_audited(gguf_file, tmp_path):
    done = run("verify", gguf_file, *FAST)
    assert done.exit_code == 0, done.output
    assert "cannot load the tokenizer of" in done.stderr and "asked random token ids" in done.stderr
    texts = tmp_path / "texts.txt"
    texts.write_text("A text that is long enough.")
    done = run("verify", gguf_file, "--texts", texts)
    assert done.exit_code == 2 and "cannot load the tokenizer of" in done.stderr and done.stdout == ""
    assert run("verify", gguf_file, "--stock", *FAST).exit_code == 1
    assert run("audit", gguf_file).exit_code == 0


def test_an_empty_tokenizer_is_as_good_as_none(tmp_path):
    """Transformers makes one for a directory without a tokenizer's files, for some kinds of models."""
    make("gemma3").save_pretrained(tmp_path)
    done = run("verify", tmp_path, *FAST)
    assert done.exit_code == 0, done.output
    assert "cannot load the tokenizer of" in done.stderr and "asked random token ids" in done.stderr


def test_a_hub_name_goes_to_the_hub_with_its_revision():
    assert loading.source_of("org/name", "v2") == {"pretrained_model_name_or_path": "org/name", "revision": "v2"}
    assert loading.source_of("org/name") == {"pretrained_model_name_or_path": "org/name"}


def test_a_model_with_uncovered_parts_is_refused_or_verified_as_far_as_it_goes(mixtral):
    done = run("verify", mixtral, *FAST)
    assert done.exit_code == 2 and "MixtralForCausalLM cannot be made batch invariant" in done.stderr
    with pytest.warns(UserWarning, match="only partly batch invariant"):
        done = run("verify", mixtral, "--no-strict", "--axes", "mates", "--budget", 1)
    assert done.exit_code in (0, 1) and "MixtralForCausalLM (decoder), converted" in done.stdout


def test_audit_runs_the_converted_model_on_request(llama, mixtral):
    done = run("audit", llama, "--operators")
    assert done.exit_code == 0 and "operators of one run of the converted model" in done.stdout, done.output
    report = json.loads(run("audit", mixtral, "--operators", "--json").stdout)
    guilty = {row["kind"] for row in report["operators"] if row["status"] == "stock kernel"}
    assert not report["ok"] and any("Mixtral" in kind for kind in guilty), guilty


def test_an_axis_that_could_not_run_exits_with_2(llama, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no room")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", fails)
    done = run("verify", llama, "--axes", "generate", "--budget", 1)
    assert done.exit_code == 2 and "generate could not run: alone: no room" in done.stdout


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["no/such/directory"], "cannot load 'no/such/directory'"),
        (["./no/such/directory"], "cannot load './no/such/directory': there is no such directory"),
        (["CONFIG"], "expected a directory, a Hub name or a GGUF file, got another file"),
        (["no/such/file.gguf"], "cannot load 'no/such/file.gguf': there is no such file"),
        (["LLAMA", "--axes", "padding"], f"axes must be 'all' or some of {', '.join(AXES)}, got padding"),
        (["LLAMA", "--budget", "0"], "budget"),
        (["LLAMA", "--dtype", "float8"], "float8"),
        (["LLAMA", "--device", "cuda"], "torch finds no CUDA device here; use --device cpu"),
        (["LLAMA", "--texts", "no/such/file"], "--texts must be a readable text or JSON file, got no/such/file"),
        (["LLAMA", "--html", "no/such/folder/report.html"], "--html must be a file in a directory that exists"),
        (["BROKEN"], "cannot load"),
        (["EMPTY.gguf"], "cannot load"),
        ([], "MODEL"),
    ],
)
def test_a_user_error_is_one_sentence_and_exit_code_2(arguments, sentence, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TERMINAL_WIDTH", "400")  # typer frames its own messages and breaks their lines
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "EMPTY.gguf").write_bytes(b"")
    names = {"LLAMA": llama, "BROKEN": str(tmp_path), "EMPTY.gguf": str(tmp_path / "EMPTY.gguf")}
    names["CONFIG"] = str(tmp_path / "config.json")
    done = run("verify", *(names.get(argument, argument) for argument in arguments))
    assert done.exit_code == 2, done.output
    assert sentence.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_without_matplotlib_a_plot_is_refused_before_the_model_is_loaded(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "load_model", lambda *_, **__: pytest.fail("loaded"))
    done = run("verify", llama, "--png", tmp_path / "report.png")
    assert done.exit_code == 2 and "--png needs matplotlib, which is not installed" in done.stderr


@pytest.mark.parametrize("name", ["verify", "audit"])
def test_help_has_examples(name, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    done = run(name, "--help")
    assert done.exit_code == 0 and f"hf-batchinv {name} HuggingFaceTB/SmolLM2-135M-Instruct" in done.stdout
