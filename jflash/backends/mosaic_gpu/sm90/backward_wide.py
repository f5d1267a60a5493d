"""The fused backward kernel for Hopper for head dims over 128: dK and dV of 64 keys fill two warpgroups' registers.

As `backward_narrow.py`, but the warpgroups split the queries of a step for S and dP, 32 each, and the columns for dV,
dK and dQ. So both need all of P and dS, which go through shared memory. They split chunks of 64 columns: one takes two
of three chunks of dK, the other two of those of dQ.

Where registers and shared memory allow it (`dk_in_flight`), a warpgroup computes P and dS of a step while the tensor
cores do dV, dQ and dK of the one before, as the forward kernel does with its softmax and P V.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jflash.backends.mosaic_gpu.primitives import (
    CHUNK,
    Pieces,
    end_stores,
    i32,
    opaque,
    slot_of,
    smem_tiles,
    store_pieces,
)
from jflash.backends.mosaic_gpu.sm90.backward_common import WARPGROUPS, BackwardKernel, Block, Step
from jflash.backends.mosaic_gpu.tiles import HopperTiles, dq_chunks
from jflash.backends.protocol import Operands
from jflash.errors import ArgumentError
from jflash.problem import Problem


class _Share(NamedTuple):
    """Of dK, dV and dQ the first chunk of columns that a warpgroup computes, and how many they are."""

    dk: tuple[Any, int]
    dv: tuple[Any, int]
    dq: tuple[Any, int]


class _Tile(NamedTuple):
    """A step, where its Q and dO lie, the warpgroup and zero, both unknown to the compiler."""

    step: Step
    slot: Any
    do_slot: Any
    own: Any
    zero: Any


class WideBackward(BackwardKernel):
    """Warpgroups split the columns."""

    kernel_name = "jflash_backward_wide_sm90"
    sum_parts = WARPGROUPS
    split = "T"

    def __init__(self, problem: Problem, tiles: HopperTiles, operands: Operands, *, with_dq: bool):
        super().__init__(problem, tiles, operands, with_dq=with_dq)
        self.qk, self.vo = (Pieces.of(size, problem.T, problem.S) for size in (problem.H, problem.Hv))
        if self.tiles.dk_in_flight and (self.q_stages < 3 or self.do_stages < 2):
            # A step waits for the Q of the next one, and for its own dO, before those of the last one are free.
            found = f"dk_in_flight=True with q_stages={self.q_stages}, do_stages={self.do_stages}"
            wanted = "q_stages=3 and do_stages=2 with it, where the warpgroups split the columns"
            raise ArgumentError("tiles", found=found, wanted=wanted)
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
            if self.tiles.dk_in_flight:
                self._steps_in_flight(block, warpgroup, dk_refs, dv_refs)
            else:
                block.steps.loop(functools.partial(self._step, block, warpgroup, dk_refs, dv_refs))
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
        end_stores()

    def _step(self, block: Block, warpgroup, dk_refs, dv_refs, g, t) -> None:
        s = block.s
        tile = self._tile(block, warpgroup, g, t)
        plgpu.barrier_wait(s.q_full.at[tile.slot])

        def s_and_dp(s_ref, dp_ref):
            self._issue_s_and_dp(block, tile, s_ref, dp_ref)
            return self._softmax(block, tile, s_ref, dp_ref, after=0)

        accumulator = plgpu.ACC(self.s_shape, jnp.float32)
        p_and_ds = pl.run_scoped(s_and_dp, accumulator, accumulator)
        pl.when(block.steps.index(g, t) > 0)(lambda: plgpu.barrier_wait(s.p_and_ds_free))
        self._exchange(block, tile, *p_and_ds)
        self._results(block, warpgroup, tile, dk_refs, dv_refs)

    def _steps_in_flight(self, block: Block, warpgroup, dk_refs, dv_refs) -> None:
        """All steps; P and dS of a step are computed while dV, dQ and dK of the one before are."""
        s, steps = block.s, block.steps
        accumulators = [plgpu.ACC(self.s_shape, jnp.float32)] * 2

        def tile_of(i):
            return self._tile(block, warpgroup, *steps.place(i))

        def wait_for_q(i):
            pl.when(i < steps.count)(lambda: plgpu.barrier_wait(s.q_full.at[slot_of(i, self.q_stages)]))

        def softmax(i, tile, s_ref, dp_ref, *, after):
            p_and_ds = self._softmax(block, tile, s_ref, dp_ref, after=after)
            # As in the forward kernel: the optimization barrier keeps LLVM, and the wait, which ends the basic block,
            # keeps ptxas from waiting for dV and dQ before the exponentials.
            p_and_ds = lax.optimization_barrier(p_and_ds)
            wait_for_q(i + 1)
            return p_and_ds

        def first(s_ref, dp_ref):
            tile = tile_of(i32(0))
            wait_for_q(i32(0))
            self._issue_s_and_dp(block, tile, s_ref, dp_ref)
            return softmax(i32(0), tile, s_ref, dp_ref, after=0)

        def step(i, p_and_ds):
            last, tile = tile_of(i - 1), tile_of(i)

            def s_and_dp(s_ref, dp_ref):
                self._issue_s_and_dp(block, tile, s_ref, dp_ref)
                pl.when(i > 1)(lambda: plgpu.barrier_wait(s.p_and_ds_free))
                self._exchange(block, last, *p_and_ds)
                return functools.partial(softmax, i, tile, s_ref, dp_ref)

            return self._results(block, warpgroup, last, dk_refs, dv_refs, ahead=(accumulators, s_and_dp))

        p_and_ds = lax.fori_loop(1, steps.count, step, pl.run_scoped(first, *accumulators))
        pl.when(steps.count > 1)(lambda: plgpu.barrier_wait(s.p_and_ds_free))
        last = tile_of(steps.count - 1)
        self._exchange(block, last, *p_and_ds)
        self._results(block, warpgroup, last, dk_refs, dv_refs)

    def _tile(self, block: Block, warpgroup, g, t) -> _Tile:
        # Without it ptxas 13.0 spills 104 to 628 bytes at H=256.
        own, zero = opaque(warpgroup, 0)
        slot, do_slot = (each + zero for each in self._slots(block.steps.index(g, t)))
        return _Tile(self._place(block, g, t), slot, do_slot, own, zero)

    def _own_queries(self, tile: _Tile) -> Any:
        return pl.ds(tile.own * self.s_shape[1], self.s_shape[1])

    def _issue_s_and_dp(self, block: Block, tile: _Tile, s_ref, dp_ref) -> None:
        s, own_queries = block.s, self._own_queries(tile)
        (_, k), (_, v), (_, q), (_, do) = s.k, s.v, s.q, s.do
        # Both accumulators before both matmuls, as in the narrow kernel.
        place = {"q_from": own_queries.start, "k_at": block.k_at}
        s_ref[...] = self._s_start(block, tile.own, tile.slot, tile.step, **place, shape=self.s_shape)
        dp_ref[...] = self._dp_start(block, tile.slot, q_from=own_queries.start, shape=self.s_shape)
        for k_piece, q_piece in zip(self.qk.refs(k, zero=tile.zero), self.qk.refs(q.at[tile.slot], own_queries)):
            plgpu.wgmma(s_ref, k_piece, q_piece.T)
        plgpu.barrier_wait(s.do_full.at[tile.do_slot])
        for v_piece, do_piece in zip(self.vo.refs(v, zero=tile.zero), self.vo.refs(do.at[tile.do_slot], own_queries)):
            plgpu.wgmma(dp_ref, v_piece, do_piece.T)

    def _softmax(self, block: Block, tile: _Tile, s_ref, dp_ref, *, after: int) -> tuple[Any, Any]:
        """P and dS in 16 bits, with so many matmuls issued after those of S and dP."""
        dtype = self.problem.dtype
        s_tile = plgpu.wgmma_accumulator_load(s_ref, wait_n=self.vo.count + after)
        if self.terms.is_plain:
            p = jnp.exp2(s_tile * self.scale_log2)
            return p.astype(dtype), (p * plgpu.wgmma_accumulator_load(dp_ref, wait_n=after)).astype(dtype)
        dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=after)
        q_from = self._own_queries(tile).start
        keys = {"q_from": q_from, "k_at": block.k_at, "sums_from": 0, "sum_part": tile.own}
        p, ds = self._p_and_ds(block, tile.own, tile.slot, tile.step, s_tile, dp, **keys)
        return p.astype(dtype), ds.astype(dtype)

    def _exchange(self, block: Block, tile: _Tile, p16, ds16) -> None:
        """Both warpgroups have all of P and dS in shared memory."""
        s = block.s
        for ref, x in ((s.p, p16), (s.ds, ds16)):
            own = ref.at[tile.zero, self._own_queries(tile)].T
            own[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s.p_and_ds_full)
        plgpu.barrier_wait(s.p_and_ds_full)

    def _results(self, block: Block, warpgroup, tile: _Tile, dk_refs, dv_refs, *, ahead: Any = None) -> Any:
        """Adds the part of a step to dV, dQ and dK.

        `ahead` is accumulators, and what issues S and dP of the next step into them and returns the function that waits
        for these: its P and dS are the result.
        """
        s = block.s
        (_, k), (_, q), (_, do) = s.k, s.q, s.do
        accumulators, issue_ahead = ahead or ([], None)

        def matmuls(*refs):
            ahead_refs, dq_refs = refs[: len(accumulators)], refs[len(accumulators) :]
            softmax = issue_ahead(*ahead_refs) if ahead else None
            share = self._share(tile.own if self.is_even else warpgroup)
            for dv_ref, part in zip(dv_refs, self.vo.part(do.at[tile.do_slot], *share.dv)):
                plgpu.wgmma(dv_ref, s.p.at[tile.zero].T, part)
            for dq_ref, part in zip(dq_refs, self.qk.part(k, *share.dq, zero=tile.zero)):
                plgpu.wgmma(dq_ref, s.ds.at[tile.zero], part)
            for dk_ref, part in zip(dk_refs, self.qk.part(q.at[tile.slot], *share.dk)):
                plgpu.wgmma(dk_ref, s.ds.at[tile.zero].T, part)
            p_and_ds = softmax(after=len(dv_refs) + len(dq_refs) + len(dk_refs)) if ahead else None
            plgpu.wgmma_wait(len(dq_refs) + len(dk_refs))
            plgpu.barrier_arrive(s.do_free.at[tile.do_slot])
            return p_and_ds, [plgpu.wgmma_accumulator_load(dq_ref, wait_n=len(dk_refs)) for dq_ref in dq_refs]

        first, count = self._share(warpgroup).dq
        widths = [part.shape[-1] for part in self.qk.part(k, first, count)] * self.with_dq
        dq_accumulators = (plgpu.ACC((self.block_q, width), jnp.float32) for width in widths)
        p_and_ds, dq = pl.run_scoped(matmuls, *accumulators, *dq_accumulators)
        # While dK is computed. A chunk at a time, so that shared memory has room for a second tile of Q at H=256.
        chunks = [lax.slice(x, (0, at), (self.block_q, at + CHUNK)) for x in dq for at in range(0, x.shape[1], CHUNK)]
        for index, chunk in enumerate(chunks):
            place = warpgroup + index % self.dq_places
            if index % self.dq_places == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            s.dq[place] = chunk
            plgpu.commit_smem()
            columns = pl.ds((first + index) * CHUNK, CHUNK)
            head, q_at = block.b * self.problem.N + tile.step.head, tile.step.q_at
            target = block.dq.at[head, pl.ds(q_at, self.block_q), columns]
            plgpu.copy_smem_to_gmem(s.dq.at[place], target, reduction_op="add")
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s.q_free.at[tile.slot])
        plgpu.barrier_arrive(s.p_and_ds_free)
        return p_and_ds
