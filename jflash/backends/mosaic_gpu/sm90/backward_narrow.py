"""The backward kernel for Hopper, for head dims up to 128: all five matmuls in one pass over the queries.

FlashAttention-2 (arXiv:2307.08691, algorithm 2) in the form of FlashAttention-3: a block of threads keeps 128 keys of
one head and their values in shared memory, two warpgroups hold dK and dV of 64 keys each in registers, a third loads Q
and dO. S and dP are computed transposed, so that P^T and dS^T are operands of dV += P^T dO and dK += dS^T Q where they
stand, in registers. dS^T goes to shared memory as well, and each warpgroup computes a part of dQ = dS K and adds it to
global memory by TMA, in float32.

-lse / scale and -delta are where the accumulators of S and dP start: no instruction subtracts them, and -inf instead of
the former masks a pair before the matmul begins.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jflash.backends.mosaic_gpu.primitives import (
    BY_COLUMN,
    BY_ROW,
    CHUNK,
    LOG2_E,
    WARPGROUP_ROWS,
    Pieces,
    along_columns,
    along_rows,
    exchange,
    i32,
    load_global,
    load_pieces,
    row_ids,
    smem_pieces,
    smem_tiles,
    store_pieces,
)
from jflash.backends.mosaic_gpu.tiles import HopperTiles
from jflash.backends.mosaic_gpu.visits import MaskValues, TileVisits, Visits
from jflash.backends.protocol import Operands
from jflash.masks.tile_map import TileMap
from jflash.numerics.varying import result_struct
from jflash.problem import Problem

_WARPGROUPS = 2
_COMPUTE_REGISTERS, _LOAD_REGISTERS = 240, 24


class _Steps:
    """The steps of a block of threads: the visits of each query head of the group, one head after the other."""

    def __init__(self, visits: Visits, *, group: int, stages: int):
        self._visits, self._group, self._stages = visits, group, stages
        self.count = visits.count * group

    def loop(self, body: Callable[[Any, Any], None]) -> None:
        """Runs `body(head of the group, visit)` for each step."""

        # Two loops, since a division by the count of visits took registers enough to spill.
        @pl.loop(0, self._group)
        def _(g):
            @pl.loop(0, self._visits.count)
            def _(t):
                body(g, t)

    def index(self, g: Any, t: Any) -> Any:
        return t if self._group == 1 else g * self._visits.count + t

    def slot(self, g: Any, t: Any) -> Any:
        return self.slot_of(self.index(g, t))

    def slot_of(self, index: Any) -> Any:
        return lax.rem(i32(index), i32(self._stages))


class NarrowBackward:
    """dk and dv of one problem and, added to a reference, dq before the scale.

    Args:
      with_dq: whether to compute dq.
    """

    def __init__(self, problem: Problem, tiles: HopperTiles, operands: Operands, *, with_dq: bool):
        self.problem, self.operands, self.with_dq = problem, operands, with_dq
        self.tiles, self.inline_ptx = tiles.backward, tiles.inline_ptx
        self.block_q, self.block_k = self.tiles.block_q, self.tiles.block_k
        self.qk, self.vo = (Pieces.of(size, problem.T, problem.S) for size in (problem.H, problem.Hv))
        lengths = {"T": problem.T, "S": problem.S, "block_q": self.block_q, "block_k": self.block_k}
        self.visits = TileVisits(TileMap(mask=operands.mask, transpose=True, **lengths), parts=1)
        self.mask_values = MaskValues(operands.mask, **lengths)

    def __call__(self, rows: jax.Array, d_out: jax.Array, dq_ref: Any | None) -> tuple[jax.Array, jax.Array]:
        """dk and dv; `rows` (B, N, 2, T rounded up) holds -lse / scale and -delta, `dq_ref` is float32."""
        problem, stages, dtype = self.problem, self.tiles.stages, self.problem.dtype
        visit_arrays, mask_arrays = self.visits.operands(), self.mask_values.operands()
        column_ids = jnp.arange(self.block_q, dtype=jnp.int32)
        barrier = plgpu.Barrier
        released = barrier(num_arrivals=_WARPGROUPS, num_barriers=stages)
        dq_refs = (dq_ref,) if self.with_dq else ()

        def kernel(q_g, k_g, v_g, do_g, rows_g, ids_g, *refs):
            visit_refs, refs = refs[: len(visit_arrays)], refs[len(visit_arrays) :]
            mask_refs, refs = refs[: len(mask_arrays)], refs[len(mask_arrays) :]
            dq_g, refs = (refs[0], refs[1:]) if self.with_dq else (None, refs)
            self._body((q_g, k_g, v_g, do_g, rows_g, ids_g), visit_refs, mask_refs, dq_g, *refs)

        ds_slots = stages if self.with_dq else 0
        return plgpu.kernel(
            kernel,
            out_type=[result_struct(x.shape, dtype, self.operands) for x in (self.operands.k, self.operands.v)],
            grid=(problem.B * problem.K * self.visits.rows,),
            grid_names=("block",),
            num_threads=_WARPGROUPS + 1,
            thread_name="warpgroup",
            scratch_types=[
                # dK and dV go where K and V were.
                plgpu.RefUnion(*smem_pieces((), self.block_k, self.qk, dtype)),
                plgpu.RefUnion(*smem_pieces((), self.block_k, self.vo, dtype)),
                plgpu.RefUnion(*smem_pieces((stages,), self.block_q, self.qk, dtype)),
                plgpu.RefUnion(*smem_pieces((stages,), self.block_q, self.vo, dtype)),
                plgpu.SMEM((stages, 2, self.block_q), jnp.float32),
                plgpu.SMEM((self.block_q,), jnp.int32),
                [smem_tiles((ds_slots, self.block_k, self.block_q), dtype)] * self.with_dq,
                [smem_tiles((_WARPGROUPS, WARPGROUP_ROWS, CHUNK), np.dtype(np.float32))] * self.with_dq,
                barrier(num_arrivals=self.qk.count + self.vo.count + 1),
                barrier(num_arrivals=self.qk.count + 2, num_barriers=stages),
                barrier(num_arrivals=self.vo.count, num_barriers=stages),
                released,
                released,
                released,
                barrier(num_arrivals=_WARPGROUPS),
            ],
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            kernel_name="jflash_backward_sm90" if self.with_dq else "jflash_backward_dkv_sm90",
        )(*self.operands[:3], d_out, rows, column_ids, *visit_arrays, *mask_arrays, *dq_refs)

    def _body(
        self, inputs, visit_refs, mask_refs, dq_g, dk_g, dv_g, k_s, v_s, q_s, do_s, rows_s, ids_s, ds_s, dq_s,
        kv_full, q_full, do_full, q_free, do_free, exchanged, finished,
    ):  # fmt: skip
        q_g, k_g, v_g, do_g, rows_g, ids_g = inputs
        (k_tma, k_mma), (v_tma, v_mma), (q_tma, q_mma), (do_tma, do_mma) = k_s, v_s, q_s, do_s
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        tile, head = lax.rem(block, i32(self.visits.rows)), lax.div(block, i32(self.visits.rows))
        b, kv_head = lax.div(head, i32(self.problem.K)), lax.rem(head, i32(self.problem.K))
        visits = self.visits.of_row(visit_refs, b=b, row=tile, part=i32(0))
        steps = _Steps(visits, group=self.problem.group, stages=self.tiles.stages)
        k_at = tile * self.block_k

        def visit_of(t):
            if self.visits.is_masked:
                return t
            # The blocks of a head start at different queries, so that they do not add to one tile of dQ at once: 579 to
            # 627 TFLOP/s on an H200 (2026-11-29, study).
            return lax.rem(t + tile * (self.block_k // self.block_q), visits.count)

        @pl.when(warpgroup < _WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            own_rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            plgpu.barrier_wait(kv_full)
            k_own_at = k_at + warpgroup * WARPGROUP_ROWS

            def step(dk_refs, dv_refs, g, t):
                i, slot = steps.index(g, t), steps.slot(g, t)
                # The barrier keeps LLVM from computing the addresses of all matmuls outside of the loop, 64 bits each:
                # without it ptxas spills 76 to 204 bytes at H=128, with it nothing (ptxas 13.0).
                own = lax.optimization_barrier(warpgroup)
                own_rows = pl.ds(own * WARPGROUP_ROWS, WARPGROUP_ROWS)
                head, visit = kv_head * self.problem.group + g, visit_of(t)
                column = visits.column(visit)
                is_partial = visits.is_partial(visit, column)
                q_at = column * self.block_q
                plgpu.barrier_wait(q_full.at[slot])

                def s_and_dp(s_ref, dp_ref):
                    # Both accumulators before both matmuls: ptxas waits for all of them before it lets other
                    # instructions write registers of accumulators. S is written before dP is read: with both in
                    # registers while dK is in flight, ptxas serialises the matmuls of the causal kernel at H=64.
                    s_ref[...] = self._s_start(rows_s.at[slot], mask_refs, ids_s, is_partial, b, q_at, k_own_at)
                    dp_ref[...] = self._dp_start(rows_s.at[slot])
                    for k, q in zip(self.qk.refs(k_mma, own_rows), self.qk.refs(q_mma.at[slot])):
                        plgpu.wgmma(s_ref, k, q.T)
                    plgpu.barrier_wait(do_full.at[slot])
                    for v, do in zip(self.vo.refs(v_mma, own_rows), self.vo.refs(do_mma.at[slot])):
                        plgpu.wgmma(dp_ref, v, do.T)
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=self.vo.count)
                    if self.tiles.dk_in_flight:

                        @pl.when(i > 0)
                        def _():
                            plgpu.barrier_arrive(q_free.at[steps.slot_of(i - 1)])

                    p = jnp.exp2(s * (self.problem.scale * LOG2_E))
                    return p.astype(self.problem.dtype), p * plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)

                accumulator = plgpu.ACC((WARPGROUP_ROWS, self.block_q), jnp.float32)
                p16, ds = pl.run_scoped(s_and_dp, accumulator, accumulator)
                ds16 = ds.astype(self.problem.dtype)
                if self.with_dq:
                    ds_s[0][slot, own_rows] = ds16
                for dv_ref, do in zip(dv_refs, self.vo.refs(do_mma.at[slot])):
                    plgpu.wgmma(dv_ref, p16, do)
                if self.with_dq:
                    exchange(exchanged.at[slot], inline_ptx=self.inline_ptx)

                dk_wgmmas = self.qk.count

                def issue_dk():
                    for dk_ref, q in zip(dk_refs, self.qk.refs(q_mma.at[slot])):
                        plgpu.wgmma(dk_ref, ds16, q)

                def dq_and_dk(dq_ref):
                    plgpu.wgmma(dq_ref, *self._dq_operands(ds_s[0].at[slot], k_mma, own))
                    issue_dk()
                    plgpu.wgmma_wait(1 + dk_wgmmas)
                    plgpu.barrier_arrive(do_free.at[slot])
                    return plgpu.wgmma_accumulator_load(dq_ref, wait_n=dk_wgmmas)

                if self.with_dq:
                    dq = pl.run_scoped(dq_and_dk, plgpu.ACC((WARPGROUP_ROWS, CHUNK), jnp.float32))
                    dq_s[0][warpgroup] = dq  # While dK is computed.
                    plgpu.commit_smem()
                    target = dq_g.at[self._dq_target(b * self.problem.N + head, q_at, warpgroup)]
                    plgpu.copy_smem_to_gmem(dq_s[0].at[warpgroup], target, reduction_op="add")
                else:
                    issue_dk()
                    plgpu.wgmma_wait(dk_wgmmas)
                    plgpu.barrier_arrive(do_free.at[slot])
                if not self.tiles.dk_in_flight:
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(q_free.at[slot])

            def loop(*refs):
                dk_refs, dv_refs = refs[: self.qk.count], refs[self.qk.count :]

                steps.loop(functools.partial(step, dk_refs, dv_refs))
                if self.tiles.dk_in_flight:
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(q_free.at[steps.slot_of(steps.count - 1)])
                return [ref[...] for ref in dk_refs], [ref[...] for ref in dv_refs]

            widths = [pieces.width for pieces in (self.qk, self.vo) for _ in range(pieces.count)]
            dk, dv = pl.run_scoped(loop, *(plgpu.ACC((WARPGROUP_ROWS, width), jnp.float32) for width in widths))

            plgpu.barrier_arrive(finished)
            for piece, x in enumerate(dv):  # Nobody else reads these rows of V.
                v_mma[piece, own_rows] = x.astype(dv_g.dtype)
            plgpu.barrier_wait(finished)  # The other warpgroup has read K for the last time.
            for piece, x in enumerate(dk):
                k_mma[piece, own_rows] = (x * self.problem.scale).astype(dk_g.dtype)
            plgpu.commit_smem()
            target = {"b": b, "row": k_own_at, "rows": WARPGROUP_ROWS, "head": kv_head}
            store_pieces(self.vo.refs(v_tma, own_rows), dv_g, **target)
            store_pieces(self.qk.refs(k_tma, own_rows), dk_g, **target)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == _WARPGROUPS)
        def _load():
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            source = {"b": b, "row": k_at, "rows": self.block_k, "head": kv_head}
            load_pieces(k_g, self.qk.refs(k_tma), kv_full, **source)
            load_pieces(v_g, self.vo.refs(v_tma), kv_full, **source)
            plgpu.copy_gmem_to_smem(ids_g, ids_s, kv_full)

            def load_q(slot, head, row):
                where = {"b": b, "row": row, "rows": self.block_q, "head": head}
                load_pieces(q_g, self.qk.refs(q_tma.at[slot]), q_full.at[slot], **where)
                for which in range(2):
                    statistics = rows_g.at[b, head, which, pl.ds(row, self.block_q)]
                    plgpu.copy_gmem_to_smem(statistics, rows_s.at[slot, which], q_full.at[slot])

            def load_do(slot, head, row):
                where = {"b": b, "row": row, "rows": self.block_q, "head": head}
                load_pieces(do_g, self.vo.refs(do_tma.at[slot]), do_full.at[slot], **where)

            def step(g, t):
                slot = steps.slot(g, t)
                head, row = kv_head * self.problem.group + g, visits.column(visit_of(t)) * self.block_q
                reused = steps.index(g, t) >= self.tiles.stages
                pl.when(reused)(lambda: plgpu.barrier_wait(do_free.at[slot]))
                load_do(slot, head, row)
                pl.when(reused)(lambda: plgpu.barrier_wait(q_free.at[slot]))
                load_q(slot, head, row)

            steps.loop(step)
            # Every release is seen, so that no barrier is left in the middle of a phase.
            last = lax.min(i32(self.tiles.stages), steps.count)

            @pl.loop(0, last)
            def _(i):
                for free in (do_free, q_free):
                    plgpu.barrier_wait(free.at[steps.slot_of(steps.count - last + i)])

    # A step's part of dQ is 64 rows by a chunk for each warpgroup: other columns, other rows, or where there is only
    # one such part, the sum over other keys.

    def _dq_operands(self, ds, k, warpgroup):
        own = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        if self.qk.chunks == 2:
            return ds.T, self.qk.chunk(k, warpgroup)
        if self.block_q == 2 * WARPGROUP_ROWS:
            return ds.at[:, own].T, k.at[0]
        return ds.at[own].T, k.at[0, own]

    def _dq_target(self, head, q_at, warpgroup):
        if self.qk.chunks == 2:
            return head, pl.ds(q_at, WARPGROUP_ROWS), pl.ds(warpgroup * CHUNK, CHUNK)
        if self.block_q == 2 * WARPGROUP_ROWS:
            q_at += warpgroup * WARPGROUP_ROWS
        return head, pl.ds(q_at, WARPGROUP_ROWS), pl.ds(0, CHUNK)

    def _s_start(self, rows_s, mask_refs, ids_s, is_partial, b, q_at, k_at):
        """What the accumulator of S starts from: -lse / scale, or -inf where the mask does not allow a pair."""
        shape = (WARPGROUP_ROWS, self.block_q)

        def masked(x):
            # Ids of queries from shared memory: an iota along columns, computed outside of the loop by LLVM, spilled.
            allowed = self.mask_values.allowed(
                mask_refs,
                q=along_columns(plgpu.load(ids_s, layout=BY_COLUMN) + q_at, shape),
                k=row_ids(shape) + k_at,
                b=b,
                load_q=lambda ref: along_columns(load_global(ref, q_at, self.block_q, layout=BY_COLUMN), shape),
                load_k=lambda ref: along_rows(load_global(ref, k_at, WARPGROUP_ROWS, layout=BY_ROW), shape),
            )
            return jnp.where(allowed, x, -jnp.inf)

        start = along_columns(plgpu.load(rows_s.at[0], layout=BY_COLUMN), shape)
        return lax.cond(is_partial, masked, lambda x: x, start) if self.visits.is_masked else start

    def _dp_start(self, rows_s):
        """What the accumulator of dP starts from: -delta."""
        return along_columns(plgpu.load(rows_s.at[1], layout=BY_COLUMN), (WARPGROUP_ROWS, self.block_q))
