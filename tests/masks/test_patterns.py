"""The truth of each mask against matrices drawn by hand, and what a mask is as an object: record, pytree, picture."""

import functools
import pathlib
import re
import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflash.masks
from jflash.errors import ArgumentError, DtypeError, ShapeError
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
    Or,
    PrefixLM,
    Segments,
    SlidingWindow,
    TileMap,
    Tree,
)
from jflash.masks.mask import MaskStructure, TileKind

# All different, so that no axis can be taken for another.
B, N, T, S = 2, 3, 4, 5
SIZES = {"B": B, "N": N, "T": T, "S": S}


def drawn(text: str) -> np.ndarray:
    """The booleans of a drawing, (B or 1, N or 1, T, S): a line for each query, a column for each key.

    Batch rows stand side by side, heads below each other with an empty line between; where all batch rows or all heads
    are alike, there is one.
    """
    heads = textwrap.dedent(text).strip().split("\n\n")
    pairs = [[[[pair == "#" for pair in row] for row in line.split()] for line in head.splitlines()] for head in heads]
    return np.array(pairs).transpose(2, 0, 1, 3)


class Case(NamedTuple):
    mask: Mask
    drawing: str


EVERYTHING = """
    #####
    #####
    #####
    #####
"""
NOTHING = """
    .....
    .....
    .....
    .....
"""
DIAGONAL = """
    #....
    .#...
    ..#..
    ...#.
"""
LOWER = """
    #....
    ##...
    ###..
    ####.
"""

FULL = {"full": Case(Full(), EVERYTHING)}

CAUSAL = {
    "causal": Case(Causal(), LOWER),
    "causal, bottom right": Case(
        Causal(offset=S - T),
        """
        ##...
        ###..
        ####.
        #####
        """,
    ),
    "causal, negative offset": Case(
        Causal(offset=-2),
        """
        .....
        .....
        #....
        ##...
        """,
    ),
    "causal, numpy int": Case(Causal(offset=np.int8(-1)), "\n.....\n#....\n##...\n###.."),
    "causal, offset past the keys": Case(Causal(offset=S - 1), EVERYTHING),
    "causal, offset before the keys": Case(Causal(offset=-T), NOTHING),
    "causal, scalar array": Case(Causal(offset=np.array(0)), LOWER),
    "causal, array of one": Case(Causal(offset=jnp.array([0])), LOWER),
    "causal, per batch row": Case(
        Causal(offset=np.array([2, -1])),
        """
        ###..   .....
        ####.   #....
        #####   ##...
        #####   ###..
        """,
    ),
    "causal, per batch row, far off": Case(
        Causal(offset=np.array([2**40, -(2**40)])),
        """
        #####   .....
        #####   .....
        #####   .....
        #####   .....
        """,
    ),
}

WINDOW = {
    "window 0, 0": Case(SlidingWindow(0, 0), DIAGONAL),
    "window 1, 0": Case(
        SlidingWindow(1, 0),
        """
        #....
        ##...
        .##..
        ..##.
        """,
    ),
    "window 0, 1": Case(
        SlidingWindow(0, 1),
        """
        ##...
        .##..
        ..##.
        ...##
        """,
    ),
    "window 2, 1": Case(
        SlidingWindow(2, 1),
        """
        ##...
        ###..
        ####.
        .####
        """,
    ),
    "window None, 0": Case(SlidingWindow(None, 0), LOWER),
    "window 3, None": Case(SlidingWindow(3, None), EVERYTHING),
    "window 0, None": Case(
        SlidingWindow(0, None),
        """
        #####
        .####
        ..###
        ...##
        """,
    ),
    "window None, None": Case(SlidingWindow(None, None), EVERYTHING),
    "window farther than any key": Case(SlidingWindow(10**12, 0), LOWER),
    # 0 - 1 in eight bits without sign is 255.
    "window of a numpy int": Case(SlidingWindow(np.uint8(1), np.uint8(0)), "\n#....\n##...\n.##..\n..##."),
    "window 1, 0, offset 1": Case(
        SlidingWindow(1, 0, offset=1),
        """
        ##...
        .##..
        ..##.
        ...##
        """,
    ),
    "window 1, 0, offset -2": Case(
        SlidingWindow(1, 0, offset=-2),
        """
        .....
        .....
        #....
        ##...
        """,
    ),
    "window 0, None, offset 2": Case(
        SlidingWindow(0, None, offset=2),
        """
        ..###
        ...##
        ....#
        .....
        """,
    ),
    "window None, 1, offset -2": Case(
        SlidingWindow(None, 1, offset=-2),
        """
        .....
        #....
        ##...
        ###..
        """,
    ),
    "window None, None, offset": Case(SlidingWindow(None, None, offset=-3), EVERYTHING),
    "window 0, 1, per batch row": Case(
        SlidingWindow(0, 1, offset=jnp.array([2, -1])),
        """
        ..##.   #....
        ...##   ##...
        ....#   .##..
        .....   ..##.
        """,
    ),
}

LENGTHS = {
    "lengths, none": Case(Lengths(), EVERYTHING),
    "lengths, queries, int": Case(
        Lengths(q=3),
        """
        #####
        #####
        #####
        .....
        """,
    ),
    "lengths, queries": Case(
        Lengths(q=np.array([1, 3])),
        """
        #####   #####
        .....   #####
        .....   #####
        .....   .....
        """,
    ),
    "lengths, keys": Case(
        Lengths(kv=jnp.array([4, 1])),
        """
        ####.   #....
        ####.   #....
        ####.   #....
        ####.   #....
        """,
    ),
    "lengths, both": Case(
        Lengths(q=np.array([2, 3]), kv=np.array([3, 2])),
        """
        ###..   ##...
        ###..   ##...
        .....   ##...
        .....   .....
        """,
    ),
    "lengths, one for all rows": Case(
        Lengths(q=np.array([2]), kv=np.array(3)),
        """
        ###..
        ###..
        .....
        .....
        """,
    ),
    "lengths, past the end": Case(
        Lengths(q=np.array([9, 2**40]), kv=np.array([6, 2])),
        """
        #####   ##...
        #####   ##...
        #####   ##...
        #####   ##...
        """,
    ),
    "lengths, int past the end": Case(Lengths(kv=2**40), EVERYTHING),
    "lengths, zero": Case(
        Lengths(q=np.array([4, 0]), kv=np.array([0, 5])),
        """
        .....   .....
        .....   .....
        .....   .....
        .....   .....
        """,
    ),
    "lengths, below zero": Case(Lengths(kv=np.array([-1])), NOTHING),
    # Clipping the lengths to T and S in their own dtype would make 127 of 300.
    "lengths, eight bits": Case(
        Lengths(kv=jnp.array([1, 127], jnp.int8)),
        """
        #....   #####
        #....   #####
        #....   #####
        #....   #####
        """,
    ),
}

SEGMENTS = {
    "segments, sorted": Case(
        Segments(np.array([1, 1, 2, 4]), np.array([1, 2, 2, 3, 4])),
        """
        #....
        #....
        .##..
        ....#
        """,
    ),
    "segments, unsorted": Case(
        Segments(np.array([2, 1, 2, 3]), np.array([1, 3, 2, 1, 2])),
        """
        ..#.#
        #..#.
        ..#.#
        .#...
        """,
    ),
    "segments, padding": Case(
        Segments(np.array([1, 1, 0, 2]), np.array([0, 1, 2, 2, 0]), padding_id=0),
        """
        .#...
        .#...
        .....
        ..##.
        """,
    ),
    "segments, 0 is an id": Case(
        Segments(np.array([1, 1, 0, 2]), np.array([0, 1, 2, 2, 0])),
        """
        .#...
        .#...
        #...#
        ..##.
        """,
    ),
    "segments, negative ids": Case(
        Segments(np.array([-1, -1, -7, 3]), np.array([-7, -1, 3, -7, -1]), padding_id=-1),
        """
        .....
        .....
        #..#.
        ..#..
        """,
    ),
    "segments, per batch row": Case(
        Segments(jnp.array([[1, 1, 2, 2], [1, 2, 2, 3]]), jnp.array([[1, 1, 2, 2, 2], [3, 3, 2, 1, 1]])),
        """
        ##...   ...##
        ##...   ..#..
        ..###   ..#..
        ..###   ##...
        """,
    ),
    "segments, queries alike in all rows": Case(
        Segments(np.array([[1, 1, 2, 2]]), np.array([[1, 1, 2, 2, 2], [2, 2, 2, 1, 1]])),
        """
        ##...   ...##
        ##...   ...##
        ..###   ###..
        ..###   ###..
        """,
    ),
    "segments, nobody meets": Case(Segments(np.arange(4), np.arange(4, 9)), NOTHING),
    # In eight bits without sign -1 is 255.
    "segments, padding outside of the dtype": Case(
        Segments(jnp.array([255, 0, 1, 1], jnp.uint8), jnp.array([255, 0, 0, 1, 255], jnp.uint8), padding_id=-1),
        """
        #...#
        .##..
        ...#.
        ...#.
        """,
    ),
}

DENSE = {
    "dense, (T, S)": Case(
        Dense(np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 1]], bool)),
        """
        #..#.
        .....
        #####
        .#..#
        """,
    ),
    "dense, (N, T, S)": Case(
        Dense(np.stack([np.ones((T, S), bool), np.zeros((T, S), bool), np.eye(T, S, dtype=bool)])),
        "\n\n".join(map(textwrap.dedent, (EVERYTHING.strip("\n"), NOTHING.strip("\n"), DIAGONAL.strip("\n")))),
    ),
    "dense, (B, N, T, S)": Case(
        Dense(jnp.arange(B * N * T * S).reshape(B, N, T, S) % 7 == 0),
        """
        #....   ...#.
        ..#..   .....
        ....#   #....
        .....   ..#..

        .#...   ....#
        ...#.   .....
        .....   .#...
        #....   ...#.

        ..#..   .....
        ....#   #....
        .....   ..#..
        .#...   ....#
        """,
    ),
    "dense, (B, 1, 1, S)": Case(
        Dense(np.array([[1, 0, 0, 1, 0], [0, 1, 1, 0, 0]], bool)[:, None, None]),
        """
        #..#.   .##..
        #..#.   .##..
        #..#.   .##..
        #..#.   .##..
        """,
    ),
    "dense, (1, N, T, 1)": Case(
        Dense(np.array([[1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 1]], bool)[None, :, :, None]),
        """
        #####
        .....
        .....
        #####

        .....
        #####
        #####
        .....

        .....
        .....
        .....
        #####
        """,
    ),
    "dense, (1, 1)": Case(Dense(np.array([[True]])), EVERYTHING),
}

COMBINED = {
    "and": Case(
        Causal() & SlidingWindow(1, None),
        """
        #....
        ##...
        .##..
        ..##.
        """,
    ),
    "or": Case(
        Causal(offset=-2) | SlidingWindow(0, 0),
        """
        #....
        .#...
        #.#..
        ##.#.
        """,
    ),
    "and of three": Case(
        And(Causal(offset=1), Lengths(q=np.array([4, 3]), kv=np.array([3, 5])), SlidingWindow(2, None)),
        """
        ##...   ##...
        ###..   ###..
        ###..   ####.
        .##..   .....
        """,
    ),
    "or of three": Case(
        Or(
            Segments(np.array([1, 1, 2, 2]), np.array([1, 3, 3, 3, 2])),
            SlidingWindow(0, 0),
            Lengths(q=np.array([0, 1])),
        ),
        """
        #....   #####
        ##...   ##...
        ..#.#   ..#.#
        ...##   ...##
        """,
    ),
    "of one": Case(Or(And(Causal())), LOWER),
    "prefix and documents": Case(
        (Causal() | Lengths(kv=np.array([2, 3]))) & Segments(np.array([1, 1, 1, 2]), np.array([1, 2, 1, 1, 2])),
        """
        #....   #.#..
        #....   #.#..
        #.#..   #.#..
        .#...   .#...
        """,
    ),
    "per head and per batch row": Case(
        Dense(np.array([True, False, True])[:, None, None]) & (Causal(offset=jnp.array([0, -3])) | SlidingWindow(0, 0)),
        """
        #....   #....
        ##...   .#...
        ###..   ..#..
        ####.   #..#.

        .....   .....
        .....   .....
        .....   .....
        .....   .....

        #....   #....
        ##...   .#...
        ###..   ..#..
        ####.   #..#.
        """,
    ),
}

PREFIX = {
    "prefix": Case(PrefixLM(2), "\n##...\n##...\n###..\n####."),
    "prefix, per batch row": Case(
        PrefixLM(np.array([0, 4])),
        """
        #....   ####.
        ##...   ####.
        ###..   ####.
        ####.   ####.
        """,
    ),
    "prefix past the end": Case(PrefixLM(2**40), EVERYTHING),
    "prefix below zero": Case(PrefixLM(jnp.array(-3)), LOWER),
}

CHUNKED = {
    "chunks of 1": Case(Chunked(1), DIAGONAL),
    "chunks of 2": Case(Chunked(np.uint8(2)), "\n##...\n##...\n..##.\n..##."),
    "chunks of 3, causal": Case(Chunked(3) & Causal(), "\n#....\n##...\n###..\n...#."),
    "one chunk": Case(Chunked(2**30), EVERYTHING),
}

DILATED = {
    "every key": Case(Dilated(1), EVERYTHING),
    "every third key": Case(Dilated(3), "\n#..#.\n.#..#\n..#..\n#..#."),
    "step past the end": Case(Dilated(7), DIAGONAL),
}

KEY_RANGE = {
    "ranges": Case(KeyRange(np.array([0, 2, 4, 3]), np.array([1, 4, 2, 3])), "\n##...\n..###\n.....\n...#."),
    "ranges, per batch row": Case(
        KeyRange(jnp.array([[0, 0, 1, 5], [-9, 1, 0, 0]]), np.array([9, 2, 1, 9])),
        """
        #####   #####
        ###..   .##..
        .#...   ##...
        .....   #####
        """,
    ),
}

TREE = {
    "tree": Case(Tree(np.array([-1, 0, 0, 1]), prefix=1), "\n##...\n###..\n##.#.\n###.#"),
    "trees, per batch row": Case(
        Tree(jnp.array([[-1, 0, 0, 1], [-1, -1, 1, 2]]), prefix=1),
        """
        ##...   ##...
        ###..   #.#..
        ##.#.   #.##.
        ###.#   #.###
        """,
    ),
    "tree behind prefixes": Case(
        Tree(np.array([-1, 0, 0, 1]), prefix=np.array([0, 1]), keys=5),
        """
        #....   ##...
        ##...   ###..
        #.#..   ##.#.
        ##.#.   ###.#
        """,
    ),
}

NOT = {
    "not": Case(~Causal(), "\n.####\n..###\n...##\n....#"),
    "not of values": Case(
        ~(Lengths(kv=np.array([2, 0])) | SlidingWindow(0, 0)),
        """
        ..###   .####
        ..###   #.###
        ...##   ##.##
        ..#.#   ###.#
        """,
    ),
    "not not": Case(~~Causal(), LOWER),
}

FUNCTION = {
    "function": Case(MaskFn(lambda b, n, q, k: (q + k) % 3 == 0), "\n#..#.\n..#..\n.#..#\n#..#."),
    "function of nothing but the query": Case(MaskFn(lambda b, n, q, k: q > 1), "\n.....\n.....\n#####\n#####"),
    "function of batch row and head": Case(
        MaskFn(lambda b, n, q, k: (k <= q + n) & (k >= b)),
        """
        #....   .....
        ##...   .#...
        ###..   .##..
        ####.   .###.

        ##...   .#...
        ###..   .##..
        ####.   .###.
        #####   .####

        ###..   .##..
        ####.   .###.
        #####   .####
        #####   .####
        """,
    ),
    "function of values": Case(
        MaskFn(
            lambda b, n, q, k, reach, weight, low, flag, pair: (k - q <= reach) & (weight > low) & flag | pair,
            per_query=(np.array([0, 1, 0, 9]),),
            per_key=(jnp.array([[0.5, 0.1, 0.9, 0.4, 0.2], [0.0, 0.6, 0.6, 0.6, 0.6]]),),
            per_head=(np.array([0.3, 0.0, 0.45]),),
            per_batch=(np.array([True, False]),),
            per_pair=(np.eye(T, S, dtype=bool)[::-1],),
        ),
        """
        #..#.   ...#.
        #.#..   ..#..
        ###..   .#...
        #.##.   #....

        #..#.   ...#.
        ###..   ..#..
        ###..   .#...
        #####   #....

        #..#.   ...#.
        #.#..   ..#..
        ###..   .#...
        #.#..   #....
        """,
    ),
}

CASES = FULL | CAUSAL | WINDOW | LENGTHS | SEGMENTS | DENSE | COMBINED
CASES |= PREFIX | CHUNKED | DILATED | KEY_RANGE | TREE | NOT | FUNCTION
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def whole(pairs: Any) -> np.ndarray:
    """What `allowed` or a drawing says of every pair; both may leave out batch rows and heads that are alike."""
    return np.broadcast_to(np.asarray(pairs), (B, N, T, S))


def indices(xp: Any) -> dict[str, Any]:
    """Index arrays of all of (B, N, T, S)."""
    b, n, q, k = np.ix_(*map(np.arange, (B, N, T, S)))
    return {name: xp.asarray(index, xp.int32) for name, index in {"b": b, "n": n, "q": q, "k": k}.items()}


class TestAllowed:
    """`allowed` against the drawing, in each way to call it."""

    @each_case
    def test_before_bind(self, case):
        assert (whole(case.mask.allowed(**indices(np))) == whole(drawn(case.drawing))).all()

    @each_case
    def test_after_bind(self, case):
        bound = case.mask.bind(**SIZES)
        assert (whole(bound.allowed(**indices(np))) == whole(drawn(case.drawing))).all()

    @each_case
    def test_with_jax_indices(self, case):
        assert (whole(case.mask.allowed(**indices(jnp))) == whole(drawn(case.drawing))).all()

    @each_case
    def test_traced(self, case):
        bind_and_ask = jax.jit(lambda mask, indices: mask.bind(**SIZES).allowed(**indices))
        assert (whole(bind_and_ask(case.mask, indices(jnp))) == whole(drawn(case.drawing))).all()

    @each_case
    @pytest.mark.parametrize("xp", [np, jnp])
    def test_elementwise_on_arrays_of_any_shape(self, case, xp):
        random = np.random.default_rng(0)
        picked = {name: random.integers(0, size, (7, 2, 1)) for name, size in zip("bnqk", (B, N, T, S))}
        wanted = whole(drawn(case.drawing))[tuple(picked.values())]
        found = case.mask.bind(**SIZES).allowed(**{name: xp.asarray(index) for name, index in picked.items()})
        assert found.shape == (7, 2, 1)
        assert found.dtype == np.bool_
        assert (np.asarray(found) == wanted).all()

    @each_case
    def test_at_a_single_pair(self, case):
        wanted = whole(drawn(case.drawing))
        mask = case.mask.bind(**SIZES)
        for b, n, q, k in [(0, 0, 0, 0), (1, 2, 3, 4), (1, 0, 3, 1), (0, 1, 2, 4)]:
            assert bool(mask.allowed(q, k, b=b, n=n)) == wanted[b, n, q, k]

    @each_case
    def test_draw_is_the_drawing(self, case):
        for b, n in [(0, 0), (1, 2)]:
            lines = ["".join(".#"[int(pair)] for pair in row) for row in whole(drawn(case.drawing))[b, n]]
            assert case.mask.draw(T, S, b=b, n=n) == "\n".join(lines)


def test_the_parser_of_drawings():
    pairs = drawn("""
        #.   ..   .#
        ..   #.   .#

        ##   ..   .#
        ##   #.   ##
    """)
    assert pairs.shape == (3, 2, 2, 2)
    assert pairs[0].tolist() == [[[True, False], [False, False]], [[True, True], [True, True]]]
    assert pairs[2].tolist() == [[[False, True], [False, True]], [[False, True], [True, True]]]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("xp", [np, jnp])
def test_any_whole_dtype_of_ids_lengths_and_offsets(xp, dtype):
    with jax.enable_x64(np.dtype(dtype).itemsize == 8):
        check_whole_dtype(xp, dtype)


def check_whole_dtype(xp, dtype):
    ids = xp.asarray([1, 1, 2, 0], dtype), xp.asarray([1, 0, 2, 2, 1], dtype)
    masks = {
        "segments": Segments(*ids, padding_id=0),
        "lengths": Lengths(q=xp.asarray([3, 4], dtype), kv=xp.asarray([2, 100], dtype)),
        "window": SlidingWindow(2, 0, offset=xp.asarray([1, 0], dtype)),
    }
    wanted = {
        "segments": """
            #...#   #...#
            #...#   #...#
            ..##.   ..##.
            .....   .....
        """,
        "lengths": """
            ##...   #####
            ##...   #####
            ##...   #####
            .....   #####
        """,
        "window": """
            ##...   #....
            ###..   ##...
            .###.   ###..
            ..###   .###.
        """,
    }
    for name, mask in masks.items():
        for either in (mask, mask.bind(**SIZES)):
            assert (whole(either.allowed(**indices(np))) == whole(drawn(wanted[name]))).all(), name
        # One dtype whatever came in, so that kernels know it and equal calls compile once.
        assert {leaf.dtype for leaf in jax.tree.leaves(mask)} == {np.dtype(np.int32)}


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16])
def test_narrow_dtypes_in_a_problem_longer_than_they_count(dtype):
    # The lengths 300 and 131072 do not fit the dtype: what is clipped to them must not wrap around.
    for S in (300, 131072):
        bound = Lengths(q=jnp.array([3], dtype), kv=jnp.array([100], dtype)).bind(B=1, N=1, T=S, S=S)
        assert [int(leaf[0]) for leaf in jax.tree.leaves(bound)] == [3, 100]
    bound = Causal(offset=jnp.array([100], dtype)).bind(B=1, N=1, T=300, S=300)
    assert bound.offset.tolist() == [100]


def test_bind_brings_numbers_to_the_size_of_the_problem():
    # Kernels count with them: lengths are those of the arrays, and no sum with an offset passes 2^31.
    bound = Lengths(q=np.array([-3, 9]), kv=jnp.array([2**31 - 1, 3])).bind(**SIZES)
    assert (bound.q.tolist(), bound.kv.tolist()) == ([0, 4], [5, 3])
    far = jnp.array([2**31 - 1, -(2**31)])
    nothing = SlidingWindow(2, 1, offset=far).bind(**SIZES)
    assert not whole(nothing.allowed(**indices(np))).any()
    half = whole(SlidingWindow(None, 1, offset=far).bind(**SIZES).allowed(**indices(np)))
    assert half[0].all() and not half[1].any()


def test_a_padding_id_may_be_any_number_of_32_bits():
    for padding_id in (-(2**31), 2**31 - 1):
        mask = Segments(np.array([padding_id, 1], np.int32), padding_id=padding_id)
        assert mask.draw(2, 2) == "..\n.#"
    for padding_id in (-(2**31) - 1, 2**31):
        with pytest.raises(ArgumentError, match="an int of 32 bits or None"):
            Segments(np.arange(2), padding_id=padding_id)


def test_traced_offset():
    @jax.jit
    def rows(offset):
        both = SlidingWindow(1, 0, offset=offset) | Causal(offset=offset - 2)
        return both.bind(**SIZES).allowed(**indices(np))

    wanted = drawn("""
        .....
        #....
        ##...
        ###..
    """)
    assert (whole(rows(jnp.array(-1))) == whole(wanted)).all()
    wanted = drawn("""
        ##...   .....
        ###..   #....
        ####.   ##...
        #####   ###..
    """)
    assert (whole(rows(jnp.array([1, -1]))) == whole(wanted)).all()


def test_key_ids_of_a_square_problem_are_those_of_the_queries():
    ids = np.array([[1, 1, 0, 2], [2, 0, 2, 0]])
    for mask in (Segments(ids, padding_id=0), Segments(ids, padding_id=0).bind(B=2, N=N, T=4, S=4)):
        square = {"b": np.arange(2)[:, None, None], "q": np.arange(4)[:, None], "k": np.arange(4)}
        wanted = drawn("""
            ##..   #.#.
            ##..   ....
            ....   #.#.
            ...#   ....
        """)
        assert (mask.allowed(**square) == wanted[:, 0]).all()


def _near(b, n, q, k, *values):
    return abs(q - k) <= 1


class TestObject:
    """A mask is a frozen record, combines with & and |, prints itself and is no truth value."""

    @pytest.mark.parametrize("ask", [bool, lambda mask: mask and Full(), lambda mask: mask or Full(), lambda m: not m])
    @pytest.mark.parametrize("mask", [Full(), Causal() & Full(), Causal() | Full()], ids=repr)
    def test_is_no_truth_value(self, ask, mask):
        with pytest.raises(ArgumentError, match=r"& and \|, not and/or"):
            ask(mask)

    def test_operators(self):
        a, b, c = Causal(), SlidingWindow(1, 1), Lengths(kv=3)
        assert isinstance(a & b, And) and (a & b).masks == (a, b)
        assert isinstance(a | b, Or) and (a | b).masks == (a, b)
        nested = a & b | c
        assert isinstance(nested, Or) and isinstance(nested.masks[0], And) and nested.masks[1] is c

    @pytest.mark.parametrize("other", [True, np.ones((4, 5), bool), None])
    @pytest.mark.parametrize("operator", ["__and__", "__or__"])
    def test_operators_take_masks_only(self, operator, other):
        assert getattr(Causal(), operator)(other) is NotImplemented

    @pytest.mark.parametrize("kind", [And, Or])
    def test_combining_takes_at_least_one_mask_and_masks_only(self, kind):
        with pytest.raises(ArgumentError, match="at least one mask") as error:
            kind()
        assert error.value.argument == "masks"
        with pytest.raises(ArgumentError, match=r"jflash\.masks\.Dense"):
            kind(Causal(), np.ones((4, 5), bool))

    def test_is_frozen(self):
        with pytest.raises(AttributeError):
            Causal().offset = 1
        with pytest.raises(AttributeError):
            (Causal() & Full()).masks = ()

    @pytest.mark.parametrize(
        ("mask", "printed"),
        [
            (Full(), "Full()"),
            (Causal(), "Causal(offset=0)"),
            (Causal(offset=np.int64(-3)), "Causal(offset=-3)"),
            (Causal(offset=np.array([1, 2])), "Causal(offset=int32[2])"),
            (SlidingWindow(2, None), "SlidingWindow(2, None, offset=0)"),
            (SlidingWindow(2**29 + 1, 2**29), "SlidingWindow(None, 536870912, offset=0)"),
            (SlidingWindow(0, 1, offset=jnp.array(2)), "SlidingWindow(0, 1, offset=int32[])"),
            (Lengths(kv=np.array([1, 2])), "Lengths(q=None, kv=int32[2])"),
            (Lengths(q=3), "Lengths(q=int32[], kv=None)"),
            (Segments(np.arange(4)), "Segments(int32[4], None)"),
            (Segments(np.zeros((2, 4), int), np.zeros(5, int), -1), "Segments(int32[2, 4], int32[5], padding_id=-1)"),
            (Dense(np.ones((4, 5), bool)), "Dense(bool[4, 5])"),
            (PrefixLM(3), "PrefixLM(int32[])"),
            (Chunked(np.int16(3)), "Chunked(3)"),
            (Dilated(2), "Dilated(2)"),
            (KeyRange(np.arange(4), np.arange(4)), "KeyRange(int32[4], int32[4])"),
            (Tree(np.array([-1, 0, 0, 1]), prefix=1), "Tree(int32[4], int32[5])"),
            (~Causal(), "~Causal(offset=0)"),
            (~(Causal() & Full()), "~(Causal(offset=0) & Full())"),
            (MaskFn(_near, per_head=(np.ones(3, np.float32),)), "MaskFn(_near, per_head=(float32[3],))"),
            (MaskFn(functools.partial(_near)), "MaskFn(partial)"),
            (Causal() & Full() | SlidingWindow(0, 0), "((Causal(offset=0) & Full()) | SlidingWindow(0, 0, offset=0))"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_repr(self, mask, printed):
        assert repr(mask) == printed

    def test_repr_of_a_traced_mask_names_no_numbers(self):
        printed = []
        jax.jit(lambda mask: printed.append(repr(mask)))(Causal(offset=np.array([1, 2])) & Full())
        assert printed == ["(Causal(offset=int32[2]) & Full())"]


class TestPytree:
    """Arrays are leaves, ints and None are structure."""

    @pytest.mark.parametrize(
        ("mask", "count"),
        [
            (Full(), 0),
            (Causal(), 0),
            (Causal(offset=3), 0),
            (Causal(offset=np.array(3)), 1),
            (SlidingWindow(1, None), 0),
            (SlidingWindow(1, None, offset=jnp.array([3])), 1),
            (Lengths(), 0),
            (Lengths(q=3), 1),
            (Lengths(kv=np.array([3])), 1),
            (Lengths(q=np.array([1]), kv=np.array([3])), 2),
            (Segments(np.arange(4)), 1),
            (Segments(np.arange(4), np.arange(5), padding_id=3), 2),
            (Dense(np.ones((4, 5), bool)), 1),
            (PrefixLM(3), 1),
            (Chunked(3) & ~Dilated(2), 0),
            (KeyRange(np.arange(4), np.arange(4)), 2),
            (Tree(np.array([-1, 0, 0, 1])), 3),
            (MaskFn(_near), 0),
            (MaskFn(_near, per_query=(np.arange(4),), per_pair=(np.ones((4, 5)), np.ones((4, 1)))), 3),
            (Causal() & Lengths(q=1, kv=2) & (Dense(np.ones((4, 5), bool)) | Segments(np.arange(4))), 4),
        ],
        ids=lambda value: repr(value) if isinstance(value, Mask) else "",
    )
    def test_leaves(self, mask, count):
        assert len(jax.tree.leaves(mask)) == count

    @each_case
    def test_map_gives_the_same_mask(self, case):
        mask = jax.tree.map(lambda leaf: leaf + np.array(0, leaf.dtype), case.mask)
        assert type(mask) is type(case.mask)
        assert repr(mask) == repr(case.mask)
        assert jax.tree.structure(mask) == jax.tree.structure(case.mask)
        assert (whole(mask.allowed(**indices(np))) == whole(drawn(case.drawing))).all()

    def test_map_changes_leaves_alone(self):
        mask = jax.tree.map(lambda leaf: leaf + 1, Causal(offset=2) & Causal(offset=np.array([2, 5])))
        assert mask.masks[0].offset == 2
        assert mask.masks[1].offset.tolist() == [3, 6]

    def test_paths_name_the_fields(self):
        paths = jax.tree_util.tree_leaves_with_path(Full() & Lengths(q=1, kv=2))
        assert [jax.tree_util.keystr(path) for path, _ in paths] == [".masks[1].q", ".masks[1].kv"]

    @pytest.mark.parametrize(
        ("masks", "traces"),
        [
            ([Causal(offset=np.array(1)), Causal(offset=np.array(2))], 1),
            ([Causal(offset=1), Causal(offset=np.int64(1))], 1),
            ([Causal(offset=1), Causal(offset=2)], 2),
            ([SlidingWindow(1, 0), SlidingWindow(1, 0), SlidingWindow(2, 0), SlidingWindow(2, None)], 3),
            # A length that is an int is still data: a new one on every call must not compile every time.
            ([Lengths(kv=1), Lengths(kv=2), Lengths(kv=np.array(3, np.int64))], 1),
            ([Lengths(kv=1), Lengths(q=1)], 2),
            ([Segments(np.array([1, 2])), Segments(np.array([2, 2], np.uint8))], 1),
            ([Segments(np.array([1, 2]), padding_id=0), Segments(np.array([1, 2]), padding_id=1)], 2),
            ([Dense(np.ones((4, 5), bool)), Dense(np.zeros((4, 5), bool))], 1),
            ([Causal() & Lengths(q=1), Causal() & Lengths(q=2), Causal() | Lengths(q=2)], 2),
        ],
        ids=lambda value: "; ".join(map(repr, value)) if isinstance(value, list) else "",
    )
    def test_jit_traces_again_only_for_a_new_structure(self, masks, traces):
        count = 0

        @jax.jit
        def ask(mask):
            nonlocal count
            count += 1
            return mask.allowed(1, 1)

        for mask in masks:
            ask(mask)
        assert count == traces

    @each_case
    def test_leaves_of_a_bound_mask_are_its_values_in_order(self, case):
        # A backend sends the leaves to a kernel, with the axes that the values declare.
        bound = case.mask.bind(**SIZES)
        leaves, values = jax.tree.leaves(bound), bound.values()
        assert len(leaves) == len(values)
        for leaf, value in zip(leaves, values):
            assert leaf is value.array
            assert len(value.axes) == leaf.ndim
            assert value.axes[0] == "B"
            assert all(size in (1, SIZES[axis]) for axis, size in zip(value.axes, leaf.shape))

    @each_case
    def test_bind_twice_is_bind_once(self, case):
        bound = case.mask.bind(**SIZES)
        again = bound.bind(**SIZES)
        assert MaskStructure.of(again) == MaskStructure.of(bound)
        for one, other in zip(jax.tree.leaves(bound), jax.tree.leaves(again)):
            assert (np.asarray(one) == np.asarray(other)).all()

    @each_case
    def test_bind_keeps_numpy_numpy(self, case):
        # What is known stays known while tracing: a map of tiles is then known too.
        before, after = jax.tree.leaves(case.mask), jax.tree.leaves(case.mask.bind(**SIZES))
        assert any(isinstance(leaf, jax.Array) for leaf in after) == any(isinstance(leaf, jax.Array) for leaf in before)


class TestStructure:
    """`MaskStructure`: all of a mask but what its arrays hold."""

    @each_case
    def test_equal_for_equal_shapes(self, case):
        one, other = case.mask, jax.tree.map(lambda leaf: leaf * np.array(0, leaf.dtype), case.mask)
        assert MaskStructure.of(one) == MaskStructure.of(other)
        assert hash(MaskStructure.of(one)) == hash(MaskStructure.of(other))

    @each_case
    def test_its_mask_binds_to_the_same_structure(self, case):
        abstract = MaskStructure.of(case.mask).mask
        assert repr(abstract) == repr(case.mask)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
        assert MaskStructure.of(abstract.bind(**SIZES)) == MaskStructure.of(case.mask.bind(**SIZES))

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (Causal(), Full()),
            (Causal(offset=1), Causal(offset=2)),
            (Causal(offset=1), Causal(offset=np.array(1))),
            (Lengths(q=np.array([1])), Lengths(q=np.array([1, 1]))),
            (Lengths(q=1), Lengths(kv=1)),
            (Causal() & Full(), Causal() | Full()),
            (Causal() & Full(), Full() & Causal()),
        ],
        ids=repr,
    )
    def test_different(self, one, other):
        assert MaskStructure.of(one) != MaskStructure.of(other)


IDS = np.arange(T)


@pytest.mark.parametrize(
    ("make", "error", "argument", "message"),
    [
        # At the constructor: what is wrong in itself.
        (lambda: Causal(offset=None), ArgumentError, "offset", "found None"),
        (lambda: Causal(offset=True), ArgumentError, "offset", "found True"),
        (lambda: Causal(offset=1.5), ArgumentError, "offset", "found 1.5"),
        (lambda: Causal(offset=[1, 2]), ArgumentError, "offset", "an int or an array"),
        (lambda: Causal(offset=2**29 + 1), ArgumentError, "offset", "up to 536870912"),
        (lambda: Causal(offset=np.array([1.0, 2.0])), DtypeError, "offset", "dtype float64, wanted whole numbers"),
        (lambda: SlidingWindow(1, 0, offset=None), ArgumentError, "offset", "found None"),
        (lambda: SlidingWindow(-1, 0), ArgumentError, "left", "found -1, wanted a distance of at least 0"),
        (lambda: SlidingWindow(0, -2), ArgumentError, "right", "Both ends of a window are included"),
        (lambda: SlidingWindow(True, 0), ArgumentError, "left", "found True"),
        (lambda: SlidingWindow(0, False), ArgumentError, "right", "found False"),
        (lambda: SlidingWindow(0.5, 0), ArgumentError, "left", "found 0.5"),
        (lambda: SlidingWindow(np.array([1, 2]), 0), ArgumentError, "left", "wanted a distance"),
        (lambda: Lengths(q=2.0), ArgumentError, "q", "found 2.0"),
        (lambda: Lengths(kv=True), ArgumentError, "kv", "found True"),
        (lambda: Lengths(kv=[1, 2]), ArgumentError, "kv", "an array of whole numbers"),
        (lambda: Lengths(kv=np.array([1.0, 2.0])), DtypeError, "kv", "dtype float64"),
        (lambda: Lengths(q=np.array([True, False])), DtypeError, "q", "dtype bool"),
        (lambda: Segments(None), ArgumentError, "q_ids", "found None"),
        (lambda: Segments([1, 1, 2, 2]), ArgumentError, "q_ids", "an array of whole numbers"),
        (lambda: Segments(np.ones(T)), DtypeError, "q_ids", "dtype float64"),
        (lambda: Segments(IDS, jnp.ones(S)), DtypeError, "kv_ids", "dtype float32"),
        (lambda: Segments(np.array(1)), ShapeError, "q_ids", r"shape \(\)"),
        (lambda: Segments(IDS + 2**32), ArgumentError, "q_ids", "from 4294967296 to 4294967299"),
        (lambda: Segments(IDS, padding_id=np.array(0)), ArgumentError, "padding_id", "wanted an int"),
        (lambda: Segments(IDS, padding_id=True), ArgumentError, "padding_id", "found True"),
        (lambda: Segments(IDS, padding_id=2**31), ArgumentError, "padding_id", "32 bits"),
        (lambda: Dense([[True]]), ArgumentError, "array", "an array of booleans"),
        (lambda: PrefixLM(2.5), ArgumentError, "prefix", "found 2.5, wanted an int or an array"),
        (lambda: PrefixLM(np.arange(3)).bind(**SIZES), ShapeError, "prefix", r"\(3,\), wanted \(\) or \(B,\) with B=2"),
        (lambda: Chunked(0), ArgumentError, "size", "found 0, wanted a whole number of at least 1"),
        (lambda: Chunked(True), ArgumentError, "size", "found True"),
        (lambda: Dilated(2.0), ArgumentError, "step", r"found 2\.0"),
        (lambda: KeyRange(np.array(3), np.arange(4)), ShapeError, "first", r"shape \(\), wanted \(T,\) or \(B, T\)"),
        (lambda: KeyRange(np.arange(4), np.arange(4.0)), DtypeError, "last", "dtype float64, wanted whole numbers"),
        (lambda: KeyRange(np.arange(5), np.arange(5)).bind(**SIZES), ShapeError, "first", r"\(5,\), .* T=4"),
        (lambda: Tree(np.array([0, 0])), ArgumentError, "parents", "of each node an earlier one, or -1"),
        (lambda: Tree(np.array([-2, 0])), ArgumentError, "parents", "or -1"),
        (lambda: Tree(np.array(-1)), ShapeError, "parents", r"shape \(\)"),
        (lambda: Tree(np.array([-1]), prefix=np.array([1])), ArgumentError, "keys", "the number of keys, S"),
        (lambda: Tree(np.array([-1] * 4), prefix=2).bind(**SIZES), ShapeError, "mask", "6 keys .* at most S=5"),
        (lambda: Tree(np.array([-1] * 3)).bind(**SIZES), ShapeError, "parents", r"\(3,\), .* T=4"),
        (lambda: MaskFn(3), ArgumentError, "fn", "found int, wanted a function"),
        (
            lambda: MaskFn(lambda b, n, q, k: q - k).bind(**SIZES),
            ArgumentError,
            "fn",
            "function to int32, wanted one to",
        ),
        (
            lambda: MaskFn(_near, per_key=np.ones(5)),
            ArgumentError,
            "per_key",
            "found ndarray, wanted a tuple of arrays",
        ),
        (lambda: MaskFn(_near, per_key=(np.ones(4),)).bind(**SIZES), ShapeError, "per_key", r"\(4,\), .*B=2, S=5"),
        (lambda: MaskFn(_near, per_head=(np.ones((1, 2, 3)),)).bind(**SIZES), ShapeError, "per_head", "1 to 2 axes"),
        (lambda: MaskFn(_near, per_pair=(np.ones(5),)).bind(**SIZES), ShapeError, "per_pair", "2 to 4 axes .*T=4, S=5"),
        (lambda: Dense(np.zeros((T, S))), DtypeError, "array", "dtype float64, wanted bool.* belongs into `bias`"),
        (lambda: Dense(np.zeros((T, S), int)), DtypeError, "array", "dtype int64"),
        (lambda: Dense(np.zeros(S, bool)), ShapeError, "array", r"rank 2, 3 or 4"),
        # At `bind`: what does not fit the problem.
        (lambda: Causal(offset=np.array([1, 2, 3])).bind(**SIZES), ShapeError, "offset", r"found shape \(3,\).*B=2"),
        (lambda: SlidingWindow(0, 0, offset=np.zeros((1, 2), int)).bind(**SIZES), ShapeError, "offset", r"\(1, 2\)"),
        (lambda: Lengths(q=np.array([1, 2, 3])).bind(**SIZES), ShapeError, "q", r"found shape \(3,\).*B=2"),
        (lambda: Lengths(kv=np.zeros((2, 5), int)).bind(**SIZES), ShapeError, "kv", r"found shape \(2, 5\)"),
        (lambda: Lengths(kv=np.zeros(0, int)).bind(**SIZES), ShapeError, "kv", r"found shape \(0,\)"),
        (lambda: Segments(np.arange(S), np.arange(S)).bind(**SIZES), ShapeError, "q_ids", r"\(5,\).*T=4"),
        (lambda: Segments(IDS, np.arange(T)).bind(**SIZES), ShapeError, "kv_ids", r"\(4,\).*S=5"),
        (lambda: Segments(IDS, np.ones((1, 1, S), int)).bind(**SIZES), ShapeError, "kv_ids", r"shape \(1, 1, 5\)"),
        (lambda: Segments(IDS).bind(**SIZES), ShapeError, "kv_ids", "Give a pair of ids"),
        (lambda: Segments(np.zeros((N, T), int), np.arange(S)).bind(**SIZES), ShapeError, "q_ids", r"\(3, 4\).*B=2"),
        (lambda: Dense(np.zeros((S, T), bool)).bind(**SIZES), ShapeError, "mask", r"\(5, 4\).*= \(2, 3, 4, 5\)"),
        (lambda: Dense(np.zeros((B, T, S), bool)).bind(**SIZES), ShapeError, "mask", r"\(2, 4, 5\)"),
        (lambda: Dense(np.zeros((3, 1, T, S), bool)).bind(**SIZES), ShapeError, "mask", r"\(3, 1, 4, 5\)"),
        (lambda: Dense(np.zeros((1, B, N, T, S), bool)).bind(**SIZES), ShapeError, "mask", r"\(1, 2, 3, 4, 5\)"),
        # Inside of others.
        (lambda: (Full() & (Causal() | Segments(IDS))).bind(**SIZES), ShapeError, "kv_ids", r"\(4,\)"),
    ],
)
def test_errors_name_the_argument(make, error, argument, message):
    with pytest.raises(error, match=message) as raised:
        make()
    assert type(raised.value) is error
    assert raised.value.argument == argument
    assert str(raised.value).startswith(f"`{argument}`: found ")


def test_a_window_farther_than_any_key_is_unlimited():
    assert (SlidingWindow(2**40, 0).left, SlidingWindow(0, 2**40).right) == (None, None)
    # Whatever the length, such a window sees what an unlimited one does.
    far = SlidingWindow(2**29, 2**29, offset=2**29 - 1)
    assert far.allowed(0, 2**29 - 1) and not far.allowed(0, 2**30)


def test_a_function_that_captures_a_traced_array_is_refused_and_says_what_to_do():
    @jax.jit
    def masked(limits):
        return MaskFn(lambda b, n, q, k: k < limits[q]).bind(**SIZES).allowed(**indices(np))

    with pytest.raises(ArgumentError, match=r"captures a traced array, wanted traced arrays as arguments, per_query"):
        masked(jnp.arange(4))


def test_a_function_is_the_same_for_all_batch_rows_and_heads_unless_it_looks_at_them():
    shapes = {}
    for name, fn in {
        "neither": lambda b, n, q, k: q >= k,
        "rows": lambda b, n, q, k: q >= k + b,
        "heads": lambda b, n, q, k: jnp.where(q > 1, n > 1, k > 1),
    }.items():
        bound = MaskFn(fn).bind(**SIZES)
        shapes[name] = TileMap(mask=bound, T=T, S=S, block_q=2, block_k=2).kinds().shape[:2]
    assert shapes == {"neither": (1, 1), "rows": (B, 1), "heads": (1, N)}


# The README beside the masks ----------------------------------------------------------------------------------------

README = pathlib.Path(jflash.masks.__file__).with_name("README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_pictures_of_the_readme():
    # The heading of each picture is the expression that draws it.
    names = {name: getattr(jflash.masks, name) for name in dir(jflash.masks)} | {"np": np}
    pictures = [block for block in blocks("text") if "#" in block]
    drawn_patterns = set()
    for picture in pictures:
        expression, *rows = picture.splitlines()
        mask = eval(expression, names)
        assert mask.draw(len(rows), len(rows[0])) == "\n".join(rows), expression
        drawn_patterns.add(type(mask))
    public = {value for value in vars(jflash.masks).values() if isinstance(value, type) and issubclass(value, Mask)}
    assert drawn_patterns == public - {Mask}


def test_the_mask_that_the_readme_adds():
    (source,) = blocks("python")
    defined: dict[str, Any] = {}
    exec(source, defined)
    (new,) = (
        value for value in defined.values() if isinstance(value, type) and issubclass(value, Mask) and value is not Mask
    )
    mask = new(3)
    wanted = drawn("""
        ###....
        ###....
        ###....
        ######.
        ######.
    """)[0, 0]
    assert (mask.allowed(np.arange(5)[:, None], np.arange(7)) == wanted).all()
    assert (np.asarray(jax.jit(lambda m: m.allowed(np.arange(5)[:, None], np.arange(7)))(mask)) == wanted).all()
    assert repr(mask & Full()) == f"({mask!r} & Full())"

    # Its proof against its truth, and both directions of its arithmetic against the proof.
    for block_q, block_k in [(1, 1), (2, 2), (3, 3), (2, 5), (4, 3)]:
        for transpose in (False, True):
            bound = mask.bind(B=1, N=1, T=5, S=7)
            tile_map = TileMap(mask=bound, T=5, S=7, block_q=block_q, block_k=block_k, transpose=transpose)
            kinds = tile_map.kinds()[0, 0]
            for row, column in np.ndindex(kinds.shape):
                i, j = (column, row) if transpose else (row, column)
                tile = wanted[i * block_q :, j * block_k :][:block_q, :block_k]
                exact = 2 if tile.all() and tile.shape == (block_q, block_k) else 1 if tile.any() else 0
                assert kinds[row, column] == exact
                start, full_start, full_stop, stop = tile_map.run(row)
                in_run, in_full = start <= column < stop, full_start <= column < full_stop
                assert TileKind(exact) == (TileKind.FULL if in_full else TileKind.PARTIAL if in_run else TileKind.EMPTY)
