"""Rotary position embedding, and what stretches it to longer contexts."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflash.errors import ArgumentError, ShapeError
from jflash.problem import real


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """All positions divided by `factor` (position interpolation, arXiv:2306.15595, equation 4).

    Args:
      factor: how many times longer than in training the context is.
    """

    factor: float
    amplitude = 1.0

    def __post_init__(self):
        _check_factor(self.factor)

    def frequencies(self, H: int, base: float) -> np.ndarray:
        return _plain(H, base) / self.factor


@dataclasses.dataclass(frozen=True)
class NTKScaling:
    """A larger base, so that the slowest pair turns `factor` times slower and the fastest as before.

    The base is multiplied by `factor ** (H / (H - 2))` ("NTK-aware" scaling, u/bloc97, 2023; arXiv:2309.00071,
    definition 1).

    Args:
      factor: how many times longer than in training the context is.
    """

    factor: float
    amplitude = 1.0

    def __post_init__(self):
        _check_factor(self.factor)

    def frequencies(self, H: int, base: float) -> np.ndarray:
        if H < 4:
            raise ShapeError("x", found=f"head dim {H}", wanted="a head dim of at least 4 for NTKScaling")
        return _plain(H, base * self.factor ** (H / (H - 2)))


@dataclasses.dataclass(frozen=True)
class YaRN:
    """Slow pairs are slowed down by `factor`, fast ones stay, with a ramp between them (YaRN, arXiv:2309.00071).

    A pair is fast if it turns at least `beta_fast` times in `original_length` positions, slow below `beta_slow`. The
    ramp is linear in the index of the pair and its ends are whole pairs, as in the authors' code, by which models are
    trained (the paper's equation 18 has it linear in the number of turns). Queries and keys are multiplied by
    `amplitude`, logits by its square (equation 22: 0.1 ln(factor) + 1).

    Args:
      factor: how many times longer than in training the context is.
      original_length: the length of the context in training.
      beta_fast, beta_slow: turns, as above.
      amplitude: None for that of the paper.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float | None = None

    def __post_init__(self):
        _check_factor(self.factor)
        for name in ("original_length", "beta_fast", "beta_slow"):
            real(name, getattr(self, name), positive=True)
        if self.beta_fast <= self.beta_slow:
            raise ArgumentError("beta_fast", found=repr(self.beta_fast), wanted=f"more than beta_slow={self.beta_slow}")
        if self.amplitude is None:
            object.__setattr__(self, "amplitude", 0.1 * math.log(self.factor) + 1.0)
        real("amplitude", self.amplitude, positive=True)

    def frequencies(self, H: int, base: float) -> np.ndarray:
        def pair_that_turns(times: float) -> float:
            # base ** (-2 i / H) * original_length = 2 pi times, solved for i
            return H * math.log(self.original_length / (2 * math.pi * times)) / (2 * math.log(base))

        first = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(self.beta_slow)), H - 1)
        slowness = np.clip((np.arange(H // 2) - first) / max(last - first, 0.001), 0, 1)
        plain = _plain(H, base)
        return plain / self.factor * slowness + plain * (1 - slowness)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoPE:
    """Rotary position embedding (RoFormer, arXiv:2104.09864, equation 34).

    Pair i of a head, elements i and i + H / 2, turns by `position * base ** (-2 i / H)` radians: the halves of
    GPT-NeoX and Llama checkpoints in transformers. (Meta's own Llama and RoFormer pair elements 2 i and 2 i + 1; a
    permutation of the columns of the projections takes one to the other.)

    Angles are float32, float64 for float64 inputs; x is rotated in that dtype and rounded once.

    Args:
      base: positive; longer contexts take a larger one.
      scaling: `LinearScaling`, `NTKScaling`, `YaRN`, or None.

    Raises:
      ArgumentError: base is no number above 1.

    Example:
      >>> import jax
      >>> from jflash.nn import RoPE, YaRN
      >>> x = jax.random.normal(jax.random.key(0), (2, 5, 4, 64))
      >>> rope = RoPE(base=500_000, scaling=YaRN(factor=8, original_length=4096))
      >>> rope(x, np.arange(5)).shape
      (2, 5, 4, 64)
    """

    base: float = 10_000.0
    scaling: LinearScaling | NTKScaling | YaRN | None = None

    def __post_init__(self):
        if real("base", self.base) <= 1:
            raise ArgumentError("base", found=repr(self.base), wanted="a number above 1")

    def frequencies(self, H: int) -> np.ndarray:
        """Radians per position of each pair, (H / 2,), float64."""
        return _plain(H, self.base) if self.scaling is None else self.scaling.frequencies(H, self.base)

    def __call__(self, x: Float[Array, "*B T N H"], positions: Int[Array, "*B T"]) -> Float[Array, "*B T N H"]:
        """`x` turned by its positions, (T,) or (B, T), in the dtype of x.

        Raises:
          ShapeError: H is odd, or positions do not fit x.
        """
        H = x.shape[-1]
        if H % 2:
            raise ShapeError("x", found=f"head dim {H}", wanted="an even head dim: elements turn in pairs")
        shape = jnp.shape(positions)
        if not shape or shape[-1] != x.shape[-3] or shape not in (x.shape[-3:-2], x.shape[:-2], (1, x.shape[-3])):
            wanted = f"{x.shape[-3:-2]}, or {x.shape[:-2]} for positions of each batch row"
            raise ShapeError("positions", found=f"shape {shape}", wanted=wanted)
        dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        angles = jnp.asarray(positions).astype(dtype)[..., None, None] * self.frequencies(H).astype(dtype)
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude
        cos, sin = jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude
        first, second = jnp.split(x.astype(dtype), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _plain(H: int, base: float) -> np.ndarray:
    return float(base) ** (-np.arange(0, H, 2) / H)


def _check_factor(factor: float) -> None:
    if real("factor", factor) < 1:
        raise ArgumentError("factor", found=repr(factor), wanted="at least 1")
