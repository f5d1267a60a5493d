"""The decoder: the formula written out, decoding, remat, export, and training beside the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_layers
import pytest
from flax import nnx
from helpers import count
from layer_helpers import assert_within_error_rule, next_token_loss, split, widened

from jflash.errors import ArgumentError
from jflash.masks import Segments
from jflash.nn import AttentionConfig, Decoder, DecoderConfig, RoPE, generate, save_attention
from jflash.testing.budget import measure

B, T, VOCAB = 2, 11, 13

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, causal=True, rope=RoPE(base=50.0))
CONFIG = DecoderConfig(vocab_size=VOCAB, num_layers=2, features=10, hidden_features=14, attention=ATTENTION)
WINDOW = dataclasses.replace(CONFIG, attention=dataclasses.replace(ATTENTION, window=(3, 0)))
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


@pytest.mark.parametrize("config", [pytest.param(CONFIG, marks=pytest.mark.slow), WINDOW], ids=["full", "window"])
def test_generate_takes_the_most_likely_token_each_time(config):
    """Against the full pass over prompt and continuation, for each row alone: prompts have lengths of their own."""
    parameters, model = split(make(config), seed=29)  # with which it repeats itself less than with most
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


@pytest.mark.slow
def test_gradients_over_a_mesh():
    """Parameters where the rules for their logical axes say, tokens split over rows: the gradients of one device."""
    parameters, step = gradients(CONFIG)
    wanted = jax.jit(step)(parameters)
    annotated = dataclasses.replace(CONFIG, attention=dataclasses.replace(ATTENTION, logical_axes=True))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = (("embed", "data"), ("heads", "model"), ("kv_heads", "model"), ("hidden", "model"), ("vocab", None))
    with jax.set_mesh(mesh), nnx.logical_axis_rules((*rules, ("head_dim", None))):
        same, model = split(make(annotated))
        placed = jax.device_put(same, nnx.get_named_sharding(same, mesh))
        tokens = jax.device_put(TOKENS, jax.NamedSharding(mesh, jax.P("data")))
        found = jax.jit(jax.grad(lambda p, tokens: next_token_loss(model(p)(tokens), tokens)))(placed, tokens)
    query = nnx.to_pure_dict(found)["blocks"][0]["attention"]["query"]["kernel"]
    assert query.sharding.spec == jax.P("data", "model", None)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * max(1, np.abs(other).max()))


# Training ------------------------------------------------------------------------------------------------------------


def losses(backend: str, dtype: str, steps: int) -> np.ndarray:
    """The loss at each step of training on sequences that count up, from different numbers and by different steps."""
    config = dataclasses.replace(
        CONFIG, attention=dataclasses.replace(ATTENTION, backend=backend, window=(6, 0), qk_norm="rms_norm")
    )
    parameters, model = split(make(config))
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


@pytest.mark.slow
def test_training_curves_agree():
    """200 steps: `xla` is no farther from training in float64 than the error rule lets it be beside `reference`."""
    steps = 200
    with jax.numpy_dtype_promotion("standard"):  # for Flax's norms in float64
        found, plain = (losses(backend, "float32", steps) for backend in ("xla", "reference"))
        with jax.enable_x64(True):
            truth = losses("reference", "float64", steps)
    assert truth[-10:].mean() < 0.5 * truth[:10].mean()
    rows = measure({"loss": found}, truth={"loss": truth}, plain={"loss": plain}, dtype="float32")
    assert all(row.within for row in rows), "\n".join(map(str, rows))
