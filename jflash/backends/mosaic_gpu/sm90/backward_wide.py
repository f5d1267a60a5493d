"""The fused backward kernel for Hopper for head dims over 128: dK and dV of 64 keys fill two warpgroups' registers.

As `backward_narrow.py`, but the warpgroups split the queries of a step for S and dP, 32 each, and the columns for dV,
dK and dQ. So both need all of P and dS, which go through shared memory.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jflash.backends.mosaic_gpu.primitives import CHUNK, Pieces, end_stores, opaque, smem_tiles, store_pieces
from jflash.backends.mosaic_gpu.sm90.backward_common import WARPGROUPS, BackwardKernel, Block
from jflash.backends.mosaic_gpu.tiles import HopperTiles
from jflash.backends.protocol import Operands
from jflash.problem import Problem


class WideBackward(BackwardKernel):
    """Warpgroups split the columns."""

    kernel_name = "jflash_backward_wide_sm90"
    sum_parts = WARPGROUPS
    split = "T"

    def __init__(self, problem: Problem, tiles: HopperTiles, operands: Operands, *, with_dq: bool):
        super().__init__(problem, tiles, operands, with_dq=with_dq)
        self.qk, self.vo = (Pieces.of(size, problem.T, problem.S, even=True) for size in (problem.H, problem.Hv))
        self.s_shape = (self.block_k, self.block_q // WARPGROUPS)

    def _scratch(self) -> dict[str, Any]:
        barrier, dtype = plgpu.Barrier, self.problem.dtype
        shared = barrier(num_arrivals=WARPGROUPS)
        scratch = {
            "p": smem_tiles((1, self.block_q, self.block_k), dtype),
            "ds": smem_tiles((1, self.block_q, self.block_k), dtype),
            "p_and_ds_full": shared,
            "p_and_ds_free": shared,
            "results_full": shared,
        }
        if self.with_dq:
            scratch["dq"] = smem_tiles((WARPGROUPS, self.block_q, CHUNK), np.dtype(np.float32))
        return scratch

    def _compute(self, block: Block, warpgroup: Any) -> None:
        s = block.s
        (k_tma, k), (v_tma, v) = s.k, s.v
        dk_halves, dv_halves = self.qk.halves(k, warpgroup), self.vo.halves(v, warpgroup)

        def loop(*refs):
            dk_refs, dv_refs = refs[: len(dk_halves)], refs[len(dk_halves) :]
            block.steps.loop(functools.partial(self._step, block, warpgroup, dk_refs, dv_refs))
            return [ref[...] for ref in dk_refs], [ref[...] for ref in dv_refs]

        widths = [half.shape[-1] for half in (*dk_halves, *dv_halves)]
        dk, dv = pl.run_scoped(loop, *(plgpu.ACC((self.block_k, width), jnp.float32) for width in widths))

        plgpu.barrier_wait(s.p_and_ds_free)  # Both warpgroups have read K and V for the last time.
        for half, x in zip(dv_halves, dv):
            half[...] = x.astype(block.dv.dtype)
        for half, x in zip(dk_halves, dk):
            half[...] = (x * self.problem.scale).astype(block.dk.dtype)
        plgpu.commit_smem()
        # Half of the columns of a tile are not contiguous, as TMA needs them: each warpgroup stores half of the rows.
        plgpu.barrier_arrive(s.results_full)
        plgpu.barrier_wait(s.results_full)
        rows = self.block_k // WARPGROUPS
        own_rows = pl.ds(warpgroup * rows, rows)
        keys = {"b": block.b, "row": block.k_at + warpgroup * rows, "rows": rows, "head": block.kv_head}
        store_pieces(self.vo.refs(v_tma, own_rows), block.dv, **keys)
        store_pieces(self.qk.refs(k_tma, own_rows), block.dk, **keys)
        end_stores()

    def _step(self, block: Block, warpgroup, dk_refs, dv_refs, g, t) -> None:
        s, steps, dtype = block.s, block.steps, self.problem.dtype
        (_, k), (_, v), (_, q), (_, do) = s.k, s.v, s.q, s.do
        # Without it ptxas 13.0 spills 104 to 628 bytes at H=256.
        own, zero = opaque(warpgroup, 0)
        slot, do_slot = (each + zero for each in self._slots(steps.index(g, t)))
        at = self._place(block, g, t)
        q_from = own * self.s_shape[1]
        own_queries = pl.ds(q_from, self.s_shape[1])
        plgpu.barrier_wait(s.q_full.at[slot])

        def s_and_dp(s_ref, dp_ref):
            # Both accumulators before both matmuls, as in the narrow kernel.
            place = {"q_from": q_from, "k_at": block.k_at}
            s_ref[...] = self._s_start(block, own, slot, at, **place, shape=self.s_shape)
            dp_ref[...] = self._dp_start(block, slot, q_from=q_from, shape=self.s_shape)
            for k_piece, q_piece in zip(self.qk.refs(k, zero=zero), self.qk.refs(q.at[slot], own_queries)):
                plgpu.wgmma(s_ref, k_piece, q_piece.T)
            plgpu.barrier_wait(s.do_full.at[do_slot])
            for v_piece, do_piece in zip(self.vo.refs(v, zero=zero), self.vo.refs(do.at[do_slot], own_queries)):
                plgpu.wgmma(dp_ref, v_piece, do_piece.T)
            s_tile = plgpu.wgmma_accumulator_load(s_ref, wait_n=self.vo.count)
            if self.terms.is_plain:
                p = jnp.exp2(s_tile * self.scale_log2)
                return p.astype(dtype), (p * plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)).astype(dtype)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            keys = {"q_from": q_from, "k_at": block.k_at, "sums_from": 0, "sum_part": own}
            p, ds = self._p_and_ds(block, own, slot, at, s_tile, dp, **keys)
            return p.astype(dtype), ds.astype(dtype)

        accumulator = plgpu.ACC(self.s_shape, jnp.float32)
        p16, ds16 = pl.run_scoped(s_and_dp, accumulator, accumulator)
        pl.when(steps.index(g, t) > 0)(lambda: plgpu.barrier_wait(s.p_and_ds_free))
        for ref, x in ((s.p, p16), (s.ds, ds16)):
            ref.at[zero, own_queries].T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s.p_and_ds_full)
        plgpu.barrier_wait(s.p_and_ds_full)

        def matmuls(*dq_refs):
            for dv_ref, half in zip(dv_refs, self.vo.halves(do.at[do_slot], own)):
                plgpu.wgmma(dv_ref, s.p.at[zero].T, half)
            for dq_ref, half in zip(dq_refs, self.qk.halves(k, own, zero=zero)):
                plgpu.wgmma(dq_ref, s.ds.at[zero], half)
            for dk_ref, half in zip(dk_refs, self.qk.halves(q.at[slot], own)):
                plgpu.wgmma(dk_ref, s.ds.at[zero].T, half)
            plgpu.wgmma_wait(len(dq_refs) + len(dk_refs))
            plgpu.barrier_arrive(s.do_free.at[do_slot])
            return [plgpu.wgmma_accumulator_load(dq_ref, wait_n=len(dk_refs)) for dq_ref in dq_refs]

        widths = [half.shape[-1] for half in self.qk.halves(k, warpgroup)] * self.with_dq
        dq = pl.run_scoped(matmuls, *(plgpu.ACC((self.block_q, width), jnp.float32) for width in widths))
        # While dK is computed. A chunk at a time, so that shared memory has room for a second tile of Q at H=256.
        chunks = [lax.slice(x, (0, at), (self.block_q, at + CHUNK)) for x in dq for at in range(0, x.shape[1], CHUNK)]
        for index, chunk in enumerate(chunks):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            s.dq[warpgroup] = chunk
            plgpu.commit_smem()
            columns = pl.ds((warpgroup * len(chunks) + index) * CHUNK, CHUNK)
            target = block.dq.at[block.b * self.problem.N + at.head, pl.ds(at.q_at, self.block_q), columns]
            plgpu.copy_smem_to_gmem(s.dq.at[warpgroup], target, reduction_op="add")
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s.q_free.at[slot])
        plgpu.barrier_arrive(s.p_and_ds_free)
