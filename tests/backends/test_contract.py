"""Every backend on every workload: the numbers are within the error rule, or the call raises the expected reason."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import UnsupportedError, flash_attention, flash_attention_with_lse
from jflash.backends import registry
from jflash.backends.xla import XlaTiles
from jflash.masks import Lengths, Segments, SlidingWindow
from jflash.testing.budget import (
    attention_of,
    compute,
    forward_and_backward,
    measure,
    plain_of,
    results_of,
    truth_of,
)
from jflash.testing.inputs import random_inputs
from jflash.testing.workloads import CONTRACT, Workload, contract_workloads

# Small tiles, so that every workload crosses several; then the backend's own, which hold a workload whole.
SMALL_TILES = XlaTiles(block_q=32, block_k=16)


class Variant(NamedTuple):
    """A backend as it is tested: with which tiles, in which dtype where a test chooses one, and with the lse or not."""

    backend: str
    tiles: Any = None
    dtype: str = "float32"
    lse: bool = True


VARIANTS = {
    "reference": Variant("reference"),
    "xla": Variant("xla", SMALL_TILES),
    "xla_default": Variant("xla"),
    "mosaic_gpu": Variant("mosaic_gpu", dtype="bfloat16"),
    "cudnn": Variant("cudnn", dtype="bfloat16", lse=False),
}


class Refusal(NamedTuple):
    """A claim: calls like these raise, with a message like this one. A condition left at None does not narrow it."""

    reason: str
    platform: str | None = None
    dtypes: tuple[str, ...] | None = None
    workloads: tuple[str, ...] | None = None

    def is_about(self, workload: str, dtype: str, platform: str) -> bool:
        return (
            self.platform in (None, platform)
            and (self.dtypes is None or dtype in self.dtypes)
            and (self.workloads is None or workload in self.workloads)
        )


# What each backend refuses, by the names of workloads without their dtype; the first that fits says the reason. What
# does not stand here must run.
REFUSALS: dict[str, tuple[Refusal, ...]] = {
    "mosaic_gpu": (
        Refusal(r"for CUDA devices of compute capability 9\.0, not for cpu", platform="cpu"),
        Refusal(r"16 bits and never narrows; q, k and v are float32", dtypes=("float32",)),
        Refusal(r"Hv=12 is no multiple of 8", workloads=("few_keys",)),
    ),
    "cudnn": (
        Refusal(r"needs a CUDA device of compute capability 8\.0 or above, the hardware is cpu", platform="cpu"),
        Refusal(r"takes bfloat16 and float16, the inputs are float32", dtypes=("float32",)),
        Refusal(
            r"no bias on this way",
            workloads=("bias_pair", "bias_head_causal", "bias_row_softcap", "score_limit_alibi_bias"),
        ),
        Refusal(r"no softcap, asked for is softcap=", workloads=("softcap", "alibi_sinks_softcap")),
        Refusal(r"runs no score function, as _", workloads=("score_head_and_key", "score_poles", "score_t5")),
        Refusal(r"draws other random numbers, asked for is dropout_rate=0\.3", workloads=("dropout",)),
        Refusal(r"no sinks on this way", workloads=("sinks",)),
        Refusal(
            r"Hv=24 and H=16",
            workloads=(
                "full", "full_cross", "causal", "causal_bottom_right", "causal_offset_per_row", "window",
                "window_left_offset", "documents_causal", "segments_unsorted", "lengths", "dense_per_head",
                "dense_broadcast", "or_and", "nothing", "prefix_lm", "chunked_causal", "not_dilated", "key_ranges",
                "tree", "function",
            ),
        ),
        Refusal(r"Hv=12 and H=8", workloads=("few_keys",)),
        Refusal(r"Hv=32 and H=64", workloads=("few_queries",)),
        Refusal(r"holds arrays", workloads=("mqa_decode", "dead_lengths", "dead_segments")),
        Refusal(r"query 0 sees no key", workloads=("dead_window",)),
    ),
}  # fmt: skip

WORKLOADS = contract_workloads("float32", "bfloat16") + contract_workloads("float16")[::3]


def refusal_of(variant: Variant, workload: str, dtype: str, platform: str) -> str | None:
    """The reason that a backend must give for refusing a workload; None where it must run."""
    fitting = (
        refusal.reason for refusal in REFUSALS.get(variant.backend, ()) if refusal.is_about(workload, dtype, platform)
    )
    return next(fitting, None)


@functools.cache
def oracle(name: str, platform: str, lse: bool = True) -> tuple:
    """Inputs, truth and plain results of a workload; plain on the device under test, as the rule says."""
    workload = next(workload for workload in WORKLOADS if workload.name == name)
    inputs = random_inputs(workload, seed=7, lse=lse)
    return inputs, truth_of(workload, inputs), plain_of(workload, inputs)


def test_every_backend_is_in_the_contract():
    assert {variant.backend for variant in VARIANTS.values()} == set(registry.names())


def test_every_refusal_is_about_a_workload_that_is_there():
    names = {workload.name.split("-")[0] for workload in WORKLOADS} | {f"dead_{name}" for name in DEAD_MASKS}
    for refusal in itertools.chain(*REFUSALS.values()):
        assert refusal.workloads is None or names.issuperset(refusal.workloads), refusal


def in_time(workload: Workload) -> Any:
    """What is new in a score function, sink or dropout is no matter of the dtype: in 16 bits CI alone has it on a CPU.

    Poles have tests of their own, in tests/scores.
    """
    is_slow = workload.dtype != "float32" and bool(workload.score_fn or workload.sinks or workload.dropout_rate)
    is_slow |= workload.name.startswith("score_poles")
    return pytest.param(workload, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize("workload", [in_time(workload) for workload in WORKLOADS], ids=lambda workload: workload.name)
def test_numbers_or_reason(workload, platform):
    for name, variant in VARIANTS.items():
        attention = attention_of(workload, backend=variant.backend, tiles=variant.tiles, lse=variant.lse)
        reason = refusal_of(variant, workload.name.split("-")[0], workload.dtype, platform)
        if reason is not None:
            with pytest.raises(UnsupportedError, match=reason):
                compute(attention, random_inputs(workload, lse=variant.lse))
            continue
        inputs, truth, plain = oracle(workload.name, platform, variant.lse)
        rows = measure(compute(attention, inputs), truth=truth, plain=plain, dtype=workload.dtype)
        results = {"out", "dq", "dk", "dv"} | {f"d{name}" for name in inputs.learned}
        results |= ({"lse"} if variant.lse else set()) | ({"dbias"} if workload.bias else set())
        assert {row.name for row in rows} == results
        assert all(row.within for row in rows), [f"{name} {row}" for row in rows if not row.within]


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if not variant.lse])
def test_what_has_no_lse_refuses_to_give_one(name, platform):
    variant = VARIANTS[name]
    q = jnp.ones((2, 16, 4, 16), variant.dtype)
    reason = refusal_of(variant, "", variant.dtype, platform) or "no lse that can be differentiated"
    with pytest.raises(UnsupportedError, match=reason):
        flash_attention_with_lse(q, q, q, backend=variant.backend)


def test_float64_is_computed_in_float64(platform):
    """No rule here: truth and plain attention are float64 themselves. A float32 step anywhere would give 1e-7."""
    with jax.enable_x64(True):
        for workload in contract_workloads("float64")[2::5]:
            inputs = random_inputs(workload)
            if inputs.bias is not None or inputs.learned:
                continue  # Their gradients have a narrower dtype, as they have.
            truth = truth_of(workload, inputs)
            found = compute(attention_of(workload, backend="xla", tiles=SMALL_TILES), inputs)
            rows = measure(found, truth=truth, plain=truth, dtype="float64")
            assert max(row.error for row in rows) < 1e-13, [str(row) for row in rows]


def test_the_rule_can_fail(platform):
    """One wrong element, a mislaid head and a NaN each break a bound; so does an infinity out of place."""
    workload = contract_workloads("bfloat16")[2]
    inputs, truth, plain = oracle(workload.name, platform)
    right = compute(attention_of(workload, backend="xla"), inputs)

    def broken(name, change):
        wrong = dict(right)
        wrong[name] = change(right[name].copy())
        return [row.name for row in measure(wrong, truth=truth, plain=plain, dtype="bfloat16") if not row.within]

    def set_element(value):
        def change(array):
            array[(1,) * array.ndim] = value
            return array

        return change

    assert broken("out", set_element(9.0)) == ["out"]
    assert broken("dk", lambda array: np.roll(array, 1, axis=2)) == ["dk", "dk"]
    assert broken("dq", lambda array: array * 1.02) == ["dq"] * 2
    assert broken("dv", set_element(np.nan)) == ["dv", "dv"]
    assert broken("lse", set_element(-np.inf)) == ["lse", "lse"]


GARBAGE = [np.nan, np.inf, -np.inf, 1e4]


DEAD_MASKS = {
    "lengths": Lengths(q=np.array([20, 37], np.int32), kv=np.array([50, 0], np.int32)),
    "segments": Segments(
        np.repeat([[1, 2, 0]], [17, 10, 10], 1), np.repeat([[2, 3, 1, 0]], [30, 21, 30, 20], 1), padding_id=0
    ),
    "window": SlidingWindow(4, 1, offset=-7),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mask_name", DEAD_MASKS)
def test_what_dead_keys_and_queries_hold_has_no_influence(name, mask_name, platform):
    """Bit-equal results whatever stands in keys that nobody sees and queries that see nobody; their gradients are 0."""
    variant, mask = VARIANTS[name], DEAD_MASKS[mask_name]
    dtype = jnp.dtype(variant.dtype)
    B, T, S, N, K, H, Hv = 2, 37, 101, 6, 3, 16, 24
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    q, k, v, d_out, d_lse = draw(B, T, N, H), draw(B, S, K, H), draw(B, S, K, Hv), draw(B, T, N, Hv), draw(B, N, T)
    reason = refusal_of(variant, f"dead_{mask_name}", variant.dtype, platform)
    if reason is not None:
        with pytest.raises(UnsupportedError, match=reason):
            flash_attention(q, k, v[..., :H], mask=mask, backend=variant.backend)
        return
    bound = mask.bind(B=B, N=N, T=T, S=S)
    b, t, s = np.ix_(range(B), range(T), range(S))
    allowed = np.broadcast_to(np.asarray(bound.allowed(t, s, b=b)), (B, T, S))
    dead_key, dead_query = ~allowed.any(1), ~allowed.any(2)
    assert dead_key.any() and dead_query.any()

    def results(filling):
        def filled(array, dead):
            return jnp.asarray(np.where(dead[..., None, None], dtype.type(filling), array))

        operands = filled(q, dead_query), filled(k, dead_key), filled(v, dead_key)
        cotangent = filled(d_out, dead_query), jnp.asarray(np.where(dead_query[:, None], filling, d_lse), jnp.float32)

        @jax.jit
        def run(operands, cotangent):
            found, pull = jax.vjp(
                lambda *o: tuple(flash_attention_with_lse(*o, mask=mask, backend=variant.backend, tiles=variant.tiles)),
                *operands,
            )
            return *found, *pull(cotangent)

        return [np.asarray(array) for array in run(operands, cotangent)]

    clean = results(0.0)
    out, lse, dq, dk, dv = clean
    assert np.all(out[dead_query] == 0) and np.all(np.swapaxes(lse, 1, 2)[dead_query] == -np.inf)
    assert np.all(dq[dead_query] == 0) and np.all(dk[dead_key] == 0) and np.all(dv[dead_key] == 0)
    for filling in GARBAGE:
        for name, found, wanted in zip(("out", "lse", "dq", "dk", "dv"), results(filling), clean):
            np.testing.assert_array_equal(found, wanted, err_msg=f"{name} with {filling} in dead places")


def test_every_tile_config_gives_the_same(platform):
    """Tiles decide about speed only. A set of sizes that is tuned but not tested is untested code (case B17)."""
    workload = next(workload for workload in WORKLOADS if workload.name == "documents_causal-float32")
    inputs, truth, plain = oracle(workload.name, platform)
    for block_q, block_k in ((1, 93), (7, 64), (93, 5), (128, 16), (64, 64), (200, 200)):
        tiles = XlaTiles(block_q=block_q, block_k=block_k)
        found = compute(attention_of(workload, backend="xla", tiles=tiles), inputs)
        rows = measure(found, truth=truth, plain=plain, dtype=workload.dtype)
        assert all(row.within for row in rows), (tiles, [str(row) for row in rows if not row.within])


@pytest.mark.parametrize("name", ["causal-bfloat16", "window-float32", "documents_causal-bfloat16"])
def test_deterministic_gradients_are_bit_equal_between_runs(name, platform):
    workload = next(workload for workload in WORKLOADS if workload.name == name)
    inputs, *_ = oracle(name, platform)
    for backend, tiles in (("xla", SMALL_TILES), ("reference", None)):
        attention = attention_of(workload, backend=backend, tiles=tiles, deterministic=True)
        run = jax.jit(forward_and_backward(attention))
        first = results_of(run(*inputs))
        for _ in range(20):
            for result, again in zip(first.values(), results_of(run(*inputs)).values()):
                np.testing.assert_array_equal(again, result)


def test_workload_names_are_unique_and_dimensions_tell_axes_apart():
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)
    for w in CONTRACT:
        sizes = [size for size in (w.T, w.N, w.B, w.H) if size > 1]
        assert len(set(sizes)) == len(sizes) and w.S not in (w.N, w.K, w.B), w.name
