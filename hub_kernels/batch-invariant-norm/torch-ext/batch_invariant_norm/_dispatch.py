"""When an op may run without going through PyTorch's dispatcher.

A Python custom op costs 20-50 microseconds per call, as much as a small product. Plain eager inference needs nothing
that the dispatcher gives, so it calls the implementation itself; tracing, dispatch modes, functorch transforms,
tensor subclasses and autograd get the registered op.
"""

import contextlib

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

MOST_CALLS = 1024
_PLAIN = (torch.Tensor, Parameter)


def runs_directly(*tensors: torch.Tensor | None) -> bool:
    """Whether these arguments belong to plain eager inference.

    Raises RuntimeError for a tensor with a tangent (forward-mode differentiation), which PyTorch would drop in silence.
    """
    if forward_ad._current_level >= 0:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(
                    "batch-invariant ops have no forward-mode derivative, got a tensor with a tangent; differentiate "
                    "the stock layer"
                )
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return False
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN or tensor.is_meta or (grad and tensor.requires_grad):
            return False
    return True


def kind_of(tensor: torch.Tensor | None) -> tuple | None:
    """What a call depends on of a tensor: not its values, and of its address only whether it is aligned."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0


def remember(calls: dict, key: tuple, call):
    """Keep in `calls` what a call of an op comes to, and return it; a full memory starts anew."""
    if len(calls) >= MOST_CALLS:
        calls.clear()
    calls[key] = call
    return call


def call_on(x: torch.Tensor, call, arguments: tuple):
    """call(*arguments) with the device of x as the current one."""
    if x.is_cuda and x.get_device() == torch.cuda.current_device():
        return call(*arguments)
    with device_of(x):
        return call(*arguments)


def device_of(x: torch.Tensor):
    """Context in which the device of x is the current one; to enter it costs as much as a small launch, so only if it
    is not that already.
    """
    if x.device.type == "cpu" or (x.device.type == "cuda" and x.device.index == torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.get_device_module(x.device).device(x.device)


@contextlib.contextmanager
def _undisturbed():
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch.autocast("cpu", enabled=False):
        yield


def is_plain_torch() -> bool:
    """Whether torch calls on a CPU mean what they say: autocast, function modes and autograd are off."""
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch._C._len_torch_function_stack())


def plain_torch():
    """Context in which the CPU path's torch calls mean what they say."""
    return contextlib.nullcontext() if is_plain_torch() else _undisturbed()
