"""The decoder: the formula written out, decoding, remat, export, and training beside the reference."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_layers
import pytest
from flax import nnx
from helpers import count
from jax.sharding import AxisType, NamedSharding
from layer_helpers import assert_within_error_rule, next_token_loss, split, widened

from jflash.errors import ArgumentError
from jflash.masks import Segments
from jflash.nn import AttentionConfig, Decoder, DecoderConfig, MLAConfig, RoPE, alibi_slopes, generate, save_attention
from jflash.testing.budget import measure

B, T, VOCAB = 2, 11, 13

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, causal=True, rope=RoPE(base=50.0))
CONFIG = DecoderConfig(vocab_size=VOCAB, num_layers=2, features=10, hidden_features=16, attention=ATTENTION)
WINDOW = dataclasses.replace(CONFIG, attention=dataclasses.replace(ATTENTION, window=(3, 0)))
LATENT = dataclasses.replace(
    CONFIG,
    attention=MLAConfig(
        num_heads=4, head_dim=6, rope_dim=4, value_head_dim=5, latent_dim=8, rope=RoPE(base=50.0), query_latent_dim=7
    ),
)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (B, T))


def make(config):
    return lambda: Decoder(config, rngs=nnx.Rngs(0))


def test_the_formula_written_out():
    parameters, model = split(make(CONFIG))
    assert_within_error_rule(
        lambda parameters: model(parameters)(TOKENS),
        lambda parameters: plain_layers.decoder(nnx.to_pure_dict(parameters), TOKENS, CONFIG),
        parameters,
    )


@pytest.mark.slow
def test_packed_documents_are_as_each_alone():
    parameters, model = split(make(CONFIG))
    documents, positions = np.array([0] * 4 + [1] * 7), np.array([*range(4), *range(7)])
    run = jax.jit(lambda parameters, tokens, **more: model(parameters)(tokens, **more))
    found = run(parameters, TOKENS, mask=Segments(documents), positions=positions)
    for part in (slice(0, 4), slice(4, 11)):
        np.testing.assert_allclose(found[:, part], run(parameters, TOKENS[:, part]), rtol=0, atol=1e-5)


# Decoding ------------------------------------------------------------------------------------------------------------


# The seeds of parameters with which each repeats itself less than with most.
@pytest.mark.parametrize(
    ("config", "seed"),
    [pytest.param(CONFIG, 29, marks=pytest.mark.slow), (WINDOW, 29), pytest.param(LATENT, 3, marks=pytest.mark.slow)],
    ids=["full", "window", "latent"],
)
def test_generate_takes_the_most_likely_token_each_time(config, seed):
    """Against the full pass over prompt and continuation, for each row alone: prompts have lengths of their own."""
    parameters, model = split(make(config), seed=seed)
    lengths, num_tokens = np.array([5, 2]), 6
    made = jax.jit(
        lambda parameters, prompt: generate(model(parameters), prompt, num_tokens=num_tokens, lengths=lengths)
    )
    found = np.asarray(made(parameters, TOKENS[:, :5]))
    assert found.shape == (B, num_tokens)
    padded = np.zeros((B, T), TOKENS.dtype)
    for row, length in enumerate(lengths):
        padded[row, : length + num_tokens] = [*TOKENS[row, :length], *found[row]]
    logits = np.asarray(jax.jit(lambda parameters, tokens: model(parameters)(tokens))(parameters, padded))
    for row, length in enumerate(lengths):
        now = logits[row, length - 1 : length - 1 + num_tokens]
        # Where two logits are as close as the two passes may be, either token is right.
        assert (now[np.arange(num_tokens), found[row]] >= now.max(-1) - 1e-4).all()
    assert len(np.unique(found)) > 4


@pytest.mark.slow
def test_drawn_tokens_follow_the_key():
    parameters, model = split(make(dataclasses.replace(CONFIG, num_layers=1)))

    @jax.jit
    def draw(parameters, key):
        return generate(model(parameters), TOKENS[:, :3], num_tokens=8, temperature=5.0, key=key)

    first, again, other = (draw(parameters, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    with pytest.raises(ArgumentError, match=r"`temperature`: found -0.5, wanted at least 0"):
        generate(model(parameters), TOKENS, num_tokens=1, temperature=-0.5)
    with pytest.raises(ArgumentError, match=r"`key`: found None.*temperature=5.0"):
        generate(model(parameters), TOKENS, num_tokens=1, temperature=5.0)


@pytest.mark.slow
def test_a_step_updates_donated_caches_in_place():
    parameters, model = split(make(WINDOW))
    cache = jax.tree.map(jnp.array, WINDOW.empty_cache(B=B, S=40))
    step = jax.jit(lambda parameters, tokens, cache: model(parameters).decode(tokens, cache), donate_argnums=2)
    places = {leaf.unsafe_buffer_pointer() for own in cache for leaf in (own.k, own.v)}
    _, new = step(parameters, TOKENS[:, :1], cache)
    assert {leaf.unsafe_buffer_pointer() for own in new for leaf in (own.k, own.v)} == places


def test_attention_that_sees_the_future_raises():
    with pytest.raises(ArgumentError, match=r"`attention`: found causal=False"):
        dataclasses.replace(CONFIG, attention=dataclasses.replace(ATTENTION, causal=False))


# Remat ---------------------------------------------------------------------------------------------------------------


def gradients(config):
    parameters, model = split(make(config))
    return parameters, lambda parameters: jax.grad(lambda p: next_token_loss(model(p)(TOKENS), TOKENS))(parameters)


def is_forward(equation) -> bool:
    """Whether it is the loop over tiles of the forward pass, inside the function whose derivative `xla` states."""
    is_stated = equation.primitive.name == "custom_jvp_call"
    return is_stated and count(equation.params["call_jaxpr"], lambda inner: inner.primitive.name == "scan") > 0


@pytest.mark.parametrize(
    ("policy", "forward_passes"),
    [(None, 1), (save_attention, 1), (jax.checkpoint_policies.nothing_saveable, 2)],
    ids=["no_remat", "save_attention", "nothing_saveable"],
)
def test_forward_passes_of_attention_in_a_training_step(policy, forward_passes):
    parameters, step = gradients(dataclasses.replace(CONFIG, remat=policy))
    jaxpr = jax.make_jaxpr(step)(parameters).jaxpr
    assert count(jaxpr, is_forward) == forward_passes * CONFIG.num_layers
    # The rest of a block is computed again wherever there is a policy.
    silus = count(jaxpr, lambda equation: equation.primitive.name == "logistic")
    assert silus == CONFIG.num_layers * (1 if policy is None else 2)


@pytest.mark.slow
def test_remat_changes_no_gradient():
    parameters, plain = gradients(CONFIG)
    _, again = gradients(dataclasses.replace(CONFIG, remat=save_attention))
    wanted, found = jax.jit(plain)(parameters), jax.jit(again)(parameters)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())


# Over a mesh ---------------------------------------------------------------------------------------------------------


# Parameters split over the devices of the batch, as for fully sharded data parallelism, and over heads, of which there
# are more for queries than for keys and values, and as many as devices.
RULES = (("embed", "data"), ("heads", "model"), ("kv_heads", None), ("hidden", "model"), ("vocab", None))
KINDS = [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)]


@contextlib.contextmanager
def over_a_mesh(config, kind, *, seed=7):
    """Parameters, the model as a function of them, and tokens split over rows, while the mesh is set."""
    annotated = dataclasses.replace(config, attention=dataclasses.replace(config.attention, logical_axes=True))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh), nnx.logical_axis_rules((*RULES, ("head_dim", None))):
        parameters, model = split(make(annotated), seed=seed)
        placed = jax.device_put(parameters, nnx.get_named_sharding(parameters, mesh))
        yield placed, model, jax.device_put(TOKENS, NamedSharding(mesh, jax.P("data")))


@pytest.mark.parametrize("kind", KINDS, ids=["explicit", "auto"])
def test_logits_and_gradients_over_a_mesh(kind):
    """Those of one device, each where the rules for logical axes say."""

    def both(model, parameters, tokens):
        def loss(parameters):
            logits = model(parameters)(tokens)
            return next_token_loss(logits, tokens), logits

        return jax.grad(loss, has_aux=True)(parameters)

    # Nearly all the time is that of the compiler, which needs less of it this way.
    compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    parameters, model = split(make(CONFIG))
    wanted = compiled(functools.partial(both, model))(parameters, TOKENS)
    with over_a_mesh(CONFIG, kind) as (placed, model, tokens):
        found = compiled(functools.partial(both, model))(placed, tokens)
    slopes, logits = found
    query = nnx.to_pure_dict(slopes)["blocks"][0]["attention"]["query"]["kernel"]
    assert query.sharding.spec[:2] == ("data", "model")
    if kind is AxisType.Explicit:
        assert logits.sharding.spec == jax.P("data", None, None)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * max(1, np.abs(other).max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=["explicit", "auto"])
def test_generate_over_a_mesh(kind):
    """Prompts of lengths of their own, a ring of slots, scores by position: the tokens that one device makes."""
    attention = dataclasses.replace(WINDOW.attention, alibi_slopes=alibi_slopes(4))
    config, lengths = dataclasses.replace(WINDOW, attention=attention), np.array([5, 2])

    def make_tokens(model, parameters, tokens):
        return generate(model(parameters), tokens[:, :5], num_tokens=6, lengths=lengths)

    parameters, model = split(make(config), seed=29)
    wanted = jax.jit(functools.partial(make_tokens, model))(parameters, TOKENS)
    with over_a_mesh(config, kind, seed=29) as (placed, model, tokens):
        found = jax.jit(functools.partial(make_tokens, model))(placed, tokens)
    np.testing.assert_array_equal(found, wanted)
    assert len(np.unique(found)) > 3


# Training ------------------------------------------------------------------------------------------------------------


def losses(backend: str, dtype: str, steps: int) -> np.ndarray:
    """The loss at each step of training on sequences that count up, from different numbers and by different steps.

    Parameters are in float32 where `dtype` is narrower.
    """
    own = {"backend": backend, "head_dim": 8, "window": (6, 0), "qk_norm": "rms_norm"}
    own |= {"dtype": dtype, "param_dtype": "float32"} if dtype == "bfloat16" else {}
    parameters, model = split(make(dataclasses.replace(CONFIG, attention=dataclasses.replace(ATTENTION, **own))))
    parameters = widened(parameters) if dtype == "float64" else parameters
    generator = np.random.default_rng(1)
    first, by = generator.integers(0, VOCAB, (2, steps, 8, 1))
    data = (first + (1 + by % 3) * np.arange(24)) % VOCAB
    optimiser = optax.adam(3e-3)

    def step(carry, tokens):
        parameters, state = carry
        loss, slopes = jax.value_and_grad(lambda p: next_token_loss(model(p)(tokens), tokens))(parameters)
        updates, state = optimiser.update(slopes, state)
        return (optax.apply_updates(parameters, updates), state), loss

    carry = parameters, optimiser.init(parameters)
    return np.asarray(jax.jit(lambda carry, data: jax.lax.scan(step, carry, data)[1])(carry, data), np.float64)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param("xla", "float32", marks=pytest.mark.slow),
        pytest.param("xla", "bfloat16", marks=pytest.mark.slow),
        pytest.param("mosaic_gpu", "bfloat16", marks=pytest.mark.gpu),
    ],
)
def test_training_curves_agree(backend, dtype):
    """200 steps: no farther from training in float64 than the error rule lets it be beside `reference`."""
    steps = 200
    with jax.numpy_dtype_promotion("standard"):  # for Flax's norms in float64
        found, plain = (losses(own, dtype, steps) for own in (backend, "reference"))
        with jax.enable_x64(True):
            truth = losses("reference", "float64", steps)
    assert truth[-10:].mean() < 0.5 * truth[:10].mean()
    rows = measure({"loss": found}, truth={"loss": truth}, plain={"loss": plain}, dtype=dtype)
    assert all(row.within for row in rows), "\n".join(map(str, rows))
