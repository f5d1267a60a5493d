"""The kernel for Hopper that computes the cotangent of what has a number for each pair of query and key.

Of a bias it is dS itself, of an array of a score function dS by that.

Of a tile it is summed over the batch rows and heads that share it. The steps of a block of threads are the tiles of
keys that some of its queries see, and for each of them the batch rows and heads.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
from jax import lax
from jaxtyping import Array, Float

from jflash.backends.mosaic_gpu.primitives import WARPGROUP_ROWS, i32
from jflash.backends.mosaic_gpu.sm90.tile_sums import Block, TileSums
from jflash.backends.mosaic_gpu.visits import Visits
from jflash.backends.protocol import Operands
from jflash.problem import Problem


def d_pairs(
    problem: Problem,
    operands: Operands,
    statistics: tuple[Float[Array, "B N padded_T"], Float[Array, "B N padded_T"]],
    d_out: Float[Array, "B T N Hv"],
    *,
    shared: tuple[int, int],
    by_value: int | None = None,
) -> Float[Array, "#B #N T S"]:
    """The cotangent in float32, summed over the batch rows and heads that share an entry.

    Args:
      problem: of the call.
      operands, statistics, d_out: as of `backward_dq.dq`.
      shared: the batch rows and the heads of the array.
      by_value: which it is, as of `QueryTiles`; None for the bias.
    """
    kernel = _PairGradient(problem, operands, shared=shared, by_value=by_value)
    return kernel(statistics, d_out)[..., : problem.T, : problem.S]


class _PairGradient(TileSums):
    """A block of threads for each row of tiles."""

    kernel_name = "jflash_backward_pairs_sm90"

    def __init__(self, problem: Problem, operands: Operands, *, shared: tuple[int, int], by_value: int | None):
        is_shared = shared != (problem.B, problem.N)
        super().__init__(problem, operands, shared=shared, loads_queries=is_shared, by_value=by_value)
        # Whether the tiles to visit are the same in all batch rows that share an entry.
        values = problem.mask.mask.values()
        self.visits_all = self.shared_rows > 1 and any(value.array.shape[0] > 1 for value in values)
        self.places = self.visits.rows
        self.shape = *shared, self.visits.rows * self.block_q, self.tile_map.columns * self.block_k

    @property
    def members(self) -> int:
        """Batch rows and heads that share an entry."""
        return self.shared_rows * self.shared_heads

    def each_step(self, block: Block, body: Callable[..., Any], carry: Any) -> tuple[Any, Any]:
        rows = block.rows(block.place * self.block_q, self._visits(block))

        def run(step, carry):
            visit, member = lax.div(step, i32(self.members)), lax.rem(step, i32(self.members))
            own_row, own_head = lax.div(member, i32(self.shared_heads)), lax.rem(member, i32(self.shared_heads))
            return body(step, rows._replace(b=rows.b + own_row, n=rows.n + own_head), visit, carry)

        steps = rows.visits.count * self.members
        return steps, lax.fori_loop(0, steps, run, carry)

    def _visits(self, block: Block) -> Visits:
        if self.visits_all:
            return Visits(i32(self.tile_map.columns), lambda i: i, lambda i, _: i >= 0)
        return self.visits_of_row(block)

    def sum_up(self, block: Block, statistics: Any, result: Any) -> None:
        def store(rows, visit, x):
            keys = pl.ds(rows.visits.column(visit) * self.block_k, self.block_k)
            result[block.b, block.n, pl.ds(rows.q_at, WARPGROUP_ROWS), keys] = x

        def add(step, rows, visit, total):
            ds = self.ds_of_step(statistics, step, rows, visit)
            member = lax.rem(step, i32(self.members))
            total = lax.cond(member == 0, lambda: ds, lambda: total + ds)
            pl.when(member == self.members - 1)(lambda: store(rows, visit, total))
            return total

        if self.loads_queries:
            self.each_step(block, add, self.nothing())
            return
        own = self.own_statistics(block, statistics)

        def store_each(step, rows, visit, _):
            store(rows, visit, self.ds_of_step(statistics, step, rows._replace(**own), visit))
            return ()

        self.each_step(block, store_each, ())
