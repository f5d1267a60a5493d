"""The backward pass on Hopper: what the kernels need beforehand, which of them run, what is left to do afterwards."""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jflash.backends.mosaic_gpu.primitives import CHUNK, chunks
from jflash.backends.mosaic_gpu.sm90.backward_narrow import NarrowBackward
from jflash.backends.mosaic_gpu.tiles import HopperTiles
from jflash.backends.protocol import Gradients, Operands
from jflash.masks.live import every_query_sees_a_key, zero_dead_keys
from jflash.problem import Problem

# Statistics are stored for whole tiles of queries, of any size.
_STATISTICS_MULTIPLE = 128


def backward(
    problem: Problem,
    tiles: HopperTiles,
    operands: Operands,
    lse: Float[Array, "B N T"],
    d_out: Float[Array, "B T N Hv"],
    delta: Float[Array, "B N T"],
) -> Gradients:
    """dq, dk and dv from the saved lse; see the kernels."""
    T, S, dtype = problem.T, problem.S, problem.dtype
    q, k, v, _, mask = operands
    # 0 times what a dead key or a dead query holds must be 0.
    k, v = (zero_dead_keys(x, mask, T=T, S=S) for x in (k, v))
    if not every_query_sees_a_key(mask, T=T, S=S):
        live = (lse > -jnp.inf).swapaxes(1, 2)[..., None]
        q, d_out = jnp.where(live, q, 0), jnp.where(live, d_out, 0)
    operands = Operands(q, k, v, None, mask)
    rows = _statistics(problem, lse, delta)
    with jax.enable_x64(False):
        kernel = NarrowBackward(problem, tiles, operands, with_dq=True)
        # Whole tiles and chunks, so that one TMA adds a part of dq.
        shape = (problem.B * problem.N, rows.shape[-1], chunks(problem.H) * CHUNK)

        def accumulate(refs):
            dq_ref, dk_ref, dv_ref = refs
            dk_ref[...], dv_ref[...] = kernel(rows, d_out, dq_ref)

        zeros = jnp.zeros(shape, jnp.float32), jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
        dq, dk, dv = pl.run_state(accumulate)(zeros)
    dq = dq.reshape(problem.B, problem.N, *dq.shape[1:])[:, :, :T, : problem.H].swapaxes(1, 2)
    return Gradients((dq * np.float32(problem.scale)).astype(dtype), dk, dv)


def _statistics(problem: Problem, lse: Array, delta: Array) -> Float[Array, "B N 2 rows"]:
    """-lse / scale and -delta, where the accumulators of S and dP start; -inf and 0 where no query sees anything."""
    dead = lse == -jnp.inf
    start = jnp.where(dead, -jnp.inf, lse * np.float32(-1 / problem.scale))
    d_start = jnp.where(dead, 0, -delta)
    padding = (0, 0), (0, 0), (0, -problem.T % _STATISTICS_MULTIPLE)
    start = jnp.pad(start, padding, constant_values=-np.inf)
    return jnp.stack([start, jnp.pad(d_start, padding)], axis=2)
