"""Functions cut in two: the inner one with its streams is the function itself on all pairs, with its gradients."""

import dataclasses
import functools
import operator
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jflash
from jflash import ArgumentError
from jflash.backends import registry
from jflash.backends.xla import XlaTiles
from jflash.masks import Causal
from jflash.scores import score_function
from jflash.scores.streams import streamed, streams_of

B, N, T, S = 2, 3, 5, 7
FLOAT32 = np.dtype(np.float32)


def draw(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def cut(fn, args, dtype=FLOAT32):
    return streams_of(fn, args, B=B, N=N, T=T, S=S, dtype=dtype)


def at_pairs(stream, array):
    """A stream where it broadcasts against (B, N, T, S)."""
    assert array.shape == stream.shape and array.dtype == stream.dtype
    if stream.axes == "BND":
        q, k = np.ix_(range(T), range(S))
        return array[:, :, q - k + S - 1]
    letters = dict(zip(stream.axes, stream.shape))
    return array.reshape([letters.get(axis, 1) for axis in "BNTS"])


def with_streams(streams, s, *args):
    """The function by way of its streams, on logits (B, N, T, S)."""
    _, _, q, k = np.ix_(*(np.arange(size, dtype=np.int32) for size in (B, N, T, S)))
    arrays = [at_pairs(stream, array) for stream, array in zip(streams.streams, streams.outer(*args), strict=True)]
    return streams.inner(*([] if s is None else [s]), jnp.asarray(q), jnp.asarray(k), *arrays)


def directly(fn, s, *args):
    b, n, q, k = (jnp.asarray(x) for x in np.ix_(*(np.arange(size, dtype=np.int32) for size in (B, N, T, S))))
    return fn(*([] if s is None else [s]), b, n, q, k, *args)


def t5_bucket(s, b, n, q, k, table):
    """Case of a bucket by logarithm, with a table for each head (arXiv:1910.10683)."""
    distance = jnp.maximum(q - k, 0)
    beyond = 2 + jnp.log2(jnp.maximum(distance, 1).astype(np.float32)).astype(np.int32)
    return s + table[n, jnp.where(distance < 2, distance, jnp.minimum(beyond, 4))]


def neighbourhood(s, b, n, q, k, width):
    """NATTEN-like: pixels of an image in rows, near in both directions."""
    is_near = (abs(q // width - k // width) <= 1) & (abs(q % width - k % width) <= 1)
    return jnp.where(is_near, s, -jnp.inf)


def truncated(s, b, n, q, k, table):
    """Rounding towards 0 is not linear: q - k + 1/2 less q is not a function of k alone."""
    middle = q.astype(np.float32) - k.astype(np.float32) + 0.5
    return s + table[middle.astype(np.int32) - q + S]


def in_floats(s, b, n, q, k, table):
    difference = q.astype(np.float32) - k.astype(np.float32)
    return s + table[(difference + (S - 1)).astype(np.int32)]


PAIR = "depends on query and key otherwise than by q - k"

# For each function its arrays, and the streams it must have: axes, shape, and what the reason of one per pair names.
ZOO = {
    "identity": (lambda s, b, n, q, k: s, (), []),
    "tanh": (lambda s, b, n, q, k, c: c * jnp.tanh(s / c), (np.float32(2),), [("BN", (1, 1))]),
    "relu": (lambda s, b, n, q, k: jax.nn.relu(s) + jnp.logaddexp(s, 0.5), (), []),
    "causal": (lambda s, b, n, q, k: jnp.where(q >= k, s, -jnp.inf), (), []),
    "alibi": (lambda s, b, n, q, k, x: s - x[n] * abs(q - k).astype(s.dtype), (draw(N),), [("BN", (1, N))]),
    "head_index": (lambda s, b, n, q, k: s * (1 + n + 2 * b).astype(s.dtype), (), [("BN", (B, N))]),
    "table": (lambda s, b, n, q, k, x: s + x[q - k + S], (draw(T + S),), [("BND", (1, 1, T + S - 1))]),
    "two_tables": (
        lambda s, b, n, q, k, x, y: s + x[2 * (q - k) + 2 * S] * y[n, abs(k - q)],
        (draw(2 * T + 2 * S), draw(N, T + S)),
        [("BND", (1, N, T + S - 1))],
    ),
    "t5": (t5_bucket, (draw(N, 5),), [("BND", (1, N, T + S - 1))]),
    "t5_of_both_sides": (
        lambda s, b, n, q, k, x: s + x[n, jnp.minimum(abs(q - k), 2) + jnp.where(k > q, 3, 0)],
        (draw(N, 6),),
        [("BND", (1, N, T + S - 1))],
    ),
    "compared_elsewhere": (
        lambda s, b, n, q, k, x: s + x[jnp.where(3 * q + 1 >= 3 * k - 2, 1, 0)],
        (draw(2),),
        [("BND", (1, 1, T + S - 1))],
    ),
    "compared_off_the_diagonal": (
        lambda s, b, n, q, k, x: s + x[jnp.where(2 * q >= k, 1, 0)],
        (draw(2),),
        [("BNTS", (1, 1, T, S), rf"`\w+` of float32\[2\] {PAIR}")],
    ),
    "in_floats": (in_floats, (draw(T + S),), [("BND", (1, 1, T + S - 1))]),
    "key_and_head": (lambda s, b, n, q, k, x, w: s + x[k] * w[n], (draw(S), draw(N)), [("BNS", (1, N, S))]),
    "row_and_query": (lambda s, b, n, q, k, x: s * jnp.exp(x[b, q]), (draw(B, T),), [("BNT", (B, 1, T))]),
    "query_and_key": (
        lambda s, b, n, q, k, x, y: s + x[q] * jnp.sin(y[k]),
        (draw(T), draw(S)),
        [("BNT", (1, 1, T)), ("BNS", (1, 1, S))],
    ),
    "documents": (
        lambda s, b, n, q, k, x, y: jnp.where(x[q] == y[k], s, -jnp.inf),
        (np.arange(T) // 2, np.arange(S) // 3),
        [("BNT", (1, 1, T)), ("BNS", (1, 1, S))],
    ),
    "through_another": (
        lambda s, b, n, q, k, x, y: s + x[y[q] + n], (draw(T + N), np.arange(T)[::-1].copy()), [("BNT", (1, N, T))]
    ),
    # A division for each query and each key, not for each pair.
    "neighbourhood": (neighbourhood, (np.int32(3),), [("BNT", (1, 1, T)), ("BNS", (1, 1, S))] * 2),
    "the_same_twice": (lambda s, b, n, q, k, x: s * x[n] + x[n] * s, (draw(N),), [("BN", (1, N))]),
    "scaled_by_index": (lambda s, b, n, q, k: s / (1 + q).astype(s.dtype), (), []),
    "back_to_the_key": (lambda s, b, n, q, k, x: s + x[q - (q - k)], (draw(S),), [("BNS", (1, 1, S))]),
    "captured": (lambda s, b, n, q, k: s + jnp.asarray(CAPTURED)[k], (), [("BNS", (1, 1, S))]),
    "of_no_logit": (lambda s, b, n, q, k, x: x[k] - x[q], (draw(S),), [("BNS", (1, 1, S)), ("BNT", (1, 1, T))]),
    "bias": (
        lambda s, b, n, q, k, x, w: s + x[b, q, k] * w[q],
        (draw(B, T, S), draw(T)),
        [("BNTS", (B, 1, T, S), rf"`\w+` of float32\[2, 5, 7\] {PAIR}"), ("BNT", (1, 1, T))],
    ),
    "sum_of_indices": (
        lambda s, b, n, q, k, x: s + x[q + k],
        (draw(T + S),),
        [("BNTS", (1, 1, T, S), rf"`\w+` of float32\[12\] {PAIR}")],
    ),
    "truncated": (truncated, (draw(T + S),), [("BNTS", (1, 1, T, S), rf"`\w+` of float32\[12\] {PAIR}")]),
    "features": (
        lambda s, b, n, q, k, x, y: s + (x[q] * y[k]).sum(),
        (draw(T, 4), draw(S, 4)),
        [("BNTS", (1, 1, T, S), rf"`reduce_sum` of float32\[4\] {PAIR}")],
    ),
}  # fmt: skip
CAPTURED = draw(S, seed=3)


@pytest.mark.parametrize("name", ZOO)
def test_streams_are_those_by_hand(name):
    fn, args, wanted = ZOO[name]
    streams = cut(fn, args)
    assert [(stream.axes, stream.shape) for stream in streams.streams] == [entry[:2] for entry in wanted]
    for stream, (_, _, *reason) in zip(streams.streams, wanted):
        assert bool(reason) == bool(stream.reason)
        if reason:
            assert re.fullmatch(reason[0], stream.reason), stream.reason
    assert streams.per_pair == tuple(stream.reason for stream in streams.streams if stream.axes == "BNTS")


def elementwise(name, fn):
    """The function on whole arrays; that of features is written for one pair."""
    if name != "features":
        return fn
    return lambda s, b, n, q, k, x, y: s + (x[q] * y[k]).sum(-1)


def assert_same(fn, args, direct=None):
    streams, direct = cut(fn, args), direct or fn
    s, d_out = jnp.asarray(draw(B, N, T, S, seed=1)), jnp.asarray(draw(B, N, T, S, seed=2))
    floats = [i for i, arg in enumerate(args) if arg.dtype == np.float32]

    def of_floats(function):
        @jax.jit
        def passes(s, *values):
            return results(function, s, *values)

        return passes(s, *(jnp.asarray(args[i]) for i in floats))

    def results(function, s, *values):
        def call(s, *values):
            filled = list(args)
            for i, value in zip(floats, values):
                filled[i] = value
            return jnp.broadcast_to(function(s, *map(jnp.asarray, filled)), (B, N, T, S))

        found, pull = jax.vjp(call, s, *values)
        # What the function masks has no cotangent.
        return found, *pull(jnp.where(found == -jnp.inf, 0, d_out))

    found = of_floats(functools.partial(with_streams, streams))
    wanted = of_floats(functools.partial(directly, direct))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, equal_nan=False)


@pytest.mark.parametrize("name", ZOO)
def test_values_and_gradients_are_those_of_the_function(name):
    fn, args, _ = ZOO[name]
    assert_same(fn, args, elementwise(name, fn))


@pytest.mark.parametrize("name", ZOO)
def test_the_inner_function_is_arithmetic(name):
    """On tiles of one shape a kernel gets primitives of operands of one shape, and nothing that indexes."""
    fn, args, _ = ZOO[name]
    streams = cut(fn, args)
    tile = (4, 6)
    shapes = [jax.ShapeDtypeStruct(tile, dtype) for dtype in (np.float32, np.int32, np.int32)]
    shapes += [jax.ShapeDtypeStruct(tile, stream.dtype) for stream in streams.streams]
    jaxpr = jax.make_jaxpr(streams.inner)(*shapes)
    for equation in jaxpr.jaxpr.eqns:
        assert "gather" not in equation.primitive.name and "slice" not in equation.primitive.name
        assert equation.primitive.name == "broadcast_in_dim" or {x.aval.shape for x in equation.invars} == {tile}
        assert equation.outvars[0].aval.shape == tile


def test_values_by_head_are_those_of_the_place_and_not_of_the_number():
    """Beside arrays that come whole: a device has the slopes of its own heads, and their numbers n."""

    def fn(s, b, n, q, k, slope, whole):
        return s * slope + whole[n, q]

    slopes, whole = draw(B, N), draw(N, T)
    cut = streams_of(fn, (slopes, whole), axes=("BN", ".."), B=B, N=N, T=T, S=S, dtype=FLOAT32)
    assert [stream.shape for stream in cut.streams] == [(B, N), (1, N, T)]
    part = streams_of(fn, (slopes[1:, 2:], whole), axes=("BN", ".."), B=1, N=1, T=T, S=S, dtype=FLOAT32)
    found = part.outer(slopes[1:, 2:], whole, b=np.array([1], np.int32), n=np.array([[2]], np.int32))
    for one, other in zip(found, (slopes[1:, 2:], whole[None, 2:]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_functions_of_masks():
    """The same without a logit: to booleans."""

    def fn(b, n, q, k, reach, marked):
        return (abs(q - k) <= reach[q]) | marked[b, k] & (n == 1)

    args = (np.arange(T) % 3, np.random.default_rng(0).random((B, S)) < 0.5)
    streams = cut(fn, args, dtype=None)
    assert {(stream.axes, str(stream.dtype)) for stream in streams.streams} == {("BNT", "int32"), ("BNS", "bool")}
    found = jnp.broadcast_to(with_streams(streams, None, *args), (B, N, T, S))
    assert np.array_equal(found, jnp.broadcast_to(directly(fn, None, *map(jnp.asarray, args)), (B, N, T, S)))


def test_a_logit_as_an_index_is_refused():
    with pytest.raises(
        ArgumentError, match=r"`score_fn`: found a function that does `\w+` with the logit, wanted arith"
    ):
        cut(lambda s, b, n, q, k, x: x[s.astype(np.int32)], (draw(9),))


def test_the_same_function_is_cut_once():
    fn, args, _ = ZOO["table"]
    assert cut(fn, args) is cut(fn, (draw(T + S, seed=9),))
    assert cut(fn, args) is not cut(fn, (draw(T + S + 1),))


def test_whole_numbers_and_shapes_alone():
    """Integer arguments get no gradient, and shapes are enough to know the streams."""
    fn, args, _ = ZOO["through_another"]
    structs = [jax.ShapeDtypeStruct(arg.shape, np.int32 if arg.dtype == np.int64 else arg.dtype) for arg in args]
    assert cut(fn, structs).streams == cut(fn, args).streams
    _, pull = jax.vjp(cut(fn, args).outer, *map(jnp.asarray, args))
    d_x, d_y = pull((jnp.ones((1, N, T)),))
    assert d_x.sum() == N * T and d_y.dtype == jax.dtypes.float0


def with_poles(s, b, n, q, k, of_head, of_query, of_key, of_diagonal, marked):
    """Infinite, with an infinite derivative, at a head, queries, keys and diagonals where an argument is 0."""
    of_query = jnp.where(marked[b], 1 / of_query[q], 0)
    return s * jnp.sqrt(of_head[n]) + of_query * jnp.log(of_key[n, k]) + jnp.sqrt(of_diagonal[q - k + S])


def test_no_cotangent_goes_through_a_pole_that_no_pair_sees():
    """Of entries without a cotangent the derivative is 0; of the others it is that of the function."""
    args = (
        np.array([1, 0, 4], np.float32),
        np.array([0, 2, 3, 4, 0], np.float32),
        np.abs(draw(N, S)) + 1,
        np.abs(draw(T + S)) + 1,
        np.array([True, False]),
    )
    args[2][1:, 5:] = 0
    args[3][: S - 1] = 0
    function = score_function(with_poles, args, B=B, N=N, dtype=FLOAT32)
    assert not function.is_total

    def arrays(*floats):
        filled = dataclasses.replace(function, arrays=(*floats, function.arrays[4]))
        return streamed(filled, T=T, S=S, dtype=FLOAT32).arrays

    floats = list(map(jnp.asarray, args[:4]))
    found, wanted = arrays(*floats), cut(with_poles, args).outer(*floats, args[4])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)

    @jax.jit
    def gradients(*cotangents):
        return jax.vjp(arrays, *floats)[1](cotangents)

    @jax.jit
    def without_poles(*cotangents):
        finite = [jnp.where(x == 0, 1, x) for x in floats]
        return jax.vjp(lambda *x: cut(with_poles, args).outer(*x, args[4]), *finite)[1](cotangents)

    cotangents = [jnp.where(jnp.isfinite(x) & (x != 0), draw(*x.shape, seed=7), 0) for x in found]
    assert all(0 < (x != 0).mean() < 1 for x in cotangents)
    # All, and each on its own, beside others that have no cotangent at all and begin with a pole; and none.
    for chosen in ({0, 1, 2, 3}, {0}, {1}, {2}, {3}, set()):
        own = [x if i in chosen else 0 * x for i, x in enumerate(cotangents)]
        for one, other in zip(gradients(*own), without_poles(*own), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=False)
        assert all(np.abs(x).max() > 0 for x in gradients(*own)) == (len(chosen) == 4)


# In place of the function itself --------------------------------------------------------------------------------------


def streaming(operands, problem):
    functions = (streamed(f, T=problem.T, S=problem.S, dtype=FLOAT32) for f in operands.functions)
    functions = tuple(functions)
    assert not any("." in axes for f in functions for axes in f.axes)
    return operands._replace(terms=operands.terms._replace(functions=functions))


@pytest.mark.parametrize("name", ["reference", "xla"])
def test_backends_take_functions_with_streams(name):
    """Values per head, query, key, diagonal and pair, and ALiBi of packed sequences, whose slopes come by head."""

    def fn(s, b, n, q, k, head, query, key, diagonal, pair):
        return s * head[n] + query[b, q] * key[k] + diagonal[q - k + S] + pair[n, q, k]

    args = draw(N), draw(B, T), draw(S), draw(T + S), draw(N, T, S)
    own = registry.get(name)

    def forward(problem, tiles, operands):
        return own.forward(problem, tiles, streaming(operands, problem))

    tiles = {"tiles": XlaTiles(block_q=2, block_k=3)} if name == "xla" else {}
    q, k, v = draw(B, T, N, 8), draw(B, S, N, 8, seed=1), draw(B, S, N, 4, seed=2)
    slopes = draw(N, seed=3)

    def run(backend, **tiles):
        def call(*operands):
            q, k, v, slopes, *args = operands
            return jflash.flash_attention_with_lse(
                q, k, v, mask=Causal(offset=1), alibi_slopes=slopes, score_fn=fn, score_args=tuple(args),
                backend=backend, **tiles,
            ).out  # fmt: skip

        def packed(slopes):
            ends = np.array([0, 3, T]), np.array([0, 4, S])
            return jflash.flash_attention_varlen(q[0], k[0], v[0], *ends, alibi_slopes=slopes, backend=backend, **tiles)

        @jax.jit
        def passes(*operands):
            out, pull = jax.vjp(call, *operands)
            of_packed, pull_packed = jax.vjp(packed, operands[3])
            return out, *pull(draw(*out.shape)), of_packed, *pull_packed(draw(*of_packed.shape))

        return passes(q, k, v, slopes, *args)

    record = dataclasses.replace(own, name=f"{name}_streaming", forward=forward)
    with registry.registered(record):
        found = run(record.name, **tiles)
    for one, other in zip(found, run("reference"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_functions_with_streams_are_known_from_shapes():
    fn, args, _ = ZOO["bias"]
    function = score_function(fn, args, B=B, N=N, dtype=FLOAT32)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), function)
    one, other = (streamed(x, T=T, S=S, dtype=FLOAT32) for x in (function, shapes))
    assert one.fn is other.fn and one.axes == other.axes == ("BNTS", "BNT")
    assert [x.shape for x in one.arrays] == [x.shape for x in other.arrays]
    # Of one device's rows and heads, which are not the first: the same numbers as those of the whole.
    part = dataclasses.replace(function, b=function.b[1:], n=function.n[:, 1:])
    found = streamed(part, T=T, S=S, dtype=FLOAT32)
    assert [x.shape for x in found.arrays] == [(1, 1, T, S), (1, 1, T)]
    np.testing.assert_array_equal(found.arrays[0], one.arrays[0][1:])
    # What comes by axes already stays as it is.
    bare = score_function(ZOO["causal"][0], (), B=B, N=N, dtype=FLOAT32)
    assert streamed(bare, T=T, S=S, dtype=FLOAT32) is bare


# Any function ---------------------------------------------------------------------------------------------------------

ATOMS = {
    "s": lambda s, b, n, q, k, x: s,
    "q": lambda s, b, n, q, k, x: q.astype(s.dtype) / 4,
    "k": lambda s, b, n, q, k, x: k.astype(s.dtype) / 4,
    "difference": lambda s, b, n, q, k, x: (q - k).astype(s.dtype) / 4,
    "head": lambda s, b, n, q, k, x: x[n],
    "row": lambda s, b, n, q, k, x: x[b + 2],
    "query": lambda s, b, n, q, k, x: x[q + n],
    "key": lambda s, b, n, q, k, x: x[k],
    "diagonal": lambda s, b, n, q, k, x: x[q - k + S],
    "other_diagonal": lambda s, b, n, q, k, x: x[abs(k - q)] * x[n],
    "pair": lambda s, b, n, q, k, x: x[q + k],
    "number": lambda s, b, n, q, k, x: jnp.float32(0.3),
}
JOINS = (operator.add, operator.sub, operator.mul, jnp.maximum, lambda x, y: jnp.where(x > y, jnp.sin(x), y))

expressions = st.recursive(
    st.sampled_from(sorted(ATOMS)),
    lambda inner: st.tuples(st.sampled_from(range(len(JOINS))), inner, inner),
    max_leaves=6,
)


def built(tree):
    if isinstance(tree, str):
        return ATOMS[tree]
    join, left, right = JOINS[tree[0]], built(tree[1]), built(tree[2])
    return lambda *arguments: join(left(*arguments), right(*arguments))


@hypothesis.settings(max_examples=12)
@hypothesis.given(expressions)
def test_any_function_is_what_its_parts_are(tree):
    assert_same(built(tree), (draw(T + S + 2, seed=4),))
