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
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler
from records import Row

import jflash
from jflash.cli.measurement import circumstances
from jflash.masks import SlidingWindow

_BACKWARD_SHARE = 2.5
# As 16-bit results of different orders of summation may differ, for random normal inputs.
_AGREE = 0.05


def _grid() -> Iterator[Row]:
    for T in (16384, 4096, 1024):
        for H in (64, 128, 256):
            for causal in (False, True):
                yield Row(suite="grid", B=16384 // T, T=T, N=2048 // H, H=H, causal=causal)


SUITES: dict[str, list[Row]] = {
    "grid": list(_grid()),
    "gqa": [Row(suite="gqa", B=16384 // T, T=T, N=32, K=8, H=128, causal=True) for T in (8192, 16384)],
    "mla": [
        Row(suite="mla", B=2, T=T, N=16, H=192, Hv=128, causal=causal) for T in (4096, 8192) for causal in (True, False)
    ],
    "short": [Row(suite="short", B=32, T=T, N=16, H=64, causal=True) for T in (128, 256, 512)],
    "cross": [Row(suite="cross", B=1, T=512, S=65536, N=8, H=128)],
    "window": [Row(suite="window", B=1, T=T, N=16, H=128, causal=True, window=1023) for T in (16384, 65536)],
    "deterministic": [
        Row(suite="deterministic", B=2, T=8192, N=16, H=128, causal=True, deterministic=deterministic)
        for deterministic in (False, True)
    ],
}


def jflash_attention(row: Row, q, k, v):
    mask = {"causal": row.causal} if row.window is None else {"mask": SlidingWindow(row.window, 0)}
    return jflash.flash_attention(q, k, v, **mask, deterministic=row.deterministic, backend="mosaic_gpu")


def cudnn(row: Row, q, k, v):
    window = None if row.window is None else (row.window, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=row.causal, local_window_size=window, implementation="cudnn")


def tokamax(row: Row, q, k, v):
    # It imports these for tools that are not called here.
    for name in ("xprof", "xprof.cli.tools.get_kernel_stats_tool", "tensorboardX.writer"):
        _stub(name)
    import tokamax

    window = None if row.window is None else (row.window, 0)
    return tokamax.dot_product_attention(
        q, k, v, is_causal=row.causal, local_window_size=window, implementation="mosaic"
    )


def flash_attn3(row: Row, q, k, v):
    from flash_attn3_jax import flash_mha

    window = (-1, -1) if row.window is None else (row.window, 0)
    return flash_mha(q, k, v, is_causal=row.causal, window_size=window)


def _stub(name: str) -> None:
    """Puts an empty module where a package is not installed."""
    parent, _, child = name.rpartition(".")
    if name in sys.modules or (not parent and importlib.util.find_spec(name) is not None):
        return
    module = sys.modules[name] = types.ModuleType(name)
    if parent:
        _stub(parent)
        setattr(sys.modules[parent], child, module)


IMPLEMENTATIONS: dict[str, Callable] = {
    "jflash": jflash_attention,
    "cudnn": cudnn,
    "tokamax": tokamax,
    "flash_attn3_jax": flash_attn3,
}
_PACKAGES = ("tokamax", "flash_attn3_jax")


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
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=["grid"])
    parser.add_argument("--lengths", type=int, nargs="+", help="only these T")
    parser.add_argument("--head-dims", type=int, nargs="+", help="only these H")
    parser.add_argument("--peers", nargs="*", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--idle-s", type=float, default=0.5)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--commit", default=None, help="where the checkout does not say it itself")
    arguments = parser.parse_args()
    where = {"kind": "kernel_times", **circumstances(), "commit": arguments.commit or commit_here(), "driver": driver()}
    for name in _PACKAGES:
        try:
            where["versions"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            where["versions"][name] = None
    options = {name: getattr(arguments, name) for name in ("rounds", "calls", "idle_s", "load_s")}
    rows = [
        row
        for suite in arguments.suites
        for row in SUITES[suite]
        if (arguments.lengths is None or row.T in arguments.lengths)
        and (arguments.head_dims is None or row.H in arguments.head_dims)
    ]
    names = ["jflash", *(name for name in arguments.peers if name != "jflash")]
    # All are compiled before the first is timed: nothing else runs then.
    prepared = [prepare(row, names) for row in rows]
    print("compiled", file=sys.stderr, flush=True)
    for row, (timed, missing) in zip(rows, prepared):
        for line in (*missing, *measure(row, timed, **options)):
            print(json.dumps({**line, **options, **where}), flush=True)


def commit_here() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()


if __name__ == "__main__":
    main()
