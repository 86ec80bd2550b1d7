"""Comparing bits: what every invariance test of this project, and of its users, is made of.

def test_my_model_does_not_depend_on_the_batch():
    assert_batch_invariant(model, tokenizer(prompts, padding=True, return_tensors="pt"))
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a floating-point tensor as integers of its width; any other tensor as it is."""
    tensor = tensor.detach().contiguous()
    return tensor.view(_INTEGER[tensor.element_size()]) if tensor.is_floating_point() else tensor


def differing(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many elements of two tensors of one shape and dtype have different bits.

    Unlike `torch.equal` this tells 0.0 from -0.0 and accepts equal NaNs.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(
            f"got: expected shape {tuple(want.shape)} and {want.dtype}, got {tuple(got.shape)} and {got.dtype}, "
            "so compare the same slice of both results."
        )
    return int((bits(got) != bits(want).to(got.device)).sum())


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "tensors") -> None:
    """Raise AssertionError with the count and the first place where the bits of two tensors differ."""
    count = differing(got, want)
    if count:
        index = int((bits(got) != bits(want).to(got.device)).flatten().nonzero()[0])
        raise AssertionError(
            f"{what}: {count} of {got.numel()} values differ in their bits, first at flat index {index}: "
            f"{got.flatten()[index].item()!r} != {want.flatten()[index].item()!r}"
        )


@torch.no_grad()
def assert_batch_invariant(model_or_fn: Callable, inputs: Any, what: str = "") -> None:
    """Raise AssertionError if a row's results depend on the other rows, their number or their order.

    The batch is compared, bit by bit, with every row alone, with the rows in reverse order and with its first half.
    For a torch.nn.Module the message names the first module, and the first operator in it, that gave other bits.

    Args:
        model_or_fn: called with `inputs`; returns a tensor or a nest of tensors (a ModelOutput, a dict, a tuple). Those
            with as many rows as the inputs are compared. It must be deterministic: no dropout, no random numbers.
        inputs: keyword arguments as a mapping, positional ones as a tuple or list, or a single tensor. Tensors have the
            batch as dimension 0, at least 2 rows; those of another first size go along unchanged. If there is an
            `attention_mask` (rows, tokens), outputs (rows, tokens, ...) are compared where it is not 0.
        what: names the thing in the message; by default its class or function name.

    Raises ValueError if there is no batch in `inputs`, or nothing in the output has its rows.
    """
    what = what or getattr(model_or_fn, "__name__", type(model_or_fn).__name__)
    if (call := call_arguments(inputs)) is None:
        raise ValueError(
            f"inputs must be a tensor, a mapping or a tuple, got {type(inputs).__name__}; wrap what you pass"
        )
    args, kwargs = call
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    rows = tensors[0].shape[0] if tensors else 0
    if rows < 2:
        raise ValueError(f"inputs must hold a tensor of at least 2 rows (dimension 0), got {rows}; pass a batch")

    def run(chosen: list[int]) -> dict[str, torch.Tensor]:
        def pick(leaf):
            return leaf[chosen] if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows else leaf

        picked_args, picked_kwargs = tree_map(pick, (args, kwargs))
        return _outputs(model_or_fn(*picked_args, **picked_kwargs), len(chosen))

    whole = run(list(range(rows)))
    if not whole:
        raise ValueError(f"{what} must return a tensor of {rows} rows like its inputs, got none; return the results")
    mask = kwargs.get("attention_mask")
    mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[0] == rows else None
    others = [([row], "alone") for row in range(rows)]
    others += [(list(range(rows))[::-1], "in reverse order"), (list(range((rows + 1) // 2)), "in the first half")]
    for chosen, how in others:
        part = run(chosen)
        for path, got in part.items():
            for index, row in enumerate(chosen):
                problem = _row_problem(got[index], whole[path][row] if path in whole else None, mask, row)
                if problem is not None:
                    message = f"{what}: row {row} {how} differs from row {row} of {rows} in output{path}: {problem}"
                    raise AssertionError(message + _first_place(model_or_fn, run, row, rows, args, kwargs, mask))


def call_arguments(inputs: Any) -> tuple[tuple, dict] | None:
    """(args, kwargs) of a single tensor, of keyword arguments in a mapping or positional ones in a tuple or list; None
    for anything else.
    """
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return None


def _outputs(output: Any, rows: int) -> dict[str, torch.Tensor]:
    """Path -> tensor, for every tensor of `rows` rows in a nest."""
    leaves = tree_flatten_with_path(output)[0]
    found = {"".join(map(str, path)): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    return {path: leaf for path, leaf in found.items() if leaf.dim() and leaf.shape[0] == rows}


def _row_problem(got: torch.Tensor, want: torch.Tensor | None, mask: torch.Tensor | None, row: int) -> str | None:
    """What differs between a row's results, or None."""
    if want is None or got.shape != want.shape or got.dtype != want.dtype:
        expected = "nothing" if want is None else f"{tuple(want.shape)} {want.dtype}"
        return f"{tuple(got.shape)} {got.dtype} against {expected}"
    unequal = bits(got) != bits(want).to(got.device)
    if mask is not None and got.dim() and got.shape[0] == mask.shape[1]:
        real = (mask[row] != 0).to(got.device)
        unequal &= real.view(-1, *[1] * (got.dim() - 1))
    count = int(unequal.sum())
    if not count:
        return None
    first = tuple(unequal.nonzero()[0].tolist())
    values = f"{got[first].item()!r} != {want[first].item()!r}"
    return f"{count} of {got.numel()} values differ in their bits, first at {first}: {values}"


def _first_place(model, run: Callable, row: int, rows: int, args, kwargs, mask) -> str:
    """The first module and operator that differ between a row alone and the batch, as the end of a sentence."""
    if not isinstance(model, torch.nn.Module):
        return ""
    from .verify.align import NO_TOKENS, Place, Span
    from .verify.bisect import Runs, find_culprit

    ids = kwargs.get("input_ids", args[0] if args else None)
    place = NO_TOKENS
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.is_floating_point():
        width = ids.shape[1]
        real = mask[row].nonzero().flatten().tolist() if mask is not None and mask.shape[1] == width else []
        contiguous = real and real[-1] - real[0] + 1 == len(real)
        place = Place(real[0], len(real), width) if contiguous else Place(0, width, width)

    def batch(watch):
        watch(Span(row, rows, place))
        return run(list(range(rows)))

    def alone(watch):
        watch(Span(0, 1, place))
        return run([row])

    culprit = find_culprit(model, Runs(f"{rows} rows", batch, alone))
    return "" if culprit is None else f"; first differs {culprit}"
