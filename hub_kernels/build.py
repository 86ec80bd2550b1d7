#!/usr/bin/env python3
"""Build kernel packages in the Kernels-Hub format (edition 5, Triton only: no compiler, no Nix).

    python hub_kernels/build.py                               # all packages, into hub_kernels/<package>/build
    python hub_kernels/build.py batch-invariant-norm --out /tmp/built
    python hub_kernels/build.py --check                       # check the sources, write nothing

A build is a copy of `torch-ext/<module>` per backend, plus `_ops.py` (the op namespace of that build), `metadata.json`
(with a digest of every file) and the rendered CARD.md. It is deterministic: the same sources give the same bytes and
the same id. Both `kernels.get_local_kernel` and `HF_BATCHINV_KERNELS=<out>` load it.

Needs `kernels` (its own parsers check what is read and written) and jinja2.
"""

import argparse
import ast
import hashlib
import json
import shutil
import sys
from pathlib import Path

import jinja2
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).resolve().parent

OPS_PY = '''"""The op namespace of this build. Generated, do not edit."""

import torch

_NAMESPACE = "{namespace}"

ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{{_NAMESPACE}}::{{op_name}}"
'''

# The Hub's own check of op names looks at these decorators, in any spelling, if they have a positional argument.
REGISTRATIONS = {
    "custom_op",
    "triton_op",
    "register_kernel",
    "register_fake",
    "register_vmap",
    "register_torch_dispatch",
}
ALLOWED_IMPORTS = {*sys.stdlib_module_names, "torch", "triton"}
LAYER_CLASS_VARIABLES = {"can_torch_compile", "has_backward"}


class BuildError(ValueError):
    """A package that cannot be built; the message has one sentence per line, each with what to do."""


class Package:
    """What build.toml and the tree say about one package."""

    def __init__(self, root: Path):
        self.root = root
        if not (root / "build.toml").is_file():
            raise BuildError(f"{root} has no build.toml; name a folder of a kernel package")
        try:
            Build.open(root)  # the schema; the details below are not in its Python API
        except ValueError as error:
            raise BuildError(f"{root / 'build.toml'} is not valid: {error}") from None
        config = tomllib.loads((root / "build.toml").read_text(encoding="utf-8"))
        if "torch-noarch" not in config:
            raise BuildError(f"{root / 'build.toml'} needs a [torch-noarch] table; other kinds cannot be built here")
        self.general = config["general"]
        self.noarch = config["torch-noarch"]
        self.name = self.general["name"]
        self.module = self.name.replace("-", "_")
        self.source = root / "torch-ext" / self.module
        repo_id = self.general.get("hub", {}).get("repo-id", "")
        if self.name != root.name or repo_id.partition("/")[2] != self.name:
            raise BuildError(
                f"{root / 'build.toml'} must have the name {root.name!r} and the hub.repo-id '<org>/{root.name}', "
                f"got {self.name!r} and {repo_id!r}"
            )
        if not (self.source / "__init__.py").is_file():
            raise BuildError(f"{self.source} must hold the package's sources and an __init__.py")
        if (self.source / self.module).exists() or (self.source / f"{self.module}.py").exists():
            raise BuildError(f"{self.source} must not contain an entry called {self.module}; rename it")

    def files(self) -> list[Path]:
        """The files that are shipped, relative to the source folder, in a fixed order."""
        suffixes = {f".{ext}" for ext in self.noarch.get("pyext", ["py", "pyi"])}
        relative = (path.relative_to(self.source) for path in self.source.rglob("*") if path.is_file())
        shipped = [path for path in relative if path.suffix in suffixes and path != Path("_ops.py")]
        return sorted(shipped, key=Path.as_posix)

    def unique_id(self) -> str:
        """Seven hex digits that follow from build.toml and the shipped files alone, with or without git."""
        total = hashlib.sha256((self.root / "build.toml").read_bytes())
        for path in self.files():
            content = hashlib.sha256((self.source / path).read_bytes()).hexdigest()
            total.update(f"\n{path.as_posix()} {content}".encode())
        return total.hexdigest()[:7]

    def trees(self) -> dict[Path, ast.Module]:
        """The parsed Python sources by relative path."""
        return {
            path: ast.parse((self.source / path).read_text(encoding="utf-8"), str(path))
            for path in self.files()
            if path.suffix == ".py"
        }


# --- checks ---


def check(package: Package) -> None:
    """Check the rules that the Hub's tools or loaders enforce later, or that its documentation only asks for."""
    problems = []
    for path, tree in package.trees().items():
        where = f"{package.name}/{path.as_posix()}"
        problems += [f"{where}:{line} {text}" for line, text in _registration_problems(tree)]
        problems += [f"{where}:{line} {text}" for line, text in _import_problems(tree, path, package.module)]
        if path.as_posix() in ("layers.py", "layers/__init__.py"):
            problems += [f"{where}:{line} {text}" for line, text in _layer_problems(tree)]
    if not public_names(package):
        problems.append(f"{package.name}/__init__.py needs a literal list `__all__`, the main function first")
    if problems:
        raise BuildError("\n".join(problems))


def _called_name(node: ast.expr) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "id", None) or getattr(node.func, "attr", None)


def _registration_problems(tree: ast.Module):
    """Two builds with one namespace would replace each other's ops without a word."""
    decorators = set()
    for node in ast.walk(tree):  # a function comes before its decorators
        for decorator in getattr(node, "decorator_list", []):
            decorators.add(decorator)
            name = _called_name(decorator)
            if name in REGISTRATIONS and decorator.args:
                if _called_name(decorator.args[0]) != "add_op_namespace_prefix":
                    expected = f'@torch.library.{name}(add_op_namespace_prefix("<op>"), ...)'
                    yield node.lineno, f"registers {node.name} under a name of its own; write {expected}"
        name = _called_name(node)
        if name in REGISTRATIONS | {"define", "impl", "register_autograd"} and node.args and node not in decorators:
            if isinstance(node.args[0], ast.Constant) and "::" in str(node.args[0].value):
                yield node.lineno, f"names the op {node.args[0].value!r}; write add_op_namespace_prefix(...) instead"


def _import_problems(tree: ast.Module, path: Path, module: str):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        elif isinstance(node, ast.ImportFrom) and node.level > len(path.parts):
            yield node.lineno, f"imports from outside of {module}; a package must stand alone, so move it inside"
            continue
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top == module:
                yield node.lineno, f"imports {name} by its full name; a build has another name, so import it relatively"
            elif top not in ALLOWED_IMPORTS:
                yield node.lineno, f"imports {name}; only the standard library, torch and triton are allowed"


def _layer_problems(tree: ast.Module):
    """A layer has a forward, bare annotations and two class variables at most: kernelize borrows its forward."""
    for layer in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node in layer.body:
            if isinstance(node, ast.FunctionDef):
                allowed, what = node.name == "forward" and not node.decorator_list, node.name
            elif isinstance(node, ast.AnnAssign):
                allowed, what = node.value is None, ast.unparse(node.target)
            elif isinstance(node, ast.Assign):
                what = ast.unparse(node.targets[0])
                allowed = what in LAYER_CLASS_VARIABLES
            else:
                allowed, what = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant), ast.unparse(node)
            if not allowed:
                yield node.lineno, f"layer {layer.name} defines {what}; a pure layer has only forward and annotations"


def public_names(package: Package) -> list[str]:
    """The literal `__all__` of the package, or [] if there is none."""
    tree = ast.parse((package.source / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            try:
                return list(ast.literal_eval(node.value))
            except ValueError:
                return []
    return []


def layer_names(package: Package) -> list[str]:
    """The public classes of the package's `layers` module."""
    for path, tree in package.trees().items():
        if path.as_posix() in ("layers.py", "layers/__init__.py"):
            return [n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    return []


# --- writing ---


def build(root: Path, out: Path) -> Path:
    """Check the package in `root`, write `<out>/<package>/build` anew and return that path.

    Raises BuildError before anything is written.
    """
    package = Package(root)
    check(package)
    target = out / package.name / "build"
    if target.exists():
        shutil.rmtree(target)
    for backend in sorted(package.general["backends"]):
        _write_variant(package, backend, target / f"torch-{backend}")
    if (root / "CARD.md").is_file():
        (target / "CARD.md").write_text(render_card(package), encoding="utf-8")
    return target


def _write_variant(package: Package, backend: str, variant: Path) -> None:
    for path in package.files():
        (variant / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package.source / path, variant / path)
    build_id = f"_{package.module}_{backend}_{package.unique_id()}"
    (variant / "_ops.py").write_text(OPS_PY.format(namespace=build_id), encoding="utf-8")
    text = json.dumps(_metadata(package, backend, build_id, variant), indent=2, ensure_ascii=False)
    (variant / "metadata.json").write_text(text, encoding="utf-8")
    written = Metadata.read_from_file(variant / "metadata.json")
    written.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def _metadata(package: Package, backend: str, build_id: str, variant: Path) -> dict:
    """metadata.json in the key order of the Hub's own tools; without provenance, which would depend on git's state."""
    general = package.general
    metadata = {"name": package.name, "id": build_id, "version": general["version"], "license": general["license"]}
    metadata |= {key: general[key] for key in ("upstream", "source") if key in general}
    for key in ("python-depends", "kernel-depends"):
        metadata[key] = general.get(key, []) + general.get(backend, {}).get(key, [])
    metadata["backend"] = {"type": backend}
    archs = package.noarch.get({"cuda": "cuda_capabilities", "rocm": "rocm_archs"}.get(backend))
    if archs:
        metadata["backend"]["archs"] = archs
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata["digest"] = {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))}
    return metadata


def render_card(package: Package) -> str:
    """CARD.md with the package's facts filled in: the README of its Hub repository."""
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((package.root / "CARD.md").read_text(encoding="utf-8"))
    return template.render(
        repo_id=package.general["hub"]["repo-id"],
        version=package.general["version"],
        functions=[name for name in public_names(package) if name != "layers"],
        layers=layer_names(package),
        has_benchmark=(package.root / "benchmarks" / "benchmark.py").is_file(),
        upstream=package.general.get("upstream"),
        source=package.general.get("source"),
        license=package.general["license"].lower(),
    )


# --- command line ---


def package_roots(names: list[str]) -> list[Path]:
    """The folders of the named packages, of all packages if no name is given."""
    known = {path.parent.name: path.parent for path in sorted(HERE.glob("*/build.toml"))}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BuildError(f"no package {unknown[0]!r}; known packages: {', '.join(known)}")
    return [known[name] for name in names or known]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build kernel packages in the Kernels-Hub format.")
    parser.add_argument("packages", nargs="*", help="folder names such as batch-invariant-norm (default: all)")
    parser.add_argument("--out", type=Path, default=HERE, help="write <out>/<package>/build (default: hub_kernels)")
    parser.add_argument("--check", action="store_true", help="check the sources and write nothing")
    options = parser.parse_args(arguments)
    failed = False
    try:
        roots = package_roots(options.packages)
    except BuildError as error:
        parser.error(str(error))
    for root in roots:
        try:
            if options.check:
                check(Package(root))
                print(f"{root.name}: sources are fine")
            else:
                print(f"{root.name}: built {build(root, options.out)}")
        except BuildError as error:
            print(error, file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
