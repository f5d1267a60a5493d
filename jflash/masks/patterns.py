"""The patterns: each is its elementwise truth and its proof per tile, a few lines apiece."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Bool, Int

from jflash.errors import ArgumentError, DtypeError, ShapeError, naming
from jflash.masks.arrays import (
    INT32,
    at_batch,
    at_batch_and_token,
    at_least_1,
    int32,
    is_array,
    is_int,
    length_of,
    reshaped,
    shown,
)
from jflash.masks.mask import (
    UNLIMITED,
    Interval,
    Mask,
    Span,
    Value,
    is_static,
    kind_of,
    maximum,
    minimum,
    pattern,
    quotient,
    where,
)

_EVERYTHING = Interval(-UNLIMITED, UNLIMITED)


def _with(mask: Any, **fields: Any) -> Any:
    """A mask that was just made, with fields that nobody else may set."""
    for name, value in fields.items():
        object.__setattr__(mask, name, value)
    return mask


@pattern
class Full(Mask):
    """Every query sees every key.

    Example:
      >>> print(Full().draw(2, 4))
      ####
      ####
    """

    has_spans: ClassVar[bool] = True
    has_diagonal: ClassVar[bool] = True

    def evaluate(self, q, k):
        return (q == q) & (k == k)

    def key_span(self, queries: Interval) -> Span:
        return Span(_EVERYTHING, _EVERYTHING)

    def query_span(self, keys: Interval) -> Span:
        return Span(_EVERYTHING, _EVERYTHING)

    def __repr__(self) -> str:
        return "Full()"


class _Band(Mask):
    """Query q sees the keys from `q + offset - left` to `q + offset + right`, both included; None is unlimited."""

    has_spans: ClassVar[bool] = True
    left: int | None
    right: int | None
    offset: int | Int[Array, ""] | Int[Array, " B"]

    @property
    def has_diagonal(self) -> bool:
        if not is_static(self.offset):
            return False
        first, last = self._limits(())
        return first <= 0 <= last

    def values(self) -> tuple[Value, ...]:
        return () if is_static(self.offset) else (Value(self.offset, "B" if self.offset.ndim else ""),)

    def _limits(self, offset: tuple) -> tuple[Any, Any]:
        """The distances to the first and to the last key that a query sees."""
        # As `bind` does: beyond this an offset means the same, and sums with it could pass 2^31.
        limit = UNLIMITED // 2
        shift = minimum(maximum(offset[0], -limit), limit) if offset else self.offset
        first = -UNLIMITED if self.left is None else shift - self.left
        last = UNLIMITED if self.right is None else shift + self.right
        return first, last

    def evaluate(self, q, k, *offset):
        # An unlimited side is not compared at all, and a limit moves k, not the difference of k and q: a tile of a
        # kernel has as many differences as pairs. |k - limit| stays below 2^29 + 2^30, so nothing wraps around.
        first, last = self._limits(offset)
        if self.left is None:
            return k - last <= q if self.right is not None else (q == q) & (k == k)
        return k - first >= q if self.right is None else (k - first >= q) & (k - last <= q)

    def key_span(self, queries: Interval, *offset) -> Span:
        first, last = self._limits(offset)
        return Span(
            hull=Interval(queries.first + first, queries.last + last),
            common=Interval(queries.last + first, queries.first + last),
        )

    def query_span(self, keys: Interval, *offset) -> Span:
        first, last = self._limits(offset)
        return Span(
            hull=Interval(keys.first - last, keys.last - first),
            common=Interval(keys.last - last, keys.first - first),
        )

    def offsets(self) -> tuple[Any, ...]:
        return (self.offset,)

    def _check_offset(self) -> None:
        offset = int(self.offset) if is_int(self.offset) else int32("offset", self.offset)
        if isinstance(offset, int) and abs(offset) > UNLIMITED // 2:
            raise ArgumentError("offset", found=repr(offset), wanted=f"a whole number up to {UNLIMITED // 2}")
        object.__setattr__(self, "offset", offset)

    def _bound_offset(self, B: int) -> Any:
        if is_static(self.offset):
            return self.offset
        return at_batch("offset", self.offset, B=B, low=-(UNLIMITED // 2), high=UNLIMITED // 2)


@pattern
class Causal(_Band):
    """Query q sees the keys up to `q + offset`.

    Aligned at the top left, as in `jax.nn`; `Causal(offset=S - T)` aligns at the bottom right. In a decode step with
    `length` keys in the cache, `Causal(offset=length - T)` is the mask of T new queries.

    Args:
      offset: an int, a traced scalar, or a whole number per batch row.

    Raises:
      ArgumentError: offset is neither.

    Example:
      >>> print(Causal(offset=1).draw(3, 4))
      ##..
      ###.
      ####
    """

    left: ClassVar[None] = None
    right: ClassVar[int] = 0
    offset: int | Int[Array, ""] | Int[Array, " B"] = 0

    def __post_init__(self):
        self._check_offset()

    def bind(self, *, B: int, N: int, T: int, S: int) -> "Causal":
        return Causal(self._bound_offset(B))

    def __repr__(self) -> str:
        return f"Causal(offset={shown(self.offset)})"


@pattern
class SlidingWindow(_Band):
    """Query q sees the keys from `q + offset - left` to `q + offset + right`, both ends included.

    `left = right = 0` is the diagonal. Aligned at the top left; `offset` moves it.

    Args:
      left: distance to the first key seen, an int of at least 0, or None for no limit.
      right: distance to the last key seen, likewise.
      offset: an int, a traced scalar, or a whole number per batch row.

    Raises:
      ArgumentError: a distance is negative or no int.

    Example:
      >>> print(SlidingWindow(2, 0).draw(4, 5))
      #....
      ##...
      ###..
      .###.
    """

    left: int | None
    right: int | None
    offset: int | Int[Array, ""] | Int[Array, " B"] = 0

    def __post_init__(self):
        for name in ("left", "right"):
            distance = getattr(self, name)
            if distance is None:
                continue
            if not is_int(distance) or distance < 0:
                raise ArgumentError(
                    name,
                    found=repr(distance),
                    wanted="a distance of at least 0, or None for no limit",
                    hint="Both ends of a window are included: left=0 is the query's own position.",
                )
            # No key can be farther than the limit. A numpy int would wrap around in the sums of its own dtype.
            object.__setattr__(self, name, None if distance > UNLIMITED // 2 else int(distance))
        self._check_offset()

    def bind(self, *, B: int, N: int, T: int, S: int) -> "SlidingWindow":
        return SlidingWindow(self.left, self.right, self._bound_offset(B))

    def __repr__(self) -> str:
        return f"SlidingWindow({self.left}, {self.right}, offset={shown(self.offset)})"


def window_of(window: Any, name: str) -> SlidingWindow:
    """The window of an argument of this name: a pair of distances, or an int for both.

    Raises:
      ArgumentError: it is neither.
    """
    pair = (window, window) if isinstance(window, int | np.integer) else window
    if not isinstance(pair, tuple) or len(pair) != 2:
        wanted = "an int, or a pair (left, right) of ints or None"
        raise ArgumentError(name, found=repr(window), wanted=wanted)
    with naming(left=name, right=name):
        return SlidingWindow(*pair)


@pattern
class Lengths(Mask):
    """Queries below `q` see keys below `kv`, with a length per batch row; rows past a length are padding.

    Args:
      q: lengths of the queries, (B,) whole numbers; None is no limit. A length over T is no limit.
      kv: lengths of the keys, likewise.

    Raises:
      ArgumentError: a length is no whole number.

    Example:
      >>> print(Lengths(q=np.array([2]), kv=np.array([3])).draw(3, 4))
      ###.
      ###.
      ....
    """

    has_spans: ClassVar[bool] = True
    q: Int[Array, " B"] | None = None
    kv: Int[Array, " B"] | None = None

    def __post_init__(self):
        for name in ("q", "kv"):
            if (length := getattr(self, name)) is not None:
                object.__setattr__(self, name, length_of(name, length))

    @property
    def is_live_on_diagonal(self) -> bool:
        return self.q is None

    def values(self) -> tuple[Value, ...]:
        return tuple(Value(length, "B" if length.ndim else "") for length in (self.q, self.kv) if length is not None)

    def _lengths(self, values: tuple) -> tuple[Any, Any]:
        remaining = iter(values)
        return tuple(UNLIMITED if length is None else next(remaining) for length in (self.q, self.kv))

    def evaluate(self, q, k, *values):
        q_length, kv_length = self._lengths(values)
        return (q < q_length) & (k < kv_length)

    def _span(self, across: Interval, across_length: Any, along_length: Any) -> Span:
        some, every = across.first < across_length, across.last < across_length
        return Span(
            hull=Interval(0, where(some, along_length - 1, -1)),
            common=Interval(0, where(every, along_length - 1, -1)),
        )

    def key_span(self, queries: Interval, *values) -> Span:
        q_length, kv_length = self._lengths(values)
        return self._span(queries, q_length, kv_length)

    def query_span(self, keys: Interval, *values) -> Span:
        q_length, kv_length = self._lengths(values)
        return self._span(keys, kv_length, q_length)

    def bind(self, *, B: int, N: int, T: int, S: int) -> "Lengths":
        def bound(name: str, value: Any, size: int) -> Any:
            return None if value is None else at_batch(name, value, B=B, low=0, high=size)

        return Lengths(q=bound("q", self.q, T), kv=bound("kv", self.kv, S))

    def __repr__(self) -> str:
        return f"Lengths(q={shown(self.q)}, kv={shown(self.kv)})"


@pattern
class PrefixLM(Mask):
    """A causal mask with a prefix that everybody sees: query q sees the keys up to q, and those below `prefix`.

    Args:
      prefix: the length of the prefix, a whole number or one per batch row.

    Raises:
      ArgumentError: prefix is neither.

    Example:
      >>> print(PrefixLM(3).draw(4, 5))
      ###..
      ###..
      ###..
      ####.
    """

    has_spans: ClassVar[bool] = True
    has_diagonal: ClassVar[bool] = True
    prefix: Int[Array, " B"]

    def __post_init__(self):
        object.__setattr__(self, "prefix", length_of("prefix", self.prefix))

    def values(self) -> tuple[Value, ...]:
        return (Value(self.prefix, "B" if self.prefix.ndim else ""),)

    def evaluate(self, q, k, prefix):
        # One comparison for each pair: what belongs to the query alone is the same for all of its keys.
        return k <= maximum(q, prefix - 1)

    def key_span(self, queries: Interval, prefix) -> Span:
        hull, common = (Interval(0, maximum(q, prefix - 1)) for q in (queries.last, queries.first))
        return Span(hull, common)

    def query_span(self, keys: Interval, prefix) -> Span:
        hull, common = (Interval(where(k < prefix, 0, k), UNLIMITED) for k in (keys.first, keys.last))
        return Span(hull, common)

    def bind(self, *, B: int, N: int, T: int, S: int) -> "PrefixLM":
        return PrefixLM(at_batch("prefix", self.prefix, B=B, low=0, high=S))

    def __repr__(self) -> str:
        return f"PrefixLM({shown(self.prefix)})"


@pattern
class Chunked(Mask):
    """A query sees the keys of its own chunk of `size` tokens; with `& Causal()` those up to itself.

    Args:
      size: tokens of a chunk, part of the compiled program.

    Raises:
      ArgumentError: size is no whole number of at least 1.

    Example:
      >>> print(Chunked(2).draw(4, 5))
      ##...
      ##...
      ..##.
      ..##.
    """

    has_spans: ClassVar[bool] = True
    has_diagonal: ClassVar[bool] = True
    size: int

    def __post_init__(self):
        object.__setattr__(self, "size", at_least_1("size", self.size))

    def evaluate(self, q, k):
        return quotient(q, self.size) == quotient(k, self.size)

    def key_span(self, queries: Interval) -> Span:
        # Where the range lies in one chunk, both are that chunk; elsewhere `common` ends before it begins.
        first, last = (quotient(end, self.size) * self.size for end in queries)
        return Span(hull=Interval(first, last + self.size - 1), common=Interval(last, first + self.size - 1))

    query_span = key_span  # Keys and queries are cut at the same indices.

    def __repr__(self) -> str:
        return f"Chunked({self.size})"


@pattern
class Dilated(Mask):
    """A query sees every `step`-th key, counted from itself in both directions.

    No tile of more keys than `step` is empty, so that this saves no time: queries and keys that are sorted by their
    index modulo `step` do, with `Segments`.

    Args:
      step: the distance between two keys, part of the compiled program.

    Raises:
      ArgumentError: step is no whole number of at least 1.

    Example:
      >>> print(Dilated(2).draw(3, 5))
      #.#.#
      .#.#.
      #.#.#
    """

    has_diagonal: ClassVar[bool] = True
    step: int

    def __post_init__(self):
        object.__setattr__(self, "step", at_least_1("step", self.step))

    def evaluate(self, q, k):
        distance = maximum(q - k, k - q)
        return quotient(distance, self.step) * self.step == distance

    def tile_kind(self, queries: Interval, keys: Interval) -> Any:
        least, most = queries.first - keys.last, queries.last - keys.first
        multiple = most // self.step * self.step
        return kind_of(full=(multiple == least) & (least == most) | (self.step == 1), empty=multiple < least)

    def __repr__(self) -> str:
        return f"Dilated({self.step})"


@pattern
class KeyRange(Mask):
    """Query q sees the keys from `first[q]` to `last[q]`, both included; none where `first[q] > last[q]`.

    Args:
      first, last: whole numbers for each query, (T,) or (B, T), 32 bits of them.

    Raises:
      ArgumentError: they are no whole numbers or of the wrong shape.

    Example:
      >>> print(KeyRange(first=np.array([0, 2, 1]), last=np.array([1, 4, 0])).draw(3, 5))
      ##...
      ..###
      .....
    """

    first: Int[Array, "*B T"]
    last: Int[Array, "*B T"]
    # Found by `bind`, from ends that are known when tracing.
    has_diagonal: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self):
        for name in ("first", "last"):
            ends = int32(name, getattr(self, name))
            # More axes are no error here: `jax.vmap` may take them away before the mask is bound to a problem.
            if ends.ndim == 0:
                raise ShapeError(name, found=f"shape {ends.shape}", wanted="(T,) or (B, T)")
            object.__setattr__(self, name, ends)

    def values(self) -> tuple[Value, ...]:
        return tuple(Value(ends, "BT"[-ends.ndim :]) for ends in (self.first, self.last))

    def evaluate(self, q, k, first, last):
        return (k >= first) & (k <= last)

    def interval(self, query, first, last) -> Interval:
        return Interval(first, last)

    def tile_kind(self, queries: Interval, keys: Interval, first: Interval, last: Interval) -> Any:
        empty = (keys.last < first.first) | (keys.first > last.last)
        return kind_of(full=(keys.first >= first.last) & (keys.last <= last.first), empty=empty)

    def bind(self, *, B: int, N: int, T: int, S: int) -> "KeyRange":
        first, last = (at_batch_and_token(name, getattr(self, name), "T", T, B=B) for name in ("first", "last"))
        own = np.arange(min(T, S), dtype=np.int32)
        is_known = isinstance(first, np.ndarray) and isinstance(last, np.ndarray)
        has_diagonal = is_known and bool(self.evaluate(own, own, first[:, :S], last[:, :S]).all())
        return _with(KeyRange(first, last), has_diagonal=self.has_diagonal or has_diagonal)

    def __repr__(self) -> str:
        return f"KeyRange({shown(self.first)}, {shown(self.last)})"


@pattern
class Segments(Mask):
    """A query sees the keys of its own segment: packed documents. The ids need not be sorted.

    Args:
      q_ids: the segment of each query, (T,) or (B, T) whole numbers that fit 32 bits.
      kv_ids: the segment of each key, (S,) or (B, S); None means the same as `q_ids`.
      padding_id: tokens of this segment see nothing and nobody sees them; None means that every id is a segment, and
        is faster: padding may be a segment too, if what comes out for it is not used.

    Raises:
      ArgumentError: ids that are no whole numbers or of the wrong shape.

    Example:
      >>> print(Segments(np.array([1, 1, 2, 2, 0]), padding_id=0).draw(5, 5))
      ##...
      ##...
      ..##.
      ..##.
      .....
    """

    q_ids: Int[Array, "*B T"]
    kv_ids: Int[Array, "*B S"] | None = None
    padding_id: int | None = None
    # Whether the two are the same array, of which `bind` makes two leaves.
    same_ids: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self):
        if self.kv_ids is None or self.kv_ids is self.q_ids:
            _with(self, kv_ids=None, same_ids=True)
        for name in ("q_ids", "kv_ids"):
            ids = getattr(self, name)
            if ids is None and name == "kv_ids":
                continue
            ids_int32 = int32(name, ids)
            # More axes are no error here: `jax.vmap` may take them away before the mask is bound to a problem.
            if ids.ndim == 0:
                raise ShapeError(name, found=f"shape {ids.shape}", wanted="(length,) or (B, length)")
            if isinstance(ids, np.ndarray) and (ids_int32 != ids).any():
                raise ArgumentError(name, found=f"ids from {ids.min()} to {ids.max()}", wanted="ids that fit 32 bits")
            object.__setattr__(self, name, ids_int32)
        if self.padding_id is not None:
            if not is_int(self.padding_id) or not INT32.min <= self.padding_id <= INT32.max:
                raise ArgumentError("padding_id", found=repr(self.padding_id), wanted="an int of 32 bits or None")
            object.__setattr__(self, "padding_id", int(self.padding_id))

    @property
    def _key_ids(self) -> Any:
        return self.q_ids if self.kv_ids is None else self.kv_ids

    @property
    def has_diagonal(self) -> bool:
        return self.same_ids and self.padding_id is None

    @property
    def is_live_on_diagonal(self) -> bool:
        return self.same_ids

    def values(self) -> tuple[Value, ...]:
        return Value(self.q_ids, "BT"[-self.q_ids.ndim :]), Value(self._key_ids, "BS"[-self._key_ids.ndim :])

    def evaluate(self, q, k, q_id, k_id):
        same = q_id == k_id
        return same if self.padding_id is None else same & (q_id != self.padding_id)

    def tile_kind(self, queries: Interval, keys: Interval, q_id: Interval, k_id: Interval) -> Any:
        # Ids of a tile lie between its smallest and its largest: disjoint ranges share no id, and two ranges of one and
        # the same id share it everywhere. Sorted ids are decided exactly but at the borders, any others soundly.
        empty = (q_id.last < k_id.first) | (k_id.last < q_id.first)
        full = (q_id.first == q_id.last) & (k_id.first == k_id.last) & (q_id.first == k_id.first)
        if self.padding_id is not None:
            q_padding = (q_id.first == self.padding_id) & (q_id.last == self.padding_id)
            k_padding = (k_id.first == self.padding_id) & (k_id.last == self.padding_id)
            empty, full = empty | q_padding | k_padding, full & ~q_padding
        return kind_of(full=full, empty=empty)

    def bind(self, *, B: int, N: int, T: int, S: int) -> "Segments":
        q_ids = at_batch_and_token("q_ids", self.q_ids, "T", T, B=B)
        hint = "Give a pair of ids, for queries and for keys, where they differ in length."
        kv_ids = at_batch_and_token("kv_ids", self._key_ids, "S", S, B=B, hint=hint)
        return _with(Segments(q_ids, kv_ids, self.padding_id), kv_ids=kv_ids, same_ids=self.same_ids)

    def __repr__(self) -> str:
        padding = "" if self.padding_id is None else f", padding_id={self.padding_id}"
        return f"Segments({shown(self.q_ids)}, {shown(self.kv_ids)}{padding})"


@pattern
class Dense(Mask):
    """The pairs where a boolean array is True. It takes T x S memory of its own: prefer a pattern where one fits.

    Args:
      array: booleans of rank 2, 3 or 4, broadcastable to (B, N, T, S).

    Raises:
      ArgumentError: the array is not boolean or of the wrong rank.

    Example:
      >>> print(Dense(np.array([[True, False], [True, True]])).draw(2, 2))
      #.
      ##
    """

    array: Bool[Array, "..."]

    def __post_init__(self):
        if not is_array(self.array):
            raise ArgumentError("array", found=repr(self.array), wanted="an array of booleans")
        if self.array.dtype != np.bool_:
            raise DtypeError(
                "array", found=f"dtype {self.array.dtype}", wanted="bool", hint="An additive mask belongs into `bias`."
            )
        # More than four axes are no error here: `jax.vmap` may take some away before the mask is bound to a problem.
        if self.array.ndim < 2:
            raise ShapeError("array", found=f"shape {self.array.shape}", wanted="rank 2, 3 or 4: (B, N, T, S)")

    def values(self) -> tuple[Value, ...]:
        return (Value(self.array, "BNTS"[-self.array.ndim :]),)

    def evaluate(self, q, k, pair):
        return pair & (q == q) & (k == k)

    def tile_kind(self, queries: Interval, keys: Interval, pair: Interval) -> Any:
        return kind_of(full=pair.first, empty=~pair.last)

    def bind(self, *, B: int, N: int, T: int, S: int) -> "Dense":
        shape = (1,) * (4 - self.array.ndim) + self.array.shape
        if len(shape) > 4 or any(found not in (1, wanted) for found, wanted in zip(shape, (B, N, T, S))):
            wanted = f"broadcastable to (B, N, T, S) = {(B, N, T, S)}"
            raise ShapeError("mask", found=f"shape {self.array.shape}", wanted=wanted)
        return Dense(reshaped(self.array, shape))

    def __repr__(self) -> str:
        return f"Dense({shown(self.array)})"
