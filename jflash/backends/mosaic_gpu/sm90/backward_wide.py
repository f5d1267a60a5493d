"""The fused backward kernel for Hopper for head dims over 128: dK and dV of 64 keys fill two warpgroups' registers.

As `backward_narrow.py`, but the warpgroups split the queries of a step for S and dP, 32 each, and the columns for dV,
dK and dQ. So both need all of P and dS, which go through shared memory. They split chunks of 64 columns: one takes two
of three chunks of dK, the other two of those of dQ.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jflash.backends.mosaic_gpu.primitives import CHUNK, Pieces, opaque, slot_of, smem_tiles, store_pieces
from jflash.backends.mosaic_gpu.sm90.backward_common import WARPGROUPS, BackwardKernel, Block
from jflash.backends.mosaic_gpu.tiles import HopperTiles, dq_chunks
from jflash.backends.protocol import Operands
from jflash.problem import Problem


class _Share(NamedTuple):
    """Of dK, dV and dQ the first chunk of columns that a warpgroup computes, and how many they are."""

    dk: tuple[Any, int]
    dv: tuple[Any, int]
    dq: tuple[Any, int]


class WideBackward(BackwardKernel):
    """Warpgroups split the columns."""

    kernel_name = "jflash_backward_wide_sm90"
    sum_parts = WARPGROUPS
    split = "T"

    def __init__(self, problem: Problem, tiles: HopperTiles, operands: Operands, *, with_dq: bool):
        super().__init__(problem, tiles, operands, with_dq=with_dq)
        self.qk, self.vo = (Pieces.of(size, problem.T, problem.S) for size in (problem.H, problem.Hv))
        self.s_shape = (self.block_k, self.block_q // WARPGROUPS)
        self.is_even = self.qk.chunks % 2 == self.vo.chunks % 2 == 0
        # The second warpgroup, which computes two of three chunks of dQ, has places for all but one.
        self.dq_places = dq_chunks(problem.H) - 1

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
            scratch["dq"] = smem_tiles((dq_chunks(self.problem.H), self.block_q, CHUNK), np.dtype(np.float32))
        return scratch

    def _share(self, warpgroup: Any) -> _Share:
        """What a warpgroup computes; its number must be known when tracing, but where all halves are even."""

        def part(chunks: int, *, larger: int) -> tuple[Any, int]:
            if chunks % 2 == 0:
                return warpgroup * (chunks // 2), chunks // 2
            of_first = chunks // 2 + (larger == 0)
            return (0, of_first) if warpgroup == 0 else (of_first, chunks - of_first)

        # So at H=192, Hv=128 both have four chunks of all three, and at most three of those that stay in registers.
        return _Share(part(self.qk.chunks, larger=0), part(self.vo.chunks, larger=1), part(self.qk.chunks, larger=1))

    def _compute(self, block: Block, warpgroup: Any) -> None:
        if self.is_even:
            self._compute_share(block, warpgroup)
            return
        # Accumulators of other sizes are another program.
        for each in range(WARPGROUPS):
            pl.when(warpgroup == each)(functools.partial(self._compute_share, block, each))

    def _compute_share(self, block: Block, warpgroup: Any) -> None:
        s = block.s
        (k_tma, k), (v_tma, v) = s.k, s.v
        share = self._share(warpgroup)
        own_k, own_v = self.qk.part(k, *share.dk), self.vo.part(v, *share.dv)

        def loop(*refs):
            dk_refs, dv_refs = refs[: len(own_k)], refs[len(own_k) :]
            block.steps.loop(functools.partial(self._step, block, warpgroup, dk_refs, dv_refs))
            if self.tiles.dk_in_flight:
                plgpu.wgmma_wait(0)
                self._release(s, slot_of(block.steps.count - 1, self.q_stages))
            return [ref[...] for ref in dk_refs], [ref[...] for ref in dv_refs]

        widths = [part.shape[-1] for part in (*own_k, *own_v)]
        dk, dv = pl.run_scoped(loop, *(plgpu.ACC((self.block_k, width), jnp.float32) for width in widths))

        plgpu.barrier_wait(s.p_and_ds_free)  # Both warpgroups have read K and V for the last time.
        for part, x in zip(own_v, dv):
            part[...] = x.astype(block.dv.dtype)
        for part, x in zip(own_k, dk):
            part[...] = (x * self.problem.scale).astype(block.dk.dtype)
        plgpu.commit_smem()
        # Some columns of a tile are not contiguous, as TMA needs them: each warpgroup stores half of the rows.
        plgpu.barrier_arrive(s.results_full)
        plgpu.barrier_wait(s.results_full)
        rows = self.block_k // WARPGROUPS
        own_rows = pl.ds(warpgroup * rows, rows)
        keys = {"b": block.b, "row": block.k_at + warpgroup * rows, "rows": rows, "head": block.kv_head}
        store_pieces(self.vo.refs(v_tma, own_rows), block.dv, **keys)
        store_pieces(self.qk.refs(k_tma, own_rows), block.dk, **keys)
        plgpu.wait_smem_to_gmem(0)

    def _step(self, block: Block, warpgroup, dk_refs, dv_refs, g, t) -> None:
        s, steps, dtype = block.s, block.steps, self.problem.dtype
        (_, k), (_, v), (_, q), (_, do) = s.k, s.v, s.q, s.do
        # Without it ptxas 13.0 spills 104 to 628 bytes at H=256.
        own, zero = opaque(warpgroup, 0)
        i = steps.index(g, t)
        slot, do_slot = (each + zero for each in self._slots(i))
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
            if self.tiles.dk_in_flight:
                pl.when(i > 0)(lambda: self._release(s, slot_of(i - 1, self.q_stages)))
            if self.terms.is_plain:
                p = jnp.exp2(s_tile * self.scale_log2)
                return p.astype(dtype), (p * plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)).astype(dtype)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            keys = {"q_from": q_from, "k_at": block.k_at, "sums_from": 0, "sum_part": own}
            p, ds = self._p_and_ds(block, own, slot, at, s_tile, dp, **keys)
            return p.astype(dtype), ds.astype(dtype)

        accumulator = plgpu.ACC(self.s_shape, jnp.float32)
        p16, ds16 = pl.run_scoped(s_and_dp, accumulator, accumulator)
        pl.when(i > 0)(lambda: plgpu.barrier_wait(s.p_and_ds_free))
        for ref, x in ((s.p, p16), (s.ds, ds16)):
            ref.at[zero, own_queries].T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s.p_and_ds_full)
        plgpu.barrier_wait(s.p_and_ds_full)

        def matmuls(*dq_refs):
            share = self._share(own if self.is_even else warpgroup)
            for dv_ref, part in zip(dv_refs, self.vo.part(do.at[do_slot], *share.dv)):
                plgpu.wgmma(dv_ref, s.p.at[zero].T, part)
            for dq_ref, part in zip(dq_refs, self.qk.part(k, *share.dq, zero=zero)):
                plgpu.wgmma(dq_ref, s.ds.at[zero], part)
            for dk_ref, part in zip(dk_refs, self.qk.part(q.at[slot], *share.dk)):
                plgpu.wgmma(dk_ref, s.ds.at[zero].T, part)
            plgpu.wgmma_wait(len(dq_refs) + len(dk_refs))
            plgpu.barrier_arrive(s.do_free.at[do_slot])
            return [plgpu.wgmma_accumulator_load(dq_ref, wait_n=len(dk_refs)) for dq_ref in dq_refs]

        first, count = self._share(warpgroup).dq
        widths = [part.shape[-1] for part in self.qk.part(k, first, count)] * self.with_dq
        dq = pl.run_scoped(matmuls, *(plgpu.ACC((self.block_q, width), jnp.float32) for width in widths))
        # While dK is computed. A chunk at a time, so that shared memory has room for a second tile of Q at H=256.
        chunks = [lax.slice(x, (0, at), (self.block_q, at + CHUNK)) for x in dq for at in range(0, x.shape[1], CHUNK)]
        for index, chunk in enumerate(chunks):
            place = warpgroup + index % self.dq_places
            if index % self.dq_places == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            s.dq[place] = chunk
            plgpu.commit_smem()
            columns = pl.ds((first + index) * CHUNK, CHUNK)
            target = block.dq.at[block.b * self.problem.N + at.head, pl.ds(at.q_at, self.block_q), columns]
            plgpu.copy_smem_to_gmem(s.dq.at[place], target, reduction_op="add")
        if not self.tiles.dk_in_flight:
            plgpu.wgmma_wait(0)
            self._release(s, slot)

    def _release(self, s, slot: Any) -> None:
        """Q of a step, in its slot, and P and dS have been read."""
        plgpu.barrier_arrive(s.q_free.at[slot])
        plgpu.barrier_arrive(s.p_and_ds_free)
