"""The one door through which the kernel packages come in.

    linear = hf_batchinv.hub.load("linear").linear

Three sources give the same functions:

* the sources shipped with hf_batchinv (the default). A wheel holds them in ``hf_batchinv/_kernels/<module>/``, a
  checkout in ``hub_kernels/<package>/torch-ext/<module>/``; both are imported as ``hf_batchinv._kernels.<module>``, so
  pickles by reference work in any process that imports hf_batchinv;
* a directory of trees made by ``hub_kernels/build.py``: ``HF_BATCHINV_KERNELS=<dir>`` loads ``<dir>/<package>/build``;
* the Hugging Face Hub: ``HF_BATCHINV_KERNELS=hub:<org>@v1`` fetches ``<org>/<package>`` with the ``kernels`` library.

Only torch is imported here: neither triton nor transformers.
"""

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

import torch

FAMILIES = ("linear", "norm", "flash-attn", "elementwise")

_HERE = Path(__file__).resolve().parent
_KERNELS = f"{__package__}._kernels"
_lock = threading.RLock()
_loaded: dict[tuple[str, str], ModuleType] = {}


def package_name(name: str) -> str:
    """Return the Hub name of a kernel family: "norm" -> "batch-invariant-norm".

    Raises ValueError if there is no such family.
    """
    if name not in FAMILIES:
        raise ValueError(f"no kernel family {name!r}; known families: {', '.join(FAMILIES)}")
    return f"batch-invariant-{name}"


def load(name: str, source: str | None = None) -> ModuleType:
    """Return the kernel package of one family, loaded once per process and source.

    Args:
        name: "linear", "norm", "flash-attn" or "elementwise".
        source: None for the environment variable HF_BATCHINV_KERNELS if it is set and else the sources shipped with
            hf_batchinv, "" for the latter in any case, a directory of built trees, or "hub:<org>@<revision>".

    Raises ValueError for an unknown family or source, ImportError for a package that cannot be found or loaded.
    """
    package = package_name(name)
    source = os.environ.get("HF_BATCHINV_KERNELS", "") if source is None else source
    with _lock:
        if (name, source) not in _loaded:
            if not source:
                _loaded[name, source] = _load_shipped(package)
            elif source.startswith("hub:"):
                _loaded[name, source] = _load_from_hub(package, source)
            else:
                _loaded[name, source] = _load_built(package, Path(source))
        return _loaded[name, source]


def _module_name(package: str) -> str:
    return package.replace("-", "_")


# --- the sources shipped with hf_batchinv ---


def _synthetic_module(name: str, search: list[str] | None = None) -> ModuleType:
    """Put an empty module (a package if `search` is given) into sys.modules and into its parent, and return it."""
    spec = importlib.machinery.ModuleSpec(name, None, origin=__file__, is_package=search is not None)
    if search is not None:
        spec.submodule_search_locations = search
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    return module


def _make_shipped_packages_importable() -> None:
    """Make `hf_batchinv._kernels` a package that finds the source trees by Python's ordinary import.

    Sources have no `_ops` module (a build generates it), so one per package is put in place before any of them runs.
    """
    checkout = _HERE.parent / "hub_kernels"
    places = [_HERE / "_kernels", *(checkout / package_name(name) / "torch-ext" for name in FAMILIES)]
    parent = _synthetic_module(_KERNELS, [str(place) for place in places])
    setattr(sys.modules[__package__], "_kernels", parent)  # noqa: B010 (a plain attribute would look like an import)
    for name in FAMILIES:
        module = _module_name(package_name(name))
        namespace = f"_{module}_packaged"
        ops = _synthetic_module(f"{_KERNELS}.{module}._ops")
        ops.ops = getattr(torch.ops, namespace)
        ops.add_op_namespace_prefix = _prefixer(namespace)


def _prefixer(namespace: str):
    def add_op_namespace_prefix(op_name: str) -> str:
        return f"{namespace}::{op_name}"

    return add_op_namespace_prefix


def _load_shipped(package: str) -> ModuleType:
    name = f"{_KERNELS}.{_module_name(package)}"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # no such folder, or one without __init__.py
        raise ImportError(
            f"the sources of {package} are neither in {_HERE / '_kernels'} nor in {_HERE.parent / 'hub_kernels'}; "
            "reinstall hf_batchinv",
            name=name,
        )
    return importlib.import_module(name)


# --- built trees and the Hub ---


def _load_built(package: str, directory: Path) -> ModuleType:
    build = directory.expanduser().resolve() / package / "build"
    if not build.is_dir():
        raise ImportError(
            f"HF_BATCHINV_KERNELS={directory} has no {package}/build; "
            f"run `python hub_kernels/build.py --out {directory}`, or write hub:<org>@v1 for the Hub"
        )
    if importlib.util.find_spec("kernels") is not None:
        from kernels import get_local_kernel

        return get_local_kernel(build)
    return _load_variant(build / f"torch-{torch_backend()}")


def torch_backend() -> str:
    """Return the backend that the installed torch was built for, whether or not a device is present."""
    if torch.version.hip is not None:
        return "rocm"
    if torch.version.cuda is not None:
        return "cuda"
    return "xpu" if getattr(torch.version, "xpu", None) is not None else "cpu"


def _load_variant(variant: Path) -> ModuleType:
    """Import one built variant by path, under its build id as the `kernels` library does."""
    metadata = variant / "metadata.json"
    if not metadata.is_file():
        raise ImportError(f"{variant} is not a built kernel variant: it has no metadata.json")
    name = json.loads(metadata.read_text(encoding="utf-8"))["id"]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_from_hub(package: str, source: str) -> ModuleType:
    org, _, revision = source.removeprefix("hub:").partition("@")
    if not org or "/" in org or not revision:
        raise ValueError(f"HF_BATCHINV_KERNELS must be a directory or hub:<org>@<revision>, got {source!r}")
    try:
        from kernels import get_kernel
    except ModuleNotFoundError as error:
        raise ImportError(
            f"HF_BATCHINV_KERNELS={source} needs the kernels library; run `pip install kernels`"
        ) from error
    repo_id = f"{org}/{package}"
    return get_kernel(repo_id, revision=revision, trust_remote_code=[repo_id])


_make_shipped_packages_importable()
