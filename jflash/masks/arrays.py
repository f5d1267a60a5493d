"""What the arrays and numbers that masks take have in common: checked, int32, and shaped for one problem."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jflash.errors import ArgumentError, DtypeError, ShapeError
from jflash.masks.mask import UNLIMITED

INT32 = np.iinfo(np.int32)


def is_array(value: object) -> bool:
    # numpy makes a number, np.generic, of an array without axes wherever it computes with one.
    return isinstance(value, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct)


def is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def int32(name: str, value: Any) -> Any:
    """Whole numbers as int32, those beyond its range as the ends of it: sums in a narrower dtype would wrap around."""
    if not is_array(value):
        raise ArgumentError(name, found=repr(value), wanted="an int or an array of whole numbers")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise DtypeError(name, found=f"dtype {value.dtype}", wanted="whole numbers")
    if value.dtype == np.int32:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, np.int32)
    # The ends must be numbers of both dtypes: JAX would wrap them into the narrower one.
    low, high = max(INT32.min, jnp.iinfo(value.dtype).min), min(INT32.max, jnp.iinfo(value.dtype).max)
    return value.clip(low, high).astype(np.int32)


def length_of(name: str, value: Any) -> Any:
    # An int would become part of the compiled program, and each new length would compile again.
    return int32(name, np.asarray(min(max(value, 0), UNLIMITED), np.int32) if is_int(value) else value)


def at_least_1(name: str, value: Any) -> int:
    if not is_int(value) or not 1 <= value <= UNLIMITED:
        raise ArgumentError(name, found=repr(value), wanted="a whole number of at least 1")
    return int(value)


def at_batch_and_token(name: str, value: Any, letter: str, length: int, *, B: int, hint: str = "") -> Any:
    """One number for each query or key, (B, length) or (1, length)."""
    if value.shape not in ((length,), (1, length), (B, length)):
        wanted = f"({letter},) or (B, {letter}) with B={B}, {letter}={length}"
        raise ShapeError(name, found=f"shape {value.shape}", wanted=wanted, hint=hint)
    return reshaped(value, (1, length) if value.ndim == 1 else value.shape)


def at_batch(name: str, value: Any, *, B: int, low: int, high: int) -> Any:
    """One int32 per batch row, (B,) or (1,); clipping to [low, high] does not change what the mask means."""
    if value.shape not in ((), (1,), (B,)):
        raise ShapeError(name, found=f"shape {value.shape}", wanted=f"() or (B,) with B={B}")
    rows = reshaped(value, value.shape or (1,))
    return rows if isinstance(rows, jax.ShapeDtypeStruct) else rows.clip(low, high)


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, array.dtype)
    return array.reshape(shape)


def canonical(array: Any) -> Any:
    """Of the dtype that JAX would make of it: numpy's own are 64 bits wide."""
    if is_array(array) and not isinstance(array, np.ndarray | np.generic):
        return array
    array = np.asarray(array)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def refuse_captured(name: str, fn: Callable[..., Any], *, wanted: str) -> None:
    """Refuses a function of the caller's that holds a traced array.

    Raises:
      ArgumentError: it captures one, or `functools.partial` binds one to it.
    """
    held = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    if isinstance(fn, functools.partial):
        held += [*fn.args, *fn.keywords.values()]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(held)):
        hint = "A function is part of the compiled program, an argument is not."
        raise ArgumentError(name, found="a function that captures a traced array", wanted=wanted, hint=hint)


def shown(value: Any) -> str:
    if not is_array(value):
        return repr(value)
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
