"""Matrix products whose rows do not depend on the batch, bit for bit: linear, bmm, grouped_linear."""

from . import layers
from .bmm import bmm
from .grouped_linear import grouped_linear
from .linear import engine_of, linear

__all__ = ["linear", "bmm", "grouped_linear", "engine_of", "layers"]
