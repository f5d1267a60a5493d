"""Which tiles a block of threads visits, inside a kernel: `TileMap` in either of its forms behind one record."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jflash.backends.mosaic_gpu.primitives import i32
from jflash.masks.mask import Mask, TileKind, Value
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


class TileVisits:
    """The visits of all rows of a `TileMap`, and what a kernel needs of the mask.

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
        self.is_masked = not self._part_map.is_all_full

    @property
    def rows(self) -> int:
        return self._map.rows

    def operands(self) -> tuple[jax.Array, ...]:
        """The arrays that `of_row` reads: those that a value per batch row holds, or the lists."""
        if self._map.form == "runs":
            return tuple(jnp.asarray(value.expanded().reshape(-1), jnp.int32) for value in self._values)
        lists = self._map.lists()
        partial = (jnp.asarray(lists.kind) != TileKind.FULL.value).astype(jnp.int32)
        entries = jnp.asarray(lists.column, jnp.int32) * 2 + partial
        return jnp.asarray(lists.count, jnp.int32)[:, 0], entries[:, 0]

    def of_row(self, refs: tuple[Any, ...], *, b: Any, row: Any, part: Any) -> Visits:
        """The visits of a row; `refs` hold the `operands()` in global memory."""
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


def _row_of(ref: Any, b: Any) -> Any:
    return b if ref.shape[0] > 1 else i32(0)


def head_and_row(block: Any, *, rows: int, head_group: int) -> tuple[Any, Any]:
    """The head, counted over all batch rows, and the row of tiles of a block of threads.

    The last rows, the longest of a causal mask, come first; `head_group` heads stand side by side, so that their keys
    and values stay in the L2 cache.
    """
    rest = lax.div(block, i32(head_group))
    head = lax.rem(block, i32(head_group)) + lax.div(rest, i32(rows)) * head_group
    return head, rows - 1 - lax.rem(rest, i32(rows))


class MaskValues:
    """What a mask needs besides indices, in global memory beside the tiles: padded, so that a tile's part is in bounds.

    Args:
      mask: a mask after `bind`.
      block_q, block_k: multiples to which the values per query and per key are padded.
    """

    def __init__(self, mask: Mask, *, T: int, S: int, block_q: int, block_k: int):
        self._mask, self._T, self._S = mask, T, S
        self._blocks = {"T": block_q, "S": block_k}
        self._values = mask.values()

    def operands(self) -> tuple[jax.Array, ...]:
        return tuple(self._padded(value) for value in self._values)

    def _padded(self, value: Value) -> jax.Array:
        array = jnp.asarray(value.array, jnp.int32).reshape(value.array.shape or (1,))
        length_axis = value.axes[-1:]
        if length_axis in self._blocks and array.shape[-1] > 1:
            block = self._blocks[length_axis]
            array = jnp.pad(array, ((0, 0), (0, -array.shape[-1] % block)))
        return array

    def allowed(
        self, refs: tuple[Any, ...], *, q: jax.Array, k: jax.Array, b: Any, load_q: Callable, load_k: Callable
    ) -> jax.Array:
        """`mask.evaluate` on a tile, and not past the ends.

        Args:
          refs: the `operands()` in global memory.
          q, k: the index of query and of key, each of the tile's shape.
          b: the batch row.
          load_q, load_k: of a one-dimensional reference over all queries or keys, its part of this tile, of the tile's
            shape.
        """
        values = [self._value(value, ref, b, load_q, load_k) for value, ref in zip(self._values, refs)]
        allowed = self._mask.evaluate(q, k, *values)
        if self._S % self._blocks["S"]:
            allowed &= k < self._S
        if self._T % self._blocks["T"]:
            allowed &= q < self._T
        return allowed

    def _value(self, value: Value, ref: Any, b: Any, load_q: Callable, load_k: Callable) -> Any:
        b = _row_of(ref, b)
        if value.axes[-1:] == "T" and ref.shape[-1] > 1:
            return load_q(ref.at[b])
        if value.axes[-1:] == "S" and ref.shape[-1] > 1:
            return load_k(ref.at[b])
        return ref[b, 0] if len(ref.shape) == 2 else ref[b]
