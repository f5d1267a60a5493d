"""Dropout through the public calls: what is dropped, on which devices and backends, and the gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, tolerance
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash import flash_attention, flash_attention_with_lse
from jflash.backends.xla import XlaTiles
from jflash.masks import Causal, Lengths
from jflash.numerics.dropout import column_word, is_kept, pair_bits, row_words

B, T, S, N, K, H, Hv = 2, 11, 13, 4, 4, 8, 5
KEY, RATE = jax.random.key(7), 0.3
MASK = Causal(offset=3) & Lengths(kv=np.array([S, 0]))


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), np.float32)


def operands():
    return draw(B, T, N, H), draw(B, S, K, H, seed=1), draw(B, S, K, Hv, seed=2)


def kept():
    b, n, q, k = np.ix_(*(np.arange(size, dtype=np.int32) for size in (B, N, T, S)))
    rows = row_words(jax.random.key_data(KEY), jnp.asarray(b), jnp.asarray(n), jnp.asarray(q))
    return is_kept(pair_bits(rows, column_word(jnp.asarray(k))), RATE)


def dense(q, k, v, sinks):
    """The formula, with what is kept written out: dropout after the softmax, before the values."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    b, t, key = np.ix_(range(B), range(T), range(S))
    allowed = np.broadcast_to(MASK.bind(B=B, N=N, T=T, S=S).allowed(t, key, b=b), (B, T, S))[:, None]
    p = jnp.where(allowed, jnp.exp(s), 0)
    total = p.sum(-1, keepdims=True) + jnp.exp(sinks)[:, None, None]
    p = jnp.where(kept(), p / total / (1 - RATE), 0)
    return jnp.einsum("bnts,bsnh->btnh", p, v), jnp.log(total)[..., 0]


def gradients(call, *arguments):
    out, pull = jax.vjp(call, *arguments)
    return (*out, *pull((draw(B, T, N, Hv, seed=3), draw(B, N, T, seed=4))))


def dropped(*arguments, backend="xla", key=KEY, rate=RATE, tiles=None):
    q, k, v, sinks = arguments
    attended = flash_attention_with_lse(
        q, k, v, mask=MASK, sinks=sinks, dropout_rate=rate, dropout_key=key, backend=backend, tiles=tiles
    )
    return tuple(attended)


@pytest.mark.parametrize("path", [("reference", None), ("xla", XlaTiles(block_q=4, block_k=5)), ("xla", None)], ids=str)
def test_as_the_formula_with_what_is_kept_written_out(path):
    """Gradients too: the backward pass drops the same. One batch row sees no key at all (case B06)."""
    backend, tiles = path
    arguments = (*operands(), draw(N, seed=5))
    found = jax.jit(functools.partial(gradients, functools.partial(dropped, backend=backend, tiles=tiles)))(*arguments)
    for one, other in zip(found, gradients(dense, *arguments), strict=True):
        assert_close(one, other, atol=4 * tolerance(np.float32, np.asarray(other)))


def test_of_a_rate_and_of_lse():
    q, k, v = operands()
    bare = flash_attention_with_lse(q, k, v, mask=MASK)
    for key in (None, KEY):
        assert np.array_equal(flash_attention(q, k, v, mask=MASK, dropout_rate=0.0, dropout_key=key), bare.out)
    call = functools.partial(flash_attention_with_lse, q, k, v, mask=MASK, dropout_rate=RATE)
    one, other = call(dropout_key=KEY), call(dropout_key=jax.random.key(8))
    assert np.array_equal(one.lse, bare.lse) and np.array_equal(other.lse, bare.lse)
    assert not np.allclose(one.out, other.out) and not np.allclose(one.out, bare.out)
    raw = call(dropout_key=jax.random.key_data(KEY))
    assert np.array_equal(raw.out, one.out)
    # The mean over keys is what comes out without dropout.
    outs = jnp.stack([call(dropout_key=jax.random.key(seed)).out for seed in range(200)])
    deviation = np.asarray(outs.std(0) / np.sqrt(len(outs)))
    assert (np.abs(np.asarray(outs.mean(0) - bare.out)) < 5 * deviation + 1e-6).all() and deviation[0].max() > 0.01


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_the_same_on_every_mesh(kind):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    arguments = operands()
    with jax.set_mesh(mesh):
        heads = NamedSharding(mesh, P("data", None, "model", None))
        placed = [jax.device_put(x, heads) for x in arguments]
        call = lambda *x: flash_attention(*x, dropout_rate=RATE, dropout_key=KEY, backend="xla")  # noqa: E731
        found = jax.jit(call)(*placed)
    wanted = flash_attention(*arguments, dropout_rate=RATE, dropout_key=KEY, backend="reference")
    assert_close(found, wanted, atol=4 * tolerance(np.float32, np.asarray(wanted)))


def test_under_vmap_each_call_is_the_call_alone():
    """The rows of a mapped call count from 0 in each of them; keys may be mapped."""
    q, k, v = operands()
    keys = jax.random.split(jax.random.key(1), 3)
    call = lambda q, key: flash_attention(q, k, v, dropout_rate=RATE, dropout_key=key, backend="xla")  # noqa: E731
    queries = jnp.stack([q, q, -q])
    found = jax.vmap(call)(queries, keys)
    shared = jax.vmap(call, in_axes=(0, None))(queries, KEY)
    for index in range(3):
        assert_close(found[index], call(queries[index], keys[index]), atol=1e-6)
        assert_close(shared[index], call(queries[index], KEY), atol=1e-6)
    assert not np.allclose(found[0], found[1]) and np.array_equal(shared[0], shared[1])


def test_second_order_and_checkpoint_drop_the_same():
    arguments = (*operands(), draw(N, seed=5))
    weight = draw(B, T, N, Hv, seed=3)

    def second(call):
        gradient = jax.grad(lambda q: (call(q, *arguments[1:])[0] * weight).sum())
        return jax.jit(lambda q: jax.jvp(gradient, (q,), (jnp.cos(q),))[1])(arguments[0])

    found, wanted = second(jax.checkpoint(dropped)), second(dense)
    assert_close(found, wanted, atol=8 * tolerance(np.float32, np.asarray(wanted)))


REFUSED = [
    ({"dropout_rate": 0.1}, "dropout_key", "None", "a key of jax.random where dropout_rate=0.1"),
    ({"dropout_rate": 1.0}, "dropout_rate", "1.0", "from 0 to below 1"),
    ({"dropout_rate": -0.1}, "dropout_rate", "-0.1", "from 0 to below 1"),
    ({"dropout_rate": float("nan")}, "dropout_rate", "nan", "from 0 to below 1"),
    ({"dropout_rate": True}, "dropout_rate", "True", "Python number"),
    ({"dropout_rate": jnp.float32(0.1)}, "dropout_rate", "ArrayImpl", "Python number.*part of the compiled program"),
    ({"dropout_rate": 0.1, "dropout_key": 3}, "dropout_key", "int", "a key of jax.random"),
    ({"dropout_rate": 0.1, "dropout_key": jax.random.split(KEY)}, "dropout_key", r"shape \(2,\)", "one key"),
    ({"dropout_rate": 0.1, "dropout_key": np.zeros(2, np.int32)}, "dropout_key", "dtype int32", "uint32"),
    ({"dropout_rate": 0.0, "dropout_key": np.zeros((2, 2), np.uint32)}, "dropout_key", r"shape \(2, 2\)", "one key"),
]


@pytest.mark.parametrize("wrong, argument, found, wanted", REFUSED)
def test_bad_arguments_are_named(wrong, argument, found, wanted):
    with pytest.raises(jflash.ArgumentError, match=rf"(?s)^`{argument}`: found {found}.*, wanted .*{wanted}"):
        flash_attention(*operands(), **wrong)


@pytest.mark.parametrize("key", [jax.eval_shape(lambda: KEY), jax.ShapeDtypeStruct((2,), "uint32"), KEY], ids=str)
def test_explain_shows_it(key):
    q, k, v = (jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16"),) * 3
    explanation = jflash.explain(q, k, v, dropout_rate=0.1, dropout_key=key, hardware="h200")
    assert " dropout=0.1" in str(explanation) and explanation.plan.backend == "xla"
    assert "do not drop weights out yet" in explanation.refusals["mosaic_gpu"]
    assert "other random numbers" in explanation.refusals["cudnn"]


def test_another_key_does_not_compile_again(caplog):
    q, k, v = operands()
    with jax.log_compiles(True):
        for seed in range(3):
            flash_attention(q, k, v, dropout_rate=0.25, dropout_key=jax.random.key(seed))
    assert len([record for record in caplog.records if "Compiling jit(_attend)" in record.getMessage()]) == 1
