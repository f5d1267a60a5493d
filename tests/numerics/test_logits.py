"""The one formula from q·k to the logit, and its derivatives where they could be NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.numerics.logits import logits, softcap


def test_the_order_is_scale_bias_softcap_mask():
    qk, bias = jnp.array([3.0, -2.0, 7.0]), jnp.array([0.5, 4.0, 1.0])
    allowed = jnp.array([True, True, False])
    found = logits(qk, scale=0.5, bias=bias, cap=2.0, allowed=allowed)
    np.testing.assert_allclose(found, [2 * np.tanh((1.5 + 0.5) / 2), 2 * np.tanh((-1 + 4) / 2), -np.inf], rtol=1e-6)


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_softcap_and_its_derivative(cap):
    s = jnp.linspace(-40, 40, 81)
    np.testing.assert_allclose(softcap(s, cap), cap * np.tanh(np.asarray(s, np.float64) / cap), rtol=1e-6)
    derivative = jax.vmap(jax.grad(lambda x: softcap(x, cap)))(s)
    np.testing.assert_allclose(derivative, 1 - np.tanh(np.asarray(s, np.float64) / cap) ** 2, atol=1e-6)


def test_minus_infinity_stays_masked_under_a_softcap():
    assert softcap(jnp.float32(-jnp.inf), 5.0) == -jnp.inf
    assert jax.grad(lambda x: softcap(x, 5.0))(jnp.float32(-jnp.inf)) == 0


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_what_stands_at_a_masked_pair_reaches_no_derivative(cap, garbage):
    qk, bias = jnp.array([1.0, 2.0]), jnp.array([0.1, garbage])
    allowed = jnp.array([True, False])

    def weights(qk, bias):
        s = logits(qk, scale=2.0, bias=bias, cap=cap, allowed=allowed)
        return (jnp.exp(s) * jnp.array([1.0, 3.0])).sum()

    d_qk, d_bias = jax.grad(weights, (0, 1))(qk, bias)
    assert np.isfinite(np.asarray(d_qk)).all() and np.isfinite(np.asarray(d_bias)).all()
    assert d_qk[1] == 0 and d_bias[1] == 0 and d_qk[0] != 0
