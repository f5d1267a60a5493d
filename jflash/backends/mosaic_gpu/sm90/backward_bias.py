"""The kernel for Hopper that computes the cotangent of a bias with a number for each pair of query and key: dS itself.

The fused backward kernel has dS in registers, transposed, where its own work leaves none over, and another block for
each batch row and head; a bias that these share needs the sum of theirs. So S and dP are computed once more, as for
deterministic dq, and a block of threads holds the sum of a tile in registers while it goes through the batch rows and
heads that share it. The order of sums is fixed. It pays with 2 matmuls besides the 5 of the fused kernel.

A block of threads has two warpgroups that compute, each for 64 queries, and one that loads by TMA. Its steps are the
tiles of keys that some of its queries see, and for each of them the batch rows and heads. Q and dO stay in shared
memory where there is one of these alone.
"""

import functools
import types
from typing import Any

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
from jflash.numerics.varying import result_struct
from jflash.problem import Problem

_WARPGROUPS = 2
_BLOCK_K = 64
_MOST_STAGES = 3


def d_bias(
    problem: Problem,
    operands: Operands,
    statistics: tuple[Float[Array, "B N padded_T"], Float[Array, "B N padded_T"]],
    d_out: Float[Array, "B T N Hv"],
) -> Float[Array, "#B #N T S"]:
    """The cotangent of the bias in float32, summed over the batch rows and heads that share it.

    Args:
      problem: of the call.
      operands, statistics, d_out: as of `backward_dq.dq`.
    """
    kernel = _BiasGradient(problem, operands)
    shape = kernel.result.shape

    def fill(refs):
        (d_bias_ref,) = refs
        kernel(statistics, d_out, d_bias_ref)

    # Tiles that no query sees are visited by none.
    (found,) = pl.run_state(fill)((jnp.zeros(shape, jnp.float32),))
    return found[..., : problem.T, : problem.S]


class _BiasGradient(QueryTiles):
    """One kernel: what is known when tracing, the body of each warpgroup, the call."""

    def __init__(self, problem: Problem, operands: Operands):
        super().__init__(problem, operands, warpgroups=_WARPGROUPS, block_k=_BLOCK_K)
        # The batch rows and heads of the bias, and of each of its entries those that share it.
        self.rows_of_bias, self.heads_of_bias, *_ = operands.bias.shape
        self.shared_rows, self.shared_heads = problem.B // self.rows_of_bias, problem.N // self.heads_of_bias
        self.members = self.shared_rows * self.shared_heads
        # Whether the tiles to visit are the same in all batch rows that share an entry.
        values = problem.mask.mask.values()
        self.visits_all = self.shared_rows > 1 and any(value.array.shape[0] > 1 for value in values)
        columns = self.tile_map.columns
        shape = self.rows_of_bias, self.heads_of_bias, self.visits.rows * self.block_q, columns * self.block_k
        self.result = result_struct(shape, jnp.float32, operands)
        most = named("h200").smem_bytes_per_block
        fits = (
            stages for stages in range(_MOST_STAGES, 0, -1) if smem_bytes(self._scratch(stages), reduces=False) <= most
        )
        self.stages = next(fits, 1)

    def _scratch(self, stages: int) -> dict[str, Any]:
        barrier, dtype = plgpu.Barrier, self.problem.dtype
        count = self.qk.count + self.vo.count
        q_slots = _WARPGROUPS * (1 if self.members == 1 else stages)
        return {
            "q": plgpu.RefUnion(*smem_pieces((q_slots,), WARPGROUP_ROWS, self.qk, dtype)),
            "d_out": plgpu.RefUnion(*smem_pieces((q_slots,), WARPGROUP_ROWS, self.vo, dtype)),
            "queries_full": barrier(num_arrivals=count, num_barriers=q_slots),
            "k": plgpu.RefUnion(*smem_pieces((stages,), self.block_k, self.qk, dtype)),
            "v": plgpu.RefUnion(*smem_pieces((stages,), self.block_k, self.vo, dtype)),
            "keys_full": barrier(num_arrivals=count, num_barriers=stages),
            "free": barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
            "ids": plgpu.SMEM((self.block_k,), jnp.int32),
            "ids_full": barrier(),
            **self.scratch(),
        }

    def __call__(self, statistics: tuple[jax.Array, jax.Array], d_out: jax.Array, d_bias_ref: Any) -> None:
        column_ids = np.arange(self.block_k, dtype=np.int32)
        mask_and_logits = *self.visits.operands(), *self.terms.operands()

        def kernel(q_g, k_g, v_g, d_out_g, start_g, d_start_g, ids_g, *refs, **scratch):
            mask_refs, refs = self.visits.take(refs)
            term_refs, (d_bias_g,) = self.terms.take(refs)
            inputs = q_g, k_g, v_g, d_out_g, (start_g, d_start_g), ids_g
            self._body(inputs, mask_refs, term_refs, types.SimpleNamespace(**scratch), d_bias_g)

        hopper_kernel(
            kernel,
            tiles=f"two warpgroups, {self.block_k} keys, {self.stages} stages",
            out_type=(),
            blocks=self.rows_of_bias * self.heads_of_bias * self.visits.rows,
            warpgroups=_WARPGROUPS,
            reduces=False,
            scratch_types=self._scratch(self.stages),
            kernel_name="jflash_backward_bias_sm90",
        )(*self.operands[:3], d_out, *statistics, column_ids, *mask_and_logits, d_bias_ref)

    def _body(self, inputs, mask_refs, term_refs, s: types.SimpleNamespace, d_bias_g) -> None:
        q_g, k_g, v_g, d_out_g, statistics, ids_g = inputs
        warpgroup = lax.axis_index("warpgroup")
        heads = self.rows_of_bias * self.heads_of_bias
        head, row = head_and_row(lax.axis_index("block"), rows=self.visits.rows, heads=heads, head_group=1)
        b, n = lax.div(head, i32(self.heads_of_bias)), lax.rem(head, i32(self.heads_of_bias))
        part = lax.min(warpgroup, i32(_WARPGROUPS - 1))
        visits = self._visits(mask_refs, b=b, row=row, part=part)
        rows = Rows(b, n, row * self.block_q, visits, None, None, mask_refs, term_refs, s, warpgroup)

        @pl.when(warpgroup < _WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS[_WARPGROUPS], action="increase")
            plgpu.barrier_wait(s.ids_full)
            self._sum_up(rows._replace(q_at=rows.q_at + warpgroup * WARPGROUP_ROWS), statistics, d_bias_g)

        @pl.when(warpgroup == _WARPGROUPS)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS[_WARPGROUPS], action="decrease")
            plgpu.copy_gmem_to_smem(ids_g, s.ids, s.ids_full)
            self._load(rows, q_g, k_g, v_g, d_out_g)

    def _visits(self, mask_refs, *, b, row, part) -> Visits:
        if self.visits_all:
            return Visits(i32(self.tile_map.columns), lambda i: i, lambda i, _: i >= 0)
        return self.visits.of_row(mask_refs, b=b, row=row, part=part)

    def _member(self, rows: Rows, step: Any) -> tuple[Any, Any, Any]:
        """Of a step the number of its visit, its batch row and its head."""
        visit, member = lax.div(step, i32(self.members)), lax.rem(step, i32(self.members))
        own_row, own_head = lax.div(member, i32(self.shared_heads)), lax.rem(member, i32(self.shared_heads))
        return visit, rows.b + own_row, rows.n + own_head

    # The warpgroup that loads -----------------------------------------------------------------------------------------

    def _load(self, rows: Rows, q_g, k_g, v_g, d_out_g) -> None:
        s, stages, steps = rows.s, self.stages, rows.visits.count * self.members

        def load_queries(slot, b, n):
            @pl.loop(0, _WARPGROUPS)
            def _(w):
                own = slot * _WARPGROUPS + w
                place = {"b": b, "row": rows.q_at + w * WARPGROUP_ROWS, "rows": WARPGROUP_ROWS, "head": n}
                load_pieces(q_g, self.qk.refs(s.q[0].at[own]), s.queries_full.at[own], **place)
                load_pieces(d_out_g, self.vo.refs(s.d_out[0].at[own]), s.queries_full.at[own], **place)

        if self.members == 1:
            load_queries(i32(0), rows.b, rows.n)

        @pl.loop(0, steps)
        def _(step):
            slot = slot_of(step, stages)
            visit, b, n = self._member(rows, step)
            k_at = rows.visits.column(visit) * self.block_k
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(s.free.at[slot]))
            if self.members > 1:
                load_queries(slot, b, n)
            keys = {"b": b, "row": k_at, "rows": self.block_k, "head": lax.div(n, i32(self.problem.group))}
            load_pieces(k_g, self.qk.refs(s.k[0].at[slot]), s.keys_full.at[slot], **keys)
            load_pieces(v_g, self.vo.refs(s.v[0].at[slot]), s.keys_full.at[slot], **keys)
            self.load_pairs(rows._replace(b=b, n=n), step, visit)

        see_releases(s.free, stages=stages, count=steps)
        self.see_releases(rows, steps)

    # The warpgroups that compute --------------------------------------------------------------------------------------

    def _sum_up(self, rows: Rows, statistics, d_bias_g) -> None:
        s, q_at = rows.s, rows.q_at
        (_, q), (_, d_out), (_, k), (_, v) = s.q, s.d_out, s.k, s.v
        if self.members == 1:
            minus_lse, minus_delta = self.statistics_of(statistics, b=rows.b, n=rows.n, q_at=q_at)
            rows = rows._replace(minus_lse=minus_lse, minus_delta=minus_delta)
            plgpu.barrier_wait(s.queries_full.at[rows.warpgroup])

        def ds_of(step):
            """dS of a step, and the number of its visit."""
            slot, (visit, b, n) = slot_of(step, self.stages), self._member(rows, step)
            # As in the kernel for dq: addresses that are not computed before the loop.
            q_slot, zero = opaque(rows.warpgroup, 0)
            tile = rows
            if self.members > 1:
                q_slot += slot * _WARPGROUPS
                minus_lse, minus_delta = self.statistics_of(statistics, b=b, n=n, q_at=q_at)
                tile = rows._replace(b=b, n=n, minus_lse=minus_lse, minus_delta=minus_delta)
                plgpu.barrier_wait(s.queries_full.at[q_slot])
            plgpu.barrier_wait(s.keys_full.at[slot])

            def issue(queries, keys, pieces, ref):
                for own, other in zip(pieces.refs(queries.at[q_slot]), pieces.refs(keys.at[slot + zero])):
                    plgpu.wgmma(ref, own, other.T)

            issue_s, issue_dp = (functools.partial(issue, *of) for of in ((q, k, self.qk), (d_out, v, self.vo)))
            ds = self.ds(tile, visit, issue_s, issue_dp)
            plgpu.barrier_arrive(s.free.at[slot])
            return ds, visit

        def store(visit, x):
            keys = pl.ds(rows.visits.column(visit) * self.block_k, self.block_k)
            d_bias_g[rows.b, rows.n, pl.ds(q_at, WARPGROUP_ROWS), keys] = x

        def add(step, total):
            ds, visit = ds_of(step)
            member = lax.rem(step, i32(self.members))
            total = lax.cond(member == 0, lambda: ds, lambda: total + ds)
            pl.when(member == self.members - 1)(lambda: store(visit, total))
            return total

        if self.members == 1:

            @pl.loop(0, rows.visits.count)
            def _(step):
                ds, visit = ds_of(step)
                store(visit, ds)

        else:
            nothing = plgpu.layout_cast(jnp.zeros(self.s_shape, jnp.float32), WGMMA)
            lax.fori_loop(0, rows.visits.count * self.members, add, nothing)
