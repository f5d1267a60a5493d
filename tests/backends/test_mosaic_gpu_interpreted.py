"""The Hopper kernels as they are shipped, in Pallas' interpretation: the error rule, races, what dead places hold."""

import dataclasses
import difflib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import count
from mosaic_interpreter import interpret as interpret_within
from mosaic_interpreter import interpreted

import jflash
from jflash import flash_attention_with_lse, hardware, vjp
from jflash.backends import mosaic_gpu, registry
from jflash.backends.protocol import Operands, problem_of
from jflash.masks import Causal, Chunked, Dense, Dilated, KeyRange, Lengths, PrefixLM, Segments, SlidingWindow, Tree
from jflash.numerics.online_softmax import Attended
from jflash.problem import Problem
from jflash.scores import ScoreTerms, dropout_of
from jflash.testing.budget import measure, plain_of, truth_of
from jflash.testing.inputs import random_inputs
from jflash.testing.problems import backward_shapes, operand_shapes, pose, terms_with
from jflash.testing.workloads import CONTRACT, Workload

H200 = hardware.named("h200")
RESULTS = ("out", "lse", "dq", "dk", "dv")
# A case takes ten seconds, and where the tests share their cores with others three times as long.
interpret = functools.partial(interpret_within, timeout_s=240)


def int32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def workload(name: str, **changed: Any) -> Workload:
    return Workload(name=name, **{"B": 1, "T": 200, "N": 1, "K": 1, "H": 64, "dtype": "bfloat16"} | changed)


DOCUMENTS = np.repeat(int32(1, 2, 3, 0), [70, 50, 60, 20])[None]
UNSORTED = np.random.default_rng(0).integers(0, 3, (2, 233), np.int32)

# First and last keys of 90 queries, and a parent for each.
RANGES = *np.sort(UNSORTED[:, :90] * 40 + np.arange(90), axis=0).astype(np.int32), np.arange(90) // 3 - 1


RANDOM = np.random.default_rng(1).random((2, 2, 140, 264)) < 0.6
RANDOM[1, 0, 3], RANDOM[..., 64:128] = False, False  # A query without keys, and tiles that no query sees.


def steeper(s, b, n, q, k, rate):
    """NaN above the diagonal and infinite on it."""
    return s * (1 + (n % 2).astype(s.dtype) / 8) - rate * jnp.log((q - k).astype(s.dtype))


def capped_here_and_there(s, b, n, q, k, limit, is_on):
    return jnp.where((q + k + b) % 5 == 0, -jnp.inf, jnp.where(is_on & (k // 7 > 3), limit * jnp.tanh(s / limit), s))


def with_poles(s, b, n, q, k, table):
    """Infinite where both are 0, as are rows of a tile past the end."""
    return s + jnp.log(table[abs(q - k) // 3] + s * s)


def scaled_here_and_there(s, b, n, q, k, table, is_on):
    """A number and a boolean for each diagonal, of each batch row."""
    distance = abs(q - k)
    return jnp.where(jnp.asarray(is_on)[b, distance % 7], s / 2, s) * table[b, jnp.where(q > k, 5, 0) + distance % 5]


def scaled_by_pairs(s, b, n, q, k, of_pairs, of_keys):
    return s * of_pairs[b, q, k] + of_keys[k]


def scaled_by_queries(s, b, n, q, k, of_queries, of_rows, of_keys):
    return s * of_queries[n, q] + of_rows[b, q] * of_keys[k]


def with_poles_of_queries(s, b, n, q, k, of_queries):
    """Infinite past the last query, where kernels have zeros."""
    return s + jnp.log(of_queries[q]) / of_queries[q]


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).uniform(0.5, 1.5, shape).astype(np.float32)


T5 = next(w.score_fn for w in CONTRACT if w.name == "score_t5")

# Together they have every kind of mask, of head dims and of lengths, of which multiples of 8 take one form of `Pieces`
# and all others another. Interpretation takes about half a second for each block of threads: these have one to four.
WORKLOADS = [
    workload("full", T=72, S=328, N=2, K=1),
    workload("causal", mask=Causal(), T=264, H=128),
    workload("causal_bottom_right", mask=Causal(offset=103), T=70, S=173, H=64, Hv=128),
    workload("offset_per_row", mask=Causal(offset=int32(30, -70)), B=2, T=101, S=101, H=40, Hv=24),
    workload("window", mask=SlidingWindow(40, 9), T=136, S=208, H=128, Hv=64),
    workload("dead_rows_and_keys", mask=SlidingWindow(20, 0, offset=-70), T=250, S=130, H=80),
    workload("documents_causal", mask=Segments(DOCUMENTS, padding_id=0) & Causal(), N=3, K=1),
    workload("segments_unsorted", mask=Segments(UNSORTED[:, :61], UNSORTED), B=2, T=61, S=233, H=72, Hv=104),
    workload("lengths", mask=Lengths(q=int32(30, 65), kv=int32(0, 111)), B=2, T=67, S=150, H=80),
    workload("or_and", mask=(Causal() | Lengths(kv=int32(11))) & SlidingWindow(100, None), T=190, H=64),
    workload("prefix_lm", mask=PrefixLM(int32(70)), T=133, S=150, H=64),
    workload("chunks_without_steps", mask=Chunked(90) & ~Dilated(3), T=130, S=150, H=128),
    workload("ranges_and_trees", mask=KeyRange(RANGES[0], RANGES[1]) | Tree(RANGES[2], prefix=60), T=90, S=150, H=40),
    workload("one_query", mask=Causal(offset=int32(150, 3)), B=2, T=1, S=190),
    workload("few_keys", T=70, S=13, N=4, K=2, H=8, Hv=16),
    workload("wide", mask=Causal(), T=128, S=136, H=256),
    workload("wide_odd", mask=Segments(UNSORTED[:1, :70], UNSORTED[:1, :129]), T=70, S=129, N=2, H=192, Hv=128),
    # Of three chunks of columns, or one, a warpgroup has more than the other, or all.
    workload("three_chunks", mask=Causal(offset=9), T=136, S=72, N=2, K=1, H=192, Hv=128),
    workload("three_chunks_each", mask=Segments(UNSORTED[:1, :72], UNSORTED[:1, :136]), T=72, S=136, N=2, H=192),
    workload("one_chunk", mask=SlidingWindow(50, 20), T=136, S=72, H=64, Hv=192),
    workload("one_chunk_odd", T=70, S=131, H=256, Hv=40),
    workload("float16", dtype="float16", mask=Causal(), T=72, N=4, K=2),
    workload("softcap", softcap=2.5, T=70, S=150),
    workload(
        "alibi_and_sinks", alibi_slopes=(2, 4), sinks=(4,), mask=Causal(offset=20), B=2, T=90, S=150, N=4, K=2, H=128
    ),
    workload("score", score_fn=steeper, score_args=(np.float32(0.3),), mask=Causal(offset=-1), T=140, H=96, Hv=64),
    workload(
        "score_and_segments",
        score_fn=capped_here_and_there,
        score_args=(np.float32(1.7), np.bool_(True)),
        softcap=3.0,
        alibi_slopes=(2,),
        sinks=(2,),
        mask=Segments(UNSORTED[:1, :61], UNSORTED[:1]),
        T=61,
        S=233,
        N=2,
    ),
    workload(
        "score_wide",
        score_fn=steeper,
        score_args=(np.float32(0.3),),
        alibi_slopes=(2,),
        mask=Causal(offset=-1),
        T=72,
        S=133,
        N=2,
        H=136,
        Hv=200,
    ),
    # A number for each diagonal: of every head; of all, in batch rows that see other keys; of batch rows, two of them.
    workload("t5", score_fn=T5, score_args=(draw(2, 18),), mask=SlidingWindow(40, 90), T=140, S=264, N=2, K=1),
    workload(
        "diagonals_of_all",
        score_fn=with_poles,
        score_args=(draw(90),),
        softcap=3.0,
        mask=Lengths(kv=int32(80, 150)),
        B=2,
        T=70,
        S=150,
        N=2,
        H=40,
        Hv=72,
    ),
    workload(
        "diagonals_of_rows",
        score_fn=scaled_here_and_there,
        score_args=(draw(2, 10), RANDOM[0, :, 0, :7]),
        alibi_slopes=(2,),
        mask=Segments(UNSORTED[:, :61], UNSORTED),
        B=2,
        T=61,
        S=233,
        N=2,
        H=128,
    ),
    workload(
        "diagonals_wide", score_fn=T5, score_args=(draw(2, 18),), mask=Causal(), T=130, S=133, N=2, K=1, H=136, Hv=200
    ),
    workload(
        "pairs_of_rows",
        score_fn=scaled_by_pairs,
        score_args=(draw(2, 70, 150), draw(150)),
        mask=Lengths(kv=int32(80, 150)),
        B=2,
        T=70,
        S=150,
        N=2,
        K=1,
        H=40,
    ),
    # A number for each query: of every head, and of every batch row beside one for each key; of all, with poles; where
    # warpgroups split the columns of a head.
    workload(
        "queries",
        score_fn=scaled_by_queries,
        score_args=(draw(2, 140), draw(1, 140), draw(110)),
        mask=Causal(offset=-20),
        T=140,
        S=110,
        N=2,
        K=1,
    ),
    workload(
        "queries_with_poles",
        score_fn=with_poles_of_queries,
        score_args=(draw(70),),
        softcap=3.0,
        dropout_rate=0.2,
        mask=Segments(UNSORTED[:, :70], UNSORTED[:, :150]),
        B=2,
        T=70,
        S=150,
        N=2,
        H=40,
        Hv=72,
    ),
    workload(
        "queries_wide",
        score_fn=scaled_by_queries,
        score_args=(draw(1, 72), draw(1, 72), draw(133)),
        alibi_slopes=(1,),
        mask=Lengths(q=int32(60), kv=int32(111)),
        T=72,
        S=133,
        H=136,
        Hv=200,
    ),
    workload(
        "diagonals_and_bias",
        score_fn=T5,
        score_args=(draw(2, 18),),
        bias=(1, 1, 72, 200),
        mask=Dense(RANDOM[:1, :, :72, :200]),
        T=72,
        S=200,
        N=2,
    ),
    workload("float16_wide_odd", dtype="float16", T=67, S=129, H=136, Hv=200),
    # Biases of pairs: of every head; shared by batch rows that see different keys, by heads, by all; with infinities.
    workload("bias", bias=(1, 1, 140, 264), softcap=2.5, mask=Causal(offset=120), T=140, S=264, H=128),
    workload("bias_of_rows", bias=(1, 2, 70, 150), mask=Lengths(kv=int32(80, 150)), B=2, T=70, S=150, N=2, K=1, H=40),
    workload(
        "bias_of_heads",
        bias=(2, 1, 61, 233),
        mask=Segments(UNSORTED[:, :61], UNSORTED),
        B=2,
        T=61,
        S=233,
        N=2,
        H=128,
        bias_dtype="bfloat16",
    ),
    workload(
        "bias_of_all",
        bias=(1, 1, 72, 200),
        alibi_slopes=(2, 2),
        mask=SlidingWindow(60, 30),
        B=2,
        T=72,
        S=200,
        N=2,
        bias_dtype="bfloat16",
        H=136,
        Hv=200,
    ),
    workload(
        "bias_wide",
        bias=(1, 1, 130, 133),
        score_fn=steeper,
        score_args=(np.float32(0.3),),
        mask=Causal(offset=-1),
        T=130,
        S=133,
        H=256,
    ),
    # A boolean for each pair, and one for each key; with and without a bias of pairs.
    workload("dense", mask=Dense(RANDOM[:, :, :70, :150]), B=2, T=70, S=150, N=2, K=1),
    workload("dense_wide", mask=Dense(RANDOM[:1, :1]) & Causal(offset=30), T=140, S=264, H=136, Hv=200),
    workload(
        "dense_and_bias",
        mask=Dense(RANDOM[:, :1, :72, :200]),
        bias=(1, 2, 72, 200),
        softcap=2.0,
        B=2,
        T=72,
        S=200,
        N=2,
        H=128,
    ),
    workload("dense_for_keys", mask=Dense(RANDOM[:, :1, :1, :150]), B=2, T=70, S=150, N=2, H=72),
    workload("bias_of_keys", bias=(2, 1, 1, 150), sinks=(2,), mask=Causal(offset=70), B=2, T=80, S=150, N=2),
    # A bias for each query: of every head and row; of all, in 16 bits; beside numbers for each pair.
    workload(
        "bias_of_queries", bias=(2, 2, 140, 1), sinks=(2,), mask=SlidingWindow(60, 9, offset=-30), B=2, T=140, N=2
    ),
    workload("bias_of_queries_of_all", bias=(1, 1, 70, 1), bias_dtype="bfloat16", softcap=2.5, B=2, T=70, S=90, N=2),
    workload(
        "bias_of_queries_and_pairs",
        bias=(1, 2, 72, 1),
        score_fn=scaled_by_pairs,
        score_args=(draw(1, 72, 200), draw(200)),
        mask=Dense(RANDOM[:1, :, :72, :200]),
        T=72,
        S=200,
        N=2,
        H=128,
    ),
    workload("bias_of_heads_alone", bias=(1, 2, 1, 1), bias_dtype="bfloat16", T=70, S=90, N=2, sinks=(2,)),
]
# Those of which `make test` takes both passes, and those of which it takes the deterministic gradients.
FAST = (
    "full",
    "causal",
    "causal_bottom_right",
    "offset_per_row",
    "window",
    "documents_causal",
    "or_and",
    "wide_odd",
    "three_chunks",
    "ranges_and_trees",
    "alibi_and_sinks",
    "score",
    "t5",
    "bias",
    "bias_of_rows",
    "bias_of_keys",
    "bias_of_queries_of_all",
    "queries",
    "dense",
    "dense_for_keys",
)
FAST_IN_TWO = ("full", "offset_per_row", "window", "bias_of_heads", "diagonals_of_rows", "dense_wide")


def cases(fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(w, id=w.name, marks=() if w.name in fast else pytest.mark.slow) for w in WORKLOADS]


def interpretable(problem: Problem, **changed: dict[str, Any]) -> mosaic_gpu.HopperTiles:
    """The default tiles, with fields of the kernels changed, as `forward={"stages": 3}`."""
    tiles = mosaic_gpu.default_tiles(problem, H200)
    parts = {name: dataclasses.replace(getattr(tiles, name), **fields) for name, fields in changed.items()}
    return dataclasses.replace(tiles, inline_ptx=False, **parts)


@pytest.fixture(autouse=True)
def unpartitioned(monkeypatch):
    """Without `custom_partitioning`, which cannot hold the ordered effects of interpretation (JAX 0.11.2, 0.12.0)."""
    monkeypatch.setattr(vjp, "partitioned", lambda function, arrays, **_: function(*arrays))


HOPPER = dataclasses.replace(
    mosaic_gpu.BACKEND,
    name="hopper_interpreted",
    supports=lambda problem, hardware: None,
    default_tiles=lambda problem, hardware: interpretable(problem),
)


def both_passes(w: Workload, tiles: mosaic_gpu.HopperTiles, *, deterministic: bool = False):
    """The function of operands, d_out and d_lse that gives out, lse and the gradients, by `vjp.kernel_attention`."""
    problem, _ = pose(w, deterministic=deterministic)

    def run(operands, learned, d_out, d_lse):
        def attend(q, k, v, learned):
            terms = operands.terms and terms_with(w, operands.mask, learned)
            own = jax.tree.map(jnp.asarray, Operands(q, k, v, terms, operands.mask))
            return vjp.kernel_attention(HOPPER, problem, tiles, own)

        attended, pull = jax.vjp(attend, *operands[:3], learned)
        *gradients, of_learned = pull(Attended(d_out, d_lse))
        return *attended, *gradients, *(of_learned[name] for name in sorted(of_learned))

    return run


def results_of(w: Workload) -> tuple[str, ...]:
    """The names of what `both_passes` gives."""
    return *RESULTS, *(f"d{name}" for name in sorted(learned_of(w)))


def learned_of(w: Workload) -> dict[str, Any]:
    """All arrays besides q, k and v that have a gradient."""
    inputs = oracle(w)[0]
    return dict(inputs.learned) | ({} if inputs.bias is None else {"bias": inputs.bias})


_ORACLES: dict[str, tuple] = {}


def oracle(w: Workload) -> tuple:
    # By its text, since arrays of a score function have no hash.
    if repr(w) not in _ORACLES:
        inputs = random_inputs(w, seed=3)
        _ORACLES[repr(w)] = inputs, truth_of(w, inputs), plain_of(w, inputs)
    return _ORACLES[repr(w)]


def assert_within_budget(w: Workload, found: tuple, names: tuple[str, ...] = RESULTS) -> None:
    _, truth, plain = oracle(w)
    truth, plain = ({name: each[name] for name in names} for each in (truth, plain))
    results = {
        name: np.asarray(array, np.float64).reshape(truth[name].shape) for name, array in zip(names, found, strict=True)
    }
    rows = measure(results, truth=truth, plain=plain, dtype=w.dtype)
    assert all(row.within for row in rows), [str(row) for row in rows if not row.within]


def operands_of(w: Workload) -> Operands:
    inputs, mask = oracle(w)[0], pose(w)[1]
    terms = terms_with(w, mask, learned_of(w))
    return jax.tree.map(jnp.asarray, Operands(*inputs[:3], terms if jax.tree.leaves(terms) else None, mask))


def assert_right(w: Workload, *, deterministic: bool = False, **changed: dict[str, Any]) -> None:
    """Both passes within the error rule and without races."""
    tiles = interpretable(pose(w)[0], **changed)
    inputs = oracle(w)[0]
    run = both_passes(w, tiles, deterministic=deterministic)
    found = interpret(run, operands_of(w), learned_of(w), inputs.d_out, inputs.d_lse)
    assert_within_budget(w, found, results_of(w))


@pytest.mark.parametrize("workload", cases(FAST))
def test_right_and_without_races(workload):
    assert_right(workload)


@pytest.mark.parametrize("workload", cases(FAST_IN_TWO))
def test_deterministic_gradients_are_right_and_without_races(workload):
    """dk and dv from the fused kernel without its dq, dq from a kernel of its own."""
    assert_right(workload, deterministic=True)


@pytest.mark.parametrize("softcap", [None, pytest.param(2.5, marks=pytest.mark.slow)])
def test_minus_infinity_in_a_bias_masks_its_pair(softcap):
    """Also for a query that has nothing else, and where a whole tile has nothing else."""
    w = workload("infinities", bias=(1, 1, 72, 200), T=72, S=200, H=72, softcap=softcap)
    inputs = random_inputs(w, seed=3)
    bias = np.where(np.tri(72, 200, 60, bool), inputs.bias, -np.inf).astype(np.float32)
    bias[..., 5:9, :] = -np.inf
    inputs = inputs._replace(bias=jnp.asarray(bias))
    tiles = interpretable(pose(w)[0])
    operands = Operands(*inputs[:3], terms_with(w, pose(w)[1], {"bias": inputs.bias}), pose(w)[1])
    found = interpret(both_passes(w, tiles), operands, {"bias": inputs.bias}, inputs.d_out, inputs.d_lse)
    truth = truth_of(w, inputs)
    for name, one in zip((*RESULTS, "dbias"), found, strict=True):
        one, other = np.asarray(one, np.float64), truth[name]
        assert (np.isinf(one) == np.isinf(other)).all(), name
        error = np.abs(np.where(np.isinf(other), 0, one - np.where(np.isinf(other), 0, other))).max()
        assert error <= 3 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(np.where(np.isinf(other), 0, other)).max(), name


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("H", [64, pytest.param(136, marks=pytest.mark.slow)])
def test_dropout_is_that_of_the_reference(H, deterministic):
    """The same pairs are dropped, in both passes: others would show as errors of the size of the result."""
    w = workload("dropout", mask=Causal(offset=40), T=70, S=120, N=2, H=H)
    problem, _ = pose(w, deterministic=deterministic)
    dropout = dropout_of(0.25, jax.random.key(3), B=w.B, N=w.N)
    problem = dataclasses.replace(problem, dropout_rate=dropout.rate)
    plain = operands_of(w)
    operands = plain._replace(terms=ScoreTerms(dropout=jax.tree.map(jnp.asarray, dropout)))
    inputs = oracle(w)[0]

    def run(backend, operands, d_out, d_lse):
        def attend(q, k, v):
            own = operands._replace(q=q, k=k, v=v)
            if backend.backward is None:
                return backend.forward(problem_of(problem, own), None, own)
            return vjp.kernel_attention(backend, problem, interpretable(problem), own)

        attended, pull = jax.vjp(attend, *operands[:3])
        return *attended, *pull(Attended(d_out, d_lse))

    found = interpret(functools.partial(run, HOPPER), operands, inputs.d_out, inputs.d_lse)
    q, k, v = (x.astype(jnp.float32) for x in operands[:3])
    problem = dataclasses.replace(problem, dtype=np.dtype(np.float32))
    wide = inputs.d_out.astype(jnp.float32)
    truth = run(registry.get("reference"), operands._replace(q=q, k=k, v=v), wide, inputs.d_lse)
    for name, one, other in zip(RESULTS, found, truth, strict=True):
        error = np.abs(np.asarray(one, np.float64) - np.asarray(other)).max()
        assert error <= 3 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(other).max(), (name, error)


# Tiles that are no default, each on lengths that visit more tiles than there are stages.
FORWARD = workload("forward", mask=Causal(offset=140), T=70, S=300, N=2)
WIDE_FORWARD = workload("wide_forward", mask=Causal(offset=140), T=70, S=300, H=128)
SHARED_FORWARD = workload(
    "shared_forward", mask=Causal(offset=140) & Lengths(kv=np.array([300, 0], np.int32)), B=2, T=270, S=300, N=2
)
DOCUMENTS_FORWARD = workload("documents_forward", mask=Segments(UNSORTED[:1, :70], UNSORTED[:1]), T=70, S=233, H=40)
DOCUMENTS_COUNTED = workload(
    "documents_counted", mask=Segments(UNSORTED[:1, :200], UNSORTED[:1]), T=200, S=233, N=2, softcap=1.5
)
SINKS_FORWARD = workload("sinks_forward", mask=Causal(offset=-9), sinks=(2,), softcap=1.5, T=70, S=300, N=2)
THREE_HEADS = workload("three_heads", mask=Causal(), T=150, N=3)
BIAS_COUNTED = workload("bias_counted", mask=Causal(offset=20), bias=(1, 2, 200, 233), T=200, S=233, N=2)
FORWARD_TILES = [
    (FORWARD, {"warpgroups": 1, "block_k": 64, "stages": 1}),
    (FORWARD, {"warpgroups": 2, "block_k": 64, "stages": 3, "head_group": 2}),
    (FORWARD, {"warpgroups": 2, "block_k": 64, "stages": 4, "pin_wait": False}),
    (FORWARD, {"warpgroups": 3, "block_k": 64, "stages": 2, "pin_wait": True}),
    (WIDE_FORWARD, {"block_k": 192, "stages": 1}),
    # Each block takes several rows of tiles, of heads with and without keys.
    (SHARED_FORWARD, {"warpgroups": 2, "block_k": 64, "stages": 3, "blocks": 3, "head_group": 2}),
    (SHARED_FORWARD, {"warpgroups": 1, "block_k": 64, "stages": 2, "blocks": 2}),
    (FORWARD, {"warpgroups": 2, "block_k": 64, "stages": 2, "blocks": 132}),
    (SHARED_FORWARD, {"warpgroups": 2, "block_k": 64, "stages": 3, "blocks": 3, "counted": True, "head_group": 2}),
    (SHARED_FORWARD, {"warpgroups": 1, "block_k": 64, "stages": 2, "blocks": 2, "counted": True}),
    (BIAS_COUNTED, {"warpgroups": 2, "block_k": 64, "blocks": 3, "counted": True}),
    (DOCUMENTS_COUNTED, {"warpgroups": 1, "block_k": 64, "blocks": 3, "counted": True, "head_group": 2}),
    # Splits of the keys: more than some rows have tiles, with pieces of columns, and with lists.
    (FORWARD, {"warpgroups": 2, "block_k": 64, "splits": 3}),
    (SHARED_FORWARD, {"warpgroups": 2, "block_k": 64, "splits": 4, "head_group": 2}),
    (DOCUMENTS_FORWARD, {"splits": 2}),
    (SINKS_FORWARD, {"warpgroups": 1, "block_k": 64, "splits": 4}),
    # Three heads, as a device of a mesh may have them, where eight would stand side by side.
    (THREE_HEADS, {"warpgroups": 2, "block_k": 64, "head_group": 8}),
    (WIDE_FORWARD, {"block_k": 256, "stages": 1}),
]
BACKWARD = workload("backward", mask=Causal(offset=-70), T=300, S=70)
GROUPED = workload("grouped", mask=SlidingWindow(90, 20), T=200, S=70, N=2, H=128)
WIDE = workload("wide_backward", mask=Causal(offset=-70), T=200, S=70, H=136, Hv=64)
THREE_CHUNKS = workload("three_chunks_backward", mask=Causal(offset=9), T=264, S=136, N=2, K=1, H=192, Hv=128)
BACKWARD_TILES = [
    (BACKWARD, {"block_q": 64, "block_k": 128, "q_stages": 1, "do_stages": 1, "dk_in_flight": False}),
    (BACKWARD, {"block_q": 64, "block_k": 128, "do_stages": 1, "dk_in_flight": True}),
    (BACKWARD, {"block_q": 128, "block_k": 128, "q_stages": 1, "dk_in_flight": False}),
    (GROUPED, {"block_q": 64, "dk_in_flight": True}),
    pytest.param(BACKWARD, {"block_q": 64, "q_stages": 3}, marks=pytest.mark.slow),
    (THREE_HEADS, {"head_group": 8}),
    (WIDE, {"do_stages": 2}),
    (WIDE, {"q_stages": 1, "dk_in_flight": False}),
    (WIDE, {"q_stages": 3, "dk_in_flight": True}),
    (THREE_CHUNKS, {"q_stages": 3, "dk_in_flight": True}),
]


def described(value: Any) -> str:
    return value.name if isinstance(value, Workload) else "-".join(f"{name}={x}" for name, x in value.items())


@pytest.mark.parametrize(("workload", "changed"), FORWARD_TILES, ids=described)
def test_forward_tiles(workload, changed):
    problem, _ = pose(workload)
    tiles = interpretable(problem, forward=changed)

    def run(operands):
        return mosaic_gpu.forward(problem, tiles, operands)

    assert_within_budget(workload, tuple(interpret(run, operands_of(workload))), RESULTS[:2])


@pytest.mark.parametrize(("workload", "changed"), BACKWARD_TILES, ids=described)
def test_backward_tiles(workload, changed):
    problem, _ = pose(workload)
    tiles = interpretable(problem, backward=changed)
    inputs, truth, _ = oracle(workload)

    def run(operands, attended, cotangents):
        return mosaic_gpu.backward(problem, tiles, operands, attended, cotangents)[:3]

    attended = Attended(*(jnp.asarray(truth[name], jnp.float32) for name in ("out", "lse")))
    found = interpret(run, operands_of(workload), attended, Attended(inputs.d_out, inputs.d_lse))
    assert_within_budget(workload, tuple(found), RESULTS[2:])


# What nobody sees -----------------------------------------------------------------------------------------------------

DEAD_MASKS = {
    "lengths": Lengths(q=int32(20, 37), kv=int32(50, 0)),
    "segments": Segments(
        np.repeat([[1, 2, 0]], [17, 10, 10], 1), np.repeat([[2, 3, 1, 0]], [30, 21, 30, 60], 1), padding_id=0
    ),
    "window": SlidingWindow(4, 1, offset=-7),
}


# The interpreter multiplies by numpy, which warns of what the kernels then leave out.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        ("segments", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("lengths", False), ("window", False))),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in DEAD_MASKS),
    ],
)
def test_what_dead_keys_and_queries_hold_has_no_influence(name, deterministic):
    """Bit-equal results whatever stands in keys that nobody sees and queries that see nobody; their gradients are 0."""
    w = workload(name, mask=DEAD_MASKS[name], B=2 if name == "lengths" else 1, T=37, S=141, H=16, Hv=24)
    problem, mask = pose(w)
    b, t, s = np.ix_(range(w.B), range(w.T), range(w.S))
    allowed = np.broadcast_to(np.asarray(mask.allowed(t, s, b=b)), (w.B, w.T, w.S))
    dead_key, dead_query = ~allowed.any(1), ~allowed.any(2)
    assert dead_key.any() and dead_query.any()
    q, k, v, _, d_out, d_lse, _ = random_inputs(w)
    run = both_passes(w, interpretable(problem), deterministic=deterministic)

    def filled(array, dead, filling):
        return jnp.where(dead[..., None, None], jnp.asarray(filling, array.dtype), array)

    def results(filling):
        dead_row = filled(d_lse.swapaxes(1, 2)[..., None], dead_query, filling)[..., 0].swapaxes(1, 2)
        arrays = filled(q, dead_query, filling), filled(k, dead_key, filling), filled(v, dead_key, filling)
        operands = Operands(*arrays, None, jax.tree.map(jnp.asarray, mask))
        return interpret(run, operands, {}, filled(d_out, dead_query, filling), dead_row)

    clean = results(0.0)
    out, lse, dq, dk, dv = map(np.asarray, clean)
    assert np.all(out[dead_query] == 0) and np.all(np.swapaxes(lse, 1, 2)[dead_query] == -np.inf)
    assert np.all(dq[dead_query] == 0) and np.all(dk[dead_key] == 0) and np.all(dv[dead_key] == 0)
    for filling in (np.nan, np.inf, 1e4):
        for result, found, wanted in zip(RESULTS, results(filling), clean):
            np.testing.assert_array_equal(found, wanted, err_msg=f"{result} with {filling} in dead places")


def scaled_by_both(s, b, n, q, k, x, y):
    return s * x[b, q] * y[b, k]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("along", ["queries", "keys"])
def test_what_the_logits_have_for_dead_tokens_has_no_influence(along):
    sizes = {"T": 37, "S": 141, "N": 2, "H": 16}
    bias = (1, 1, 37, 1) if along == "queries" else (1, 1, 1, 141)
    terms = {"bias": bias, "softcap": 2.0, "score_fn": scaled_by_both}
    arrays = draw(1, 37), draw(1, 141)
    w = workload("dead_values", mask=DEAD_MASKS["segments"], score_args=arrays, **terms, **sizes)
    problem, mask = pose(w)
    allowed = np.asarray(mask.allowed(*np.ix_(range(w.T), range(w.S)), b=0))
    dead_query, dead_key = ~allowed.any(1), ~allowed.any(0)
    assert 0 < dead_query.sum() < w.T and 0 < dead_key.sum() < w.S
    inputs, run = random_inputs(w), both_passes(w, interpretable(problem))
    of_bias = dead_query[:, None] if along == "queries" else dead_key

    def results(filling):
        learned = {
            "bias": jnp.where(of_bias, filling, inputs.bias),
            "score_arg_0": jnp.where(dead_query, filling, arrays[0]),
            "score_arg_1": jnp.where(dead_key, filling, arrays[1]),
        }
        operands = Operands(*inputs[:3], terms_with(w, mask, learned), jax.tree.map(jnp.asarray, mask))
        return interpret(run, operands, learned, inputs.d_out, inputs.d_lse)

    clean = results(0.0)
    names = *RESULTS, "dbias", "dscore_arg_0", "dscore_arg_1"
    dead = zip(clean[5:], (np.broadcast_to(of_bias, bias), dead_query[None], dead_key[None]), strict=True)
    assert all(np.all(np.asarray(x)[own] == 0) for x, own in dead) and all(np.any(np.asarray(x) != 0) for x in clean)
    for filling in (np.nan, np.inf, 1e4):
        for name, found, wanted in zip(names, results(filling), clean, strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=f"{name} with {filling} in dead places")


# The whole path -------------------------------------------------------------------------------------------------------


def loss(q, k, v, *, backend):
    out, lse = flash_attention_with_lse(q, k, v, mask=Causal(offset=3), backend=backend)
    weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return (out.astype(jnp.float32) * weight).sum() + jnp.sin(lse).sum()


def vmap_of_gradients(q, k, v, *, backend):
    return jax.vmap(jax.value_and_grad(functools.partial(loss, backend=backend), (0, 1, 2)))(q, k, v)


def scan(q, k, v, *, backend):
    """The carry is what the call gave before."""

    def step(carry, keys):
        return flash_attention_with_lse(carry, *keys, mask=Causal(), backend=backend).out, None

    return jax.lax.scan(step, q[0], (k, v))[0]


@pytest.mark.slow
@pytest.mark.parametrize("transformed", [vmap_of_gradients, scan])
def test_transformations_of_the_public_call(transformed):
    """jit, custom_vjp, the fold of a mapped axis into the batch. One rounding may fall otherwise than in float32."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 1, 40, heads, 64)), jnp.bfloat16) for heads in (2, 1, 1))
    with registry.registered(HOPPER), interpreted(timeout_s=240):
        found = jax.block_until_ready(jax.jit(functools.partial(transformed, backend=HOPPER.name))(q, k, v))
    wanted = jax.jit(functools.partial(transformed, backend="reference"))(q, k, v)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(
            one, other, rtol=0, atol=2 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(other).max()
        )


@pytest.mark.parametrize(("names", "times"), [(jflash.RESIDUAL_NAMES, 1), ((), 2)])
def test_a_policy_that_saves_the_published_names_runs_the_forward_kernel_once(names, times):
    """Counted in the jaxpr of a training step; without the policy it runs again, so the count can tell."""
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    block = jax.checkpoint(
        functools.partial(loss, backend="mosaic_gpu"), policy=jax.checkpoint_policies.save_only_these_names(*names)
    )
    with jflash.use_options(hardware="h200"):
        jaxpr = jax.make_jaxpr(jax.grad(block, (0, 1, 2)))(x, x, x).jaxpr

    def kernels(name):
        return count(jaxpr, lambda equation: equation.params.get("name") == name)

    assert kernels("jflash_forward_sm90") == times
    assert kernels("jflash_backward_sm90") == 1


# What interpretation cannot take --------------------------------------------------------------------------------------

# What each switch replaces, in the words of the jaxpr: the vote of the forward kernel, the exchange of the backward.
SWITCHES = {
    "inline_ptx": {
        (("reduce_max", "gt"), ("inline_mgpu", "ne")),
        (("wait_smem_to_gmem", "commit_smem", "barrier_arrive", "barrier_wait"), ("inline_mgpu", "inline_mgpu")),
    }
}


def equations(jaxpr: Any) -> list[tuple[str, str]]:
    """The name and the types of the results of each equation, in all that is nested in it."""
    found = []
    for equation in jaxpr.eqns:
        # JAX 0.11 ends some names in _p.
        found.append((equation.primitive.name.removesuffix("_p"), str([var.aval for var in equation.outvars])))
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += [("(", ""), *equations(inner), (")", "")]
    return found


def test_all_switches_are_known():
    kernels = {"forward", "backward", "backward_dq"}
    assert {field.name for field in dataclasses.fields(mosaic_gpu.HopperTiles)} == kernels | set(SWITCHES)


@pytest.mark.parametrize("switch", SWITCHES)
def test_with_a_switch_off_nothing_else_differs(switch):
    """So what is interpreted here is what runs on a GPU."""
    found = set()
    for H, deterministic in ((64, False), (128, True), (128, False), (256, False)):
        problem, _ = pose(workload("", mask=Causal(), T=256, H=H), deterministic=deterministic)
        tiles = interpretable(problem)
        for kernel, statistics in ((mosaic_gpu.forward, ()), (mosaic_gpu.backward, backward_shapes(problem))):
            off, on = (
                equations(
                    jax.make_jaxpr(functools.partial(kernel, problem, each))(operand_shapes(problem), *statistics)
                )
                for each in (dataclasses.replace(tiles, **{switch: value}) for value in (False, True))
            )
            for kind, *ends in difflib.SequenceMatcher(None, off, on, autojunk=False).get_opcodes():
                if kind != "equal":
                    parts = off[ends[0] : ends[1]], on[ends[2] : ends[3]]
                    found.add(tuple(tuple(name for name, _ in part) for part in parts))
    assert found == SWITCHES[switch]
