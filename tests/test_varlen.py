"""Packed sequences against each sequence on its own, in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflash
from jflash.masks import Causal, SlidingWindow, packed

N, K, H, Hv = 4, 2, 8, 16
# An empty sequence, one without keys, one of a single token, and slack at the end.
QUERIES, KEYS = np.array([0, 5, 5, 17, 18, 29]), np.array([0, 9, 12, 12, 13, 37])
SLACK = 3


def arrays(T: int, S: int, dtype=np.float32):
    rng = np.random.default_rng(T)
    shapes = (T, N, H), (S, K, H), (S, K, Hv), (T, N, Hv)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def both_passes(attention, q, k, v, d_out):
    out, pull = jax.vjp(attention, q, k, v)
    return tuple(np.asarray(x, np.float64) for x in (out, *pull(d_out)))


def one_by_one(q, k, v, d_out, cu_q, cu_k, causal, window):
    """Each sequence with the dense reference in float64; zeros for all other tokens."""
    results = [np.zeros(x.shape, np.float64) for x in (d_out, q, k, v)]
    for (q_first, q_end), (k_first, k_end) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k)):
        T, S = q_end - q_first, k_end - k_first
        if not T or not S:
            continue
        mask = SlidingWindow(*window, offset=S - T)
        if causal:
            mask &= Causal(offset=int(S - T))
        rows, columns = slice(q_first, q_end), slice(k_first, k_end)
        attention = functools.partial(jflash.flash_attention, mask=mask, backend="reference")
        with jax.enable_x64(True):
            own = (
                np.asarray(x, np.float64)[part] for x, part in ((q, rows), (k, columns), (v, columns), (d_out, rows))
            )
            found = both_passes(attention, *own)
        for result, part, x in zip(results, (rows, rows, columns, columns), found):
            result[part] = x
    return results


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (4, None), (2, 3)], ids=str)
@pytest.mark.parametrize("is_traced", [False, True])
def test_as_each_sequence_on_its_own(backend, causal, window, is_traced):
    q, k, v, d_out = arrays(QUERIES[-1] + SLACK, KEYS[-1] + SLACK)
    wanted = one_by_one(q, k, v, d_out, QUERIES, KEYS, causal, window)
    # What the slack holds has no influence.
    for x in (q, k, v):
        x[-SLACK:] = np.nan

    def attention(q, k, v, cu_q, cu_k):
        return jflash.flash_attention_varlen(q, k, v, cu_q, cu_k, causal=causal, window=window, backend=backend)

    if is_traced:
        cu = jnp.asarray(QUERIES), jnp.asarray(KEYS)
        found = both_passes(lambda q, k, v: jax.jit(attention)(q, k, v, *cu), q, k, v, d_out)
    else:
        found = both_passes(lambda q, k, v: attention(q, k, v, QUERIES, KEYS), q, k, v, d_out)
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5, err_msg=name)


def test_one_array_of_lengths_is_for_both():
    q, k, v, d_out = arrays(QUERIES[-1], QUERIES[-1])
    found = jflash.flash_attention_varlen(q, k, v, QUERIES, causal=True)
    wanted = one_by_one(q, k, v, d_out, QUERIES, QUERIES, True, (None, None))[0]
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=2e-5)


def test_other_lengths_do_not_compile_again():
    q, k, v, _ = arrays(QUERIES[-1], QUERIES[-1])
    traced = []

    @jax.jit
    def attention(q, k, v, cu_seqlens):
        traced.append(1)
        return jflash.flash_attention_varlen(q, k, v, cu_seqlens, causal=True)

    first, second = (attention(q, k, v, jnp.array(ends)) for ends in ([0, 10, 29], [0, 20, 25]))
    assert len(traced) == 1
    assert np.abs(first - second).max() > 0.1
    assert (second[25:] == 0).all()


def test_its_mask_serves_other_calls():
    q, k, v, _ = arrays(QUERIES[-1], QUERIES[-1])
    mask = packed(QUERIES, QUERIES, T=29, S=29, causal=True)
    out, lse = jflash.flash_attention_with_lse(q, k, v, mask=mask)
    np.testing.assert_array_equal(out, jflash.flash_attention_varlen(q, k, v, QUERIES, causal=True))
    assert lse.shape == (N, 29) and np.isfinite(lse).all()


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        ({"cu_seqlens_q": np.array([0, 7, 5])}, "cu_seqlens_q", r"\[0, 7, 5\], wanted ascending from 0, at most T=29"),
        ({"cu_seqlens_q": np.array([1, 5])}, "cu_seqlens_q", "ascending from 0"),
        ({"cu_seqlens_q": np.array([0, 30])}, "cu_seqlens_q", "at most T=29"),
        ({"cu_seqlens_q": np.array([0])}, "cu_seqlens_q", r"\(sequences \+ 1,\) with at least one"),
        ({"cu_seqlens_q": np.zeros((2, 2), int)}, "cu_seqlens_q", r"shape \(2, 2\)"),
        ({"cu_seqlens_q": np.array([0.0, 5.0])}, "cu_seqlens_q", "whole numbers"),
        ({"cu_seqlens_k": np.array([0, 5, 9])}, "cu_seqlens_k", "2 sequences of keys, wanted as many as of queries, 1"),
        ({"cu_seqlens_k": np.array([0, 99])}, "cu_seqlens_k", "at most S=29"),
        ({name: np.ones((1, 29, heads, 8), np.float32) for name, heads in zip("qkv", (N, K, K))}, "q", "no batch"),
        ({"window": (-1, 0)}, "window", "at least 0"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_errors_name_the_argument(change, argument, message):
    q, k, v, _ = arrays(29, 29)
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": np.array([0, 29])} | change
    with pytest.raises(jflash.ArgumentError, match=message) as caught:
        jflash.flash_attention_varlen(**arguments)
    assert caught.value.argument == argument
