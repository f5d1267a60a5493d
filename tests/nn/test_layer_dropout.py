"""Dropout in the attention layers: what is dropped, by whose keys, and when."""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_helpers import assert_within_error_rule, next_token_loss, normal, split

import jflash.nn.linen
from jflash.errors import ArgumentError
from jflash.nn import (
    Attention,
    AttentionConfig,
    Decoder,
    DecoderConfig,
    MLAConfig,
    MultiHeadLatentAttention,
    RoPE,
    alibi_slopes,
    generate,
    save_attention,
)

B, T, N, FEATURES, RATE = 2, 9, 4, 10, 0.3

CONFIG = AttentionConfig(
    num_heads=N, num_kv_heads=2, head_dim=6, causal=True, dropout_rate=RATE, rope=RoPE(), alibi_slopes=alibi_slopes(N)
)
LATENT = MLAConfig(num_heads=N, head_dim=6, rope_dim=4, value_head_dim=5, latent_dim=7, dropout_rate=RATE)
LAYERS = {"attention": (Attention, CONFIG), "latent": (MultiHeadLatentAttention, LATENT)}
TWINS = {Attention: jflash.nn.linen.Attention, MultiHeadLatentAttention: jflash.nn.linen.MultiHeadLatentAttention}


def make(kind, config, **arguments):
    return lambda: kind(config, FEATURES, rngs=nnx.Rngs(0), **arguments)


def test_weights_are_dropped_at_the_rate_and_the_others_grow():
    """With such projections the output is the matrix of weights, which are all alike without dropout."""
    T, N = 40, 3
    config = AttentionConfig(num_heads=N, head_dim=T, dropout_rate=RATE)
    layer = Attention(config, N * T, kv_features=T, deterministic=False, rngs=nnx.Rngs(0))
    layer.value.kernel[...] = jnp.broadcast_to(jnp.eye(T)[:, None], (T, N, T))
    layer.out.kernel[...] = jnp.eye(N * T).reshape(N, T, N * T)
    keys = np.broadcast_to(np.eye(T, dtype=np.float32), (B, T, T))
    weights = np.asarray(layer(np.zeros((B, T, N * T), np.float32), keys)).reshape(B, T, N, T).swapaxes(1, 2)
    kept = weights > 0
    np.testing.assert_allclose(weights[kept], 1 / T / (1 - RATE), rtol=1e-5)
    deviation = np.sqrt(RATE * (1 - RATE) / kept.size)
    assert abs(kept.mean() - (1 - RATE)) < 5 * deviation
    # Each row and head by bits of its own: two agree where both keep and where both drop.
    pairs = kept.reshape(B * N, -1)
    agree = (pairs[:, None] == pairs).mean(-1)[np.triu_indices(B * N, 1)]
    assert (np.abs(agree - (1 - 2 * RATE * (1 - RATE))) < 6 * deviation * np.sqrt(B * N)).all()


@pytest.mark.parametrize("name", ["attention", pytest.param("latent", marks=pytest.mark.slow)])
def test_keys_come_from_the_call_or_from_the_layer(name):
    kind, config = LAYERS[name]
    layer, x = make(kind, config, deterministic=False)(), normal(4, B, T, FEATURES)
    one, again, other = (layer(x, rngs=nnx.Rngs(dropout=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    np.testing.assert_array_equal(one, layer(x, rngs=nnx.Rngs(dropout=1).dropout))
    assert np.abs(one - other).max() > 0.01
    # The layer's own stream gives another key each time, and the same ones to a layer that is made alike.
    calls = [layer(x), layer(x)]
    assert np.abs(calls[0] - calls[1]).max() > 0.01
    twin = make(kind, config, deterministic=False)()
    np.testing.assert_array_equal(calls, [twin(x), twin(x)])


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_dropped_where_the_call_or_the_layer_is_deterministic(name):
    kind, config = LAYERS[name]
    x = normal(4, B, T, FEATURES)
    wanted = make(kind, dataclasses.replace(config, dropout_rate=0.0))()(x)
    layer = make(kind, config)()
    np.testing.assert_array_equal(layer(x, deterministic=True), wanted)
    layer.train()
    np.testing.assert_array_equal(layer(x, deterministic=True), wanted)
    np.testing.assert_array_equal(nnx.view(layer, deterministic=True)(x), wanted)
    assert np.abs(layer(x) - wanted).max() > 0.01
    layer.eval()
    np.testing.assert_array_equal(layer(x), wanted)
    assert np.abs(layer(x, deterministic=False) - wanted).max() > 0.01


@pytest.mark.parametrize("name", ["attention", pytest.param("latent", marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_reference(name):
    kind, config = LAYERS[name]
    reference = dataclasses.replace(config, backend="reference")
    (parameters, ours), (_, plain) = (split(make(kind, c, keep_rngs=False)) for c in (config, reference))

    def dropped(layer):
        return lambda parameters, x: layer(parameters)(x, deterministic=False, rngs=nnx.Rngs(dropout=3))

    assert_within_error_rule(dropped(ours), dropped(plain), parameters, normal(4, B, T, FEATURES))


@pytest.mark.parametrize("name", LAYERS)
def test_linen_drops_the_same(name):
    kind, config = LAYERS[name]
    parameters, layer = split(make(kind, config, keep_rngs=False))
    twin, x = TWINS[kind](config, features=FEATURES), normal(4, B, T, FEATURES)
    variables = {"params": nnx.to_pure_dict(parameters)}
    stream = nnx.Rngs(dropout=3).dropout
    found = layer(parameters)(x, deterministic=False, rngs=stream)
    key = jax.random.fold_in(jax.random.key(3), 0)
    np.testing.assert_array_equal(twin.apply(variables, x, deterministic=False, dropout_rng=key), found)
    drawn = [
        twin.clone(deterministic=False).apply(variables, x, rngs={"dropout": jax.random.key(seed)})
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.abs(drawn[0] - drawn[2]).max() > 0.01
    np.testing.assert_array_equal(
        twin.apply(variables, x, deterministic=True), layer(parameters)(x, deterministic=True)
    )


@pytest.mark.slow
def test_remat_drops_the_same_again():
    """A block that is computed again for the backward pass takes the key of its first time."""
    attention = dataclasses.replace(CONFIG, rope=RoPE(base=50.0))
    config = DecoderConfig(vocab_size=13, num_layers=2, features=10, hidden_features=14, attention=attention)
    tokens = np.random.default_rng(0).integers(0, 13, (B, T))

    def gradients(remat):
        model = Decoder(dataclasses.replace(config, remat=remat), rngs=nnx.Rngs(0))
        model.train()
        return nnx.jit(nnx.grad(lambda model: next_token_loss(model(tokens), tokens)))(model)

    found, wanted = gradients(save_attention), gradients(None)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_a_call_that_nobody_decided_raises(name):
    """As in Flax's layers: a model that forgot to say so neither trains without dropout nor is served with it."""
    kind, config = LAYERS[name]
    x = normal(4, B, T, FEATURES)
    with pytest.raises(ArgumentError, match=r"`deterministic`: found None, wanted True or False with dropout_rate=0.3"):
        make(kind, config)()(x)
    with pytest.raises(ArgumentError, match=r"`rngs`: found None"):
        make(kind, config, keep_rngs=False)()(x, deterministic=False)
    variables = {"params": nnx.to_pure_dict(nnx.state(make(kind, config)(), nnx.Param))}
    with pytest.raises(ValueError, match="deterministic"):
        TWINS[kind](config, features=FEATURES).apply(variables, x)
    with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
        TWINS[kind](config, features=FEATURES).apply(variables, x, deterministic=False)


@pytest.mark.parametrize("name", LAYERS)
def test_a_cache_in_training_mode_raises(name):
    kind, config = LAYERS[name]
    x = normal(4, B, 1, FEATURES)
    layers = [make(kind, config)(), TWINS[kind](config, features=FEATURES, deterministic=False)]
    layers[0].train()
    bound = layers[1].bind({"params": nnx.to_pure_dict(nnx.state(layers[0], nnx.Param))})
    for layer in (layers[0], bound):
        for method in (layer.prefill, layer.decode):
            with pytest.raises(ArgumentError, match=r"`deterministic`: found False, wanted True or None where a cache"):
                method(x, config.empty_cache(B=B, S=T))


def test_a_model_in_training_mode_generates_nothing():
    config = DecoderConfig(vocab_size=13, num_layers=1, features=10, hidden_features=14, attention=CONFIG)
    model = Decoder(config, rngs=nnx.Rngs(0))
    model.train()
    with pytest.raises(ArgumentError, match=r"`deterministic`: found False.*model.eval\(\)"):
        generate(model, np.zeros((B, 3), np.int32), num_tokens=2)


@pytest.mark.parametrize("rate", [1.0, -0.1, True])
def test_a_wrong_rate_raises(rate):
    for config in (CONFIG, LATENT):
        with pytest.raises(ArgumentError, match=r"`dropout_rate`: found .*, wanted a Python number from 0 to below 1"):
            dataclasses.replace(config, dropout_rate=rate)
