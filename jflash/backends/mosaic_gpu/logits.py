"""From the products q · k of a tile to its logits, inside a kernel: softcap, ALiBi, functions of the caller's."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jflash.backends.mosaic_gpu.elementwise import Elementwise, value_and_derivatives
from jflash.backends.mosaic_gpu.tile_values import AXES, DTYPES, TileValues, tile_indices
from jflash.errors import ArgumentError
from jflash.masks.mask import Value
from jflash.masks.tile_map import TileMap
from jflash.numerics.logits import logits
from jflash.numerics.precision import compute_dtype
from jflash.problem import Problem
from jflash.scores import ScoreFunction, streamed


class TileLogits:
    """The logits of one problem on tiles, and their derivatives.

    Attributes:
      is_linear: they are q · k times the scale.
      is_total: they and their derivatives are finite at every pair, whether it attends or not.

    Args:
      functions: those of the operands, with arrays in them.
      tile_map: of the kernel; its form does not matter.
    """

    def __init__(self, problem: Problem, functions: tuple[ScoreFunction, ...], tile_map: TileMap):
        self.is_linear = is_linear(problem)
        self.is_total = all(function.is_total for function in functions)
        self._scale, self._transpose = problem.scale, tile_map.transpose
        values = [Value(array, axes) for function in functions for array, axes in function.leaves()]
        self._values = TileValues(values, tile_map)
        self._function = _composed(problem.softcap, tuple((f.fn, len(f.arrays)) for f in functions))
        self._dtypes = _dtypes(values)
        # `refusal` keeps a bias away, so that the arrays of the functions are the first of the terms.
        flags = list(itertools.islice(itertools.chain(problem.learned, itertools.repeat(False)), len(values)))
        floats = [i for i, value in enumerate(values) if value.array.dtype == np.float32]
        # Of the derivatives by floating values, those that are wanted.
        self._wanted = tuple(position for position, i in enumerate(floats) if flags[i])

    @property
    def unit(self) -> float:
        """What the products are multiplied by, before the softmax, to be logits."""
        return self._scale if self.is_linear else 1.0

    def operands(self) -> tuple[jax.Array, ...]:
        return self._values.operands()

    def take(self, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The references to the `operands()`, which come first, and the rest."""
        return refs[: self._values.count], refs[self._values.count :]

    def of(self, refs: tuple[Any, ...], qk: Any, column_ids: Any, **place: Any) -> Any:
        """The logits of a tile; `place` says b, n, q_at and k_at."""
        (s,) = Elementwise.of(self._function, self._dtypes)(*self._arguments(refs, qk, column_ids, **place))
        return s

    def with_derivatives(
        self, refs: tuple[Any, ...], qk: Any, column_ids: Any, **place: Any
    ) -> tuple[Any, Any, list[Any]]:
        """The logits, their derivative by scale · qk, and those by the values that are learned."""
        evaluate = value_and_derivatives(self._function, self._dtypes)
        s, by_qk, *by_values = evaluate(*self._arguments(refs, qk, column_ids, **place))
        return s, by_qk, [by_values[position] for position in self._wanted]

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


def is_linear(problem: Problem) -> bool:
    """Whether the logits are q · k times the scale."""
    return problem.softcap is None and problem.functions is None


def refusal(problem: Problem) -> str | None:
    """Why a kernel cannot compute these logits, or None."""
    if is_linear(problem):
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
