"""Scores of positions, where tokens do not stand at their positions: in a ring of slots, in packed documents."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflash.masks.arrays import at_batch_and_token, int32, refuse_captured
from jflash.numerics.precision import compute_dtype
from jflash.scores.alibi import alibi
from jflash.scores.function import refuse_args
from jflash.scores.terms import per_head


def by_position(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    *,
    q_positions: Int[Array, "*B T"],
    k_positions: Int[Array, "*B S"],
    alibi_slopes: Any = None,
    score_fn: Callable[..., Any] | None = None,
    score_args: tuple[Any, ...] = (),
) -> dict[str, Any]:
    """The arguments `score_fn` and `score_args` of `flash_attention`; none where there are no scores.

    Args:
      q, k: queries and keys.
      q_positions, k_positions: where each query and each key stands. What is said of keys that no query sees does not
        matter.
      alibi_slopes, score_fn, score_args: as of `flash_attention`, but that q and k are positions.

    Raises:
      ArgumentError, ShapeError, DtypeError: of the scores, as `flash_attention`; positions are no whole numbers, or
        others than one for each query and key.

    Example:
      >>> from jflash.scores import by_position
      >>> q, k, slopes = np.zeros((1, 1, 2, 8), np.float32), np.zeros((1, 4, 2, 8), np.float32), np.ones(2, np.float32)
      >>> ring = by_position(q, k, q_positions=np.array([7]), k_positions=np.array([8, 5, 6, 7]), alibi_slopes=slopes)
      >>> s, b, n, query, key = np.float32(0), 0, 1, 0, 1
      >>> print(ring["score_fn"](s, b, n, query, key, *ring["score_args"]))
      -2.0
    """
    if score_fn is None:
        refuse_args(score_args)
        if alibi_slopes is None:
            return {}
    else:
        refuse_captured("score_fn", score_fn, wanted="traced arrays as arguments, in score_args=(...,)")
    B, T, N, _ = q.shape
    of_rows = [
        at_batch_and_token("q_positions", int32("q_positions", q_positions), "T", T, B=B),
        at_batch_and_token("k_positions", int32("k_positions", k_positions), "S", k.shape[1], B=B),
    ]
    if alibi_slopes is not None:
        of_rows.append(per_head("alibi_slopes", alibi_slopes, B=B, N=N, dtype=compute_dtype(np.dtype(q.dtype))))
    of_rows = [jnp.broadcast_to(array, (B, array.shape[-1])) for array in of_rows]
    score = ScoreOfPositions(score_fn, has_slopes=alibi_slopes is not None)
    return {"score_fn": score, "score_args": (*of_rows, *score_args)}


@dataclasses.dataclass(frozen=True)
class ScoreOfPositions:
    """A function of indices, as `flash_attention` takes it: ALiBi, and a function of positions, at those indices.

    Equal for equal functions, so that a call made anew finds its compiled program again.
    """

    score_fn: Callable[..., Any] | None
    has_slopes: bool

    def __call__(self, s, b, n, q, k, q_positions, k_positions, *args):
        q, k = q_positions[b, q], k_positions[b, k]
        if self.has_slopes:
            slopes, *args = args
            s = alibi(s, b, n, q, k, slopes[b, n], 0)
        return s if self.score_fn is None else self.score_fn(s, b, n, q, k, *args)
