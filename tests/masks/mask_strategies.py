"""Random problems and masks for the property tests of masks."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st

from jflash.masks import (
    And,
    Causal,
    Chunked,
    Dense,
    Dilated,
    Full,
    KeyRange,
    Lengths,
    Mask,
    MaskFn,
    Not,
    Or,
    PrefixLM,
    Segments,
    SlidingWindow,
    Tree,
)

# The same examples on every run, so that a failure is a fault of the change that shows it.
# HYPOTHESIS_PROFILE=default looks for new ones.
PROPERTY = settings(settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci")), deadline=None)

# Each example compiles, so few are tried, and none is made smaller.
COMPILED = settings(PROPERTY, max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate])


class Sizes(NamedTuple):
    B: int
    N: int
    T: int
    S: int


def sizes(longest: int = 40) -> st.SearchStrategy[Sizes]:
    return st.builds(Sizes, st.integers(1, 3), st.integers(1, 2), st.integers(1, longest), st.integers(1, longest))


def per_row(sizes: Sizes, low: int, high: int) -> st.SearchStrategy[np.ndarray]:
    """Whole numbers for each batch row, or one for all: (B,), (1,) or ()."""
    numbers = st.integers(low, high)
    rows = st.lists(numbers, min_size=sizes.B, max_size=sizes.B)
    return st.one_of(rows, st.lists(numbers, min_size=1, max_size=1), numbers).map(lambda n: np.array(n, np.int32))


def offsets(sizes: Sizes) -> st.SearchStrategy[Any]:
    low, high = -sizes.T - 2, sizes.S + 2
    return st.integers(low, high) | per_row(sizes, low, high)


def windows(sizes: Sizes) -> st.SearchStrategy[Mask]:
    distance = st.none() | st.integers(0, max(sizes.T, sizes.S) + 2)
    return st.builds(SlidingWindow, distance, distance, offset=offsets(sizes))


def lengths(sizes: Sizes) -> st.SearchStrategy[Mask]:
    return st.builds(
        Lengths,
        q=st.none() | per_row(sizes, 0, sizes.T + 3),
        kv=st.none() | per_row(sizes, 0, sizes.S + 3),
    )


@st.composite
def segments(draw: Callable, sizes: Sizes, is_sorted: bool | None = None) -> Mask:
    # From a seed: hypothesis would spend its time on the single ids.
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 6))
    is_sorted = draw(st.booleans()) if is_sorted is None else is_sorted

    def ids(length: int) -> np.ndarray:
        shape = draw(st.sampled_from([(length,), (1, length), (sizes.B, length)]))
        found = random.integers(-1, count, shape, np.int32)
        return np.sort(found, axis=-1) if is_sorted else found

    return Segments(ids(sizes.T), ids(sizes.S), padding_id=draw(st.none() | st.integers(-1, count)))


@st.composite
def denses(draw: Callable, sizes: Sizes) -> Mask:
    shape = tuple(draw(st.sampled_from([1, size])) for size in sizes)[draw(st.integers(0, 2)) :]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Constant over blocks, or no tile but of one element would ever be EMPTY or FULL.
    block = draw(st.integers(1, 12))
    coarse = random.random(tuple(-(-size // block) for size in shape)) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    for axis, size in enumerate(shape):
        coarse = coarse.repeat(block, axis).take(range(size), axis)
    return Dense(coarse)


@st.composite
def key_ranges(draw: Callable, sizes: Sizes) -> Mask:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    first, last = (
        random.integers(-2, sizes.S + 2, draw(st.sampled_from([(sizes.T,), (1, sizes.T), (sizes.B, sizes.T)])))
        for _ in range(2)
    )
    # In order half of the time, as those of documents: then tiles are empty and full.
    return (
        KeyRange(*map(np.sort, (np.minimum(first, last), np.maximum(first, last))))
        if draw(st.booleans())
        else KeyRange(first, last)
    )


@st.composite
def token_trees(draw: Callable, sizes: Sizes) -> Mask:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.sampled_from([(sizes.T,), (sizes.B, sizes.T)]))
    branching = draw(st.sampled_from([1, 3, 40]))
    nodes = np.arange(sizes.T)
    parents = np.maximum(nodes - 1 - random.integers(0, branching, shape), -1)
    # What does not fit behind the prefix is cut off: the last keys are nodes, or there are more keys than nodes.
    room = max(sizes.S - sizes.T, 0)
    return Tree(parents, prefix=draw(st.integers(0, room)), keys=sizes.S)


def _of_indices(b, n, q, k):
    return (q * 3 + k * 5 + n * 7 + b) % 4 < 2


def _of_values(b, n, q, k, reach, weight, pair):
    return (abs(q // 4 - k // 4) <= reach) & (weight > 0.3) | pair


@st.composite
def functions(draw: Callable, sizes: Sizes) -> Mask:
    if draw(st.booleans()):
        return MaskFn(_of_indices)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return MaskFn(
        _of_values,
        per_query=(random.integers(0, 2, (sizes.B, sizes.T)),),
        per_head=(random.random(sizes.N).astype(np.float32),),
        per_pair=(random.random((sizes.T, sizes.S)) < 0.02,),
    )


# Every public pattern has its line here; `test_tile_map.test_every_pattern_is_tried` sees to it.
PATTERNS: dict[type[Mask], Callable[[Sizes], st.SearchStrategy[Mask]]] = {
    Full: lambda sizes: st.just(Full()),
    Causal: lambda sizes: st.builds(Causal, offset=offsets(sizes)),
    SlidingWindow: windows,
    Lengths: lengths,
    Segments: segments,
    Dense: denses,
    PrefixLM: lambda sizes: st.builds(PrefixLM, per_row(sizes, 0, sizes.S + 3)),
    Chunked: lambda sizes: st.builds(Chunked, st.integers(1, 50)),
    Dilated: lambda sizes: st.builds(Dilated, st.integers(1, 9)),
    KeyRange: key_ranges,
    Tree: token_trees,
}


def patterns(sizes: Sizes) -> st.SearchStrategy[Mask]:
    return st.one_of(*(make(sizes) for make in PATTERNS.values()))


def trees(leaf: st.SearchStrategy[Mask], combine: tuple[type[Mask], ...] = (And, Or), depth: int = 3) -> Any:
    """Masks of masks, down to the given depth."""
    if depth == 0:
        return leaf
    parts = st.lists(trees(leaf, combine, depth - 1), min_size=1, max_size=3)
    combined = leaf | st.builds(lambda kind, parts: kind(*parts), st.sampled_from(combine), parts)
    return combined if combine != (And, Or) else combined | st.builds(Not, combined)
