"""Verdicts of self-checks: kept over processes, robust against what may lie in their place."""

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
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_tiles_agree_without_a_gpu_and_nothing_is_written(module, verdicts, head_dim, dtype):
    shape = dict(head_dim=head_dim, value_head_dim=head_dim, dtype=dtype)
    assert module("selfcheck").tiles_agree(**shape, device=torch.device("cpu")) is True
    assert not verdicts.cache_path().exists()


def test_report_names_the_head_shapes_of_this_gpu_alone(module, verdicts, monkeypatch):
    selfcheck = module("selfcheck")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(selfcheck, "_machine", lambda device: ((8, 6), "3.6", 2))
    assert [row["status"] for row in selfcheck.report()] == ["not run"]
    here = selfcheck._key(64, 64, torch.bfloat16, torch.device("cuda"))
    verdicts.put(here, True, "all tiles agree")
    verdicts.put(here.replace("sm_86", "sm_80"), False, "another GPU")
    verdicts.put("linear tiles bfloat16 sm_86 triton 3.6 numerics 2", True, "another op")
    rows = selfcheck.report()
    check_report(rows)
    assert [(row["name"], row["status"]) for row in rows] == [(here, "passed")]
    monkeypatch.setattr(selfcheck, "_machine", lambda device: next(iter(selfcheck.VERIFIED)))
    assert [row["status"] for row in selfcheck.report()] == ["verified"]


def test_without_agreement_one_tile_serves_every_number_of_rows(module):
    """The plan's fallback is one of the tiles that are compared, and needs neither descriptors nor another kernel."""
    plan = module("plan")
    gpu = plan.Gpu(capability=(8, 6), multiprocessors=84)
    for head_dim in (16, 64, 80, 128, 256):
        for dtype in DTYPES:
            shape = dict(head_dim=head_dim, value_head_dim=head_dim, dtype=dtype)
            assert plan.only_tile(**shape) in plan.all_tiles(**shape, gpu=gpu)
            assert not plan.only_tile(**shape).hopper
