"""The dq kernel for Hopper: numbers and races in Pallas' interpreter, and that its tiles lower for CUDA."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_interpreter import interpret

from jflash import hardware
from jflash.backends.mosaic_gpu.sm90.backward_dq import dq
from jflash.backends.mosaic_gpu.tiles import DqTiles, HopperTiles, default_tiles
from jflash.backends.protocol import Operands
from jflash.masks import Causal, Full, Lengths, Segments, SlidingWindow
from jflash.masks.live import zero_dead_keys
from jflash.problem import Problem
from jflash.testing.budget import measure, plain_of, truth_of
from jflash.testing.inputs import random_inputs
from jflash.testing.problems import pose
from jflash.testing.workloads import Workload

H200 = hardware.named("h200")
_IDS = np.repeat([[3, 1, 0, 2]], 50, axis=1).astype(np.int32)
SEGMENTS = Segments(np.concatenate([_IDS, _IDS[:, ::-1]]), padding_id=0)

WORKLOADS = [
    Workload(name=name, dtype="bfloat16", mask=mask, **({"B": 2, "N": 1, "K": 1} | sizes))
    for name, mask, sizes in (
        ("full", Full(), {"T": 200, "N": 2, "H": 64}),
        ("causal", Causal(), {"T": 200, "N": 2, "H": 64}),
        ("segments", SEGMENTS, {"T": 200, "N": 2, "H": 128}),
        ("segments_causal", SEGMENTS & Causal(), {"T": 200, "H": 64, "Hv": 40}),
        ("dead_rows", Causal(offset=np.array([-70, -300], np.int32)), {"T": 200, "S": 203, "H": 40, "Hv": 72}),
        ("lengths", Lengths(q=np.array([5, 130]), kv=np.array([0, 200])), {"T": 133, "S": 260, "H": 64}),
        ("or", Causal(offset=203) | Lengths(kv=np.array([7])), {"B": 1, "T": 130, "S": 333, "H": 192, "Hv": 128}),
        ("widest", SlidingWindow(60, 20), {"B": 1, "T": 130, "S": 200, "H": 256}),
    )
] + [Workload(name="float16", dtype="float16", B=1, T=127, S=129, N=1, K=1, H=72, Hv=200)]


def tiles_of(problem: Problem, **changed: Any) -> HopperTiles:
    tiles = default_tiles(problem, H200)
    return dataclasses.replace(tiles, inline_ptx=False, backward_dq=dataclasses.replace(tiles.backward_dq, **changed))


def assert_right(w: Workload, **changed: Any) -> None:
    """dq within the budget; NaN wherever nobody looks, but for q and d_out of queries that see no key."""
    problem, mask = pose(w, deterministic=True)
    inputs = random_inputs(w)
    truth, plain = truth_of(w, inputs), plain_of(w, inputs)
    lse, out = truth["lse"], truth["out"]
    dead = lse == -np.inf
    delta = np.einsum("btnd,btnd->bnt", np.asarray(inputs.d_out, np.float64), out) - np.asarray(inputs.d_lse)
    rows = np.stack([np.where(dead, -np.inf, lse / -problem.scale), np.where(dead, 0, -delta)], 2)
    padding = -w.T % 128
    rows = np.concatenate([rows, np.broadcast_to([[-np.inf], [0.0]], (w.B, w.N, 2, padding))], 3).astype(np.float32)

    def cleaned(x: jax.Array) -> jax.Array:
        return jnp.where(dead.swapaxes(1, 2)[..., None], 0, x)

    sizes = w.B, w.N, w.T, w.S
    b, n, q, k = np.ix_(*map(np.arange, sizes))
    dead_keys = ~np.broadcast_to(np.asarray(mask.allowed(q, k, b=b, n=n)), sizes).any((1, 2))

    def poisoned(x: jax.Array) -> jax.Array:
        return jnp.where(dead_keys[..., None, None], jnp.nan, x)

    def run(q, k, v, mask, rows, d_out):
        k, v = zero_dead_keys(k, v, mask=mask, T=w.T, S=w.S)
        return dq(problem, tiles_of(problem, **changed), Operands(q, k, v, None, mask), tuple(rows), d_out)

    found = interpret(
        run,
        cleaned(inputs.q),
        poisoned(inputs.k),
        poisoned(inputs.v),
        jax.tree.map(jnp.asarray, mask),
        [jnp.asarray(rows[:, :, which]) for which in range(2)],
        cleaned(inputs.d_out),
    )
    found = np.asarray(found, np.float64)
    assert (found[dead.swapaxes(1, 2)] == 0).all()
    for row in measure({"dq": found}, truth={"dq": truth["dq"]}, plain={"dq": plain["dq"]}, dtype=w.dtype):
        assert row.within, row


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_right_and_without_races(workload):
    assert_right(workload)


@pytest.mark.parametrize(
    "changed",
    [
        {"k_stages": 1, "v_stages": 1},
        {"k_stages": 2, "v_stages": 1},
        {"k_stages": 1, "v_stages": 3},
        {"block_k": 64, "k_stages": 4},
    ],
    ids=str,
)
def test_any_number_of_stages(changed):
    assert_right(Workload(name="stages", dtype="bfloat16", B=1, T=128, S=600, N=1, K=1, H=64), **changed)


@pytest.mark.parametrize(("N", "K", "head_group"), [(4, 2, 2), (3, 1, 8)])
def test_head_groups(N, K, head_group):
    w = Workload(name="heads", dtype="bfloat16", B=1, T=150, S=100, N=N, K=K, H=64, mask=Causal())
    assert_right(w, head_group=head_group)


@pytest.mark.parametrize(("H", "Hv"), [(8, 8), (80, 80), (192, 128), (72, 200), (256, 192), (256, 256)])
@pytest.mark.parametrize(
    "mask",
    [Full(), SEGMENTS & Causal(), Causal() | Lengths(kv=np.array([5, 100]))],
    ids=["full", "segments_causal", "or"],
)
def test_default_tiles_lower(H, Hv, mask):
    problem, bound = pose(Workload(name="", dtype="bfloat16", B=2, T=200, S=200, N=4, K=2, H=H, Hv=Hv, mask=mask))
    B, T, S, N, K = problem.B, problem.T, problem.S, problem.N, problem.K
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv)
    arrays = [jax.ShapeDtypeStruct(shape, problem.dtype) for shape in shapes]
    rows = (jax.ShapeDtypeStruct((B, N, 256), jnp.float32),) * 2

    def run(q, k, v, d_out, rows, mask):
        return dq(problem, default_tiles(problem, H200), Operands(q, k, v, None, mask), rows, d_out)

    traced = jax.jit(run).trace(*arrays, rows, jax.tree.map(jnp.asarray, bound))
    assert "jflash_backward_dq_sm90" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("wrong", [{"block_k": 96}, {"block_k": 64, "k_stages": 0}, {"block_k": 64, "head_group": 3}])
def test_tiles_refuse_what_the_kernel_cannot(wrong):
    name = list(wrong)[-1]
    with pytest.raises(ValueError, match=f"{name}={wrong[name]}"):
        DqTiles(**wrong)
