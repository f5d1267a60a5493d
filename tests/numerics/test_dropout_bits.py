"""The random bits of dropout: uniform, uncorrelated wherever indices are neighbours, and the same for ever.

Every statistic is in units of its own standard deviation under the hypothesis of independent fair bits. Keys are fixed,
so no test can fail by chance; bounds are what the largest of so many normal numbers stays below.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jflash.numerics.dropout import column_word, is_kept, pair_bits, row_words

ROWS, COLUMNS = 1024, 1536
WANTED_BITS = [[3923193220, 2489493968, 3647232273], [466649588, 189024134, 3097647045]]
KEYS = [(0, 0), (0, 1), (1, 0), (2**31, 0), (123456789, 987654321)]


@functools.cache
def bits(key=(0, 0), b=0, n=0, q=0, k=0):
    """The bits of a block of pairs that begins at these indices."""
    row = row_words(jnp.array(key, jnp.uint32), jnp.int32(b), jnp.int32(n), q + jnp.arange(ROWS)[:, None])
    return np.asarray(pair_bits(row, column_word(k + jnp.arange(COLUMNS))))


def kept(rate, **indices):
    return np.asarray(is_kept(jnp.asarray(bits(**indices)), rate)).astype(np.float64)


def correlation(x, y):
    """In standard deviations of independent numbers."""
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()) * np.sqrt(x.size)


@pytest.mark.parametrize("key", KEYS)
def test_every_byte_is_uniform(key):
    """Chi-square over the 256 values of each byte, whose deviation is the root of twice its 255 degrees of freedom."""
    for shift in (0, 8, 16, 24):
        counts = np.bincount((bits(key) >> np.uint32(shift)).astype(np.uint8).ravel(), minlength=256)
        expected = ROWS * COLUMNS / 256
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 4 * np.sqrt(2 * 255)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_kept_in_all_and_in_each_row_and_column(rate):
    for key in KEYS:
        found = kept(rate, key=key)
        variance = rate * (1 - rate)
        assert abs(found.mean() - (1 - rate)) < 4 * np.sqrt(variance / found.size)
        for axis in (0, 1):
            means = found.mean(axis)
            size = found.shape[axis]
            # As far apart as binomial numbers are: a chi-square over rows or columns.
            chi_square = ((means - (1 - rate)) ** 2 * size / variance).sum()
            assert abs(chi_square - means.size) < 5 * np.sqrt(2 * means.size)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbours_are_uncorrelated(rate):
    for key in KEYS[:3]:
        x = kept(rate, key=key)
        for rows, columns in ((1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (64, 0), (0, 64), (128, 128)):
            one, other = x[rows:, columns:], x[: ROWS - rows, : COLUMNS - columns]
            assert abs(correlation(one, other)) < 4.5, (key, rows, columns)
        anti = correlation(x[1:, :-1], x[:-1, 1:])
        assert abs(anti) < 4.5


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_no_two_rows_or_columns_are_alike(rate):
    """All pairs of rows, and of columns: their correlations are spread as those of random ones are."""
    x = kept(rate)
    x = (x - x.mean()) / x.std()
    for y in (x, x.T):
        gram = (y @ y.T / np.sqrt(y.shape[1]))[np.triu_indices(y.shape[0], 1)]
        assert abs(gram.std() - 1) < 0.01
        # The largest of half a million or a million normal numbers is 5; skewed ones at rate 0.1 reach further.
        assert np.abs(gram).max() < (6 if rate == 0.5 else 7)


def test_keys_rows_of_the_batch_and_heads_are_uncorrelated():
    fields = [kept(0.5, key=key) for key in KEYS]
    fields += [kept(0.5, b=1), kept(0.5, n=1), kept(0.5, b=1, n=1), kept(0.5, b=2), kept(0.5, n=2)]
    for i in range(len(fields)):
        for j in range(i):
            assert abs(correlation(fields[i], fields[j])) < 4.5, (i, j)


def test_bits_are_a_function_of_the_indices_alone():
    whole = bits()
    assert np.array_equal(bits(q=100, k=37)[:-100, :-37], whole[100:, 37:])


def test_bits_stay_what_they_are():
    """A run that is taken up again with another version drops the same: the numbers are part of the contract."""
    row = row_words(jnp.array([1, 2], jnp.uint32), jnp.int32(3), jnp.int32(4), jnp.arange(2)[:, None])
    assert np.asarray(pair_bits(row, column_word(jnp.arange(3)))).tolist() == WANTED_BITS


def test_the_ends_of_the_rate():
    zero, largest = jnp.zeros(1, jnp.uint32), jnp.full(1, 2**32 - 1, jnp.uint32)
    assert is_kept(zero, 1e-12).all() and is_kept(largest, 1 - 1e-12).all()
    assert not is_kept(zero, 1e-9).any() and not is_kept(largest - 1, 1 - 1e-12).any()
