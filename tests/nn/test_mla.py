"""Multi-head latent attention: the formula with all keys formed, and the cache of latent vectors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import plain_layers
import pytest
from flax import linen, nnx
from layer_helpers import assert_within_error_rule, normal, split, widened

import jflash
import jflash.nn.linen
from jflash.errors import ArgumentError
from jflash.masks import Segments
from jflash.nn import MLAConfig, MultiHeadLatentAttention, RoPE

B, T, N, FEATURES = 2, 9, 3, 10
SIZES = {"num_heads": N, "head_dim": 8, "rope_dim": 6, "value_head_dim": 5, "latent_dim": 7, "rope": RoPE(base=50.0)}
CONFIGS = {"lite": MLAConfig(**SIZES), "query_latent": MLAConfig(**SIZES, query_latent_dim=11, scale=0.3)}

t, s = np.arange(T)[:, None], np.arange(T)
documents = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 2, 2]])


def make(config):
    return lambda: MultiHeadLatentAttention(config, FEATURES, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", [pytest.param("lite", marks=pytest.mark.slow), "query_latent"])
def test_the_formula_written_out(name):
    config = CONFIGS[name]
    parameters, layer = split(make(config))
    visible = (s <= t) & (documents[:, None, :, None] == documents[:, None, None])
    assert_within_error_rule(
        lambda parameters, x: layer(parameters)(x, mask=Segments(documents)),
        lambda parameters, x: plain_layers.latent_attention(nnx.to_pure_dict(parameters), x, config, visible),
        parameters,
        normal(4, B, T, FEATURES),
    )


@pytest.mark.parametrize("name", [pytest.param("lite", marks=pytest.mark.slow), "query_latent"])
def test_prefill_and_absorbed_steps_are_rows_of_the_full_pass(name):
    """In float64, where the other order of the sums shows no more: to 1e-12, each row at a position of its own."""
    config = CONFIGS[name]
    parameters, layer = split(make(config))
    x, prompts = normal(4, B, T, FEATURES), np.array([5, 2])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # the latter for Flax's norms
        parameters, x = widened((parameters, x))
        wanted = np.asarray(jax.jit(lambda parameters, x: layer(parameters)(x))(parameters, x))
        cache = config.empty_cache(B=B, S=T, dtype=jnp.float64)
        assert jax.tree.map(jnp.shape, (cache.k, cache.v)) == ((B, T, 1, 13), None)
        prefill = jax.jit(lambda parameters, x, cache: layer(parameters).prefill(x, cache, lengths=prompts))
        decode = jax.jit(lambda parameters, x, cache: layer(parameters).decode(x, cache))
        out, cache = prefill(parameters, x[:, :5], cache)
        for row, length in enumerate(prompts):
            np.testing.assert_allclose(out[row, :length], wanted[row, :length], rtol=0, atol=1e-12)
        for length in (1, 3):
            now, rows = np.asarray(cache.positions(length)), np.arange(B)[:, None]
            out, cache = decode(parameters, x[rows, now], cache)
            np.testing.assert_allclose(out, wanted[rows, now], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_linen_gives_the_same_bits():
    config = dataclasses.replace(CONFIGS["query_latent"], logical_axes=True)
    parameters, layer = split(make(CONFIGS["query_latent"]))
    twin = jflash.nn.linen.MultiHeadLatentAttention(config, features=FEATURES)
    x, cache = normal(4, B, T, FEATURES), config.empty_cache(B=B, S=T + 1)
    boxed = jax.eval_shape(twin.init, jax.random.key(0), x)
    assert linen.get_partition_spec(boxed)["params"]["key_up"]["kernel"] == jax.P("latent", "heads", "head_dim")
    pure = nnx.to_pure_dict(parameters)
    assert jax.tree.map(jnp.shape, linen.unbox(boxed)["params"]) == jax.tree.map(jnp.shape, pure)
    variables = jax.tree.map(lambda box, leaf: box.replace_boxed(leaf), boxed["params"], pure, is_leaf=is_box)

    def both(method: str, x, cache):
        ours = jax.jit(lambda parameters, x, cache: getattr(layer(parameters), method)(x, cache))
        theirs = jax.jit(lambda weights, x, cache: twin.apply({"params": weights}, x, cache, method=method))
        found = ours(parameters, x, cache)
        jax.tree.map(np.testing.assert_array_equal, found, theirs(variables, x, cache))
        return found

    _, cache = both("prefill", x, cache)
    _, cache = both("decode", x[:, :1], cache)
    assert cache.length.tolist() == [T + 1] * B


def is_box(leaf) -> bool:
    return isinstance(leaf, linen.LogicallyPartitioned)


def test_the_kernels_take_the_shapes_of_deepseek():
    config = MLAConfig(num_heads=16)
    H = config.head_dim + config.rope_dim
    q, v = (jax.ShapeDtypeStruct((1, 512, 16, size), jnp.bfloat16) for size in (H, config.value_head_dim))
    assert (H, config.value_head_dim) == (192, 128)
    explained = jflash.explain(q, q, v, causal=True, scale=config.scale, hardware="h200")
    assert explained.plan.backend == "mosaic_gpu"


@pytest.mark.parametrize("arguments", [{"rope_dim": 5}, {"latent_dim": 0}, {"query_latent_dim": -1}])
def test_a_wrong_config_raises(arguments):
    (name,) = arguments
    with pytest.raises(ArgumentError, match=f"`{name}`: found {arguments[name]}"):
        MLAConfig(num_heads=2, **arguments)
