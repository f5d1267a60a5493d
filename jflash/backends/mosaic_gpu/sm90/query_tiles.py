"""From S and dP to dS on tiles of 64 queries by some keys: what the kernels have in common that are not fused.

The accumulator of S starts at -lse / scale, or -inf where masked, and that of dP at -delta: so neither the mask nor the
two values of each row cost anything after the matmuls. Where logits are more than q · k times the scale, S starts at 0.
A bias of pairs is added, by the scale, to where S starts. All of them are written before the first matmul is issued:
between two, ptxas waits for the tensor cores before other instructions may write accumulators.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jflash.backends.mosaic_gpu.primitives import (
    BY_COLUMN,
    BY_ROW,
    LOG2_E,
    WARPGROUP_ROWS,
    Pieces,
    along_rows,
    load_global,
)
from jflash.backends.mosaic_gpu.terms import TileTerms
from jflash.backends.mosaic_gpu.visits import TileVisits, Visits
from jflash.backends.protocol import Operands
from jflash.masks.tile_map import TileMap
from jflash.problem import Problem


class Rows(NamedTuple):
    """The queries of a warpgroup.

    Attributes:
      b, n, q_at: batch row, query head, first query.
      visits: which tiles of keys they see.
      minus_lse, minus_delta: -lse / unit and -delta of each, in registers.
      mask_refs, term_refs: the operands of the mask, and of the logits.
      s: scratch memory and barriers, by name; `ids` are the numbers of columns.
      warpgroup: its number.
    """

    b: Any
    n: Any
    q_at: Any
    visits: Visits
    minus_lse: Any
    minus_delta: Any
    mask_refs: tuple[Any, ...]
    term_refs: tuple[Any, ...]
    s: Any
    warpgroup: Any


class QueryTiles:
    """What is known of a kernel when tracing: its tiles, its mask, its logits.

    Args:
      warpgroups: those that compute, each for 64 queries.
      block_k: keys of a tile.
      by_value: the number among floating values of that which dS is the derivative by; None for scale · qk.
    """

    def __init__(
        self, problem: Problem, operands: Operands, *, warpgroups: int, block_k: int, by_value: int | None = None
    ):
        self.problem, self.operands, self.by_value = problem, operands, by_value
        self.block_q, self.block_k = warpgroups * WARPGROUP_ROWS, block_k
        self.qk, self.vo = (Pieces.of(size, problem.T, problem.S) for size in (problem.H, problem.Hv))
        sizes = {"T": problem.T, "S": problem.S, "block_q": self.block_q, "block_k": block_k}
        self.tile_map = TileMap(mask=operands.mask, **sizes)
        split = {"warpgroups": warpgroups, "split": "T"}
        self.visits = TileVisits(self.tile_map, parts=warpgroups, **split)
        self.terms = TileTerms(problem, operands, self.tile_map, **split)
        self.s_shape = (WARPGROUP_ROWS, block_k)

    def scratch(self) -> dict[str, Any]:
        """Scratch types that a kernel adds to its own."""
        return {**self.visits.pairs.scratch(), **self.terms.pair_scratch()}

    @property
    def needs_ids(self) -> bool:
        """Whether the numbers of columns are needed, for the mask or for logits."""
        return self.visits.is_masked or not self.terms.is_plain

    def statistics_of(self, statistics: tuple[Any, Any], *, b: Any, n: Any, q_at: Any) -> list[Any]:
        """-lse / unit and -delta of the queries of a warpgroup, from global memory."""
        return [load_global(statistic.at[b, n], q_at, WARPGROUP_ROWS, layout=BY_ROW) for statistic in statistics]

    def ds(self, rows: Rows, i: Any, issue_s: Callable[[Any], None], issue_dp: Callable[[Any], None]) -> Any:
        """dS of the i-th visited tile; the matmuls for S and dP are issued to these accumulators."""

        def s_and_dp(s_ref, dp_ref):
            s_ref[...] = self._start_s(rows, i)
            dp_ref[...] = self._start_dp(rows)
            issue_s(s_ref)
            issue_dp(dp_ref)
            s_tile = plgpu.wgmma_accumulator_load(s_ref, wait_n=self.vo.count)
            if self.terms.is_plain:
                p = jnp.exp2(s_tile * (self.problem.scale * LOG2_E))
                return p * plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            return self._ds(rows, i, s_tile, plgpu.wgmma_accumulator_load(dp_ref, wait_n=0))

        accumulator = plgpu.ACC(self.s_shape, jnp.float32)
        return pl.run_scoped(s_and_dp, accumulator, accumulator)

    def _start_s(self, rows: Rows, i: Any) -> Any:
        """What the accumulator of S starts at on the i-th visited tile: -lse / scale, and -inf at masked pairs.

        It is 0 where the logits are still to be made; and a bias of pairs by the scale more.
        """
        plain = self.terms.is_plain
        start = along_rows(rows.minus_lse, self.s_shape) if plain else jnp.zeros(self.s_shape, jnp.float32)
        with self.terms.pairs.reading(rows.s, rows.warpgroup):
            start = self.terms.biased(start, rows.s, rows.warpgroup)
        return self._allowed_or(-jnp.inf, start, rows, i) if plain else start

    def _start_dp(self, rows: Rows) -> Any:
        """-delta; 0 where dropout comes before it."""
        if self.terms.dropout is not None:
            return jnp.zeros(self.s_shape, jnp.float32)
        return along_rows(rows.minus_delta, self.s_shape)

    def _ds(self, rows: Rows, i: Any, s: Any, dp: Any) -> Any:
        """dS, where the logits are made of S here; as in the fused kernels."""
        place = {"b": rows.b, "n": rows.n, "q_at": rows.q_at, "k_at": rows.visits.column(i) * self.block_k}
        ids = plgpu.load(rows.s.ids, layout=BY_COLUMN)
        with self.terms.arguments.reading(rows.s, rows.warpgroup):
            arguments = self.terms.arguments.parts(rows.s, rows.warpgroup)
        logits, by_qk, by_values = self.terms.with_derivatives(rows.term_refs, s, ids, arguments, **place)
        p = jnp.exp2((logits + along_rows(rows.minus_lse, self.s_shape)) * LOG2_E)
        p = self._allowed_or(0.0, p, rows, i)
        (dp,) = self.terms.dropped(rows.term_refs, dp, **place)
        if self.terms.dropout is not None:
            dp += along_rows(rows.minus_delta, self.s_shape)
        ds = p * dp
        derivative = by_qk if self.by_value is None else by_values[self.by_value]
        return ds * derivative if self.terms.is_total else jnp.where(ds == 0, 0, ds * derivative)

    def _allowed_or(self, other: float, x: Any, rows: Rows, i: Any) -> Any:
        """The i-th visited tile, with another value at masked pairs."""
        if not self.visits.is_masked:
            return x
        column = rows.visits.column(i)

        def masked():
            place = {"b": rows.b, "n": rows.n, "q_at": rows.q_at, "k_at": column * self.block_k}
            place |= {"shape": self.s_shape, "pairs": self.visits.pairs.part(rows.s, rows.warpgroup)}
            ids = plgpu.load(rows.s.ids, layout=BY_COLUMN)
            return jnp.where(self.visits.allowed(rows.mask_refs, ids, **place), x, other)

        with self.visits.pairs.reading(rows.s, rows.warpgroup):
            return lax.cond(rows.visits.is_partial(i, column), masked, lambda: x)

    def load_pairs(self, rows: Rows, step: Any, i: Any) -> None:
        """By the warpgroup that loads, for a step of this number, what the i-th visited tile has for each pair."""
        place = {"b": rows.b, "n": rows.n, "q_at": rows.q_at, "k_at": rows.visits.column(i) * self.block_k}
        self.visits.pairs.load(rows.mask_refs, rows.s, step, **place)
        self.terms.load_pairs(rows.term_refs, rows.s, step, **place)

    def see_releases(self, rows: Rows, steps: Any) -> None:
        """By the same, after so many steps."""
        self.visits.pairs.see_releases(rows.s, steps)
        self.terms.see_pair_releases(rows.s, steps)
