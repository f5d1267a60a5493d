"""What a tile has besides q · k, inside a kernel: bias, softcap, ALiBi, functions of the caller's, dropout."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jflash.backends.mosaic_gpu import argument_tiles
from jflash.backends.mosaic_gpu.argument_tiles import ArgumentTiles
from jflash.backends.mosaic_gpu.elementwise import Elementwise, value_and_derivatives
from jflash.backends.mosaic_gpu.pair_tiles import PairTiles
from jflash.backends.mosaic_gpu.tile_values import DTYPES, TileValues, length_of, squeezed, tile_indices
from jflash.backends.protocol import Operands, learned_flags, logit_arrays
from jflash.errors import ArgumentError
from jflash.masks.mask import Value
from jflash.masks.tile_map import TileMap
from jflash.numerics.dropout import RowWords, is_kept, pair_bits
from jflash.numerics.logits import logits
from jflash.numerics.precision import compute_dtype
from jflash.problem import Problem
from jflash.scores import ScoreFunction, streamed


class TileTerms:
    """The logits of one problem on tiles, their derivatives, and which pairs are dropped.

    Attributes:
      is_plain: there is nothing but the scale, and maybe a bias of pairs.
      is_total: the derivatives that are wanted are finite at every pair, whether it attends or not, and whatever its
        values are.
      dropout: what of the weights is dropped, or None.

      pairs: the bias on tiles, where it has a number for each pair.
      learns_pairs: somebody asks for its cotangent.
      arguments: on tiles what functions have for each diagonal or pair.
      summed: of the derivatives by floating values, those by which cotangents are summed over queries.
      summed_over_keys: those by what has a number for each query, whose cotangents are.
      learned_arguments: and those by `arguments` whose cotangents somebody asks for.

    Args:
      operands: with functions and dropout as streams.
      tile_map: of the kernel; its form does not matter.
      warpgroups, split: as of `PairTiles`.
    """

    def __init__(self, problem: Problem, operands: Operands, tile_map: TileMap, *, warpgroups: int, split: str):
        functions = operands.functions
        self.is_plain, self.dropout = is_plain(problem), operands.dropout
        self._scale, self._transpose = problem.scale, tile_map.transpose
        arrays, flags = [_value(*leaf) for leaf in logit_arrays(operands)], learned_flags(problem, operands)
        of_pairs = operands.bias if problem.has_bias_of_pairs else None
        self.pairs = PairTiles("bias", of_pairs, tile_map, warpgroups=warpgroups, split=split)
        self.learns_pairs = bool(self.pairs) and flags[0]
        arrays, flags = arrays[self.pairs.count :], flags[self.pairs.count :]
        self._are_arguments = [value.axes in argument_tiles.AXES for value in arrays]
        of_arguments = [value for value in arrays if value.axes in argument_tiles.AXES]
        self.arguments = ArgumentTiles(of_arguments, tile_map, warpgroups=warpgroups, split=split)
        others = [value for value in arrays if value.axes not in argument_tiles.AXES]
        self._values = TileValues("term_value", others, tile_map)
        words = [Value(*leaf) for leaf in self.dropout.leaves()] if self.dropout else ()
        self._words = TileValues("dropout_word", words, tile_map)
        self._function = _function_of(problem, functions)
        self._dtypes = _dtypes(arrays)
        floats = [i for i, value in enumerate(arrays) if value.array.dtype == np.float32]
        learned = {position: arrays[i] for position, i in enumerate(floats) if flags[i]}
        self.learned_arguments = tuple(i for i, value in learned.items() if value.axes in argument_tiles.AXES)
        self.summed_over_keys = tuple(i for i, value in learned.items() if length_of(value) == "T")
        self.summed = tuple(i for i in learned if i not in (*self.learned_arguments, *self.summed_over_keys))
        # What a key that nobody sees has may be NaN, and so may a derivative that it is a factor of.
        derivatives, of_values = [1, *(2 + i for i in learned)], [3 + i for i in floats]
        self.is_total = all(function.is_total for function in functions) and not (
            of_values and self._derivatives.depends(derivatives, of_values)
        )

    @property
    def unit(self) -> float:
        """What the products are multiplied by, before the softmax, to be logits."""
        return self._scale if self.is_plain else 1.0

    def operands(self) -> tuple[jax.Array, ...]:
        arguments_and_pairs = *self.arguments.operands(), *self.pairs.operands()
        return *self._values.operands(), *self._words.operands(), *arguments_and_pairs

    def take(self, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The references to the `operands()`, which come first, and the rest."""
        count = self._values.count + self._words.count + self.arguments.count + self.pairs.count
        return refs[:count], refs[count:]

    @property
    def arrivals(self) -> int:
        """How often `load` arrives at its barrier."""
        return self._values.arrivals + self._words.arrivals

    def scratch(self, slots: int) -> dict[str, Any]:
        """Scratch types of what belongs to the columns of so many tiles."""
        return self._values.scratch(slots) | self._words.scratch(slots)

    def load(self, refs: tuple[Any, ...], *place: Any, **tile: Any) -> None:
        """`TileValues.load` of all arrays that are not on tiles; `refs` hold the `operands()`."""
        self._values.load(refs[: self._values.count], *place, **tile)
        self._words.load(refs[self._values.count :][: self._words.count], *place, **tile)

    # What TMA brings of pairs and diagonals, as of `PairTiles`.

    def pair_scratch(self) -> dict[str, Any]:
        return {**self.arguments.scratch(), **self.pairs.scratch()}

    def load_pairs(self, refs: tuple[Any, ...], s: Any, step: Any, **place: Any) -> None:
        first = self._values.count + self._words.count
        self.arguments.load(refs[first : first + self.arguments.count], s, step, **place)
        self.pairs.load(refs, s, step, **place)

    def see_pair_releases(self, s: Any, steps: Any) -> None:
        self.arguments.see_releases(s, steps)
        self.pairs.see_releases(s, steps)

    # Below, `qk` is what `biased` has added the bias of pairs to.

    def of(self, refs: tuple[Any, ...], qk: Any, column_ids: Any, arguments: list[Any], **place: Any) -> Any:
        """The logits of a tile, of whose arguments these are the parts.

        `place` says b, n, q_at, k_at, and `columns` where `load` brought these.
        """
        (s,) = self._logits(*self._arguments(refs, qk, column_ids, arguments, **place))
        return s

    @functools.cached_property
    def _logits(self) -> Elementwise:
        return Elementwise.of(self._function, self._dtypes)

    @property
    def _derivatives(self) -> Elementwise:
        return value_and_derivatives(self._function, self._dtypes)

    def with_derivatives(
        self, refs: tuple[Any, ...], qk: Any, column_ids: Any, arguments: list[Any], **place: Any
    ) -> tuple[Any, Any, list[Any]]:
        """The logits, their derivative by scale · qk, and so by a bias of pairs, and those by floating values."""
        s, by_qk, *by_values = self._derivatives(*self._arguments(refs, qk, column_ids, arguments, **place))
        return s, by_qk, by_values

    def dropped(self, refs: tuple[Any, ...], *tiles: Any, **place: Any) -> tuple[Any, ...]:
        """The tiles, 0 at pairs that are dropped and larger by 1 / (1 - rate) at the others; `place` as of `of`."""
        if self.dropout is None:
            return tiles
        refs = refs[self._values.count : self._values.count + self._words.count]
        rows_a, rows_b, columns = self._words.on_tile(refs, **place, shape=tiles[0].shape)
        kept = is_kept(pair_bits(RowWords(rows_a, rows_b), columns), self.dropout.rate)
        return tuple(jnp.where(kept, x * np.float32(1 / (1 - self.dropout.rate)), 0) for x in tiles)

    def biased(self, qk: Any, s: Any, warpgroup: Any, columns: slice | None = None) -> Any:
        """Products, or what they start at, and bias / scale of a warpgroup's part, or of some columns of it."""
        if not self.pairs:
            return qk
        return qk + self.pairs.part(s, warpgroup, columns) * np.float32(1 / self._scale)

    def _arguments(self, refs: tuple[Any, ...], qk: Any, column_ids: Any, arguments: list[Any], **place: Any) -> tuple:
        at = {"q_at": place["q_at"], "k_at": place["k_at"], "shape": qk.shape}
        q, k = tile_indices(column_ids, **at, transpose=self._transpose)
        values = iter(self._values.on_tile(refs[: self._values.count], **place, shape=qk.shape))
        tiles = iter(arguments)
        ordered = (next(tiles if is_one else values) for is_one in self._are_arguments)
        return qk * np.float32(self._scale), q, k, *ordered


def is_plain(problem: Problem) -> bool:
    """Whether P and dS follow from q · k, and a bias of pairs, by the scale, the lse and delta."""
    has_values = problem.functions is not None or (problem.bias is not None and not problem.has_bias_of_pairs)
    return not has_values and problem.softcap is None and not problem.dropout_rate


def refusal(problem: Problem) -> str | None:
    """Why a kernel cannot compute these logits, or None."""
    if is_plain(problem):
        return None
    try:
        functions = _streamed(problem)
    except ArgumentError as error:
        return str(error)
    for function, own in zip(problem.functions.value if problem.functions else (), functions):
        # Numbers for each pair take no more memory than what the caller holds.
        given = sum(math.prod(array.shape) for array, _ in function.leaves())
        if any(axes == "BNTS" and math.prod(array.shape) > given for array, axes in own.leaves()):
            wanted = "an array of all pairs where it needs a number for each"
            return f"its kernels take of a score function {wanted}, and {function} has smaller ones"
    arrays = [_value(*leaf) for function in functions for leaf in function.leaves()]
    of_bias = []
    if problem.bias is not None and not problem.has_bias_of_pairs:
        of_bias = [_value(jax.ShapeDtypeStruct(*problem.bias), "BNTS")]
    for array, _ in arrays:
        if np.dtype(array.dtype) not in DTYPES:
            return f"its kernels take float32, int32 and booleans of a score function, not {array.dtype}"
    evaluate = value_and_derivatives(_function_of(problem, functions), _dtypes([*of_bias, *arrays]))
    # What is refused is of the caller's: a softcap and a bias are not.
    return evaluate.refusal and f"{evaluate.refusal}, of {functions[-1]}"


def axes_of_arguments(problem: Problem) -> list[str]:
    """The axes of what its functions have for each diagonal or pair."""
    values = (_value(*leaf) for function in _streamed(problem) for leaf in function.leaves())
    return [value.axes for value in values if value.axes in argument_tiles.AXES]


def _streamed(problem: Problem) -> tuple[ScoreFunction, ...]:
    sizes = {"T": problem.T, "S": problem.S, "dtype": compute_dtype(problem.dtype)}
    functions = problem.functions.value if problem.functions else ()
    return tuple(streamed(function, **sizes) for function in functions)


def _value(array: Any, axes: str) -> Value:
    """An array of the logits as tiles of it are: floating numbers in float32."""
    value = squeezed(Value(array, axes))
    if value.axes == "BNTS" or not jnp.issubdtype(array.dtype, jnp.floating):
        return value
    if isinstance(array, jax.ShapeDtypeStruct):
        return value._replace(array=jax.ShapeDtypeStruct(value.array.shape, np.float32))
    return value._replace(array=value.array.astype(np.float32))


def _dtypes(values: list[Value]) -> tuple[np.dtype, ...]:
    """Of s, q, k and the values."""
    return np.dtype(np.float32), *[np.dtype(np.int32)] * 2, *(np.dtype(value.array.dtype) for value in values)


def _function_of(problem: Problem, functions: tuple[ScoreFunction, ...]) -> Callable[..., Any]:
    bias = None if problem.bias is None else "of pairs" if problem.has_bias_of_pairs else "a value"
    return _composed(problem.softcap, bias, tuple((f.fn, len(f.arrays)) for f in functions))


# Cached, so that one composition is one function: `value_and_derivatives` finds it again.
@functools.lru_cache(maxsize=256)
def _composed(
    softcap: float | None, bias: str | None, functions: tuple[tuple[Callable[..., Any], int], ...]
) -> Callable[..., Any]:
    """The function (s, q, k, *values) of a scalar; values are the bias, and the arrays, b and n of each function.

    A bias of pairs is in `s` already; then `s` may be -inf.
    """

    def run(s: Any, q: Any, k: Any, *values: Any) -> Any:
        of_bias, values = (values[0], values[1:]) if bias == "a value" else (None, values)
        if bias == "of pairs":
            of_bias = jnp.float32(-0.0)  # No number changes by it, so that it costs no instruction.

        def steps(s: Any, _: Any) -> Any:
            rest = list(values)
            for fn, count in functions:
                (*arrays, b, n), rest = rest[: count + 2], rest[count + 2 :]
                s = fn(s, b, n, q, k, *arrays)
            return jnp.asarray(s)

        return logits(s, scale=1.0, bias=of_bias, cap=softcap, steps=steps if functions else None, allowed=None)

    return run
