"""What `jflash tune` tries of the Hopper kernels: near the formula, different, and fit for the device."""

import dataclasses
import functools

import pytest

from jflash import hardware
from jflash.backends import mosaic_gpu
from jflash.backends.mosaic_gpu import candidates
from jflash.testing.problems import pose
from jflash.tuning.workloads import Call, shipped

H200 = hardware.named("h200")


@functools.cache
def neighbours(call: Call, kernel: str):
    problem, _ = pose(call.workload, deterministic=kernel == "backward_dq")
    tiles = mosaic_gpu.default_tiles(problem, H200)
    return problem, tiles, mosaic_gpu.BACKEND.candidate_tiles(problem, H200, tiles, kernel)


CALLS = {
    "64": Call(B=4, T=4096, S=4096, N=32, K=32, H=64, Hv=64, causal=True),
    "192_128": Call(B=2, T=1001, S=1001, N=16, K=4, H=192, Hv=128),
    "256": Call(B=16, T=1024, S=1024, N=8, K=8, H=256, Hv=256, causal=True),
}


@pytest.mark.parametrize("kernel", ["forward", "backward", "backward_dq"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "256" else pytest.mark.slow) for name in CALLS]
)
def test_candidates_differ_in_one_or_two_fields_of_their_kernel(kernel, name):
    _, tiles, found = neighbours(CALLS[name], kernel)
    assert 3 <= len(found) <= 24 and len(set(found)) == len(found)
    for candidate in found:
        own, formula = (dataclasses.asdict(getattr(x, kernel)) for x in (candidate, tiles))
        assert 1 <= sum(own[field] != formula[field] for field in own) <= 2
        assert dataclasses.replace(candidate, **{kernel: getattr(tiles, kernel)}) == tiles


def test_forward_candidates_at_64():
    """By hand: shared memory of 227 KiB, 128 of 160 registers with three warpgroups and 128 keys."""
    _, tiles, found = neighbours(CALLS["64"], "forward")
    formula = dataclasses.asdict(tiles.forward)
    changes = [{k: v for k, v in dataclasses.asdict(x.forward).items() if v != formula[k]} for x in found]
    assert formula == {
        "warpgroups": 3, "block_k": 128, "stages": 2, "pin_wait": True, "head_group": 16, "blocks": 132,
        "counted": True, "splits": 1,
    }  # fmt: skip
    assert {"warpgroups": 2} in changes and {"warpgroups": 2, "block_k": 192} in changes
    assert {"block_k": 192} not in changes, "144 registers of accumulators of 160"
    assert {"head_group": 64} in changes and {"head_group": 4} in changes
    assert {"blocks": None, "counted": False} in changes and {"counted": False} in changes
    assert {"pin_wait": False} in changes and {"splits": 2} not in changes, "blocks that share rows split no keys"


def test_what_does_not_fit_is_no_candidate():
    problem, tiles, found = neighbours(CALLS["256"], "forward")
    for changes in ({"stages": 3}, {"block_k": 128}, {"warpgroups": 3}, {"blocks": 132}):
        changed = dataclasses.replace(tiles, forward=dataclasses.replace(tiles.forward, **changes))
        assert not candidates.fits(problem, changed, "forward") and changed not in found
    assert candidates.fits(problem, tiles, "forward")


@pytest.mark.parametrize(
    "call",
    [*CALLS.values(), *(pytest.param(call, marks=pytest.mark.slow) for call in shipped())],
    ids=str,
)
def test_the_formula_fits_by_the_rule_of_the_candidates(call):
    for kernel in ("forward", "backward", "backward_dq"):
        problem, _ = pose(call.workload, deterministic=kernel == "backward_dq")
        assert candidates.fits(problem, mosaic_gpu.default_tiles(problem, H200), kernel), kernel


def test_other_errors_are_not_taken_for_tiles_that_do_not_fit(monkeypatch):
    problem, tiles, _ = neighbours(CALLS["256"], "backward_dq")
    monkeypatch.setattr(candidates, "backward", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        candidates.fits(problem, tiles, "backward")


def test_the_calls_of_the_shipped_tables():
    calls = list(shipped())
    assert len(set(map(str, calls))) == len(calls) == 28
    assert all(call.B * call.T == 16384 and call.N % call.K == 0 for call in calls)
    assert {(call.H, call.Hv) for call in calls} == {(64, 64), (128, 128), (256, 256), (192, 128)}
