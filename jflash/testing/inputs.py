"""Random inputs of a workload, the same on every device."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jflash.numerics.precision import compute_dtype
from jflash.testing.workloads import Workload


class Inputs(NamedTuple):
    """The numbers of one call, forward and backward.

    Attributes:
      q, k, v, bias: operands; bias is None where the workload has none.
      d_out, d_lse: cotangents, random and nowhere uniform: a uniform one hides permutations. d_lse is None for a call
        whose result is out alone.
      learned: the other operands that have a gradient, by name: "alibi_slopes", "sinks", and the floating ones of
        `score_args`, "score_arg_0" and so on.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K Hv"]
    bias: Float[Array, "#B #N #T #S"] | None
    d_out: Float[Array, "B T N Hv"]
    d_lse: Float[Array, "B N T"] | None
    learned: dict[str, Array]


def random_inputs(workload: Workload, *, seed: int = 0, lse: bool = True) -> Inputs:
    """Standard normal numbers, drawn by numpy so that they do not depend on the device; without `lse` no d_lse."""
    generator = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...], dtype) -> Array:
        return jnp.asarray(generator.standard_normal(shape), dtype)

    w = workload
    per_head = {"alibi_slopes": w.alibi_slopes, "sinks": w.sinks}
    return Inputs(
        q=normal((w.B, w.T, w.N, w.H), w.dtype),
        k=normal((w.B, w.S, w.K, w.H), w.dtype),
        v=normal((w.B, w.S, w.K, w.Hv), w.dtype),
        bias=None if w.bias is None else normal(w.bias, w.bias_dtype),
        d_out=normal((w.B, w.T, w.N, w.Hv), w.dtype),
        d_lse=normal((w.B, w.N, w.T), compute_dtype(np.dtype(w.dtype))) if lse else None,
        learned={name: normal(shape, np.float32) for name, shape in per_head.items() if shape is not None}
        | {f"score_arg_{i}": jnp.asarray(arg) for i, arg in enumerate(w.score_args) if arg.dtype == np.float32},
    )
