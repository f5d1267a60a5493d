"""What the best tiles of a kernel depend on, as the key of a tuning table."""

import dataclasses
from typing import Literal, Self

import numpy as np

from jflash.masks.mask import Interval
from jflash.masks.tile_map import TileMap
from jflash.problem import Problem

# Keys that a query sees are counted in tiles of this size.
_BLOCK = 64
# TMA has a form of its own for arrays whose lengths are no multiple of it.
_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A class of problems that one kernel runs with the same tiles.

    Lengths and numbers of heads count as the next power of two, so that each problem is of exactly one class. The dtype
    is no part of it: the kernels take 16 bits alone.

    Attributes:
      kernel: the field of the tiles, "forward" say.
      H, Hv: head dims.
      group: query heads that share a key/value head.
      mask: "full" where every query sees every key, "band" where each sees an interval of keys that is known without
        arrays: causal, a window, or both.
      T, S: lengths, rounded up.
      keys: the most keys that a query sees, rounded up: S for causal, less for a window.
      heads: query heads of all batch rows, rounded up.
      aligned: T and S are multiples of 8.
    """

    kernel: str
    H: int
    Hv: int
    group: int
    mask: Literal["full", "band"]
    T: int
    S: int
    keys: int
    heads: int
    aligned: bool

    @classmethod
    def of(cls, problem: Problem, kernel: str) -> Self | None:
        """The key of a problem; None where tables have none, which no measurement stands for.

        These are problems with a mask that holds arrays or is no interval of keys, or with anything in the logits
        besides scale and mask.
        """
        p, mask = problem, problem.mask.mask
        has_terms = (p.bias, p.softcap, p.functions, p.sinks) != (None,) * 4 or p.dropout_rate
        if p.is_empty or has_terms or mask.values() or not mask.has_spans:
            return None
        tile_map = TileMap(mask=mask, T=p.T, S=p.S, block_q=_BLOCK, block_k=_BLOCK)
        run = tile_map.run(np.arange(tile_map.rows, dtype=np.int32))
        seen_by_all = mask.key_span(Interval(0, p.T - 1)).common
        is_full = bool(seen_by_all.first <= 0 and seen_by_all.last >= p.S - 1)
        return cls(
            kernel=kernel, H=p.H, Hv=p.Hv, group=p.group, mask="full" if is_full else "band",
            T=_rounded(p.T), S=_rounded(p.S), keys=_rounded(min(int(np.max(run.stop - run.start)) * _BLOCK, p.S)),
            heads=_rounded(p.B * p.N), aligned=p.T % _ROWS == p.S % _ROWS == 0,
        )  # fmt: skip


def _rounded(size: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(size - 1, 0).bit_length()
