"""Which tiles a block of threads visits, inside a kernel: `TileMap` in either of its forms behind one record."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jflash.backends.mosaic_gpu.elementwise import Elementwise
from jflash.backends.mosaic_gpu.pair_tiles import PairTiles
from jflash.backends.mosaic_gpu.primitives import i32
from jflash.backends.mosaic_gpu.tile_values import Columns, TileValues, squeezed, tile_indices
from jflash.masks.mask import Mask, TileKind
from jflash.masks.tile_map import TileMap, lists_of, union


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
      warpgroups, split: as of `PairTiles`.

    Attributes:
      is_masked: some tiles may be partial.
      pairs: what of the mask has a boolean for each pair, as 0 and 1.
      values: all that it has else.
    """

    def __init__(self, tile_map: TileMap, *, parts: int, warpgroups: int, split: str):
        self._map, self._parts = tile_map, parts
        block = "block_k" if tile_map.transpose else "block_q"
        self._part_map = dataclasses.replace(tile_map, **{block: getattr(tile_map, block) // parts})
        values = [squeezed(value) for value in tile_map.mask.values()]
        of_pairs = [value.array for value in values if value.axes == "BNTS"]
        # 16 bits, since no layout in registers takes eight of each thread's pairs of columns.
        array = jnp.asarray(of_pairs[0]).astype(jnp.bfloat16) if of_pairs else None
        self.pairs = PairTiles("mask", array, tile_map, warpgroups=warpgroups, split=split)
        # Where among the values its tile belongs.
        self._pairs_at = next((i for i, value in enumerate(values) if value.axes == "BNTS"), None)
        self.values = TileValues("mask_value", [value for value in values if value.axes != "BNTS"], tile_map)
        # What of `operands()` says which tiles to visit: the values, or the two arrays of the lists.
        self._visit_count = self.values.count if tile_map.form == "runs" else 2
        self.is_masked = not self._part_map.is_all_full
        self._evaluate = evaluated(tile_map.mask)

    @property
    def rows(self) -> int:
        return self._map.rows

    def operands(self) -> tuple[jax.Array, ...]:
        """The arrays that a kernel needs of the mask, for `of_row` and for `allowed`."""
        values = *self.values.operands(), *self.pairs.operands()
        if self._map.form == "runs":
            rows = (value.expanded().reshape(-1) for value in self._map.mask.values())
            return tuple(jnp.asarray(array, jnp.int32) for array in rows) + values
        # The same for all heads: a tile that some do not see they evaluate, and find masked.
        return *list_operands(union(self._map.kinds(), axes=(1,))), *values

    def take(self, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The references to the `operands()`, which come first, and the rest."""
        count = self._visit_count + self.values.count + self.pairs.count
        return refs[:count], refs[count:]

    def load(self, refs: tuple[Any, ...], *place: Any, **tile: Any) -> None:
        """`TileValues.load` of the mask's values; `refs` hold the `operands()`."""
        self.values.load(self._value_refs(refs), *place, **tile)

    def _value_refs(self, refs: tuple[Any, ...]) -> tuple[Any, ...]:
        return refs[self._visit_count :][: self.values.count]

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
        visits = listed(refs, b=b, row=row)
        return dataclasses.replace(visits, count=lax.max(visits.count, i32(1)))

    def allowed(
        self,
        refs: tuple[Any, ...],
        column_ids: jax.Array,
        *,
        b: Any,
        n: Any,
        q_at: Any,
        k_at: Any,
        shape: tuple[int, int],
        pairs: jax.Array | None,
        columns: Columns | None = None,
    ) -> jax.Array:
        """Which pairs of a tile attend: queries by keys, or keys by queries where the map is transposed.

        Args:
          refs: the `operands()` in global memory.
          column_ids: as of `tile_indices`.
          b, n: the batch row and the query head.
          q_at, k_at: the first query and the first key of the tile.
          pairs: its part of `pairs`, or None.
          columns: what `load` brought of the values, or None where it did not.
        """
        place = {"q_at": q_at, "k_at": k_at, "shape": shape}
        q, k = tile_indices(column_ids, **place, transpose=self._map.transpose)
        values = self.values.on_tile(self._value_refs(refs), b=b, n=n, **place, columns=columns)
        if pairs is not None:
            values.insert(self._pairs_at, pairs != 0)
        allowed = self._evaluate(q, k, *values)
        if self._map.S % self._map.block_k:
            allowed &= k < self._map.S
        if self._map.T % self._map.block_q:
            allowed &= q < self._map.T
        return allowed


def list_operands(kinds: Any) -> tuple[jax.Array, jax.Array]:
    """The lists of kinds (B or 1, rows, columns) for `listed`: how many a row visits, and which, with what they are."""
    lists = lists_of(kinds)
    partial = (jnp.asarray(lists.kind) != TileKind.FULL.value).astype(jnp.int32)
    return jnp.asarray(lists.count, jnp.int32), jnp.asarray(lists.column, jnp.int32) * 2 + partial


def listed(refs: tuple[Any, ...], *, b: Any, row: Any) -> Visits:
    """The visits of a row by `list_operands` in global memory, possibly none."""
    count_ref, entries = refs
    b = _row_of(count_ref, b)
    return Visits(
        count_ref[b, row],
        lambda i: lax.shift_right_logical(entries[b, row, i], i32(1)),
        lambda i, _: lax.bitwise_and(entries[b, row, i], i32(1)) != 0,
    )


def evaluated(mask: Mask) -> Callable[..., jax.Array]:
    """`mask.evaluate`, for tiles inside a kernel."""
    if not mask.has_function:
        return mask.evaluate
    function = function_of(mask)
    return lambda *arguments: function(*arguments)[0]


def function_of(mask: Mask) -> Elementwise:
    """`mask.evaluate` of a mask with a function of the caller's."""
    return Elementwise.of(mask.evaluate, [np.int32, np.int32, *(value.array.dtype for value in mask.values())])


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
