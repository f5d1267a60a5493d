"""Block sizes of the blockwise XLA backend."""

import dataclasses

from jflash.errors import ArgumentError
from jflash.hardware import Hardware
from jflash.problem import Problem

# Logits of one tile over all batch rows and heads, in elements: 64 MiB of float32.
_TILE_ELEMENTS = 2**24
_LARGEST_BLOCK = 512
_SMALLEST_BLOCK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaTiles:
    """Block sizes of `backend="xla"`.

    Attributes:
      block_q: queries of one block, at least 1.
      block_k: keys of one block, at least 1.

    Raises:
      ArgumentError: a block size is not a positive int.
    """

    block_q: int
    block_k: int

    def __post_init__(self):
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ArgumentError("tiles", found=f"{name}={size!r}", wanted="a positive int")


def default_tiles(problem: Problem, hardware: Hardware) -> XlaTiles:
    """Blocks of up to 512 x 512, smaller where many batch rows and heads make a tile large.

    With few queries a block holds more keys, so that a decode step is one pass and not a loop. The sizes depend on the
    length only through these caps: temporary memory stays linear in it.
    """
    heads = max(1, problem.B * problem.N)
    block_q = min(problem.T, _LARGEST_BLOCK)
    block_k = min(problem.S, max(_LARGEST_BLOCK, _LARGEST_BLOCK**2 // block_q))
    while heads * block_q * block_k > _TILE_ELEMENTS and max(block_q, block_k) > _SMALLEST_BLOCK:
        if block_q > block_k:
            block_q = -(-block_q // 2)
        else:
            block_k = -(-block_k // 2)
    return XlaTiles(block_q=block_q, block_k=block_k)
