"""Any two or three features of the logits together, against the reference in float64: results and all gradients."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, tolerance
from hypothesis import strategies as st

from jflash import flash_attention_with_lse
from jflash.backends.xla import XlaTiles
from jflash.masks import Causal, Dense, MaskFn, PrefixLM, Segments, SlidingWindow

B, T, S, H, Hv = 2, 7, 9, 8, 5
TILES = XlaTiles(block_q=4, block_k=5)


def draw(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def relative(s, b, n, q, k, table, scale):
    return s * scale[n] + table[q - k + S]


def poles(s, b, n, q, k, rate):
    return s - rate[k] * jnp.sqrt((q - k + 3).astype(s.dtype))


def near(b, n, q, k, reach):
    return abs(q - k) <= reach + n


# For each feature the arguments of a call, given the number of heads; masks are joined by &.
FEATURES = {
    "window": lambda N: {"mask": SlidingWindow(4, 2)},
    "causal_per_row": lambda N: {"mask": Causal(offset=np.array([1, 1], np.int32))},
    "documents": lambda N: {"mask": Segments(np.arange(T) // 3, np.arange(S) // 4)},
    "prefix": lambda N: {"mask": PrefixLM(np.array([3, 0]))},
    "dense": lambda N: {"mask": Dense(np.random.default_rng(4).random((N, T, S)) < 0.6)},
    "mask_function": lambda N: {"mask": MaskFn(near, per_query=(np.arange(T) % 4,))},
    "bias_pair": lambda N: {"bias": draw(1, N, T, S, seed=1)},
    "bias_key": lambda N: {"bias": draw(B, 1, 1, S, seed=2)},
    "softcap": lambda N: {"softcap": 1.5},
    "alibi": lambda N: {"alibi_slopes": draw(N, seed=3)},
    "sinks": lambda N: {"sinks": draw(B, N, seed=4)},
    "dropout": lambda N: {"dropout_rate": 0.3, "dropout_key": np.array([1, 2], np.uint32)},
    "relative": lambda N: {"score_fn": relative, "score_args": (draw(T + S, seed=5), draw(N, seed=6))},
    "poles": lambda N: {"score_fn": poles, "score_args": (draw(S, seed=7),), "mask": SlidingWindow(None, 2)},
}
OPERANDS = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "score_args")


def joined(names, N):
    """The arguments of all features; the last one of a kind wins, and masks meet."""
    arguments = {}
    for name in names:
        own = FEATURES[name](N)
        if "mask" in own and "mask" in arguments:
            own["mask"] &= arguments["mask"]
        arguments |= own
    return arguments


def results(arguments, static, d_out, d_lse):
    def call(arguments):
        return tuple(flash_attention_with_lse(**arguments, **static))

    found, pull = jax.vjp(call, arguments)
    return *found, *jax.tree.leaves(pull((d_out, d_lse)))


def check(names, N, K):
    arguments = joined(names, N) | {
        "q": draw(B, T, N, H),
        "k": draw(B, S, K, H, seed=8),
        "v": draw(B, S, K, Hv, seed=9),
    }
    operands = {name: arguments.pop(name) for name in OPERANDS if name in arguments}
    d_out, d_lse = draw(B, T, N, Hv, seed=10), draw(B, N, T, seed=11)
    run = jax.jit(functools.partial(results, static=arguments | {"backend": "xla", "tiles": TILES}))
    found = run(operands, d_out=d_out, d_lse=d_lse)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (operands, d_out, d_lse))
        run = jax.jit(functools.partial(results, static=arguments | {"backend": "reference"}))
        wanted = run(wide[0], d_out=wide[1], d_lse=wide[2])
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        # A few units more than one rounding: with steps and sums in between.
        assert_close(one, other, atol=4 * tolerance(np.float32, np.asarray(other)), name=f"result {index}")


some_features = st.lists(st.sampled_from(sorted(FEATURES)), min_size=2, max_size=3, unique=True)
some_heads = st.sampled_from([(2, 1), (2, 2), (4, 2)])


@hypothesis.settings(max_examples=5)
@hypothesis.given(some_features, some_heads)
def test_features_go_together(names, heads):
    check(names, *heads)


@pytest.mark.slow
@hypothesis.settings(max_examples=6)
@hypothesis.given(some_features, some_heads)
def test_more_features_go_together(names, heads):
    check(names, *heads)
