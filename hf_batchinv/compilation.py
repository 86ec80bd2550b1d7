"""Which compilers a converted model may meet.

Inductor keeps values in float32 between the operators that it fuses, where PyTorch rounds, and what it fuses may follow
the shapes; so a compiled model would have other bits than an eager one, and others again at another size. Backends that
run PyTorch's own operators one by one keep the bits.
"""

from .errors import UnsupportedCompilerError

KEEP_BITS = ("eager", "aot_eager")


def check_compiler() -> None:
    """Refuse to be traced for a compiler that changes bits; layers call this while torch traces them.

    Functions that a caller passes as a backend are taken to keep bits, unless they are Inductor's.

    Raises UnsupportedCompilerError.
    """
    import torch._dynamo  # at hand where this is called, and slow to import elsewhere
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        compiler = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # nothing compiles: torch.export and torch.jit trace without a backend
        return
    compiler = getattr(compiler, "_torchdynamo_orig_backend", compiler)
    name = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", str(compiler))
    if name in KEEP_BITS:
        return
    function = getattr(compiler, "compiler_fn", compiler)
    inductor = name == "inductor" or (getattr(function, "__module__", None) or "").startswith("torch._inductor")
    if inductor or name in torch._dynamo.list_backends(exclude_tags=()):
        raise UnsupportedCompilerError(
            f"torch.compile: expected a backend that keeps every rounding ({', '.join(KEEP_BITS)}) for a converted "
            f"model, got {name}; call generate with cache_implementation='static' for fast decoding, which records "
            "CUDA graphs and needs no compiler, or revert the model first"
        )


# What torch.compiler.assume_constant_result does, without importing Dynamo: run when traced, not in the graph.
check_compiler._dynamo_marked_constant = True
