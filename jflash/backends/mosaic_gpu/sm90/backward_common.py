"""What the fused backward kernels have in common: their operands, the warpgroup that loads, the steps, the mask.

A block of threads keeps a tile of keys of one key/value head and their values in shared memory, and steps over the
tiles of queries that see them, of each query head of the group. Two warpgroups compute, a third loads Q, dO, -lse /
scale and -delta by TMA.

-lse / scale and -delta are where the accumulators of S and dP start: no instruction subtracts them, and -inf instead of
the former masks a pair before its matmul begins. Where logits are more than q · k times the scale, S starts at 0, and
-lse and the mask come after what makes the logits of it. A bias of pairs by the scale is added to where S starts.
"""

import abc
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

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
    COMPUTE_REGISTERS,
    LOAD_REGISTERS,
    LOG2_E,
    Pieces,
    along_columns,
    hopper_kernel,
    i32,
    load_pieces,
    see_releases,
    slot_of,
    smem_pieces,
)
from jflash.backends.mosaic_gpu.terms import TileTerms
from jflash.backends.mosaic_gpu.tile_values import Columns
from jflash.backends.mosaic_gpu.tiles import HopperTiles
from jflash.backends.mosaic_gpu.visits import TileVisits, Visits, head_and_row
from jflash.backends.protocol import Operands
from jflash.masks.tile_map import TileMap
from jflash.numerics.varying import result_struct
from jflash.problem import Problem

WARPGROUPS = 2


class Steps:
    """The steps of a block of threads: the visits of each query head of the group, one head after the other."""

    def __init__(self, visits: Visits, *, group: int):
        self._visits, self._group = visits, group
        self.count = visits.count * group

    def loop(self, body: Callable[[Any, Any], None]) -> None:
        """Runs `body(head of the group, visit)` for each step."""

        # Two loops: a division by the count of visits took registers enough to spill.
        @pl.loop(0, self._group)
        def _(g):
            @pl.loop(0, self._visits.count)
            def _(t):
                body(g, t)

    def place(self, i: Any) -> tuple[Any, Any]:
        """The head of the group and the visit of the i-th step."""
        if self._group == 1:
            return i32(0), i
        return lax.div(i, self._visits.count), lax.rem(i, self._visits.count)

    def index(self, g: Any, t: Any) -> Any:
        return t if self._group == 1 else g * self._visits.count + t


class Step(NamedTuple):
    """One tile of queries of one head.

    Attributes:
      head: the query head.
      q_at: its first query.
      is_partial: whether the mask must be evaluated.
      is_first, is_last: of the steps of its head.
    """

    head: Any
    q_at: Any
    is_partial: Any
    is_first: Any
    is_last: Any


@dataclasses.dataclass(frozen=True)
class Block:
    """What a block of threads works on, and where: indices known in the kernel, and references.

    Attributes:
      b, kv_head, k_at, tile: batch row, key/value head, first key, and the number of the tile of keys.
      visits, steps: which tiles of queries.
      mask_refs, term_refs: the operands of the mask, and of the logits.
      s: scratch memory and barriers, by name.
      dq, dk, dv: results in global memory; dq is None where another kernel computes it.
      d_values: of each learned value of the logits the sums over queries, in global memory.
    """

    b: Any
    kv_head: Any
    k_at: Any
    tile: Any
    visits: Visits
    steps: Steps
    mask_refs: tuple[Any, ...]
    term_refs: tuple[Any, ...]
    s: types.SimpleNamespace
    dq: Any
    dk: Any
    dv: Any
    d_values: tuple[Any, ...]


class BackwardKernel(abc.ABC):
    """dk and dv of one problem and, added to a reference, dq before the scale.

    Args:
      with_dq: whether to compute dq.

    Attributes:
      sum_parts: parts in which a block of threads sums over queries, each of other queries.
      split: "S" where the warpgroups split the keys of a tile of logits, "T" where its queries.
    """

    kernel_name: str
    qk: Pieces
    vo: Pieces
    sum_parts: int
    split: str

    def __init__(self, problem: Problem, tiles: HopperTiles, operands: Operands, *, with_dq: bool):
        self.problem, self.operands, self.with_dq = problem, operands, with_dq
        self.tiles, self.inline_ptx = tiles.backward, tiles.inline_ptx
        self.block_q, self.block_k = self.tiles.block_q, self.tiles.block_k
        self.q_stages, self.do_stages = self.tiles.q_stages, self.tiles.do_stages
        lengths = {"T": problem.T, "S": problem.S, "block_q": self.block_q, "block_k": self.block_k}
        tile_map = TileMap(mask=operands.mask, transpose=True, **lengths)
        # One part for both warpgroups: what is the same in all threads takes no registers of a thread.
        split = {"warpgroups": WARPGROUPS, "split": self.split}
        self.visits = TileVisits(tile_map, parts=1, **split)
        self.terms = TileTerms(problem, operands, tile_map, **split)
        self.scale_log2 = self.terms.unit * LOG2_E

    @property
    def dq_columns(self) -> int:
        """Columns of the array that dq is added to: whole chunks, so that one TMA adds a part of dq."""
        return self.qk.chunks * CHUNK

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        """What a call gives."""
        problem, dtype = self.problem, self.problem.dtype
        sums = (self.sum_parts, problem.B, problem.N, self.visits.rows * self.block_k)
        dk_and_dv = [result_struct(x.shape, dtype, self.operands) for x in (self.operands.k, self.operands.v)]
        return dk_and_dv + [result_struct(sums, jnp.float32, self.operands)] * len(self.terms.summed)

    @abc.abstractmethod
    def _scratch(self) -> dict[str, Any]:
        """Scratch types beyond those that all have."""

    @abc.abstractmethod
    def _compute(self, block: Block, warpgroup: Any) -> None:
        """The work of a warpgroup that computes."""

    def __call__(
        self, statistics: tuple[jax.Array, jax.Array], d_out: jax.Array, dq_ref: Any | None
    ) -> tuple[jax.Array, ...]:
        """dk, dv, and for each learned value of the logits its sums over queries, (sum_parts, B, N, S rounded up).

        Args:
          statistics: -lse / unit and -delta, each (B, N, T rounded up) float32; the unit is that of the logits.
          d_out: the cotangent of out.
          dq_ref: (B N, T rounded up, dq_columns) float32, has dq added to it; None where `with_dq` is off.
        """
        problem, dtype, barrier = self.problem, self.problem.dtype, plgpu.Barrier
        q_stages, do_stages = self.q_stages, self.do_stages
        query_ids = np.arange(self.block_q, dtype=np.int32)
        mask_and_logits = *self.visits.operands(), *self.terms.operands()
        dq_refs = (dq_ref,) if self.with_dq else ()

        def kernel(q_g, k_g, v_g, do_g, start_g, d_start_g, ids_g, *refs, **scratch):
            mask_refs, refs = self.visits.take(refs)
            term_refs, refs = self.terms.take(refs)
            dq_g, (dk_g, dv_g, *d_values_g) = (refs[0], refs[1:]) if self.with_dq else (None, refs)
            results = {"dq": dq_g, "dk": dk_g, "dv": dv_g, "d_values": tuple(d_values_g)}
            block = self._block(mask_refs, term_refs, types.SimpleNamespace(**scratch), results)
            warpgroup = lax.axis_index("warpgroup")

            @pl.when(warpgroup < WARPGROUPS)
            def _():
                plgpu.set_max_registers(COMPUTE_REGISTERS[WARPGROUPS], action="increase")
                plgpu.barrier_wait(block.s.kv_full)
                self._compute(block, warpgroup)

            @pl.when(warpgroup == WARPGROUPS)
            def _():
                plgpu.set_max_registers(LOAD_REGISTERS[WARPGROUPS], action="decrease")
                self._load(block, q_g, k_g, v_g, do_g, (start_g, d_start_g), ids_g)

        learned = len(self.terms.summed)
        query_arrivals = self.qk.count + 2 + self.visits.values.arrivals + self.terms.arrivals

        results = hopper_kernel(
            kernel,
            tiles=self.tiles,
            out_type=self.out_types,
            blocks=problem.B * problem.K * self.visits.rows,
            warpgroups=WARPGROUPS,
            reduces=learned > 0,
            scratch_types={
                # dK and dV go where K and V were.
                "k": plgpu.RefUnion(*smem_pieces((), self.block_k, self.qk, dtype)),
                "v": plgpu.RefUnion(*smem_pieces((), self.block_k, self.vo, dtype)),
                "q": plgpu.RefUnion(*smem_pieces((q_stages,), self.block_q, self.qk, dtype)),
                "do": plgpu.RefUnion(*smem_pieces((do_stages,), self.block_q, self.vo, dtype)),
                "rows": plgpu.SMEM((q_stages, 2, self.block_q), jnp.float32),
                "ids": plgpu.SMEM((self.block_q,), jnp.int32),
                **({"sums": plgpu.SMEM((learned, self.sum_parts, self.block_k), jnp.float32)} if learned else {}),
                **self.visits.values.scratch(q_stages),
                **self.terms.scratch(q_stages),
                **self.visits.pairs.scratch(),
                **self.terms.pair_scratch(),
                "kv_full": barrier(num_arrivals=self.qk.count + self.vo.count + 1),
                "q_full": barrier(num_arrivals=query_arrivals, num_barriers=q_stages),
                "do_full": barrier(num_arrivals=self.vo.count, num_barriers=do_stages),
                "q_free": barrier(num_arrivals=WARPGROUPS, num_barriers=q_stages),
                "do_free": barrier(num_arrivals=WARPGROUPS, num_barriers=do_stages),
                **self._scratch(),
            },
            kernel_name=self.kernel_name if self.with_dq else f"{self.kernel_name}_without_dq",
        )(*self.operands[:3], d_out, *statistics, query_ids, *mask_and_logits, *dq_refs)
        return tuple(results)

    def _block(self, mask_refs, term_refs, scratch, results) -> Block:
        rows, heads = self.visits.rows, self.problem.B * self.problem.K
        place = {"rows": rows, "heads": heads, "head_group": self.tiles.head_group}
        head, row = head_and_row(lax.axis_index("block"), **place)
        tile = rows - 1 - row  # Of a causal mask the first keys have most queries.
        b, kv_head = lax.div(head, i32(self.problem.K)), lax.rem(head, i32(self.problem.K))
        visits = self.visits.of_row(mask_refs, b=b, row=tile, part=i32(0))
        steps = Steps(visits, group=self.problem.group)
        place = b, kv_head, tile * self.block_k, tile, visits, steps
        return Block(*place, mask_refs=mask_refs, term_refs=term_refs, s=scratch, **results)

    def _slots(self, i: Any) -> tuple[Any, Any]:
        """Where Q and dO of the i-th step lie."""
        return slot_of(i, self.q_stages), slot_of(i, self.do_stages)

    def _place(self, block: Block, g: Any, t: Any) -> Step:
        """Which head and queries a step is about."""
        is_first, is_last = t == 0, t == block.visits.count - 1
        if not self.visits.is_masked:
            # The blocks of a head start at different queries, so that they do not add to one tile of dQ at once: 579 to
            # 627 TFLOP/s on an H200 (2026-11-29, study).
            t = lax.rem(t + block.tile * max(1, self.block_k // self.block_q), block.visits.count)
        column = block.visits.column(t)
        head = block.kv_head * self.problem.group + g
        return Step(head, column * self.block_q, block.visits.is_partial(t, column), is_first, is_last)

    def _load(self, block: Block, q_g, k_g, v_g, do_g, statistics, ids_g) -> None:
        s, steps = block.s, block.steps
        tma = types.SimpleNamespace(k=s.k[0], v=s.v[0], q=s.q[0], do=s.do[0])
        keys = {"b": block.b, "row": block.k_at, "rows": self.block_k, "head": block.kv_head}
        load_pieces(k_g, self.qk.refs(tma.k), s.kv_full, **keys)
        load_pieces(v_g, self.vo.refs(tma.v), s.kv_full, **keys)
        plgpu.copy_gmem_to_smem(ids_g, s.ids, s.kv_full)

        def step(g, t):
            i = steps.index(g, t)
            slot, do_slot = self._slots(i)
            at = self._place(block, g, t)
            queries = {"b": block.b, "row": at.q_at, "rows": self.block_q, "head": at.head}

            pl.when(i >= self.q_stages)(lambda: plgpu.barrier_wait(s.q_free.at[slot]))
            load_pieces(q_g, self.qk.refs(tma.q.at[slot]), s.q_full.at[slot], **queries)
            for which, statistic in enumerate(statistics):
                source = statistic.at[block.b, at.head, pl.ds(at.q_at, self.block_q)]
                plgpu.copy_gmem_to_smem(source, s.rows.at[slot, which], s.q_full.at[slot])
            columns = {"b": block.b, "n": at.head, "column_at": at.q_at}
            self.visits.load(block.mask_refs, s, slot, s.q_full.at[slot], **columns)
            self.terms.load(block.term_refs, s, slot, s.q_full.at[slot], **columns)

            pl.when(i >= self.do_stages)(lambda: plgpu.barrier_wait(s.do_free.at[do_slot]))
            load_pieces(do_g, self.vo.refs(tma.do.at[do_slot]), s.do_full.at[do_slot], **queries)
            place = {"b": block.b, "n": at.head, "q_at": at.q_at, "k_at": block.k_at}
            self.visits.pairs.load(block.mask_refs, s, i, **place)
            self.terms.load_pairs(block.term_refs, s, i, **place)

        steps.loop(step)
        self.visits.pairs.see_releases(s, steps.count)
        self.terms.see_pair_releases(s, steps.count)
        see_releases(s.q_free, stages=self.q_stages, count=steps.count)
        see_releases(s.do_free, stages=self.do_stages, count=steps.count)

    # Where the accumulators of S and dP start, for a tile of keys by queries, transposed ------------------------------
    # `q_from` is the first query of the tile within the step, `k_at` the first key.

    def _s_start(self, block: Block, warpgroup, slot, step: Step, *, q_from, k_at, shape: tuple[int, int]):
        """-lse / scale, or -inf where the mask does not allow a pair; 0 where the logits are still to be made.

        And a bias of pairs by the scale more.
        """
        plain = self.terms.is_plain
        start = self._statistic(block, slot, 0, q_from, shape) if plain else jnp.zeros(shape, jnp.float32)
        with self.terms.pairs.reading(block.s, warpgroup):
            start = self.terms.biased(start, block.s, warpgroup)
        if not plain:
            return start
        return self._allowed_or(-jnp.inf, start, block, warpgroup, slot, step, q_from=q_from, k_at=k_at)

    def _dp_start(self, block: Block, slot, *, q_from, shape: tuple[int, int]):
        """-delta; 0 where dropout comes before it."""
        if self.terms.dropout is not None:
            return jnp.zeros(shape, jnp.float32)
        return self._statistic(block, slot, 1, q_from, shape)

    def _statistic(self, block: Block, slot, which: int, q_from, shape: tuple[int, int]):
        row = block.s.rows.at[slot, which, pl.ds(q_from, shape[1])]
        return along_columns(plgpu.load(row, layout=BY_COLUMN), shape)

    def _ids(self, block: Block, shape: tuple[int, int]):
        return plgpu.load(block.s.ids.at[pl.ds(0, shape[1])], layout=BY_COLUMN)

    def _tile_place(self, block: Block, slot, step: Step, *, q_from, k_at) -> dict[str, Any]:
        """What `TileVisits.allowed` and `TileTerms` are told of a tile."""
        columns = Columns(block.s, slot, q_from)
        return {"b": block.b, "n": step.head, "q_at": step.q_at + q_from, "k_at": k_at, "columns": columns}

    def _allowed_or(self, other: float, x, block: Block, warpgroup, slot, step: Step, *, q_from, k_at):
        """The tile, with another value where the mask does not allow a pair."""

        def masked(x):
            place = self._tile_place(block, slot, step, q_from=q_from, k_at=k_at) | {"shape": x.shape}
            place["pairs"] = self.visits.pairs.part(block.s, warpgroup)
            return jnp.where(self.visits.allowed(block.mask_refs, self._ids(block, x.shape), **place), x, other)

        if not self.visits.is_masked:
            return x
        with self.visits.pairs.reading(block.s, warpgroup):
            return lax.cond(step.is_partial, masked, lambda x: x, x)

    # From S and dP to P and dS ----------------------------------------------------------------------------------------

    def _p_and_ds(self, block: Block, warpgroup, slot, step: Step, s, dp, *, q_from, k_at, sums_from, sum_part):
        """P after dropout, and dS by scale · qk; adds to the sums of the learned values.

        `sums_from` is where the keys of the tile stand among those of the block.
        """
        place = self._tile_place(block, slot, step, q_from=q_from, k_at=k_at)
        ids = self._ids(block, s.shape)
        with self.terms.arguments.reading(block.s, warpgroup):
            arguments = self.terms.arguments.parts(block.s, warpgroup)
        logits, by_qk, by_values = self.terms.with_derivatives(block.term_refs, s, ids, arguments, **place)
        p = jnp.exp2((logits + self._statistic(block, slot, 0, q_from, s.shape)) * LOG2_E)
        p = self._allowed_or(0.0, p, block, warpgroup, slot, step, q_from=q_from, k_at=k_at)
        weights, dp = self.terms.dropped(block.term_refs, p, dp, **place)
        if self.terms.dropout is not None:
            dp += self._statistic(block, slot, 1, q_from, s.shape)

        def times_p(derivative):
            # Infinite or NaN where the mask does not allow a pair, as of a function with poles.
            d = p * dp * derivative
            return d if self.terms.is_total else jnp.where(p == 0, 0, d)

        d_values = [times_p(by_values[position]) for position in self.terms.summed]
        self._add_up(block, step, d_values, pl.ds(sums_from, s.shape[0]), sum_part, k_at)
        return weights, times_p(by_qk)

    def _add_up(self, block: Block, step: Step, d_values, own_keys, sum_part, k_at) -> None:
        """Sums over the queries of a head, in shared memory; after its last step they go to global memory."""
        sums = [block.s.sums.at[index, sum_part, own_keys] for index in range(len(d_values))]

        @pl.when(step.is_first)
        def _():
            for own in sums:
                own[...] = plgpu.layout_cast(jnp.zeros(own.shape, jnp.float32), BY_ROW)

        for own, x in zip(sums, d_values):
            own[...] = plgpu.load(own, layout=BY_ROW) + x.sum(axis=1)

        @pl.when(step.is_last)
        def _():
            place = sum_part, block.b, step.head, pl.ds(k_at, self.s_shape[0])
            for own, destination in zip(sums, block.d_values):
                destination[place] = plgpu.load(own, layout=BY_ROW)
