"""Faults seen in public attention libraries: each test is one of them, named after its number, on every backend here.

The oracle is the reference in float64 with the mask written out by hand as an array, or the literal right answer. That
the reference itself is the formula is the first test. Lengths and tiles are chosen so that several tiles are crossed.
Nearly all of the time goes into compiling, so tests share shapes and masks where they can, sweeps over shapes run on
the backend that has tiles, and their widest parts are marked slow.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Case,
    Passes,
    assert_close,
    assert_right,
    assert_same_bits,
    drawn,
    forward,
    passes,
    random_case,
    tolerance,
    truth,
)

import jflash
from jflash.backends.xla import XlaTiles
from jflash.masks import And, Causal, Dense, Full, Lengths, Segments, SlidingWindow

REFERENCE = {"backend": "reference"}
XLA = {"backend": "xla", "tiles": XlaTiles(block_q=16, block_k=32)}
XLA_SMALL = {"backend": "xla", "tiles": XlaTiles(block_q=3, block_k=4)}

every_path = pytest.mark.parametrize("path", [REFERENCE, XLA], ids=["reference", "xla"])
# Where numbers are the point, not meaning, the reference in float32 says little that the oracle does not.
mainly_xla = pytest.mark.parametrize(
    "path", [pytest.param(REFERENCE, marks=pytest.mark.slow), XLA], ids=["reference", "xla"]
)
every_small_path = pytest.mark.parametrize("path", [REFERENCE, XLA_SMALL], ids=["reference", "xla"])


# Packed documents of ten tokens.
PACKED = {"B": 2, "T": 10, "S": 10, "N": 4, "K": 2, "H": 8, "Hv": 5}


def slow(*values):
    """Values of a wide sweep, all but the first few of which only CI runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


# Three by three tiles of XLA, the last of each row and column ragged; all dimensions distinct.
DIMS = {"B": 2, "T": 37, "S": 70, "N": 6, "K": 3, "H": 16, "Hv": 10}


def pairs(T: int, S: int) -> tuple[np.ndarray, np.ndarray]:
    """Query and key indices that broadcast to (T, S)."""
    return np.arange(T)[:, None], np.arange(S)[None, :]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _uniform(mask, T, S, arguments):
    B = max([1, *(leaf.shape[0] for leaf in jax.tree.leaves(mask) if leaf.ndim)])
    values = jnp.broadcast_to(jnp.eye(S)[None, :, None, :], (B, S, 1, S))
    q, k = jnp.zeros((B, T, 1, 2)), jnp.ones((B, S, 1, 2))
    return jflash.flash_attention(q, k, values, mask=mask, **dict(arguments))


def seen(mask, T: int, S: int, path: dict, **arguments) -> np.ndarray:
    """Which keys each query attends to, (B, T, S): with equal logits and one-hot values the output is the weights."""
    weights = np.asarray(_uniform(mask, T, S, tuple((path | arguments).items())))[:, :, 0]
    visible = weights > 0
    count = visible.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, visible / np.maximum(count, 1), rtol=1e-6)
    return visible


# The oracle ---------------------------------------------------------------------------------------------------------


def formula(q, k, v, bias, *, allowed, scale, softcap):
    """Out and lse as the public docstring states them, one query and head after the other."""
    B, T, N, _ = q.shape
    group = N // k.shape[2]
    out, lse = np.zeros((B, T, N, v.shape[-1])), np.full((B, N, T), -np.inf)
    for b, t, n in np.ndindex(B, T, N):
        s = scale * (k[b, :, n // group] @ q[b, t, n]) + np.broadcast_to(bias, allowed.shape)[b, n, t]
        s = softcap * np.tanh(s / softcap)
        visible = allowed[b, n, t]
        if visible.any():
            weight = np.exp(s[visible] - s[visible].max())
            out[b, t, n] = weight @ v[b, visible, n // group] / weight.sum()
            lse[b, n, t] = np.log(weight.sum()) + s[visible].max()
    return out, lse


def test_the_oracle_is_the_formula():
    dims = {"B": 2, "T": 5, "S": 7, "N": 6, "K": 3, "H": 8, "Hv": 4}
    case = random_case(1, **dims, bias=(2, 1, 5, 7)).astype(np.float64)
    allowed = np.random.default_rng(2).random((2, 6, 5, 7)) < 0.6
    allowed[1, 2, 3] = False
    arguments = {"scale": 0.7, "softcap": 1.5}
    wanted = truth(case, allowed=allowed, **arguments)
    evaluate = functools.partial(formula, allowed=allowed, **arguments)
    out, lse = evaluate(case.q, case.k, case.v, case.bias)
    assert_close(wanted.out, out, atol=1e-13)
    assert_close(wanted.lse, lse, atol=1e-13)

    # Gradients by central differences of the formula. A dead row's lse is -inf on both sides: it does not move.
    alive = np.isfinite(lse)

    def loss(q, k, v, bias):
        out, lse = evaluate(q, k, v, bias)
        return np.sum(case.d_out * out) + np.sum(case.d_lse[alive] * lse[alive])

    arrays, step = (case.q, case.k, case.v, case.bias), 1e-5
    for index, gradient in enumerate((wanted.dq, wanted.dk, wanted.dv, wanted.dbias)):
        direction = np.random.default_rng(index).standard_normal(gradient.shape)
        ends = [
            loss(
                *(
                    array + sign * step * direction if position == index else array
                    for position, array in enumerate(arrays)
                )
            )
            for sign in (1, -1)
        ]
        assert_close(np.sum(gradient * direction), (ends[0] - ends[1]) / (2 * step), atol=1e-7)


# 1. Masked rows, NaN, Inf, overflow -----------------------------------------------------------------------------------


def rows_dead_by(how: str) -> tuple[np.ndarray, object, np.ndarray | None]:
    """Allowed pairs, mask and bias under which rows 4 to 20 of batch row 0, and all of batch row 1, see nothing."""
    B, T, S = DIMS["B"], DIMS["T"], DIMS["S"]
    dead = np.zeros((B, 1, T, 1), bool)
    dead[0, :, 4:21], dead[1] = True, True
    allowed = np.broadcast_to(~dead, (B, 1, T, S))
    if how == "bias":
        return allowed, Full(), np.where(allowed, 0, -np.inf).astype(np.float32)
    if how == "dense":
        return allowed, Dense(allowed.copy()), None
    return allowed, Segments(np.where(dead[:, 0, :, 0], 0, 1), np.ones((B, S), int), padding_id=0), None


@every_path
@pytest.mark.parametrize("how", ["dense", "padding_segment", slow("bias")])
def test_b01_rows_without_keys(path, how):
    allowed, mask, bias = rows_dead_by(how)
    case = random_case(1, **DIMS)._replace(bias=bias)
    found = passes(case, mask=mask, **path)
    wanted = truth(case._replace(bias=None if bias is None else np.zeros_like(bias)), allowed=allowed)
    assert_right(found, wanted)
    dead = ~allowed[:, 0, :, 0]
    assert (found.out[dead] == 0).all()
    assert (found.lse.swapaxes(1, 2)[dead] == -np.inf).all()
    assert (found.dq[dead] == 0).all()
    assert (found.dk[1] == 0).all()
    assert (found.dv[1] == 0).all()
    if bias is not None:
        assert (found.dbias[np.isneginf(bias)] == 0).all()
    # What a dead row holds, and what is asked of it, changes nothing.
    other = case._replace(
        d_out=np.where(dead[..., None, None], np.float32(3), case.d_out),
        d_lse=np.where(dead[:, None], np.float32(-2), case.d_lse),
        q=np.where(dead[..., None, None], np.float32(50), case.q),
    )
    assert_same_bits(passes(other, mask=mask, **path), found)


@every_path
@pytest.mark.parametrize("rows", ["lengths", slow("window")])
def test_b01_rows_without_keys_by_position(path, rows):
    T, S = DIMS["T"], DIMS["S"]
    t, s = pairs(T, S)
    if rows == "lengths":
        mask = Lengths(q=np.array([21, 0]), kv=np.array([0, 70]))
        allowed = np.zeros((2, 1, T, S), bool)
    else:
        mask = SlidingWindow(2, 1, offset=np.array([-20, 60]))
        allowed = np.stack([(s - t >= offset - 2) & (s - t <= offset + 1) for offset in (-20, 60)])[:, None]
    case = random_case(2, **DIMS)
    found = passes(case, mask=mask, **path)
    assert_right(found, truth(case, allowed=allowed))
    assert (np.isneginf(found.lse) == ~allowed.any(-1)).all()
    assert not allowed.all(), "no row is dead"


@mainly_xla
@pytest.mark.parametrize("S, dtype", [(192, "float32"), slow(441, "bfloat16")])
def test_b02_most_negative_bias_in_the_first_tiles(path, S, dtype):
    case = random_case(3, **DIMS | {"S": S}, dtype=jnp.dtype(dtype), bias=(1, 1, 1, S))
    bias = case.bias.copy()
    bias[..., :128] = np.finfo(np.float32).min
    case = case._replace(bias=bias)
    found = passes(case, **path)
    tail = case._replace(k=case.k[:, 128:], v=case.v[:, 128:], bias=bias[..., 128:])
    wanted = truth(tail)
    assert_right(
        found._replace(dk=found.dk[:, 128:], dv=found.dv[:, 128:], dbias=found.dbias[..., 128:]),
        wanted,
    )
    for gradient in (found.dk[:, :128], found.dv[:, :128], found.dbias[..., :128]):
        assert (gradient == 0).all()


@every_path
def test_b02_most_negative_bias_everywhere_is_uniform(path):
    # It is a finite number like any other: all logits are equal, so the weights are, and the row is not a masked one.
    case = random_case(4, **DIMS)._replace(bias=np.full((1, 1, 1, 1), np.finfo(np.float32).min))
    found = passes(case, **path)
    mean = case.v.astype(np.float64).mean(1, keepdims=True)
    mean = np.broadcast_to(np.repeat(mean, 2, axis=2), found.out.shape)
    assert_close(found.out, mean, atol=tolerance(np.float32, case.v))
    assert np.isfinite(found.dv).all()


@every_small_path
def test_b03_bias_of_minus_infinity(path):
    dims = {"B": 2, "T": 4, "S": 7, "N": 6, "K": 3, "H": 8, "Hv": 5}
    case = random_case(5, **dims, bias=(1, 1, 4, 7))
    row = case.bias.copy()
    row[..., 2, :] = -np.inf
    diagonal = np.where(np.eye(4, 7, dtype=bool), case.bias, -np.inf)
    for bias in (row, diagonal):
        here = case._replace(bias=bias)
        found = passes(here, **path)
        dead = np.isneginf(bias)
        assert_right(found, truth(here._replace(bias=np.where(dead, 0, bias)), allowed=~dead))
        assert (found.dbias[dead] == 0).all()
    assert_close(found.out, np.repeat(case.v[:, :4], 2, axis=2), atol=0)


def dead_keys_by(how: str) -> tuple[object, np.ndarray]:
    """A mask and (B, S), the keys that no query of the batch row sees."""
    B, T, S = DIMS["B"], DIMS["T"], DIMS["S"]
    dead = np.zeros((B, S), bool)
    if how == "lengths":
        dead[0, 5:], dead[1, 45:] = True, True
        return Lengths(q=np.array([T, T]), kv=np.array([5, 45])), dead
    if how == "causal":
        dead[:, T:] = True
        return Causal(), dead
    dead[0, 3:40], dead[1, :2], dead[1, 33:66] = True, True, True
    if how == "dense":
        allowed = ~dead[:, None, None] & (np.random.default_rng(6).random((B, 1, T, S)) < 0.7)
        allowed[:, :, 0] = ~dead[:, None]
        return Dense(allowed), dead
    kv_ids = np.where(dead, 0, 1 + np.arange(S) % 2)
    q_ids = np.broadcast_to(1 + np.arange(T) % 2, (B, T))
    return Segments(q_ids, kv_ids, padding_id=0 if how == "padding_segment" else None), dead


@every_path
@pytest.mark.parametrize("how", ["lengths", "dense", "padding_segment", slow("foreign_segment"), slow("causal")])
def test_b04_what_dead_keys_hold_is_never_seen(path, how):
    mask, dead = dead_keys_by(how)
    case = random_case(7, **DIMS)

    def filled(value):
        here, fill = dead[:, :, None, None], np.float32(value)
        return passes(case._replace(k=np.where(here, fill, case.k), v=np.where(here, fill, case.v)), mask=mask, **path)

    clean = filled(0)
    assert (clean.dk[dead] == 0).all()
    assert (clean.dv[dead] == 0).all()
    assert np.abs(clean.dk[~dead]).min() > 0
    for value in (np.nan, np.inf, -np.inf, 1e4):
        assert_same_bits(filled(value), clean)


@every_small_path
def test_b04_decode_over_a_half_filled_cache(path):
    dims = {"B": 2, "T": 1, "S": 3, "N": 4, "K": 2, "H": 64, "Hv": 5}
    case = random_case(8, **dims, dtype=np.float16)
    allowed = np.arange(3) < np.array([1, 3])[:, None, None, None]
    wanted = truth(case, allowed=allowed)
    results = []
    for value in (0, np.nan, np.inf, 1e4):
        k, v = case.k.copy(), case.v.copy()
        k[0, 1:], v[0, 1:] = value, value
        results.append(passes(case._replace(k=k, v=v), mask=Lengths(kv=np.array([1, 3])), **path))
        assert_same_bits(results[-1], results[0])
    found = results[0]
    assert_right(found, wanted)
    assert (found.out[0, 0] == np.repeat(case.v[0, 0], 2, axis=0)).all()
    assert (found.dk[0, 1:] == 0).all()
    assert (found.dv[0, 1:] == 0).all()


@every_path
def test_b04_what_dead_queries_hold_is_never_seen(path):
    mask = Lengths(q=np.array([9, 33]), kv=np.array([50, 70]))
    dead = np.arange(DIMS["T"]) >= np.array([9, 33])[:, None]
    case = random_case(9, **DIMS)

    def filled(q, cotangent):
        here = dead[..., None, None]
        return passes(
            case._replace(
                q=np.where(here, np.float32(q), case.q),
                d_out=np.where(here, np.float32(cotangent), case.d_out),
                d_lse=np.where(dead[:, None], np.float32(cotangent), case.d_lse),
            ),
            mask=mask,
            **path,
        )

    clean = filled(0, 0)
    assert (clean.out[dead] == 0).all()
    assert (clean.dq[dead] == 0).all()
    for value in (np.nan, np.inf, 1e4):
        assert_same_bits(filled(value, 0), clean)
    for cotangent in (np.nan, 1e4):
        assert_same_bits(filled(0, cotangent), clean)


@every_small_path
def test_b05_tokens_past_the_last_document(path):
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 2, 0, 0, 0]])
    slack = ids == 0
    case = random_case(10, **PACKED)

    def filled(value):
        q, k, v = (np.where(slack[..., None, None], np.float32(value), array) for array in case[:3])
        return passes(case._replace(q=q, k=k, v=v), mask=Segments(ids, padding_id=0), causal=True, **path)

    found = filled(np.nan)
    allowed = (ids[:, None, :, None] == ids[:, None, None, :]) & ~slack[:, None, :, None]
    assert_right(found, truth(case, allowed=allowed & np.tri(10, dtype=bool)))
    for array in (found.out, found.dq, found.dk, found.dv):
        assert (array[slack] == 0).all()
    assert_same_bits(found, filled(0))


@every_small_path
def test_b07_live_logit_below_any_sentinel(path):
    dtype = jnp.bfloat16
    q = np.full((1, 1, 1, 64), 200, dtype)
    k = np.stack([np.full((1, 1, 64), -200), np.zeros((1, 1, 64))], axis=1).astype(dtype)
    case = random_case(11, B=1, T=1, S=2, N=1, K=1, H=64, Hv=3, dtype=dtype)._replace(q=q, k=k)
    found = passes(case, mask=Dense(np.array([[True, False]])), scale=1.0, **path)
    assert (found.out[0, 0, 0] == case.v[0, 0, 0]).all()
    assert found.lse[0, 0, 0] == -2.56e6
    assert (found.dv[0, 0, 0] == case.d_out[0, 0, 0]).all()
    assert (found.dv[0, 1] == 0).all()
    assert (found.dk[0, 1] == 0).all()


def huge_case(S: int) -> Case:
    case = random_case(12, B=1, T=1, S=S, N=1, K=1, H=64, Hv=64, dtype=jnp.bfloat16)
    huge = (np.full_like(array, 133120) for array in case[:3])
    return Case(*huge, case.d_out, np.zeros_like(case.d_lse))


@every_small_path
def test_b09_huge_inputs(path):
    case = huge_case(1)
    found = passes(case, **path)
    assert (found.out == 133120).all()
    assert_close(found.lse, np.full((1, 1, 1), 133120.0**2 * 8), atol=tolerance(np.float32, found.lse))
    assert (found.dq == 0).all()
    assert (found.dk == 0).all()
    assert found.dv.tobytes() == case.d_out.tobytes()


@every_small_path
def test_b09_huge_inputs_over_several_tiles(path):
    # Forward only: a float32 lse cannot hold 1.4e11 + log(9), from which a flash backward takes its weights.
    found = forward(huge_case(9), **path)
    assert (found.out == 133120).all()
    assert np.isfinite(found.lse).all()


@every_path
def test_b10_length_one(path):
    dtype = np.float16
    case = random_case(13, B=3, T=1, S=1, N=4, K=2, H=16, Hv=5)
    case = case._replace(q=3 * case.q, k=3 * case.k, v=3 * case.v).astype(dtype)
    case = case._replace(d_lse=np.zeros_like(case.d_lse))
    found = passes(case, **path)
    assert (found.out == np.repeat(case.v, 2, axis=2)).all()
    # p is 1 and ds is p * (dp - delta), a difference of two equal sums of Hv products: what is left of it is rounding.
    product = float(np.abs(case.d_out).max() * np.abs(case.v).max()) * 5
    for gradient, other in ((found.dq, case.k), (found.dk, case.q)):
        limit = np.finfo(np.float32).eps * product * float(np.abs(other).max())
        assert_close(gradient, np.zeros(gradient.shape), atol=limit)
    wanted = case.d_out.astype(np.float64).reshape(3, 1, 2, 2, 5).sum(3)
    assert_close(found.dv, wanted, atol=tolerance(dtype, wanted))


@mainly_xla
def test_b12_float64_makes_no_infinity(path):
    dims = DIMS | {"S": DIMS["T"]}
    case = random_case(14, **dims).astype(np.float64)
    t, s = pairs(dims["T"], dims["T"])
    with jax.enable_x64(True), jax.debug_infs(True), jax.debug_nans(True):
        found = passes(case, mask=Causal(), **path)
    assert all(array.dtype == np.float64 for array in found[:5])
    assert_right(found, truth(case, allowed=s <= t))


# 2. Lengths, tiles, head dims, offsets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "T, S", [(129, 130), slow(1, 1), slow(7, 7), slow(33, 33), slow(192, 160), slow(5, 1), slow(1, 97)]
)
def test_b13_lengths_that_are_no_multiple_of_a_tile(T, S):
    case = random_case(15, **DIMS | {"T": T, "S": S})
    first = passes(case, **XLA)
    assert_right(first, truth(case))
    for _ in range(3):
        assert_same_bits(passes(case, **XLA), first)


@pytest.mark.slow
@every_path
@pytest.mark.parametrize("T, S", [(17, 16), (8, 8), (8, 9), (64, 65)])
def test_b14_ones(path, T, S):
    dims = {"B": 2, "T": T, "S": S, "N": 3, "K": 1, "H": 64, "Hv": 5}
    case = random_case(16, **dims)
    case = case._replace(q=np.ones_like(case.q), k=np.ones_like(case.k), v=np.ones_like(case.v))
    found = passes(case, **path)
    assert_close(found.out, np.ones(found.out.shape), atol=tolerance(np.float32, np.ones(1)))
    assert_close(found.lse, np.full(found.lse.shape, 8 + np.log(S)), atol=tolerance(np.float32, found.lse))
    share = np.broadcast_to(case.d_out.astype(np.float64).sum((1, 2), keepdims=True) / S, found.dv.shape)
    assert_close(found.dv, share, atol=tolerance(np.float32, np.abs(case.d_out).sum((1, 2)) / S))
    assert_right(found, truth(case))


@pytest.mark.parametrize("T, S", [(100, 24), slow(24, 100)])
def test_b15_query_and_key_lengths_differ(T, S):
    case = random_case(17, **DIMS | {"T": T, "S": S}, dtype=np.float16)
    assert_right(passes(case, **XLA), truth(case))


TILINGS = [(16, 16), (8, 64), (64, 8), (33, 29), (1, 70), (70, 1), (128, 128)]


@pytest.mark.parametrize(
    "mask, block_q, block_k",
    [
        ("segments", 33, 29),
        *(slow(mask, *tiling) for mask in ("full", "causal") for tiling in TILINGS),
        *(slow("segments", *tiling) for tiling in TILINGS if tiling != (33, 29)),
    ],
)
def test_b17_every_tiling_agrees(mask, block_q, block_k):
    T = S = 65
    t, s = pairs(T, S)
    ids = np.repeat([1, 2, 3], [20, 13, 32])
    masks = {
        "full": (None, None),
        "causal": (Causal(), s <= t),
        "segments": (Segments(ids), ids[:, None] == ids),
    }
    mask, allowed = masks[mask]
    case = random_case(18, **DIMS | {"T": T, "S": S})
    found = passes(case, mask=mask, backend="xla", tiles=XlaTiles(block_q=block_q, block_k=block_k))
    assert_right(found, truth(case, allowed=allowed))


@pytest.mark.slow
@pytest.mark.parametrize("H", [1, 8, 16, 24, 40, 72, 80, 96, 112, 160, 192, 224, 256])
def test_b19_head_dims(H):
    case = random_case(19, B=2, T=21, S=34, N=4, K=1, H=H, Hv=H)
    assert_right(passes(case, **XLA), truth(case))


@pytest.mark.parametrize(
    "T, H, Hv",
    [
        (20, 192, 128),
        *(slow(T, H, Hv) for T, H, Hv in ((1, 192, 128), (20, 64, 128), (1, 64, 128), (20, 128, 64), (1, 576, 512))),
    ],
)
def test_b20_value_head_dim_differs(T, H, Hv):
    case = random_case(20, B=2, T=T, S=35, N=7, K=1, H=H, Hv=Hv)
    found = passes(case, **XLA)
    assert found.out.shape == (2, T, 7, Hv)
    assert found.dk.shape == (2, 35, 1, H)
    assert found.dv.shape == (2, 35, 1, Hv)
    assert_right(found, truth(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    "T, N, K", [(18, 28, 4), (18, 24, 4), (1, 20, 4), (18, 64, 4), (18, 71, 1), (1, 71, 1), (18, 3, 3)]
)
def test_b21_group_sizes(T, N, K):
    case = random_case(21, B=2, T=T, S=35, N=N, K=K, H=8, Hv=5)
    assert_right(passes(case, **XLA), truth(case))


@every_small_path
def test_b21_which_head_reads_which(path):
    # Head k of the values holds the number k, and head n of the output what it read: n // (N // K).
    N, K = 12, 4
    v = np.broadcast_to(np.arange(K, dtype=np.float32)[:, None], (2, 7, K, 3))
    case = random_case(22, B=2, T=5, S=7, N=N, K=K, H=8, Hv=3)._replace(v=v)
    found = forward(case, **path)
    wanted = np.broadcast_to(np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])[:, None], found.out.shape)
    assert_close(found.out, wanted, atol=tolerance(np.float32, wanted))


@pytest.mark.slow
def test_b24_many_query_heads_on_one_key_head():
    case = random_case(23, B=2, T=1, S=100, N=64, K=1, H=64, Hv=24)
    assert_right(passes(case, **XLA), truth(case))


# 3. Causal and window meaning -----------------------------------------------------------------------------------------


@every_small_path
@pytest.mark.parametrize(
    "T, S, offset, picture",
    [
        (2, 5, 0, "#.... ##..."),
        (2, 5, 3, "####. #####"),
        (5, 2, 0, "#. ## ## ## ##"),
        (5, 2, -3, ".. .. .. #. ##"),
    ],
)
def test_b31_where_the_diagonal_starts(path, T, S, offset, picture):
    wanted = drawn(picture)
    assert (seen(Causal(offset=offset), T, S, path) == wanted).all()
    # As data, one for each batch row, it means the same.
    both = seen(Causal(offset=np.array([offset, 1])), T, S, path)
    assert (both[0] == wanted).all()
    assert (both[1] == np.tri(T, S, 1, dtype=bool)).all()


@mainly_xla
@pytest.mark.parametrize("T, S", [(37, 70), slow(70, 37)])
def test_b31_both_corners_and_rows_of_their_own(path, T, S):
    t, s = pairs(T, S)
    case = random_case(24, **DIMS | {"T": T, "S": S})
    offsets = np.array([S - T, 4])
    allowed = s <= t + offsets[:, None, None, None]
    assert_right(passes(case, mask=Causal(offset=offsets), **path), truth(case, allowed=allowed))


@every_small_path
def test_b33_causal_decode_step(path):
    S = 16
    written = np.array([9, 1, 16])
    found = seen(Causal(offset=written - 1), 1, S, path)
    assert (found[:, 0] == (np.arange(S) < written[:, None])).all()
    # Without an offset the meaning is that of jax.nn: the one query is query 0.
    assert (seen(Causal(), 1, S, path)[0, 0] == (np.arange(S) == 0)).all()


@every_small_path
@pytest.mark.parametrize(
    "left, right", [(0, 0), (1, 0), (2, 0), (3, 0), slow(0, 2), slow(2, 1), slow(None, 1), slow(3, None)]
)
def test_b34_both_ends_of_a_window_are_seen(path, left, right):
    T = S = 16
    found = seen(None, T, S, path, window=(left, right))[0]
    for t in range(T):
        first = 0 if left is None else max(0, t - left)
        last = S - 1 if right is None else min(S - 1, t + right)
        assert list(np.flatnonzero(found[t])) == list(range(first, last + 1)), f"query {t}"
    if (left, right) == (3, 0):
        assert list(np.flatnonzero(found[10])) == [7, 8, 9, 10]


@every_path
@pytest.mark.parametrize(
    "T, S, left, right, offset", [slow(37, 70, 2, 5, 20), slow(37, 70, 3, 0, 0), slow(70, 37, 17, 1, -9)]
)
def test_b34_window_gradients(path, T, S, left, right, offset):
    t, s = pairs(T, S)
    case = random_case(25, **DIMS | {"T": T, "S": S})
    allowed = (s >= t + offset - left) & (s <= t + offset + right)
    found = passes(case, mask=SlidingWindow(left, right, offset=offset), **path)
    assert_right(found, truth(case, allowed=allowed))


@every_small_path
def test_b35_window_alone_is_honoured(path):
    T, S = 32, 40
    narrow, wide = (seen(None, T, S, path, window=window)[0] for window in ((0, 0), (0, 31)))
    assert (narrow == np.eye(T, S, dtype=bool)).all()
    assert (wide == (np.triu(np.ones((T, S), bool)) & np.tri(T, S, 31, dtype=bool))).all()


@pytest.mark.slow
@every_path
def test_b37_causal_with_window_and_lengths(path):
    T = S = 37
    t, s = pairs(T, S)
    q_length, kv_length = np.array([20, 37]), np.array([37, 11])
    case = random_case(26, **DIMS | {"T": T, "S": S})
    allowed = (s <= t) & (s >= t - 3) & (t < q_length[:, None, None, None]) & (s < kv_length[:, None, None, None])
    found = passes(case, mask=Lengths(q=q_length, kv=kv_length), causal=True, window=(3, 5), **path)
    assert_right(found, truth(case, allowed=allowed))


@mainly_xla
def test_b39_window_of_one_query(path):
    S, window = 100, 16
    case = random_case(27, B=2, T=1, S=S, N=4, K=2, H=8, Hv=5)
    # As the cache of a decode step: the newest key is the last, and how many there are is data.
    mask = SlidingWindow(window - 1, 0, offset=np.array([S - 1, 61]))
    last = np.array([S - 1, 61])[:, None, None, None]
    allowed = (np.arange(S) <= last) & (np.arange(S) > last - window)
    clean = passes(case, mask=mask, **path)
    assert_right(clean, truth(case, allowed=allowed))
    for value in (1e4, np.nan):
        k, v = case.k.copy(), case.v.copy()
        k[:, 10], v[:, 10] = value, value
        assert_same_bits(passes(case._replace(k=k, v=v), mask=mask, **path), clean)


@every_small_path
def test_b41_window_zero_is_the_query_itself(path):
    T = 16
    for window in (0, (0, 0)):
        assert (seen(None, T, T, path, window=window)[0] == np.eye(T, dtype=bool)).all()
    assert seen(None, T, T, path, window=(None, None)).all()
    for window in (-1, (-1, 0), (5, -3)):
        with pytest.raises(jflash.ArgumentError, match=r"found .*-[13], wanted a distance of at least 0"):
            seen(None, T, T, path, window=window)


# 4. Packing, padding, lengths -----------------------------------------------------------------------------------------


@every_small_path
@pytest.mark.parametrize(
    "ids, padding_id",
    [
        ([1, 1, 1, 1, 2, 2, 2, 2, 2, 2], None),
        ([1, 2, 1, 2, 3, 1, 2, 1, 3, 1], None),
        ([1, 1, 1, 2, 2, 2, 2, 0, 0, 0], 0),
        ([1, 1, 1, 2, 2, 2, 2, 0, 0, 0], None),
        ([5, 5, 0, 7, 0, 7, 5, -7, 5, -7], 0),
    ],
    ids=["sorted", "unsorted", "padding", "zero_is_a_segment", "padding_inside"],
)
def test_b42_packed_documents(path, ids, padding_id):
    ids = np.array(ids)
    t, s = pairs(10, 10)
    allowed = (ids[t] == ids[s]) & (s <= t)
    if padding_id is not None:
        allowed &= ids[t] != padding_id
    case = random_case(28, **PACKED)
    mask = Segments(np.stack([ids, ids]), padding_id=padding_id)
    found = passes(case, mask=mask, causal=True, **path)
    assert_right(found, truth(case, allowed=allowed))

    # Another token 0 leaves every row alone that does not see it, in its last bit.
    q, k, v = (array.copy() for array in case[:3])
    q[:, 0] += 1
    k[:, 0], v[:, 0] = 30, -40
    other = passes(case._replace(q=q, k=k, v=v), mask=mask, causal=True, **path)
    foreign = ids != ids[0]
    for name in ("out", "dq", "dk", "dv"):
        one, two = getattr(found, name)[:, foreign], getattr(other, name)[:, foreign]
        assert one.tobytes() == two.tobytes(), name
    assert not np.array_equal(found.out[:, ~foreign], other.out[:, ~foreign])


def test_b42_segment_ids_argument_has_no_padding_id():
    ids = np.array([0, 0, 1, 1, 0, 1, 2, 2, 0, 0])
    q, k, v = random_case(29, **PACKED)[:3]
    found = jflash.flash_attention(q, k, v, segment_ids=ids)
    assert np.array_equal(found, jflash.flash_attention(q, k, v, mask=Segments(ids)))
    assert not np.array_equal(found, jflash.flash_attention(q, k, v, mask=Segments(ids, padding_id=0)))


@mainly_xla
@pytest.mark.parametrize("given", ["kv", slow("q"), slow("both")])
def test_b43_each_length_works_alone(path, given):
    B, T, S = 8, 20, 128
    kv = np.array([24, 125, 53, 28, 77, 96, 13, 114])
    q = np.array([20, 1, 0, 17, 16, 15, 20, 3])
    lengths = {"kv": {"kv": kv}, "q": {"q": q}, "both": {"q": q, "kv": kv}}[given]
    case = random_case(30, B=B, T=T, S=S, N=2, K=1, H=8, Hv=5)
    t, s = pairs(T, S)
    # A length beyond the array is no limit.
    for beyond in (0, 1000):
        longer = {name: np.where(length > 15, length + beyond, length) for name, length in lengths.items()}
        allowed = np.ones((B, 1, T, S), bool)
        for name, index in (("q", t), ("kv", s)):
            if name in longer:
                allowed &= index < longer[name][:, None, None, None]
        assert_right(passes(case, mask=Lengths(**longer), **path), truth(case, allowed=allowed))


@mainly_xla
def test_b44_packed_rows_equal_each_row_alone(path):
    documents = [[9, 3, 14, 1, 20, 5, 7, 2], [4, 4, 30, 8, 1, 1, 3, 10]]
    T = 64
    ids = np.stack([np.pad(np.repeat(np.arange(1, 9), row), (0, T - sum(row))) for row in documents])
    case = random_case(31, **DIMS | {"T": T, "S": T})
    found = passes(case, mask=Segments(ids, padding_id=0), causal=True, **path)
    parts = {name: np.zeros(array.shape) for name, array in zip(Passes._fields, found) if array is not None}
    parts["lse"] -= np.inf
    # A document alone is its batch row with all else masked: of the same shape, so that one program serves them all.
    for b, row in enumerate(documents):
        start = 0
        for length in row:
            here = slice(start, start + length)
            allowed = np.zeros((T, T), bool)
            allowed[here, here] = np.tri(length, dtype=bool)
            alone = truth(Case(*(None if array is None else array[b : b + 1] for array in case)), allowed=allowed)
            for name in ("out", "dq", "dk", "dv"):
                parts[name][b, here] = getattr(alone, name)[0, here]
            parts["lse"][b, :, here] = alone.lse[0, :, here]
            start += length
    assert_right(found, Passes(**parts, dbias=None))


SLOW_SHAPES = [(1, 6, 1, 70), (37, 70), (1, 37, 70), (6, 37, 70), (1, 1, 1, 70), (2, 1, 37, 1), (2, 6, 37, 70)]


@pytest.mark.parametrize("shape", [(2, 1, 1, 70), *map(slow, SLOW_SHAPES)], ids=str)
def test_b49_masks_that_broadcast(shape):
    array = np.random.default_rng(32).random(shape) < 0.6
    case = random_case(33, **DIMS)
    found = passes(case, mask=Dense(array), **XLA)
    assert_right(found, truth(case, allowed=np.broadcast_to(array, (2, 6, 37, 70))))


# 5. Bias --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "letters", ["1N1S", "1111", *map(slow, ("NTS", "BNT1", "11TS", "B1TS", "1NTS", "BN1S", "TS", "S", "11T1"))]
)
def test_b50_gradient_of_a_broadcast_bias(letters):
    sizes = DIMS | {"1": 1}
    shape = tuple(sizes[letter] for letter in letters)
    case = random_case(34, **DIMS, bias=shape)
    found = passes(case, **XLA)
    assert found.dbias.shape == shape
    whole = truth(case._replace(bias=np.broadcast_to(case.bias, (2, 6, 37, 70)).copy()))
    summed = whole.dbias.sum(tuple(axis for axis in range(4 - len(shape))))
    kept = tuple(axis for axis, size in enumerate(shape) if size == 1 != summed.shape[axis])
    wanted = summed.sum(kept, keepdims=True)
    # ds of a row sums to the cotangent of its lse: over T x S terms that cancel, each is rounded on its own.
    terms = whole.dbias.size // found.dbias.size
    limit = tolerance(np.float32, whole.dbias) * np.sqrt(terms)
    assert_close(found.dbias, wanted, atol=limit, name="dbias")
    assert_right(found._replace(dbias=None), whole._replace(dbias=None))


@pytest.mark.slow
@pytest.mark.parametrize("path", [REFERENCE, {"backend": "xla", "tiles": XlaTiles(block_q=2, block_k=32)}])
def test_b50_sum_of_a_narrow_bias_is_float32(path):
    # Terms of one sign from 300 rows of tiles: added up in bfloat16 they would stall at 2^8 times one of them.
    case = random_case(35, **DIMS | {"T": 600}, dtype=jnp.bfloat16, bias=(1, 1, 1, 70))
    case = case._replace(bias=case.bias.astype(jnp.bfloat16), d_lse=np.abs(case.d_lse) + 10)
    found = passes(case, **path)
    assert found.dbias.dtype == jnp.bfloat16
    wanted = truth(case).dbias
    assert_close(found.dbias, wanted, atol=tolerance(jnp.bfloat16, wanted))


@mainly_xla
def test_b51_float32_bias_with_bfloat16_inputs(path):
    dims = {"B": 3, "T": 37, "S": 64, "N": 4, "K": 2, "H": 32, "Hv": 10}
    case = random_case(36, **dims, dtype=jnp.bfloat16, bias=(1, 4, 37, 64))
    found = passes(case, **path)
    assert found.out.dtype == found.dq.dtype == jnp.bfloat16
    assert found.dbias.dtype == found.lse.dtype == np.float32
    assert_right(found, truth(case))


def compiled_gradient(argument: int, B: int, N: int, T: int):
    """The program of one gradient, with a bias that the batch shares."""

    def loss(q, k, v, bias):
        return jflash.flash_attention(q, k, v, bias=bias, **XLA).sum()

    q = jax.ShapeDtypeStruct((B, T, N, 8), "float32")
    bias = jax.ShapeDtypeStruct((1, N, T, T), "float32")
    return jax.jit(jax.grad(loss, argument)).lower(q, q, q, bias).compile()


@pytest.mark.slow
def test_b54_memory_of_a_bias_gradient():
    N, T = 2, 512
    of_q, of_bias, of_bias_in_a_batch = (compiled_gradient(*which, N, T) for which in ((0, 1), (3, 1), (3, 16)))
    # A gradient for each batch row would take 15 times the bias more; what is linear in T grows with B as well.
    several, one = (program.memory_analysis().temp_size_in_bytes for program in (of_bias_in_a_batch, of_bias))
    assert several - one < 2 * 4 * N * T * T
    # Nobody asked for it: then no loop fills an array of the size of the bias, cut into its 32 by 16 tiles.
    filled = r"f32\[32,16,1,2,1,16,32\]\S* dynamic-update-slice"
    assert re.search(filled, of_bias.as_text())
    assert not re.search(filled, of_q.as_text())


# 8. lse ---------------------------------------------------------------------------------------------------------------


@every_small_path
def test_b80_lse_is_a_natural_logarithm(path):
    case = random_case(37, B=2, T=7, S=8, N=4, K=2, H=8, Hv=5)
    found = forward(case, **path)
    q, k = case.q.astype(np.float64), np.repeat(case.k, 2, axis=2).astype(np.float64)
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(8)
    lse = np.log(np.exp(logits).sum(-1))
    assert_close(found.lse, lse, atol=tolerance(np.float32, lse))
    # Two halves of the keys merge into the whole by their lse.
    halves = [forward(case._replace(k=case.k[:, keys], v=case.v[:, keys]), **path) for keys in (slice(4), slice(4, 8))]
    merged = np.logaddexp(halves[0].lse, halves[1].lse)
    weights = [np.exp(half.lse - merged).swapaxes(1, 2)[..., None] for half in halves]
    assert_close(merged, lse, atol=tolerance(np.float32, lse))
    out = sum(weight * half.out for weight, half in zip(weights, halves))
    assert_close(out, found.out, atol=2 * tolerance(np.float32, found.out))


@every_small_path
@pytest.mark.parametrize("through", ["lse", "both"])
def test_b81_gradient_through_lse(path, through):
    dims = {"B": 2, "T": 5, "S": 7, "N": 4, "K": 2, "H": 8, "Hv": 3}
    case = random_case(38, **dims, bias=(2, 4, 5, 7))
    if through == "lse":
        case = case._replace(d_out=np.zeros_like(case.d_out))
    allowed = np.random.default_rng(39).random((2, 4, 5, 7)) < 0.7
    allowed[0, 1, 2] = False
    found = passes(case, mask=Dense(allowed), **path)
    # Central differences of the value itself, in float64.
    wide = case.astype(np.float64)

    def loss(arrays):
        here = truth(Case(*arrays[:3], wide.d_out, wide.d_lse, arrays[3]), allowed=allowed)
        alive = np.isfinite(here.lse)
        return np.sum(wide.d_out * here.out) + np.sum(wide.d_lse[alive] * here.lse[alive])

    arrays, step = (wide.q, wide.k, wide.v, wide.bias), 1e-5
    for index, gradient in enumerate((found.dq, found.dk, found.dv, found.dbias)):
        direction = np.random.default_rng(index).standard_normal(gradient.shape)
        ends = [
            loss([array + sign * step * direction if here == index else array for here, array in enumerate(arrays)])
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        scale = np.abs(gradient * direction).sum()
        assert_close(np.sum(gradient * direction), slope, atol=16 * np.finfo(np.float32).eps * scale + 1e-8)
        assert through == "lse" or scale > 0
    if through == "lse":
        assert np.abs(found.dq).max() > 0.01
        assert (found.dv == 0).all()


# 9. Softcap -----------------------------------------------------------------------------------------------------------


@every_path
def test_b83_softcap_is_applied_after_scale_and_bias(path):
    case = random_case(40, **DIMS, bias=(2, 6, 37, 70))
    # Scores to some 40, from the bias too: a cap before the scale or before the bias would give another result.
    case = case._replace(q=4 * case.q, bias=8 * case.bias)
    allowed = np.random.default_rng(41).random((2, 1, 37, 70)) < 0.8
    q, k = case.q.astype(np.float64), np.repeat(case.k, 2, axis=2).astype(np.float64)
    score = 0.5 * np.einsum("btnh,bsnh->bnts", q, k) + case.bias
    assert np.abs(score).max() > 35
    outs = []
    for cap in (5.0, 50.0, None):
        capped = score if cap is None else cap * np.tanh(score / cap)
        weight = np.where(allowed, np.exp(capped - capped.max(-1, keepdims=True)), 0)
        weight /= weight.sum(-1, keepdims=True)
        out = np.einsum("bnts,bsnd->btnd", weight, np.repeat(case.v, 2, axis=2))
        outs.append(out)
        if cap is not None:
            found = forward(case, mask=Dense(allowed), scale=0.5, softcap=cap, **path)
            # Logits are numbers up to 2^6 with an error of half an eps each, which their exponentials carry.
            assert_close(found.out, out, atol=64 * tolerance(np.float32, out) / 16)
    assert min(np.abs(outs[i] - outs[j]).max() for i, j in ((0, 1), (0, 2), (1, 2))) > 0.01


@mainly_xla
def test_b84_gradient_of_a_softcap(path):
    T = S = 37
    t, s = pairs(T, S)
    ids = np.stack([np.repeat([1, 2, 0], [17, 15, 5]), np.repeat([1, 2, 3], [3, 30, 4])])
    allowed = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids[:, None, :, None] != 0) & (s <= t)
    case = random_case(42, **DIMS | {"T": T, "S": S}, bias=(2, 6, T, S))
    case = case._replace(q=40 * case.q)
    score = np.einsum("btnh,bsnh->bnts", case.q, np.repeat(case.k, 2, axis=2)) / 4 + case.bias
    assert 168 < np.abs(score).max() < 2**8
    # Masked pairs hold what would be infinite under the square of a sentinel.
    case = case._replace(bias=np.where(np.broadcast_to(allowed, case.bias.shape), case.bias, np.float32(-1e30)))
    found = passes(case, mask=Segments(ids, padding_id=0), causal=True, softcap=30.0, **path)
    wanted = truth(case, allowed=allowed, softcap=30.0)
    for name, one, other in zip(Passes._fields, found, wanted):
        # Uncapped logits of up to 2^8 carry an error of 2^7 eps, which the slope of tanh, at most 1, passes on.
        assert_close(one, other, atol=2**7 / 16 * tolerance(np.float32, other), name=name)
    assert (found.dbias[~np.broadcast_to(allowed, found.dbias.shape)] == 0).all()
    assert np.abs(found.dbias).max() > 0


# 11. Precision and determinism ----------------------------------------------------------------------------------------


@pytest.mark.slow
@every_path
def test_b94_deterministic_is_bit_equal(path):
    case = random_case(43, **DIMS, bias=(1, 6, 1, 70))
    first = passes(case, deterministic=True, **path)
    for _ in range(5):
        assert_same_bits(passes(case, deterministic=True, **path), first)


@mainly_xla
def test_b97_sixteen_bit_error_is_that_of_plain_attention(path):
    dtype = jnp.bfloat16
    case = random_case(44, B=1, T=96, S=112, N=4, K=2, H=128, Hv=128, dtype=dtype)
    case = case._replace(d_lse=np.zeros_like(case.d_lse))
    found, wanted = passes(case, **path), truth(case)

    # The yardstick: dense attention with float32 logits and softmax, rounded to 16 bits before the second matmul.
    def plain(q, k, v, d_out):
        out, pull_back = jax.vjp(jax.nn.dot_product_attention, q, k, v)
        return out, *pull_back(d_out)

    with jax.numpy_dtype_promotion("standard"):
        yardsticks = jax.jit(plain)(*case[:4])
    for name, yardstick in zip(("out", "dq", "dk", "dv"), yardsticks):
        right = getattr(wanted, name)
        error, plain_error = (
            np.abs(np.asarray(array).astype(np.float64) - right) for array in (getattr(found, name), yardstick)
        )
        for reduce in (np.max, np.mean):
            band = 2 * reduce(plain_error) + float(jnp.finfo(dtype).eps) * reduce(np.abs(right))
            assert reduce(error) <= band, (name, reduce)
    # Logits are never rounded to 16 bits: lse has the error of float32.
    assert_close(found.lse, wanted.lse, atol=tolerance(np.float32, wanted.lse))


@pytest.mark.slow
@every_path
def test_b98_float32_is_never_narrowed(path):
    case = random_case(45, B=1, T=256, S=200, N=2, K=1, H=64, Hv=48)
    found, wanted = passes(case, **path), truth(case)
    for name, one, other in zip(Passes._fields, found, wanted):
        if one is not None:
            assert_close(one, other, atol=1e-5, name=name)


def matmul_precisions(path: dict, dtype) -> set[str]:
    """The precision of every matmul of both passes. On the CPU it changes no number, on a GPU it does."""

    def both(q, k, v, bias):
        out, pull_back = jax.vjp(
            lambda *arrays: jflash.flash_attention(*arrays[:3], bias=arrays[3], **path), q, k, v, bias
        )
        return pull_back(out)

    case = random_case(46, **DIMS, dtype=dtype, bias=(1, 1, 37, 70))
    text = str(jax.make_jaxpr(both)(case.q, case.k, case.v, case.bias))
    matmuls = re.findall(r"dot_general\[.*?\n\s*\]", text, re.DOTALL)
    # Two of the forward pass and five of the backward, or four of it where the weights were kept.
    assert len(matmuls) >= 6
    return {re.search(r"precision=(.*)", matmul)[1] for matmul in matmuls}


@every_path
def test_b98_matmuls_ask_for_the_highest_precision(path):
    assert matmul_precisions(path, np.float32) == {"(Precision.HIGHEST, Precision.HIGHEST)"}
    with jax.default_matmul_precision("high"):
        assert matmul_precisions(path, np.float32) == {"(Precision.HIGH, Precision.HIGH)"}


@pytest.mark.slow
def test_every_argument_of_a_combination_is_honoured():
    # The masks of the cases above all at once, on both backends, against one matrix written out.
    T = S = 37
    t, s = pairs(T, S)
    ids = np.stack([np.repeat([3, 1], [20, 17]), np.repeat([1, 2], [8, 29])])
    dense = np.random.default_rng(47).random((2, 6, T, S)) < 0.8
    lengths = np.array([30, 37])
    allowed = dense & (s <= t + 2) & (s >= t - 9) & (ids[:, None, :, None] == ids[:, None, None, :])
    allowed = allowed & (s < lengths[:, None, None, None])
    mask = And(Dense(dense), Causal(offset=2), SlidingWindow(9, None), Segments(ids), Lengths(kv=lengths))
    case = random_case(48, **DIMS | {"S": S}, bias=(2, 6, 1, S))
    wanted = truth(case, allowed=allowed, softcap=4.0)
    for path in (REFERENCE, XLA):
        assert_right(passes(case, mask=mask, softcap=4.0, **path), wanted)
