"""What a score function has for each diagonal, q - k, or each pair, on tiles.

Tiles of diagonals are all parts of one band, which TMA cuts out as it does those of pairs.

Row r of a band is the array in reverse, r places further right. So the tile of queries from q_at and keys from k_at are
the rows of a tile and as many columns, from k_at - q_at and a constant. A band takes rows * (T + S) numbers.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from jflash.backends.mosaic_gpu.pair_tiles import PairTiles
from jflash.masks.mask import Value
from jflash.masks.tile_map import TileMap


class Band(PairTiles):
    """An array (B or 1, N or 1, T + S - 1) of 32 bits on tiles; entry q - k + S - 1 belongs to q and k.

    Arguments as of `PairTiles`.
    """

    def __init__(self, name: str, array: jax.Array, tile_map: TileMap, *, warpgroups: int, split: str):
        super().__init__(name, array, tile_map, warpgroups=warpgroups, split=split)
        self._lengths = tile_map.T, tile_map.S
        # Up to whole tiles.
        self._padded_lengths = tuple(
            -(-length // block) * block
            for length, block in ((tile_map.T, tile_map.block_q), (tile_map.S, tile_map.block_k))
        )

    def operands(self) -> tuple[jax.Array, ...]:
        """The band, with 0 at diagonals that only queries and keys past the end have, which are masked."""
        (T, S), (padded_T, padded_S), rows = self._lengths, self._padded_lengths, self._part[0]
        array = jnp.pad(self._array, [(0, 0), (0, 0), (padded_S - S, padded_T - T)])
        shape = rows, padded_T + padded_S - rows
        row, column = (jax.lax.broadcasted_iota(np.int32, shape, axis) for axis in (0, 1))
        return (jnp.take(array, row - column + (shape[1] - 1), axis=-1),)

    def _place(self, q_at: Any, k_at: Any) -> tuple[Any, Any]:
        rows = self._part[0]
        return pl.ds(0, rows), pl.ds(k_at - q_at + (self._padded_lengths[0] - rows), self._part[1])


AXES = frozenset(("BND", "BNTS"))
"""The axes that an array of `ArgumentTiles` may have."""


class ArgumentTiles:
    """Several arrays with a number for each diagonal or pair, with the methods of `PairTiles`."""

    def __init__(self, values: Sequence[Value], tile_map: TileMap, **split: Any):
        self._are_booleans = [value.array.dtype == np.bool_ for value in values]
        kinds = {"BND": Band, "BNTS": PairTiles}
        self._tiles = [
            kinds[value.axes](f"argument{i}", _of_32_bits(value.array), tile_map, **split)
            for i, value in enumerate(values)
        ]

    @property
    def count(self) -> int:
        return len(self._tiles)

    def operands(self) -> tuple[jax.Array, ...]:
        return tuple(operand for tiles in self._tiles for operand in tiles.operands())

    def scratch(self) -> dict[str, Any]:
        return {name: scratch for tiles in self._tiles for name, scratch in tiles.scratch().items()}

    def load(self, refs: Sequence[Any], s: Any, step: Any, **place: Any) -> None:
        """As of `PairTiles`; `refs` are the operands."""
        for tiles, ref in zip(self._tiles, refs, strict=True):
            tiles.load((ref,), s, step, **place)

    def see_releases(self, s: Any, steps: Any) -> None:
        for tiles in self._tiles:
            tiles.see_releases(s, steps)

    @contextlib.contextmanager
    def reading(self, s: Any, warpgroup: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for tiles in self._tiles:
                stack.enter_context(tiles.reading(s, warpgroup))
            yield

    def parts(self, s: Any, warpgroup: Any, columns: slice | None = None) -> list[jax.Array]:
        """Of each array the own part, or some columns of it."""
        parts = [tiles.part(s, warpgroup, columns) for tiles in self._tiles]
        return [part != 0 if is_boolean else part for part, is_boolean in zip(parts, self._are_booleans)]


def _of_32_bits(array: jax.Array) -> jax.Array:
    return array.astype(np.int32) if array.dtype == np.bool_ else array
