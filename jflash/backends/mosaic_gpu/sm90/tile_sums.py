"""Kernels for Hopper that compute dS once more, as for deterministic dq, and sum tiles of it in registers.

The fused backward kernel has dS in registers, transposed, where its own work leaves none over, and another block for
each batch row and head. Here a block of threads holds the sum of a tile while it goes through the tiles that belong to
it, in a fixed order. It pays with 2 matmuls besides the 5 of the fused kernel.

A block of threads has two warpgroups that compute, each for 64 queries, and one that loads by TMA: K and V at each
step, and Q and dO too where these are others at each.
"""

import abc
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jflash.backends.mosaic_gpu.primitives import (
    COMPUTE_REGISTERS,
    LOAD_REGISTERS,
    WARPGROUP_ROWS,
    WGMMA,
    from_zeros,
    hopper_kernel,
    i32,
    load_pieces,
    opaque,
    see_releases,
    slot_of,
    smem_bytes,
    smem_pieces,
)
from jflash.backends.mosaic_gpu.sm90.query_tiles import QueryTiles, Rows
from jflash.backends.mosaic_gpu.visits import Visits, head_and_row
from jflash.backends.protocol import Operands
from jflash.hardware import named
from jflash.problem import Problem

WARPGROUPS = 2
_BLOCK_K = 64
_MOST_STAGES = 3


class Block(NamedTuple):
    """What a block of threads sums up.

    Attributes:
      b, n: batch row and head of the array; where several share these, their first.
      place: one of `TileSums.places`.
      own_refs: the kernel's own operands.
      mask_refs, term_refs, s, warpgroup: as of `Rows`.
    """

    b: Any
    n: Any
    place: Any
    own_refs: tuple[Any, ...]
    mask_refs: tuple[Any, ...]
    term_refs: tuple[Any, ...]
    s: types.SimpleNamespace
    warpgroup: Any

    @property
    def first_query(self) -> Any:
        """Of this warpgroup among those of the block; the one that loads has those of all."""
        return lax.rem(self.warpgroup, i32(WARPGROUPS)) * WARPGROUP_ROWS

    def rows(self, q_at: Any, visits: Any) -> Rows:
        """The own queries of a tile that starts at this one."""
        at = self.b, self.n, q_at + self.first_query
        return Rows(*at, visits, None, None, self.mask_refs, self.term_refs, self.s, self.warpgroup)


class TileSums(QueryTiles, abc.ABC):
    """One kernel: what is known when tracing, the body of each warpgroup, the call.

    Args:
      shared: the batch rows and the heads of the array whose cotangent it is; those of the problem share its entries.
      loads_queries: Q and dO are others at each step.
      by_value: as of `QueryTiles`.

    Attributes:
      places: blocks of threads for each batch row and head of the array.
      shape: of the result.
      reduces: whether tiles are summed over their rows or columns in the kernel.
    """

    kernel_name: str
    reduces = False
    places: int
    shape: tuple[int, ...]

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        *,
        shared: tuple[int, int],
        loads_queries: bool,
        by_value: int | None = None,
    ):
        super().__init__(problem, operands, warpgroups=WARPGROUPS, block_k=_BLOCK_K, by_value=by_value)
        self.rows_of_array, self.heads_of_array = shared
        self.shared_rows, self.shared_heads = problem.B // shared[0], problem.N // shared[1]
        self.loads_queries = loads_queries
        most, each = named("h200").smem_bytes_per_block, range(_MOST_STAGES, 0, -1)
        fits = (stages for stages in each if smem_bytes(self._scratch(stages), reduces=self.reduces) <= most)
        self.stages = next(fits, 1)

    def own_operands(self) -> tuple[jax.Array, ...]:
        """What a kernel reads besides."""
        return ()

    @abc.abstractmethod
    def each_step(self, block: Block, body: Callable[..., Any], carry: Any) -> tuple[Any, Any]:
        """Runs `carry = body(step, rows, i, carry)`, of the step the number, queries and visit; how many there were,
        and the last carry.
        """

    @abc.abstractmethod
    def sum_up(self, block: Block, statistics: Any, result: Any) -> None:
        """Writes the sums of a warpgroup that computes, of `ds_of_step`."""

    def __call__(
        self,
        statistics: tuple[Float[Array, "B N padded_T"], Float[Array, "B N padded_T"]],
        d_out: Float[Array, "B T N Hv"],
    ) -> Float[Array, "..."]:
        """The sums, and 0 where a tile belongs to none."""

        zeros = jnp.zeros(self.shape, jnp.float32)
        (found,) = from_zeros(lambda result_ref: self._launch(statistics, d_out, result_ref), zeros, ())
        return found

    def _scratch(self, stages: int) -> dict[str, Any]:
        barrier, dtype = plgpu.Barrier, self.problem.dtype
        count = self.qk.count + self.vo.count
        q_slots = WARPGROUPS * (stages if self.loads_queries else 1)
        return {
            "q": plgpu.RefUnion(*smem_pieces((q_slots,), WARPGROUP_ROWS, self.qk, dtype)),
            "d_out": plgpu.RefUnion(*smem_pieces((q_slots,), WARPGROUP_ROWS, self.vo, dtype)),
            "queries_full": barrier(num_arrivals=count, num_barriers=q_slots),
            "k": plgpu.RefUnion(*smem_pieces((stages,), self.block_k, self.qk, dtype)),
            "v": plgpu.RefUnion(*smem_pieces((stages,), self.block_k, self.vo, dtype)),
            "keys_full": barrier(num_arrivals=count, num_barriers=stages),
            "free": barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            "ids": plgpu.SMEM((self.block_k,), jnp.int32),
            "ids_full": barrier(),
            **self.scratch(),
        }

    def _launch(self, statistics: tuple[jax.Array, jax.Array], d_out: jax.Array, result_ref: Any) -> tuple[()]:
        column_ids = np.arange(self.block_k, dtype=np.int32)
        mask_and_logits = *self.visits.operands(), *self.terms.operands()

        def kernel(q_g, k_g, v_g, d_out_g, start_g, d_start_g, ids_g, *refs, **scratch):
            mask_refs, refs = self.visits.take(refs)
            term_refs, (*own_refs, result_g) = self.terms.take(refs)
            inputs = q_g, k_g, v_g, d_out_g, (start_g, d_start_g), ids_g
            refs = tuple(own_refs), mask_refs, term_refs
            self._body(inputs, refs, types.SimpleNamespace(**scratch), result_g)

        return hopper_kernel(
            kernel,
            tiles=f"two warpgroups, {self.block_k} keys, {self.stages} stages",
            out_type=(),
            blocks=self.rows_of_array * self.heads_of_array * self.places,
            warpgroups=WARPGROUPS,
            reduces=self.reduces,
            scratch_types=self._scratch(self.stages),
            kernel_name=self.kernel_name,
        )(*self.operands[:3], d_out, *statistics, column_ids, *mask_and_logits, *self.own_operands(), result_ref)

    def _body(self, inputs, refs, s: types.SimpleNamespace, result_g) -> None:
        q_g, k_g, v_g, d_out_g, statistics, ids_g = inputs
        warpgroup = lax.axis_index("warpgroup")
        heads = self.rows_of_array * self.heads_of_array
        head, place = head_and_row(lax.axis_index("block"), rows=self.places, heads=heads, head_group=1)
        b, n = lax.div(head, i32(self.heads_of_array)), lax.rem(head, i32(self.heads_of_array))
        block = Block(b, n, place, *refs, s, warpgroup)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS[WARPGROUPS], action="increase")
            plgpu.barrier_wait(s.ids_full)
            self.sum_up(block, statistics, result_g)

        @pl.when(warpgroup == WARPGROUPS)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS[WARPGROUPS], action="decrease")
            plgpu.copy_gmem_to_smem(ids_g, s.ids, s.ids_full)
            self._load(block, q_g, k_g, v_g, d_out_g)

    # The warpgroup that loads -----------------------------------------------------------------------------------------

    def load_queries(self, rows: Rows, slot: Any, q_g: Any, d_out_g: Any) -> None:
        """Q and dO of both warpgroups."""

        @pl.loop(0, WARPGROUPS)
        def _(w):
            own = slot * WARPGROUPS + w
            place = {"b": rows.b, "row": rows.q_at + w * WARPGROUP_ROWS, "rows": WARPGROUP_ROWS, "head": rows.n}
            load_pieces(q_g, self.qk.refs(rows.s.q[0].at[own]), rows.s.queries_full.at[own], **place)
            load_pieces(d_out_g, self.vo.refs(rows.s.d_out[0].at[own]), rows.s.queries_full.at[own], **place)

    def _load(self, block: Block, q_g, k_g, v_g, d_out_g) -> None:
        s, stages = block.s, self.stages

        def load(step, rows, i, carry):
            slot, k_at = slot_of(step, stages), rows.visits.column(i) * self.block_k
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(s.free.at[slot]))
            if self.loads_queries:
                self.load_queries(rows, slot, q_g, d_out_g)
            else:
                pl.when(step == 0)(lambda: self.load_queries(rows, i32(0), q_g, d_out_g))
            keys = {"b": rows.b, "row": k_at, "rows": self.block_k, "head": lax.div(rows.n, i32(self.problem.group))}
            load_pieces(k_g, self.qk.refs(s.k[0].at[slot]), s.keys_full.at[slot], **keys)
            load_pieces(v_g, self.vo.refs(s.v[0].at[slot]), s.keys_full.at[slot], **keys)
            self.load_pairs(rows, step, i)
            return carry

        steps, _ = self.each_step(block, load, ())
        see_releases(s.free, stages=stages, count=steps)
        self.visits.pairs.see_releases(s, steps)
        self.terms.see_pair_releases(s, steps)

    # The warpgroups that compute --------------------------------------------------------------------------------------

    def nothing(self) -> Any:
        """Where a sum starts."""
        return plgpu.layout_cast(jnp.zeros(self.s_shape, jnp.float32), WGMMA)

    def visits_of_row(self, block: Block) -> Visits:
        """Of the row of tiles whose number the block's place is."""
        part = lax.min(block.warpgroup, i32(WARPGROUPS - 1))
        return self.visits.of_row(block.mask_refs, b=block.b, row=block.place, part=part)

    def own_statistics(self, block: Block, statistics: Any) -> dict[str, Any]:
        """Fields of `Rows`, of queries of that row that are the same at all steps, when their Q and dO are there."""
        rows = self.with_statistics(block.rows(block.place * self.block_q, None), statistics)
        plgpu.barrier_wait(block.s.queries_full.at[block.warpgroup])
        return {"minus_lse": rows.minus_lse, "minus_delta": rows.minus_delta}

    def with_statistics(self, rows: Rows, statistics: Any) -> Rows:
        minus_lse, minus_delta = self.statistics_of(statistics, b=rows.b, n=rows.n, q_at=rows.q_at)
        return rows._replace(minus_lse=minus_lse, minus_delta=minus_delta)

    def ds_of_step(self, statistics: Any, step: Any, rows: Rows, i: Any) -> Any:
        """dS of a step; `rows` have the statistics where Q and dO are the same at all."""
        s, slot = rows.s, slot_of(step, self.stages)
        (_, q), (_, d_out), (_, k), (_, v) = s.q, s.d_out, s.k, s.v
        # As in the kernel for dq: addresses that are not computed before the loop.
        q_slot, zero = opaque(rows.warpgroup, 0)
        if self.loads_queries:
            q_slot += slot * WARPGROUPS
            rows = self.with_statistics(rows, statistics)
            plgpu.barrier_wait(s.queries_full.at[q_slot])
        plgpu.barrier_wait(s.keys_full.at[slot])

        def issue(queries, keys, pieces, ref):
            for own, other in zip(pieces.refs(queries.at[q_slot]), pieces.refs(keys.at[slot + zero])):
                plgpu.wgmma(ref, own, other.T)

        issue_s, issue_dp = (functools.partial(issue, *of) for of in ((q, k, self.qk), (d_out, v, self.vo)))
        ds = self.ds(rows, i, issue_s, issue_dp)
        plgpu.barrier_arrive(s.free.at[slot])
        return ds
