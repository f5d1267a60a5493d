"""The specification: dense attention, one line of mathematics after the other. T x S memory; any device, any dtype.

It shares the mask's truth and the logit's formula with the other backends, and no other code with any of them.
"""

import jax.numpy as jnp

from jflash.backends.protocol import Backend, Operands, name_residuals
from jflash.hardware import Hardware
from jflash.numerics.logits import logits
from jflash.numerics.online_softmax import Attended
from jflash.numerics.precision import compute_dtype, matmul_precision
from jflash.problem import Problem


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
    score = logits(qk, scale=problem.scale, bias=bias, cap=problem.softcap, allowed=allowed)
    top = score.max(-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0, top)
    weight = jnp.exp(score - top)
    total = weight.sum(-1, keepdims=True)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    out = jnp.einsum("bnts,bsnd->btnd", weight / total, v, precision=precision)
    out = jnp.where(dead[..., 0].swapaxes(1, 2)[..., None], 0, out)
    lse = jnp.where(dead, -jnp.inf, top + jnp.log(total))[..., 0]
    return name_residuals(Attended(out.astype(problem.dtype), lse))


def _supports(problem: Problem, hardware: Hardware) -> None:
    return None


BACKEND = Backend(name="reference", supports=_supports, forward=_forward)
