"""The dq kernel for Hopper, for gradients that are bit-equal between runs.

The fused backward kernel adds its parts of dq in an order that changes between runs. This one sums dq of 64 queries in
the registers of one warpgroup, over key tiles in order, and pays with S and dP computed once more: 7 matmuls where the
fused kernel alone does 5 (FlashAttention-2, arXiv:2307.08691, algorithm 2).

A block of threads has two warpgroups that compute, each for 64 queries of one head, and one that loads K and V by TMA.
Per key tile: S = Q K^T and dP = dO V^T, P = exp2 of S while dP runs, dS = P · dP, dQ += dS K.
"""

import functools
import types

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
    end_stores,
    hopper_kernel,
    i32,
    load_pieces,
    opaque,
    slot_of,
    smem_pieces,
    store_pieces,
)
from jflash.backends.mosaic_gpu.sm90.query_tiles import QueryTiles, Rows
from jflash.backends.mosaic_gpu.tiles import DqTiles, HopperTiles
from jflash.backends.mosaic_gpu.visits import head_and_row
from jflash.backends.protocol import Operands
from jflash.numerics.varying import result_struct
from jflash.problem import Problem


def dq(
    problem: Problem,
    tiles: HopperTiles,
    operands: Operands,
    statistics: tuple[Float[Array, "B N padded_T"], Float[Array, "B N padded_T"]],
    d_out: Float[Array, "B T N Hv"],
) -> Float[Array, "B T N H"]:
    """The cotangent of q, in its dtype, bit-equal between runs.

    Args:
      problem, tiles: of the call.
      operands: with 0 in q at queries that see no key, and in k and v at keys that no query sees.
      statistics: float32, of each query -lse / unit and -delta; -inf and 0 where it sees no key and past the end, up
        to a multiple of `DqTiles.block_q`.
      d_out: with 0 at queries that see no key.
    """
    return _Dq(problem, tiles.backward_dq, operands)(statistics, d_out)


class _Dq(QueryTiles):
    """One kernel: what is known when tracing, the body of each warpgroup, the call."""

    def __init__(self, problem: Problem, tiles: DqTiles, operands: Operands):
        super().__init__(problem, operands, warpgroups=tiles.warpgroups, block_k=tiles.block_k)
        self.tiles = tiles

    def __call__(self, statistics: tuple[jax.Array, jax.Array], d_out: jax.Array) -> jax.Array:
        problem, tiles = self.problem, self.tiles
        dtype, warpgroups, barrier = problem.dtype, tiles.warpgroups, plgpu.Barrier
        k_stages, v_stages = tiles.k_stages, tiles.v_stages
        column_ids = np.arange(self.block_k, dtype=np.int32)

        def kernel(q_g, k_g, v_g, d_out_g, start_g, d_start_g, ids_g, *refs, **scratch):
            mask_refs, refs = self.visits.take(refs)
            term_refs, (dq_g,) = self.terms.take(refs)
            inputs = q_g, k_g, v_g, d_out_g, (start_g, d_start_g), ids_g
            self._body(inputs, mask_refs, term_refs, types.SimpleNamespace(**scratch), dq_g)

        return hopper_kernel(
            kernel,
            tiles=tiles,
            out_type=result_struct((problem.B, problem.T, problem.N, problem.H), dtype, self.operands),
            blocks=problem.B * problem.N * self.visits.rows,
            warpgroups=warpgroups,
            reduces=False,
            scratch_types={
                "q": plgpu.RefUnion(*smem_pieces((warpgroups,), WARPGROUP_ROWS, self.qk, dtype)),
                "q_full": barrier(num_arrivals=self.qk.count, num_barriers=warpgroups),
                "d_out": plgpu.RefUnion(*smem_pieces((warpgroups,), WARPGROUP_ROWS, self.vo, dtype)),
                "d_out_full": barrier(num_arrivals=self.vo.count, num_barriers=warpgroups),
                "k": plgpu.RefUnion(*smem_pieces((k_stages,), self.block_k, self.qk, dtype)),
                "k_full": barrier(num_arrivals=self.qk.count, num_barriers=k_stages),
                "k_free": barrier(num_arrivals=warpgroups, num_barriers=k_stages),
                "v": plgpu.RefUnion(*smem_pieces((v_stages,), self.block_k, self.vo, dtype)),
                "v_full": barrier(num_arrivals=self.vo.count, num_barriers=v_stages),
                "v_free": barrier(num_arrivals=warpgroups, num_barriers=v_stages),
                "ids": plgpu.SMEM((self.block_k,), jnp.int32),
                "ids_full": barrier(),
                **self.scratch(),
            },
            kernel_name="jflash_backward_dq_sm90",
        )(*self.operands[:3], d_out, *statistics, column_ids, *self.visits.operands(), *self.terms.operands())

    def _body(self, inputs, mask_refs, term_refs, s: types.SimpleNamespace, dq_g) -> None:
        q_g, k_g, v_g, d_out_g, statistics, ids_g = inputs
        (q_tma, q_mma), (d_out_tma, _) = s.q, s.d_out
        warpgroups = self.tiles.warpgroups
        warpgroup = lax.axis_index("warpgroup")
        heads = {"heads": self.problem.B * self.problem.N, "head_group": self.tiles.head_group}
        head, row = head_and_row(lax.axis_index("block"), rows=self.visits.rows, **heads)
        b, n = lax.div(head, i32(self.problem.N)), lax.rem(head, i32(self.problem.N))
        part = lax.min(warpgroup, i32(warpgroups - 1))
        visits = self.visits.of_row(mask_refs, b=b, row=row, part=part)
        queries = {"b": b, "rows": WARPGROUP_ROWS, "head": n}

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS[warpgroups], action="increase")
            q_at = row * self.block_q + warpgroup * WARPGROUP_ROWS
            own = self.statistics_of(statistics, b=b, n=n, q_at=q_at)
            if self.needs_ids:
                plgpu.barrier_wait(s.ids_full)
            plgpu.barrier_wait(s.q_full.at[warpgroup])
            plgpu.barrier_wait(s.d_out_full.at[warpgroup])
            rows = Rows(b, n, q_at, visits, *own, mask_refs, term_refs, s, warpgroup)
            accumulators = [plgpu.ACC((WARPGROUP_ROWS, self.qk.width), jnp.float32)] * self.qk.count
            for piece, part_of_dq in enumerate(pl.run_scoped(functools.partial(self._sum_up, rows), *accumulators)):
                q_mma[warpgroup, piece] = (part_of_dq * self.problem.scale).astype(dq_g.dtype)
            plgpu.commit_smem()
            # Also past the last query: dq is clipped there.
            store_pieces(self.qk.refs(q_tma.at[warpgroup]), dq_g, row=q_at, **queries)
            end_stores()

        @pl.when(warpgroup == warpgroups)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS[warpgroups], action="decrease")
            resident = (q_g, q_tma, self.qk, s.q_full), (d_out_g, d_out_tma, self.vo, s.d_out_full)

            # Not unrolled: ptxas interleaved the copies, and this warpgroup spilled 8 bytes at H=256 with odd lengths.
            @pl.loop(0, warpgroups)
            def _(w):
                q_at = row * self.block_q + w * WARPGROUP_ROWS
                for source, smem, pieces, full in resident:
                    load_pieces(source, pieces.refs(smem.at[w]), full.at[w], row=q_at, **queries)

            if self.needs_ids:
                plgpu.copy_gmem_to_smem(ids_g, s.ids, s.ids_full)
            self._load(Rows(b, n, row * self.block_q, visits, None, None, mask_refs, term_refs, s, None), k_g, v_g)

    # The warpgroup that loads -----------------------------------------------------------------------------------------

    def _load(self, rows: Rows, k_g, v_g) -> None:
        k_stages, v_stages, visits, s = self.tiles.k_stages, self.tiles.v_stages, rows.visits, rows.s
        place = {"b": rows.b, "rows": self.block_k, "head": lax.div(rows.n, i32(self.problem.group))}
        key = self.qk, k_g, s.k[0], s.k_full, s.k_free
        value = self.vo, v_g, s.v[0], s.v_full, s.v_free

        def load(i, stages, pieces, source, smem, full, _):
            @pl.when(i < visits.count)
            def _():
                slot, at = slot_of(i, stages), visits.column(i) * self.block_k
                load_pieces(source, pieces.refs(smem.at[slot]), full.at[slot], row=at, **place)

        def refill(i, stages, *of):
            plgpu.barrier_wait(of[-1].at[slot_of(i, stages)])
            load(i + stages, stages, *of)

        for i in range(max(k_stages, v_stages)):
            if i < k_stages:
                load(i32(i), k_stages, *key)
            if i < v_stages:
                load(i32(i), v_stages, *value)
        self.load_pairs(rows, i32(0), i32(0))

        # Also of the last tiles every release is awaited, so that no barrier is left in the middle of a phase.
        @pl.loop(0, visits.count)
        def _(i):
            refill(i, v_stages, *value)  # V of a step is free before its K.
            pl.when(i + 1 < visits.count)(lambda: self.load_pairs(rows, i + 1, i + 1))
            refill(i, k_stages, *key)

        self.see_releases(rows, visits.count)

    # The warpgroups that compute --------------------------------------------------------------------------------------

    def _sum_up(self, rows: Rows, *dq_refs):
        """The pieces of the sum of ds · k over the visited tiles."""
        s = rows.s
        (_, q), (_, d_out), (_, k), (_, v) = s.q, s.d_out, s.k, s.v
        k_stages, v_stages = self.tiles.k_stages, self.tiles.v_stages

        @pl.loop(0, rows.visits.count)
        def _(i):
            k_slot, v_slot = slot_of(i, k_stages), slot_of(i, v_stages)
            # Without it ptxas 13.0 spills 264 bytes at H = Hv = 256, with it nothing.
            own, zero = opaque(rows.warpgroup, 0)
            v_slot = v_slot + zero

            def issue_s(s_ref):
                for q_piece, k_piece in zip(self.qk.refs(q.at[own]), self.qk.refs(k.at[k_slot])):
                    plgpu.wgmma(s_ref, q_piece, k_piece.T)

            def issue_dp(dp_ref):
                plgpu.barrier_wait(s.v_full.at[v_slot])
                for d_out_piece, v_piece in zip(self.vo.refs(d_out.at[own]), self.vo.refs(v.at[v_slot])):
                    plgpu.wgmma(dp_ref, d_out_piece, v_piece.T)

            plgpu.barrier_wait(s.k_full.at[k_slot])
            ds = self.ds(rows, i, issue_s, issue_dp).astype(self.problem.dtype)
            plgpu.barrier_arrive(s.v_free.at[v_slot])
            for dq_ref, k_piece in zip(dq_refs, self.qk.refs(k.at[k_slot])):
                plgpu.wgmma(dq_ref, ds, k_piece)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s.k_free.at[k_slot])

        return [dq_ref[...] for dq_ref in dq_refs]
