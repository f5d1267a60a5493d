"""The random bits of dropout: a function of key, batch row, head, query and key index, and of nothing else.

So they are the same in whatever tiles, on whatever device of a mesh and by whatever backend they are computed, in the
forward and in the backward pass. All is arithmetic on 32-bit words that wraps around. A row of pairs gets two words
from a strong mixer, a column gets one, and a pair gets its bits from those three by two rounds of multiplication and
shift: eight operations, which is what a kernel does for each pair.

The mixer is the finaliser of Murmur3 with the constants of lowbias32 (C. Wellons, "Prospecting for Hash Functions",
2018). What structure two rounds leave is tested in tests/numerics/test_dropout_bits.py: none that is seen among the
pairs of a head.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Integer, UInt32

_GOLDEN = np.uint32(0x9E3779B9)
_MULTIPLIERS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


class RowWords(NamedTuple):
    """What a row of pairs is known by: of one batch row, head and query."""

    a: UInt32[Array, "..."]
    b: UInt32[Array, "..."]


def row_words(
    key: UInt32[Array, " words"], b: Integer[Array, "..."], n: Integer[Array, "..."], q: Integer[Array, "..."]
) -> RowWords:
    """The words of rows, from the words of a random key and indices that broadcast against each other."""
    # Two chains, so that rows whose words in one happen to be the same, as among 2^16 rows, differ in the other.
    words = []
    for salt in (_GOLDEN, ~_GOLDEN):
        word = salt
        for entry in (*jnp.asarray(key), b, n, q):
            word = _mix(word ^ entry.astype(np.uint32)) + salt
        words.append(word)
    return RowWords(*words)


def column_word(k: Integer[Array, "..."]) -> UInt32[Array, "..."]:
    """The word of columns."""
    return _mix(k.astype(np.uint32) + _GOLDEN)


def pair_bits(row: RowWords, column: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """32 random bits for each pair."""
    x = (row.a ^ column) * _MULTIPLIERS[0]
    x = (x ^ (x >> np.uint32(15)) ^ row.b) * _MULTIPLIERS[1]
    return x ^ (x >> np.uint32(16))


def is_kept(bits: UInt32[Array, "..."], rate: float) -> Bool[Array, "..."]:
    """Whether a pair is kept, which it is with the probability 1 - rate."""
    return bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    x = (x ^ (x >> np.uint32(16))) * _MULTIPLIERS[0]
    x = (x ^ (x >> np.uint32(15))) * _MULTIPLIERS[1]
    return x ^ (x >> np.uint32(16))
