"""The proof of each mask against its truth on random problems, and schedules against lists written by hand."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_strategies import (
    COMPILED,
    PATTERNS,
    PROPERTY,
    Sizes,
    functions,
    key_ranges,
    patterns,
    segments,
    sizes,
    token_trees,
    trees,
)

import jflash.masks
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
    TileMap,
    Tree,
)
from jflash.masks.mask import TileKind
from jflash.masks.tile_map import lists_of, union

EMPTY, PARTIAL, FULL = TileKind

# Random problems ------------------------------------------------------------------------------------------------------


class Posed(NamedTuple):
    sizes: Sizes
    mask: Mask
    tile_map: TileMap


@st.composite
def posed(draw: Callable, masks: Callable[[Sizes], st.SearchStrategy[Mask]], *, longest: int = 40) -> Posed:
    """A mask bound to a problem, and the map of tiles of some size; in numpy."""
    found = draw(sizes(longest))
    mask = draw(masks(found)).bind(**found._asdict())
    blocks = {"block_q": draw(st.integers(1, 17)), "block_k": draw(st.integers(1, 17))}
    return Posed(found, mask, TileMap(mask=mask, T=found.T, S=found.S, **blocks, transpose=draw(st.booleans())))


# What is true -----------------------------------------------------------------------------------------------------


class Truth(NamedTuple):
    """Of each tile, (B, N, rows, columns): whether a pair attends, and whether it lies inside and all of it attends."""

    some: np.ndarray
    every: np.ndarray

    @property
    def kinds(self) -> np.ndarray:
        return np.where(self.every, FULL, np.where(self.some, PARTIAL, EMPTY))


def truth(case: Posed) -> Truth:
    B, N, T, S = case.sizes
    tile_map = case.tile_map
    b, n, q, k = np.ix_(*map(np.arange, case.sizes))
    allowed = np.broadcast_to(np.asarray(case.mask.allowed(q, k, b=b, n=n)), case.sizes)
    rows, columns = -(-T // tile_map.block_q), -(-S // tile_map.block_k)
    # A pair outside of the problem does not attend, so no tile that sticks out has all of its pairs attend.
    tiles = np.zeros((B, N, rows * tile_map.block_q, columns * tile_map.block_k), bool)
    tiles[:, :, :T, :S] = allowed
    tiles = tiles.reshape(B, N, rows, tile_map.block_q, columns, tile_map.block_k)
    some, every = tiles.any((3, 5)), tiles.all((3, 5))
    return Truth(some.swapaxes(2, 3), every.swapaxes(2, 3)) if tile_map.transpose else Truth(some, every)


def kinds_of(case: Posed) -> np.ndarray:
    """The kinds for each batch row and head, (B, N, rows, columns)."""
    kinds = np.asarray(case.tile_map.kinds())
    assert kinds.dtype == np.int8
    assert kinds.shape[0] in (1, case.sizes.B) and kinds.shape[1] in (1, case.sizes.N)
    assert kinds.shape[2:] == (case.tile_map.rows, case.tile_map.columns)
    return np.broadcast_to(kinds, (case.sizes.B, case.sizes.N, *kinds.shape[2:]))


def assert_sound(kinds: np.ndarray, true: Truth) -> None:
    assert set(np.unique(kinds)) <= set(TileKind)
    assert not (true.some & (kinds == EMPTY)).any(), "a tile called EMPTY has a pair that attends"
    assert not (~true.every & (kinds == FULL)).any(), "a tile called FULL has a pair that does not, or sticks out"


def row_values(mask: Mask, b: int) -> tuple[Any, ...]:
    """The values of one batch row, as a kernel gets them: numbers."""
    return tuple(value.array[min(b, value.array.shape[0] - 1)] for value in mask.values())


def kinds_of_run(run: Any, columns: int) -> np.ndarray:
    """The kinds that runs describe: for each row of tiles, a line of (..., columns)."""
    start, full_start, full_stop, stop = (np.asarray(end)[..., None] for end in run)
    assert ((start <= full_start) & (full_start <= full_stop) & (full_stop <= stop)).all()
    assert ((0 <= start) & (stop <= columns)).all()
    column = np.arange(columns)
    visited, full = (start <= column) & (column < stop), (full_start <= column) & (column < full_stop)
    return np.where(full, FULL, np.where(visited, PARTIAL, EMPTY))


# Properties -------------------------------------------------------------------------------------------------------


def test_every_pattern_is_tried():
    public = {value for value in vars(jflash.masks).values() if isinstance(value, type) and issubclass(value, Mask)}
    assert public - {Mask, And, Or, Not, MaskFn} == set(PATTERNS)


@pytest.mark.parametrize(
    "mask", [Full(), Causal() & SlidingWindow(9, 1), Causal() | Lengths(kv=np.array([3])), Segments(np.arange(40) // 7)]
)
def test_a_mask_without_jax_arrays_is_known_while_tracing(mask):
    bound = mask.bind(B=1, N=1, T=40, S=40)
    found = []

    @jax.jit
    def trace(x):
        tile_map = TileMap(mask=bound, T=40, S=40, block_q=8, block_k=8)
        found.extend([tile_map.kinds(), *tile_map.lists(), union(tile_map.kinds())])
        return x

    trace(0)
    assert len(found) == 5 and all(isinstance(array, np.ndarray) for array in found)


@settings(PROPERTY, max_examples=250)
@given(posed(lambda sizes: trees(patterns(sizes))))
def test_sound(case):
    assert_sound(kinds_of(case), truth(case))


@pytest.mark.parametrize("pattern", [Full, Causal, SlidingWindow, Lengths, Dense, PrefixLM, Chunked, Dilated])
def test_exact(pattern):
    """What a single pattern with spans says of a tile is all there is to say, and so is the minimum of booleans."""

    @settings(PROPERTY, max_examples=100)
    @given(posed(PATTERNS[pattern]))
    def check(case):
        assert (kinds_of(case) == truth(case).kinds).all()

    check()


@settings(PROPERTY, max_examples=150)
@given(posed(segments))
def test_segments_are_full_exactly(case):
    # All pairs of a tile attend only if all ids are one id, and then smallest and largest are equal.
    assert ((kinds_of(case) == FULL) == truth(case).every).all()


exact_patterns = [make for pattern, make in PATTERNS.items() if pattern not in (Segments, KeyRange, Tree)]


@settings(PROPERTY, max_examples=100)
@given(posed(lambda sizes: key_ranges(sizes) | token_trees(sizes)))
def test_ranges_and_trees_are_full_exactly(case):
    assert ((kinds_of(case) == FULL) == truth(case).every).all()


@settings(PROPERTY, max_examples=60)
@given(posed(lambda sizes: st.builds(Not, st.one_of(*(make(sizes) for make in exact_patterns)))))
def test_a_not_is_as_exact_as_its_mask(case):
    assert (kinds_of(case) == truth(case).kinds).all()


@settings(COMPILED)
@given(posed(functions, longest=24))
def test_a_function_is_exact(case):
    assert (kinds_of(case) == truth(case).kinds).all()


@st.composite
def documents(draw: Callable, sizes: Sizes) -> Mask:
    """Packed documents, one after the other with ascending ids; the queries are the last of the tokens, or all."""
    length = max(sizes.T, sizes.S)
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=length))
    ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.concatenate([ids, np.full(max(0, length - len(ids)), len(lengths))])[:length]
    return Segments(ids[-sizes.T :], ids[-sizes.S :])


@settings(PROPERTY, max_examples=150)
@given(posed(documents))
def test_documents_are_exact(case):
    # Without a gap in the ids two ranges that overlap share an id. See `test_where_the_proof_gives_away` for the rest.
    assert (kinds_of(case) == truth(case).kinds).all()


@settings(PROPERTY, max_examples=100)
@given(posed(lambda sizes: trees(st.one_of(*(make(sizes) for make in exact_patterns)), (And,))))
def test_an_and_is_full_exactly(case):
    assert ((kinds_of(case) == FULL) == truth(case).every).all()


@settings(PROPERTY, max_examples=100)
@given(posed(lambda sizes: trees(st.one_of(*(make(sizes) for make in exact_patterns)), (Or,))))
def test_an_or_is_empty_exactly(case):
    assert ((kinds_of(case) == EMPTY) == ~truth(case).some).all()


def test_where_the_proof_gives_away():
    """PARTIAL where the truth is EMPTY or FULL costs time only. These are the ways it happens."""

    def kind(mask: Mask, T: int = 4, S: int = 4) -> int:
        (found,) = TileMap(mask=mask.bind(B=1, N=1, T=T, S=S), T=T, S=S, block_q=T, block_k=S).kinds().ravel()
        return found

    # Ids are summed up as a range, which holds numbers between them that are nobody's id.
    assert kind(Segments(np.array([1, 3, 1, 3]), np.array([2, 2, 2, 2]))) == PARTIAL
    # The only id in common is that of padding.
    assert kind(Segments(np.array([1, 1, 0, 0]), np.array([0, 0, -1, -1]), padding_id=0)) == PARTIAL
    # Two masks, each with a pair in the tile, but none in common; as spans too: k <= q and k >= q + 1.
    assert kind(Dense(np.eye(4, dtype=bool)) & Dense(~np.eye(4, dtype=bool))) == PARTIAL
    assert kind(Causal() & SlidingWindow(0, None, offset=1)) == PARTIAL
    # Two masks, neither true of all pairs of the tile, but together.
    assert kind(Causal() | SlidingWindow(0, None, offset=1)) == PARTIAL
    # Spans do better than the minimum of their kinds where the hulls themselves part: keys up to 3, keys from 6.
    parted = Lengths(kv=4) & SlidingWindow(0, None, offset=6)
    assert kind(parted, S=10) == EMPTY
    assert min(kind(part, S=10) for part in parted.masks) == PARTIAL


with_spans = [make for pattern, make in PATTERNS.items() if pattern.has_spans]


@settings(PROPERTY, max_examples=120)
@given(posed(lambda sizes: trees(st.one_of(*(make(sizes) for make in with_spans)), (And,))))
def test_runs_are_the_kinds(case):
    tile_map = case.tile_map
    assert tile_map.form == "runs"
    kinds = kinds_of(case)
    for b in range(case.sizes.B):
        values = row_values(case.mask, b)
        rows = [tile_map.run(row, *values) for row in range(tile_map.rows)]
        assert (np.array([kinds_of_run(run, tile_map.columns) for run in rows]) == kinds[b]).all()
        # Of all rows at once.
        runs = tile_map.run(np.arange(tile_map.rows, dtype=np.int32), *values)
        assert (kinds_of_run(runs, tile_map.columns) == kinds[b]).all()


@settings(PROPERTY, max_examples=100)
@given(posed(lambda sizes: trees(patterns(sizes))))
def test_form_follows_from_the_spans(case):
    def has_spans(mask: Mask) -> bool:
        match mask:
            case And():
                return all(map(has_spans, mask.masks))
            case Full() | Causal() | SlidingWindow() | Lengths() | PrefixLM() | Chunked():
                return True
            case _:
                return False

    assert case.mask.has_spans == has_spans(case.mask)
    assert case.tile_map.form == ("runs" if has_spans(case.mask) else "lists")


@settings(PROPERTY, max_examples=100)
@given(posed(lambda sizes: trees(patterns(sizes))))
def test_lists_are_the_kinds(case):
    kinds, lists = np.asarray(case.tile_map.kinds()), case.tile_map.lists()
    columns = kinds.shape[3]
    assert lists.count.shape == kinds.shape[:3]
    assert lists.column.shape == lists.kind.shape == kinds.shape
    for b, n, row in np.ndindex(kinds.shape[:3]):
        count, column, kind = (array[b, n, row] for array in lists)
        visited = [j for j in range(columns) if kinds[b, n, row, j] != EMPTY]
        assert count == len(visited)
        assert column[:count].tolist() == visited
        assert sorted(column.tolist()) == list(range(columns))
        assert kind.tolist() == kinds[b, n, row, column].tolist()


@settings(PROPERTY, max_examples=100)
@given(posed(lambda sizes: trees(patterns(sizes))))
def test_the_union_is_sound_for_every_batch_row_and_head(case):
    kinds, true = kinds_of(case), truth(case)
    one = union(case.tile_map.kinds())
    assert one.shape == (case.tile_map.rows, case.tile_map.columns)
    assert one.dtype == np.int8
    assert_sound(np.broadcast_to(one, kinds.shape), true)
    # And no further off than it must be.
    alike = (kinds == kinds[:1, :1]).all((0, 1))
    assert (one == np.where(alike, kinds[0, 0], PARTIAL)).all()


@COMPILED
@given(posed(lambda sizes: trees(patterns(sizes), depth=1)), st.integers(0, 7))
def test_traced_is_as_in_numpy(case, known):
    """Kinds, lists and union do not depend on which arrays are traced, and where none is they are known in numpy."""
    leaves, tree = jax.tree.flatten(case.mask)
    is_known = [bool(known >> index % 3 & 1) for index in range(len(leaves))]
    traced = [None if is_known else leaf for leaf, is_known in zip(leaves, is_known)]

    @jax.jit
    def on_device(traced: list) -> Any:
        own = [leaf if is_known else other for leaf, is_known, other in zip(leaves, is_known, traced)]
        tile_map = dataclasses.replace(case.tile_map, mask=jax.tree.unflatten(tree, own))
        found = tile_map.kinds(), tile_map.lists(), union(tile_map.kinds())
        assert not all(is_known) or all(isinstance(array, np.ndarray) for array in jax.tree.leaves(found))
        return found

    kinds, lists, one = on_device(traced)
    assert kinds.dtype == np.int8
    assert (kinds == case.tile_map.kinds()).all()
    assert all((traced == in_numpy).all() for traced, in_numpy in zip(lists, case.tile_map.lists()))
    assert (one == union(case.tile_map.kinds())).all()


@COMPILED
@given(posed(lambda sizes: trees(st.one_of(*(make(sizes) for make in with_spans)), (And,), depth=2)))
def test_run_takes_a_traced_row(case):
    tile_map, kinds = case.tile_map, kinds_of(case)
    run = jax.jit(tile_map.run)
    for b in {0, case.sizes.B - 1}:
        values = row_values(case.mask, b)
        for row in {0, tile_map.rows // 2, tile_map.rows - 1}:
            assert (kinds_of_run(run(np.int32(row), *values), tile_map.columns) == kinds[b, 0, row]).all()


# Schedules by hand ----------------------------------------------------------------------------------------------------


def tiles(mask: Mask, *, T: int, S: int, block_q: int = 4, block_k: int = 4, B: int = 1, **options: bool) -> TileMap:
    return TileMap(mask=mask.bind(B=B, N=1, T=T, S=S), T=T, S=S, block_q=block_q, block_k=block_k, **options)


def schedule(tile_map: TileMap, b: int = 0) -> list[str]:
    """The columns that each row visits in turn, as in "0f 1p": column 0 is FULL, column 1 PARTIAL."""
    count, column, kind = (np.asarray(array)[b, 0] for array in tile_map.lists())
    rows = [zip(column[row][: count[row]], kind[row]) for row in range(tile_map.rows)]
    return [" ".join(f"{j}{'-pf'[kind]}" for j, kind in row) for row in rows]


def run_schedule(tile_map: TileMap, b: int = 0) -> list[str]:
    """The same from `run`."""
    rows = [tile_map.run(row, *row_values(tile_map.mask, b)) for row in range(tile_map.rows)]
    return [
        " ".join(f"{j}{'f' if run.full_start <= j < run.full_stop else 'p'}" for j in range(run.start, run.stop))
        for run in rows
    ]


DOCUMENTS = Segments(np.array([7, 7, 7, 7, 7, 7, 8, 8, 9, 9, 9, 9, 9, 9, 9, 9]))
PADDED = Segments(np.array([3] * 5 + [0] * 7), np.array([0] + [3] * 7 + [0] * 4), padding_id=0)


@pytest.mark.parametrize(
    ("tile_map", "wanted"),
    [
        (tiles(Full(), T=8, S=12), ["0f 1f 2f", "0f 1f 2f"]),
        (tiles(Causal(), T=16, S=16), ["0p", "0f 1p", "0f 1f 2p", "0f 1f 2f 3p"]),
        (tiles(Causal(), T=16, S=16, transpose=True), ["0p 1f 2f 3f", "1p 2f 3f", "2p 3f", "3p"]),
        # A tile that is twice as wide as it is high.
        (tiles(Causal(), T=16, S=16, block_k=8), ["0p", "0p", "0f 1p", "0f 1p"]),
        (tiles(Causal(), T=16, S=16, block_k=8, transpose=True), ["0p 1p 2f 3f", "2p 3p"]),
        # Tiles that stick out are never FULL.
        (tiles(Causal(), T=10, S=10), ["0p", "0f 1p", "0p 1p 2p"]),
        (tiles(Causal(), T=10, S=10, transpose=True), ["0p 1f 2p", "1p 2p", "2p"]),
        (tiles(Full(), T=6, S=9), ["0f 1f 2p", "0p 1p 2p"]),
        # Aligned at the ends; and queries before the first key they could see.
        (tiles(Causal(offset=8), T=4, S=12), ["0f 1f 2p"]),
        (tiles(Causal(offset=-8), T=16, S=8), ["", "", "0p", "0f 1p"]),
        (tiles(Causal(offset=-8), T=16, S=8, transpose=True), ["2p 3f", "3p"]),
        # Keys 4i - 8 to 4i + 3 are seen by some query of tile i, keys 4i - 5 to 4i by all.
        (tiles(SlidingWindow(8, 0), T=20, S=20), ["0p", "0f 1p", "0p 1f 2p", "1p 2f 3p", "2p 3f 4p"]),
        (
            tiles(SlidingWindow(8, 0), T=20, S=20, transpose=True),
            ["0p 1f 2p", "1p 2f 3p", "2p 3f 4p", "3p 4f", "4p"],
        ),
        (tiles(SlidingWindow(3, 3), T=12, S=12), ["0f 1p", "0p 1f 2p", "1p 2f"]),
        (tiles(SlidingWindow(0, None), T=12, S=8), ["0p 1f", "1p", ""]),
        # Query 4 would see key 7, the first that is not there.
        (tiles(SlidingWindow(0, 0, offset=3), T=9, S=7), ["0p 1p", "", ""]),
        (tiles(Causal() & SlidingWindow(None, None) & Lengths(kv=5), T=12, S=12), ["0p", "0f 1p", "0f 1p"]),
        # Documents of 6, 2 and 8 tokens.
        (tiles(DOCUMENTS, T=16, S=16), ["0f 1p", "0p 1p", "2f 3f", "2f 3f"]),
        (tiles(DOCUMENTS & Causal(), T=16, S=16), ["0p", "0p 1p", "2p", "2f 3p"]),
        (tiles(DOCUMENTS & Causal(), T=16, S=16, transpose=True), ["0p 1p", "1p", "2p 3f", "3p"]),
        # Where either side is padding alone a tile is EMPTY, though the ids of both sides meet.
        (tiles(PADDED, T=12, S=12), ["0p 1f", "0p 1p", ""]),
        (tiles(PADDED, T=12, S=12, transpose=True), ["0p 1p", "0f 1p", ""]),
        # A prefix of four keys that all see.
        (tiles(Causal() | Lengths(kv=4), T=12, S=12), ["0f", "0f 1p", "0f 1f 2p"]),
    ],
    ids=lambda value: repr(value.mask) if isinstance(value, TileMap) else "",
)
def test_schedule(tile_map, wanted):
    assert schedule(tile_map) == wanted
    if tile_map.form == "runs":
        assert run_schedule(tile_map) == wanted


def test_schedule_of_ragged_lengths():
    mask = Lengths(q=np.array([5, 8, 3]), kv=np.array([9, 0, 12]))
    wanted = [["0f 1f 2p", "0p 1p 2p"], ["", ""], ["0p 1p 2p", ""]]
    transposed = [["0f 1p", "0f 1p", "0p 1p"], ["", "", ""], ["0p", "0p", "0p"]]
    for b in range(3):
        for find in (schedule, run_schedule):
            assert find(tiles(mask, T=8, S=12, B=3), b) == wanted[b]
            assert find(tiles(mask, T=8, S=12, B=3, transpose=True), b) == transposed[b]


def test_schedule_of_an_offset_per_batch_row():
    mask = SlidingWindow(3, 0, offset=np.array([0, 8, -4]))
    wanted = [["0p", "0p 1p", "1p 2p"], ["1p 2p", "2p", ""], ["", "0p", "0p 1p"]]
    for b in range(3):
        for find in (schedule, run_schedule):
            assert find(tiles(mask, T=12, S=12, B=3), b) == wanted[b]


def test_the_union_of_a_batch():
    kinds = tiles(Lengths(kv=np.array([4, 10, 8])), T=4, S=16, B=3).kinds()
    assert kinds[:, 0, 0].tolist() == [
        [FULL, EMPTY, EMPTY, EMPTY],
        [FULL, FULL, PARTIAL, EMPTY],
        [FULL, FULL, EMPTY, EMPTY],
    ]
    assert union(kinds).tolist() == [[FULL, PARTIAL, PARTIAL, EMPTY]]


def test_lists_of_any_kinds():
    lists = lists_of(np.array([[1, 0, 2, 0], [0, 0, 0, 0], [2, 2, 1, 1]], np.int8))
    assert lists.count.tolist() == [2, 0, 4]
    assert lists.column.tolist() == [[0, 2, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert lists.kind.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [2, 2, 1, 1]]


# Work and memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [64, 256])
@pytest.mark.parametrize("transpose", [False, True])
def test_work_is_that_of_the_visited_tiles(count, transpose):
    """Of `count` rows of tiles a window visits a few each, causal half of them, documents their own."""

    def visited(mask: Mask) -> tuple[int, int]:
        """The number of tiles that are visited, and of those that are evaluated."""
        options = {"T": 128 * count, "S": 128 * count, "block_q": 128, "block_k": 128, "transpose": transpose}
        kinds = tiles(mask, **options).kinds()
        return int((kinds != EMPTY).sum()), int((kinds == PARTIAL).sum())

    # The two tiles before one's own, which the first and the second row lack; only the one in between is FULL.
    assert visited(SlidingWindow(256, 0)) == (3 * count - 3, 2 * count - 2)
    assert visited(Causal()) == (count * (count + 1) // 2, count)
    documents = Segments(np.arange(128 * count) // 1024)
    assert visited(documents) == (8 * count, 0)
    assert visited(documents & Causal()) == (count // 8 * 36, count)


def array_sizes(text: str) -> set[int]:
    """The number of elements of each array in the text of a compiled program, as in `s32[1,1024]`."""
    return {math.prod(map(int, found.split(","))) for found in re.findall(r"\b[a-z]+\d*\[(\d+(?:,\d+)*)\]", text)}


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("ask", [TileMap.kinds, TileMap.lists], ids=["kinds", "lists"])
@pytest.mark.parametrize(
    "make",
    [
        lambda ids, offset: Segments(ids, padding_id=0),
        lambda ids, offset: (Segments(ids) | Lengths(kv=offset)) & Causal(offset=offset),
    ],
    ids=["documents", "tree"],
)
def test_memory_is_that_of_the_tiles(make, ask, transpose):
    T, block = 131072, 128
    number = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32)
    mask = make(number((1, T)), number((1,))).bind(B=1, N=1, T=T, S=T)
    options = {"T": T, "S": T, "block_q": block, "block_k": block, "transpose": transpose}

    compiled = jax.jit(lambda mask: ask(TileMap(mask=mask, **options))).lower(mask).compile()
    tile_count = (T // block) ** 2
    found = array_sizes(compiled.as_text())
    assert tile_count in found and T in found, "the text is not read rightly"
    assert max(found) <= tile_count
    # One byte for each pair would be 16384 for each tile. 4.0 (lists) and 0.05 (kinds) on a CPU, JAX 0.11.2.
    assert compiled.memory_analysis().temp_size_in_bytes <= 8 * tile_count


def launched(text: str) -> collections.Counter[str]:
    """What a compiled program runs one after the other; of the reductions that XLA for a CPU splits in two, one."""
    entry = text[text.index("\nENTRY ") :]
    kinds = "fusion|sort|while|custom-call|scatter|gather"
    found = re.findall(rf"%([\w-]+?)[.\d]* = (?:\([^=]*?\)|\S+) ({kinds})\(", entry)
    return collections.Counter(kind for name, kind in found if "reduce-window" not in name)


@pytest.mark.parametrize(
    "mask",
    [
        Segments(np.arange(32768) // 300) & Causal(),
        Segments(np.arange(32768) // 300, padding_id=0) & SlidingWindow(99, 0),
        KeyRange(np.arange(32768) // 300 * 300, np.arange(32768)),
    ],
    ids=["documents", "padding", "ranges"],
)
@pytest.mark.parametrize(("block_q", "transpose"), [(128, False), (64, True)], ids=["forward", "backward"])
def test_lists_are_made_by_few_kernels(mask, block_q, transpose):
    """Each takes some microseconds on a GPU, however little it does: two reductions of each array, one for all."""
    T = 32768
    bound = jax.tree.map(jnp.asarray, mask.bind(B=1, N=1, T=T, S=T))
    options = {"T": T, "S": T, "block_q": block_q, "block_k": 128, "transpose": transpose}
    compiled = jax.jit(lambda mask: TileMap(mask=mask, **options).lists()).lower(bound).compile()
    found = launched(compiled.as_text())
    assert found.keys() == {"fusion", "sort"} and found["sort"] == 1
    # Where a list is used, column and kind become one array, so it is one less.
    assert found["fusion"] <= 9, found


def _in_reach(b, n, q, k, reach, weight, pair):
    return (abs(q - k) <= reach + n) & (weight > 0) | pair


def test_a_function_is_evaluated_once_for_both_passes_and_in_no_array_of_all_pairs():
    T, N = 8192, 2
    mask = MaskFn(
        _in_reach,
        per_query=(np.full(T, 300),),
        per_key=(np.ones(T, np.float32),),
        per_pair=(np.zeros((T, 1), bool),),
    )
    bound = jax.tree.map(jnp.asarray, (mask & Causal()).bind(B=1, N=N, T=T, S=T))
    forward = {"T": T, "S": T, "block_q": 128, "block_k": 128}
    backward = forward | {"block_q": 64, "transpose": True}

    def compiled(*passes: dict[str, Any]) -> Any:
        def lists(mask):
            return [TileMap(mask=mask, **options).lists() for options in passes]

        return jax.jit(lists).lower(bound).compile()

    both = compiled(forward, backward)
    grains = N * (T // 64) ** 2
    # Within a fusion numbers have shapes, and no memory.
    text = both.as_text()
    assert max(array_sizes(text[text.index("\nENTRY ") :])) == grains
    # One byte for each pair and head would be 4096 for each grain.
    assert both.memory_analysis().temp_size_in_bytes <= 16 * grains
    operations = [found.cost_analysis()["flops"] for found in (both, compiled(forward), compiled(backward))]
    assert max(operations) < 1.2 * min(operations)


@pytest.mark.parametrize(("block_q", "block_k"), [(64, 64), (128, 64), (64, 192), (256, 128), (96, 64)])
def test_kinds_of_a_function_are_exact_for_tiles_of_kernels(block_q, block_k):
    sizes = Sizes(B=1, N=2, T=323, S=390)
    random = np.random.default_rng(0)
    reach = np.repeat(random.integers(-80, 200, 11), 30)[: sizes.T]
    weight = np.repeat(random.random(9) - 0.2, 50)[: sizes.S].astype(np.float32)
    pair = np.zeros((sizes.T, sizes.S), bool)
    pair[300, 20] = pair[:256] = True
    mask = MaskFn(_in_reach, per_query=(reach,), per_key=(weight,), per_pair=(pair,)).bind(**sizes._asdict())
    for transpose in (False, True):
        tile_map = TileMap(mask=mask, T=323, S=390, block_q=block_q, block_k=block_k, transpose=transpose)
        kinds = tile_map.kinds().swapaxes(2, 3) if transpose else tile_map.kinds()
        for n, i, j in np.ndindex(kinds.shape[1:]):
            q, k = (np.arange(at * size, (at + 1) * size) for at, size in ((i, block_q), (j, block_k)))
            inside = (q < 323)[:, None] & (k < 390)
            pairs = mask.allowed(np.minimum(q, 322)[:, None], np.minimum(k, 389), n=n) & inside
            assert kinds[0, n, i, j] == (FULL if pairs.all() else PARTIAL if pairs.any() else EMPTY)
        assert {EMPTY, PARTIAL, FULL} == set(np.unique(kinds))


def test_a_run_reads_no_memory():
    """Its arithmetic is that of numbers: no array is made, whatever the number of tiles."""
    mask = Causal(offset=np.array([3])) & Lengths(q=np.array([7]), kv=np.array([9])) & SlidingWindow(5, 6)
    tile_map = tiles(mask, T=2**20, S=2**20)
    jaxpr = jax.make_jaxpr(tile_map.run)(np.int32(0), *row_values(tile_map.mask, 0))
    assert len(jaxpr.eqns) > 10 and not jaxpr.consts
    assert {variable.aval.shape for equation in jaxpr.eqns for variable in equation.outvars} == {()}


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (Full(), "square"),
        (Causal(), "lower"),
        (Causal(offset=2**29), "square"),
        (Causal(offset=-(2**29)), "nothing"),
        (SlidingWindow(None, 0), "lower"),
        (SlidingWindow(2**29, 2**29), "square"),
        (SlidingWindow(2**29, 2**29, offset=-(2**29)), "lower"),
        (SlidingWindow(0, None), "upper"),
        (SlidingWindow(2**29, 0, offset=2**29), "upper"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("transpose", [False, True])
def test_the_longest_problem_stays_inside_int32(mask, shape, transpose):
    """Indices, offsets and distances at their limits: 512 x 512 tiles, the last of which stick out by one."""
    T, block = 2**29 - 1, 2**20
    square = np.full((512, 512), FULL)
    diagonal = np.eye(512, dtype=int)
    wanted = {
        "square": square,
        "lower": np.tril(square) - diagonal,
        "upper": np.triu(square) - diagonal,
        "nothing": square * EMPTY,
    }[shape]
    ragged = np.where((np.arange(512) == 511)[:, None] | (np.arange(512) == 511), np.minimum(wanted, PARTIAL), wanted)
    tile_map = tiles(mask, T=T, S=T, block_q=block, block_k=block, transpose=transpose)
    wanted = ragged.T if transpose else ragged
    assert (tile_map.kinds()[0, 0] == wanted).all()
    rows = np.arange(512, dtype=np.int32)
    assert (kinds_of_run(jax.jit(tile_map.run)(rows), tile_map.columns) == wanted).all()

    index = jnp.array([0, 1, T - 2, T - 1], jnp.int32)
    corners = {
        "square": np.ones((4, 4)),
        "lower": np.tri(4),
        "upper": np.tri(4).T,
        "nothing": np.zeros((4, 4)),
    }[shape]
    assert (np.asarray(mask.allowed(index[:, None], index)) == corners).all()
