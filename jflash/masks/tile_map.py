"""Which tiles a kernel visits: the proof of a mask, applied to the tiles of one problem.

Two forms. **runs**: the visited columns of a row are one run, found by arithmetic on the row's index inside the kernel,
no memory read. **lists**: the kind of every tile, (rows, columns) of them, computed on the device under jit; never
T x S.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflash.masks.mask import Interval, Mask, TileKind, Value, is_traced, maximum, minimum, where

# Tiles of kernels are multiples of it.
_GRAIN = 64


class Run(NamedTuple):
    """The columns one row visits: `start <= full_start <= full_stop <= stop`, stops excluded.

    Columns from `full_start` to `full_stop` are FULL, the others of the run PARTIAL, all outside EMPTY.
    """

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any


class TileLists(NamedTuple):
    """The columns each row visits, one row of the arrays for each row of tiles (after the axes B and N).

    Attributes:
      count: (..., rows) how many columns the row visits.
      column: (..., rows, columns) the visited columns in order, then the others.
      kind: (..., rows, columns) the `TileKind` of each of them.
    """

    count: Any
    column: Any
    kind: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileMap:
    """The tiles of one mask over one problem.

    Rows are query tiles and columns key tiles; transposed, for dk and dv, rows are key tiles and columns query tiles.
    A tile that sticks out of the problem is never FULL: whoever evaluates it compares indices with the lengths as well.

    Attributes:
      mask: a mask after `bind`.
      T, S: number of queries and of keys.
      block_q, block_k: size of a tile.
      transpose: rows are key tiles.
    """

    mask: Mask
    T: int
    S: int
    block_q: int
    block_k: int
    transpose: bool = False

    @property
    def rows(self) -> int:
        return -(-self.S // self.block_k) if self.transpose else -(-self.T // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.T // self.block_q) if self.transpose else -(-self.S // self.block_k)

    @property
    def form(self) -> Literal["runs", "lists"]:
        return "runs" if self.mask.has_spans else "lists"

    @property
    def is_all_full(self) -> bool:
        """Whether it is known when tracing that every tile is FULL, so that no mask code is needed."""
        if self.mask.values():
            return False
        if self.form == "lists":
            return bool((self.kinds() == TileKind.FULL.value).all())
        run = self.run(np.arange(self.rows, dtype=np.int32))
        return bool(np.all(run.full_start == 0) and np.all(run.full_stop == self.columns))

    def run(self, row: Any, *values: Any) -> Run:
        """The run of one row, or of an array of rows, with the mask's values of the batch row; form "runs" only."""
        if self.transpose:
            span_of, row_block, row_length = self.mask.query_span, self.block_k, self.S
            column_block, column_length = self.block_q, self.T
        else:
            span_of, row_block, row_length = self.mask.key_span, self.block_q, self.T
            column_block, column_length = self.block_k, self.S
        first = row * row_block
        ragged = first + row_block > row_length
        span = span_of(Interval(first, minimum(first + row_block, row_length) - 1), *values)

        hull_first, hull_last = maximum(span.hull.first, 0), minimum(span.hull.last, column_length - 1)
        seen = hull_first <= hull_last
        start = where(seen, hull_first // column_block, 0)
        stop = where(seen, hull_last // column_block + 1, 0)

        common_first, common_last = maximum(span.common.first, 0), minimum(span.common.last, column_length - 1)
        full_start = minimum(maximum(-(-common_first // column_block), start), stop)
        full_stop = where(ragged, full_start, maximum(minimum((common_last + 1) // column_block, stop), full_start))
        return Run(start, full_start, full_stop, stop)

    def kinds(self) -> Any:
        """The `TileKind` of every tile, int8 (B or 1, N or 1, rows, columns).

        It is a numpy array, known when tracing, where the mask holds no JAX arrays.
        """
        queries = _tiles(-(-self.T // self.block_q), self.block_q, self.T, axis=2)
        keys = _tiles(-(-self.S // self.block_k), self.block_k, self.S, axis=3)
        if self._has_grains:
            grains = dataclasses.replace(self, block_q=_GRAIN, block_k=_GRAIN, transpose=False).kinds()
            least, most = _bounds(Value(grains, "BNTS"), self.block_q // _GRAIN, self.block_k // _GRAIN)
            kinds = where(least == most, least, TileKind.PARTIAL.value)
        else:
            bounds = [_bounds(value, self.block_q, self.block_k) for value in self.mask.values()]
            kinds = self.mask.tile_kind(queries, keys, *bounds)
        ragged = (queries.first + self.block_q > self.T) | (keys.first + self.block_k > self.S)
        kinds = where(ragged, minimum(kinds, TileKind.PARTIAL.value), kinds)
        kinds = kinds.astype(np.int8)
        return kinds.swapaxes(2, 3) if self.transpose else kinds

    @property
    def _has_grains(self) -> bool:
        """Whether kinds are made of those of smaller tiles.

        To evaluate a function of the caller's takes long: where tiles are multiples of one size, XLA finds that the
        forward and the backward pass of one program do the same, and does it once.
        """
        blocks = self.block_q, self.block_k
        return self.mask.has_function and blocks != (_GRAIN, _GRAIN) and not any(block % _GRAIN for block in blocks)

    def lists(self) -> TileLists:
        """The visited columns of each row, as arrays that a kernel reads."""
        return lists_of(self.kinds())


# Behind all visited columns in the order of a list; columns and kinds lie below it.
_SKIPPED = np.int32(2**30)


def lists_of(kinds: Any) -> TileLists:
    """The lists of any array of kinds (..., rows, columns); numpy where `kinds` is.

    One sort of one array, and nothing that gathers or scatters: on a GPU three small kernels with what comes before and
    after. Visited columns stay in order: neighbours in time are neighbours in memory.
    """
    entries = np.arange(kinds.shape[-1], dtype=np.int32) * 4 + kinds.astype(np.int32)
    entries = where(kinds == TileKind.EMPTY.value, entries + _SKIPPED, entries)
    entries = jnp.sort(entries, axis=-1, stable=False) if is_traced(entries) else np.sort(entries, axis=-1)
    column, kind = (entries & (_SKIPPED - 1)) >> 2, (entries & 3).astype(np.int8)
    return TileLists((entries < _SKIPPED).sum(-1, dtype=np.int32), column, kind)


def union(kinds: Any, axes: tuple[int, ...] = (0, 1)) -> Any:
    """One kind for all that lies along some axes, by default batch rows and heads: sound for each of them."""
    least, most = kinds.min(axes), kinds.max(axes)
    return where(least == most, least, TileKind.PARTIAL.value).astype(np.int8)


def _tiles(count: int, block: int, length: int, *, axis: int) -> Interval:
    """First and last index of each tile, along one of the four axes B, N, T, S."""
    first = np.arange(count, dtype=np.int32) * np.int32(block)
    shape = tuple(count if position == axis else 1 for position in range(4))
    return Interval(first.reshape(shape), np.minimum(first + block, length).astype(np.int32).reshape(shape) - 1)


def _bounds(value: Value, block_q: int, block_k: int) -> Interval:
    """The smallest and the largest of a value in each tile, with axes B, N, query tiles, key tiles."""
    least = most = value.expanded()
    for axis, block in ((2, block_q), (3, block_k)):
        least, most = _reduce(least, axis, block, "min"), _reduce(most, axis, block, "max")
    return Interval(least, most)


def _reduce(array: Any, axis: int, block: int, how: Literal["min", "max"]) -> Any:
    length = array.shape[axis]
    if length == 1:
        return array
    tiles = -(-length // block)
    if tiles * block > length:
        # Repeating the last element changes neither minimum nor maximum.
        padding = [(0, tiles * block - length if position == axis else 0) for position in range(4)]
        array = (jnp if isinstance(array, jax.Array) else np).pad(array, padding, mode="edge")
    split = (*array.shape[:axis], tiles, block, *array.shape[axis + 1 :])
    return getattr(array.reshape(split), how)(axis=axis + 1)
