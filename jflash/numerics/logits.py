"""From q·k to the logit that the softmax sees. One formula, in this order: scale, bias, softcap, steps, mask.

    s = scale · (q · k) + bias
    s = c · tanh(s / c)            where a softcap c is given (Gemma 2, arXiv:2408.00118, section 2)
    s = s - slope · distance       where ALiBi is (Press et al., arXiv:2108.12409)
    s = f(s, b, n, q, k, ...)      where a score function is (FlexAttention, arXiv:2412.05496)
    s = -inf                       where the mask does not allow the pair

The two in the middle are steps of one kind. A bias of -inf masks its pair whatever comes after it: the formula of a
softcap alone would give the pair the weight of -c. So does -inf from a score function.
"""

from collections.abc import Callable

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
    steps: Callable[[Array, Array | None], Array] | None = None,
    allowed: Bool[Array, "..."] | None,
) -> Float[Array, "..."]:
    """The logit of each pair from its product `qk`; `allowed` None means that every pair attends.

    `steps` gets the logits, and which of them count or None for all, and gives others; it is not run on what does not
    count.

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
    if steps is not None:
        if bias is not None:
            counts = s != -jnp.inf
            allowed = counts if allowed is None else allowed & counts
        if allowed is not None:
            s = jnp.where(allowed, s, 0)
        s = steps(s, allowed)
    return s if allowed is None else jnp.where(allowed, s, -jnp.inf)
