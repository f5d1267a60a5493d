"""The one custom_vjp, around every kernel.

From the outside in: `custom_vjp`, so that the backward kernel runs on the saved out and lse; a vmap rule that folds the
mapped axis into B, so that a kernel has one batch axis and no more; the partition rule of `parallel/partition.py`; the
kernel. Each layer sees the one below as a function of arrays.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash.backends.protocol import (
    Backend,
    Operands,
    flatten,
    gradient_axes,
    learned_arrays,
    name_residuals,
    problem_of,
)
from jflash.errors import UnsupportedError
from jflash.numerics.online_softmax import Attended, d_sinks, delta_of
from jflash.numerics.precision import compute_dtype
from jflash.numerics.varying import sum_to
from jflash.parallel.partition import partitioned
from jflash.problem import Problem
from jflash.scores import ScoreTerms, streamed


def kernel_attention(backend: Backend, problem: Problem, tiles: Any, operands: Operands) -> Attended:
    """Attention by a backend with a backward pass of its own (FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2).

    First-order reverse mode only. A second derivative raises UnsupportedError and names `backend="xla"`. JAX itself
    refuses forward mode ("can't apply forward-mode autodiff (jvp) to a custom_vjp function"); `backend="xla"` has it.
    """
    if operands.terms is not None:
        # Outside of what has a derivative of its own: from the cotangents of streams JAX makes those of arguments.
        lengths, dtype = {"T": problem.T, "S": problem.S}, compute_dtype(problem.dtype)
        functions = tuple(streamed(function, **lengths, dtype=dtype) for function in operands.functions)
        dropout = operands.dropout and operands.dropout.streamed(**lengths)
        operands = operands._replace(terms=operands.terms._replace(functions=functions, dropout=dropout))
    return _attention(backend, problem, tiles, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(backend: Backend, problem: Problem, tiles: Any, operands: Operands) -> Attended:
    return _forward(backend, problem, tiles, operands)


def _forward(backend: Backend, problem: Problem, tiles: Any, operands: Operands) -> Attended:
    def forward(operands: Operands) -> tuple[Array, ...]:
        return tuple(backend.forward(problem_of(problem, operands), tiles, operands))

    results = _batched_and_partitioned(backend.name, forward, operands, (), (), lambda operands: ("BTND", "BNT"), ())
    return name_residuals(Attended(*results))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Learned:
    """`Problem.learned`, among the residuals."""

    flags: tuple[bool, ...]


def _save(backend: Backend, problem: Problem, tiles: Any, differentiated: Operands) -> tuple[Attended, tuple]:
    # Each leaf says whether anybody asks for its cotangent.
    operands = jax.tree.map(lambda leaf: leaf.value, differentiated)
    terms = jax.tree.leaves(differentiated.terms)
    learned = tuple(leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.floating) for leaf in terms)
    problem = dataclasses.replace(problem, learned=learned)
    attended = _forward(backend, problem, tiles, operands)
    rounded = attended._replace(out=attended.out.astype(problem.dtype))
    return rounded, (operands, attended, _Learned(learned))


def _differentiate(backend: Backend, problem: Problem, tiles: Any, residuals: tuple, cotangents: Attended) -> tuple:
    operands, attended, learned = residuals
    problem = dataclasses.replace(problem, learned=learned.flags)
    has_d_lse = not isinstance(cotangents.lse, jax.custom_derivatives.SymbolicZero)
    cotangents = Attended(_instantiate(cotangents.out), cotangents.lse if has_d_lse else None)

    def backward(operands: Operands, out: Array, lse: Array, d_out: Array, d_lse: Array | None = None) -> tuple:
        own = problem_of(problem, operands), tiles, operands
        *gradients, values = backend.backward(*own, Attended(out, lse), Attended(d_out, d_lse))
        return *gradients, *values

    def axes_of_results(operands: Operands) -> tuple[str, ...]:
        learned = learned_arrays(problem, operands)
        return "BTNH", "BSKH", "BSKD", *(gradient_axes(array, axes) for array, axes in learned)

    results, axes = (*attended, *(x for x in cotangents if x is not None)), ("BTND", "BNT") * 2
    dq, dk, dv, *d_values = _batched_and_partitioned(
        backend.name, backward, operands, results, axes[: len(results)], axes_of_results, problem.learned
    )
    dq, dk, dv = (sum_to(gradient, operand) for gradient, operand in zip((dq, dk, dv), operands))
    d_values = [
        sum_to(_sum_like(gradient, array), array)
        for gradient, (array, _) in zip(d_values, learned_arrays(problem, operands), strict=True)
    ]
    d_terms = _d_terms(problem, operands, d_values, attended, cotangents)
    return (Operands(q=dq, k=dk, v=dv, terms=d_terms, mask=None),)


_attention.defvjp(_save, _differentiate, symbolic_zeros=True)


def _instantiate(cotangent: Any) -> Array:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _sum_like(gradient: Array, array: Array) -> Array:
    """The cotangent of an array from one that has entries for each batch row and head (`gradient_axes`)."""
    over = tuple(i for i, (size, own) in enumerate(zip(gradient.shape, array.shape, strict=True)) if size != own)
    return gradient.sum(over, keepdims=True).astype(array.dtype)


def _d_terms(
    problem: Problem, operands: Operands, d_values: list[Array], attended: Attended, cotangents: Attended
) -> ScoreTerms | None:
    """The cotangents of the terms, None where nobody asks for one."""
    if not any(problem.learned):
        return None
    flags = jax.tree.unflatten(jax.tree.structure(operands.terms), problem.learned)
    rest = iter(d_values)
    nothing = jax.tree.map(lambda _: None, operands.terms)
    bias, functions = jax.tree.map(lambda is_wanted: next(rest) if is_wanted else None, (flags.bias, flags.functions))
    if not flags.sinks:
        return nothing._replace(bias=bias, functions=functions)
    sinks = d_sinks(operands.sinks, attended.lse, delta_of(attended, cotangents))
    return nothing._replace(bias=bias, functions=functions, sinks=sum_to(sinks, operands.sinks))


def _batched_and_partitioned(
    name: str,
    kernel: Callable[..., tuple[Array, ...]],
    operands: Operands,
    extra: tuple[Array, ...],
    extra_axes: tuple[str, ...],
    result_axes: Callable[[Operands], tuple[str, ...]],
    learned: tuple[bool, ...],
) -> tuple[Array, ...]:
    """`kernel(operands, *extra)` under the vmap rule and the partition rule; the first axis of each array is 1 or B.

    `result_axes` says the axes of the results, as `partitioned` takes them; those after the third are of the terms that
    are `learned`. A derivative of it raises: that of the whole is stated above, and a derivative of that there is not.
    """
    arrays, axes, unflatten = flatten(operands)

    def on_device(*arrays: Array) -> tuple[Array, ...]:
        return kernel(unflatten(*arrays[: len(axes)]), *arrays[len(axes) :])

    @jax.custom_batching.custom_vmap
    def batched(*arrays: Array) -> tuple[Array, ...]:
        own_axes = result_axes(unflatten(*arrays[: len(axes)]))
        return partitioned(on_device, arrays, axes=axes + extra_axes, result_axes=own_axes)

    @batched.def_vmap
    def fold(size: int, is_mapped: list[bool], *arrays: Array):
        B = arrays[0].shape[1] if is_mapped[0] else arrays[0].shape[0]
        unmapped = (array[0] if mapped else array for array, mapped in zip(arrays[: len(axes)], is_mapped))
        own_axes = result_axes(unflatten(*unmapped))
        # Terms and mask may have a batch axis of size 1 and keep it; the others have one entry for each batch row. So
        # has a term whose cotangent a kernel sums over batch rows: each mapped call has its own.
        of_learned = (position for position, is_learned in enumerate(learned, start=3) if is_learned)
        summed = {position for position, own in zip(of_learned, own_axes[3:]) if own.startswith("b")}
        may_broadcast = [3 <= position < len(axes) and position not in summed for position in range(len(arrays))]
        folded = (
            array if not mapped and may and array.shape[0] == 1 else _fold_into_batch(array, mapped, size, B)
            for array, mapped, may in zip(arrays, is_mapped, may_broadcast)
        )
        results = batched(*folded)
        unfolded = (result.reshape(size, B, *result.shape[1:]) for result in results)
        shared = (x.sum(1, keepdims=True) if own.startswith("b") else x for x, own in zip(unfolded, own_axes))
        return tuple(shared), (True,) * len(results)

    @jax.custom_jvp
    def once(*arrays: Array) -> tuple[Array, ...]:
        return batched(*arrays)

    @once.defjvp
    def refuse(primals, tangents):
        reason = "its kernels are differentiated once, in reverse mode; a derivative of a gradient was asked for"
        hint = 'backend="xla" is differentiated by JAX, in every mode and order.'
        raise UnsupportedError({name: reason}, hint=hint)

    return once(*arrays, *extra)


def _fold_into_batch(array: Array, is_mapped: bool, size: int, B: int) -> Array:
    """(size, B or 1, ...) or, where not mapped, (B or 1, ...), as (size * B, ...)."""
    if not is_mapped:
        array = array[None]
    rest = array.shape[2:]
    return jnp.broadcast_to(array, (size, B, *rest)).reshape(size * B, *rest)
