"""The attention layers: equal to the formula written out, to each other, and step by step to the full pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_layers
import pytest
from flax import linen, nnx
from layer_helpers import assert_within_error_rule, normal, split

import jflash.nn.linen
from jflash.errors import ArgumentError, DtypeError, ShapeError
from jflash.masks import Lengths, Segments
from jflash.nn import Attention, AttentionConfig, MLAConfig, MultiHeadLatentAttention, RoPE, alibi_slopes

B, T, S, N, K, H, FEATURES, KV_FEATURES = 2, 9, 7, 6, 3, 8, 10, 5

documents = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2, 2]])
positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4, 0, 1, 2]])
lengths = np.array([4, 6])
t, s = np.arange(T)[:, None], np.arange(T)


def uneven(s, b, n, q, k):
    """A score that tells apart heads, rows, queries and keys, and which of two tokens comes first."""
    of_head, of_order, of_row = (x.astype(s.dtype) for x in (n, q - 2 * k, (q + b) % 3 - k % 3))
    return s * (1 + 0.1 * of_head) + 0.05 * of_order - 0.3 * of_row


# Each: the config, the arguments of the call, and the pairs that attend.
CASES = {
    "window_softcap_biases_sinks": (
        AttentionConfig(
            num_heads=N, num_kv_heads=1, head_dim=H, window=(2, 1), softcap=1.5, scale=0.6, qkv_bias=True,
            out_bias=True, qk_norm="layer_norm", sinks=True,
        ),
        {},
        (s >= t - 2) & (s <= t + 1),
    ),
    "packed_documents": (
        AttentionConfig(
            num_heads=N, num_kv_heads=K, head_dim=H, causal=True, rope=RoPE(base=100.0), qk_norm="rms_norm"
        ),
        {"mask": Segments(documents), "positions": positions},
        (s <= t) & (documents[:, None, :, None] == documents[:, None, None]),
    ),
    "scores_by_position": (
        AttentionConfig(
            num_heads=N, num_kv_heads=K, head_dim=H, softcap=2.0, alibi_slopes=alibi_slopes(N), score_fn=uneven,
        ),
        {"positions": 3 * positions - 1},
        np.ones((T, T), bool),
    ),
    "cross": (
        AttentionConfig(num_heads=N, num_kv_heads=K, head_dim=H),
        {"mask": Lengths(kv=lengths)},
        np.arange(S) < lengths[:, None, None, None],
    ),
}  # fmt: skip


def make(config, **arguments):
    return lambda: Attention(config, FEATURES, rngs=nnx.Rngs(0), **arguments)


@pytest.mark.parametrize("backend", ["xla", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_the_formula_written_out(name, backend):
    config, call, visible = CASES[name]
    config = dataclasses.replace(config, backend=backend)
    inputs = normal(4, B, T, FEATURES), normal(5, B, S, KV_FEATURES)
    inputs = inputs if name == "cross" else inputs[:1]
    parameters, layer = split(make(config, kv_features=KV_FEATURES if name == "cross" else None))

    def plain(parameters, *inputs):
        weights = nnx.to_pure_dict(parameters)
        at = call.get("positions", np.arange(T))
        return plain_layers.attention(weights, inputs[0], inputs[-1], config, visible, at)

    assert_within_error_rule(lambda parameters, *inputs: layer(parameters)(*inputs, **call), plain, parameters, *inputs)


@pytest.mark.parametrize(
    "name",
    [
        "window_softcap_biases_sinks",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("packed_documents", "cross")),
    ],
)
def test_linen_gives_the_same_bits(name):
    config, call, _ = CASES[name]
    inputs = normal(4, B, T, FEATURES), normal(5, B, S, KV_FEATURES)
    inputs = inputs if name == "cross" else inputs[:1]
    parameters, layer = split(make(config, kv_features=KV_FEATURES if name == "cross" else None))
    twin = jflash.nn.linen.Attention(config, features=FEATURES)
    wanted = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), {"params": nnx.to_pure_dict(parameters)})
    variables = jax.eval_shape(twin.init, jax.random.key(0), *inputs)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), variables) == wanted
    found = jax.jit(lambda parameters, inputs: layer(parameters)(*inputs, **call))(parameters, inputs)
    variables = {"params": nnx.to_pure_dict(parameters)}
    also = jax.jit(lambda variables, inputs: twin.apply(variables, *inputs, **call))(variables, inputs)
    assert np.abs(found).max() > 0.1
    np.testing.assert_array_equal(found, also)


# Decoding ------------------------------------------------------------------------------------------------------------

DECODERS = {
    "rope": AttentionConfig(num_heads=N, num_kv_heads=K, head_dim=H, causal=True, rope=RoPE(base=50.0)),
    "rope_window": AttentionConfig(
        num_heads=N, num_kv_heads=K, head_dim=H, causal=True, window=(3, 0), rope=RoPE(base=50.0), sinks=True
    ),
    "scores": AttentionConfig(
        num_heads=N, num_kv_heads=K, head_dim=H, causal=True, alibi_slopes=alibi_slopes(N), score_fn=uneven
    ),
    "alibi_window": AttentionConfig(
        num_heads=N, num_kv_heads=1, head_dim=H, causal=True, window=(3, 0), alibi_slopes=alibi_slopes(N), softcap=2.0
    ),
    "score_fn_window": AttentionConfig(
        num_heads=N, num_kv_heads=K, head_dim=H, causal=True, window=(4, 0), score_fn=uneven, qk_norm="rms_norm"
    ),
    "all_window": AttentionConfig(
        num_heads=N, num_kv_heads=K, head_dim=H, causal=True, window=(3, 0), rope=RoPE(base=50.0), sinks=True,
        alibi_slopes=alibi_slopes(N), score_fn=uneven,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "all_window" else pytest.mark.slow) for name in DECODERS],
)
def test_prefill_and_steps_are_rows_of_the_full_pass(name):
    """A prompt with padding, then one and three tokens at a time; each batch row at a position of its own."""
    config = DECODERS[name]
    parameters, layer = split(make(config))
    x = normal(4, B, 16, FEATURES)
    prompts = np.array([5, 2])
    wanted = np.asarray(jax.jit(lambda parameters, x: layer(parameters)(x))(parameters, x))
    prefill = jax.jit(lambda parameters, x, cache: layer(parameters).prefill(x, cache, lengths=prompts))
    decode = jax.jit(lambda parameters, x, cache: layer(parameters).decode(x, cache))
    out, cache = prefill(parameters, x[:, :5], config.empty_cache(B=B, S=16, step=3))
    for row, length in enumerate(prompts):
        np.testing.assert_allclose(out[row, :length], wanted[row, :length], rtol=0, atol=2e-6)
    for T in (1, 1, 3, 3, 1, 1):
        now = np.asarray(cache.positions(T))
        rows = np.arange(B)[:, None]
        out, cache = decode(parameters, x[rows, now], cache)
        np.testing.assert_allclose(out, wanted[rows, now], rtol=0, atol=2e-6)
    assert cache.length.tolist() == (prompts + 10).tolist()


def test_linen_decodes_to_the_same_bits():
    config = DECODERS["rope_window"]
    parameters, layer = split(make(config))
    twin, variables = jflash.nn.linen.Attention(config, features=FEATURES), {"params": nnx.to_pure_dict(parameters)}
    x, cache = normal(4, B, T, FEATURES), config.empty_cache(B=B, S=16)

    def both(method: str, x, cache):
        ours = jax.jit(lambda parameters, x, cache: getattr(layer(parameters), method)(x, cache))
        theirs = jax.jit(lambda variables, x, cache: twin.apply(variables, x, cache, method=method))
        found = ours(parameters, x, cache)
        jax.tree.map(np.testing.assert_array_equal, found, theirs(variables, x, cache))
        return found

    _, cache = both("prefill", x, cache)
    _, cache = both("decode", x[:, :1], cache)
    assert cache.length.tolist() == [T + 1] * B


@pytest.mark.slow
@pytest.mark.parametrize(
    "scores",
    [{"rope": RoPE(), "sinks": True}, {"alibi_slopes": alibi_slopes(N), "score_fn": uneven}],
    ids=["rope_sinks", "scores"],
)
def test_sixteen_bits_on_every_platform(platform, scores):
    """With `-m gpu` on Hopper this is the layer by kernels: forward, backward, and steps of decoding."""
    config = AttentionConfig(
        num_heads=N, num_kv_heads=K, head_dim=64, causal=True, window=(70, 0), param_dtype=jnp.bfloat16, **scores
    )
    parameters, layer = split(make(config))
    x = normal(4, B, 150, FEATURES, dtype=jnp.bfloat16)
    distance = np.arange(150)[:, None] - np.arange(150)

    def plain(parameters, x):
        weights, visible = nnx.to_pure_dict(parameters), (distance >= 0) & (distance <= 70)
        return plain_layers.attention(weights, x, x, config, visible, np.arange(150))

    assert_within_error_rule(lambda parameters, x: layer(parameters)(x), plain, parameters, x, dtype="bfloat16")
    wanted = np.asarray(jax.jit(lambda parameters, x: layer(parameters)(x))(parameters, x), np.float32)
    prefill = jax.jit(lambda parameters, x, cache: layer(parameters).prefill(x, cache))
    decode = jax.jit(lambda parameters, x, cache: layer(parameters).decode(x, cache))
    _, cache = prefill(parameters, x[:, :140], config.empty_cache(B=B, S=150, step=5))
    for start, stop in ((140, 145), (145, 150)):
        out, cache = decode(parameters, x[:, start:stop], cache)
        # Both round to 16 bits, out of attention and of the projection.
        atol = 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(wanted).max()
        np.testing.assert_allclose(np.asarray(out, np.float32), wanted[:, start:stop], rtol=0, atol=atol)


# Dtypes and axes -----------------------------------------------------------------------------------------------------


def test_parameters_and_computation_have_dtypes_of_their_own():
    config = AttentionConfig(num_heads=N, head_dim=H, causal=True, qk_norm="rms_norm", dtype=jnp.bfloat16)
    parameters, layer = split(make(config))
    assert {leaf.dtype for leaf in jax.tree.leaves(parameters)} == {np.dtype(np.float32)}
    x = normal(4, B, T, FEATURES)
    with jax.numpy_dtype_promotion("standard"):  # which Flax's norms need for 16 bits
        jaxpr = jax.make_jaxpr(lambda parameters, x: layer(parameters)(x))(parameters, x)
    assert jaxpr.out_avals[0].dtype == jnp.bfloat16
    assert config.empty_cache(B=B, S=T).k.dtype == jnp.bfloat16
    refused = pytest.raises(DtypeError, match=r"`k`: found dtype bfloat16, wanted float32, as the cache has")
    with jax.numpy_dtype_promotion("standard"), refused:
        jax.eval_shape(layer(parameters).prefill, x, config.empty_cache(B=B, S=T, dtype=jnp.float32))


AXES = {
    "query": {"kernel": ("embed", "heads", "head_dim"), "bias": ("heads", "head_dim")},
    "key": {"kernel": ("embed", "kv_heads", "head_dim"), "bias": ("kv_heads", "head_dim")},
    "value": {"kernel": ("embed", "kv_heads", "head_dim"), "bias": ("kv_heads", "head_dim")},
    "out": {"kernel": ("heads", "head_dim", "embed"), "bias": (None,)},
    "query_norm": {"scale": ("head_dim",)},
    "key_norm": {"scale": ("head_dim",)},
    "sinks": ("heads",),
}
RULES = (("embed", "data"), ("heads", "model"), ("kv_heads", "model"), ("head_dim", None))
ANNOTATED = AttentionConfig(
    num_heads=N, num_kv_heads=2, head_dim=H, qk_norm="rms_norm", sinks=True, qkv_bias=True, out_bias=True,
    logical_axes=True,
)  # fmt: skip


def test_parameters_of_linen_know_their_logical_axes():
    layer = jflash.nn.linen.Attention(ANNOTATED, features=FEATURES)
    variables = jax.eval_shape(layer.init, jax.random.key(0), normal(4, B, T, FEATURES))
    specs = linen.get_partition_spec(variables)["params"]
    assert specs == jax.tree.map(lambda axes: jax.P(*axes), AXES, is_leaf=lambda axes: isinstance(axes, tuple))
    on_mesh = linen.logical_to_mesh(specs, RULES)
    assert on_mesh["out"]["kernel"] == jax.P("model", None, "data")


def test_parameters_of_nnx_are_made_where_the_rules_say():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        layer = Attention(ANNOTATED, FEATURES, rngs=nnx.Rngs(0))
    found = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    wanted = dict(jax.tree_util.tree_leaves_with_path(AXES, is_leaf=lambda axes: isinstance(axes, tuple)))
    assert {path: variable.get_metadata()["out_sharding"] for path, variable in found} == {
        tuple(key.key for key in path): axes for path, axes in wanted.items()
    }
    assert layer.key.kernel[...].sharding.spec == jax.P("data", "model", None)
    assert layer.out.kernel[...].sharding.spec == jax.P("model", None, "data")
    with pytest.raises(ValueError, match="mesh"):
        make(ANNOTATED)()


EVERYTHING = AttentionConfig(
    num_heads=N, num_kv_heads=2, head_dim=H, causal=True, window=(4, 0), rope=RoPE(base=50.0), qk_norm="rms_norm",
    sinks=True, qkv_bias=True, out_bias=True, alibi_slopes=alibi_slopes(N), score_fn=uneven,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [{"embed": "data"}, {"embed": None}, {"embed": "model", "heads": None}, {"embed": "data", "kv_heads": None}],
    ids=["fsdp", "heads", "features", "query_heads"],
)
@pytest.mark.parametrize("name", ["attention", "latent"])
def test_explicit_axes(name, rules):
    """A full pass, its gradients, a prompt and a step, with rows of tokens over one axis and parameters over both."""
    latent = MLAConfig(num_heads=N, head_dim=8, rope_dim=4, value_head_dim=5, latent_dim=8, query_latent_dim=6)
    kind, config = {"attention": (Attention, EVERYTHING), "latent": (MultiHeadLatentAttention, latent)}[name]
    axes = {"heads": "model", "kv_heads": "model", "head_dim": None, "latent": None, "query_latent": None} | rules
    axes |= {"kv_heads": axes["heads"]} if rules.get("heads", "model") is None else {}

    def run(layer, parameters, x):
        def loss(parameters, x):
            out = layer(parameters)(x)
            return (out * jnp.cos(jnp.arange(FEATURES, dtype=out.dtype))).sum(), out

        slopes, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
        prompt, cache = layer(parameters).prefill(x[:, :-1], config.empty_cache(B=B, S=T))
        last, _ = layer(parameters).decode(x[:, -1:], cache)
        return out, jnp.concatenate([prompt, last], axis=1), slopes

    x = normal(4, B, T, FEATURES)
    parameters, layer = split(lambda: kind(config, FEATURES, rngs=nnx.Rngs(0)))
    wanted = jax.jit(functools.partial(run, layer))(parameters, x)
    np.testing.assert_allclose(wanted[1], wanted[0], rtol=0, atol=5e-6)
    annotated = dataclasses.replace(config, logical_axes=True)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(axes.items())):
        parameters, layer = split(lambda: kind(annotated, FEATURES, rngs=nnx.Rngs(0)))
        placed = jax.device_put(parameters, nnx.get_named_sharding(parameters, mesh))
        rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        found = jax.jit(functools.partial(run, layer))(placed, rows)
    assert found[0].sharding.spec[0] == found[1].sharding.spec[0] == "data"
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-6 * max(1, np.abs(other).max()))


def test_slopes_are_those_of_the_paper():
    """Of 12 heads by hand: those of 8, then the first, third, fifth and seventh of 16."""
    assert alibi_slopes(8) == tuple(2.0**-head for head in range(1, 9))
    assert alibi_slopes(12) == (*alibi_slopes(8), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5)
    assert alibi_slopes(1) == (2.0**-8,)


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"num_kv_heads": 4}, r"`num_kv_heads`: found 4, wanted a number that divides num_heads=6"),
        ({"num_kv_heads": 0}, r"`num_kv_heads`: found 0"),
        ({"qk_norm": True}, r"`qk_norm`: found True"),
        ({"window": (1, 2, 3)}, r"`window`: found \(1, 2, 3\)"),
        ({"alibi_slopes": (0.5, 0.25)}, r"`alibi_slopes`: found 2 numbers, wanted 6 of them"),
        ({"alibi_slopes": (0.5,) * 5 + (np.nan,)}, r"`alibi_slopes`: found nan"),
    ],
)
def test_a_wrong_config_raises(arguments, wanted):
    with pytest.raises(ArgumentError, match=wanted):
        AttentionConfig(num_heads=N, head_dim=H, **arguments)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"causal": True}, "`causal`: found True, wanted none in cross-attention"),
        ({"window": 3}, "`window`: found 3"),
        ({"rope": RoPE()}, "`rope`: found RoPE"),
        ({"alibi_slopes": alibi_slopes(N)}, r"`alibi_slopes`: found \(0.25"),
        ({"score_fn": uneven}, "`score_fn`: found <function uneven"),
        ({}, "`positions`: found an array"),
    ],
)
def test_positions_across_two_sequences_raise(arguments, wanted):
    layer = make(AttentionConfig(num_heads=N, head_dim=H, **arguments))()
    more = {} if arguments else {"positions": np.arange(T)}
    with pytest.raises(ArgumentError, match=wanted):
        layer(normal(4, B, T, FEATURES), normal(5, B, S, FEATURES), **more)


@pytest.mark.parametrize(
    "scores",
    [{"rope": RoPE()}, {"alibi_slopes": alibi_slopes(N)}, {"score_fn": uneven}],
    ids=lambda scores: next(iter(scores)),
)
def test_positions_of_other_tokens_raise(scores):
    """Too few of them would be read past their end, which JAX does without a word."""
    layer = make(AttentionConfig(num_heads=N, head_dim=H, **scores))()
    for shape in ((T - 1,), (T + 1,), (B + 1, T)):
        with pytest.raises(ShapeError, match=r"`positions`: found shape"):
            layer(normal(4, B, T, FEATURES), positions=np.zeros(shape, np.int32))


def test_a_cache_of_another_layer_raises():
    """A cache that keeps all tokens would let a layer with a window see too many, and the reverse too few."""
    config = DECODERS["rope"]
    layer, x = make(DECODERS["rope_window"])(), normal(4, B, 1, FEATURES)
    with pytest.raises(ArgumentError, match=r"`cache`: found window=None, wanted window=3.*empty_cache"):
        layer.decode(x, config.empty_cache(B=B, S=T))
    with pytest.raises(ArgumentError, match=r"`causal`: found False, wanted True"):
        AttentionConfig(num_heads=N, head_dim=H).empty_cache(B=B, S=T)
    with pytest.raises(ArgumentError, match=r"`causal`: found False, wanted True"):
        make(AttentionConfig(num_heads=N, num_kv_heads=K, head_dim=H))().decode(x, config.empty_cache(B=B, S=T))
