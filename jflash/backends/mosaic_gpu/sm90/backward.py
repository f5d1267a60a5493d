"""The backward pass on Hopper: what the kernels need beforehand, which of them run, what is left to do afterwards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jflash.backends.mosaic_gpu import argument_tiles
from jflash.backends.mosaic_gpu.primitives import WARPGROUP_ROWS, from_zeros
from jflash.backends.mosaic_gpu.sm90.backward_common import WARPGROUPS, BackwardKernel
from jflash.backends.mosaic_gpu.sm90.backward_diagonals import d_diagonals
from jflash.backends.mosaic_gpu.sm90.backward_dq import dq
from jflash.backends.mosaic_gpu.sm90.backward_narrow import NarrowBackward
from jflash.backends.mosaic_gpu.sm90.backward_pairs import d_pairs
from jflash.backends.mosaic_gpu.sm90.backward_rows import d_rows
from jflash.backends.mosaic_gpu.sm90.backward_wide import WideBackward
from jflash.backends.mosaic_gpu.tile_values import squeezed
from jflash.backends.mosaic_gpu.tiles import HopperTiles
from jflash.backends.protocol import Gradients, Operands, gradient_axes, learned_arrays
from jflash.masks.live import every_query_sees_a_key, zero_dead_keys
from jflash.masks.mask import Value
from jflash.numerics.varying import like
from jflash.problem import Problem
from jflash.scores import ScoreTerms

# The widest head of which one warpgroup holds dK and dV of 64 keys.
NARROW = 128
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
    T, S = problem.T, problem.S
    q, k, v, terms, mask = operands
    # 0 times what a dead key or a dead query holds must be 0.
    k, v = zero_dead_keys(k, v, mask=mask, T=T, S=S)
    if not every_query_sees_a_key(mask, T=T, S=S):
        # A query whose keys, beside its sink, do not show in the lse has no gradient that would show.
        least = -jnp.inf if operands.sinks is None else operands.sinks[..., None]
        live = lse > least
        terms = terms and _zero_dead_queries(terms, live)
        live = live.swapaxes(1, 2)[..., None]
        q, d_out = jnp.where(live, q, 0), jnp.where(live, d_out, 0)
    operands = operands._replace(q=q, k=k, v=v, terms=terms)
    is_wide = max(problem.H, problem.Hv) > NARROW or tiles.backward.block_k < WARPGROUPS * WARPGROUP_ROWS
    # Adding up in an order that changes between runs is what the other kernel for dq is without.
    kernel = (WideBackward if is_wide else NarrowBackward)(problem, tiles, operands, with_dq=not problem.deterministic)
    statistics = _statistics(problem, lse, delta, unit=kernel.terms.unit)
    # Sizes and indices are 32 bits in the kernels; with x64 on, plain numbers would become 64.
    with jax.enable_x64(False):
        if problem.deterministic:
            d_q, (d_k, d_v, *sums) = dq(problem, tiles, operands, statistics, d_out), kernel(statistics, d_out, None)
        else:
            d_q, d_k, d_v, *sums = _with_dq(kernel, problem, operands, statistics, d_out)
        learned = learned_arrays(problem, operands)
        own = problem, operands, statistics, d_out
        of_bias = [d_pairs(*own, shared=operands.bias.shape[:2])] if kernel.terms.learns_pairs else []
        arguments = [leaf for leaf in learned[len(of_bias) :] if _is_on_tiles(*leaf)]
        of_arguments = [
            (d_diagonals if axes == "BND" else d_pairs)(*own, shared=array.shape[:2], by_value=by_value)
            for (array, axes), by_value in zip(arguments, kernel.terms.learned_arguments, strict=True)
        ]
        of_queries = [d_rows(*own, by_value=by_value) for by_value in kernel.terms.summed_over_keys]
    gradients = Gradients(d_q, d_k, d_v, _values(problem, learned, of_bias, of_arguments, of_queries, sums))
    # Inside `jax.shard_map` Pallas loses over which axes the results of Mosaic kernels vary (JAX 0.11.2).
    return like(gradients, operands)


def _with_dq(
    kernel: BackwardKernel, problem: Problem, operands: Operands, statistics: tuple[Array, Array], d_out: Array
) -> tuple[Array, ...]:
    zeros = jnp.zeros((problem.B * problem.N, statistics[0].shape[-1], kernel.dq_columns), jnp.float32)
    sums, *rest = from_zeros(lambda dq_ref: kernel(statistics, d_out, dq_ref), zeros, kernel.out_types)
    sums = sums.reshape(problem.B, problem.N, *sums.shape[1:])[:, :, : problem.T, : problem.H].swapaxes(1, 2)
    return (sums * np.float32(problem.scale)).astype(problem.dtype), *rest


def _zero_dead_queries(terms: ScoreTerms, live: Bool[Array, "B N T"]) -> ScoreTerms:
    """The terms, with 0 for floating numbers of queries that see no key."""

    def of(array: Array, axes: str) -> Array:
        if not jnp.issubdtype(array.dtype, jnp.floating) or squeezed(Value(array, axes)).axes != "BNT":
            return array
        return jnp.where(live[..., None] if axes == "BNTS" else live, array, 0)

    functions = tuple(
        dataclasses.replace(function, arrays=tuple(map(of, function.arrays, function.axes)))
        for function in terms.functions
    )
    return terms._replace(bias=None if terms.bias is None else of(terms.bias, "BNTS"), functions=functions)


def _is_on_tiles(array: Array, axes: str) -> bool:
    """Whether an array of the functions is one of the `ArgumentTiles`."""
    return squeezed(Value(array, axes)).axes in argument_tiles.AXES


def _values(
    problem: Problem,
    learned: list[tuple[Array, str]],
    of_bias: list[Array],
    of_arguments: list[Array],
    of_queries: list[Float[Array, "B N T"]],
    sums: list[Float[Array, "parts B N padded_S"]],
) -> tuple[Array, ...]:
    """`Gradients.values`, from those of a bias of pairs, which comes first, those of arguments that are on tiles, those
    that are sums over keys, and parts of the sums over queries that all others are.
    """
    sizes = {"B": problem.B, "N": problem.N, "T": problem.T, "S": problem.S}
    arguments, queries, sums = iter(of_arguments), iter(of_queries), iter(sums)

    def of(array: Array, axes: str) -> Array:
        if _is_on_tiles(array, axes):
            return next(arguments)
        axes = gradient_axes(array, axes)
        if "T" in axes:
            x = next(queries)
        else:
            x = next(sums)[..., : problem.S].sum(0)
            x = x if "S" in axes else x.sum(-1)
        return x.reshape([sizes.get(axis, 1) for axis in axes])

    return *of_bias, *(of(*leaf) for leaf in learned[len(of_bias) :])


def _statistics(problem: Problem, lse: Array, delta: Array, *, unit: float) -> tuple[Array, Array]:
    """-lse / unit and -delta, (B, N, T rounded up), where the accumulators of S and dP start.

    They are -inf and 0 where no query sees anything. Two arrays: XLA computes one of both, and delta with it, in
    0.24 ms instead of 0.1 (H200, T=16384, N=16, 2026-11-30).
    """
    dead = lse == -jnp.inf
    start = jnp.where(dead, -jnp.inf, lse * np.float32(-1 / unit))
    d_start = jnp.where(dead, 0, -delta)
    padding = (0, 0), (0, 0), (0, -problem.T % _STATISTICS_MULTIPLE)
    return jnp.pad(start, padding, constant_values=-np.inf), jnp.pad(d_start, padding)
