"""Which tiles a block of threads visits, inside a kernel: `TileMap` in either of its forms behind one record."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jflash.backends.mosaic_gpu.primitives import (
    BY_COLUMN,
    BY_ROW,
    along_columns,
    along_rows,
    i32,
    load_global,
    row_ids,
)
from jflash.masks.mask import TileKind, Value
from jflash.masks.tile_map import TileMap


@dataclasses.dataclass(frozen=True)
class Visits:
    """The tiles of one row, in the order of the visits.

    Attributes:
      count: how many, at least 1: a row that sees nothing evaluates one tile and finds it masked.
      column: of the i-th visit, the column of its tile.
      is_partial: of the i-th visit and its column, whether the mask must be evaluated.
    """

    count: Any
    column: Callable[[Any], Any]
    is_partial: Callable[[Any, Any], Any]

    def split(self, index: Any, splits: int) -> "Visits":
        """One of so many even parts of the visits, possibly none of them."""
        first, stop = (lax.div(self.count * end, i32(splits)) for end in (index, index + 1))
        return Visits(
            stop - first, lambda i: self.column(first + i), lambda i, column: self.is_partial(first + i, column)
        )


class TileVisits:
    """The visits of all rows of a `TileMap`, and its mask on the tiles: all that a kernel asks of a mask.

    Args:
      tile_map: rows are the blocks of threads.
      parts: warpgroups that share the rows of a block evenly; each has its own part of the partial tiles where these
        are known by arithmetic.
    """

    def __init__(self, tile_map: TileMap, *, parts: int):
        self._map, self._parts = tile_map, parts
        block = "block_k" if tile_map.transpose else "block_q"
        self._part_map = dataclasses.replace(tile_map, **{block: getattr(tile_map, block) // parts})
        self._values = tile_map.mask.values()
        self._blocks = {"T": tile_map.block_q, "S": tile_map.block_k}
        # What of `operands()` says which tiles to visit: the values, or the two arrays of the lists.
        self._visit_count = len(self._values) if tile_map.form == "runs" else 2
        self.is_masked = not self._part_map.is_all_full

    @property
    def rows(self) -> int:
        return self._map.rows

    def operands(self) -> tuple[jax.Array, ...]:
        """The arrays that a kernel needs of the mask, for `of_row` and for `allowed`."""
        values = tuple(self._padded(value) for value in self._values)
        if self._map.form == "runs":
            return tuple(jnp.asarray(value.expanded().reshape(-1), jnp.int32) for value in self._values) + values
        lists = self._map.lists()
        partial = (jnp.asarray(lists.kind) != TileKind.FULL.value).astype(jnp.int32)
        entries = jnp.asarray(lists.column, jnp.int32) * 2 + partial
        return jnp.asarray(lists.count, jnp.int32)[:, 0], entries[:, 0], *values

    def take(self, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The references to the `operands()`, which come first, and the rest."""
        count = self._visit_count + len(self._values)
        return refs[:count], refs[count:]

    def of_row(self, refs: tuple[Any, ...], *, b: Any, row: Any, part: Any) -> Visits:
        """The visits of a row; `refs` hold the `operands()` in global memory."""
        refs = refs[: self._visit_count]
        if self._map.form == "runs":
            values = [ref[_row_of(ref, b)] for ref in refs]
            whole = self._map.run(row, *values)
            start, stop = i32(whole.start), i32(whole.stop)
            own = self._part_map.run(row * self._parts + part, *values)

            first_full, full_count = i32(own.full_start) - start, i32(own.full_stop) - i32(own.full_start)

            def is_outside(i, _):
                # 0 <= i - first_full < full_count as one comparison: two make LLVM copy the code around the branch,
                # which cost the backward kernel at H=128 the registers of 64 bytes of spills (ptxas 13.0).
                return (i - first_full).astype(jnp.uint32) >= full_count.astype(jnp.uint32)

            return Visits(lax.max(stop - start, i32(1)), lambda i: start + i, is_outside)
        count_ref, entries = refs
        b = _row_of(count_ref, b)
        count = lax.max(count_ref[b, row], i32(1))
        return Visits(
            count,
            lambda i: lax.shift_right_logical(entries[b, row, i], i32(1)),
            lambda i, _: lax.bitwise_and(entries[b, row, i], i32(1)) != 0,
        )

    def allowed(
        self, refs: tuple[Any, ...], column_ids: jax.Array, *, b: Any, q_at: Any, k_at: Any, shape: tuple[int, int]
    ) -> jax.Array:
        """Which pairs of a tile attend: queries by keys, or keys by queries where the map is transposed.

        Args:
          refs: the `operands()` in global memory.
          column_ids: 0, 1, ... for the columns, from shared memory: LLVM computes an iota outside of the loop, where it
            takes registers that the kernels do not have.
          b: the batch row.
          q_at, k_at: the first query and the first key of the tile.
        """
        row_at, column_at = (k_at, q_at) if self._map.transpose else (q_at, k_at)

        def by_row(ref: Any) -> jax.Array:
            return along_rows(load_global(ref, row_at, shape[0], layout=BY_ROW), shape)

        def by_column(ref: Any) -> jax.Array:
            return along_columns(load_global(ref, column_at, shape[1], layout=BY_COLUMN), shape)

        sides = (row_ids(shape) + row_at, by_row), (along_columns(column_ids + column_at, shape), by_column)
        (k, load_k), (q, load_q) = sides if self._map.transpose else sides[::-1]
        loads = {"T": load_q, "S": load_k}
        values = [self._value(value, ref, b, loads) for value, ref in zip(self._values, refs[self._visit_count :])]
        allowed = self._map.mask.evaluate(q, k, *values)
        if self._map.S % self._map.block_k:
            allowed &= k < self._map.S
        if self._map.T % self._map.block_q:
            allowed &= q < self._map.T
        return allowed

    def _padded(self, value: Value) -> jax.Array:
        """Up to whole tiles, so that a tile's part is in bounds."""
        array = jnp.asarray(value.array, jnp.int32).reshape(value.array.shape or (1,))
        length_axis = value.axes[-1:]
        if length_axis in self._blocks and array.shape[-1] > 1:
            array = jnp.pad(array, ((0, 0), (0, -array.shape[-1] % self._blocks[length_axis])))
        return array

    def _value(self, value: Value, ref: Any, b: Any, loads: dict[str, Callable[[Any], jax.Array]]) -> Any:
        b = _row_of(ref, b)
        length_axis = value.axes[-1:]
        if length_axis in loads and ref.shape[-1] > 1:
            return loads[length_axis](ref.at[b])
        return ref[b, 0] if len(ref.shape) == 2 else ref[b]


def _row_of(ref: Any, b: Any) -> Any:
    return b if ref.shape[0] > 1 else i32(0)


def head_and_row(block: Any, *, rows: int, heads: int, head_group: int) -> tuple[Any, Any]:
    """The head, counted over all batch rows, and the row of tiles of a block of threads.

    The last rows, the longest of a causal mask, come first; `head_group` heads stand side by side, so that their keys
    and values stay in the L2 cache. Where a mesh or `jax.vmap` leaves a number of heads that it does not divide, the
    largest that divides both is taken.
    """
    head_group = math.gcd(head_group, heads)
    rest = lax.div(block, i32(head_group))
    head = lax.rem(block, i32(head_group)) + lax.div(rest, i32(rows)) * head_group
    return head, rows - 1 - lax.rem(rest, i32(rows))
