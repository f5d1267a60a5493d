"""The online softmax: attention over some keys as a carry that more keys, or another carry, can be merged into.

Milakov and Gimelshein, arXiv:1805.02867, algorithm 3; FlashAttention-2, arXiv:2307.08691, section 3.1.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Attended(NamedTuple):
    """What attention gives.

    Attributes:
      out: (B, T, N, Hv), 0 for a query that sees no key.
      lse: (B, N, T), natural log of the sum of exponentials of the logits; -inf for a query that sees no key. None only
        between a backend that has none and a call that wants none.
    """

    out: Float[Array, "*B T N Hv"]
    lse: Float[Array, "*B N T"] | None


def delta_of(
    out: Float[Array, "B T N Hv"], d_out: Float[Array, "B T N Hv"], d_lse: Float[Array, "B N T"]
) -> Float[Array, "B N T"]:
    """The sum of d_out * out less d_lse, in the dtype of d_lse: ds = p * (dp - delta).

    The cotangent of lse adds p * d_lse to ds, so it only shifts delta (FlashAttention-2, algorithm 2, line 4). The
    function is its own inverse: from delta it gives d_lse.
    """
    # A product and a sum: as a batched dot of vectors XLA may hand it to a matmul library.
    return (d_out.astype(d_lse.dtype) * out.astype(d_lse.dtype)).sum(-1).swapaxes(1, 2) - d_lse


class Carry(NamedTuple):
    """Attention over the keys seen so far, of each query.

    Attributes:
      m: the largest logit, -inf where no key was seen. Only a shift: no derivative goes through it.
      l: the sum of `exp(s - m)`.
      acc: the sum of `exp(s - m) * v`.
    """

    m: Float[Array, "*rows"]
    l: Float[Array, "*rows"]
    acc: Float[Array, "*rows Hv"]


def finite(shift: Float[Array, "..."]) -> Float[Array, "..."]:
    """A shift to subtract from logits: 0 where no key was seen, so that `-inf - shift` is never NaN."""
    return jnp.where(shift == -jnp.inf, 0, shift)


def empty(rows: tuple[int, ...], Hv: int, dtype) -> Carry:
    """The carry of no keys: the neutral element of `merge`."""
    return Carry(jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, Hv), dtype))


def attend_to(s: Float[Array, "*rows keys"], weigh: Callable[[Array], Array]) -> Carry:
    """The carry of some keys, from their logits; `weigh(p)` sums their values with the weights `p`, shaped as `s`."""
    m = jax.lax.stop_gradient(s.max(-1))
    p = jnp.exp(s - finite(m)[..., None])
    return Carry(m, p.sum(-1), weigh(p))


def merge(a: Carry, b: Carry) -> Carry:
    """The carry over the keys of both; associative, and exact where one of them saw no key."""
    m = jax.lax.stop_gradient(jnp.maximum(a.m, b.m))
    shift = finite(m)
    scale_a, scale_b = (jnp.exp(jax.lax.stop_gradient(part.m) - shift) for part in (a, b))
    return Carry(m, a.l * scale_a + b.l * scale_b, a.acc * scale_a[..., None] + b.acc * scale_b[..., None])


def finish(carry: Carry) -> tuple[Float[Array, "*rows Hv"], Float[Array, "*rows"]]:
    """Output and lse of each query: (0, -inf) for one that saw no key, with derivatives 0 whatever the cotangent."""
    dead = carry.l == 0
    l = jnp.where(dead, 1, carry.l)
    out = jnp.where(dead[..., None], 0, carry.acc / l[..., None])
    lse = jnp.where(dead, -jnp.inf, finite(carry.m) + jnp.log(l))
    return out, lse
