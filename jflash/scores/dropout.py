"""Dropout of the weights of attention (Srivastava et al., JMLR 15, 2014), as a term of one call."""

import dataclasses
import functools
import numbers
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jflash.errors import ArgumentError, DtypeError, ShapeError
from jflash.masks.arrays import is_array
from jflash.numerics.dropout import RowWords, column_word, is_kept, pair_bits, row_words
from jflash.scores.function import WHOLE, Place, indices


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key", "b", "n"], meta_fields=["rate"])
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Dropout:
    """Which weights are dropped; see numerics/dropout.py.

    Attributes:
      rate: the part of the pairs that is dropped, above 0 and below 1.
      key: (words,) uint32, of a random key.
      b: (B,), n: (1, N), the indices: arrays, since a device of a mesh has a part of the rows and heads.
    """

    rate: float
    key: Any
    b: Any
    n: Any

    def leaves(self) -> Iterator[tuple[Any, str]]:
        """Every array with its axes, in the order of the pytree's leaves."""
        yield from ((self.key, WHOLE), (self.b, "B"), (self.n, "BN"))

    def apply(self, p: Float[Array, "..."], q: Any, k: Any, *, place: Place) -> Float[Array, "..."]:
        """The weights with some of them 0 and the others larger by 1 / (1 - rate)."""
        rows = row_words(self.key, place(self.b, "B"), place(self.n, "BN"), q)
        return jnp.where(is_kept(pair_bits(rows, column_word(k)), self.rate), p / (1 - self.rate), 0)

    def streamed(self, *, T: int, S: int) -> "StreamedDropout":
        """The same for a kernel, which hashes pairs alone."""
        b, n = jnp.asarray(self.b)[:, None, None], jnp.asarray(self.n)[..., None]
        rows = row_words(jnp.asarray(self.key), b, n, jnp.arange(T, dtype=np.int32))
        return StreamedDropout(self.rate, *rows, column_word(jnp.arange(S, dtype=np.int32))[None])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows_a", "rows_b", "columns"], meta_fields=["rate"])
@dataclasses.dataclass(frozen=True, eq=False)
class StreamedDropout:
    """`Dropout` with a word or two for each row and column of pairs instead of a key.

    Attributes:
      rate: as there.
      rows_a, rows_b: (B, N, T) uint32, of `row_words`.
      columns: (1, S) uint32, of `column_word`.
    """

    rate: float
    rows_a: Any
    rows_b: Any
    columns: Any

    def leaves(self) -> Iterator[tuple[Any, str]]:
        """Every array with its axes, in the order of the pytree's leaves."""
        yield from ((self.rows_a, "BNT"), (self.rows_b, "BNT"), (self.columns, "BS"))

    def apply(self, p: Float[Array, "..."], q: Any, k: Any, *, place: Place) -> Float[Array, "..."]:
        """As of `Dropout`."""
        rows_a, rows_b, columns = (place(array, axes) for array, axes in self.leaves())
        return jnp.where(is_kept(pair_bits(RowWords(rows_a, rows_b), columns), self.rate), p / (1 - self.rate), 0)


def dropout_rate_of(rate: Any) -> float:
    """The rate, checked.

    Raises:
      ArgumentError: it is no Python number from 0 to below 1.
    """
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
        hint = "It is part of the compiled program." if isinstance(rate, jax.Array) else ""
        found = type(rate).__name__ if isinstance(rate, jax.Array) else repr(rate)
        wanted = "a Python number from 0 to below 1"
        raise ArgumentError("dropout_rate", found=found, wanted=wanted, hint=hint)
    return float(rate)


def dropout_of(rate: Any, key: Any, *, B: int, N: int) -> Dropout | None:
    """The dropout of a call, None for a rate of 0.

    Raises:
      ArgumentError: the rate is no Python number from 0 to below 1, or there is no key.
      ShapeError, DtypeError: the key is none of JAX.
    """
    rate = dropout_rate_of(rate)
    words = None if key is None else _words(key)
    if rate == 0:
        return None
    if words is None:
        wanted = f"a key of jax.random where dropout_rate={rate:g}"
        raise ArgumentError("dropout_key", found="None", wanted=wanted, hint="Give each step and layer one of its own.")
    return Dropout(rate=rate, key=words, **indices(B=B, N=N))


def _words(key: Any) -> Any:
    """The words of a key, typed or raw."""
    if not is_array(key):
        raise ArgumentError("dropout_key", found=type(key).__name__, wanted="a key of jax.random")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape:
            raise ShapeError("dropout_key", found=f"shape {key.shape}", wanted="one key, of shape ()")
        if isinstance(key, jax.ShapeDtypeStruct):
            return jax.eval_shape(jax.random.key_data, key)
        return jax.random.key_data(key)
    if key.dtype != np.uint32:
        raise DtypeError("dropout_key", found=f"dtype {key.dtype}", wanted="a key of jax.random, typed or of uint32")
    if len(key.shape) != 1 or key.shape[0] < 2:
        raise ShapeError("dropout_key", found=f"shape {key.shape}", wanted="one key, (2,) or (4,) words of uint32")
    return key
