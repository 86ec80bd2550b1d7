"""The wheel: what is in it, and that the kernel packages load from an installed copy."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

import hf_batchinv
from hf_batchinv import hub

ROOT = Path(__file__).resolve().parents[1]
MODULES = [hub.package_name(name).replace("-", "_") for name in hub.FAMILIES]


def sources(module):
    return ROOT / "hub_kernels" / module.replace("_", "-") / "torch-ext" / module


def run(code, path, **environment):
    """Run code in a fresh process with `path` alone on PYTHONPATH in front of what this process uses."""
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *inherited]), **environment}
    environment.pop("HF_BATCHINV_KERNELS", None)
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of this checkout (a build writes beside its sources)."""
    work = tmp_path_factory.mktemp("wheel")
    clutter = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, work / "checkout", ignore=clutter)
    command = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(work)]
    subprocess.run([sys.executable, "-m", "pip", *command, str(work / "checkout")], check=True)
    (path,) = work.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the unpacked wheel and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    command = ["install", "--no-deps", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", *command, str(wheel)], check=True)
    return target


# --- contents ---


def test_wheel_is_pure_and_has_every_source_file_of_the_kernel_packages(wheel):
    assert wheel.name == f"hf_batchinv-{hf_batchinv.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    for module in MODULES:
        shipped = [p for p in sources(module).rglob("*") if p.suffix in (".py", ".json") and p.name != "_ops.py"]
        expected = {f"hf_batchinv/_kernels/{module}/{p.relative_to(sources(module)).as_posix()}" for p in shipped}
        assert expected and expected <= names, sorted(expected - names)


def test_wheel_has_the_files_that_are_imported_late(wheel):
    """By name, since nothing that runs without a GPU would miss them."""
    late = {
        "batch_invariant_linear": ("_cublaslt", "_launch", "_verdicts", "selfcheck", "tiles"),
        "batch_invariant_flash_attn": ("_blocks", "_hopper_kernel", "_launch", "_verdicts", "selfcheck", "tiles"),
        "batch_invariant_norm": ("_launch",),
        "batch_invariant_elementwise": ("_gated_kernel", "_launch", "_rotary_kernel"),
    }
    assert set(late) == set(MODULES)
    expected = {f"hf_batchinv/_kernels/{module}/{name}.py" for module, names in late.items() for name in names}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= names, sorted(expected - names)


def test_wheel_has_every_module_of_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "hf_batchinv").rglob("*.py")}
    assert expected <= names, sorted(expected - names)


def test_wheel_has_nothing_else(wheel):
    for name in zipfile.ZipFile(wheel).namelist():
        parts = name.split("/")
        assert parts[0] in ("hf_batchinv", f"hf_batchinv-{hf_batchinv.__version__}.dist-info"), name
        assert not {"tests", "build", "benchmarks", "__pycache__", "_ops.py"} & set(parts), name


def test_metadata_names_the_command_the_licence_and_no_upper_bounds(wheel):
    archive = zipfile.ZipFile(wheel)
    info = f"hf_batchinv-{hf_batchinv.__version__}.dist-info"
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "hf-batchinv = hf_batchinv.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert not [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "<" in line.split(";")[0]
    ]


def test_versions_agree():
    project = read_configuration(ROOT / "pyproject.toml")["project"]
    assert project["version"] == hf_batchinv.__version__


# --- an installed copy ---


def test_installed_packages_load_with_triton_blocked_and_compile_nothing(installed, tmp_path):
    code = (
        "import sys, json\n"
        "sys.modules['triton'] = None\n"  # from here on an import of triton fails
        "from hf_batchinv import hub\n"
        "print(json.dumps({name: hub.load(name).__file__ for name in hub.FAMILIES}))\n"
    )
    output = run(code, installed, TRITON_CACHE_DIR=str(tmp_path / "triton"))
    files = json.loads(output.splitlines()[-1])
    assert [Path(file).parent for file in files.values()] == [
        installed / "hf_batchinv" / "_kernels" / module for module in MODULES
    ]
    assert not (tmp_path / "triton").exists()


def test_hub_module_and_kernel_packages_import_neither_triton_nor_transformers(installed):
    code = (
        "import sys, types\n"
        "package = types.ModuleType('hf_batchinv')\n"  # the package without what its __init__ imports
        "package.__path__ = ['hf_batchinv']\n"
        "sys.modules['hf_batchinv'] = package\n"
        "from hf_batchinv import hub\n"
        "loaded = [hub.load(name) for name in hub.FAMILIES]\n"
        "print(sorted({'triton', 'transformers'} & set(sys.modules)))\n"
    )
    assert run(code, installed).splitlines()[-1] == "[]"


def test_pickles_by_reference_work_in_a_fresh_process(installed):
    code = (
        "import pickle, sys\n"
        "from hf_batchinv import hub\n"
        "sys.stdout.write(pickle.dumps(hub.load('linear').layers.Linear, 0).decode())\n"
    )
    pickled = run(code, installed)
    assert "hf_batchinv._kernels.batch_invariant_linear.layers" in pickled
    code = f"import pickle, hf_batchinv; print(pickle.loads({pickled.encode()!r}))"
    assert "batch_invariant_linear.layers.Linear" in run(code, installed)


# --- the loader ---


def test_checkout_loads_its_own_sources():
    for name, module in zip(hub.FAMILIES, MODULES, strict=True):
        loaded = hub.load(name, "")
        assert loaded.__name__ == f"hf_batchinv._kernels.{module}"
        assert Path(loaded.__file__).parent == sources(module)
        assert hub.load(name, "") is loaded
    assert pickle.loads(pickle.dumps(loaded.rotary)) is loaded.rotary


def test_many_threads_get_one_module(monkeypatch):
    monkeypatch.setattr(hub, "_loaded", {})
    found, start = [], threading.Barrier(8)

    def load():
        start.wait()
        found.append(hub.load("norm", ""))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


@pytest.mark.parametrize(
    ("name", "source", "error", "message"),
    [
        ("gemm", "", ValueError, "no kernel family 'gemm'; known families: linear, norm, flash-attn"),
        ("linear", "hub:org", ValueError, "directory or hub:<org>@<revision>, got 'hub:org'"),
        ("linear", "hub:org/repo@v1", ValueError, "directory or hub:<org>@<revision>"),
        (
            "linear",
            "no-such-folder",
            ImportError,
            "has no batch-invariant-linear/build; run `python hub_kernels/build.py",
        ),
    ],
)
def test_loader_refuses_in_one_sentence(name, source, error, message):
    with pytest.raises(error) as raised:
        hub.load(name, source)
    assert message in str(raised.value)


def test_environment_variable_is_the_default_source(monkeypatch):
    monkeypatch.setenv("HF_BATCHINV_KERNELS", "no-such-folder")
    with pytest.raises(ImportError, match="HF_BATCHINV_KERNELS=no-such-folder"):
        hub.load("linear")
    monkeypatch.setenv("HF_BATCHINV_KERNELS", "")
    assert hub.load("linear") is hub.load("linear", "")
