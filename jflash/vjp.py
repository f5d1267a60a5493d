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

from jflash.backends.protocol import Backend, Operands, flatten, learned_arrays, name_residuals, problem_of
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
    if operands.functions:
        # Outside of what has a derivative of its own: from the cotangents of streams JAX makes those of arguments.
        sizes = {"T": problem.T, "S": problem.S, "dtype": compute_dtype(problem.dtype)}
        functions = tuple(streamed(function, **sizes) for function in operands.functions)
        operands = operands._replace(terms=operands.terms._replace(functions=functions))
    return _attention(backend, problem, tiles, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(backend: Backend, problem: Problem, tiles: Any, operands: Operands) -> Attended:
    return _forward(backend, problem, tiles, operands)


def _forward(backend: Backend, problem: Problem, tiles: Any, operands: Operands) -> Attended:
    def forward(operands: Operands) -> tuple[Array, ...]:
        return tuple(backend.forward(problem_of(problem, operands), tiles, operands))

    return name_residuals(Attended(*_batched_and_partitioned(backend.name, forward, operands, (), (), ("BTND", "BNT"))))


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
    operands, (out, lse), learned = residuals
    problem = dataclasses.replace(problem, learned=learned.flags)
    d_out, d_lse = map(_instantiate, cotangents)
    delta = delta_of(out, d_out, d_lse)

    def backward(operands: Operands, *statistics: Array) -> tuple[Array, ...]:
        *gradients, of_functions = backend.backward(problem_of(problem, operands), tiles, operands, *statistics)
        return *gradients, *of_functions

    statistics, axes = (lse, d_out, delta), ("BNT", "BTND", "BNT")
    wanted = learned_arrays(problem, operands)
    result_axes = "BTNH", "BSKH", "BSKD", *("BNS" if "S" in array_axes else "BN" for _, array_axes in wanted)
    dq, dk, dv, *of_functions = _batched_and_partitioned(
        backend.name, backward, operands, statistics, axes, result_axes
    )
    dq, dk, dv = (sum_to(gradient, operand) for gradient, operand in zip((dq, dk, dv), operands))
    of_functions = [
        sum_to(_sum_to_axes(gradient, array, array_axes), array)
        for gradient, (array, array_axes) in zip(of_functions, wanted, strict=True)
    ]
    return (Operands(q=dq, k=dk, v=dv, terms=_d_terms(problem, operands, of_functions, lse, delta), mask=None),)


_attention.defvjp(_save, _differentiate, symbolic_zeros=True)


def _instantiate(cotangent: Any) -> Array:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _sum_to_axes(gradient: Array, array: Array, axes: str) -> Array:
    """The cotangent of an array from that of each batch row and head, (B, N) or (B, N, S)."""
    sizes = dict(zip(axes, array.shape))
    over = tuple(i for i, axis in enumerate("BNS"[: gradient.ndim]) if sizes.get(axis, 1) == 1)
    return gradient.sum(over).reshape(array.shape)


def _d_terms(
    problem: Problem, operands: Operands, of_functions: list[Array], lse: Array, delta: Array
) -> ScoreTerms | None:
    """The cotangents of the terms, None where nobody asks for one."""
    if not any(problem.learned):
        return None
    flags = jax.tree.unflatten(jax.tree.structure(operands.terms), problem.learned)
    rest = iter(of_functions)
    nothing = jax.tree.map(lambda _: None, operands.terms)
    functions = jax.tree.map(lambda is_wanted: next(rest) if is_wanted else None, flags.functions)
    sinks = sum_to(d_sinks(operands.sinks, lse, delta), operands.sinks) if flags.sinks else None
    return nothing._replace(functions=functions, sinks=sinks)


def _batched_and_partitioned(
    name: str,
    kernel: Callable[..., tuple[Array, ...]],
    operands: Operands,
    extra: tuple[Array, ...],
    extra_axes: tuple[str, ...],
    result_axes: tuple[str, ...],
) -> tuple[Array, ...]:
    """`kernel(operands, *extra)` under the vmap rule and the partition rule; the first axis of each array is 1 or B.

    A derivative of it raises: that of the whole is stated above, and a derivative of that there is not.
    """
    arrays, axes, unflatten = flatten(operands)

    def on_device(*arrays: Array) -> tuple[Array, ...]:
        return kernel(unflatten(*arrays[: len(axes)]), *arrays[len(axes) :])

    @jax.custom_batching.custom_vmap
    def batched(*arrays: Array) -> tuple[Array, ...]:
        return partitioned(on_device, arrays, axes=axes + extra_axes, result_axes=result_axes)

    @batched.def_vmap
    def fold(size: int, is_mapped: list[bool], *arrays: Array):
        B = arrays[0].shape[1] if is_mapped[0] else arrays[0].shape[0]
        # Terms and mask may have a batch axis of size 1 and keep it; the others have one entry for each batch row.
        may_broadcast = [3 <= position < len(axes) for position in range(len(arrays))]
        folded = (
            array if not mapped and may and array.shape[0] == 1 else _fold_into_batch(array, mapped, size, B)
            for array, mapped, may in zip(arrays, is_mapped, may_broadcast)
        )
        results = batched(*folded)
        unfolded = tuple(result.reshape(size, B, *result.shape[1:]) for result in results)
        return unfolded, (True,) * len(unfolded)

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
