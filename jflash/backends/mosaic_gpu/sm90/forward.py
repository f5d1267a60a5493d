"""The forward kernel for Hopper: FlashAttention-3 (arXiv:2407.08608) with the rescaling rule of FlashAttention-4.

A block of threads has two or three warpgroups that compute, each for 64 queries of one head, and one that loads K and V
by TMA. Within a warpgroup the softmax of tile i runs while the tensor cores do P V of tile i - 1 (algorithm 2 there);
the warpgroups take turns at issuing their matmuls (section 3.1). The accumulators are rescaled only where some row
maximum of the warp has grown by more than 2^8; numerator and denominator share the stale maximum, so the result is
exact. The mask is evaluated on partial tiles alone.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jflash.backends.mosaic_gpu.primitives import (
    BY_COLUMN,
    BY_ROW,
    COMPUTE_REGISTERS,
    LOAD_REGISTERS,
    LOG2_E,
    WARPGROUP_ROWS,
    NoTurns,
    Pieces,
    Turns,
    along_rows,
    any_row,
    hopper_kernel,
    i32,
    load_pieces,
    opaque,
    slot_of,
    smem_pieces,
    store_pieces,
)
from jflash.backends.mosaic_gpu.tiles import ForwardTiles, HopperTiles
from jflash.backends.mosaic_gpu.visits import TileVisits, head_and_row
from jflash.backends.protocol import Operands
from jflash.masks.live import zero_dead_keys
from jflash.masks.tile_map import TileMap
from jflash.numerics.online_softmax import Attended
from jflash.numerics.varying import like, result_struct
from jflash.problem import Problem

# How far a row maximum may grow, in powers of two, before the accumulators are rescaled: p stays below 2^8, which 16
# bits hold at full precision.
_RESCALE_LOG2 = 8.0
# Columns of a tile that are masked at a time.
_MASK_COLUMNS = 32


def forward(problem: Problem, tiles: HopperTiles, operands: Operands) -> Attended:
    """Out and lse of one problem; see the top of this module."""
    q, k, v, _, mask = operands
    # K of dead keys only makes logits that the mask replaces; V is multiplied by weights of 0, and 0 times NaN is NaN.
    (v,) = zero_dead_keys(v, mask=mask, T=problem.T, S=problem.S)
    # Sizes and indices are 32 bits in the kernel; with x64 on, plain numbers would become 64.
    with jax.enable_x64(False):
        out, lse = _Forward(problem, tiles, operands)(q, k, v)
    # Inside `jax.shard_map` Pallas loses over which axes the results of Mosaic kernels vary (JAX 0.11.2).
    return like(Attended(out, lse[..., : problem.T]), operands)


class _Forward:
    """One kernel: what is known when tracing, the body of each warpgroup, the call."""

    def __init__(self, problem: Problem, tiles: HopperTiles, operands: Operands):
        self.problem, self.operands = problem, operands
        self.tiles: ForwardTiles = tiles.forward
        self.inline_ptx = tiles.inline_ptx
        self.block_q, self.block_k = self.tiles.block_q, self.tiles.block_k
        lengths = problem.T, problem.S
        self.qk, self.vo = Pieces.of(problem.H, *lengths), Pieces.of(problem.Hv, *lengths)
        self.logit_scale_log2 = problem.scale * LOG2_E
        tile_map = TileMap(mask=operands.mask, T=problem.T, S=problem.S, block_q=self.block_q, block_k=self.block_k)
        self.visits = TileVisits(tile_map, parts=self.tiles.warpgroups)
        self.s_shape = (WARPGROUP_ROWS, self.block_k)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        problem, tiles = self.problem, self.tiles
        rows = self.visits.rows
        dtype, stages, warpgroups = problem.dtype, tiles.stages, tiles.warpgroups
        column_ids = jnp.arange(_MASK_COLUMNS, dtype=jnp.int32)
        barrier = plgpu.Barrier
        free = barrier(num_arrivals=warpgroups, num_barriers=stages)

        def kernel(q_g, k_g, v_g, ids_g, *refs):
            mask_refs, refs = self.visits.take(refs)
            self._body((q_g, k_g, v_g, ids_g), mask_refs, *refs)

        out, lse = hopper_kernel(
            kernel,
            tiles=tiles,
            out_type=[
                result_struct((problem.B, problem.T, problem.N, problem.Hv), dtype, self.operands),
                # Whole tiles: a store of one axis is clipped at the end of the array alone, not of a row.
                result_struct((problem.B, problem.N, rows * self.block_q), jnp.float32, self.operands),
            ],
            blocks=problem.B * problem.N * rows,
            warpgroups=warpgroups,
            reduces=True,
            scratch_types=[
                # Out goes where Q was.
                plgpu.RefUnion(
                    *smem_pieces((warpgroups,), WARPGROUP_ROWS, self.qk, dtype),
                    *smem_pieces((warpgroups,), WARPGROUP_ROWS, self.vo, dtype),
                ),
                plgpu.RefUnion(*smem_pieces((stages,), self.block_k, self.qk, dtype)),
                plgpu.RefUnion(*smem_pieces((stages,), self.block_k, self.vo, dtype)),
                plgpu.SMEM((warpgroups, WARPGROUP_ROWS), jnp.float32),
                plgpu.SMEM((_MASK_COLUMNS,), jnp.int32),
                barrier(num_arrivals=self.qk.count, num_barriers=warpgroups),
                barrier(num_arrivals=self.qk.count, num_barriers=stages),
                barrier(num_arrivals=self.vo.count, num_barriers=stages),
                free,
                free,
                Turns.barriers(warpgroups),
                barrier(),
                barrier(num_arrivals=warpgroups),
            ],
            kernel_name="jflash_forward_sm90",
        )(q, k, v, column_ids, *self.visits.operands())
        return out, lse

    def _body(
        self, inputs, mask_refs, out_g, lse_g, q_s, k_s, v_s, lse_s, ids_s,
        q_full, k_full, v_full, k_free, v_free, turns, ids_full, q_read,
    ):  # fmt: skip
        q_g, k_g, v_g, ids_g = inputs
        (q_tma, q_mma, out_tma, out_mma), (k_tma, k_mma), (v_tma, v_mma) = q_s, k_s, v_s
        warpgroups = self.tiles.warpgroups
        warpgroup = lax.axis_index("warpgroup")
        head, row = head_and_row(lax.axis_index("block"), rows=self.visits.rows, head_group=self.tiles.head_group)
        b, n = lax.div(head, i32(self.problem.N)), lax.rem(head, i32(self.problem.N))
        part = lax.min(warpgroup, i32(warpgroups - 1))
        visits = self.visits.of_row(mask_refs, b=b, row=row, part=part)

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS[warpgroups], action="increase")
            q_at = row * self.block_q + warpgroup * WARPGROUP_ROWS
            if self.visits.is_masked:
                plgpu.barrier_wait(ids_full)
            plgpu.barrier_wait(q_full.at[warpgroup])
            issue = NoTurns()
            if self.tiles.ping_pong and warpgroups > 1:
                issue = Turns(turns, warpgroup=warpgroup, warpgroups=warpgroups, inline_ptx=self.inline_ptx)

                @pl.when(warpgroup == warpgroups - 1)
                def _():
                    issue.pass_on()  # The first warpgroup begins.

            mask = functools.partial(self._mask, visits, mask_refs, ids_s, b, q_at)
            accumulators = [plgpu.ACC((WARPGROUP_ROWS, self.vo.width), jnp.float32)] * self.vo.count
            loop = functools.partial(
                self._attend, visits, mask, issue, warpgroup, q_mma, k_mma, v_mma, k_full, v_full, k_free, v_free
            )
            o, m, l = pl.run_scoped(loop, *accumulators)

            if self.qk != self.vo:
                # Rows of out are not as long as those of Q, so that they lie over the Q of other warpgroups too.
                plgpu.barrier_arrive(q_read)
                plgpu.barrier_wait(q_read)
            is_dead = l == 0
            inverse = jnp.where(is_dead, 0, 1 / l)
            for piece, part_of_o in enumerate(o):
                out_mma[warpgroup, piece] = (part_of_o * along_rows(inverse, part_of_o.shape)).astype(out_g.dtype)
            lse_s[warpgroup] = jnp.where(is_dead, -jnp.inf, _shift(m) * self.problem.scale + jnp.log(l))
            plgpu.commit_smem()

            # Also past the last query: out is clipped there, and lse has room.
            place = {"b": b, "row": q_at, "rows": WARPGROUP_ROWS, "head": n}
            store_pieces(self.vo.refs(out_tma.at[warpgroup]), out_g, **place)
            plgpu.copy_smem_to_gmem(lse_s.at[warpgroup], lse_g.at[b, n, pl.ds(q_at, WARPGROUP_ROWS)])

            @pl.when(warpgroup == 0)
            def _():
                issue.wait()  # No arrival is left behind.

            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS[warpgroups], action="decrease")
            for w in range(warpgroups):
                place = {"b": b, "row": row * self.block_q + w * WARPGROUP_ROWS, "rows": WARPGROUP_ROWS, "head": n}
                load_pieces(q_g, self.qk.refs(q_tma.at[w]), q_full.at[w], **place)
            if self.visits.is_masked:
                plgpu.copy_gmem_to_smem(ids_g, ids_s, ids_full)
            key = k_g, k_tma, self.qk, k_full, k_free
            value = v_g, v_tma, self.vo, v_full, v_free
            self._load(visits, b, n, key, value)

    # The warpgroup that loads -----------------------------------------------------------------------------------------

    def _load(self, visits, b, n, key, value) -> None:
        stages = self.tiles.stages
        head = lax.div(n, i32(self.problem.group))

        def load(i, source, smem, pieces, full, free):
            slot = self._slot(i)

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(free.at[slot])

            row = visits.column(i) * self.block_k
            place = {"b": b, "row": row, "rows": self.block_k, "head": head}
            load_pieces(source, pieces.refs(smem.at[slot]), full.at[slot], **place)

        load(i32(0), *key)

        @pl.loop(0, visits.count)
        def _(i):
            # K one tile ahead of V: its slot is free half a step earlier.
            @pl.when(i + 1 < visits.count)
            def _():
                load(i + 1, *key)

            load(i, *value)

        # Every release is seen, so that no barrier is left in the middle of a phase.
        last = lax.min(i32(stages), visits.count)

        @pl.loop(0, last)
        def _(i):
            for *_, free in (key, value):
                plgpu.barrier_wait(free.at[self._slot(visits.count - last + i)])

    def _slot(self, i: Any) -> Any:
        return slot_of(i, self.tiles.stages)

    # The warpgroups that compute --------------------------------------------------------------------------------------

    def _attend(self, visits, mask, issue, warpgroup, q, k, v, k_full, v_full, k_free, v_free, *o_refs):
        """The pieces of the sum of p · v, the row maxima m (of q · k, unscaled) and the row sums l of p."""
        dtype = self.problem.dtype
        s_accumulator = plgpu.ACC(self.s_shape, jnp.float32)

        def issue_s(s_ref, slot):
            # Without `opaque` ptxas 13.0 spills 12 bytes at H=256 with odd lengths; one piece needs it nowhere.
            own = opaque(warpgroup)[0] if self.qk.count > 1 else warpgroup
            for q_piece, k_piece in zip(self.qk.refs(q.at[own]), self.qk.refs(k.at[slot])):
                plgpu.wgmma(s_ref, q_piece, k_piece.T)

        def issue_o(p, slot):
            for o_ref, v_piece in zip(o_refs, self.vo.refs(v.at[slot])):
                plgpu.wgmma(o_ref, p, v_piece)

        def wait_for_k(i):
            @pl.when(i < visits.count)
            def _():
                plgpu.barrier_wait(k_full.at[self._slot(i)])

        def first_s(s_ref):
            issue.wait()
            issue_s(s_ref, i32(0))
            issue.pass_on()
            return s_ref[...]

        def step(i, carry):
            p16, m, l = carry
            slot, previous = self._slot(i), self._slot(i - 1)
            plgpu.barrier_wait(v_full.at[previous])

            def matmuls(s_ref):
                issue.wait()
                issue_s(s_ref, slot)
                issue_o(p16, previous)
                issue.pass_on()
                return plgpu.wgmma_accumulator_load(s_ref, wait_n=self.vo.count)

            s = pl.run_scoped(matmuls, s_accumulator)
            plgpu.barrier_arrive(k_free.at[slot])
            p, m, l, factor, rescale = self._softmax(mask(s, i), m, l)
            if self.tiles.pin_wait:
                # p stays float32: P V still reads the registers of p16. The optimization barrier holds LLVM; the wait
                # on an mbarrier ends the basic block, and so holds ptxas.
                p, m, l, factor = lax.optimization_barrier((p, m, l, factor))
                wait_for_k(i + 1)
            o = [plgpu.wgmma_accumulator_load(o_ref, wait_n=0) for o_ref in o_refs]
            plgpu.barrier_arrive(v_free.at[previous])
            if not self.tiles.pin_wait:
                wait_for_k(i + 1)
            o = lax.cond(rescale, lambda o: [x * along_rows(factor, x.shape) for x in o], lambda o: o, o)
            for o_ref, x in zip(o_refs, o):
                o_ref[...] = x
            return p.astype(dtype), m, l

        plgpu.barrier_wait(k_full.at[0])
        s = mask(pl.run_scoped(first_s, s_accumulator), i32(0))
        plgpu.barrier_arrive(k_free.at[0])
        m = s.max(axis=1)
        p, l = self._weights(s, m)
        wait_for_k(i32(1))
        p16, m, l = lax.fori_loop(1, visits.count, step, (p.astype(dtype), m, l))
        last = self._slot(visits.count - 1)
        plgpu.barrier_wait(v_full.at[last])
        issue.wait()
        issue_o(p16, last)
        issue.pass_on()
        o = [o_ref[...] for o_ref in o_refs]
        plgpu.barrier_arrive(v_free.at[last])
        return o, m, l.sum(axis=1)

    def _softmax(self, s, m, l):
        """One step of the online softmax: p, the new m and l, and by what to rescale the accumulators, if at all."""
        m_new = jnp.maximum(m, s.max(axis=1))
        rescale = any_row(m_new > m + _RESCALE_LOG2 / self.logit_scale_log2, inline_ptx=self.inline_ptx)

        def grown():
            return m_new, jnp.exp2((m - _shift(m_new)) * self.logit_scale_log2)

        def same():
            return m, plgpu.layout_cast(jnp.ones(m.shape, jnp.float32), BY_ROW)

        m, factor = lax.cond(rescale, grown, same)
        p, p_sum = self._weights(s, m)
        return p, m, l * along_rows(factor, l.shape) + p_sum, factor, rescale

    def _weights(self, s, m):
        """p = exp(scale · (s - m)), one FFMA and one MUFU an element; and its sums in each thread, (rows, 8)."""
        p = jnp.exp2(s * self.logit_scale_log2 - along_rows(_shift(m) * self.logit_scale_log2, s.shape))
        # A thread holds two neighbours of every eight columns and sums its own; the sum over threads waits for the end.
        parts = [lax.slice(p, (0, at), (WARPGROUP_ROWS, at + 8)) for at in range(0, self.block_k, 8)]
        while len(parts) > 1:
            parts = [x + y for x, y in zip(parts[::2], parts[1::2])] + parts[len(parts) & ~1 :]
        return p, parts[0]

    def _mask(self, visits, mask_refs, ids_s, b, q_at, s, i):
        """Masked pairs of the i-th visited tile become -inf."""
        if not self.visits.is_masked:
            return s
        column = visits.column(i)

        def masked_part(s, at):
            # Some columns at a time: what a mask needs of each takes a quarter of a register, or half of one with
            # segments, and at H=64 a thread has 160. With all 128 columns at a time ptxas 13.0 spills 168 bytes there.
            shape = (WARPGROUP_ROWS, _MASK_COLUMNS)
            k_at = column * self.block_k + at
            ids = plgpu.load(ids_s, layout=BY_COLUMN)
            allowed = self.visits.allowed(mask_refs, ids, b=b, q_at=q_at, k_at=k_at, shape=shape)
            part = lax.slice(s, (0, at), (WARPGROUP_ROWS, at + _MASK_COLUMNS))
            return jnp.where(allowed, part, -jnp.inf)

        def masked(s):
            return lax.concatenate([masked_part(s, at) for at in range(0, self.block_k, _MASK_COLUMNS)], 1)

        return lax.cond(visits.is_partial(i, column), masked, lambda s: s, s)


def _shift(m):
    """The maximum to subtract: 0 where no key was seen, so that -inf - m is never NaN."""
    return jnp.where(m == -jnp.inf, 0, m)
