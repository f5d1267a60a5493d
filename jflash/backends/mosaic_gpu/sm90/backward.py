"""The backward pass on Hopper: what the kernels need beforehand, which of them run, what is left to do afterwards."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jflash.backends.mosaic_gpu import argument_tiles
from jflash.backends.mosaic_gpu.primitives import WARPGROUP_ROWS, from_zeros
from jflash.backends.mosaic_gpu.sm90.backward_common import WARPGROUPS, BackwardKernel
from jflash.backends.mosaic_gpu.sm90.backward_diagonals import d_diagonals
from jflash.backends.mosaic_gpu.sm90.backward_dq import dq
from jflash.backends.mosaic_gpu.sm90.backward_narrow import NarrowBackward
from jflash.backends.mosaic_gpu.sm90.backward_pairs import d_pairs
from jflash.backends.mosaic_gpu.sm90.backward_rows import d_rows
from jflash.backends.mosaic_gpu.sm90.backward_start import start
from jflash.backends.mosaic_gpu.sm90.backward_wide import WideBackward
from jflash.backends.mosaic_gpu.tile_values import squeezed
from jflash.backends.mosaic_gpu.tiles import HopperTiles
from jflash.backends.protocol import Gradients, Operands, gradient_axes, learned_arrays
from jflash.masks.live import every_query_sees_a_key, zero_dead_keys
from jflash.masks.mask import Value
from jflash.numerics.online_softmax import Attended
from jflash.numerics.varying import like
from jflash.problem import Problem

# The widest head of which one warpgroup holds dK and dV of 64 keys.
NARROW = 128


def backward(
    problem: Problem,
    tiles: HopperTiles,
    operands: Operands,
    attended: Attended,
    cotangents: Attended,
) -> Gradients:
    """dq, dk and dv from the saved out and lse; see the kernels."""
    T, S = problem.T, problem.S
    q, k, v, _, mask = operands
    d_out = cotangents.out
    # 0 times what a dead key or a dead query holds must be 0.
    k, v = zero_dead_keys(k, v, mask=mask, T=T, S=S)
    if not every_query_sees_a_key(mask, T=T, S=S):
        # A query whose keys, beside its sink, do not show in the lse has no gradient that would show.
        least = -jnp.inf if operands.sinks is None else operands.sinks[..., None]
        live = (attended.lse > least).swapaxes(1, 2)[..., None]
        q, d_out = jnp.where(live, q, 0), jnp.where(live, d_out, 0)
    operands = operands._replace(q=q, k=k, v=v)
    is_wide = max(problem.H, problem.Hv) > NARROW or tiles.backward.block_k < WARPGROUPS * WARPGROUP_ROWS
    # Adding up in an order that changes between runs is what the other kernel for dq is without.
    kernel = (WideBackward if is_wide else NarrowBackward)(problem, tiles, operands, with_dq=not problem.deterministic)
    # Sizes and indices are 32 bits in the kernels; with x64 on, plain numbers would become 64.
    with jax.enable_x64(False):
        dq_columns = None if problem.deterministic else kernel.dq_columns
        of_both = problem, attended, cotangents
        statistics, zeros = start(*of_both, unit=kernel.terms.unit, dq_columns=dq_columns, like=operands)
        if zeros is None:
            d_q, (d_k, d_v, *sums) = dq(problem, tiles, operands, statistics, d_out), kernel(statistics, d_out, None)
        else:
            d_q, d_k, d_v, *sums = _with_dq(kernel, problem, statistics, d_out, zeros)
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
    kernel: BackwardKernel, problem: Problem, statistics: tuple[Array, Array], d_out: Array, zeros: Array
) -> tuple[Array, ...]:
    sums, *rest = from_zeros(lambda dq_ref: kernel(statistics, d_out, dq_ref), zeros, kernel.out_types)
    sums = sums.reshape(problem.B, problem.N, *sums.shape[1:])[:, :, : problem.T, : problem.H].swapaxes(1, 2)
    return (sums * np.float32(problem.scale)).astype(problem.dtype), *rest


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
