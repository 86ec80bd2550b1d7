"""Name the first place where equal inputs gave other outputs: a module, and an operator inside it.

Both runs are watched by hooks on every module. Of each tensor that goes in or out only the fingerprints of the
sequence's real tokens are kept, 8 bytes a token, so the memory does not grow with the model's width. Of the modules
that end with other outputs, the first one with equal inputs is it: modules inside it ended before, so it is the
smallest. Its operators are then recorded in both runs in the same way.
"""

import contextlib
import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from .. import layers
from .align import TOKENS, Place, Span, fingerprint
from .report import Culprit
from .sequence import Case

# Operators that move or cast values and compute nothing: two runs may differ in them.
_MOVES = frozenset(
    """
    _to_copy clone copy_ contiguous cat stack index select slice gather embedding arange full full_like zeros
    zeros_like ones ones_like new_ones new_zeros new_full new_empty empty empty_like empty_strided fill_ zero_
    scalar_tensor _local_scalar_dense lift_fresh repeat constant_pad_nd index_select masked_fill where _unsafe_view
    index_copy_ index_put_ detach_ resize_ set_ promote_types _assert_async item is_nonzero
    """.split()
)


@dataclass(frozen=True)
class Print:
    """Fingerprints of the real tokens of one tensor: the first is token `first`; sizes are those of one token."""

    scope: str
    first: int
    tokens: torch.Tensor
    sizes: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    def differing(self, other: "Print | None") -> int | None:
        """How many tokens that both have differ; None if they cannot be compared.

        Tokens of other sizes with as many elements may be the same values in another layout, or in another order.
        """
        if other is None or (self.scope, self.elements, self.dtype) != (other.scope, other.elements, other.dtype):
            return None
        first = max(self.first, other.first)
        last = min(self.first + len(self.tokens), other.first + len(other.tokens))
        if last <= first:
            return None
        mine, theirs = (p.tokens[first - p.first : last - p.first] for p in (self, other))
        count = int((mine != theirs).sum())
        return None if count and self.sizes != other.sizes else count

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


def _print(tensor: torch.Tensor, span: Span) -> Print | None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex() or not tensor.numel():
        return None
    found = span.of(tensor.detach())
    if found is None or not found.values.shape[0]:
        return None
    sizes = tuple(found.values.shape[1:])
    return Print(found.scope, found.first, fingerprint(found.values), sizes, tensor.dtype, tuple(tensor.shape))


def _prints(values, span: Span) -> dict[str, Print]:
    """Path in a nest of arguments -> fingerprints, for the tensors whose tokens can be found."""
    found = {}
    for path, leaf in tree_flatten_with_path(values)[0]:
        if isinstance(leaf, torch.Tensor) and (made := _print(leaf, span)) is not None:
            found["".join(map(str, path))] = made
    return found


def _shapes(prints: dict[str, Print]) -> tuple[tuple[int, ...], ...]:
    return tuple(made.shape for made in prints.values())


@dataclass
class Visit:
    """One call of a module: name, how often it was called before in this forward, and what went in and came out."""

    name: str
    turn: int
    forward: int
    inputs: dict[str, Print]
    outputs: dict[str, Print] = field(default_factory=dict)


class Watcher:
    """Hooks on every module while a case runs; `on_visit` gets each visit when it ends, innermost first."""

    def __init__(self, model: nn.Module, on_visit: Callable[[Visit], None]):
        self.names = {id(module): name for name, module in model.named_modules()}
        self.model, self.on_visit = model, on_visit
        self.span: Span | None = None
        self.forward = -1
        self.turns: Counter = Counter()
        self.open: list[Visit] = []

    def watch(self, span: Span) -> None:
        """A forward begins; the sequence is at `span` in it."""
        if span is not self.span:  # `generate` says where its first forward is before the encoder runs, and again
            self.span, self.forward = span, self.forward + 1
            self.turns.clear()

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        try:
            for module in self.model.modules():
                handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                handles.append(module.register_forward_hook(self._after, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module, args, kwargs):
        name = self.names[id(module)]
        visit = Visit(name, self.turns[name], self.forward, _prints((args, kwargs), self.span))
        self.turns[name] += 1
        self.open.append(visit)
        self.begin(visit)

    def _after(self, module, args, kwargs, output):
        visit = self.open.pop()
        self.end(visit)
        visit.outputs = _prints(output, self.span)
        self.on_visit(visit)

    def begin(self, visit: Visit) -> None:
        """Called before the module runs."""

    def end(self, visit: Visit) -> None:
        """Called after it ran."""


@dataclass
class Runs:
    """Two runs that should agree: `got` and `want` call the `watch` they are given before each forward."""

    name: str
    got: Callable[[Callable[[Span], None]], object]
    want: Callable[[Callable[[Span], None]], object]


@torch.no_grad()
def find_culprit(model: nn.Module, case: Case | Runs) -> Culprit | None:
    """Run a case and its reference again and return the first place that differs; None if everything is the same.

    The case was run before and differed, so None means that it did not differ this time.
    """
    alone: dict[tuple[str, int], list[Visit]] = {}
    reference = Watcher(model, lambda visit: alone.setdefault((visit.name, visit.turn), []).append(visit))
    with reference.hooked():
        case.want(reference.watch)

    found: list[tuple[Visit, Visit, int]] = []

    def check(visit: Visit) -> None:
        if found:
            return
        for other in alone.get((visit.name, visit.turn), []):
            count = _differing(visit.outputs, other.outputs)
            if count and not _differing(visit.inputs, other.inputs):
                found.append((visit, other, count))

    varied = Watcher(model, check)
    with varied.hooked():
        case.got(varied.watch)
    if not found:
        return None
    visit, other, count = found[0]
    kind = layers.stock_class(model.get_submodule(visit.name)).__name__
    operator, shapes, note = _first_operator(model, case, visit, other)
    inputs, outputs = _shapes(visit.inputs), _shapes(visit.outputs)
    arguments = (inputs, _shapes(other.inputs), outputs, operator, shapes, note)
    return Culprit(case.name, visit.name, kind, visit.forward, count, *arguments)


def _differing(mine: dict[str, Print], theirs: dict[str, Print]) -> int:
    """The most tokens that differ in any tensor that both have."""
    counts = [made.differing(theirs.get(path)) or 0 for path, made in mine.items()]
    return max(counts, default=0)


# --- operators ---


@dataclass(frozen=True)
class Operation:
    """An operator that ran: name, shapes of its tensors, and the tokens that went in and came out."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[Print | None, ...]
    outputs: tuple[Print | None, ...]


class _Recorder(TorchDispatchMode):
    """Every operator that computes, in order."""

    def __init__(self, span: Span):
        super().__init__()
        self.span = span
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.is_view or func._schema.name.removeprefix("aten::") in _MOVES:
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shapes = tuple(tuple(tensor.shape) for tensor in given)
        inputs = tuple(_print(tensor, self.span) for tensor in given)  # now: it may write into them
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        if made:
            outputs = tuple(_print(tensor, self.span) for tensor in made)
            self.operations.append(Operation(func._schema.name.replace("::", "."), shapes, inputs, outputs))
        return out


class _OperatorWatcher(Watcher):
    """Records the operators of one visit."""

    def __init__(self, model: nn.Module, wanted: Visit):
        super().__init__(model, lambda visit: None)
        self.wanted = (wanted.name, wanted.turn, wanted.forward)
        self.recorder: _Recorder | None = None
        self.recording = False

    def begin(self, visit: Visit) -> None:
        if (visit.name, visit.turn, visit.forward) == self.wanted:
            self.recorder = _Recorder(_narrowed(self.span, visit))
            self.recorder.__enter__()
            self.recording = True

    def end(self, visit: Visit) -> None:
        if (visit.name, visit.turn, visit.forward) == self.wanted:
            self.stop()

    def stop(self) -> None:
        if self.recording:
            self.recording = False
            self.recorder.__exit__(None, None, None)


def _narrowed(span: Span, visit: Visit) -> Span:
    """Where the sequence is for a module that is asked for the last token alone, as a head is by `generate`."""
    last = [p for p in visit.inputs.values() if p.scope == TOKENS and len(p.shape) == 3 and p.shape[1] == 1]
    if last and span.tokens.width > 1:
        return Span(span.row, span.rows, Place(0, 1, 1, last[0].first))
    return span


def _operations(model: nn.Module, visit: Visit, run: Callable) -> list[Operation]:
    watcher = _OperatorWatcher(model, visit)
    try:
        with watcher.hooked():
            run(watcher.watch)
    finally:
        watcher.stop()  # it is still recording if the module has raised
    return [] if watcher.recorder is None else watcher.recorder.operations


def _first_operator(model, case: Case | Runs, visit: Visit, other: Visit) -> tuple[str, tuple, str]:
    """(operator, (shapes varied, shapes alone), note): the first with other outputs, or where another one runs."""
    alone = _operations(model, other, case.want)
    varied = _operations(model, visit, case.got)
    names = [[operation.name for operation in run] for run in (alone, varied)]
    added: tuple[str, tuple, str] | None = None
    unknown: tuple[str, tuple, str] | None = None
    for tag, a, a_end, v, v_end in difflib.SequenceMatcher(None, *names, autojunk=False).get_opcodes():
        if tag == "equal":
            for theirs, mine in zip(alone[a:a_end], varied[v:v_end], strict=True):
                found = mine.name, (mine.shapes, theirs.shapes), ""
                changes = _changes(mine.outputs, theirs.outputs)
                if any(changes):
                    # With other inputs it only passes on what an operator before it did, whose output had other sizes.
                    return (unknown or found) if any(_changes(mine.inputs, theirs.inputs)) else found
                if None in changes:
                    unknown = found
        elif v < v_end and _reaches(varied[v:v_end]):
            instead = ", ".join(dict.fromkeys(names[0][a:a_end]))
            shapes = alone[a].shapes if a < a_end else ()
            note = f"it runs where the reference runs {instead or 'nothing'}"
            found = varied[v].name, (varied[v].shapes, shapes), note
            if instead:
                return found
            added = added or found  # it may do nothing, as a multiplication by a mask of ones does
    nothing = "every operator that both runs share gives the same bits: other values came in by another way"
    return added or ("", (), nothing)


def _changes(mine: tuple[Print | None, ...], theirs: tuple[Print | None, ...]) -> list[int | None]:
    """For each pair of tensors: how many tokens differ, None if they cannot be compared."""
    return [None if one is None else one.differing(other) for one, other in zip(mine, theirs, strict=False)]


def _reaches(operations: list[Operation]) -> bool:
    """Whether any of the operators has an output about the sequence's tokens."""
    return any(made is not None for operation in operations for made in operation.outputs)
