"""Launch a Triton kernel again without the price of the first time.

Triton binds and classifies all arguments at every launch: 40 to 130 microseconds on the host, more than a small kernel
takes on the GPU. What it finds out follows from shapes, dtypes and options; an op that remembers its calls by those
hands the kernel, compiled already, its arguments and nothing else.
"""

import torch
import triton

# Releases whose compiled kernels were run with the arguments as they are given here; others launch as ever.
_REPEATS = triton.__version__.startswith("3.6.") and torch.version.hip is None


class Launch:
    """A kernel with its grid, numbers and options, for any tensors of one number, dtype and device.

    numbers: the runtime arguments behind the tensors. options: constexprs and launch options.
    """

    __slots__ = ("_kernel", "_grid", "_numbers", "_options", "_compiled", "_again", "_rest")

    def __init__(self, kernel, grid: tuple[int, ...], numbers: tuple[int | float, ...], **options):
        self._kernel, self._grid, self._numbers, self._options = kernel, grid, numbers, options
        self._compiled = self._again = None

    def __call__(self, *tensors) -> None:
        """tensors: in the kernel's order; tensor descriptors and None stand for themselves."""
        bits, arguments = 0, []
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                tensor = tensor.data_ptr()
                bits |= tensor
            arguments.append(tensor)
        if self._compiled is None or bits % 16:  # Triton compiles another kernel for addresses that are not aligned
            compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._options)
            if _REPEATS and bits % 16 == 0:
                self._compiled = compiled  # None under the interpreter
            return
        if self._again is None:
            self._again = self._compiled[(*self._grid, 1, 1)[:3]]
            constexprs = self._kernel.params[len(tensors) + len(self._numbers) :]
            self._rest = (*self._numbers, *(self._options.get(each.name, each.default) for each in constexprs))
        self._again(*arguments, *self._rest)
