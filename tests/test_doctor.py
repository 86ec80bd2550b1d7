"""`hf-batchinv doctor`, without a GPU and with a fake one."""

import json
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import hf_batchinv
from hf_batchinv import cli, doctor, hub

CHECKS = [
    {"name": "linear bfloat16", "status": "verified", "detail": "sm_90, Triton 3.6.0 is in the table"},
    {"name": "linear float16", "status": "passed", "detail": "[14 tiles] agree"},
]


def run(*arguments):
    return CliRunner().invoke(cli.app, ["doctor", *arguments])


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU, and self-checks with the verdicts that the returned list holds."""
    checks = list(CHECKS)
    submodule = doctor._submodule

    def with_selfcheck(package, name):
        if name != "selfcheck":
            return submodule(package, name)
        return SimpleNamespace(cache_path=lambda: Path("/cache/verdicts.json"), report=lambda: checks)

    monkeypatch.setattr(doctor, "_submodule", with_selfcheck)
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="fake GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return checks


def test_without_a_gpu_it_works_and_says_so(no_gpu):
    result = run()
    assert result.exit_code == 0, result.output
    assert "no CUDA device here" in result.stdout
    assert torch.__version__ in result.stdout and "not run" in result.stdout


def test_json_is_one_object_with_versions_and_contracts(no_gpu):
    result = run("--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    assert report["device"] is report["compute_capability"] is None
    assert list(report["versions"]) == ["python", "torch", "triton", "transformers", "kernels", "hf_batchinv"]
    assert report["versions"]["python"] == platform.python_version()
    assert report["versions"]["hf_batchinv"] == hf_batchinv.__version__
    assert set(report["contracts"]) == set(hub.FAMILIES)
    assert all(version >= 1 for version in report["contracts"].values())
    assert report["engine"] in ("auto", "triton")
    assert {check["package"] for check in report["self_checks"]} == {"linear", "flash-attn"}
    assert {check["status"] for check in report["self_checks"]} == {"not run"}


def test_verdicts_caches_and_device_are_printed(fake_gpu):
    result = run("--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["device"], report["compute_capability"], report["driver"]) == ("fake GPU", "9.0", "580.1")
    assert report["self_check_caches"] == dict.fromkeys(("linear", "flash-attn"), "/cache/verdicts.json")
    assert report["self_checks"][:2] == [{"package": "linear", **check} for check in CHECKS]
    printed = run().stdout
    assert "/cache/verdicts.json" in printed and "verified" in printed and "[14 tiles]" in printed


def test_a_failed_verdict_is_exit_code_1(fake_gpu):
    fake_gpu.append({"name": "attention", "status": "failed", "detail": "tile 3 has other bits"})
    result = run()
    assert result.exit_code == 1
    assert "failed" in result.stdout


def test_the_engine_setting_is_the_one_of_the_package(fake_gpu, monkeypatch):
    plan = SimpleNamespace(engine=lambda: "triton, as asked for")
    submodule = doctor._submodule
    monkeypatch.setattr(
        doctor, "_submodule", lambda package, name: plan if name == "plan" else submodule(package, name)
    )
    assert doctor.examine()["engine"] == "triton, as asked for"


def test_kernels_that_cannot_be_loaded_are_exit_code_2(no_gpu, monkeypatch):
    monkeypatch.setenv("HF_BATCHINV_KERNELS", "no-such-folder")
    result = run("--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "HF_BATCHINV_KERNELS=no-such-folder" in result.stderr
