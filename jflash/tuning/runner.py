"""One workload on the present device: compiles with given tiles, holds results to float64, times kernels."""

import contextlib
import dataclasses
import faulthandler
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflash.backends.protocol import Backend, Operands
from jflash.numerics.online_softmax import Attended
from jflash.testing.budget import Results, measure, plain_of, truth_of
from jflash.testing.inputs import Inputs, random_inputs
from jflash.testing.problems import pose
from jflash.testing.workloads import Workload
from jflash.tuning.search import Kernel

# An H200 lowers its clock under load within tens of milliseconds: of so many calls the first half counts.
_CALLS = 6
# How many bounds of the error rule two results may differ by: one for the error of each, and twice that since the bound
# is of some heads, and the largest of all are larger.
_BETWEEN = 4


@contextlib.contextmanager
def ended_if_it_hangs(seconds: float = 60.0) -> Iterator[None]:
    """Ends the process, with a traceback, where a kernel does not end: nothing else would free the device."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Program(NamedTuple):
    """A compiled pass: called with `arguments`, its results have these names."""

    compiled: Callable[..., Any]
    arguments: tuple[Any, ...]
    names: tuple[str, ...]


def run(program: Program) -> tuple[jax.Array, ...]:
    with ended_if_it_hangs():
        return jax.block_until_ready(program.compiled(*program.arguments))


@jax.jit
def _largest_difference(one: jax.Array, other: jax.Array) -> jax.Array:
    """NaN where one of them has one; infinities of the same sign are equal."""
    return jnp.where(one == other, 0, jnp.abs(one.astype(np.float32) - other.astype(np.float32))).max()


class Runner:
    """Runs the passes of a workload with any tiles of a backend.

    The results of the first and the last heads are compared with float64 by the error rule, whose truth is computed
    once for all kernels and tiles; those of the others with the results of the formula's tiles.

    Args:
      seed: of the random inputs.
      idle_s: how long the device rests before each turn of timing.
    """

    def __init__(self, workload: Workload, backend: Backend, *, seed: int = 0, idle_s: float = 0.2):
        self.workload, self.backend, self._idle_s = workload, backend, idle_s
        self._inputs = random_inputs(workload, seed=seed)
        _, self._mask = pose(workload)
        self._heads = _first_and_last(workload)
        self._attended: dict[Any, Attended] = {}

    def kernel(self, kernel: str, formula: Any) -> Kernel:
        """How tiles of this kernel are tried; other kernels have those of the formula."""

        @functools.cache
        def of_formula() -> tuple[jax.Array, ...]:
            return run(self.compile(kernel, formula, formula))

        return Kernel(
            compile=functools.partial(self.compile, kernel, formula),
            fault=lambda program: self.fault(program, of_formula()),
            time_ms=self.time_ms,
        )

    def compile(self, kernel: str, formula: Any, tiles: Any) -> Program:
        """The pass that a kernel belongs to."""
        problem, _ = pose(self.workload, deterministic=kernel == "backward_dq")
        i = self._inputs
        operands = Operands(i.q, i.k, i.v, None, self._mask)
        if kernel == "forward":
            function = jax.jit(functools.partial(self.backend.forward, problem, tiles))
            return Program(function.lower(operands).compile(), (operands,), ("out", "lse"))
        if formula not in self._attended:
            self._attended[formula] = jax.jit(functools.partial(self.backend.forward, problem, formula))(operands)
        arguments = operands, self._attended[formula], Attended(i.d_out, i.d_lse)
        function = jax.jit(functools.partial(self.backend.backward, problem, tiles))
        return Program(function.lower(*arguments).compile(), arguments, ("dq", "dk", "dv"))

    def fault(self, program: Program, of_formula: tuple[jax.Array, ...]) -> str | None:
        """Which results are beyond the error rule or, of other heads, far from the formula's; or None."""
        results = run(program)
        found = {name: _of_heads(x, name, self._heads).astype(np.float64) for name, x in zip(program.names, results)}
        truth, plain = ({name: own[name] for name in found} for own in self._expected)
        rows = measure(found, truth=truth, plain=plain, dtype=self.workload.dtype)
        if broken := [str(row) for row in rows if not row.within]:
            return "; ".join(broken)
        bounds = {row.name: row.bound for row in rows if row.statistic == "max"}
        for name, result, other in zip(program.names, results, of_formula):
            difference, most = float(_largest_difference(result, other)), _BETWEEN * bounds[name]
            if not difference <= most:
                return f"{name} of some head is {difference:.3g} off the formula's, more than {most:.3g}"
        return None

    def time_ms(self, program: Program) -> float:
        """The median time of all kernels of a call, by CUPTI."""
        # It needs a GPU.
        from jax.experimental.mosaic.gpu import profiler

        run(program)
        with ended_if_it_hangs():
            time.sleep(self._idle_s)
            cupti = profiler.Cupti(finalize=False)
            _, times = cupti.measure(program.compiled, iterations=_CALLS)(*program.arguments)
        if not times:
            raise RuntimeError("CUPTI saw no kernel")
        return statistics.median(times[: (_CALLS + 1) // 2])

    @functools.cached_property
    def _expected(self) -> tuple[Results, Results]:
        """The truth, and plain attention in the same precision, of the heads that are compared."""
        w, i = self.workload, self._inputs
        own = {
            name: _of_heads(array, name, self._heads)
            for name, array in (("q", i.q), ("k", i.k), ("v", i.v), ("out", i.d_out), ("lse", i.d_lse))
        }
        few = dataclasses.replace(w, B=len(self._heads), N=w.N // w.K, K=1)
        inputs = Inputs(own["q"], own["k"], own["v"], None, own["out"], own["lse"], {})
        return truth_of(few, inputs), plain_of(few, inputs)


def _first_and_last(workload: Workload) -> list[tuple[int, slice, slice]]:
    """Batch row, query heads and key/value head of the first and the last group of heads, once where they are one."""
    w = workload
    group = w.N // w.K
    first, last = (0, 0), (w.B - 1, w.K - 1)
    return [(b, slice(k * group, (k + 1) * group), slice(k, k + 1)) for b, k in dict.fromkeys((first, last))]


def _of_heads(array: jax.Array, name: str, heads: list[tuple[int, slice, slice]]) -> np.ndarray:
    """What an array has of some heads, each as a batch row; `name` is that of an operand or a result."""
    parts = []
    for b, queries, keys in heads:
        if name == "lse":
            parts.append(array[b, queries])
        else:
            parts.append(array[b, :, keys if name.removeprefix("d") in ("k", "v") else queries])
    return np.stack(parts)
