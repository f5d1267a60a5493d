"""Kernel times of jflash and its peers on one GPU, in one process: `python benchmarks/kernel_times.py > lines.jsonl`.

Time is the sum over all kernels of a call, by CUPTI. The implementations take turns, `--rounds` times, the device idle
for the same time before each; medians are of the first half of every turn's calls, since an H200 lowers its clock under
load within tens of milliseconds. With `--load-s` each is measured once more after so many seconds of its own load. The
backward pass is timed alone, from what the forward pass saved.

Outputs and gradients are compared with those of jflash before anything is timed. A peer that is not installed, does not
take a row or gives another result is named with the reason; where no peer agrees with jflash, nothing is measured.

TFLOP/s: 2 · B · N · pairs · (H + Hv) operations forward, where pairs are T · S, half of it for causal, and T times its
keys for a window; backward 2.5 times that.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import peers
import suites
from jax.experimental.mosaic.gpu import profiler
from machine import commit_here, driver, versions
from records import Row

import jflash
from jflash.cli.measurement import circumstances
from jflash.masks import SlidingWindow

_BACKWARD_SHARE = 2.5
# As 16-bit results of different orders of summation may differ, for random normal inputs.
_AGREE = 0.05


def jflash_attention(row: Row, q, k, v):
    mask = {"causal": row.causal} if row.window is None else {"mask": SlidingWindow(row.window, 0)}
    return jflash.flash_attention(q, k, v, **mask, deterministic=row.deterministic, backend="mosaic_gpu")


IMPLEMENTATIONS: dict[str, Callable] = {
    "jflash": jflash_attention,
    "cudnn": peers.cudnn,
    "tokamax": peers.tokamax,
    "flash_attn3_jax": peers.flash_attn3,
    "xla": peers.xla,
}
# XLA's matrices of T x S, of all rows at once, do not fit the device: by `--peers` for short lengths.
_BY_DEFAULT = [name for name in IMPLEMENTATIONS if name != "xla"]


class Timed:
    """One implementation of one row, compiled: forward, and backward from what forward saved."""

    def __init__(self, attention: Callable, row: Row, arrays: tuple):
        q, k, v, d_out = arrays
        forward = functools.partial(attention, row)
        out, pull = jax.jit(lambda q, k, v: jax.vjp(forward, q, k, v))(q, k, v)
        self._calls = {
            "forward": (jax.jit(lambda q, k, v: forward(q, k, v)).lower(q, k, v).compile(), (q, k, v)),
            "backward": (jax.jit(lambda pull, d_out: pull(d_out)).lower(pull, d_out).compile(), (pull, d_out)),
        }
        self.results = out, *self._run("backward")

    def _run(self, which: str) -> tuple:
        compiled, arrays = self._calls[which]
        return jax.block_until_ready(compiled(*arrays))

    def times_ms(self, which: str, *, calls: int, idle_s: float = 0.0, load_s: float = 0.0) -> list[float]:
        compiled, arrays = self._calls[which]
        self._run(which)
        time.sleep(idle_s)
        stop = time.perf_counter() + load_s
        while time.perf_counter() < stop:
            self._run(which)
        _, times = profiler.Cupti(finalize=False).measure(compiled, aggregate=False, iterations=calls)(*arrays)
        return [sum(ms for _, ms in kernels) for kernels in times]


def prepare(row: Row, names: list[str]) -> tuple[dict[str, Timed], list[dict]]:
    """The implementations of a row, compiled and compared, and a line for each that does not run."""
    shapes = (row.B, row.T, row.N, row.H), (row.B, row.S, row.K, row.H), (row.B, row.S, row.K, row.Hv)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = tuple(
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, (*shapes, (*shapes[0][:3], row.Hv)))
    )
    timed, lines = {}, []
    for name in names:
        try:
            timed[name] = Timed(IMPLEMENTATIONS[name], row, arrays)
        except Exception as error:  # Peers have errors of many kinds; each is named in the record.
            if name == "jflash":
                raise
            reason = f"{type(error).__name__}: {error}"[:300]
            lines.append({**dataclasses.asdict(row), "implementation": name, "not_run": reason})
    for name in [name for name in timed if name != "jflash"]:
        differs = _difference(timed["jflash"].results, timed[name].results)
        if differs is not None:
            del timed[name]
            lines.append({**dataclasses.asdict(row), "implementation": name, "not_run": differs})
    if len(timed) == 1 and any("differs" in line["not_run"] for line in lines):
        raise SystemExit(f"no peer agrees with jflash on {row}: {lines}")
    return timed, lines


def _difference(ours: tuple, theirs: tuple) -> str | None:
    """What of out, dq, dk and dv differs by more than rounding, or None."""
    for name, mine, other in zip(("out", "dq", "dk", "dv"), ours, theirs):
        mine, other = mine.astype(jnp.float32), other.astype(jnp.float32)
        difference, limit = float(jnp.abs(mine - other).max()), _AGREE * max(1.0, float(jnp.abs(mine).max()))
        if not difference <= limit:
            return f"its {name} differs from that of jflash by {difference:.3g}, more than {limit:.2g}"
    return None


def measure(row: Row, timed: dict[str, Timed], *, rounds: int, calls: int, idle_s: float, load_s: float) -> list[dict]:
    """A line for each implementation."""
    passes = {"forward": row.operations, "backward": _BACKWARD_SHARE * row.operations}
    cool = {name: {which: [] for which in passes} for name in timed}
    loaded = {name: {which: [] for which in passes} for name in timed}
    for _ in range(rounds):
        for which in passes:
            for name, own in timed.items():
                cool[name][which].append(own.times_ms(which, calls=calls, idle_s=idle_s))
    for name, own in timed.items():
        for which in passes:
            if load_s:
                loaded[name][which] = own.times_ms(which, calls=calls, load_s=load_s)
    lines = []
    for name in timed:
        line = {**dataclasses.asdict(row), "implementation": name}
        for which, operations in passes.items():
            ms = statistics.median(ms for samples in cool[name][which] for ms in samples[: (calls + 1) // 2])
            line |= {f"{which}_ms": round(ms, 4), f"{which}_tflops": round(operations / ms / 1e9, 1)}
            if load_s:
                line[f"{which}_sustained_tflops"] = round(operations / statistics.median(loaded[name][which]) / 1e9, 1)
        samples = {which: [[round(ms, 4) for ms in turn] for turn in cool[name][which]] for which in passes}
        lines.append(line | {"samples_ms": samples})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites.add_arguments(parser)
    parser.add_argument("--peers", nargs="*", choices=IMPLEMENTATIONS, default=_BY_DEFAULT)
    parser.add_argument("--load-s", type=float, default=0.0)
    arguments = parser.parse_args()
    where = {"kind": "kernel_times", **circumstances(), "commit": arguments.commit or commit_here(), "driver": driver()}
    where["versions"] |= versions(peers.PACKAGES)
    options = {name: getattr(arguments, name) for name in ("rounds", "calls", "idle_s", "load_s")}
    rows = suites.chosen(arguments)
    names = ["jflash", *(name for name in arguments.peers if name != "jflash")]
    # All are compiled before the first is timed: nothing else runs then.
    prepared = [prepare(row, names) for row in rows]
    print("compiled", file=sys.stderr, flush=True)
    for row, (timed, missing) in zip(rows, prepared):
        for line in (*missing, *measure(row, timed, **options)):
            print(json.dumps({**line, **options, **where}), flush=True)


if __name__ == "__main__":
    main()
