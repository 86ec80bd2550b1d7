"""Read the source of a module class and list the calls in it whose result may depend on the batch.

`forward`, the methods it names and the functions of the model's own code that it calls are read; submodules are
not, since each is judged by itself. The library's shared machinery (masks, caches, generation, losses) is left out.
"""

import ast
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

# Calls that sum floats, so that their order of summation counts; exact ones (max, any, argmax, topk) are not listed.
# The last line holds elementwise functions that vary on a CPU and have no formula of ours.
_REDUCTIONS = frozenset(
    """
    linear bilinear matmul mm bmm addmm baddbmm addbmm mv addmv dot vdot inner einsum tensordot chain_matmul multi_dot
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d fold causal_conv1d_fn causal_conv1d_update
    softmax log_softmax softmin gumbel_softmax logsumexp mean sum nanmean nansum var std var_mean std_mean
    norm vector_norm matrix_norm normalize cosine_similarity cdist pairwise_distance
    layer_norm rms_norm group_norm batch_norm instance_norm local_response_norm
    cumsum cumprod logcumsumexp prod trapezoid cov corrcoef
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d lp_pool1d lp_pool2d
    scaled_dot_product_attention multi_head_attention_forward embedding_bag
    index_add index_add_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_reduce index_reduce_
    solve solve_triangular cholesky qr svd inv pinv lstsq eigh fft rfft ifft irfft fft2 fftn stft istft
    grouped_mm _grouped_mm scaled_mm _scaled_mm
    elu selu celu logsigmoid glu sigmoid_ rsqrt_
    """.split()
)

# Shared machinery: reviewed, or called with integers and masks only.
_LIBRARY = (
    "torch",
    "numpy",
    "accelerate",
    "transformers.cache_utils",
    "transformers.generation",
    "transformers.integrations",
    "transformers.loss",
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
    "transformers.modeling_utils",
    "transformers.pytorch_utils",
    "transformers.utils",
)

# PEFT builds weight deltas with `@` in these: from weights alone, once, or when no batch is running.
_WEIGHTS_ONLY = frozenset(["merge", "unmerge", "get_delta_weight"])

# Calls that `layers.functional` does in another way: activations that a CPU rounds differently in different places of a
# batch, and dropout.
_REPLACED = frozenset(["silu", "sigmoid", "softplus", "gelu", "mish", "dropout"])

REDUCTION, REPLACED, SINGLE_PRODUCT = "reduction", "replaced", "single product"

_EXACT_NAME = re.compile(r"(mask|masks|ids|position|positions|length|lengths|seqlens|lens)$")
_EXACT_CASTS = frozenset(["int", "long", "bool"])

# torch.nn classes whose forward is elementwise, a lookup, or exact.
ELEMENTWISE_NN = (
    nn.Embedding, nn.Identity, nn.Flatten, nn.Unflatten, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Threshold, nn.Tanh, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.PixelShuffle,
    nn.PixelUnshuffle, nn.ZeroPad1d, nn.ZeroPad2d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ReflectionPad1d,
    nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.Dropout, nn.GELU, nn.SiLU, nn.Sigmoid,
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A call found in function `where`, with its text; kind: REDUCTION, REPLACED or SINGLE_PRODUCT.

    chain: ("a", "b") if it is written self.a.b(...).
    """

    where: str
    call: str
    kind: str
    chain: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scan:
    """What the source of a class says. unreadable: why its forward could not be read, or None."""

    findings: tuple[Finding, ...]
    uses_attention_interface: bool
    uses_experts_interface: bool
    unreadable: str | None = None


def findings_in(module: nn.Module, cls: type) -> list[Finding]:
    """Return the findings of a module's class, without those that are calls of its own submodules."""
    return [finding for finding in scan(cls).findings if not _is_submodule(module, finding.chain)]


def held_reductions(module: nn.Module) -> list[str]:
    """Return torch functions that reduce and that the instance holds as attributes, plain or as partials."""
    found = []
    for value in vars(module).values():
        target = value.func if isinstance(value, functools.partial) else value
        name = getattr(target, "__name__", "")
        if callable(target) and not isinstance(target, (type, types.MethodType)) and _kind_of(name) == REDUCTION:
            found.append(name)
    return found


def parsed_forward(cls: type) -> ast.AST | None:
    """Return the parsed source of a class's forward, decorators undone, or None if it is no function that has one."""
    forward = _function(inspect.getattr_static(cls, "forward"))
    if scan(cls).unreadable is not None or not isinstance(forward, types.FunctionType):
        return None
    return _parse(forward)


def _is_submodule(module: nn.Module, chain: tuple[str, ...]) -> bool:
    for name in chain:
        module = getattr(module, name, None)
    return bool(chain) and isinstance(module, nn.Module)


@functools.cache
def scan(cls: type) -> Scan:
    """Read a module class. The result depends on the class alone and is kept."""
    reader = _Reader(cls)
    forward = inspect.getattr_static(cls, "forward")
    experts = "experts_interface" in getattr(getattr(forward, "__code__", None), "co_freevars", ())
    try:
        reader.read(_function(forward))
    except (OSError, TypeError, SyntaxError) as error:
        return Scan((), False, experts, f"{type(error).__name__}: {error}")
    return Scan(tuple(dict.fromkeys(reader.findings)), reader.attention, experts)


def _function(member: object) -> object:
    """Return the plain function behind an attribute of a class or a global name, decorators undone."""
    if isinstance(member, nn.Module):  # `kernels` wraps functions that the Hub may replace in a module each
        cells = [cell.cell_contents for cell in getattr(type(member).forward, "__closure__", None) or ()]
        member = next((content for content in cells if isinstance(content, types.FunctionType)), member)
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    return inspect.unwrap(member) if callable(member) else member


def _in_library(name: str | None) -> bool:
    return name is None or any(name == prefix or name.startswith(prefix + ".") for prefix in _LIBRARY)


@functools.cache
def _parse(function: types.FunctionType) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


class _Reader:
    """Walks from one function to the others that it names."""

    def __init__(self, cls: type):
        self.cls = cls
        self.findings: list[Finding] = []
        self.attention = False
        self._seen: set[object] = set()

    def read(self, function: object) -> None:
        if function in self._seen or not isinstance(function, types.FunctionType):
            return
        self._seen.add(function)
        nodes = list(_live_nodes(_parse(function)))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and id(node) not in called and self._names_reduction(function, node):
                self._found(function, node, REDUCTION)  # taken without being called: called under another name
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                self._found(function, node, SINGLE_PRODUCT if _has_one_term(node) else REDUCTION)
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.MatMult):
                self._found(function, node, REDUCTION)
            elif isinstance(node, ast.Call):
                self._call(function, node)
            elif isinstance(node, ast.Attribute) and _chain(node) == ("self", node.attr):
                self._follow(function, inspect.getattr_static(self.cls, node.attr, None))

    def _names_reduction(self, function, node: ast.Attribute) -> bool:
        """True for torch.softmax, F.linear and the like, as names."""
        chain = _chain(node)
        root = function.__globals__.get(chain[0]) if chain else None
        return isinstance(root, types.ModuleType) and root.__name__.startswith("torch") and node.attr in _REDUCTIONS

    def _found(self, function, node: ast.AST, kind: str, chain: tuple[str, ...] = ()) -> None:
        text = ast.unparse(node)
        text = text if len(text) <= 60 else text[:57] + "..."
        self.findings.append(Finding(function.__qualname__, text, kind, chain))

    def _follow(self, function, member: object) -> None:
        """Read a method or function too, if it is the model's own code."""
        target = _function(member)
        if not isinstance(target, types.FunctionType) or _in_library(target.__module__):
            return
        # A loss is a number about the whole batch; nothing else is made of it.
        if target.__name__ not in _WEIGHTS_ONLY and "loss" not in target.__name__:
            self.read(target)

    def _call(self, function, node: ast.Call) -> None:
        callee = node.func
        if isinstance(callee, ast.Name):
            target = function.__globals__.get(callee.id)
            module = getattr(target, "__module__", None) or ""
            torch_function = module.startswith("torch") or isinstance(target, types.BuiltinFunctionType)
            name = getattr(target, "__name__", callee.id)  # its own: it may have been imported under another
            if target is not None and torch_function and (kind := _kind_of(name)) is not None:
                if not _is_exact(node):
                    self._found(function, node, kind)
            else:
                self._follow(function, target)
            return
        if not isinstance(callee, ast.Attribute):
            return
        if callee.attr == "get_interface":
            self.attention = True
            return
        if isinstance(callee.value, ast.Call) and ast.unparse(callee.value.func) == "super":
            self._super_call(function, node, callee.attr)
            return
        chain = _chain(callee)
        if self._is_opaque(function, chain):
            self._found(function, node, REDUCTION)
        elif (kind := _kind_of(callee.attr)) is not None:
            root = function.__globals__.get(chain[0]) if chain else None
            host_side = isinstance(root, types.ModuleType) and root.__name__.split(".")[0] in ("math", "numpy")
            method = chain[:1] == ("self",) and len(chain) == 2 and inspect.getattr_static(self.cls, callee.attr, None)
            if not host_side and not method and not _is_exact(node):
                self._found(function, node, kind, chain[1:] if chain[:1] == ("self",) else ())
        elif len(chain) == 2 and isinstance(module := function.__globals__.get(chain[0]), (types.ModuleType, type)):
            self._follow(function, inspect.getattr_static(module, callee.attr, None))

    def _is_opaque(self, function, chain: tuple[str, ...]) -> bool:
        """True for torch.ops.*, and for the `apply` of an autograd function: nothing is known about what they do."""
        owner = function.__globals__.get(chain[0]) if chain[1:] == ("apply",) else None
        return chain[:2] == ("torch", "ops") or (isinstance(owner, type) and issubclass(owner, torch.autograd.Function))

    def _super_call(self, function, node: ast.Call, name: str) -> None:
        """Follow super().name(...) to the class that defines it."""
        owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
        mro = self.cls.__mro__
        after = next((i + 1 for i, base in enumerate(mro) if base.__name__ == owner), 1)
        for base in mro[after:]:
            if name in vars(base):
                if base.__module__.startswith("torch.nn"):
                    if name == "forward" and base not in ELEMENTWISE_NN:
                        self._found(function, node, REDUCTION)
                else:
                    self._follow(function, vars(base)[name])
                return


def _kind_of(name: str) -> str | None:
    for family in ("fft_", "linalg_", "special_"):  # torch.fft.fftn calls itself fft_fftn
        name = name.removeprefix(family)
    return REDUCTION if name in _REDUCTIONS else REPLACED if name in _REPLACED else None


def _live_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without branches that serve losses (`if labels ...`) or eager attention only."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.If) and _serves_something_else(node.test):
            stack.extend(node.orelse)
        else:
            stack.extend(ast.iter_child_nodes(node))


def _serves_something_else(test: ast.expr) -> bool:
    """True for `labels is not None`, and for a plain name with "eager" in it, alone or joined by `and`."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    for part in parts:
        if isinstance(part, ast.Name) and "eager" in part.id:
            return True
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.IsNot) and isinstance(part.left, ast.Name):
            if part.left.id == "labels" or part.left.id.endswith("_labels"):
                return True
    return False


def _chain(node: ast.expr) -> tuple[str, ...]:
    """Return ("self", "a", "b") for self.a.b, () for anything but plain names and dots."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def _operands(node: ast.Call) -> list[ast.expr]:
    callee = node.func
    if isinstance(callee, ast.Attribute) and _chain(callee.value)[:1] not in (("torch",), ("F",), ("nn",)):
        return [callee.value]
    return list(node.args[:1])


def _is_exact(node: ast.Call) -> bool:
    """True if the call counts masks, ids or positions: sums of small integers have no rounding, in any order."""
    if getattr(node.func, "attr", getattr(node.func, "id", None)) not in ("sum", "cumsum", "prod", "cumprod"):
        return False
    return bool(operands := _operands(node)) and all(_is_integer(operand) for operand in operands)


def _is_integer(node: ast.expr) -> bool:
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _EXACT_CASTS or (not node.args and _is_integer(node.func.value))
    if isinstance(node, ast.Subscript):
        return _is_integer(node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return bool(_EXACT_NAME.search(node.id if isinstance(node, ast.Name) else node.attr))
    return False


def _has_one_term(node: ast.BinOp) -> bool:
    """True for rotary embeddings' inverse frequencies times positions, a product with one term per element."""
    return "inv_freq" in ast.unparse(node.left) and "position" in ast.unparse(node.right)
