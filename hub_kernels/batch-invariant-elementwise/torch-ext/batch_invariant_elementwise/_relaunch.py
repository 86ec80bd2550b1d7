"""Launch a Triton kernel again without the price of the first time.

Triton binds and classifies all arguments at every launch: 40 to 130 microseconds on the host, more than a small kernel
takes on the GPU. What it finds out follows from shapes, dtypes and options; an op that remembers its calls by those
hands the kernel, compiled already, its arguments and nothing else. Hooks of Triton's launches see the first one alone.
"""

import torch
import triton

# Releases of which launchers were called as below, on a GPU; with others every launch goes through Triton.
_REPEATS = triton.__version__.startswith("3.6.") and torch.version.hip is None


class Launch:
    """A kernel with its grid, numbers and options, for any tensors of one number, dtype and device.

    numbers: the runtime arguments behind the tensors. options: constexprs and launch options.
    """

    __slots__ = ("_kernel", "_grid", "_numbers", "_options", "_compiled", "_launch", "_device", "_head", "_rest")

    def __init__(self, kernel, grid: tuple[int, ...], numbers: tuple[int | float, ...], **options):
        self._kernel, self._grid, self._numbers, self._options = kernel, grid, numbers, options
        self._compiled = self._launch = None

    def __call__(self, *tensors) -> None:
        """tensors: in the kernel's order; tensor descriptors and None stand for themselves."""
        bits, arguments = 0, []
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                tensor = tensor.data_ptr()
                bits |= tensor
            arguments.append(tensor)
        if self._launch is None or bits % 16:  # Triton compiles another kernel for addresses that are not aligned
            self._through_triton(tensors, bits % 16 == 0)
        else:
            stream = torch._C._cuda_getCurrentRawStream(self._device)  # as torch's own generated code asks for it
            self._launch(*self._grid, stream, *self._head, *arguments, *self._rest)

    def _through_triton(self, tensors: tuple, aligned: bool) -> None:
        if self._compiled is not None and aligned and self._is_ready(len(tensors)):
            return self(*tensors)
        compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._options)
        if _REPEATS and aligned:
            self._compiled = compiled  # None under the interpreter

    def _is_ready(self, tensors: int) -> bool:
        """Whether the compiled kernel's launcher can be called from here, as Triton calls it; from now on it is."""
        compiled, launcher = self._compiled, self._compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return False
        self._device = torch.cuda.current_device()
        self._grid = (*self._grid, 1, 1)[:3]
        modes = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        no_scratch, no_hooks = (None, None), (None, None, None)
        self._head = (compiled.function, *modes, *no_scratch, compiled.packed_metadata, *no_hooks)
        constexprs = self._kernel.params[tensors + len(self._numbers) :]
        self._rest = (*self._numbers, *(self._options.get(each.name, each.default) for each in constexprs))
        self._launch = launcher.launch
        return True
