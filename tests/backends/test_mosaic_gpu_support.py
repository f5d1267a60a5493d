"""Which score functions the Hopper kernels take, as it is known on a machine without a GPU, and why not the others."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jflash import hardware
from jflash.backends import mosaic_gpu
from jflash.testing.problems import pose
from jflash.testing.workloads import CONTRACT, Workload

T, S, N = 37, 101, 6


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


T5 = next(w for w in CONTRACT if w.name == "score_t5")

# For each function its arrays, and the reason for which it is refused.
FUNCTIONS = {
    "head": (lambda s, b, n, q, k, x: s * x[n], (ones(N),), None),
    "key": (lambda s, b, n, q, k, x: s + x[b, k], (ones(2, S),), None),
    "diagonal": (lambda s, b, n, q, k, x: s * x[q - k + S], (ones(T + S),), None),
    "t5": (T5.score_fn, T5.score_args, None),
    "whole_numbers": (lambda s, b, n, q, k, x: jnp.where(x[abs(q - k)] > n, s, -s), (ones(S, dtype=np.int32),), None),
    "pair": (lambda s, b, n, q, k, x, w: s + x[q, k] * w[n], (ones(T, S), ones(N)), None),
    "pair_of_each": (lambda s, b, n, q, k, x: s * x[b, n, q, k], (ones(2, N, T, S),), None),
    "query": (lambda s, b, n, q, k, x: s + x[q], (ones(T),), None),
    "sum_of_indices": (
        lambda s, b, n, q, k, x: s + x[q + k],
        (ones(T + S),),
        r"an array of all pairs where it needs a number for each, and .*float32\[138\].* has smaller ones",
    ),
    "tables_beside_tables": (
        lambda s, b, n, q, k, x, y, z: s + jnp.tanh(s * x[q - k + S]) * y[n, q - k + S] + z[b, q - k + S],
        (ones(T + S), ones(N, T + S), ones(2, T + S)),
        r"no room for 12 bytes for each pair of query and key, .* beside H=256, Hv=256",
    ),
}


def problem_of(name, **changed):
    fn, args, _ = FUNCTIONS[name]
    sizes = {"B": 2, "T": T, "S": S, "N": N, "K": 3, "H": 64, "dtype": "bfloat16"} | changed
    return pose(Workload(name="", score_fn=fn, score_args=args, **sizes))[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_score_functions(name, dtype):
    reason = FUNCTIONS[name][-1]
    problem = problem_of(name, dtype=dtype, H=256 if reason and "H=256" in reason else 64)
    found = mosaic_gpu.BACKEND.supports(problem, hardware.named("h200"))
    if reason is None:
        assert found is None
    else:
        assert re.search(reason, found), found


def test_notes_tell_what_is_copied():
    for name, wanted in (("t5", "bands of 64 rows by T + S"), ("pair", "for each pair is copied"), ("head", None)):
        notes = mosaic_gpu.BACKEND.notes(problem_of(name))
        assert len(notes) == (wanted is not None) and all(wanted in note for note in notes), notes
