"""Arrays with a value for each batch row, head, query or key: as operands of a kernel, and on a tile inside it."""

from collections.abc import Sequence
from typing import Any

import jax
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


class TileValues:
    """Some of these arrays, on tiles of queries by keys, or of keys by queries where the map is transposed."""

    def __init__(self, values: Sequence[Value], tile_map: TileMap):
        self._values, self._is_transposed = tuple(values), tile_map.transpose
        self._blocks = {"T": tile_map.block_q, "S": tile_map.block_k}

    @property
    def count(self) -> int:
        return len(self._values)

    def operands(self) -> tuple[jax.Array, ...]:
        """The arrays as a kernel takes them: of 32 bits, and up to whole tiles, so that a tile's part is in bounds."""
        return tuple(map(self._padded, self._values))

    def on_tile(
        self, refs: Sequence[Any], *, b: Any, n: Any, q_at: Any, k_at: Any, shape: tuple[int, int]
    ) -> list[Any]:
        """Each array on a tile, as scalar or of its shape, from references to the `operands()` in global memory."""
        row_at, column_at = (k_at, q_at) if self._is_transposed else (q_at, k_at)

        def by_row(ref: Any) -> jax.Array:
            return along_rows(load_global(ref, row_at, shape[0], layout=BY_ROW), shape)

        def by_column(ref: Any) -> jax.Array:
            return along_columns(load_global(ref, column_at, shape[1], layout=BY_COLUMN), shape)

        loads = {"S": by_row, "T": by_column} if self._is_transposed else {"T": by_row, "S": by_column}

        def on_tile(value: Value, ref: Any) -> Any:
            own = value.axes.rstrip("TS")
            index = tuple({"B": b, "N": n}[axis] if size > 1 else i32(0) for axis, size in zip(own, ref.shape))
            if value.axes != own and ref.shape[-1] > 1:
                x = loads[value.axes[-1]](ref.at[index] if index else ref)
            else:
                x = ref[index + (0,) * (len(ref.shape) - len(index))]
            return x != 0 if value.array.dtype == np.bool_ else x

        return [on_tile(value, ref) for value, ref in zip(self._values, refs)]

    def _padded(self, value: Value) -> jax.Array:
        array = jnp.asarray(value.array).reshape(value.array.shape or (1,))
        array = array.astype(np.int32) if array.dtype == np.bool_ else array
        length = value.axes[-1:]
        if length in self._blocks and array.shape[-1] > 1:
            array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % self._blocks[length])])
        return array


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
