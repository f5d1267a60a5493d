"""The kernel for Hopper that computes where the accumulators of the backward kernels start.

Those of S and dP start at -lse / unit and at -delta, and what all blocks add their parts of dQ to starts at 0. One pass
over out and d_out, a tile of 64 queries of one head for each block of threads: what memory can do, and a launch where
XLA has three (docs/decisions.md, 2026-11-30).
"""

import types
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jflash.backends.mosaic_gpu.primitives import (
    BY_ROW,
    CHUNK,
    WARPGROUP_ROWS,
    WGMMA,
    Pieces,
    end_stores,
    hopper_kernel,
    i32,
    load_pieces,
    smem_pieces,
    smem_tiles,
)
from jflash.numerics.online_softmax import Attended
from jflash.numerics.varying import result_struct
from jflash.problem import Problem

# Statistics are stored for whole tiles of queries, of any size.
_MULTIPLE = 128


class Start(NamedTuple):
    """Where accumulators start.

    Attributes:
      statistics: -lse / unit and -delta; -inf and 0 where a query sees nothing, and past the last one.
      dq: zeros, as many as `BackwardKernel` adds dq to; None where another kernel computes dq.
    """

    statistics: tuple[Float[Array, "B N padded_T"], Float[Array, "B N padded_T"]]
    dq: Float[Array, "BN padded_T columns"] | None


def start(
    problem: Problem, attended: Attended, cotangents: Attended, *, unit: float, dq_columns: int | None, like: Any
) -> Start:
    """Where the accumulators of one call start.

    Args:
      problem: of the call.
      attended: out, in 16 or 32 bits, and lse.
      cotangents: of both; that of lse may be None.
      unit: what the products are multiplied by to be logits.
      dq_columns: of the array that dq is added to; None for none.
      like: arrays that vary over the axes of a mesh as the results do.
    """
    return _Start(problem, attended, cotangents, unit, dq_columns, like)()


class _Start(NamedTuple):
    """The kernel: what is known when tracing, its body, the call."""

    problem: Problem
    attended: Attended
    cotangents: Attended
    unit: float
    dq_columns: int | None
    like: Any

    @property
    def padded_T(self) -> int:
        return self.problem.T + -self.problem.T % _MULTIPLE

    def __call__(self) -> Start:
        problem, rows = self.problem, WARPGROUP_ROWS
        (out, _), (d_out, d_lse) = self.attended, self.cotangents
        # -inf past the last query too: what such a row is in the results.
        statistics = [self._padded(x) for x in (self.attended.lse, d_lse) if x is not None]
        # Of both arrays pieces of the same columns, the wider one's in rows of 128 bytes.
        width = CHUNK * problem.dtype.itemsize // out.dtype.itemsize
        pieces = Pieces(-(-problem.Hv // width), width, False)
        of_rows = result_struct((problem.B, problem.N, self.padded_T), jnp.float32, self.like)
        sums = result_struct((problem.B * problem.N, self.padded_T, self.dq_columns or 0), jnp.float32, self.like)

        def kernel(out_g, d_out_g, *refs, **scratch):
            statistics_g, results = refs[: len(statistics)], refs[len(statistics) :]
            self._body(out_g, d_out_g, statistics_g, results, pieces, types.SimpleNamespace(**scratch))

        minus_lse, minus_delta, *dq = hopper_kernel(
            kernel,
            tiles=f"{rows} queries",
            out_type=[of_rows, of_rows, *([sums] if self.dq_columns else [])],
            blocks=problem.B * problem.N * (self.padded_T // rows),
            warpgroups=0,
            reduces=True,
            scratch_types={
                "out": plgpu.RefUnion(*smem_pieces((), rows, pieces, out.dtype)),
                "d_out": plgpu.RefUnion(*smem_pieces((), rows, pieces, d_out.dtype)),
                "rows": plgpu.SMEM((len(statistics), rows), jnp.float32),
                "full": plgpu.Barrier(num_arrivals=2 * pieces.count + len(statistics)),
                **({"zeros": smem_tiles((rows, CHUNK), np.dtype(np.float32))} if self.dq_columns else {}),
            },
            kernel_name="jflash_backward_start_sm90",
        )(out, d_out, *statistics)
        return Start((minus_lse, minus_delta), dq[0] if dq else None)

    def _padded(self, x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.padded_T - self.problem.T)), constant_values=-np.inf)

    def _body(self, out_g, d_out_g, statistics_g, results, pieces: Pieces, s: types.SimpleNamespace) -> None:
        # Heads side by side, as they lie in memory.
        block, heads, rows = lax.axis_index("block"), i32(self.problem.N), WARPGROUP_ROWS
        n, rest = lax.rem(block, heads), lax.div(block, heads)
        tiles = i32(self.padded_T // rows)
        b, q_at = lax.div(rest, tiles), lax.rem(rest, tiles) * rows
        own = pl.ds(q_at, rows)

        (out_tma, out), (d_out_tma, d_out) = s.out, s.d_out
        for source, smem in ((out_g, out_tma), (d_out_g, d_out_tma)):
            load_pieces(source, pieces.refs(smem), s.full, b=b, row=q_at, rows=rows, head=n)
        for index, source in enumerate(statistics_g):
            plgpu.copy_gmem_to_smem(source.at[b, n, own], s.rows.at[index], s.full)
        if self.dq_columns:
            s.zeros[...] = plgpu.layout_cast(jnp.zeros(s.zeros.shape, jnp.float32), WGMMA)
            plgpu.commit_smem()
            for column in range(0, self.dq_columns, CHUNK):
                target = results[2].at[b * self.problem.N + n, own, pl.ds(column, CHUNK)]
                plgpu.copy_smem_to_gmem(s.zeros, target)

        plgpu.barrier_wait(s.full)
        total = plgpu.layout_cast(jnp.zeros((rows, pieces.width), jnp.float32), WGMMA)
        for x_ref, dx_ref in zip(pieces.refs(out), pieces.refs(d_out)):
            x, dx = (plgpu.load(ref, layout=WGMMA).astype(jnp.float32) for ref in (x_ref, dx_ref))
            # As in `delta_of`: what is 0 has no share, also where its cotangent is NaN.
            total += jnp.where(x == 0, 0, x * dx)
        lse, *d_lse = (plgpu.load(s.rows.at[index], layout=BY_ROW) for index in range(len(statistics_g)))
        minus_delta = -total.sum(axis=1)
        for x in d_lse:
            minus_delta += x
        is_dead = lse == -jnp.inf
        results[0][b, n, own] = jnp.where(is_dead, -jnp.inf, lse * np.float32(-1 / self.unit))
        results[1][b, n, own] = jnp.where(is_dead, 0, minus_delta)
        if self.dq_columns:
            end_stores()
