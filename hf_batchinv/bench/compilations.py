"""Which Triton kernels a piece of code compiles: each costs a user seconds at the first call."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Collect the names of the kernels that Triton compiles within this context, one entry for each compilation.

        with count_compilations() as names:
            model.generate(**inputs)
        print(len(names), Counter(names))

    Kernels that the process has compiled before do not count; those that come from Triton's cache on disk do, so the
    number is that of a machine without one. Kernels of other libraries count, too.
    """
    from triton import knobs

    names: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def note(*, fn, **details):
        names.append(fn.name)
        return before(fn=fn, **details) if before is not None else None

    knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before
