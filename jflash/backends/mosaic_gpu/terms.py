"""What a tile has besides q · k, inside a kernel: softcap, ALiBi, functions of the caller's, dropout."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jflash.backends.mosaic_gpu.elementwise import Elementwise, value_and_derivatives
from jflash.backends.mosaic_gpu.tile_values import AXES, DTYPES, TileValues, tile_indices
from jflash.backends.protocol import Operands, learned_flags
from jflash.errors import ArgumentError
from jflash.masks.mask import Value
from jflash.masks.tile_map import TileMap
from jflash.numerics.dropout import RowWords, is_kept, pair_bits
from jflash.numerics.logits import logits
from jflash.numerics.precision import compute_dtype
from jflash.problem import Problem
from jflash.scores import streamed


class TileTerms:
    """The logits of one problem on tiles, their derivatives, and which pairs are dropped.

    Attributes:
      is_plain: there is nothing but the scale.
      is_total: logits and their derivatives are finite at every pair, whether it attends or not.
      dropout: what of the weights is dropped, or None.

    Args:
      operands: with functions and dropout as streams.
      tile_map: of the kernel; its form does not matter.
    """

    def __init__(self, problem: Problem, operands: Operands, tile_map: TileMap):
        functions = operands.functions
        self.is_plain, self.dropout = is_plain(problem), operands.dropout
        self.is_total = all(function.is_total for function in functions)
        self._scale, self._transpose = problem.scale, tile_map.transpose
        values = [Value(array, axes) for function in functions for array, axes in function.leaves()]
        self._values = TileValues(values, tile_map)
        self._words = TileValues([Value(*leaf) for leaf in self.dropout.leaves()] if self.dropout else (), tile_map)
        self._function = _composed(problem.softcap, tuple((f.fn, len(f.arrays)) for f in functions))
        self._dtypes = _dtypes(values)
        flags = learned_flags(problem, operands)
        floats = [i for i, value in enumerate(values) if value.array.dtype == np.float32]
        # Of the derivatives by floating values, those that are wanted.
        self._wanted = tuple(position for position, i in enumerate(floats) if flags[i])

    @property
    def unit(self) -> float:
        """What the products are multiplied by, before the softmax, to be logits."""
        return self._scale if self.is_plain else 1.0

    def operands(self) -> tuple[jax.Array, ...]:
        return *self._values.operands(), *self._words.operands()

    def take(self, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The references to the `operands()`, which come first, and the rest."""
        count = self._values.count + self._words.count
        return refs[:count], refs[count:]

    def of(self, refs: tuple[Any, ...], qk: Any, column_ids: Any, **place: Any) -> Any:
        """The logits of a tile; `place` says b, n, q_at and k_at."""
        (s,) = self._logits(*self._arguments(refs, qk, column_ids, **place))
        return s

    @functools.cached_property
    def _logits(self) -> Elementwise:
        return Elementwise.of(self._function, self._dtypes)

    def with_derivatives(
        self, refs: tuple[Any, ...], qk: Any, column_ids: Any, **place: Any
    ) -> tuple[Any, Any, list[Any]]:
        """The logits, their derivative by scale · qk, and those by the values that are learned."""
        evaluate = value_and_derivatives(self._function, self._dtypes)
        s, by_qk, *by_values = evaluate(*self._arguments(refs, qk, column_ids, **place))
        return s, by_qk, [by_values[position] for position in self._wanted]

    def dropped(self, refs: tuple[Any, ...], *tiles: Any, **place: Any) -> tuple[Any, ...]:
        """The tiles, 0 at pairs that are dropped and larger by 1 / (1 - rate) at the others; `place` as of `of`."""
        if self.dropout is None:
            return tiles
        rows_a, rows_b, columns = self._words.on_tile(refs[self._values.count :], **place, shape=tiles[0].shape)
        kept = is_kept(pair_bits(RowWords(rows_a, rows_b), columns), self.dropout.rate)
        return tuple(jnp.where(kept, x * np.float32(1 / (1 - self.dropout.rate)), 0) for x in tiles)

    @property
    def learned(self) -> int:
        """How many values are learned."""
        return len(self._wanted)

    def _arguments(
        self, refs: tuple[Any, ...], qk: Any, column_ids: Any, *, b: Any, n: Any, q_at: Any, k_at: Any
    ) -> tuple:
        q, k = tile_indices(column_ids, q_at=q_at, k_at=k_at, shape=qk.shape, transpose=self._transpose)
        values = self._values.on_tile(refs, b=b, n=n, q_at=q_at, k_at=k_at, shape=qk.shape)
        return qk * np.float32(self._scale), q, k, *values


def is_plain(problem: Problem) -> bool:
    """Whether P and dS follow from q · k by the scale, the lse and delta."""
    return problem.softcap is None and problem.functions is None and not problem.dropout_rate


def refusal(problem: Problem) -> str | None:
    """Why a kernel cannot compute these logits, or None."""
    if is_plain(problem):
        return None
    functions = problem.functions.value if problem.functions else ()
    sizes = {"T": problem.T, "S": problem.S, "dtype": compute_dtype(problem.dtype)}
    try:
        functions = tuple(streamed(function, **sizes) for function in functions)
    except ArgumentError as error:
        return str(error)
    values = [Value(array, axes) for function in functions for array, axes in function.leaves()]
    for array, axes in values:
        if axes not in AXES:
            kinds = {"BND": "diagonal", "BNTS": "pair"}
            return f"its kernels take no number for each {kinds[axes]} of a score function yet, as {functions[-1]} has"
        if axes == "BNT" and array.dtype == np.float32 and array.shape[-1] > 1:
            return f"its kernels give no cotangent for each query of a score function yet, as {functions[-1]} wants"
        if np.dtype(array.dtype) not in DTYPES:
            return f"its kernels take float32, int32 and booleans of a score function, not {array.dtype}"
    composed = _composed(problem.softcap, tuple((f.fn, len(f.arrays)) for f in functions))
    reason = value_and_derivatives(composed, _dtypes(values)).refusal
    return reason and f"{reason}, of {functions[-1]}"


def _dtypes(values: list[Value]) -> tuple[np.dtype, ...]:
    """Of s, q, k and the values."""
    return np.dtype(np.float32), *[np.dtype(np.int32)] * 2, *(np.dtype(value.array.dtype) for value in values)


# Cached, so that one composition is one function: `value_and_derivatives` finds it again.
@functools.lru_cache(maxsize=256)
def _composed(softcap: float | None, functions: tuple[tuple[Callable[..., Any], int], ...]) -> Callable[..., Any]:
    """The function (s, q, k, *values) of a scalar; values are the arrays of each function, its b and its n."""

    def run(s: Any, q: Any, k: Any, *values: Any) -> Any:
        def steps(s: Any, _: Any) -> Any:
            rest = list(values)
            for fn, count in functions:
                (*arrays, b, n), rest = rest[: count + 2], rest[count + 2 :]
                s = fn(s, b, n, q, k, *arrays)
            return jnp.asarray(s)

        return logits(s, scale=1.0, bias=None, cap=softcap, steps=steps if functions else None, allowed=None)

    return run
