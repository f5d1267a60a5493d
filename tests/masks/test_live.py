"""Live keys against the truth on all pairs, under numpy and under jit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_strategies import COMPILED, PROPERTY, Sizes, patterns, segments, trees

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
    packed,
)
from jflash.masks.live import every_key_is_seen, every_query_sees_a_key, live_keys, zero_dead_keys

# A few, since each new shape compiles: within a tile of 128, whole tiles, and over the end of one.
LENGTHS = (37, 128, 300)


class Posed(NamedTuple):
    sizes: Sizes
    mask: Mask

    @property
    def live(self) -> np.ndarray:
        """What `live_keys` says of each batch row, (B, S)."""
        _, _, T, S = self.sizes
        found = live_keys(self.mask, T=T, S=S)
        assert found.dtype == np.bool_ and found.shape in {(1, S), (self.sizes.B, S)}
        return np.broadcast_to(found, (self.sizes.B, S))

    @property
    def allowed(self) -> np.ndarray:
        b, n, q, k = np.ix_(*map(np.arange, self.sizes))
        return np.broadcast_to(np.asarray(self.mask.allowed(q, k, b=b, n=n)), self.sizes)

    @property
    def truth(self) -> np.ndarray:
        """Live keys from all pairs."""
        return self.allowed.any((1, 2))


@st.composite
def posed(draw: Callable, masks: Callable[[Sizes], st.SearchStrategy[Mask]]) -> Posed:
    T, S = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    sizes = Sizes(draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 2])), T, draw(st.sampled_from([S, T])))
    return Posed(sizes, draw(masks(sizes)).bind(**sizes._asdict()))


@st.composite
def documents(draw: Callable, sizes: Sizes) -> Mask:
    """Segments of which many keys have no query: more ids than tokens, unsorted."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = max(sizes.T, sizes.S)
    ids = [random.integers(0, count, (sizes.B, length), np.int32) for length in (sizes.T, sizes.S)]
    return Segments(*ids, padding_id=draw(st.none() | st.integers(0, count)))


@st.composite
def denses_with_dead_keys(draw: Callable, sizes: Sizes) -> Mask:
    """Of each head its own pairs, and keys that no query sees."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pairs = random.random(sizes) < draw(st.sampled_from([0.01, 0.5]))
    return Dense(pairs & (random.random((sizes.B, sizes.N, 1, sizes.S)) < 0.5))


@st.composite
def around_the_diagonal(draw: Callable, sizes: Sizes) -> Mask:
    """Masks of which more may be known: documents with ids of their own, ranges that hold their query or nearly so."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if sizes.T == sizes.S and draw(st.booleans()):
        ids = random.integers(0, 9, (sizes.B, sizes.T), np.int32)
        return Segments(ids, padding_id=draw(st.none() | st.integers(0, 9)))
    queries = np.arange(sizes.T)
    missing = random.random((sizes.B, sizes.T)) < draw(st.sampled_from([0, 0.02]))
    left, right = random.integers(0, 3, (2, sizes.B, sizes.T))
    return KeyRange(queries - left + missing * 2, queries + right)


def masks(sizes: Sizes) -> st.SearchStrategy[Mask]:
    several = documents(sizes), denses_with_dead_keys(sizes), around_the_diagonal(sizes)
    return st.one_of(patterns(sizes), segments(sizes), *several)


def combined(sizes: Sizes) -> st.SearchStrategy[Mask]:
    """ANDs and ORs of two or three, so that keys die that each mask alone keeps alive."""
    parts = st.lists(masks(sizes), min_size=2, max_size=3)
    return st.builds(lambda kind, parts: kind(*parts), st.sampled_from([And, Or]), parts)


@settings(PROPERTY, max_examples=40)
@given(posed(masks))
def test_a_pattern(case):
    assert (case.live == case.truth).all()


@settings(PROPERTY, max_examples=60)
@given(
    posed(around_the_diagonal)
    | posed(lambda sizes: trees(st.builds(Causal) | st.builds(Lengths) | patterns(sizes) | around_the_diagonal(sizes)))
)
def test_what_is_claimed_of_queries_and_of_the_diagonal_holds(case):
    mask, (_, _, T, S) = case.mask, case.sizes
    if every_query_sees_a_key(mask, T=T, S=S):
        assert case.allowed.any(3).all()
    assert case.truth.all() or not every_key_is_seen(mask, T=T, S=S)
    diagonal = np.diagonal(case.allowed, axis1=2, axis2=3)
    assert diagonal.all() or not mask.has_diagonal
    alone = case.allowed.any(2)[..., : min(T, S)] & ~diagonal
    assert not (alone.any() and mask.is_live_on_diagonal)


IDS = np.arange(200) // 30


@pytest.mark.parametrize(
    ("mask", "is_known"),
    [
        (Segments(IDS) & Causal(), True),
        (Segments(IDS, IDS) & SlidingWindow(9, 0), True),
        (Segments(IDS) & PrefixLM(3) & Chunked(7) & Dilated(3) & Full(), True),
        (MaskFn(lambda b, n, q, k: q > k) | Segments(IDS), True),
        ((Segments(IDS) | Dense(np.zeros((200, 200), bool))) & Causal(), True),
        (packed(np.array([0, 30, 200]), np.array([0, 30, 200]), T=200, S=200, causal=True), True),
        # One query sees itself no more, by a hole, slack, padding, other ids; or one knows no more of its offset.
        (Segments(IDS) & Causal(offset=-1), False),
        (Segments(IDS, padding_id=9), False),
        (Segments(IDS, IDS.copy()), False),
        (~Segments(IDS), False),
        (packed(np.array([0, 30, 199]), np.array([0, 30, 199]), T=200, S=200), False),
        (Segments(IDS) & SlidingWindow(4, 4, offset=np.array(0)), False),
        (Segments(IDS) & MaskFn(lambda b, n, q, k: q >= k), False),
    ],
    ids=str,
)
def test_packed_documents_without_padding_are_known_to_live_while_tracing(mask, is_known):
    bound = mask.bind(B=2, N=2, T=200, S=200)
    known = []

    @jax.jit
    def trace(bound):
        known.append(every_query_sees_a_key(bound, T=200, S=200))
        known.append(isinstance(live_keys(bound, T=200, S=200), np.ndarray))
        return 0

    trace(jax.tree.map(jnp.asarray, bound))
    assert known == [is_known, is_known]
    of_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), bound)
    assert every_key_is_seen(of_shapes, T=200, S=200) == every_query_sees_a_key(of_shapes, T=200, S=200) == is_known
    if is_known:
        assert Posed(Sizes(2, 2, 200, 200), bound).allowed.any(3).all()


ENDS = np.array([0, 30, 30, 141])


@pytest.mark.parametrize(
    "mask",
    [
        Segments(IDS, padding_id=3) & Causal(),
        packed(ENDS, ENDS, T=200, S=200, causal=True),
        packed(ENDS // 10, ENDS, T=200, S=200, window=(3, 0)),
        packed(ENDS, ENDS, T=200, S=200) & SlidingWindow(0, 0, offset=np.array(9)) & Lengths(kv=np.array(35)),
        KeyRange(np.arange(200) % 60 * 3, np.arange(200) % 60 * 3 + 1),
    ],
    ids=["padding", "packed", "few queries", "shifted", "holes"],
)
def test_no_loop_over_tiles_where_queries_see_intervals(mask):
    """It would be a `while`, with a round for each tile that the longest row of tiles visits."""
    assert_right_without_a_loop(mask, Sizes(1, 1, 200, 200))


@pytest.mark.parametrize(
    "mask",
    [
        KeyRange(np.array([7, 200, 0]), np.array([30, 299, -1])) | KeyRange(np.array([0, 0, 1]), np.array([1, 1, 0])),
        Segments(np.array([3, 3, 9]), np.arange(300) // 40) & Causal(offset=np.array(140)),
        MaskFn(lambda b, n, q, k, keep: (k % 7 == n) & keep, per_key=(np.arange(300) < 90,)),
    ],
    ids=["ring", "documents", "function"],
)
def test_no_loop_over_tiles_for_few_queries(mask):
    """As in a decoding step."""
    assert_right_without_a_loop(mask, Sizes(B=2, N=2, T=3, S=300))


def assert_right_without_a_loop(mask, sizes):
    case = Posed(sizes, mask.bind(**sizes._asdict()))
    lengths = {"T": sizes.T, "S": sizes.S}
    jaxpr = jax.make_jaxpr(lambda mask: live_keys(mask, **lengths))(jax.tree.map(jnp.asarray, case.mask))
    assert "while" not in str(jaxpr) and "scan" not in str(jaxpr)
    assert case.truth.any() and not case.truth.all()
    assert (case.live == case.truth).all()


@settings(PROPERTY, max_examples=40)
@given(posed(combined) | posed(lambda sizes: trees(masks(sizes), depth=2)))
def test_masks_of_masks(case):
    assert (case.live == case.truth).all()


@COMPILED
@given(posed(masks) | posed(combined))
def test_traced_is_as_in_numpy(case):
    found = jax.jit(lambda mask: live_keys(mask, T=case.sizes.T, S=case.sizes.S))(jax.tree.map(jnp.asarray, case.mask))
    assert (np.broadcast_to(found, case.truth.shape) == case.truth).all()


@COMPILED
@given(posed(masks) | posed(combined), st.sampled_from([np.float32, jnp.bfloat16]))
def test_dead_keys_are_zeroed_whatever_they_hold(case, dtype):
    B, _, T, S = case.sizes
    x = np.random.default_rng(0).standard_normal((B, S, 2, 8)).astype(dtype)
    poisoned = np.where(case.truth[..., None, None], x, np.asarray(np.nan, dtype))

    @jax.jit
    def zeroed(x: Any, mask: Mask) -> jax.Array:
        return zero_dead_keys(x, mask=mask, T=T, S=S)[0]

    expected = np.where(case.truth[..., None, None], x, np.asarray(0, dtype))
    for mask in (case.mask, jax.tree.map(jnp.asarray, case.mask)):
        found = zeroed(poisoned, mask)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), expected)


ALIVE_10 = [1] * 10


@pytest.mark.parametrize(
    ("mask", "T", "alive"),
    [
        (Full(), 3, ALIVE_10),
        (Causal(), 3, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
        (Causal(offset=7), 3, ALIVE_10),
        (Causal(offset=-3), 3, [0] * 10),
        (SlidingWindow(1, 1, offset=4), 3, [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]),
        (SlidingWindow(0, None, offset=8), 3, [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]),
        (SlidingWindow(1, 0, offset=4) | Causal(offset=-1), 3, [1, 1, 0, 1, 1, 1, 1, 0, 0, 0]),
        (SlidingWindow(1, 0, offset=4) & Causal(), 3, [0] * 10),
        # Keys that both parts of an AND see, but no query sees them by both.
        (Lengths(q=np.array(1)) & SlidingWindow(0, 0, offset=1), 3, [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
        (Lengths(kv=np.array(4)), 3, [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]),
        (Lengths(q=np.array(0)), 3, [0] * 10),
        (Segments(np.array([5, 1, 5]), np.array([1, 1, 2, 5, 2, 5, 1, 0, 9, 5])), 3, [1, 1, 0, 1, 0, 1, 1, 0, 0, 1]),
        (
            Segments(np.array([5, 1, 5]), np.array([1, 1, 2, 5, 2, 5, 1, 0, 9, 5]), padding_id=5),
            3,
            [1, 1, 0, 0, 0, 0, 1, 0, 0, 0],
        ),
        (
            Segments(np.array([5, 1, 5]), np.array([1, 1, 2, 5, 2, 5, 1, 0, 9, 5])) & Causal(),
            3,
            [1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        ),
    ],
    ids=str,
)
def test_by_hand(mask, T, alive):
    found = live_keys(mask.bind(B=1, N=1, T=T, S=10), T=T, S=10)
    assert np.asarray(found).astype(int).tolist() == [alive]


@pytest.mark.parametrize(
    "mask",
    [Full(), Causal(), SlidingWindow(3, 200), Causal(offset=-5) & SlidingWindow(9, 1), Causal(offset=-400)],
    ids=str,
)
@pytest.mark.parametrize("combine", [lambda mask: mask, lambda mask: mask | SlidingWindow(2, 0)], ids=["", "or"])
def test_without_arrays_known_while_tracing(mask, combine):
    bound = combine(mask).bind(B=2, N=2, T=131, S=200)
    found = []

    @jax.jit
    def trace(x):
        found.append(live_keys(bound, T=131, S=200))
        return x

    trace(0)
    assert isinstance(found[0], np.ndarray) and found[0].shape == (1, 200)


def test_nothing_is_copied_where_all_keys_are_alive():
    x = jnp.ones((2, 37, 1, 8))
    for mask in (Full(), Causal(), SlidingWindow(0, 0) | Causal(offset=-5), Lengths(kv=np.array([37, 40]))):
        assert zero_dead_keys(x, mask=mask.bind(B=2, N=1, T=37, S=37), T=37, S=37)[0] is x


def test_one_axis_of_the_batch_per_array():
    """Values with a batch axis beside values without: the result has the larger."""
    sizes = Sizes(B=3, N=2, T=131, S=140)
    ids = np.arange(140, dtype=np.int32)
    per_row = Segments(ids[:131] // 50, ids // 50) & Lengths(kv=np.array([0, 60, 140]))
    case = Posed(sizes, per_row.bind(**sizes._asdict()))
    assert (case.live == case.truth).all()
    assert case.truth.sum(1).tolist() == [0, 60, 140]


def test_inside_shard_map():
    """A device has its own batch rows, and with the default checks the carry of a loop must be of their type."""
    mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    ids = np.random.default_rng(0).integers(0, 200, (4, 300), np.int32)
    mask = (Segments(ids[:, ::-1].copy(), ids, padding_id=7) & Causal()).bind(B=4, N=1, T=300, S=300)
    rows = jax.sharding.PartitionSpec("b")
    for own in (mask, KeyRange(ids, ids + 7).bind(B=4, N=1, T=300, S=300)):
        found = jax.jit(
            jax.shard_map(lambda mask: live_keys(mask, T=300, S=300), mesh=mesh, in_specs=(rows,), out_specs=rows)
        )(own)
        assert (np.asarray(found) == Posed(Sizes(4, 1, 300, 300), own).truth).all()
        assert not found.all() and found.any()


def test_memory_grows_with_the_length_alone():
    """Never T x S: no array of the computation holds a number for each pair."""
    T = S = 128 * 64
    mask = (Segments(np.arange(T) // 300) & Causal()).bind(B=1, N=1, T=T, S=S)
    compiled = jax.jit(lambda mask: live_keys(mask, T=T, S=S)).lower(jax.tree.map(jnp.asarray, mask)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * S // 8
