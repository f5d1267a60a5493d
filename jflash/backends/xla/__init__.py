"""Blockwise attention in plain JAX: exact, O(n) memory, on any device, differentiable in every mode and order."""

from jflash.backends.protocol import Backend
from jflash.backends.xla.attention import attend
from jflash.backends.xla.tiles import XlaTiles, default_tiles
from jflash.hardware import Hardware
from jflash.problem import Problem


def _supports(problem: Problem, hardware: Hardware) -> None:
    return None


BACKEND = Backend(name="xla", supports=_supports, forward=attend, default_tiles=default_tiles, tiles_type=XlaTiles)
