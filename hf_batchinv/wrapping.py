"""Wrap a method of Transformers, once, so that it can be told and undone."""

import functools
from collections.abc import Callable


def wrapped(original: Callable, wrapper: Callable) -> Callable:
    """A function that calls `wrapper(original, *its arguments)`, and looks like `original`."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        return wrapper(original, *args, **kwargs)

    call._hf_batchinv = original
    return call


def is_wrapped(method: Callable) -> bool:
    return hasattr(method, "_hf_batchinv")


def unwrapped(method: Callable) -> Callable:
    """What `wrapped` was given; any other method as it is."""
    return getattr(method, "_hf_batchinv", method)
