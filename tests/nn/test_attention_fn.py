"""`jflash.nn.attention_fn` in the place of Flax's own attention: the same numbers, or an error with a way out."""

import functools
import inspect

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_helpers import assert_within_error_rule, normal, out_and_gradients, randomised, split

import jflash
from jflash.errors import ArgumentError, ShapeError
from jflash.masks import Causal, Dense, Lengths, SlidingWindow
from jflash.nn import RoPE, attention_fn

B, T, S, N, K, H, FEATURES = 2, 9, 7, 6, 3, 8, 10

padding = np.arange(S) < np.array([[4], [6]])
block = np.random.default_rng(1).random((B, 1, T, T)) < 0.6
block |= np.eye(T, dtype=bool)


def multi_head(fn, *, kv_heads=N, **arguments):
    arguments = {"num_heads": N, "num_kv_heads": kv_heads, "in_features": FEATURES, "qkv_features": N * H} | arguments
    return nnx.MultiHeadAttention(attention_fn=fn, decode=False, rngs=nnx.Rngs(0), **arguments)


# Each: arguments of the layer, and of its call besides the queries.
LAYERS = {
    "self": ({}, {}),
    "grouped_boolean_mask": ({"kv_heads": K}, {"mask": block}),
    "float_mask_of_flax": ({}, {"mask": nnx.make_causal_mask(np.zeros((B, T)))}),
    "mask_and_causal": ({"normalize_qk": True, "use_bias": False}, {"mask": block, "is_causal": True}),
    "cross_padded": (
        {"in_kv_features": 5, "kv_heads": 1},
        {"inputs_k": normal(5, B, S, 5), "mask": nnx.make_attention_mask(np.ones((B, T), bool), padding)},
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ("grouped_boolean_mask", "float_mask_of_flax", "cross_padded")),
        pytest.param("grouped_boolean_mask", "bfloat16", marks=pytest.mark.slow),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in ("self", "mask_and_causal")),
    ],
)
def test_in_nnx_multi_head_attention(name, dtype):
    arguments, call = LAYERS[name]
    arguments, call = arguments | {"param_dtype": dtype}, dict(call)
    parameters, ours = split(lambda: multi_head(attention_fn(), **arguments))
    _, stock = split(lambda: multi_head(nnx.dot_product_attention, **arguments))
    # jax.nn.dot_product_attention, which `stock` calls, takes its softmax in float32 also for float64. With a rate of
    # dropout, Flax writes attention out itself.
    written_out = {"dropout_rate": 0.5, "deterministic": True, "keep_rngs": False}
    _, exact = split(lambda: multi_head(nnx.dot_product_attention, **arguments, **written_out))
    inputs_k = call.pop("inputs_k", None)
    inputs = [normal(4, B, T, FEATURES, dtype=dtype), *([] if inputs_k is None else [inputs_k])]

    def applied(layer):
        return lambda parameters, *inputs: layer(parameters)(*inputs, **call)

    assert_within_error_rule(applied(ours), applied(stock), parameters, *inputs, exact=applied(exact), dtype=dtype)


@pytest.mark.parametrize("cross", [pytest.param(False, marks=pytest.mark.slow), True], ids=["self", "cross"])
def test_in_linen_multi_head_dot_product_attention(cross):
    x, context = normal(4, B, T, FEATURES), normal(5, B, S, 5)
    inputs = (x, context) if cross else (x,)
    mask = (
        linen.make_attention_mask(np.ones((B, T), bool), padding) if cross else linen.make_causal_mask(np.zeros((B, T)))
    )
    arguments = {"num_heads": N, "qkv_features": N * H, "normalize_qk": not cross, "force_fp32_for_softmax": True}
    stock = linen.MultiHeadDotProductAttention(**arguments)
    ours = linen.MultiHeadDotProductAttention(**arguments, attention_fn=attention_fn())
    variables = randomised(jax.eval_shape(stock.init, jax.random.key(0), *inputs))
    assert_within_error_rule(
        lambda variables, *inputs: ours.apply(variables, *inputs, mask=mask),
        lambda variables, *inputs: stock.apply(variables, *inputs, mask=mask),
        variables,
        *inputs,
    )


@pytest.mark.parametrize(
    ("q_shape", "kv_shape", "mask_shape", "bias_shape"),
    [
        pytest.param((T, N, H), (S, N, H), (S,), (T, S), marks=pytest.mark.slow),
        pytest.param((B, T, N, H), (B, S, K, H), (B, 1, 1, S), (N, 1, S), marks=pytest.mark.slow),
        pytest.param((2, 3, T, N, H), (2, 3, S, N, H), (3, 1, T, S), (1, 1, N, T, S), marks=pytest.mark.slow),
        ((2, 3, T, N, H), (2, 3, S, N, H), (1, 3, N, 1, S), (2, 1, 1, T, S)),
    ],
)
def test_at_a_call_of_dot_product_attention(q_shape, kv_shape, mask_shape, bias_shape):
    """Ranks from none to two batch axes; arrays that broadcast, a bias with its gradient."""
    mask = np.random.default_rng(2).random(mask_shape) < 0.7
    mask[..., :2] = True
    operands = normal(3, *q_shape), normal(4, *kv_shape), normal(5, *kv_shape), normal(6, *bias_shape)

    def plain(q, k, v, bias):
        k, v = (jnp.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
        return linen.dot_product_attention(q, k, v, bias=bias, mask=mask)

    assert_within_error_rule(lambda q, k, v, bias: attention_fn()(q, k, v, bias=bias, mask=mask), plain, *operands)


def test_is_causal_is_aligned_at_the_top_left_as_in_flax():
    q, k, v = normal(3, B, S, N, H), normal(4, B, T, K, H), normal(5, B, T, K, H)
    found, wanted = (fn(q, k, v, is_causal=True) for fn in (attention_fn(), nnx.dot_product_attention))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_patterns_take_the_place_of_arrays():
    x = normal(4, B, T, FEATURES)
    lengths = np.array([5, 9])
    visible = np.asarray((Causal() & SlidingWindow(3, 0)).allowed(np.arange(T)[:, None], np.arange(T)))
    visible = visible & (np.arange(T) < lengths[:, None])[:, None, None]
    parameters, stock = split(lambda: multi_head(attention_fn()))
    _, ours = split(lambda: multi_head(attention_fn(mask=Lengths(kv=lengths), causal=True, window=(3, 0))))
    found = out_and_gradients(lambda parameters, x: ours(parameters)(x), parameters, x)
    wanted = out_and_gradients(lambda parameters, x: stock(parameters)(x, mask=visible), parameters, x)
    for name, right in wanted.items():
        np.testing.assert_allclose(found[name], right, rtol=0, atol=2e-6 * np.abs(right).max(), err_msg=name)


def test_patterns_and_arrays_let_the_kernels_run():
    q, k, v = (jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16),) * 3
    dense = Dense(jax.ShapeDtypeStruct((128, 128), jnp.bool_))
    for mask in (Causal() & SlidingWindow(9, 0), dense, Causal() & dense):
        assert jflash.explain(q, k, v, mask=mask, hardware="h200").plan.backend == "mosaic_gpu"


def test_rope_is_that_of_flax():
    """With positions of each row too, on two batch axes, which Flax's function does not take: there row by row."""
    q, k, v = normal(3, 2, 3, T, N, H), normal(4, 2, 3, T, K, H), normal(5, 2, 3, T, K, H)
    positions = np.random.default_rng(6).integers(0, 50, (2, 3, T))
    ours, rope = jax.jit(attention_fn(rope=RoPE(base=50.0))), nnx.RoPE(theta=50.0)
    theirs = jax.jit(functools.partial(nnx.dot_product_attention_with_rope, rope=rope))
    rotate_heads = jax.vmap(rope, in_axes=(-2, None), out_axes=-2)
    found = ours(q, k, v, input_positions=positions)
    for row in ((0, 2), (1, 0)):
        rotated = (rotate_heads(x[row], positions[row].astype(np.float32)) for x in (q, k))
        wanted = nnx.dot_product_attention(*rotated, v[row])
        np.testing.assert_allclose(found[row], wanted, rtol=0, atol=2e-6)
    np.testing.assert_allclose(ours(q[0], k[0], v[0]), theirs(q[0], k[0], v[0]), rtol=0, atol=2e-6)


def test_arguments_reach_the_call():
    q, k, v = normal(3, B, T, N, H), normal(4, B, T, K, H), normal(5, B, T, K, H)
    found = attention_fn(softcap=0.7, scale=0.4, window=2, backend="reference")(q, k, v)
    wanted = jflash.flash_attention(q, k, v, softcap=0.7, scale=0.4, window=2, backend="reference")
    np.testing.assert_array_equal(found, wanted)
    assert attention_fn()(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    with jax.numpy_dtype_promotion("standard"):
        assert attention_fn()(q.astype(jnp.bfloat16), k, v).dtype == np.float32


def test_dropout_in_both_layers():
    """The key that the layer draws is the key of the call; without it nothing is dropped."""
    q, key, rate = normal(3, B, T, N, H), jax.random.key(8), 0.3
    found = attention_fn()(q, q, q, dropout_rng=key, dropout_rate=rate)
    np.testing.assert_array_equal(found, jflash.flash_attention(q, q, q, dropout_rate=rate, dropout_key=key))
    np.testing.assert_array_equal(
        attention_fn()(q, q, q, dropout_rng=key, dropout_rate=rate, deterministic=True), attention_fn()(q, q, q)
    )
    with pytest.raises(ArgumentError, match=r"`dropout_rng`: found None"):
        attention_fn()(q, q, q, dropout_rate=rate)

    x = normal(4, B, T, FEATURES)
    layer = multi_head(attention_fn(), dropout_rate=rate)
    drawn = [layer(x, deterministic=False, rngs=nnx.Rngs(dropout=seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.abs(drawn[0] - drawn[2]).max() > 0.01
    twin = linen.MultiHeadDotProductAttention(num_heads=2, dropout_rate=rate, attention_fn=attention_fn())
    variables = randomised(jax.eval_shape(functools.partial(twin.init, deterministic=True), jax.random.key(0), x))
    drawn = [twin.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 2)]
    assert np.abs(drawn[0] - drawn[1]).max() > 0.01


# Decoding ------------------------------------------------------------------------------------------------------------


def test_decode_steps_of_nnx():
    x = normal(4, B, T, FEATURES)
    layers = [multi_head(fn, kv_heads=K) for fn in (attention_fn(), nnx.dot_product_attention)]
    for layer in layers:
        layer.init_cache((B, T, FEATURES))
    for t in range(T):
        found, wanted = (layer(x[:, t : t + 1], decode=True, is_causal=True) for layer in layers)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(layers[0].cached_key[...], layers[1].cached_key[...])


@pytest.mark.slow
def test_decode_steps_of_linen():
    x = normal(4, B, T, FEATURES)
    stock = linen.MultiHeadDotProductAttention(num_heads=N, qkv_features=N * H, decode=True)
    ours = linen.MultiHeadDotProductAttention(num_heads=N, qkv_features=N * H, decode=True, attention_fn=attention_fn())
    variables = stock.init(jax.random.key(0), x)
    parameters, caches = variables["params"], [variables["cache"]] * 2
    for t in range(T):
        outs = []
        for position, layer in enumerate((ours, stock)):
            variables = {"params": parameters, "cache": caches[position]}
            out, updated = layer.apply(variables, x[:, t : t + 1], mutable=["cache"])
            caches[position] = updated["cache"]
            outs.append(out)
        np.testing.assert_allclose(*outs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("arguments", [{"mask": Causal()}, {"causal": True}, {"window": (3, 0)}])
def test_a_decode_step_with_a_pattern_of_positions_raises(arguments):
    """The pattern would stand at the top left of the cache, where the step sees key 0 and no other."""
    layer = multi_head(attention_fn(**arguments))
    layer.init_cache((B, T, FEATURES))
    with pytest.raises(ArgumentError, match=r"`mask`: found an array, with T=1, S=9, .*its cache"):
        layer(normal(4, B, 1, FEATURES), decode=True)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_linen_drops_no_argument():
    """linen passes on what stands in the signature and drops the rest without a word, the mask too."""
    known = inspect.signature(attention_fn()).parameters
    stock = inspect.signature(linen.dot_product_attention).parameters
    assert stock.keys() <= known.keys()
    assert inspect.signature(nnx.dot_product_attention).parameters.keys() - known.keys() == {"promote_dtype"}
    assert list(known)[:5] == list(stock)[:5]
    assert {name: known[name].default for name in stock} == {name: stock[name].default for name in stock}


def test_sown_weights_raise():
    x = normal(4, B, T, FEATURES)
    with pytest.raises(ArgumentError, match=r"`module`: .*sow_weights=False"):
        multi_head(attention_fn())(x, sow_weights=True)
    layer = linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn())
    with pytest.raises(ArgumentError, match="`module`"):
        layer.init(jax.random.key(0), x, sow_weights=True)


@pytest.mark.parametrize("name", ["einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_an_einsum_of_the_callers_raises(name):
    q = normal(3, B, T, N, H)
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        attention_fn()(q, q, q, **{name: jnp.einsum})


def test_precision_is_met_or_refused():
    q = normal(3, B, T, N, H)
    np.testing.assert_array_equal(attention_fn()(q, q, q, precision=jax.lax.Precision.HIGHEST), attention_fn()(q, q, q))
    with (
        jax.default_matmul_precision("tensorfloat32"),
        pytest.raises(ArgumentError, match=r"`precision`: found HIGHEST under .*tensorfloat32"),
    ):
        attention_fn()(q, q, q, precision=jax.lax.Precision.HIGHEST)


def test_positions_and_lengths_that_rope_cannot_take_raise():
    with pytest.raises(ArgumentError, match=r"`input_positions`: found an array, wanted None without `rope`"):
        multi_head(attention_fn())(normal(4, B, T, FEATURES), input_positions=np.arange(T))
    layer = multi_head(attention_fn(rope=RoPE()))
    layer.init_cache((B, T, FEATURES))
    with pytest.raises(ArgumentError, match=r"`rope`: found T=1, S=9, wanted equal lengths.*rotates what it caches"):
        layer(normal(4, B, 1, FEATURES), decode=True)


@pytest.mark.parametrize(
    ("shapes", "wanted"),
    [
        (((N, H),) * 3, r"`query`: found shape \(6, 8\)"),
        (((2, 3, T, N, H), (3, 2, T, N, H), (2, 3, T, N, H)), r"`key`: found batch axes \(3, 2\), wanted \(2, 3\)"),
        (((B, T, N, H), (B, S, 4, H), (B, S, 4, H)), "`key`: found K=4"),
    ],
)
def test_wrong_shapes_raise(shapes, wanted):
    with pytest.raises(ShapeError, match=wanted):
        attention_fn()(*(normal(1, *shape) for shape in shapes))


@pytest.mark.parametrize(("name", "shape"), [("mask", (3, 1, T, T)), ("bias", (4, N, T, T)), ("mask", (3, 2, 1, T, T))])
def test_a_mask_or_bias_of_wrong_batch_axes_raises(name, shape):
    q = normal(1, 2, 2, T, N, H)
    with pytest.raises(ShapeError, match=f"`{name}`: found batch axes"):
        attention_fn()(q, q, q, **{name: normal(2, *shape)})
