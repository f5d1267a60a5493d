"""Arrays with a value for each batch row, head, query or key: as operands of a kernel, and on a tile inside it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jflash.backends.mosaic_gpu.primitives import (
    BY_COLUMN,
    BY_ROW,
    along_columns,
    along_rows,
    i32,
    load_global,
    row_ids,
)
from jflash.masks.mask import Value
from jflash.masks.tile_map import TileMap

AXES = frozenset(("B", "BN", "BT", "BS", "BNT", "BNS"))
"""The axes that such an array may have."""
DTYPES = frozenset(np.dtype(dtype) for dtype in (np.bool_, np.int32, np.float32))


def squeezed(value: Value) -> Value:
    """Of an array for pairs of query and key what is the same along a length, without the axis of that length."""
    if value.axes != "BNTS":
        return value
    kept = [i for i, (axis, size) in enumerate(zip(value.axes, value.array.shape)) if axis in "BN" or size > 1]
    shape, axes = tuple(value.array.shape[i] for i in kept), "".join(value.axes[i] for i in kept)
    array = value.array
    is_described = isinstance(array, jax.ShapeDtypeStruct)
    return Value(jax.ShapeDtypeStruct(shape, array.dtype) if is_described else array.reshape(shape), axes)


def length_of(value: Value) -> str | None:
    """The axis along which the numbers of such an array differ, "T" or "S"; None where it is that of neither."""
    return value.axes[-1] if value.axes[-1:] in ("T", "S") and value.array.shape[-1] > 1 else None


class Columns(NamedTuple):
    """Where shared memory has what belongs to the columns of a tile, if the warpgroup that loads brought it there.

    Attributes:
      s: scratch memory, by name.
      slot: of the tile.
      start: the first of the columns that are wanted.
    """

    s: Any
    slot: Any
    start: Any


class TileValues:
    """Some of these arrays, on tiles of queries by keys, or of keys by queries where the map is transposed.

    Args:
      name: of the scratch memory.
    """

    def __init__(self, name: str, values: Sequence[Value], tile_map: TileMap):
        self._name, self._values, self._is_transposed = name, tuple(values), tile_map.transpose
        self._blocks = {"T": tile_map.block_q, "S": tile_map.block_k}
        self._row, self._column = "ST" if self._is_transposed else "TS"
        # Those that differ from column to column. Rows are those of a warpgroup's own part, and stay the same.
        self._of_columns = [i for i, value in enumerate(self._values) if length_of(value) == self._column]

    @property
    def count(self) -> int:
        return len(self._values)

    def operands(self) -> tuple[jax.Array, ...]:
        """The arrays as a kernel takes them: of 32 bits, and up to whole tiles, so that a tile's part is in bounds."""
        return tuple(map(self._padded, self._values))

    # By the warpgroup that loads, a step ahead: where a tile is computed a load from global memory would be waited for.

    @property
    def arrivals(self) -> int:
        """How often `load` arrives at its barrier."""
        return len(self._of_columns)

    def scratch(self, slots: int) -> dict[str, Any]:
        """Scratch types, by name, of so many tiles."""
        block = self._blocks[self._column]
        return {f"{self._name}_{i}": plgpu.SMEM((slots, block), _dtype(self._values[i])) for i in self._of_columns}

    def load(self, refs: Sequence[Any], s: Any, slot: Any, full: Any, *, b: Any, n: Any, column_at: Any) -> None:
        """What belongs to the columns of a tile, by TMA; `refs` are to the `operands()`."""
        for i in self._of_columns:
            columns = pl.ds(column_at, self._blocks[self._column])
            source = refs[i].at[(*self._index(i, refs[i], b=b, n=n), columns)]
            plgpu.copy_gmem_to_smem(source, getattr(s, f"{self._name}_{i}").at[slot], full)

    def on_tile(
        self,
        refs: Sequence[Any],
        *,
        b: Any,
        n: Any,
        q_at: Any,
        k_at: Any,
        shape: tuple[int, int],
        columns: Columns | None = None,
    ) -> list[Any]:
        """Each array on a tile, as scalar or of its shape, from references to the `operands()` in global memory.

        Args:
          columns: None where `load` has brought nothing.
        """
        row_at, column_at = (k_at, q_at) if self._is_transposed else (q_at, k_at)

        def of_column(i: int, ref: Any, index: tuple[Any, ...]) -> jax.Array:
            if columns is None:
                return load_global(ref.at[index] if index else ref, column_at, shape[1], layout=BY_COLUMN)
            staged = getattr(columns.s, f"{self._name}_{i}").at[columns.slot, pl.ds(columns.start, shape[1])]
            return plgpu.load(staged, layout=BY_COLUMN)

        def on_tile(i: int, value: Value, ref: Any) -> Any:
            index, length = self._index(i, ref, b=b, n=n), length_of(value)
            if length == self._column:
                x = along_columns(of_column(i, ref, index), shape)
            elif length == self._row:
                x = along_rows(load_global(ref.at[index] if index else ref, row_at, shape[0], layout=BY_ROW), shape)
            else:
                x = ref[index + (0,) * (len(ref.shape) - len(index))]
            return x != 0 if value.array.dtype == np.bool_ else x

        return [on_tile(i, value, ref) for i, (value, ref) in enumerate(zip(self._values, refs))]

    def _index(self, i: int, ref: Any, *, b: Any, n: Any) -> tuple[Any, ...]:
        """The batch row and the head of the i-th array, as far as it has them."""
        own = self._values[i].axes.rstrip("TS")
        return tuple({"B": b, "N": n}[axis] if size > 1 else i32(0) for axis, size in zip(own, ref.shape))

    def _padded(self, value: Value) -> jax.Array:
        array = jnp.asarray(value.array, _dtype(value)).reshape(value.array.shape or (1,))
        length = length_of(value)
        if length:
            array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % self._blocks[length])])
        return array


def _dtype(value: Value) -> np.dtype:
    """That of an array in a kernel."""
    return np.dtype(np.int32) if value.array.dtype == np.bool_ else np.dtype(value.array.dtype)


def tile_indices(
    column_ids: jax.Array, *, q_at: Any, k_at: Any, shape: tuple[int, int], transpose: bool
) -> tuple[jax.Array, jax.Array]:
    """The queries and the keys of a tile that starts at these.

    `column_ids` are 0, 1, ... for the columns, from shared memory: LLVM computes an iota outside of the loop, where it
    takes registers that the kernels do not have.
    """
    row_at, column_at = (k_at, q_at) if transpose else (q_at, k_at)
    rows, columns = row_ids(shape) + row_at, along_columns(column_ids + column_at, shape)
    return (columns, rows) if transpose else (rows, columns)
