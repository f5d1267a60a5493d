"""The fused backward kernel for Hopper for head dims up to 128: all five matmuls in one pass over the queries.

FlashAttention-2 (arXiv:2307.08691, algorithm 2) in the form of FlashAttention-3: of 128 keys each warpgroup holds dK
and dV of 64 in registers. S and dP are computed transposed, so that P^T and dS^T are operands of dV += P^T dO and
dK += dS^T Q where they stand, in registers. dS^T goes to shared memory as well, and each warpgroup computes a part of
dQ = dS K and adds it to global memory by TMA, in float32.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jflash.backends.mosaic_gpu.primitives import (
    CHUNK,
    WARPGROUP_ROWS,
    Pieces,
    end_stores,
    exchange,
    opaque,
    slot_of,
    smem_tiles,
    store_pieces,
)
from jflash.backends.mosaic_gpu.sm90.backward_common import WARPGROUPS, BackwardKernel, Block
from jflash.backends.mosaic_gpu.tiles import HopperTiles
from jflash.backends.protocol import Operands
from jflash.errors import ArgumentError
from jflash.problem import Problem


class NarrowBackward(BackwardKernel):
    """Warpgroups split the keys."""

    kernel_name = "jflash_backward_sm90"
    sum_parts = 1
    split = "S"

    def __init__(self, problem: Problem, tiles: HopperTiles, operands: Operands, *, with_dq: bool):
        super().__init__(problem, tiles, operands, with_dq=with_dq)
        self.qk, self.vo = (Pieces.of(size, problem.T, problem.S) for size in (problem.H, problem.Hv))
        if self.qk.chunks == 2 and self.block_q != WARPGROUP_ROWS:
            wanted = f"block_q={WARPGROUP_ROWS} with H over {CHUNK}, where each warpgroup computes a chunk of dQ"
            raise ArgumentError("tiles", found=str(self.tiles), wanted=wanted)
        self.s_shape = (WARPGROUP_ROWS, self.block_q)

    def _scratch(self) -> dict[str, Any]:
        barrier, dtype = plgpu.Barrier, self.problem.dtype
        scratch = {"finished": barrier(num_arrivals=WARPGROUPS)}
        if self.with_dq:
            scratch["ds"] = smem_tiles((self.q_stages, self.block_k, self.block_q), dtype)
            scratch["dq"] = smem_tiles((WARPGROUPS, WARPGROUP_ROWS, CHUNK), np.dtype(np.float32))
            scratch["exchanged"] = barrier(num_arrivals=WARPGROUPS, num_barriers=self.q_stages)
        return scratch

    def _compute(self, block: Block, warpgroup: Any) -> None:
        s = block.s
        (k_tma, k), (v_tma, v) = s.k, s.v
        own_rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

        def loop(*refs):
            dk_refs, dv_refs = refs[: self.qk.count], refs[self.qk.count :]
            block.steps.loop(functools.partial(self._step, block, warpgroup, dk_refs, dv_refs))
            if self.tiles.dk_in_flight:
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(s.q_free.at[slot_of(block.steps.count - 1, self.q_stages)])
            return [ref[...] for ref in dk_refs], [ref[...] for ref in dv_refs]

        widths = [pieces.width for pieces in (self.qk, self.vo) for _ in range(pieces.count)]
        dk, dv = pl.run_scoped(loop, *(plgpu.ACC((WARPGROUP_ROWS, width), jnp.float32) for width in widths))

        plgpu.barrier_arrive(s.finished)
        for piece, x in enumerate(dv):  # Nobody else reads these rows of V.
            v[piece, own_rows] = x.astype(block.dv.dtype)
        plgpu.barrier_wait(s.finished)  # The other warpgroup has read K for the last time.
        for piece, x in enumerate(dk):
            k[piece, own_rows] = (x * self.problem.scale).astype(block.dk.dtype)
        plgpu.commit_smem()
        row = block.k_at + warpgroup * WARPGROUP_ROWS
        keys = {"b": block.b, "row": row, "rows": WARPGROUP_ROWS, "head": block.kv_head}
        store_pieces(self.vo.refs(v_tma, own_rows), block.dv, **keys)
        store_pieces(self.qk.refs(k_tma, own_rows), block.dk, **keys)
        end_stores()

    def _step(self, block: Block, warpgroup, dk_refs, dv_refs, g, t) -> None:
        s, steps, dtype = block.s, block.steps, self.problem.dtype
        (_, k), (_, v), (_, q), (_, do) = s.k, s.v, s.q, s.do
        # Without it ptxas 13.0 spills 76 to 204 bytes at H=128 and, with grouped heads, 88 at H=64; with it nothing.
        own, g, t = opaque(warpgroup, g, t)
        i = steps.index(g, t)
        slot, do_slot = self._slots(i)
        at = self._place(block, g, t)
        own_rows = pl.ds(own * WARPGROUP_ROWS, WARPGROUP_ROWS)
        k_at = block.k_at + warpgroup * WARPGROUP_ROWS
        plgpu.barrier_wait(s.q_full.at[slot])

        def s_and_dp(s_ref, dp_ref):
            # Both accumulators before both matmuls: ptxas waits for all of them before it lets other instructions
            # write registers of accumulators. S is written before dP is read: with both in registers while dK is in
            # flight, ptxas serialises the matmuls of the causal kernel at H=64.
            s_ref[...] = self._s_start(block, own, slot, at, q_from=0, k_at=k_at, shape=self.s_shape)
            dp_ref[...] = self._dp_start(block, slot, q_from=0, shape=self.s_shape)
            for k_piece, q_piece in zip(self.qk.refs(k, own_rows), self.qk.refs(q.at[slot])):
                plgpu.wgmma(s_ref, k_piece, q_piece.T)
            plgpu.barrier_wait(s.do_full.at[do_slot])
            for v_piece, do_piece in zip(self.vo.refs(v, own_rows), self.vo.refs(do.at[do_slot])):
                plgpu.wgmma(dp_ref, v_piece, do_piece.T)
            s_tile = plgpu.wgmma_accumulator_load(s_ref, wait_n=self.vo.count)
            if self.tiles.dk_in_flight:
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(s.q_free.at[slot_of(i - 1, self.q_stages)]))
            if self.terms.is_plain:
                p = jnp.exp2(s_tile * self.scale_log2)
                return p.astype(dtype), p * plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            keys = {"q_from": 0, "k_at": k_at, "sums_from": own * WARPGROUP_ROWS, "sum_part": 0}
            p, ds = self._p_and_ds(block, own, slot, at, s_tile, dp, **keys)
            return p.astype(dtype), ds

        accumulator = plgpu.ACC(self.s_shape, jnp.float32)
        p16, ds = pl.run_scoped(s_and_dp, accumulator, accumulator)
        ds16 = ds.astype(dtype)
        if self.with_dq:
            s.ds[slot, own_rows] = ds16
        for dv_ref, do_piece in zip(dv_refs, self.vo.refs(do.at[do_slot])):
            plgpu.wgmma(dv_ref, p16, do_piece)
        if self.with_dq:
            exchange(s.exchanged.at[slot], inline_ptx=self.inline_ptx)
        else:
            plgpu.commit_smem()  # TMA will write where -lse / scale and -delta were read.

        def dq_and_dk(*dq_refs):
            for dq_ref in dq_refs:
                plgpu.wgmma(dq_ref, *self._dq_operands(s.ds.at[slot], k, own))
            for dk_ref, q_piece in zip(dk_refs, self.qk.refs(q.at[slot])):
                plgpu.wgmma(dk_ref, ds16, q_piece)
            plgpu.wgmma_wait(len(dq_refs) + self.qk.count)
            plgpu.barrier_arrive(s.do_free.at[do_slot])
            return [plgpu.wgmma_accumulator_load(dq_ref, wait_n=self.qk.count) for dq_ref in dq_refs]

        dq_accumulators = [plgpu.ACC((WARPGROUP_ROWS, CHUNK), jnp.float32)] * self.with_dq
        for dq in pl.run_scoped(dq_and_dk, *dq_accumulators):  # While dK is computed.
            s.dq[warpgroup] = dq
            plgpu.commit_smem()
            target = block.dq.at[self._dq_target(block.b * self.problem.N + at.head, at.q_at, warpgroup)]
            plgpu.copy_smem_to_gmem(s.dq.at[warpgroup], target, reduction_op="add")
        if not self.tiles.dk_in_flight:
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s.q_free.at[slot])

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
