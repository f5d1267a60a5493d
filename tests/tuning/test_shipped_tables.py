"""Every entry of the shipped tables: it is for the call that it was measured on, and its kernel lowers for CUDA."""

import dataclasses
import functools

import jax
import pytest

from jflash import hardware
from jflash.backends import registry
from jflash.testing.problems import backward_shapes, operand_shapes, pose
from jflash.tuning.key import Key
from jflash.tuning.table import DATA, Entry, device_name, read
from jflash.tuning.workloads import Call

BACKEND = registry.get("mosaic_gpu")
H200 = hardware.named("h200")
# Measured nowhere: they show that what is done to each entry can be done, also while the tables are empty.
MADE_UP = Call(B=2, T=256, S=256, N=4, K=2, H=64, Hv=64, causal=True)


def made_up(kernel: str) -> Entry:
    problem, _ = pose(MADE_UP.workload, deterministic=kernel == "backward_dq")
    candidates = BACKEND.candidate_tiles(problem, H200, BACKEND.default_tiles(problem, H200), kernel)
    measured = {"call": dataclasses.asdict(MADE_UP)}
    return Entry(key=Key.of(problem, kernel), tiles=getattr(candidates[0], kernel), measured=measured)


TABLES = [read(file, BACKEND, H200) for file in sorted(DATA.glob("*.json"))]
ENTRIES = [made_up(kernel) for kernel in ("forward", "backward", "backward_dq")]
ENTRIES += [entry for table in TABLES for entry in table.entries.values()]


def test_a_table_is_called_as_its_device():
    assert [table.file.stem for table in TABLES] == [table.device for table in TABLES]
    assert device_name(H200) in {table.device for table in TABLES}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.key.kernel}-{Call(**entry.measured['call'])}")
def test_entry(entry):
    kernel, call = entry.key.kernel, Call(**entry.measured["call"])
    problem, _ = pose(call.workload, deterministic=kernel == "backward_dq")
    assert Key.of(problem, kernel) == entry.key
    formula = BACKEND.default_tiles(problem, H200)
    assert getattr(formula, kernel) != entry.tiles, "an entry that says what the formula says"
    tiles = dataclasses.replace(formula, **{kernel: entry.tiles})
    run, more = (BACKEND.forward, ()) if kernel == "forward" else (BACKEND.backward, backward_shapes(problem))
    traced = jax.jit(functools.partial(run, problem, tiles)).trace(operand_shapes(problem), *more)
    name = "jflash_" + kernel.removesuffix("_dq")
    assert name in traced.lower(lowering_platforms=("cuda",)).as_text()
