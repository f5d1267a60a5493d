"""Sequences of any lengths, packed one after the other: the mask of `flash_attention_varlen`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jflash.errors import ArgumentError, ShapeError
from jflash.masks.arrays import int32
from jflash.masks.mask import UNLIMITED, is_traced
from jflash.masks.patterns import KeyRange, SlidingWindow, window_of


def packed(
    cu_seqlens_q: Int[Array, " sequences+1"],
    cu_seqlens_k: Int[Array, " sequences+1"],
    *,
    T: int,
    S: int,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
) -> KeyRange:
    """Each query sees the keys of its own sequence, of those that `causal` and `window` leave.

    Within a sequence positions are aligned at its end, as in FlashAttention: its last query sees its last key, also
    where there are more keys than queries.

    Args:
      cu_seqlens_q: where the queries of each sequence begin, and where the last ones end; whole numbers from 0 on,
        ascending, up to T. Equal neighbours are an empty sequence; queries past the last number see nothing.
      cu_seqlens_k: likewise for the keys, up to S. Keys past the last number are not seen.
      T, S: packed queries and keys in all.
      causal: a query sees no key behind its own position.
      window: as of `flash_attention`, in each sequence.

    Raises:
      ArgumentError: numbers that are known are not ascending from 0 to T or S, or the two differ in length.

    Example:
      >>> from jflash.masks import packed
      >>> cu_seqlens = np.array([0, 2, 5])
      >>> print(packed(cu_seqlens, cu_seqlens, T=6, S=6, causal=True).draw(6, 6))
      #.....
      ##....
      ..#...
      ..##..
      ..###.
      ......
    """
    queries, keys = _both_checked(cu_seqlens_q, cu_seqlens_k, T, S)
    xp = jnp if is_traced(queries, keys) else np
    position, sequence, is_slack = _positions(queries, keys, T)
    first, end = keys[sequence], keys[sequence + 1]
    left, right = _distances(causal, window)
    first, last = xp.maximum(first, position - left), xp.minimum(end - 1, position + right)
    return KeyRange(xp.where(is_slack, 1, first), xp.where(is_slack, 0, last))


def packed_positions(
    cu_seqlens_q: Int[Array, " sequences+1"], cu_seqlens_k: Int[Array, " sequences+1"], *, T: int, S: int
) -> Int[Array, " T"]:
    """Where each query stands among all packed keys: the last one of its sequence at the last key of it.

    Example:
      >>> from jflash.masks.varlen import packed_positions
      >>> packed_positions(np.array([0, 2, 3]), np.array([0, 2, 7]), T=3, S=7)
      array([0, 1, 6], dtype=int32)
    """
    return _positions(*_both_checked(cu_seqlens_q, cu_seqlens_k, T, S), T)[0]


def _positions(queries: Any, keys: Any, T: int) -> tuple[Any, Any, Any]:
    """Of each query its place among the keys, its sequence, and whether it is slack at the end."""
    xp = jnp if is_traced(queries, keys) else np
    query = np.arange(T, dtype=np.int32)
    # Of how many sequences the end has been passed; a sequence that is empty ends where it begins.
    sequence = xp.searchsorted(queries[1:], query, side="right").astype(np.int32)
    is_slack = sequence == queries.shape[0] - 1
    sequence = xp.where(is_slack, 0, sequence)
    return query + keys[sequence + 1] - queries[sequence + 1], sequence, is_slack


def _both_checked(cu_seqlens_q: Any, cu_seqlens_k: Any, T: int, S: int) -> tuple[Any, Any]:
    queries, keys = _checked("cu_seqlens_q", cu_seqlens_q, T, "T"), _checked("cu_seqlens_k", cu_seqlens_k, S, "S")
    if queries.shape != keys.shape:
        found = f"{keys.shape[0] - 1} sequences of keys"
        raise ShapeError("cu_seqlens_k", found=found, wanted=f"as many as of queries, {queries.shape[0] - 1}")
    return queries, keys


def _distances(causal: bool, window: int | tuple[int | None, int | None] | None) -> tuple[int, int]:
    band = SlidingWindow(None, None) if window is None else window_of(window, "window")
    left, right = (UNLIMITED // 2 if distance is None else distance for distance in (band.left, band.right))
    return left, 0 if causal else right


def _checked(name: str, cu_seqlens: Any, length: int, letter: str) -> Any:
    cu_seqlens = int32(name, cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ShapeError(name, found=f"shape {cu_seqlens.shape}", wanted="(sequences + 1,) with at least one sequence")
    if isinstance(cu_seqlens, np.ndarray):
        is_right = cu_seqlens[0] == 0 and (np.diff(cu_seqlens) >= 0).all() and cu_seqlens[-1] <= length
        if not is_right:
            wanted = f"ascending from 0, at most {letter}={length}"
            raise ArgumentError(name, found=str(cu_seqlens.tolist()), wanted=wanted)
    return cu_seqlens
