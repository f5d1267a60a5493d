"""RoPE turns pairs by their positions; its scalings slow down what they say."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import plain_layers
import pytest
from flax import nnx
from layer_helpers import normal

from jflash.errors import ArgumentError, ShapeError
from jflash.nn import LinearScaling, NTKScaling, RoPE, YaRN

B, T, N, H = 2, 7, 3, 16


def test_pairs_turn_as_complex_numbers():
    x = normal(1, B, T, N, H)
    positions = np.random.default_rng(2).integers(0, 3000, (B, T))
    rope, found = RoPE(base=500.0), RoPE(base=500.0)(x, positions)
    with jax.enable_x64(True):
        wide = jnp.asarray(x, jnp.float64)
        wanted = np.asarray(plain_layers.rotated(wide, positions, 500.0 ** (-np.arange(0, H, 2) / H)))
        np.testing.assert_allclose(rope(wide, positions), wanted, rtol=0, atol=1e-12)
    # An angle of a thousand radians is known to 1e-4 in float32.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)


def test_the_layout_is_that_of_flax():
    x = normal(1, B, T, N, H)
    wanted = jax.vmap(nnx.RoPE(theta=300.0), in_axes=-2, out_axes=-2)(x)
    np.testing.assert_allclose(RoPE(base=300.0)(x, np.arange(T)), wanted, rtol=0, atol=1e-5)


def test_logits_depend_on_distances_alone():
    q, k = normal(1, 1, 1, 1, H), normal(2, 1, 1, 1, H)
    rope = RoPE(base=100.0)

    def logit(q_position, k_position):
        return float((rope(q, np.array([q_position])) * rope(k, np.array([k_position]))).sum())

    assert logit(3, 1) == pytest.approx(logit(12, 10), abs=1e-4)
    assert abs(logit(3, 1) - logit(1, 3)) > 0.1


def test_sixteen_bits_are_rounded_once():
    x = jnp.asarray(normal(1, B, T, N, H), jnp.bfloat16)
    positions = np.arange(T) + 900
    wanted = RoPE()(x.astype(jnp.float32), positions).astype(jnp.bfloat16)
    found = RoPE()(x, positions)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, wanted)


# Scalings ------------------------------------------------------------------------------------------------------------

plain = RoPE(base=10_000.0).frequencies(128)


def test_linear_scaling_divides_positions():
    x, positions = normal(1, B, T, N, H), np.arange(T) * 4
    np.testing.assert_allclose(
        RoPE(scaling=LinearScaling(4.0))(x, positions), RoPE()(x, np.arange(T)), rtol=0, atol=1e-6
    )


def test_ntk_scaling_slows_the_slowest_pair_alone_by_the_factor():
    ratio = plain / RoPE(scaling=NTKScaling(8.0)).frequencies(128)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(8.0)
    assert (np.diff(ratio) > 0).all()


def test_yarn_slows_what_turns_seldom_and_keeps_what_turns_often():
    """DeepSeek-V2: of 32 pairs the first 11 turn 32 times in 4096 positions, those from 23 on not once."""
    plain = RoPE().frequencies(64)
    ratio = plain / RoPE(scaling=YaRN(40.0, original_length=4096)).frequencies(64)
    turns = plain * 4096 / (2 * math.pi)
    assert turns[10] > 32 > turns[11]
    assert turns[22] > 1 > turns[23]
    assert ratio[:11] == pytest.approx(1.0)
    assert ratio[23:] == pytest.approx(40.0)
    assert (np.diff(ratio[10:24]) > 0).all()
    # In between the frequency is the mean of both, by weights that are linear in the pair: 6 of 13 steps at pair 16.
    assert 1 / ratio[16] == pytest.approx(7 / 13 + 6 / 13 / 40)


def test_yarn_raises_the_logits():
    amplitude = 0.1 * math.log(40.0) + 1
    assert YaRN(40.0, original_length=4096).amplitude == pytest.approx(amplitude)
    x = normal(1, B, 1, N, H)
    still = RoPE(scaling=YaRN(40.0, original_length=4096))(x, np.zeros(1, np.int32))
    np.testing.assert_allclose(still, x * np.float32(amplitude), rtol=1e-6)
    unchanged = RoPE(scaling=YaRN(40.0, original_length=4096, amplitude=1.0))(x, np.zeros(1, np.int32))
    np.testing.assert_array_equal(unchanged, x)


def test_what_is_wrong_raises():
    with pytest.raises(ArgumentError, match=r"`base`: found 1"):
        RoPE(base=1)
    with pytest.raises(ArgumentError, match=r"`factor`: found 0.5"):
        LinearScaling(0.5)
    with pytest.raises(ArgumentError, match=r"`beta_fast`: found 1.0, wanted more than beta_slow=1.0"):
        YaRN(2.0, original_length=100, beta_fast=1.0)
    with pytest.raises(ShapeError, match=r"`x`: found head dim 7"):
        RoPE()(normal(1, B, T, N, 7), np.arange(T))
    for shape in ((), (T + 1,), (B + 1, T), (T, 1)):
        with pytest.raises(ShapeError, match=r"`positions`: found shape"):
            RoPE()(normal(1, B, T, N, H), np.zeros(shape, np.int32))
