"""From q·k to the logit that the softmax sees. One formula, in this order: scale, bias, softcap, mask.

    s = scale · (q · k) + bias
    s = c · tanh(s / c)            where a softcap c is given (Gemma 2, arXiv:2408.00118, section 2)
    s = -inf                       where the mask does not allow the pair

A bias of -inf masks its pair, also under a softcap, whose formula alone would give it the weight of -c.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def softcap(s: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """`cap * tanh(s / cap)`, but -inf stays -inf. Derivatives are finite everywhere, also at -inf."""
    masked = s == -jnp.inf
    capped = cap * jnp.tanh(jnp.where(masked, 0, s) / cap)
    return jnp.where(masked, -jnp.inf, capped)


def logits(
    qk: Float[Array, "..."],
    *,
    scale: float,
    bias: Float[Array, "..."] | None,
    cap: float | None,
    allowed: Bool[Array, "..."] | None,
) -> Float[Array, "..."]:
    """The logit of each pair from its product `qk`; `allowed` None means that every pair attends.

    No derivative of a masked pair is NaN, whatever `qk` and `bias` hold there.
    """
    s = qk * scale
    if bias is not None:
        s = s + bias
    if cap is not None:
        if allowed is not None:
            # Before the softcap too: its derivative at NaN is NaN, and 0 times that would reach every gradient.
            s = jnp.where(allowed, s, 0)
        s = softcap(s, cap)
    return s if allowed is None else jnp.where(allowed, s, -jnp.inf)
