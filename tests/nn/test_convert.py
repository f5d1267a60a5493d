"""Weights go from Flax's attention layers to ours and back, and compute the same in both."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_helpers import normal, randomised, split

import jflash.nn.linen
from jflash.errors import ArgumentError
from jflash.nn import Attention, AttentionConfig, RoPE, config_from_flax, from_flax, to_flax

B, T, N, H, FEATURES = 2, 9, 6, 8, 10


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_kv_heads": 3, "normalize_qk": True, "use_bias": False, "dropout_rate": 0.3, "keep_rngs": False},
        pytest.param({"param_dtype": jnp.bfloat16, "dtype": jnp.float32}, marks=pytest.mark.slow),
    ],
    ids=["grouped_norm", "biases"],
)
def test_nnx_multi_head_attention(arguments):
    def make():
        return nnx.MultiHeadAttention(N, FEATURES, qkv_features=N * H, decode=False, rngs=nnx.Rngs(0), **arguments)

    parameters, stock = split(make)
    config = config_from_flax(make(), causal=True)
    assert config.dropout_rate == arguments.get("dropout_rate", 0.0)
    abstract, layer = split(lambda: Attention(config, FEATURES, rngs=nnx.Rngs(0), keep_rngs=False))
    pure = nnx.to_pure_dict(parameters)
    ours = from_flax(pure)
    shape_and_dtype = lambda leaf: (leaf.shape, leaf.dtype)  # noqa: E731
    assert jax.tree.map(shape_and_dtype, ours) == jax.tree.map(shape_and_dtype, nnx.to_pure_dict(abstract))
    if config.qk_norm is not None:  # logits would be the same if the two were exchanged
        np.testing.assert_array_equal(ours["query_norm"]["scale"], pure["query_ln"]["scale"])
    nnx.replace_by_pure_dict(abstract, ours)
    x = normal(4, B, T, FEATURES)
    found = jax.jit(lambda parameters, x: layer(parameters)(x, deterministic=True))(abstract, x)
    wanted = jax.jit(lambda parameters, x: stock(parameters)(x, is_causal=True, deterministic=True))(parameters, x)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6)
    jax.tree.map(np.testing.assert_array_equal, to_flax(ours, config), pure)


def test_linen_multi_head_dot_product_attention():
    stock = linen.MultiHeadDotProductAttention(num_heads=N, qkv_features=N * H, normalize_qk=True)
    x = normal(4, B, T, FEATURES)
    variables = randomised(jax.eval_shape(stock.init, jax.random.key(0), x))
    config = config_from_flax(stock)
    layer = jflash.nn.linen.Attention(config, features=FEATURES)
    ours = {"params": from_flax(variables["params"])}
    mask = linen.make_causal_mask(np.zeros((B, T)))
    wanted = jax.jit(lambda variables, x: stock.apply(variables, x))(variables, x)
    np.testing.assert_allclose(jax.jit(layer.apply)(ours, x), wanted, rtol=0, atol=3e-6)
    assert np.abs(stock.apply(variables, x, mask=mask) - wanted).max() > 0.1
    jax.tree.map(np.testing.assert_array_equal, to_flax(ours["params"], config), variables["params"])


def test_a_layer_that_ours_is_not_raises():
    layer = nnx.MultiHeadAttention(2, FEATURES, decode=False, rngs=nnx.Rngs(0), out_features=7)
    with pytest.raises(ArgumentError, match=r"`layer`: found in_features=10, out_features=7"):
        config_from_flax(layer)
    with pytest.raises(ArgumentError, match=r"`layer`: found qkv_features=None"):
        config_from_flax(linen.MultiHeadDotProductAttention(num_heads=2))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"rope": RoPE()}, "found rope="),
        ({"window": 3}, r"found window=3.*attention_fn has window"),
        ({"softcap": 3.0}, r"found softcap=3.0.*attention_fn has softcap"),
        ({"alibi_slopes": (0.5,) * N}, r"found alibi_slopes=\(0.5"),
        ({"score_fn": lambda s, b, n, q, k: s}, "found score_fn=<function"),
        ({"sinks": True}, "found sinks=True"),
        ({"qk_norm": "rms_norm"}, "found qk_norm="),
        ({"qkv_bias": True}, "found qkv_bias=True, out_bias=False"),
    ],
)
def test_a_config_that_flax_has_not_raises(arguments, wanted):
    with pytest.raises(ArgumentError, match=f"`config`: {wanted}"):
        to_flax({}, AttentionConfig(num_heads=N, head_dim=H, **arguments))


def test_an_unknown_name_raises():
    with pytest.raises(ArgumentError, match=r"`parameters`: found the name 'query_norm', wanted names among"):
        from_flax({"query_norm": {}})
