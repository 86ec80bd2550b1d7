"""What runs here and whether it was checked: the facts behind `hf-batchinv doctor`."""

import importlib
import importlib.metadata
import importlib.util
import platform
from types import ModuleType

import torch

from . import __version__, hub
from .bench.timing import driver_version


def examine() -> dict:
    """Device, versions, contracts, engine and self-checks as plain data.

    `self_checks` holds {package, name, status, detail}; status is "verified", "passed", "failed" or "not run".
    Raises ImportError or ValueError if HF_BATCHINV_KERNELS or HF_BATCHINV_ENGINE cannot be followed.
    """
    packages = {name: hub.load(name) for name in hub.FAMILIES}
    has_gpu = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if has_gpu else None
    caches: dict[str, str | None] = {}
    checks: list[dict] = []
    for name, package in packages.items():
        if name in ("norm", "elementwise"):  # one tile per row, or no sums at all, so nothing to check
            continue
        module = _submodule(package, "selfcheck")
        caches[name] = None if module is None else str(module.cache_path())
        checks += [{"package": name, **check} for check in _verdicts(module, has_gpu)]
    return {
        "device": properties.name if properties else None,
        "compute_capability": f"{properties.major}.{properties.minor}" if properties else None,
        "driver": driver_version(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version(name) for name in ("triton", "transformers", "kernels")},
            "hf_batchinv": __version__,
        },
        "contracts": {name: _submodule(package, "contract").NUMERICS_VERSION for name, package in packages.items()},
        "engine": _engine(packages["linear"]),
        "self_check_caches": caches,
        "self_checks": checks,
    }


def _submodule(package: ModuleType, name: str) -> ModuleType | None:
    """A module of a kernel package, None if the package has none of that name."""
    full = f"{package.__name__}.{name}"
    return importlib.import_module(full) if importlib.util.find_spec(full) else None


def _verdicts(module: ModuleType | None, has_gpu: bool) -> list[dict]:
    if module is None:
        return [{"name": "all", "status": "not run", "detail": "this version of the package has no self-check"}]
    if not has_gpu:
        return [{"name": "all", "status": "not run", "detail": "no CUDA device"}]
    return module.report()


def _engine(linear: ModuleType) -> str:
    plan = _submodule(linear, "plan")
    return plan.engine() if hasattr(plan, "engine") else "triton"  # a package that has no other


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
