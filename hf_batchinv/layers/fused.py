"""When a chain of elementwise operators may run as one launch: plain inference on a GPU.

Everything else (a CPU, training, tracing, tensor subclasses, functorch) keeps the stock operators.
"""

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

DEVICES = ("cuda", "xpu")
_PLAIN = (torch.Tensor, Parameter)


def runs_fused(*tensors: torch.Tensor) -> bool:
    """Whether these are plain tensors, the first on a GPU, and nobody traces, transforms or differentiates the call."""
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) not in _PLAIN or (grad and tensor.requires_grad):
            return False
    return tensors[0].device.type in DEVICES
