"""The kernel for Hopper that computes the cotangent of what a score function has for each diagonal, q - k.

Tiles of queries by keys whose first query and first key are equally far apart cover the same diagonals: a block of
threads sums dS over all of these, of the batch rows and heads that share an entry. Its sum is one tile, which XLA sums
along the diagonals. So results have rows * (T + S) numbers, and no T x S array is there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jflash.backends.mosaic_gpu.primitives import WARPGROUP_ROWS, i32
from jflash.backends.mosaic_gpu.sm90.tile_sums import Block, TileSums
from jflash.backends.mosaic_gpu.visits import Visits, list_operands, listed
from jflash.backends.protocol import Operands
from jflash.masks.mask import TileKind, where
from jflash.masks.tile_map import union
from jflash.problem import Problem


def d_diagonals(
    problem: Problem,
    operands: Operands,
    statistics: tuple[Float[Array, "B N padded_T"], Float[Array, "B N padded_T"]],
    d_out: Float[Array, "B T N Hv"],
    *,
    shared: tuple[int, int],
    by_value: int,
) -> Float[Array, "#B #N diagonals"]:
    """The cotangent in float32, summed over the batch rows and heads that share an entry; the last axis is T + S - 1.

    Args:
      problem: of the call.
      operands, statistics, d_out: as of `backward_dq.dq`.
      shared: the batch rows and the heads of the array.
      by_value: which it is, as of `QueryTiles`.
    """
    kernel = _DiagonalGradient(problem, operands, shared=shared, by_value=by_value)
    return _along_diagonals(kernel(statistics, d_out), T=problem.T, S=problem.S)


class _DiagonalGradient(TileSums):
    """A block of threads for each distance of a tile of keys from one of queries."""

    kernel_name = "jflash_backward_diagonals_sm90"

    def __init__(self, problem: Problem, operands: Operands, *, shared: tuple[int, int], by_value: int):
        super().__init__(problem, operands, shared=shared, loads_queries=True, by_value=by_value)
        # From a row of tiles to the next the same distance is so many columns further.
        self.columns_of_row = self.block_q // self.block_k
        # Which place has distance 0, in columns.
        self.origin = self.columns_of_row * (self.visits.rows - 1)
        self.places = self.origin + self.tile_map.columns
        self.shape = *shared, self.places, self.block_q, self.block_k

    def own_operands(self) -> tuple[jax.Array, ...]:
        """For each place the rows whose tile some query and key attend in."""
        # The same for all heads, as of `TileVisits`.
        kinds = union(self.tile_map.kinds(), axes=(1,))
        row = np.arange(self.visits.rows)
        column = np.arange(self.places)[:, None] - self.origin + self.columns_of_row * row
        is_there = (column >= 0) & (column < self.tile_map.columns)
        of_places = kinds[:, row, np.where(is_there, column, 0)]
        return list_operands(where(is_there, of_places, np.int8(TileKind.EMPTY.value)))

    def each_step(self, block: Block, body: Callable[..., Any], carry: Any) -> tuple[Any, Any]:
        def of_batch_row(own_row, carry):
            b = block.b + own_row
            visits = listed(block.own_refs, b=b, row=block.place)

            def of_head(own_head, carry):
                n = block.n + own_head

                def run(i, carry):
                    step, carry = carry
                    row = visits.column(i)
                    column = block.place - self.origin + self.columns_of_row * row
                    own = Visits(visits.count, lambda _: column, visits.is_partial)
                    rows = block.rows(row * self.block_q, own)._replace(b=b, n=n)
                    return step + 1, body(step, rows, i, carry)

                return lax.fori_loop(0, visits.count, run, carry)

            return lax.fori_loop(0, self.shared_heads, of_head, carry)

        return lax.fori_loop(0, self.shared_rows, of_batch_row, (i32(0), carry))

    def sum_up(self, block: Block, statistics: Any, result: Any) -> None:
        def add(step, rows, i, total):
            return total + self.ds_of_step(statistics, step, rows, i)

        _, total = self.each_step(block, add, self.nothing())
        result[block.b, block.n, block.place, pl.ds(block.first_query, WARPGROUP_ROWS), :] = total


def _along_diagonals(
    tiles: Float[Array, "B N places rows columns"], *, T: int, S: int
) -> Float[Array, "B N diagonals"]:
    """The sums along diagonals, entry q - k + S - 1 for that of q and k.

    Place e has q - k = row - column - columns * (e - origin).
    """
    *leading, places, rows, columns = tiles.shape
    # With places and columns in reverse, a row is further right by one than that before it, and a place by a tile.
    x = tiles[..., ::-1, :, ::-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rows)]).reshape(*leading, places, -1)
    # A row less than the padded one: each starts one place before that above it ends.
    x = x[..., : rows * (rows + columns - 1)].reshape(*leading, places, rows, rows + columns - 1).sum(-2)
    pieces = (rows + columns) // columns
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]).reshape(*leading, places, pieces, columns)
    none = [(0, 0)] * len(leading)
    shifted = (jnp.pad(x[..., i, :], [*none, (i, pieces - 1 - i), (0, 0)]) for i in range(pieces))
    x = sum(shifted).reshape(*leading, -1)
    first = -S % columns
    return x[..., first : first + T + S - 1]
