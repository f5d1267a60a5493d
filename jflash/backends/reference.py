"""The specification: dense attention, one line of mathematics after the other. T x S memory; any device, any dtype.

It shares the mask's truth and the logit's formula with the other backends, and no other code with any of them.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash.backends.protocol import Backend, Operands, name_residuals
from jflash.hardware import Hardware
from jflash.numerics.logits import logits
from jflash.numerics.online_softmax import Attended
from jflash.numerics.precision import compute_dtype, matmul_precision
from jflash.problem import Problem
from jflash.scores import ScoreFunction, at_pairs


def _forward(problem: Problem, tiles: None, operands: Operands) -> Attended:
    dtype, precision = compute_dtype(problem.dtype), matmul_precision(problem.dtype)
    q, k, v = (operand.astype(dtype) for operand in operands[:3])
    bias = None if operands.bias is None else operands.bias.astype(dtype)

    index = (jnp.arange(size, dtype=jnp.int32) for size in (problem.B, problem.N, problem.T, problem.S))
    b, n, t, s = jnp.ix_(*index)
    allowed = operands.mask.allowed(t, s, b=b, n=n)
    allowed = jnp.broadcast_to(allowed, (problem.B, problem.N, problem.T, problem.S))

    # A key that no query of its batch row sees may hold anything, and so may a query that sees no key.
    live_key = allowed.any((1, 2))[:, :, None, None]
    live_query = allowed.any((1, 3))[:, :, None, None]
    q, k, v = jnp.where(live_query, q, 0), jnp.where(live_key, k, 0), jnp.where(live_key, v, 0)
    k, v = (jnp.repeat(operand, problem.group, axis=2) for operand in (k, v))

    qk = jnp.einsum("btnh,bsnh->bnts", q, k, precision=precision)
    score = logits(
        qk,
        scale=problem.scale,
        bias=bias,
        cap=problem.softcap,
        steps=functools.partial(_steps, operands.functions, t, s) if operands.functions else None,
        allowed=allowed,
    )
    # A sink is one more key of its head, without a value.
    sink = jnp.full((1, 1), -jnp.inf, dtype) if operands.sinks is None else operands.sinks
    sink = sink[..., None, None]
    dead = score.max(-1, keepdims=True) == -jnp.inf
    top = jnp.maximum(score.max(-1, keepdims=True), sink)
    # What is subtracted before `exp` has no influence, and so no derivative. JAX's derivative of a maximum looks for
    # the element that is equal to it, and divides by 0 where the compiler has computed that element a second time,
    # rounded otherwise.
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    weight = jnp.exp(score - top)
    total = weight.sum(-1, keepdims=True) + jnp.exp(sink - top)
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    p = weight / total
    if operands.dropout is not None:
        p = operands.dropout.apply(p, t, s, place=functools.partial(_place, t, s))
    out = jnp.einsum("bnts,bsnd->btnd", p, v, precision=precision)
    out = jnp.where(dead[..., 0].swapaxes(1, 2)[..., None], 0, out)
    lse = jnp.where(nothing, -jnp.inf, top + jnp.log(total))[..., 0]
    return name_residuals(Attended(out.astype(problem.out_dtype), lse))


def _steps(functions: tuple[ScoreFunction, ...], t: Array, s: Array, score: Array, counts: Array | None) -> Array:
    """The score functions, one after the other, on logits (B, N, T, S)."""
    for function in functions:
        score = function.apply(score, t, s, allowed=counts, place=functools.partial(_place, t, s))
    return score


def _place(t: Array, s: Array, array: Array, axes: str) -> Array:
    """What an array by axes has at all pairs, against (B, N, T, S)."""
    by_head = array if axes.startswith("BN") else array[:, None]
    return at_pairs(by_head, axes.lstrip("BN"), q=t[0, 0], k=s[0, 0], S=s.shape[-1])


def _supports(problem: Problem, hardware: Hardware) -> None:
    return None


BACKEND = Backend(name="reference", supports=_supports, forward=_forward)
