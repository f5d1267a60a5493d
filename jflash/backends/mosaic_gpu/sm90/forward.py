"""The forward kernel for Hopper: FlashAttention-3 (arXiv:2407.08608) with the rescaling rule of FlashAttention-4.

A block of threads has two or three warpgroups that compute, each for 64 queries of one head, and one that loads K and V
by TMA. Within a warpgroup the softmax of tile i runs while the tensor cores do P V of tile i - 1 (algorithm 2 there);
warpgroups do not take turns at issuing their matmuls (section 3.1 there), which made nothing faster (docs/decisions.md,
2026-11-30). The accumulators are rescaled only where some row maximum of the warp has grown by more than 2^8; numerator
and denominator share the stale maximum, so the result is exact. The mask is evaluated on partial tiles alone.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jflash.backends.mosaic_gpu.places import Places
from jflash.backends.mosaic_gpu.primitives import (
    BY_COLUMN,
    BY_ROW,
    CHUNK,
    COMPUTE_REGISTERS,
    LOAD_REGISTERS,
    LOG2_E,
    PART_COLUMNS,
    WARPGROUP_ROWS,
    Pieces,
    along_rows,
    any_row,
    end_stores,
    from_zeros,
    hopper_kernel,
    i32,
    load_pieces,
    opaque,
    see_releases,
    slot_of,
    smem_pieces,
    store_pieces,
)
from jflash.backends.mosaic_gpu.terms import TileTerms
from jflash.backends.mosaic_gpu.tile_values import Columns
from jflash.backends.mosaic_gpu.tiles import ForwardTiles, HopperTiles
from jflash.backends.mosaic_gpu.visits import TileVisits, Visits, head_and_row
from jflash.backends.protocol import Operands
from jflash.errors import ArgumentError
from jflash.masks.live import zero_dead_keys
from jflash.masks.tile_map import TileMap
from jflash.numerics.online_softmax import Attended, Carry, finish, finite
from jflash.numerics.varying import like, result_struct
from jflash.problem import Problem

# How far a row maximum may grow, in powers of two, before the accumulators are rescaled: p stays below 2^8, which 16
# bits hold at full precision.
_RESCALE_LOG2 = 8.0


def forward(problem: Problem, tiles: HopperTiles, operands: Operands) -> Attended:
    """Out and lse of one problem; see the top of this module."""
    q, k, v, _, mask = operands
    # K of dead keys only makes logits that the mask replaces; V is multiplied by weights of 0, and 0 times NaN is NaN.
    (v,) = zero_dead_keys(v, mask=mask, T=problem.T, S=problem.S)
    # Sizes and indices are 32 bits in the kernel; with x64 on, plain numbers would become 64.
    with jax.enable_x64(False):
        out, lse = _Forward(problem, tiles, operands)(q, k, v)
        if _stores_float32(problem, tiles.forward):
            out, lse = _merged(problem, out, lse, operands.sinks)
    # Inside `jax.shard_map` Pallas loses over which axes the results of Mosaic kernels vary (JAX 0.11.2).
    return like(Attended(out, lse[..., : problem.T]), operands)


def _stores_float32(problem: Problem, tiles: ForwardTiles) -> bool:
    """Whether the kernel gives float32 parts of out, which are merged, and rounded, after it."""
    return tiles.splits > 1 or problem.out_dtype != problem.dtype


def _merged(
    problem: Problem,
    out: Float[Array, "splits B N padded_T padded_Hv"],
    lse: Float[Array, "splits B N padded_T"],
    sinks: Float[Array, "#B N"] | None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N padded_T"]]:
    """Out and lse of all keys from those of each split, where a split without keys has an lse and nothing else."""
    m = lse.max(0) if sinks is None else jnp.maximum(lse.max(0), sinks[..., None])
    weight = jnp.exp(lse - finite(m))
    out = jnp.where(lse[..., None] > -jnp.inf, out, 0)
    # As keys, each with its lse for a logit and its out for a value; a sink is a key without a value.
    l = weight.sum(0) if sinks is None else weight.sum(0) + jnp.exp(sinks[..., None] - finite(m))
    out, lse = finish(Carry(m, l, (weight[..., None] * out).sum(0)))
    return out[..., : problem.T, : problem.Hv].swapaxes(1, 2).astype(problem.out_dtype), lse


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A row of tiles: what a block of threads works on at a time.

    Attributes:
      b, n, q_at: batch row, query head, first query.
      visits: which tiles of keys.
      split: which of the splits of its keys.
      number: rows that the block had before.
      start: steps that the block took before.
    """

    b: Any
    n: Any
    q_at: Any
    visits: Visits
    split: Any
    number: Any
    start: Any


class _Forward:
    """One kernel: what is known when tracing, the body of each warpgroup, the call."""

    def __init__(self, problem: Problem, tiles: HopperTiles, operands: Operands):
        self.problem, self.operands = problem, operands
        self.tiles: ForwardTiles = tiles.forward
        if problem.out_dtype != problem.dtype:
            # What `_parts` adds to p takes registers.
            self.tiles = dataclasses.replace(self.tiles, block_k=min(self.tiles.block_k, 64))
        self.inline_ptx = tiles.inline_ptx
        self.block_q, self.block_k = self.tiles.block_q, self.tiles.block_k
        lengths = problem.T, problem.S
        self.qk, self.vo = Pieces.of(problem.H, *lengths), Pieces.of(problem.Hv, *lengths)
        if self.tiles.blocks is not None and self.qk != self.vo:
            # Out would lie over the next Q of another warpgroup.
            raise ArgumentError("tiles", found=f"blocks={self.tiles.blocks} with Hv != H", wanted="blocks=None there")
        tile_map = TileMap(mask=operands.mask, T=problem.T, S=problem.S, block_q=self.block_q, block_k=self.block_k)
        split = {"warpgroups": self.tiles.warpgroups, "split": "T"}
        self.visits = TileVisits(tile_map, parts=self.tiles.warpgroups, **split)
        self.terms = TileTerms(problem, operands, tile_map, **split)
        self.places = Places(
            problem.B * problem.N * self.visits.rows * self.tiles.splits,
            blocks=self.tiles.blocks,
            counted=self.tiles.counted,
            warpgroups=self.tiles.warpgroups,
            inline_ptx=tiles.inline_ptx,
        )
        self.stores_float32 = _stores_float32(problem, self.tiles)
        # The merge adds the sinks itself.
        self.sinks = None if self.stores_float32 else operands.sinks
        self.scale_log2 = self.terms.unit * LOG2_E
        self.s_shape = (WARPGROUP_ROWS, self.block_k)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not self.tiles.counted:
            return self._call(q, k, v)
        return from_zeros(lambda counter: self._call(q, k, v, counter), jnp.zeros(1, jnp.int32), self.out_types)[1:]

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        """Out and lse as the kernel gives them."""
        problem = self.problem
        # Whole tiles: a store of one axis is clipped at the end of the array alone, not of a row.
        lse_shape = (problem.B, problem.N, self.visits.rows * self.block_q)
        out_type = (problem.B, problem.T, problem.N, problem.Hv), problem.dtype
        lse_type = lse_shape, jnp.float32
        if self.stores_float32:
            splits = self.tiles.splits
            out_type, lse_type = (((splits, *lse_shape, *own), jnp.float32) for own in ((self.vo.chunks * CHUNK,), ()))
        return [result_struct(*of, self.operands) for of in (out_type, lse_type)]

    def _call(self, q: jax.Array, k: jax.Array, v: jax.Array, *counters: Any) -> tuple[jax.Array, jax.Array]:
        problem, tiles = self.problem, self.tiles
        dtype, stages, warpgroups, q_slots = problem.dtype, tiles.stages, tiles.warpgroups, self.q_slots
        column_ids = np.arange(PART_COLUMNS, dtype=np.int32)
        barrier = plgpu.Barrier
        free = barrier(num_arrivals=warpgroups, num_barriers=stages)
        key_arrivals = self.qk.count + self.column_arrivals

        def kernel(q_g, k_g, v_g, ids_g, *refs, **scratch):
            counter, refs = (refs[0], refs[1:]) if counters else (None, refs)
            mask_refs, refs = self.visits.take(refs)
            term_refs, (*sinks, out_g, lse_g) = self.terms.take(refs)
            results = {"out": out_g, "lse": lse_g}
            g = types.SimpleNamespace(mask=mask_refs, terms=term_refs, sinks=sinks, counter=counter, **results)
            self._body((q_g, k_g, v_g, ids_g), g, types.SimpleNamespace(**scratch))

        out, lse = hopper_kernel(
            kernel,
            tiles=tiles,
            out_type=self.out_types,
            blocks=self.places.blocks,
            warpgroups=warpgroups,
            reduces=True,
            scratch_types={
                # Out goes where Q was.
                "q_and_out": plgpu.RefUnion(
                    *smem_pieces((q_slots,), WARPGROUP_ROWS, self.qk, dtype),
                    *smem_pieces((q_slots,), WARPGROUP_ROWS, self.vo, dtype),
                ),
                "k": plgpu.RefUnion(*smem_pieces((stages,), self.block_k, self.qk, dtype)),
                "v": plgpu.RefUnion(*smem_pieces((stages,), self.block_k, self.vo, dtype)),
                "lse": plgpu.SMEM((warpgroups, WARPGROUP_ROWS), jnp.float32),
                "ids": plgpu.SMEM((PART_COLUMNS,), jnp.int32),
                "q_full": barrier(num_arrivals=self.qk.count, num_barriers=q_slots),
                "q_free": barrier(num_barriers=q_slots),
                "k_full": barrier(num_arrivals=key_arrivals, num_barriers=stages),
                "v_full": barrier(num_arrivals=self.vo.count, num_barriers=stages),
                "k_free": free,
                "v_free": free,
                "ids_full": barrier(),
                "q_read": barrier(num_arrivals=warpgroups),
                **self.visits.values.scratch(self.column_slots),
                **self.terms.scratch(self.column_slots),
                **self.places.scratch(),
                **self.visits.pairs.scratch(),
                **self.terms.pair_scratch(),
            },
            kernel_name="jflash_forward_sm90",
        )(q, k, v, column_ids, *counters, *self.visits.operands(), *self.terms.operands(), *self._sink_operands())
        return out, lse

    def _sink_operands(self) -> tuple[jax.Array, ...]:
        return () if self.sinks is None else (jnp.asarray(self.sinks),)

    def _body(self, inputs, g: types.SimpleNamespace, s: types.SimpleNamespace) -> None:
        q_g, k_g, v_g, ids_g = inputs
        warpgroups = self.tiles.warpgroups
        warpgroup = lax.axis_index("warpgroup")
        tile_at = functools.partial(self._tile, g.mask, lax.min(warpgroup, i32(warpgroups - 1)))

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS[warpgroups], action="increase")
            if self.needs_ids:
                plgpu.barrier_wait(s.ids_full)

            def compute(place, number, start):
                tile = tile_at(place, number, start)
                compute_tile = functools.partial(self._compute, tile, g, s, warpgroup)
                if self.tiles.splits == 1:
                    compute_tile()
                else:
                    pl.when(tile.visits.count > 0)(compute_tile)
                    pl.when(tile.visits.count == 0)(lambda: self._store_nothing(tile, g.lse, warpgroup))
                return tile.visits.count

            self.places.each(compute, s)
            end_stores()

        @pl.when(warpgroup == warpgroups)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS[warpgroups], action="decrease")
            if self.needs_ids:
                plgpu.copy_gmem_to_smem(ids_g, s.ids, s.ids_full)

            def load(place, number, start):
                tile = tile_at(place, number, start)
                load_tile = functools.partial(self._load, tile, (q_g, k_g, v_g), g, s)
                load_tile() if self.tiles.splits == 1 else pl.when(tile.visits.count > 0)(load_tile)
                return tile.visits.count

            tiles, steps = self.places.each(load, s, counter=g.counter, loads=True)
            for free in (s.k_free, s.v_free):
                see_releases(free, stages=self.tiles.stages, count=steps)
            self.visits.pairs.see_releases(s, steps)
            self.terms.see_pair_releases(s, steps)
            if self.tiles.q_stages > 1:
                for w in range(warpgroups):
                    see_releases(s.q_free, stages=self.tiles.q_stages, count=tiles, first=self._q_slot(w, 0))

    @property
    def needs_ids(self) -> bool:
        """Whether the numbers of columns are needed, for the mask or for logits."""
        return self.visits.is_masked or not self.terms.is_plain

    # The tiles of a block of threads ----------------------------------------------------------------------------------

    @property
    def column_arrivals(self) -> int:
        """Copies of what belongs to the keys of a tile, beside K."""
        return self.visits.values.arrivals + self.terms.arrivals

    @property
    def column_slots(self) -> int:
        """Tiles of which shared memory has what belongs to each key, beside K.

        One more than there are tiles of K, whose place is free before the mask and the logits have been computed.
        """
        return self.tiles.stages + 1

    @property
    def q_slots(self) -> int:
        """Tiles of Q that shared memory holds, each of one warpgroup."""
        return self.tiles.q_stages * self.tiles.warpgroups

    def _tile(self, mask_refs, part, place, number, start) -> "_Tile":
        heads = {"heads": self.problem.B * self.problem.N, "head_group": self.tiles.head_group}
        splits = self.tiles.splits
        head, row = head_and_row(lax.div(place, i32(splits)), rows=self.visits.rows, **heads)
        b, n = lax.div(head, i32(self.problem.N)), lax.rem(head, i32(self.problem.N))
        visits, split = self.visits.of_row(mask_refs, b=b, row=row, part=part), i32(0)
        if splits > 1:
            split = lax.rem(place, i32(splits))
            visits = visits.split(split, splits)
        return _Tile(b, n, row * self.block_q, visits, split, number, start)

    def _q_slot(self, warpgroup: Any, number: Any) -> Any:
        """Where the Q of a warpgroup lies, for the row of tiles of this number."""
        return warpgroup * self.tiles.q_stages + slot_of(number, self.tiles.q_stages)

    # The warpgroup that loads -----------------------------------------------------------------------------------------

    def _load(self, tile: "_Tile", inputs, g: types.SimpleNamespace, s: types.SimpleNamespace) -> None:
        stages, visits = self.tiles.stages, tile.visits
        q_g, k_g, v_g = inputs
        q_tma = s.q_and_out[0]
        for w in range(self.tiles.warpgroups):
            slot = self._q_slot(w, tile.number)
            if self.tiles.q_stages > 1:
                pl.when(tile.number >= self.tiles.q_stages)(functools.partial(plgpu.barrier_wait, s.q_free.at[slot]))
            place = {"b": tile.b, "row": tile.q_at + w * WARPGROUP_ROWS, "rows": WARPGROUP_ROWS, "head": tile.n}
            load_pieces(q_g, self.qk.refs(q_tma.at[slot]), s.q_full.at[slot], **place)

        def load(i, source, smem, pieces, full, free):
            slot = self._slot(tile.start + i)
            pl.when(tile.start + i >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
            row = visits.column(i) * self.block_k
            place = {"b": tile.b, "row": row, "rows": self.block_k, "head": lax.div(tile.n, i32(self.problem.group))}
            load_pieces(source, pieces.refs(smem.at[slot]), full.at[slot], **place)

        key = k_g, s.k[0], self.qk, s.k_full, s.k_free
        value = v_g, s.v[0], self.vo, s.v_full, s.v_free

        def load_key(i):
            load(i, *key)
            step = tile.start + i
            full, slot = s.k_full.at[self._slot(step)], slot_of(step, self.column_slots)
            place = {"b": tile.b, "n": tile.n, "column_at": visits.column(i) * self.block_k}
            self.visits.load(g.mask, s, slot, full, **place)
            self.terms.load(g.terms, s, slot, full, **place)

        def load_pairs(i):
            place = {"b": tile.b, "n": tile.n, "q_at": tile.q_at, "k_at": visits.column(i) * self.block_k}
            self.visits.pairs.load(g.mask, s, tile.start + i, **place)
            self.terms.load_pairs(g.terms, s, tile.start + i, **place)

        load_key(i32(0))
        load_pairs(i32(0))

        @pl.loop(0, visits.count)
        def _(i):
            # K one tile ahead of V: its slot is free half a step earlier.
            pl.when(i + 1 < visits.count)(lambda: load_key(i + 1))
            load(i, *value)
            # Last, since its place is free as soon as logits have been made, which wait for K alone.
            pl.when(i + 1 < visits.count)(lambda: load_pairs(i + 1))

    def _slot(self, i: Any) -> Any:
        return slot_of(i, self.tiles.stages)

    # The warpgroups that compute --------------------------------------------------------------------------------------

    def _compute(self, tile: "_Tile", g: types.SimpleNamespace, s: types.SimpleNamespace, warpgroup) -> None:
        q_mma = s.q_and_out[1]
        slot, q_at = self._q_slot(warpgroup, tile.number), tile.q_at + warpgroup * WARPGROUP_ROWS
        plgpu.barrier_wait(s.q_full.at[slot])
        logits = functools.partial(self._logits, tile, g, s, warpgroup, q_at)
        dropped = functools.partial(self._dropped, tile, g, s, q_at)
        accumulators = [plgpu.ACC((WARPGROUP_ROWS, self.vo.width), jnp.float32)] * self.vo.count
        o, m, l = pl.run_scoped(functools.partial(self._attend, tile, logits, dropped, q_mma, slot, s), *accumulators)

        factor, lse = self._normalised(tile, g, m, l)
        out = [part_of_o * along_rows(factor, part_of_o.shape) for part_of_o in o]
        if self.stores_float32:
            # For which the place of Q has no room.
            for piece, x in enumerate(out):
                columns = pl.ds(piece * self.vo.width, self.vo.width)
                g.out[tile.split, tile.b, tile.n, pl.ds(q_at, WARPGROUP_ROWS), columns] = x
            g.lse[tile.split, tile.b, tile.n, pl.ds(q_at, WARPGROUP_ROWS)] = lse
        else:
            self._store(tile, g, s, warpgroup, out, lse)
        if self.tiles.q_stages > 1:
            plgpu.barrier_arrive(s.q_free.at[slot])

    def _store(self, tile: "_Tile", g: types.SimpleNamespace, s: types.SimpleNamespace, warpgroup, out, lse) -> None:
        """Out, rounded, and lse by TMA, from where Q was."""
        _, _, out_tma, out_mma = s.q_and_out
        slot, q_at = self._q_slot(warpgroup, tile.number), tile.q_at + warpgroup * WARPGROUP_ROWS
        if self.qk != self.vo:
            # Rows of out are not as long as those of Q, so that they lie over the Q of other warpgroups too.
            plgpu.barrier_arrive(s.q_read)
            plgpu.barrier_wait(s.q_read)
        for piece, x in enumerate(out):
            out_mma[slot, piece] = x.astype(g.out.dtype)
        s.lse[warpgroup] = lse
        plgpu.commit_smem()
        # Also past the last query: out is clipped there, and lse has room.
        place = {"b": tile.b, "row": q_at, "rows": WARPGROUP_ROWS, "head": tile.n}
        store_pieces(self.vo.refs(out_tma.at[slot]), g.out, **place)
        plgpu.copy_smem_to_gmem(s.lse.at[warpgroup], g.lse.at[tile.b, tile.n, pl.ds(q_at, WARPGROUP_ROWS)])
        if self.tiles.q_stages > 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _normalised(self, tile: "_Tile", g: types.SimpleNamespace, m, l) -> tuple[Any, Any]:
        """What the sums of p · v are multiplied by to be out, and the lse."""
        is_dead = l == 0
        top = finite(m) * self.terms.unit
        if self.sinks is None:
            return jnp.where(is_dead, 0, 1 / l), jnp.where(is_dead, -jnp.inf, top + jnp.log(l))
        b = tile.b if self.sinks.shape[0] > 1 else i32(0)
        sink = jnp.full(m.shape, g.sinks[0][b, tile.n])
        # The sink may be larger than all logits, or -inf.
        top = jnp.where(is_dead, -jnp.inf, top)
        new_top = finite(jnp.maximum(top, sink))
        scale = jnp.exp(top - new_top)
        total = l * scale + jnp.exp(sink - new_top)
        return jnp.where(is_dead, 0, scale / total), jnp.where(total == 0, -jnp.inf, new_top + jnp.log(total))

    def _store_nothing(self, tile: "_Tile", lse_g, warpgroup) -> None:
        """What a split without keys gives."""
        queries = pl.ds(tile.q_at + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        nothing = jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32)
        lse_g[tile.split, tile.b, tile.n, queries] = plgpu.layout_cast(nothing, BY_ROW)

    def _attend(self, tile: "_Tile", logits, dropped, q, q_slot, s: types.SimpleNamespace, *o_refs):
        """The pieces of the sum of p · v, the row maxima m (of logits / unit) and the row sums l of p."""
        count = tile.visits.count
        k, v, k_full, v_full, k_free, v_free = s.k[1], s.v[1], s.k_full, s.v_full, s.k_free, s.v_free
        s_accumulator = plgpu.ACC(self.s_shape, jnp.float32)

        def slot_of_step(i):
            return self._slot(tile.start + i)

        def issue_s(s_ref, slot):
            # Without `opaque` ptxas 13.0 spills 12 bytes at H=256 with odd lengths; one piece needs it nowhere.
            own = opaque(q_slot)[0] if self.qk.count > 1 else q_slot
            for q_piece, k_piece in zip(self.qk.refs(q.at[own]), self.qk.refs(k.at[slot])):
                plgpu.wgmma(s_ref, q_piece, k_piece.T)

        def issue_o(p_parts, slot):
            for p in p_parts:
                for o_ref, v_piece in zip(o_refs, self.vo.refs(v.at[slot])):
                    plgpu.wgmma(o_ref, p, v_piece)

        def wait_for_k(i):
            @pl.when(i < count)
            def _():
                plgpu.barrier_wait(k_full.at[slot_of_step(i)])

        def first_s(s_ref):
            issue_s(s_ref, first)
            return s_ref[...]

        def step(i, carry):
            p_parts, m, l = carry
            slot, previous = slot_of_step(i), slot_of_step(i - 1)
            plgpu.barrier_wait(v_full.at[previous])

            def matmuls(s_ref):
                issue_s(s_ref, slot)
                issue_o(p_parts, previous)
                return plgpu.wgmma_accumulator_load(s_ref, wait_n=self.vo.count * len(p_parts))

            s = pl.run_scoped(matmuls, s_accumulator)
            plgpu.barrier_arrive(k_free.at[slot])
            p, m, l, factor, rescale = self._softmax(logits(s, i), m, l)
            if self.tiles.pin_wait:
                # p stays float32: P V still reads the registers of p_parts. The optimization barrier holds LLVM; the
                # wait on an mbarrier ends the basic block, and so holds ptxas.
                p, m, l, factor = lax.optimization_barrier((p, m, l, factor))
                wait_for_k(i + 1)
            o = [plgpu.wgmma_accumulator_load(o_ref, wait_n=0) for o_ref in o_refs]
            plgpu.barrier_arrive(v_free.at[previous])
            if not self.tiles.pin_wait:
                wait_for_k(i + 1)
            o = lax.cond(rescale, lambda o: [x * along_rows(factor, x.shape) for x in o], lambda o: o, o)
            for o_ref, x in zip(o_refs, o):
                o_ref[...] = x
            return self._parts(dropped(p, i)), m, l

        first = slot_of_step(i32(0))
        plgpu.barrier_wait(k_full.at[first])
        s = logits(pl.run_scoped(first_s, s_accumulator), i32(0))
        plgpu.barrier_arrive(k_free.at[first])
        m = s.max(axis=1)
        p, l = self._weights(s, m)
        wait_for_k(i32(1))
        p_parts, m, l = lax.fori_loop(1, count, step, (self._parts(dropped(p, i32(0))), m, l))
        last = slot_of_step(count - 1)
        plgpu.barrier_wait(v_full.at[last])
        issue_o(p_parts, last)
        o = [o_ref[...] for o_ref in o_refs]
        plgpu.barrier_arrive(v_free.at[last])
        return o, m, l.sum(axis=1)

    def _parts(self, p) -> tuple[Any, ...]:
        """p in 16 bits; with what these leave, where out is wanted in float32."""
        dtype = self.problem.dtype
        first = p.astype(dtype)
        if self.problem.out_dtype == dtype:
            return (first,)
        return first, (p - first.astype(jnp.float32)).astype(dtype)

    def _softmax(self, s, m, l):
        """One step of the online softmax: p, the new m and l, and by what to rescale the accumulators, if at all."""
        m_new = jnp.maximum(m, s.max(axis=1))
        rescale = any_row(m_new > m + _RESCALE_LOG2 / self.scale_log2, inline_ptx=self.inline_ptx)

        def grown():
            return m_new, jnp.exp2((m - finite(m_new)) * self.scale_log2)

        def same():
            return m, plgpu.layout_cast(jnp.ones(m.shape, jnp.float32), BY_ROW)

        m, factor = lax.cond(rescale, grown, same)
        p, p_sum = self._weights(s, m)
        return p, m, l * along_rows(factor, l.shape) + p_sum, factor, rescale

    def _weights(self, s, m):
        """p = exp(scale · (s - m)), one FFMA and one MUFU an element; and its sums in each thread, (rows, 8)."""
        p = jnp.exp2(s * self.scale_log2 - along_rows(finite(m) * self.scale_log2, s.shape))
        # A thread holds two neighbours of every eight columns and sums its own; the sum over threads waits for the end.
        parts = [lax.slice(p, (0, at), (WARPGROUP_ROWS, at + 8)) for at in range(0, self.block_k, 8)]
        while len(parts) > 1:
            parts = [x + y for x, y in zip(parts[::2], parts[1::2])] + parts[len(parts) & ~1 :]
        return p, parts[0]

    def _logits(self, tile: "_Tile", g: types.SimpleNamespace, s: types.SimpleNamespace, warpgroup, q_at, x, i):
        """The logits / unit of the i-th visited tile from its products; -inf at masked pairs."""
        column = tile.visits.column(i)
        slot = slot_of(tile.start + i, self.column_slots)

        def place(k_at, columns):
            return {"b": tile.b, "n": tile.n, "q_at": q_at, "k_at": k_at, "columns": Columns(s, slot, columns.start)}

        def logits(x, k_at, columns):
            x = self.terms.biased(x, s, warpgroup, columns)
            if self.terms.is_plain:
                return x
            arguments, ids = self.terms.arguments.parts(s, warpgroup, columns), plgpu.load(s.ids, layout=BY_COLUMN)
            return self.terms.of(g.terms, x, ids, arguments, **place(k_at, columns))

        def masked(x, k_at, columns):
            own = place(k_at, columns) | {"pairs": self.visits.pairs.part(s, warpgroup, columns)}
            ids = plgpu.load(s.ids, layout=BY_COLUMN)
            return jnp.where(self.visits.allowed(g.mask, ids, **own, shape=x.shape), x, -jnp.inf)

        if self.terms.pairs or not self.terms.is_plain:
            with self.terms.pairs.reading(s, warpgroup), self.terms.arguments.reading(s, warpgroup):
                x = self._by_columns(logits, column, x)
        if not self.visits.is_masked:
            return x
        all_masked = functools.partial(self._by_columns, masked, column)
        with self.visits.pairs.reading(s, warpgroup):
            return lax.cond(tile.visits.is_partial(i, column), all_masked, lambda x: x, x)

    def _dropped(self, tile: "_Tile", g: types.SimpleNamespace, s: types.SimpleNamespace, q_at, p, i):
        """p of the i-th visited tile after dropout."""
        if self.terms.dropout is None:
            return p

        def dropped(x, k_at, columns):
            own = Columns(s, slot_of(tile.start + i, self.column_slots), columns.start)
            (x,) = self.terms.dropped(g.terms, x, b=tile.b, n=tile.n, q_at=q_at, k_at=k_at, columns=own)
            return x

        return self._by_columns(dropped, tile.visits.column(i), p)

    def _by_columns(self, part: Callable[[Any, Any, slice], Any], column: Any, x: Any) -> Any:
        """Some columns of a tile after the other, each by `part(x, its first key, which columns)`.

        What a mask needs of each takes a quarter of a register, or half of one with segments, and at H=64 a thread has
        160. With all 128 columns at a time ptxas 13.0 spills 168 bytes there.
        """
        starts = range(0, self.block_k, PART_COLUMNS)
        parts = (lax.slice(x, (0, at), (WARPGROUP_ROWS, at + PART_COLUMNS)) for at in starts)
        first = column * self.block_k
        done = [part(own, first + at, slice(at, at + PART_COLUMNS)) for own, at in zip(parts, starts)]
        if self.column_arrivals:
            plgpu.commit_smem()  # TMA will write where the values of columns were read.
        return lax.concatenate(done, 1)
