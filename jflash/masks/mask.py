"""What a mask is: one elementwise truth, and a proof per tile. The contract is in README.md beside this file."""

import dataclasses
import enum
import functools
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jflash.errors import ArgumentError
from jflash.structure import Structure

# Larger than any length, and small enough that sums of two stay inside int32.
UNLIMITED = 2**30

type Index = int | np.ndarray | Int[Array, "..."]


class TileKind(enum.IntEnum):
    """What is known of a tile without looking at its elements. AND of masks is the minimum, OR the maximum."""

    EMPTY = 0
    """No pair of the tile attends: it is never loaded."""
    PARTIAL = 1
    """Evaluate `allowed` on the tile."""
    FULL = 2
    """Every pair of the tile attends: no mask code runs."""


class Interval(NamedTuple):
    """Whole numbers from `first` to `last`, both included; empty where `first > last`. The ends broadcast."""

    first: Any
    last: Any


class Span(NamedTuple):
    """What a range of queries sees, for masks in which each query sees an interval of keys (or the transpose).

    Attributes:
      hull: holds every key that some query of the range sees.
      common: each key of it is seen by every query of the range.
    """

    hull: Interval
    common: Interval


class Value(NamedTuple):
    """An array that a mask needs besides indices. Its axes are declared, so that kernels can stream it beside a tile.

    Attributes:
      array: the values; an axis may have size 1 and then broadcasts.
      axes: one letter for each axis of `array`, a subsequence of "BNTS": "BT" is per query, "BS" per key, "B" per batch
        row, "BN" per head, "BNTS" per pair.
    """

    array: Any
    axes: str

    def at(self, indices: dict[str, Index]) -> Any:
        """The value at each index; `indices` has an index array for each letter, broadcastable against each other."""
        if not self.axes:
            return self.array
        picked = tuple(
            indices[axis] if size > 1 else indices[axis] * 0 for axis, size in zip(self.axes, self.array.shape)
        )
        return (jnp.asarray(self.array) if is_traced(*picked) else self.array)[picked]

    def expanded(self) -> Any:
        """The array with all four axes B, N, T, S, those it lacks of size 1."""
        sizes = dict(zip(self.axes, self.array.shape))
        return self.array.reshape(tuple(sizes.get(axis, 1) for axis in "BNTS"))


class Mask:
    """Which (query, key) pairs attend.

    A mask is a pytree: array fields are leaves, so they may be traced and change without recompiling; ints and None are
    part of its structure. `mask_a & mask_b` and `mask_a | mask_b` combine, `~mask` is the rest.

    A pattern defines `values`, `evaluate`, `bind`, and one proof: `key_span` and `query_span` where each query sees an
    interval of keys, or else `tile_kind`. All of them take numpy or JAX arrays, and run inside kernels.
    """

    has_spans: ClassVar[bool] = False
    has_function: ClassVar[bool] = False
    """Whether `evaluate` runs a function of the caller's, which a kernel may not be able to compile."""
    has_diagonal: ClassVar[bool] = False
    """Whether query i sees key i, for all i that are both, whatever the arrays of the mask hold."""

    @property
    def is_live_on_diagonal(self) -> bool:
        """Whether a key that any query sees is seen by the query of its own index, if there is one."""
        return self.has_diagonal

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, functools.partial(_unflatten, cls))

    def values(self) -> tuple[Value, ...]:
        """What `evaluate` needs besides indices."""
        return ()

    def evaluate(self, q: Index, k: Index, *values: Any) -> Bool[Array, "..."]:
        """Whether query `q` sees key `k`, elementwise on indices; `values` are those of `values()` at these indices."""
        raise NotImplementedError

    def bind(self, *, B: int, N: int, T: int, S: int) -> Self:
        """This mask for one problem: arrays checked against the lengths, each with a leading axis of size 1 or B.

        Raises:
          ArgumentError: an array does not fit the problem.
        """
        return self

    def key_span(self, queries: Interval, *values: Any) -> Span:
        """The keys that a range of queries sees; only where `has_spans`, whose values are all per batch row."""
        raise NotImplementedError

    def query_span(self, keys: Interval, *values: Any) -> Span:
        """The queries that see a range of keys; the transpose of `key_span`."""
        raise NotImplementedError

    def interval(self, query: Index, *values: Any) -> Interval | None:
        """Exactly the keys that a query sees, where these are an interval whatever the arrays hold; otherwise None."""
        return self.key_span(Interval(query, query), *values).hull if self.has_spans else None

    def tile_kind(self, queries: Interval, keys: Interval, *bounds: Interval) -> Any:
        """The `TileKind` of each tile, with the smallest and largest of each value in the tile as `bounds`."""
        span = self.key_span(queries, *(bound.first for bound in bounds))
        hull, common = span
        full = (keys.first >= common.first) & (keys.last <= common.last)
        empty = (hull.first > hull.last) | (keys.last < hull.first) | (keys.first > hull.last)
        return kind_of(full=full, empty=empty)

    def offsets(self) -> tuple[Any, ...]:
        """The offset of each diagonal that the mask is written in terms of: where query q has position q + offset."""
        return ()

    def allowed(self, q: Index, k: Index, *, b: Index = 0, n: Index = 0) -> Bool[Array, "..."]:
        """Whether query `q` sees key `k` in batch row `b` and head `n`, elementwise on broadcastable index arrays.

        Example:
          >>> import numpy as np
          >>> from jflash.masks import Causal
          >>> Causal().allowed(np.arange(3)[:, None], np.arange(4)).astype(int)
          array([[1, 0, 0, 0],
                 [1, 1, 0, 0],
                 [1, 1, 1, 0]])
        """
        indices = {"B": b, "N": n, "T": q, "S": k}
        return self.evaluate(q, k, *(value.at(indices) for value in self.values()))

    def draw(self, T: int, S: int, *, b: int = 0, n: int = 0) -> str:
        """The mask as text, a row for each query: `#` attends, `.` does not.

        Example:
          >>> from jflash.masks import SlidingWindow
          >>> print(SlidingWindow(1, 0).draw(4, 4))
          #...
          ##..
          .##.
          ..##
        """
        allowed = self.allowed(np.arange(T)[:, None], np.arange(S)[None, :], b=b, n=n)
        pairs = np.broadcast_to(np.asarray(allowed), (T, S))
        return "\n".join("".join("#" if pair else "." for pair in row) for row in pairs)

    def sparsity(self, T: int, S: int, *, B: int = 1, N: int = 1, block_q: int = 128, block_k: int = 128) -> float:
        """The part of the tiles that no kernel loads, over all batch rows and heads.

        Example:
          >>> from jflash.masks import Causal
          >>> Causal().sparsity(1024, 1024)
          0.4375
        """
        from jflash.masks.tile_map import TileMap

        bound = self.bind(B=B, N=N, T=T, S=S)
        kinds = TileMap(mask=bound, T=T, S=S, block_q=block_q, block_k=block_k).kinds()
        return float((kinds == TileKind.EMPTY.value).mean())

    def __invert__(self) -> "Mask":
        from jflash.masks.combine import Not

        return Not(self)

    def __and__(self, other: "Mask") -> "Mask":
        from jflash.masks.combine import And

        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        from jflash.masks.combine import Or

        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __bool__(self) -> bool:
        hint = "Combine masks with & and |, not and/or."
        raise ArgumentError("mask", found="a mask used as a truth value", wanted="a mask", hint=hint)


def _fields(mask: Mask) -> list[tuple[str, Any]]:
    return [(field.name, getattr(mask, field.name)) for field in dataclasses.fields(mask)]


def is_static(value: object) -> bool:
    """Whether a field of a mask belongs to its structure rather than to its leaves.

    A numpy number does not: arithmetic on a leaf without axes makes one, and a leaf must stay a leaf. A function does.
    """
    return value is None or isinstance(value, int) or callable(value)


def _flatten_with_keys(mask: Mask):
    fields = _fields(mask)
    static = tuple((name, value if is_static(value) else ...) for name, value in fields)
    leaves = [(jax.tree_util.GetAttrKey(name), value) for name, value in fields if not is_static(value)]
    return leaves, static


def _unflatten(cls, static, leaves):
    # Not through __init__: JAX also unflattens with placeholders for leaves, which no check would pass.
    mask = object.__new__(cls)
    remaining = iter(leaves)
    for name, value in static:
        object.__setattr__(mask, name, next(remaining) if value is ... else value)
    return mask


def pattern(cls):
    """Makes a class of masks a frozen record. Equality is identity: comparing arrays has no single answer."""
    # A class that writes its own __init__ or __repr__ keeps it.
    init = "__init__" not in vars(cls) and not any("__init__" in vars(base) for base in cls.__mro__[1:-1])
    return dataclasses.dataclass(frozen=True, eq=False, repr=False, init=init)(cls)


def kind_of(*, full: Any, empty: Any) -> Any:
    """The `TileKind` from two proofs, elementwise; both False means PARTIAL. On a tile both are never True."""
    return where(empty, TileKind.EMPTY.value, where(full, TileKind.FULL.value, TileKind.PARTIAL.value))


def is_traced(*operands: Any) -> bool:
    """Whether any operand is a JAX array, so that numpy must not be used on it."""
    return any(isinstance(operand, jax.Array) for operand in operands)


def quotient(a: Any, divisor: int) -> Any:
    """a // divisor for numbers from 0 on, as one instruction of a kernel; see `minimum`."""
    return lax.div(a, jnp.asarray(divisor, a.dtype)) if is_traced(a) else a // divisor


def minimum(a: Any, b: Any) -> Any:
    """Elementwise minimum in numpy or, where an operand is a JAX array, in JAX: static masks stay static."""
    return jnp.minimum(a, b) if is_traced(a, b) else np.minimum(a, b)


def maximum(a: Any, b: Any) -> Any:
    """Elementwise maximum; see `minimum`."""
    return jnp.maximum(a, b) if is_traced(a, b) else np.maximum(a, b)


def where(condition: Any, a: Any, b: Any) -> Any:
    """Elementwise choice; see `minimum`."""
    return jnp.where(condition, a, b) if is_traced(condition, a, b) else np.where(condition, a, b)


class MaskStructure(Structure):
    """All of a mask but the contents of its arrays."""

    @property
    def mask(self) -> Mask:
        """The mask with `jax.ShapeDtypeStruct` for arrays."""
        return self.value
