"""The kernel for Hopper that computes the cotangent of what the logits have for each query: sums of dS over keys."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
from jax import lax
from jaxtyping import Array, Float

from jflash.backends.mosaic_gpu.primitives import WARPGROUP_ROWS
from jflash.backends.mosaic_gpu.sm90.tile_sums import Block, TileSums
from jflash.backends.protocol import Operands
from jflash.problem import Problem


def d_rows(
    problem: Problem,
    operands: Operands,
    statistics: tuple[Float[Array, "B N padded_T"], Float[Array, "B N padded_T"]],
    d_out: Float[Array, "B T N Hv"],
    *,
    by_value: int,
) -> Float[Array, "B N T"]:
    """The cotangent in float32, of each batch row and head also where several share an entry; 0 where no key is seen.

    Args:
      problem: of the call.
      operands, statistics, d_out: as of `backward_dq.dq`.
      by_value: which it is, as of `QueryTiles`.
    """
    return _RowGradient(problem, operands, by_value=by_value)(statistics, d_out)[..., : problem.T]


class _RowGradient(TileSums):
    """A block of threads for each row of tiles, which it sums into one tile, and that over its columns at the end."""

    kernel_name = "jflash_backward_rows_sm90"
    reduces = True

    def __init__(self, problem: Problem, operands: Operands, *, by_value: int):
        super().__init__(problem, operands, shared=(problem.B, problem.N), loads_queries=False, by_value=by_value)
        self.places = self.visits.rows
        self.shape = problem.B, problem.N, self.places * self.block_q

    def each_step(self, block: Block, body: Callable[..., Any], carry: Any) -> tuple[Any, Any]:
        rows = block.rows(block.place * self.block_q, self.visits_of_row(block))
        steps = rows.visits.count
        return steps, lax.fori_loop(0, steps, lambda i, carry: body(i, rows, i, carry), carry)

    def sum_up(self, block: Block, statistics: Any, result: Any) -> None:
        own = self.own_statistics(block, statistics)

        def add(step, rows, i, total):
            return total + self.ds_of_step(statistics, step, rows._replace(**own), i)

        _, total = self.each_step(block, add, self.nothing())
        queries = pl.ds(block.place * self.block_q + block.first_query, WARPGROUP_ROWS)
        result[block.b, block.n, queries] = total.sum(axis=1)
