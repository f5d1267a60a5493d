"""Small operands beside a kernel, for tests of the sums that the cotangents of terms take part in."""

import jax.numpy as jnp
import numpy as np

from jflash.masks import SlidingWindow

B, T, S, N, K, H, Hv = 4, 7, 9, 8, 4, 5, 6
MASK = SlidingWindow(6, 2, offset=1)


def draw(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def operands(*leading):
    """q, k, v and d_out, with more leading axes."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv)
    return [draw(*leading, *shape, seed=seed) for seed, shape in enumerate(shapes)]


def assert_all_close(found, wanted):
    for one, right in zip(found, wanted, strict=True):
        assert one.dtype == right.dtype
        np.testing.assert_allclose(np.asarray(one), np.asarray(right), rtol=1e-4, atol=2e-4)
