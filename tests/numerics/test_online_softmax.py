"""The carry of the online softmax: parts over different keys merge into the whole, and so do their derivatives."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.numerics.online_softmax import Carry, attend_to, empty, finish, merge

ROWS, KEYS, HV = 5, 12, 3


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def carry_of(s, v) -> Carry:
    return attend_to(s, lambda p: p @ v)


def whole(s, v):
    return jax.nn.softmax(s, -1) @ v, jax.nn.logsumexp(s, -1)


def in_parts(s, v, cuts=(0, 4, 5, 12)):
    parts = [carry_of(s[:, start:stop], v[start:stop]) for start, stop in itertools.pairwise(cuts)]
    return finish(merge(parts[0], merge(parts[1], parts[2])))


def test_parts_merge_into_the_whole():
    s, v = draw(ROWS, KEYS) * 5, draw(KEYS, HV)
    for found, wanted in zip(in_parts(s, v), whole(s, v)):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


def test_derivatives_of_merged_parts_are_those_of_the_whole():
    s, v = draw(ROWS, KEYS) * 3, draw(KEYS, HV)
    weight, lse_weight = draw(ROWS, HV, seed=1), draw(ROWS, seed=2)

    def loss(attention):
        return lambda s, v: sum((x * w).sum() for x, w in zip(attention(s, v), (weight, lse_weight)))

    for found, wanted in zip(jax.grad(loss(in_parts), (0, 1))(s, v), jax.grad(loss(whole), (0, 1))(s, v)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_merging_with_no_keys_changes_nothing():
    """Case B76: an empty side is exact, on either side, and two of them are one."""
    s, v = draw(ROWS, KEYS), draw(KEYS, HV)
    live, nothing = carry_of(s, v), empty((ROWS,), HV, jnp.float32)
    for merged in (merge(live, nothing), merge(nothing, live)):
        for found, wanted in zip(merged, live):
            np.testing.assert_array_equal(found, wanted)
    out, lse = finish(merge(nothing, nothing))
    np.testing.assert_array_equal(out, np.zeros((ROWS, HV)))
    np.testing.assert_array_equal(lse, np.full(ROWS, -np.inf))


@pytest.mark.parametrize("cotangent", [1.0, np.nan, np.inf])
def test_a_row_without_keys_has_no_gradient(cotangent):
    s = jnp.full((2, KEYS), -jnp.inf).at[1].set(draw(KEYS))
    v = draw(KEYS, HV)
    _, pull = jax.vjp(lambda s, v: finish(carry_of(s, v)), s, v)
    d_out = jnp.full((2, HV), 1.0).at[0].set(cotangent)
    ds, dv = pull((d_out, jnp.array([cotangent, 1.0])))
    assert not np.isnan(np.asarray(ds)).any() and not np.isnan(np.asarray(dv)).any()
    np.testing.assert_array_equal(ds[0], np.zeros(KEYS))


def test_far_apart_maxima_neither_overflow_nor_vanish():
    """The largest logit first, then smallest finite ones, then large ones again (case B02)."""
    lowest = np.finfo(np.float32).min
    s = jnp.concatenate([jnp.full((1, 4), lowest), jnp.zeros((1, 1)), jnp.full((1, 7), 80.0)], 1)
    v = draw(KEYS, HV)
    out, lse = in_parts(s, v)
    np.testing.assert_allclose(out[0], v[5:].mean(0), rtol=1e-5)
    np.testing.assert_allclose(lse, 80 + np.log(7), rtol=1e-6)
