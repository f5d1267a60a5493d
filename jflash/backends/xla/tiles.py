"""Block sizes of the blockwise XLA backend."""

import dataclasses

from jflash.errors import ArgumentError
from jflash.hardware import Hardware
from jflash.problem import Problem

# By platform, the largest block and the most logits of one tile over all batch rows and heads. On a CPU a tile of
# 64 MiB in float32 is more than its caches hold. On a GPU each tile costs some launches: on an H200 (2026-11-30;
# bfloat16, causal, T=4096, N=32, K=8, H=128) forward and forward with backward take 9.7 and 24.8 ms in blocks of 512,
# 5.1 and 14.5 in blocks of 1024, 3.7 and 12.2 in blocks of 2048, where temporaries take 0.4, 0.7 and 1.7 GB.
_CPU_CAPS = (512, 2**24)
_OTHER_CAPS = (1024, 2**26)
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
    """Blocks of up to 512 x 512 on a CPU and 1024 x 1024 elsewhere, smaller where many heads make a tile large.

    With few queries a block holds more keys, so that a decode step is one pass and not a loop. The sizes depend on the
    length only through these caps: temporary memory stays linear in it.
    """
    largest, elements = _CPU_CAPS if hardware.platform == "cpu" else _OTHER_CAPS
    heads = problem.B * problem.N
    block_q = max(1, min(problem.T, largest))
    block_k = max(1, min(problem.S, max(largest, largest**2 // block_q)))
    while heads * block_q * block_k > elements and max(block_q, block_k) > _SMALLEST_BLOCK:
        if block_q > block_k:
            block_q = -(-block_q // 2)
        else:
            block_k = -(-block_k // 2)
    return XlaTiles(block_q=block_q, block_k=block_k)
