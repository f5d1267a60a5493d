"""Attention with linear biases (Press et al., arXiv:2108.12409): a slope per head, times the distance."""

from typing import Any

import numpy as np

from jflash.errors import ArgumentError
from jflash.masks.arrays import is_array, reshaped, shown
from jflash.masks.mask import Mask
from jflash.scores.function import WHOLE, ScoreFunction, indices
from jflash.scores.terms import per_head


def linear_bias(slopes: Any, position: Any, *, B: int, N: int, dtype: np.dtype) -> ScoreFunction:
    """The step s - slope * distance.

    Args:
      slopes: (N,) or (B, N), `alibi_slopes` of `flash_attention`.
      position: where the queries stand among the keys. Either a mask, on whose diagonal they then stand, or (T,) their
        positions themselves.

    Raises:
      ArgumentError: the mask is written in terms of several diagonals.
      ShapeError, DtypeError: of the slopes.
    """
    slopes = per_head("alibi_slopes", slopes, B=B, N=N, dtype=dtype)
    if isinstance(position, Mask):
        fn, where, axes = alibi, _offset(position), "B"
    else:
        fn, where, axes = alibi_packed, position, WHOLE
    return ScoreFunction(fn=fn, arrays=(slopes, where), axes=("BN", axes), is_total=True, **indices(B=B, N=N))


# Their names are what `explain` shows.
def alibi(s, b, n, q, k, slope, offset):
    return s - slope * abs(q + offset - k).astype(s.dtype)


def alibi_packed(s, b, n, q, k, slope, positions):
    return s - slope * abs(positions[q] - k).astype(s.dtype)


def _offset(mask: Mask) -> Any:
    """The one offset of the diagonals of a mask, (B,) or (1,) int32; 0 where it has none.

    Raises:
      ArgumentError: it has several.
    """
    first, *others = mask.offsets() or (0,)
    for other in others:
        if not _is_same(first, other):
            found = f"a mask of several diagonals, with the offsets {shown(first)} and {shown(other)}"
            hint = "Give all of its Causal and SlidingWindow the same offset: `causal` and `window` have 0."
            raise ArgumentError("alibi_slopes", found=found, wanted="one diagonal to measure distances from", hint=hint)
    if is_array(first):
        return reshaped(first, first.shape or (1,))
    return np.array([first], np.int32)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two offsets are known to be the same."""
    if one is other:
        return True
    is_known = all(isinstance(x, int | np.ndarray | np.generic) for x in (one, other))
    return is_known and bool(np.all(np.equal(one, other)))
