"""The dq kernel for Hopper, for gradients that are bit-equal between runs.

The fused backward kernel adds its parts of dq in an order that changes between runs. This one sums dq of 64 queries in
the registers of one warpgroup, over key tiles in order, and pays with S and dP computed once more: 7 matmuls where the
fused kernel alone does 5 (FlashAttention-2, arXiv:2307.08691, algorithm 2).

A block of threads has two warpgroups that compute, each for 64 queries of one head, and one that loads K and V by TMA.
Per key tile: S = Q K^T and dP = dO V^T, P = exp2 of S while dP runs, dS = P · dP, dQ += dS K. The accumulator of S
starts at -lse / scale, or -inf where masked, and that of dP at -delta: so neither the mask nor the two values of each
row cost anything after the matmuls. (Where logits are more than q · k times the scale, S starts at 0.) All of them are
written before the first matmul is issued: between two, ptxas waits for the tensor cores before other instructions may
write accumulators.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jflash.backends.mosaic_gpu.primitives import (
    BY_COLUMN,
    BY_ROW,
    COMPUTE_REGISTERS,
    LOAD_REGISTERS,
    LOG2_E,
    WARPGROUP_ROWS,
    Pieces,
    along_rows,
    hopper_kernel,
    i32,
    load_global,
    load_pieces,
    opaque,
    slot_of,
    smem_pieces,
    store_pieces,
)
from jflash.backends.mosaic_gpu.terms import TileTerms
from jflash.backends.mosaic_gpu.tiles import DqTiles, HopperTiles
from jflash.backends.mosaic_gpu.visits import TileVisits, Visits, head_and_row
from jflash.backends.protocol import Operands
from jflash.masks.tile_map import TileMap
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


class _Rows(NamedTuple):
    """The queries of a warpgroup.

    Attributes:
      b, n, q_at: batch row, query head, first query.
      visits: which tiles of keys they see.
      minus_lse, minus_delta: -lse / unit and -delta of each, in registers.
      mask_refs, term_refs: the operands of the mask, and of the logits.
      ids: the numbers of columns, in shared memory.
    """

    b: Any
    n: Any
    q_at: Any
    visits: Visits
    minus_lse: Any
    minus_delta: Any
    mask_refs: tuple[Any, ...]
    term_refs: tuple[Any, ...]
    ids: Any


class _Dq:
    """One kernel: what is known when tracing, the body of each warpgroup, the call."""

    def __init__(self, problem: Problem, tiles: DqTiles, operands: Operands):
        self.problem, self.tiles, self.operands = problem, tiles, operands
        self.block_q, self.block_k = tiles.block_q, tiles.block_k
        self.qk, self.vo = (Pieces.of(size, problem.T, problem.S) for size in (problem.H, problem.Hv))
        sizes = {"T": problem.T, "S": problem.S, "block_q": self.block_q, "block_k": self.block_k}
        tile_map = TileMap(mask=operands.mask, **sizes)
        self.visits = TileVisits(tile_map, parts=tiles.warpgroups)
        self.terms = TileTerms(problem, operands, tile_map)
        self.s_shape = (WARPGROUP_ROWS, self.block_k)

    def __call__(self, statistics: tuple[jax.Array, jax.Array], d_out: jax.Array) -> jax.Array:
        problem, tiles = self.problem, self.tiles
        dtype, warpgroups, barrier = problem.dtype, tiles.warpgroups, plgpu.Barrier
        column_ids = np.arange(self.block_k, dtype=np.int32)

        def kernel(q_g, k_g, v_g, d_out_g, start_g, d_start_g, ids_g, *refs):
            mask_refs, refs = self.visits.take(refs)
            term_refs, refs = self.terms.take(refs)
            self._body((q_g, k_g, v_g, d_out_g, (start_g, d_start_g), ids_g), mask_refs, term_refs, *refs)

        def staged(stages: int, pieces: Pieces) -> tuple[Any, Any, Any]:
            """Tiles in shared memory, and for each a barrier for when it is there and one for when it has been read."""
            return (
                plgpu.RefUnion(*smem_pieces((stages,), self.block_k, pieces, dtype)),
                barrier(num_arrivals=pieces.count, num_barriers=stages),
                barrier(num_arrivals=warpgroups, num_barriers=stages),
            )

        def resident(pieces: Pieces) -> tuple[Any, Any]:
            return (
                plgpu.RefUnion(*smem_pieces((warpgroups,), WARPGROUP_ROWS, pieces, dtype)),
                barrier(num_arrivals=pieces.count, num_barriers=warpgroups),
            )

        return hopper_kernel(
            kernel,
            tiles=tiles,
            out_type=result_struct((problem.B, problem.T, problem.N, problem.H), dtype, self.operands),
            blocks=problem.B * problem.N * self.visits.rows,
            warpgroups=warpgroups,
            reduces=False,
            scratch_types=[
                resident(self.qk),
                resident(self.vo),
                staged(tiles.k_stages, self.qk),
                staged(tiles.v_stages, self.vo),
                (plgpu.SMEM((self.block_k,), jnp.int32), barrier()),
            ],
            kernel_name="jflash_backward_dq_sm90",
        )(*self.operands[:3], d_out, *statistics, column_ids, *self.visits.operands(), *self.terms.operands())

    def _body(self, inputs, mask_refs, term_refs, dq_g, q, d_out, k, v, ids) -> None:
        q_g, k_g, v_g, d_out_g, statistics, ids_g = inputs
        ((q_tma, q_mma), q_full), ((d_out_tma, d_out_mma), d_out_full), (ids_s, ids_full) = q, d_out, ids
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
            # minus lse / unit, and minus delta
            starts = [load_global(statistic.at[b, n], q_at, WARPGROUP_ROWS, layout=BY_ROW) for statistic in statistics]
            if self.needs_ids:
                plgpu.barrier_wait(ids_full)
            plgpu.barrier_wait(q_full.at[warpgroup])
            plgpu.barrier_wait(d_out_full.at[warpgroup])
            tile = _Rows(b, n, q_at, visits, *starts, mask_refs, term_refs, ids_s)
            sum_up = functools.partial(self._sum_up, tile, warpgroup, q_mma, d_out_mma, k, v)
            accumulators = [plgpu.ACC((WARPGROUP_ROWS, self.qk.width), jnp.float32)] * self.qk.count
            for piece, part_of_dq in enumerate(pl.run_scoped(sum_up, *accumulators)):
                q_mma[warpgroup, piece] = (part_of_dq * self.problem.scale).astype(dq_g.dtype)
            plgpu.commit_smem()
            # Also past the last query: dq is clipped there.
            store_pieces(self.qk.refs(q_tma.at[warpgroup]), dq_g, row=q_at, **queries)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS[warpgroups], action="decrease")
            resident = (q_g, q_tma, self.qk, q_full), (d_out_g, d_out_tma, self.vo, d_out_full)

            # Not unrolled: ptxas interleaved the copies, and this warpgroup spilled 8 bytes at H=256 with odd lengths.
            @pl.loop(0, warpgroups)
            def _(w):
                q_at = row * self.block_q + w * WARPGROUP_ROWS
                for source, smem, pieces, full in resident:
                    load_pieces(source, pieces.refs(smem.at[w]), full.at[w], row=q_at, **queries)

            if self.needs_ids:
                plgpu.copy_gmem_to_smem(ids_g, ids_s, ids_full)
            self._load(
                visits, {"b": b, "head": lax.div(n, i32(self.problem.group))}, (self.qk, k_g, *k), (self.vo, v_g, *v)
            )

    # The warpgroup that loads -----------------------------------------------------------------------------------------

    def _load(self, visits, place, key, value) -> None:
        k_stages, v_stages = self.tiles.k_stages, self.tiles.v_stages

        def load(i, stages, pieces, source, smem, full, _):
            @pl.when(i < visits.count)
            def _():
                slot, at = slot_of(i, stages), visits.column(i) * self.block_k
                load_pieces(source, pieces.refs(smem[0].at[slot]), full.at[slot], row=at, rows=self.block_k, **place)

        def refill(i, stages, *of):
            plgpu.barrier_wait(of[-1].at[slot_of(i, stages)])
            load(i + stages, stages, *of)

        for i in range(max(k_stages, v_stages)):
            if i < k_stages:
                load(i32(i), k_stages, *key)
            if i < v_stages:
                load(i32(i), v_stages, *value)

        # Also of the last tiles every release is awaited, so that no barrier is left in the middle of a phase.
        @pl.loop(0, visits.count)
        def _(i):
            refill(i, v_stages, *value)  # V of a step is free before its K.
            refill(i, k_stages, *key)

    # The warpgroups that compute --------------------------------------------------------------------------------------

    def _sum_up(self, rows: _Rows, warpgroup, q, d_out, key, value, *dq_refs):
        """The pieces of the sum of ds · k over the visited tiles."""
        ((_, k), k_full, k_free), ((_, v), v_full, v_free) = key, value
        k_stages, v_stages = self.tiles.k_stages, self.tiles.v_stages
        s_accumulator = plgpu.ACC(self.s_shape, jnp.float32)
        scale_log2 = self.problem.scale * LOG2_E

        @pl.loop(0, rows.visits.count)
        def _(i):
            k_slot, v_slot = slot_of(i, k_stages), slot_of(i, v_stages)
            # Without it ptxas 13.0 spills 264 bytes at H = Hv = 256, with it nothing.
            own, zero = opaque(warpgroup, 0)
            v_slot = v_slot + zero

            def s_and_dp(s_ref, dp_ref):
                s_ref[...] = self._start_s(rows, i)
                dp_ref[...] = self._start_dp(rows)
                for q_piece, k_piece in zip(self.qk.refs(q.at[own]), self.qk.refs(k.at[k_slot])):
                    plgpu.wgmma(s_ref, q_piece, k_piece.T)
                plgpu.barrier_wait(v_full.at[v_slot])
                for d_out_piece, v_piece in zip(self.vo.refs(d_out.at[own]), self.vo.refs(v.at[v_slot])):
                    plgpu.wgmma(dp_ref, d_out_piece, v_piece.T)
                s_tile = plgpu.wgmma_accumulator_load(s_ref, wait_n=self.vo.count)
                if self.terms.is_plain:
                    return jnp.exp2(s_tile * scale_log2) * plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
                return self._ds(rows, i, s_tile, plgpu.wgmma_accumulator_load(dp_ref, wait_n=0))

            plgpu.barrier_wait(k_full.at[k_slot])
            ds = pl.run_scoped(s_and_dp, s_accumulator, s_accumulator).astype(self.problem.dtype)
            plgpu.barrier_arrive(v_free.at[v_slot])
            for dq_ref, k_piece in zip(dq_refs, self.qk.refs(k.at[k_slot])):
                plgpu.wgmma(dq_ref, ds, k_piece)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(k_free.at[k_slot])

        return [dq_ref[...] for dq_ref in dq_refs]

    def _start_s(self, rows: _Rows, i):
        """What the accumulator of S starts at on the i-th visited tile: -lse / scale, and -inf at masked pairs.

        It is 0 where the logits are still to be made.
        """
        if not self.terms.is_plain:
            return jnp.zeros(self.s_shape, jnp.float32)
        return self._allowed_or(-jnp.inf, along_rows(rows.minus_lse, self.s_shape), rows, i)

    def _start_dp(self, rows: _Rows):
        """-delta; 0 where dropout comes before it."""
        if self.terms.dropout is not None:
            return jnp.zeros(self.s_shape, jnp.float32)
        return along_rows(rows.minus_delta, self.s_shape)

    def _ds(self, rows: _Rows, i, s, dp):
        """dS by scale · qk, where the logits are made of S here; as in the fused kernels."""
        place = {"b": rows.b, "n": rows.n, "q_at": rows.q_at, "k_at": rows.visits.column(i) * self.block_k}
        ids = plgpu.load(rows.ids, layout=BY_COLUMN)
        logits, by_qk, _ = self.terms.with_derivatives(rows.term_refs, s, ids, **place)
        p = jnp.exp2((logits + along_rows(rows.minus_lse, self.s_shape)) * LOG2_E)
        p = self._allowed_or(0.0, p, rows, i)
        (dp,) = self.terms.dropped(rows.term_refs, dp, **place)
        if self.terms.dropout is not None:
            dp += along_rows(rows.minus_delta, self.s_shape)
        ds = p * dp * by_qk
        return ds if self.terms.is_total else jnp.where(p == 0, 0, ds)

    def _allowed_or(self, other: float, x, rows: _Rows, i):
        """The i-th visited tile, with another value at masked pairs."""
        if not self.visits.is_masked:
            return x
        column = rows.visits.column(i)

        def masked():
            place = {"b": rows.b, "n": rows.n, "q_at": rows.q_at, "k_at": column * self.block_k}
            ids = plgpu.load(rows.ids, layout=BY_COLUMN)
            return jnp.where(self.visits.allowed(rows.mask_refs, ids, **place, shape=self.s_shape), x, other)

        return lax.cond(rows.visits.is_partial(i, column), masked, lambda: x)

    @property
    def needs_ids(self) -> bool:
        """Whether the numbers of columns are needed, for the mask or for logits."""
        return self.visits.is_masked or not self.terms.is_plain
