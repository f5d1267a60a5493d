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
        between a backend that has none and a call that wants none, and as a cotangent.
    """

    out: Float[Array, "*B T N Hv"]
    lse: Float[Array, "*B N T"] | None


def delta_of(attended: Attended, cotangents: Attended) -> Float[Array, "B N T"]:
    """The sum of d_out * out less d_lse, in the dtype of lse: ds = p * (dp - delta).

    The cotangent of lse adds p * d_lse to ds, so it only shifts delta (FlashAttention-2, algorithm 2, line 4); it is
    None where nobody has one.
    """
    (out, lse), (d_out, d_lse) = attended, cotangents
    # A query that sees no key gives 0, and what is 0 has no share, also where its cotangent is NaN.
    product = jnp.where(out == 0, 0, d_out.astype(lse.dtype) * out.astype(lse.dtype))
    # A product and a sum: as a batched dot of vectors XLA may hand it to a matmul library.
    delta = product.sum(-1).swapaxes(1, 2)
    return delta if d_lse is None else delta - d_lse


def add_sink(lse: Float[Array, "*rows"], sink: Float[Array, "*#rows"]) -> Float[Array, "*rows"]:
    """The lse with one more logit in it; -inf where both are, with derivatives 0."""
    top = jax.lax.stop_gradient(finite(jnp.maximum(lse, sink)))
    total = jnp.exp(lse - top) + jnp.exp(sink - top)
    return jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))


def share_of_keys(lse: Float[Array, "*rows"], sink: Float[Array, "*#rows"]) -> Float[Array, "*rows"]:
    """The part of the softmax that goes to the keys, whose lse this is, and not to a sink beside them."""
    return jnp.exp(lse - finite(add_sink(lse, sink)))


def d_sinks(
    sinks: Float[Array, "#B N"], lse: Float[Array, "B N T"], delta: Float[Array, "B N T"]
) -> Float[Array, "#B N"]:
    """The cotangent of sinks, from that of the results by way of `delta_of`; lse is that with the sinks in it.

    With p = exp(sink - lse), lse has the derivative p and out, as the weight of every key shrinks, -p * out. So

        d_sink = sum over t of p * (d_lse - d_out · out) = -sum over t of p * delta

    where delta has the cotangent of lse in it already.
    """
    sink = sinks[..., None]
    # Where both are -inf the sink has no weight, and -inf - -inf would be NaN.
    p = jnp.where(sink == -jnp.inf, 0, jnp.exp(sink - finite(lse)))
    per_row = -(p * delta).sum(-1)
    return per_row if sinks.shape[0] == lse.shape[0] else per_row.sum(0, keepdims=True)


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
