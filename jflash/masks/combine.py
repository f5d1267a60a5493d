"""Masks of masks. A tile of an AND is as full as its emptiest part, one of an OR as its fullest: always sound.

A tile of a NOT is full where that of the mask is empty, and the reverse.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

from jflash.errors import ArgumentError
from jflash.masks.mask import Interval, Mask, Span, TileKind, Value, maximum, minimum, pattern


class _Combined(Mask):
    """Several masks joined elementwise; their values stand one after the other."""

    masks: tuple[Mask, ...]
    _symbol: ClassVar[str]
    _join_pairs: ClassVar[Callable[[Any, Any], Any]]
    _join_kinds: ClassVar[Callable[[Any, Any], Any]]

    def __init__(self, *masks: Mask):
        if not masks:
            raise ArgumentError("masks", found="none", wanted="at least one mask")
        for mask in masks:
            if not isinstance(mask, Mask):
                hint = "Wrap a boolean array in jflash.masks.Dense."
                raise ArgumentError("masks", found=type(mask).__name__, wanted="masks", hint=hint)
        object.__setattr__(self, "masks", masks)

    @property
    def has_function(self) -> bool:
        return any(mask.has_function for mask in self.masks)

    @property
    def has_diagonal(self) -> bool:
        return all(mask.has_diagonal for mask in self.masks)

    @property
    def is_live_on_diagonal(self) -> bool:
        # Who is seen by AND or OR is so by all parts or by one, and then on the diagonal of the same.
        return self.has_diagonal or all(mask.is_live_on_diagonal for mask in self.masks)

    def _each(self, values: tuple) -> Iterator[tuple[Mask, tuple]]:
        """Each mask with its own part of `values`."""
        start = 0
        for mask in self.masks:
            stop = start + len(mask.values())
            yield mask, values[start:stop]
            start = stop

    def values(self) -> tuple[Value, ...]:
        return tuple(value for mask in self.masks for value in mask.values())

    def offsets(self) -> tuple[Any, ...]:
        return tuple(offset for mask in self.masks for offset in mask.offsets())

    def evaluate(self, q, k, *values):
        pairs = (mask.evaluate(q, k, *own) for mask, own in self._each(values))
        return functools.reduce(type(self)._join_pairs, pairs)

    def tile_kind(self, queries: Interval, keys: Interval, *bounds: Interval) -> Any:
        kinds = (mask.tile_kind(queries, keys, *own) for mask, own in self._each(bounds))
        return functools.reduce(type(self)._join_kinds, kinds)

    def bind(self, *, B: int, N: int, T: int, S: int) -> Self:
        return type(self)(*(mask.bind(B=B, N=N, T=T, S=S) for mask in self.masks))

    def __repr__(self) -> str:
        return "(" + f" {self._symbol} ".join(map(repr, self.masks)) + ")"


def _overlap(a: Interval, b: Interval) -> Interval:
    return Interval(maximum(a.first, b.first), minimum(a.last, b.last))


def _overlap_spans(a: Span, b: Span) -> Span:
    return Span(_overlap(a.hull, b.hull), _overlap(a.common, b.common))


@pattern
class And(_Combined):
    """The pairs that every one of the masks allows; `a & b` for two.

    Example:
      >>> from jflash.masks import Causal, SlidingWindow
      >>> print((Causal() & SlidingWindow(1, 1)).draw(3, 3))
      #..
      ##.
      .##
    """

    masks: tuple[Mask, ...]
    _symbol: ClassVar[str] = "&"
    _join_pairs: ClassVar[Callable] = operator.and_
    _join_kinds: ClassVar[Callable] = minimum

    @property
    def has_spans(self) -> bool:
        """Intervals overlap in an interval, so an AND of masks with spans has spans (an OR has not)."""
        return all(mask.has_spans for mask in self.masks)

    def tile_kind(self, queries: Interval, keys: Interval, *bounds: Interval) -> Any:
        # Two hulls may each reach into a tile and still not overlap; the spans know, and `TileMap.run` goes by them.
        whole = Mask.tile_kind if self.has_spans else _Combined.tile_kind
        return whole(self, queries, keys, *bounds)

    def interval(self, query, *values) -> Interval | None:
        parts = [mask.interval(query, *own) for mask, own in self._each(values)]
        return None if None in parts else functools.reduce(_overlap, parts)

    def key_span(self, queries: Interval, *values) -> Span:
        spans = (mask.key_span(queries, *own) for mask, own in self._each(values))
        return functools.reduce(_overlap_spans, spans)

    def query_span(self, keys: Interval, *values) -> Span:
        spans = (mask.query_span(keys, *own) for mask, own in self._each(values))
        return functools.reduce(_overlap_spans, spans)


@pattern
class Or(_Combined):
    """The pairs that at least one of the masks allows; `a | b` for two.

    Example:
      >>> import numpy as np
      >>> from jflash.masks import Causal, Lengths
      >>> print((Causal() | Lengths(kv=np.array([2]))).draw(3, 3))
      ##.
      ##.
      ###
    """

    masks: tuple[Mask, ...]
    _symbol: ClassVar[str] = "|"
    _join_pairs: ClassVar[Callable] = operator.or_
    _join_kinds: ClassVar[Callable] = maximum

    @property
    def has_diagonal(self) -> bool:
        return any(mask.has_diagonal for mask in self.masks)


@pattern
class Not(Mask):
    """The pairs that a mask does not allow; `~a`.

    Example:
      >>> from jflash.masks import Causal
      >>> print((~Causal()).draw(3, 3))
      .##
      ..#
      ...
    """

    mask: Mask

    def __post_init__(self):
        if not isinstance(self.mask, Mask):
            hint = "Wrap a boolean array in jflash.masks.Dense."
            raise ArgumentError("mask", found=type(self.mask).__name__, wanted="a mask", hint=hint)

    @property
    def has_function(self) -> bool:
        return self.mask.has_function

    def values(self) -> tuple[Value, ...]:
        return self.mask.values()

    def offsets(self) -> tuple[Any, ...]:
        return self.mask.offsets()

    def evaluate(self, q, k, *values):
        # For Python's own booleans too, of which ~ makes a number.
        return self.mask.evaluate(q, k, *values) ^ True

    def tile_kind(self, queries: Interval, keys: Interval, *bounds: Interval) -> Any:
        return TileKind.FULL.value - self.mask.tile_kind(queries, keys, *bounds)

    def bind(self, *, B: int, N: int, T: int, S: int) -> "Not":
        return Not(self.mask.bind(B=B, N=N, T=T, S=S))

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return f"~{self.mask!r}"
