"""Score functions, ALiBi and sinks through the public calls: values, gradients, and what they must not touch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_backend
from helpers import assert_close, tolerance

import jflash
from jflash import flash_attention, flash_attention_with_lse
from jflash.backends import registry
from jflash.backends.xla import XlaTiles
from jflash.masks import Causal, Dense, Lengths, Segments, SlidingWindow

B, T, S, N, K, H, Hv = 2, 11, 13, 4, 2, 8, 5
XLA = {"backend": "xla", "tiles": XlaTiles(block_q=4, block_k=5)}
REFERENCE = {"backend": "reference"}

every_path = pytest.mark.parametrize("path", [REFERENCE, XLA], ids=["reference", "xla"])


def draw(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def operands(dtype=np.float32):
    return draw(B, T, N, H, dtype=dtype), draw(B, S, K, H, seed=1, dtype=dtype), draw(B, S, K, Hv, seed=2, dtype=dtype)


def dense(q, k, v, *, allowed, score, sink=-np.inf):
    """The formula in float64, with numpy: `score(s, b, n, q, k)` of all logits; out and lse."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    s = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    s = np.where(allowed, score(s, *np.ix_(*map(range, s.shape))), -np.inf)
    sink = np.asarray(sink)[..., None, None]
    total = np.exp(s).sum(-1, keepdims=True) + np.exp(sink)
    weights = np.exp(s) / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return np.einsum("bnts,bsnh->btnh", weights, v), np.log(total)[..., 0]


def compiled_gradients(call, *, argnums, seed=5):
    """The function to out, lse and gradients of a call that gives out and lse, with random cotangents."""

    def run(*arguments):
        primals = [arguments[i] for i in argnums]

        def of_primals(*primals):
            filled = list(arguments)
            for i, primal in zip(argnums, primals):
                filled[i] = primal
            return tuple(call(*filled))

        (out, lse), pull = jax.vjp(of_primals, *primals)
        d_out = jnp.asarray(draw(*out.shape, seed=seed), out.dtype)
        d_lse = jnp.asarray(draw(*lse.shape, seed=seed), lse.dtype)
        return out, lse, *pull((d_out, d_lse))

    run = jax.jit(run)
    return lambda *arguments: [np.asarray(x) for x in run(*arguments)]


def gradients(call, arguments, *, argnums):
    return compiled_gradients(call, argnums=argnums)(*arguments)


def assert_as_float64(call, arguments, *, argnums, factor=1):
    """A path in float32 against the reference in float64, results and gradients."""
    found = gradients(functools.partial(call, **XLA), arguments, argnums=argnums)
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if np.asarray(x).dtype == np.float32 else x for x in arguments]
        wanted = gradients(functools.partial(call, **REFERENCE), wide, argnums=argnums)
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert not np.all(other == 0), f"result {index} tells nothing"
        assert_close(one, other, atol=factor * tolerance(np.float32, other), name=str(index))


# What they mean -------------------------------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize(
    "slopes", [pytest.param(draw(N), marks=pytest.mark.slow), draw(B, N)], ids=["head", "row_and_head"]
)
def test_alibi_measures_from_the_diagonal_of_the_mask(path, slopes):
    """The same offset as causal, per batch row, from whatever part of the mask has it (arXiv:2108.12409)."""
    q, k, v = operands()
    offset = np.array([2, -3])
    mask = Causal(offset=offset) & Lengths(kv=np.array([S, 7]))
    t, s = np.ix_(range(T), range(S))
    distance = abs(t + offset[:, None, None] - s)[:, None]
    allowed = (s <= t + offset[:, None, None]) & (s < np.array([S, 7])[:, None, None])
    score = lambda x, b, n, q, k: x - np.broadcast_to(slopes, (B, N))[..., None, None] * distance  # noqa: E731
    found = flash_attention_with_lse(q, k, v, mask=mask, alibi_slopes=slopes, **path)
    for one, other in zip(found, dense(q, k, v, allowed=allowed[:, None], score=score)):
        assert_close(one, other, atol=4 * tolerance(np.float32, other))


@every_path
def test_the_order_is_bias_softcap_alibi_function_mask(path):
    q, k, v = operands()
    bias, slopes = draw(1, N, 1, S), draw(N)

    def score(s, b, n, q, k):
        s = 2.0 * np.tanh((s + bias) / 2.0) - slopes[n] * abs(q - k)
        return s * (1 + 0.1 * b) + 0.05 * n * q - 0.02 * k

    def score_fn(s, b, n, q, k):
        b, n, q, k = (index.astype(s.dtype) for index in (b, n, q, k))
        return s * (1 + 0.1 * b) + 0.05 * n * q - 0.02 * k

    found = flash_attention_with_lse(
        q, k, v, mask=SlidingWindow(6, 3), bias=bias, softcap=2.0, alibi_slopes=slopes, score_fn=score_fn, **path
    )
    t, s = np.ix_(range(T), range(S))
    for one, other in zip(found, dense(q, k, v, allowed=(s >= t - 6) & (s <= t + 3), score=score)):
        assert_close(one, other, atol=4 * tolerance(np.float32, other))


@every_path
def test_b82_sinks_are_a_key_without_a_value(path):
    """Case B82: in the sum and in lse, with a gradient, and alone for a query that sees no key; -inf is none."""
    q, k, v = operands()
    t, s = np.ix_(range(T), range(S + 1))
    allowed = (s >= t + 4) & (s <= t + 6) & (s < S)

    def call(q, k, v, sinks):
        return flash_attention_with_lse(q, k, v, mask=SlidingWindow(2, 0, offset=6), sinks=sinks, **path)

    def with_a_key_more(q, k, v, sinks):
        """The sink as the logit of a key that all see, whose value is 0."""
        widened = [jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v)]
        bias = jnp.zeros((1, N, 1, S + 1)).at[:, :, 0, S].set(sinks)
        return flash_attention_with_lse(q, *widened, mask=Dense(allowed | (s == S)), bias=bias, backend="reference")

    found_of, wanted_of = (compiled_gradients(one, argnums=(0, 1, 2, 3)) for one in (call, with_a_key_more))
    dead = ~allowed.any(1)
    assert dead.any() and not dead.all()
    for sink in (-10.0, 0.0, 30.0, -np.inf, 3e38):
        sinks = np.full(N, sink, np.float32)
        found, wanted = found_of(q, k, v, sinks), wanted_of(q, k, v, sinks)
        assert (found[0][:, dead] == 0).all() and (found[1][..., dead] == np.float32(sink)).all()
        for name, one, other in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), found, wanted, strict=True):
            assert_close(one, other, atol=8 * tolerance(np.float32, other) + 1e-6, name=f"{name} of {sink}")
        assert (found[5] != 0).all() == (sink > -np.inf)


def test_sinks_without_keys():
    q, k, v = operands()
    sinks = draw(N)
    found = gradients(
        lambda q, sinks: flash_attention_with_lse(q, k[:, :0], v[:, :0], sinks=sinks), (q, sinks), argnums=(0, 1)
    )
    assert (found[0] == 0).all() and (found[1] == sinks[:, None]).all() and (found[2] == 0).all()
    assert_close(found[3], draw(B, N, T, seed=5).sum((0, 2)), atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "xla", "toy"])
def test_cotangents_of_queries_without_keys_reach_no_sink(backend):
    """Nothing moves their out of 0. Their lse is the sink, and its cotangent counts."""
    q, k, v = operands()
    sinks = draw(B, N)
    mask = Lengths(kv=np.array([9, 0]))
    with registry.registered(toy_backend.BACKEND):
        call = functools.partial(flash_attention_with_lse, mask=mask, backend=backend)
        (out, lse), pull = jax.vjp(lambda *x: call(*x[:3], sinks=x[3]), q, k, v, sinks)
        d_out, d_lse = jnp.asarray(draw(*out.shape)), jnp.asarray(draw(*lse.shape))
        found = pull(jflash.Attended(d_out.at[1].set(jnp.nan), d_lse))
        clean = pull(jflash.Attended(d_out.at[1].set(0), d_lse))
    for one, other in zip(found, clean):
        assert np.array_equal(one, other)
    assert_close(found[3][1], d_lse[1].sum(-1), atol=1e-5)


# Gradients ------------------------------------------------------------------------------------------------------------


def scalar(s, b, n, q, k, factor):
    return s * factor


def per_query_twice(s, b, n, q, k, values):
    return s + values[q] * values[(q + 1) % T]


def relative_table(s, b, n, q, k, table):
    return s + table[q - k + S]


def bucketed(s, b, n, q, k, table, buckets):
    return s + table[n, buckets[q - k + S]]


def per_pair(s, b, n, q, k, values):
    return s + values[b, n, q, k]


ARGUMENTS = {
    scalar: (np.float32(1.3),),
    per_query_twice: (draw(T),),
    relative_table: (draw(T + S),),
    bucketed: (draw(N, 5), np.arange(T + S) % 5),
    per_pair: (draw(B, N, T, S),),
}


@pytest.mark.parametrize(
    "fn",
    [
        bucketed,
        per_pair,
        *(pytest.param(fn, marks=pytest.mark.slow) for fn in (scalar, per_query_twice, relative_table)),
    ],
    ids=lambda fn: fn.__name__,
)
def test_b87_gradients_of_arguments(fn):
    """Case B87: each as the reference in float64 gives it; whole numbers get none."""
    args = ARGUMENTS[fn]

    def call(q, k, v, *args, **path):
        return flash_attention_with_lse(
            q, k, v, mask=SlidingWindow(7, 4), softcap=3.0, score_fn=fn, score_args=args, **path
        )

    assert_as_float64(call, (*operands(), *args), argnums=(0, 1, 2, 3), factor=4)


@every_path
def test_gradients_need_no_maximum_that_is_found_again(path):
    """Without XLA's optimisations on the CPU, logits that are computed twice differ in their last bit."""
    function = lambda s, b, n, q, k: s - 0.3 * abs(q - k).astype(s.dtype)  # noqa: E731
    loss = lambda *x: (flash_attention(*x, score_fn=function, **path) * draw(B, T, N, Hv, seed=3)).sum()  # noqa: E731
    plain = {"xla_backend_optimization_level": 0}
    found, wanted = (jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=o)(*operands()) for o in (plain, {}))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, atol=4 * tolerance(np.float32, np.asarray(other)))


def test_whole_numbers_have_no_gradient():
    q, k, v = operands()
    table, buckets = ARGUMENTS[bucketed]

    def loss(args):
        return flash_attention(q, k, v, score_fn=bucketed, score_args=args, **REFERENCE).sum()

    d_table, d_buckets = jax.grad(loss, allow_int=True)((jnp.asarray(table), jnp.asarray(buckets)))
    assert d_table.shape == table.shape and d_buckets.dtype == jax.dtypes.float0


def test_sums_of_a_narrow_argument_are_float32():
    """A bfloat16 scalar takes part in every pair: a sum in 8 bits would stop growing."""
    q, k, v = operands()
    factor = jnp.asarray(1.25, jnp.bfloat16)
    weight = draw(B, T, N, Hv, seed=3)

    def loss(factor):
        return (flash_attention(q, k, v, score_fn=scalar, score_args=(factor,), **XLA) * weight).sum()

    found, wanted = jax.grad(loss)(factor), jax.grad(loss)(jnp.float32(1.25))
    assert found.dtype == jnp.bfloat16 and found == wanted.astype(jnp.bfloat16)


def pole_of_argument(s, b, n, q, k, rate):
    return s + jnp.log(rate * (q - k).astype(s.dtype))


def pole_of_score(s, b, n, q, k, rate):
    return s * jnp.where(k <= q, rate, jnp.nan) + jnp.exp(jnp.where(k <= q, 0.0, jnp.inf) * s)


@pytest.mark.parametrize(
    "path, fn",
    [(XLA, pole_of_argument), (XLA, pole_of_score), (REFERENCE, pole_of_argument)],
    ids=["xla_argument", "xla_score", "reference_argument"],
)
def test_what_a_function_is_where_the_mask_hides_it_reaches_nothing(path, fn):
    """Values of NaN, and derivatives of arguments that are: 0 times those must not reach a sum."""
    q, k, v = operands()
    # With tiles of which no pair attends, and queries that see no key.
    mask = Causal(offset=-1) & Segments(np.arange(T) // 4, np.arange(S) // 4)

    def clean(s, b, n, q, k, rate):
        positive = jnp.maximum(q - k, 1).astype(s.dtype)
        return s + jnp.log(rate * positive) if fn is pole_of_argument else s * rate + 1.0

    def call(q, k, v, rate, fn):
        return flash_attention_with_lse(q, k, v, mask=mask, score_fn=fn, score_args=(rate,), **path)

    arguments = (q, k, v, np.float32(0.7))
    found, wanted = (gradients(functools.partial(call, fn=one), arguments, argnums=(0, 1, 2, 3)) for one in (fn, clean))
    for one, other in zip(found, wanted):
        # One sum over all pairs, whose terms are up to 4 and cancel.
        assert_close(one, other, atol=4 * tolerance(np.float32, other) + 1e-5)


def keep_near(s, b, n, q, k, reach):
    return jnp.where(abs(q - k) <= reach, s, -jnp.inf)


def test_minus_infinity_from_a_function_masks_the_pair():
    reach = 1

    def masked(q, k, v):
        return flash_attention_with_lse(q, k, v, mask=SlidingWindow(reach, reach), **XLA)

    def scored(q, k, v):
        return flash_attention_with_lse(q, k, v, score_fn=keep_near, score_args=(reach,), **XLA)

    found, wanted = (gradients(call, operands(), argnums=(0, 1, 2)) for call in (scored, masked))
    for one, other in zip(found, wanted):
        assert_close(one, other, atol=tolerance(np.float32, other))


def squashed(s, b, n, q, k):
    return jnp.tanh(s)


def test_minus_infinity_in_a_bias_masks_whatever_a_function_makes_of_it():
    q, k, v = operands()
    allowed = np.random.default_rng(3).random((T, S)) < 0.5
    bias = np.where(allowed, 0, -np.inf).astype(np.float32)

    def biased(q, k, v):
        return flash_attention_with_lse(q, k, v, bias=bias, score_fn=squashed, **XLA)

    def masked(q, k, v):
        return flash_attention_with_lse(q, k, v, mask=Dense(allowed), score_fn=squashed, **XLA)

    found, wanted = (gradients(call, (q, k, v), argnums=(0, 1, 2)) for call in (biased, masked))
    for one, other in zip(found, wanted):
        assert_close(one, other, atol=tolerance(np.float32, other))
