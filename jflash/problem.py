"""Problem: the static record of one call, and every check of its arguments.

Dimension letters as in `jax.nn.dot_product_attention`: B batch, T query length, S key length, N query heads,
K key/value heads, H head dim, Hv value head dim.
"""

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jflash.errors import ArgumentError, DtypeError, ShapeError
from jflash.masks.mask import UNLIMITED, MaskStructure
from jflash.scores import ScoreTerms
from jflash.structure import Structure

DTYPES = tuple(np.dtype(dtype) for dtype in (jnp.bfloat16, np.float16, np.float32, np.float64))

_SHAPES = {"q": "(B, T, N, H)", "k": "(B, S, K, H)", "v": "(B, S, K, Hv)"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """All that is known of a call without its numbers: shapes, dtype, scale, softcap, the structure of the mask.

    Hashable, so that it can be a static argument of `jax.jit` and a key of the tuning tables.

    Attributes:
      B, T, S, N, K, H, Hv: the dimensions.
      dtype: of q, k, v and out.
      scale: factor of q·k.
      softcap: cap of the logits, or None.
      mask: the mask after `bind`, without the contents of its arrays.
      bias: shape (each axis 1 or that of (B, N, T, S)) and dtype of the bias, or None.
      functions: the steps from logit to logit, a tuple of `ScoreFunction`, without the contents of their arrays; or
        None.
      sinks: shape (B or 1, N) and dtype of the sinks, or None.
      dropout_rate: the part of the weights that is dropped; 0 for none.
      learned: of each array of the terms, in the order of the leaves, whether its cotangent is wanted of a backend
        with a `backward`; empty where none is.
      deterministic: the gradients must be bit-equal between runs of the compiled program.
      lse: the lse is part of the result, and differentiable; otherwise out alone is.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    dtype: np.dtype
    scale: float
    softcap: float | None
    mask: MaskStructure
    bias: tuple[tuple[int, ...], np.dtype] | None
    functions: Structure | None = None
    sinks: tuple[tuple[int, ...], np.dtype] | None = None
    dropout_rate: float = 0.0
    learned: tuple[bool, ...] = ()
    deterministic: bool
    lse: bool

    @property
    def group(self) -> int:
        """Query heads that share one key/value head: query head n reads key/value head n // group."""
        return self.N // self.K

    @property
    def out_dtype(self) -> np.dtype:
        """The dtype of out as a backend gives it: float32 or wider where sums of `ds` over many keys are wanted.

        The backward pass takes `delta` from out. What 16 bits leave of it shifts all `ds` of a query alike: little in
        dq and dk, but summed over keys and queries into the cotangent of a slope or a sink it was 5 % of it, and beyond
        the error rule (2026-11-30, T=90).
        """
        # Of a bias of pairs the cotangent is `ds` itself, and no sum over keys.
        summed = self.learned[1:] if self.has_bias_of_pairs else self.learned
        return np.promote_types(self.dtype, np.float32) if any(summed) else self.dtype

    @property
    def has_bias_of_pairs(self) -> bool:
        """Whether the bias has a number for each pair of query and key, not just for each of the one or the other."""
        return self.bias is not None and min(self.bias[0][2:]) > 1

    @property
    def is_empty(self) -> bool:
        """There is no pair of query and key: the result is known, and nothing is launched."""
        return 0 in (self.B, self.T, self.S, self.N)

    def __str__(self) -> str:
        parts = [f"B={self.B} T={self.T} S={self.S} N={self.N} K={self.K} H={self.H} Hv={self.Hv} {self.dtype}"]
        parts.append(f"mask={self.mask.mask}")
        if self.bias is not None:
            parts.append(f"bias={self.bias[1]}{list(self.bias[0])}")
        if self.softcap is not None:
            parts.append(f"softcap={self.softcap:g}")
        if self.functions is not None:
            parts += [f"score={function}" for function in self.functions.value]
        if self.sinks is not None:
            parts.append(f"sinks={self.sinks[1]}{list(self.sinks[0])}")
        if self.dropout_rate:
            parts.append(f"dropout={self.dropout_rate:g}")
        if self.deterministic:
            parts.append("deterministic")
        if self.lse:
            parts.append("lse")
        return " ".join(parts)


def terms_of(terms: ScoreTerms | None) -> dict[str, Any]:
    """The fields of a `Problem` that say what the terms are."""

    def described(array: Any) -> tuple[tuple[int, ...], np.dtype] | None:
        return None if array is None else (tuple(array.shape), np.dtype(array.dtype))

    bias, functions, sinks, dropout = terms or ScoreTerms()
    return {
        "bias": described(bias),
        "functions": Structure.of(functions) if functions else None,
        "sinks": described(sinks),
        "dropout_rate": dropout.rate if dropout else 0.0,
    }


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Checks ranks, dimensions and dtypes of q, k and v against each other.

    Raises:
      ShapeError: a rank, or a size that differs from its counterpart's.
      DtypeError: a dtype that is no float of 16, 32 or 64 bits, or dtypes that differ.
    """
    arrays = {"q": q, "k": k, "v": v}
    for name, array in arrays.items():
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise ArgumentError(name, found=type(array).__name__, wanted=f"an array of shape {_SHAPES[name]}")
        if len(array.shape) not in (3, 4) or len(array.shape) != len(q.shape):
            wanted = f"rank 4, {_SHAPES[name]}, or rank 3 without B" + ("" if name == "q" else ", the same rank as `q`")
            raise ShapeError(name, found=f"shape {array.shape}", wanted=wanted)
    for name, array in arrays.items():
        if np.dtype(array.dtype) not in DTYPES:
            wanted = f"one of {', '.join(map(str, DTYPES))}"
            raise DtypeError(name, found=f"dtype {array.dtype}", wanted=wanted)
        if array.dtype != q.dtype:
            wanted = f"dtype {q.dtype}, as `q` has"
            raise DtypeError(name, found=f"dtype {array.dtype}", wanted=wanted, hint="Cast on the caller's side.")
        if array.dtype == np.float64 and not jax.config.jax_enable_x64:
            hint = 'Switch on 64 bits with jax.config.update("jax_enable_x64", True), or cast to float32.'
            raise DtypeError(name, found="dtype float64", wanted="a dtype that JAX has with x64 off", hint=hint)

    (*batch, T, N, H), (*k_batch, S, K, k_H), (*v_batch, v_S, v_K, Hv) = q.shape, k.shape, v.shape
    for name, found, wanted in (("k", k_batch, batch), ("v", v_batch, batch)):
        if found != wanted:
            raise ShapeError(
                name, found=f"B={found[0]} in shape {arrays[name].shape}", wanted=f"B={wanted[0]}, as `q` has"
            )
    if k_H != H:
        raise ShapeError("k", found=f"H={k_H} in shape {k.shape}", wanted=f"H={H}, as `q` has")
    if (v_S, v_K) != (S, K):
        raise ShapeError("v", found=f"S={v_S}, K={v_K} in shape {v.shape}", wanted=f"S={S}, K={K}, as `k` has")
    if (N % K if K else N) != 0:
        wanted = f"a number of key/value heads that divides the N={N} query heads"
        raise ShapeError("k", found=f"K={K} in shape {k.shape}", wanted=wanted)
    for name, size, letter in (("q", H, "H"), ("v", Hv, "Hv")):
        if size == 0:
            raise ShapeError(name, found=f"{letter}=0 in shape {arrays[name].shape}", wanted=f"{letter} of at least 1")
    for name, size, letter in (("q", T, "T"), ("k", S, "S")):
        if size >= UNLIMITED // 2:
            raise ShapeError(name, found=f"{letter}={size}", wanted=f"{letter} below {UNLIMITED // 2}")


def real(name: str, value: Any, *, positive: bool = False) -> float:
    """A Python float from a number of the caller.

    Raises:
      ArgumentError: not a finite number, or not positive where it must be.
    """
    wanted = "a finite " + ("positive " if positive else "") + "Python number"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = f"`{name}` is part of the compiled program; a traced factor can multiply `q` instead."
        raise ArgumentError(
            name, found=type(value).__name__, wanted=wanted, hint=hint if isinstance(value, jax.Array) else ""
        )
    if not math.isfinite(value) or (positive and value <= 0):
        raise ArgumentError(name, found=repr(value), wanted=wanted)
    return float(value)


def check_bias(bias: Any, *, B: int, N: int, T: int, S: int) -> tuple[int, ...]:
    """The shape of the bias with all four axes.

    Raises:
      ShapeError: it does not broadcast to (B, N, T, S).
      DtypeError: it is not floating point.
    """
    if not (hasattr(bias, "shape") and hasattr(bias, "dtype")):
        raise ArgumentError("bias", found=type(bias).__name__, wanted="an array that broadcasts to (B, N, T, S)")
    if np.dtype(bias.dtype) not in DTYPES:
        hint = "A boolean mask goes into `mask=jflash.masks.Dense(...)`." if bias.dtype == np.bool_ else ""
        raise DtypeError("bias", found=f"dtype {bias.dtype}", wanted="floating point", hint=hint)
    if bias.dtype == np.float64 and not jax.config.jax_enable_x64:
        raise DtypeError(
            "bias", found="dtype float64", wanted="a dtype that JAX has with x64 off", hint="Cast to float32."
        )
    shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
    if len(shape) != 4 or any(found not in (1, wanted) for found, wanted in zip(shape, (B, N, T, S))):
        wanted = f"broadcastable to (B, N, T, S) = {(B, N, T, S)}"
        raise ShapeError("bias", found=f"shape {bias.shape}", wanted=wanted)
    return shape
