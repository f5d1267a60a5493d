"""The cache of keys and values: every step of decoding is a row of the full pass, and the cache is updated in place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflash
from jflash.decode import KVCache, decode_attention
from jflash.decode.cache import _slots
from jflash.errors import ArgumentError, DtypeError, ShapeError
from jflash.scores import by_position

B, N, K, H, Hv, LENGTH = 3, 6, 2, 8, 5, 23


def arrays(T=LENGTH, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((B, T, N, H), (B, T, K, H), (B, T, K, Hv)))


def cache_of(S=LENGTH, **arguments):
    return KVCache.zeros(**{"B": B, "S": S, "K": K, "H": H, "Hv": Hv} | arguments)


def step(q, k, v, cache, **scores):
    cache = cache.append(k, v)
    return decode_attention(q, cache, **scores), cache


# Nearly all the time of these tests is that of the compiler, and without optimisations it takes less.
append_and_attend = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
fill = jax.jit(KVCache.fill)


def full(q, k, v, window=None, score=lambda s, b, n, q, k: s):
    """Attention to all tokens before, or those in the window, written out in float64; a row for each token."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    distance = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
    visible = (distance >= 0) & (distance <= (LENGTH if window is None else window))
    s = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    weights = np.where(visible, np.exp(score(s, *np.ix_(*map(range, s.shape)))), 0)
    return np.einsum("bnts,bsnd->btnd", weights / weights.sum(-1, keepdims=True), v)


def assert_close(found, wanted):
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=2e-6, equal_nan=False)


ONES, UNEVEN = [1] * LENGTH, [7, 1, 7, 7, 1]


@pytest.mark.parametrize(
    ("window", "steps"),
    [
        (None, ONES),
        (0, ONES),
        (5, ONES),
        (5, UNEVEN),
        (LENGTH + 9, ONES),
        pytest.param(None, UNEVEN, marks=pytest.mark.slow),
        pytest.param(1, UNEVEN, marks=pytest.mark.slow),
        pytest.param(LENGTH, UNEVEN, marks=pytest.mark.slow),
    ],
)
def test_steps_are_rows_of_the_full_pass(window, steps):
    q, k, v = arrays()
    cache = cache_of(window=window, step=max(steps))
    start = 0
    for T in steps:
        now = slice(start, start + T)
        np.testing.assert_array_equal(cache.positions(T), np.broadcast_to(np.arange(start, start + T), (B, T)))
        out, cache = append_and_attend(q[:, now], k[:, now], v[:, now], cache)
        assert_close(out, full(q, k, v, window)[:, now])
        start += T
    assert start == LENGTH
    assert cache.length.tolist() == [LENGTH] * B


@pytest.mark.parametrize("window", [None, 4])
def test_rows_of_different_lengths_go_on_each_at_its_own_position(window):
    """Padding of the prompt, NaN here, leaves nothing behind."""
    q, k, v = arrays()
    lengths, T, steps = np.array([9, 2, 0]), 11, 8
    padding = (np.arange(T) >= lengths[:, None])[..., None, None]
    prompt = [np.where(padding, np.nan, x[:, :T]) for x in (k, v)]
    cache = fill(cache_of(window=window), *prompt, lengths=lengths)
    assert cache.length.tolist() == lengths.tolist()
    wanted = full(q, k, v, window)
    rows = np.arange(B)
    for step in range(steps):
        now = (lengths + step)[:, None]
        out, cache = append_and_attend(*(x[rows[:, None], now] for x in (q, k, v)), cache)
        assert_close(out, wanted[rows[:, None], now])


def of_positions(s, b, n, q, k, table):
    """Whole numbers tell apart before and after, heads and rows; the table is indexed by a position."""
    order, turn = (x.astype(s.dtype) for x in (q - 2 * k, (q * (n + 1) + b) % 3))
    return s + 0.1 * order - 0.5 * turn + table[k]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "has",
    ["alibi_slopes score_fn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("alibi_slopes", "score_fn"))],
)
def test_scores_are_of_positions_in_whatever_slot_a_token_is(window, has):
    q, k, v = arrays()
    generator = np.random.default_rng(1)
    slopes, table = (generator.standard_normal(shape).astype(np.float32) for shape in ((B, N), LENGTH))

    def score(s, b, n, q, k):
        s = s - slopes[b, n] * abs(q - k) if "alibi_slopes" in has else s
        return of_positions(s, b, n, q, k, table) if "score_fn" in has else s

    wanted, lengths, rows = full(q, k, v, window, score), np.array([9, 2, 0]), np.arange(B)[:, None]
    scores = {"alibi_slopes": slopes} if "alibi_slopes" in has else {}
    scores |= {"score_args": (table,)} if "score_fn" in has else {}
    run = jax.jit(functools.partial(step, **{"score_fn": of_positions} if "score_fn" in has else {}))
    cache = fill(cache_of(window=window, step=3), k[:, :11], v[:, :11], lengths=lengths)
    for T in (1, 1, 3, 3, 1, 1):
        now = np.asarray(cache.positions(T))
        out, cache = run(*(x[rows, now] for x in (q, k, v)), cache, **scores)
        assert_close(out, wanted[rows, now])


def test_a_prompt_longer_than_the_ring_leaves_its_last_tokens():
    q, k, v = arrays()
    cache = cache_of(window=4, step=2)
    assert cache.k.shape == (B, 6, K, H)
    cache = fill(cache, k[:, :17], v[:, :17])
    np.testing.assert_array_equal(cache.k[:, np.arange(11, 17) % 6], k[:, 11:17])
    out, _ = append_and_attend(q[:, 17:19], k[:, 17:19], v[:, 17:19], cache)
    assert_close(out, full(q, k, v, 4)[:, 17:19])


@pytest.mark.parametrize("is_ring", [False, True])
def test_no_two_tokens_go_to_one_slot(is_ring):
    """As the scatter is told. With two in one slot it would depend on the device which of them stays."""
    first, count = np.array([0, 4, 0, 3]), np.array([9, 9, 2, 9])
    slots = np.asarray(_slots(first, count, T=9, S=6, is_ring=is_ring))
    assert all(len(set(row)) == 9 for row in slots.tolist())
    kept = [[slot for slot in row if slot < 6] for row in slots.tolist()]
    last_six = [[3, 4, 5, 0, 1, 2], [1, 2, 3, 4, 5, 0], [0, 1], [0, 1, 2, 3, 4, 5]]
    assert kept == (last_six if is_ring else [[3, 4, 5], [], [0, 1], []])


def test_filling_forgets_what_was_there():
    q, k, v = arrays()
    used = fill(cache_of(), np.full_like(k, np.nan), np.full_like(v, np.nan))
    cache = fill(used, k[:, :5], v[:, :5])
    out, _ = append_and_attend(q[:, 5:6], k[:, 5:6], v[:, 5:6], cache)
    assert_close(out, full(q, k, v)[:, 5:6])


def test_keys_that_are_the_values():
    q, k, _ = arrays()
    cache = cache_of(shares_values=True)
    assert cache.v is None
    cache = cache.append(k)
    assert_close(
        decode_attention(q, cache, scale=0.3, softcap=2.0),
        decode_attention(q, cache_of(Hv=H).append(k, k), scale=0.3, softcap=2.0),
    )
    with pytest.raises(ArgumentError, match=r"`v`: found an array, wanted None"):
        cache.append(k, k)
    with pytest.raises(ArgumentError, match=r"`v`: found None, wanted values"):
        cache_of().append(k)


def test_a_row_past_its_slots_is_nan_and_the_others_are_right():
    q, k, v = arrays()
    cache = fill(cache_of(S=6), k[:, :6], v[:, :6], lengths=np.array([5, 6, 2]))
    out, cache = append_and_attend(q[:, 6:7], k[:, 6:7], v[:, 6:7], cache)
    assert cache.is_lost.tolist() == [False, True, False]
    assert np.isnan(out).all(axis=(1, 2, 3)).tolist() == [False, True, False]
    assert not np.isnan(out[np.array([0, 2])]).any()
    np.testing.assert_array_equal(cache.k[1], k[1, :6])


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize(("window", "mask"), [(None, "Causal"), (127, "(KeyRange")])
def test_the_kernels_take_a_step(window, mask, scores):
    cache = jax.eval_shape(lambda: cache_of(S=4096, K=4, H=128, Hv=128, dtype=jnp.bfloat16, window=window))
    q = jax.ShapeDtypeStruct((B, 1, 16, 128), jnp.bfloat16)
    of_step = jax.eval_shape(lambda cache: cache.mask(1), cache)
    assert repr(of_step).startswith(mask)
    more = {"alibi_slopes": np.ones(16, np.float32), "score_fn": lambda s, b, n, q, k: s - (q - k).astype(s.dtype)}
    at = {"q_positions": np.zeros((B, 1), np.int32), "k_positions": np.zeros((B, cache.k.shape[1]), np.int32)}
    more = by_position(q, cache.k, **at, **more) if scores else {}
    explained = jflash.explain(q, cache.k, cache.v, mask=of_step, **more, hardware="h200")
    assert explained.plan.backend == "mosaic_gpu"


# In place ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "T"), [(None, 3), (30, 1)])
def test_a_donated_cache_is_updated_in_place(window, T):
    """Case B65: each array of the cache is its own output, nothing as large is copied, and the buffers stay."""
    q, k, v = (x[:, :T] for x in arrays())
    cache = jax.tree.map(jnp.array, cache_of(S=64, window=window, step=T))
    compiled = jax.jit(step, donate_argnums=3).lower(q, k, v, cache).compile()
    text = compiled.as_text()
    # Arguments 3, 4 and 5 are the arrays of the cache, results 1, 2 and 3 those of the new one.
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text).group(1)
    assert re.findall(r"\{(\d)\}: \((\d), \{\}, \w+-alias\)", aliases) == [("1", "3"), ("2", "4"), ("3", "5")]
    for slots in (cache.k, cache.v):
        shape = ",".join(map(str, slots.shape))
        assert f"f32[{shape}]" in text
        assert not re.search(rf"= f32\[{shape}\]\S* copy\(", text), "the cache is copied"
    places = [slots.unsafe_buffer_pointer() for slots in (cache.k, cache.v)]
    _, new = compiled(q, k, v, cache)
    assert cache.k.is_deleted()
    assert [slots.unsafe_buffer_pointer() for slots in (new.k, new.v)] == places


def test_a_scan_over_steps():
    """The cache as the carry of a loop: its type does not change."""
    q, k, v = arrays()

    def body(cache, token):
        out, cache = step(*(x[:, None] for x in token), cache)
        return cache, out[:, 0]

    tokens = [np.moveaxis(x, 1, 0) for x in (q, k, v)]
    _, outs = jax.lax.scan(body, cache_of(window=6), tokens)
    assert_close(np.moveaxis(np.asarray(outs), 0, 1), full(q, k, v, 6))


def test_batch_and_heads_split_over_devices_stay_split():
    q, k, v = (x[:2, :1] for x in arrays())
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = functools.partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, jax.P("data", None, "model")))
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    cache = cache_of(B=2, window=5)
    cache = KVCache(k=placed(cache.k), v=placed(cache.v), length=jax.device_put(cache.length, rows), window=5)
    compiled = append_and_attend.lower(placed(q), placed(k), placed(v), cache).compile()
    out, new = compiled(placed(q), placed(k), placed(v), cache)
    assert_close(out, full(q, k, v, 5))
    assert new.k.sharding.is_equivalent_to(cache.k.sharding, 4)
    assert not re.search(r" all-gather(-start)?\(| all-to-all\(", compiled.as_text())


# Refusals ------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_raises():
    q, k, v = arrays()
    with pytest.raises(DtypeError, match=r"`k`: found dtype float32, wanted bfloat16"):
        cache_of(dtype=jnp.bfloat16).append(k, v)
    with pytest.raises(ShapeError, match=r"`k`: found shape \(3, 23, 6, 8\), wanted .*\(3, 'T', 2, 8\)"):
        cache_of().append(q, v)
    with pytest.raises(ShapeError, match=r"`v`: found shape"):
        cache_of().append(k, k)
    with pytest.raises(ShapeError, match=r"`k`: found T=23 .* wanted at most the S=9 slots"):
        cache_of(S=9).fill(k, v)
    with pytest.raises(ShapeError, match=r"`lengths`: found shape \(2,\), wanted \(B,\) = \(3,\)"):
        cache_of().fill(k, v, lengths=np.array([1, 2]))
    with pytest.raises(ShapeError, match=r"`q`: found T=3, wanted at most 2 at once.*step=3"):
        append_and_attend(q[:, :3], k[:, :3], v[:, :3], cache_of(window=4, step=2))
    with pytest.raises(ShapeError, match=r"`alibi_slopes`: found shape \(2,\), wanted \(N,\)"):
        decode_attention(q, cache_of().append(k, v), alibi_slopes=np.ones(K, np.float32))
    with pytest.raises(ArgumentError, match=r"`score_args`: found .* without a function"):
        decode_attention(q, cache_of().append(k, v), score_args=(np.ones(K),))
    with pytest.raises(ArgumentError, match=r"`window`: found -1"):
        cache_of(window=-1)
    with pytest.raises(ArgumentError, match=r"`step`: found 0"):
        cache_of(window=3, step=0)
