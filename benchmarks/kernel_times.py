"""Kernel times of jflash and its peers on one GPU, in one process: `python benchmarks/kernel_times.py > lines.jsonl`.

Time is the sum over all kernels of a call, by CUPTI, the median of `--calls` calls; the device is idle for the same
time before each measurement, and the implementations take turns, `--rounds` times. Backward is forward with backward
less forward. Outputs and gradients are compared with those of jflash before anything is timed. A peer that is not
installed is named in a line of its own.

TFLOP/s: 2 · B · N · T · S · (H + Hv) operations forward, halved for causal; backward 2.5 times that.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

import jflash
from jflash.cli.measurement import circumstances

_BACKWARD_SHARE = 2.5
# As 16-bit results of different orders of summation may differ, for random normal inputs.
_AGREE = 0.05


def jflash_attention(q, k, v, causal):
    return jflash.flash_attention(q, k, v, causal=causal, backend="mosaic_gpu")


def cudnn(q, k, v, causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def tokamax(q, k, v, causal):
    # It imports these for tools that are not called here.
    for name in ("xprof", "xprof.cli.tools.get_kernel_stats_tool", "tensorboardX.writer"):
        _stub(name)
    import tokamax

    return tokamax.dot_product_attention(q, k, v, is_causal=causal, implementation="mosaic")


def _stub(name: str) -> None:
    """Puts an empty module where a package is not installed."""
    parent, _, child = name.rpartition(".")
    if name in sys.modules or (not parent and importlib.util.find_spec(name) is not None):
        return
    module = sys.modules[name] = types.ModuleType(name)
    if parent:
        _stub(parent)
        setattr(sys.modules[parent], child, module)


IMPLEMENTATIONS: dict[str, Callable] = {"jflash": jflash_attention, "cudnn": cudnn, "tokamax": tokamax}


class Timed:
    """One implementation of one row, compiled: forward, and forward with backward."""

    def __init__(self, attention: Callable, causal: bool, arrays: tuple):
        q, k, v, _ = arrays

        def forward(q, k, v):
            return attention(q, k, v, causal)

        def both(q, k, v, d_out):
            out, pull = jax.vjp(forward, q, k, v)
            return out, *pull(d_out)

        self._calls = {
            "forward": (jax.jit(forward).lower(q, k, v).compile(), (q, k, v)),
            "both": (jax.jit(both).lower(*arrays).compile(), arrays),
        }
        self.results = self._calls["both"][0](*arrays)

    def time_ms(self, which: str, *, calls: int, idle_s: float) -> float:
        compiled, arrays = self._calls[which]
        jax.block_until_ready(compiled(*arrays))
        time.sleep(idle_s)
        _, times = profiler.Cupti(finalize=False).measure(compiled, aggregate=False, iterations=calls)(*arrays)
        return statistics.median(sum(ms for _, ms in kernels) for kernels in times)


def prepare(row: dict) -> tuple[dict[str, Timed], list[dict]]:
    """The implementations of a row, compiled and compared, and a line for each that does not run."""
    B, T, N, K, H, causal = (row[name] for name in ("B", "T", "N", "K", "H", "causal"))
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = tuple(jax.random.normal(key, (B, T, heads, H), jnp.bfloat16) for key, heads in zip(keys, (N, K, K, N)))
    timed, lines = {}, []
    for name, attention in IMPLEMENTATIONS.items():
        try:
            timed[name] = Timed(attention, causal, arrays)
        except (ImportError, NotImplementedError, ValueError, RuntimeError) as error:
            lines.append({**row, "implementation": name, "not_run": f"{type(error).__name__}: {error}"[:300]})
    for name, own in timed.items():
        for mine, other in zip(timed["jflash"].results, own.results):
            difference = float(jnp.abs(mine.astype(jnp.float32) - other.astype(jnp.float32)).max())
            limit = _AGREE * max(1.0, float(jnp.abs(mine.astype(jnp.float32)).max()))
            if difference > limit:
                raise SystemExit(f"{name} and jflash differ by {difference} on {row}")
    return timed, lines


def measure(row: dict, timed: dict[str, Timed], *, rounds: int, calls: int, idle_s: float) -> list[dict]:
    """A line for each implementation."""
    samples = {name: {"forward": [], "both": []} for name in timed}
    for _ in range(rounds):
        for which in ("forward", "both"):
            for name, own in timed.items():
                samples[name][which].append(own.time_ms(which, calls=calls, idle_s=idle_s))
    operations = 4 * row["B"] * row["N"] * row["T"] ** 2 * row["H"] / (2 if row["causal"] else 1)
    lines = []
    for name, found in samples.items():
        forward_ms, both_ms = (statistics.median(found[which]) for which in ("forward", "both"))
        lines.append({
            **row, "implementation": name,
            "forward_ms": round(forward_ms, 4), "backward_ms": round(both_ms - forward_ms, 4),
            "forward_tflops": round(operations / forward_ms / 1e9, 1),
            "backward_tflops": round(_BACKWARD_SHARE * operations / (both_ms - forward_ms) / 1e9, 1),
            "samples_ms": found,
        })  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--tokens", type=int, default=16384, help="B is this over the length")
    parser.add_argument("--width", type=int, default=2048, help="N is this over the head dim")
    parser.add_argument("--group", type=int, default=1, help="query heads of a key/value head")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--idle-s", type=float, default=0.8)
    parser.add_argument("--commit", default=None, help="where the checkout does not say it itself")
    arguments = parser.parse_args()
    where = {"kind": "kernel_times", **circumstances(), "commit": arguments.commit or _commit(), "driver": _driver()}
    for name in ("tokamax",):
        try:
            where["versions"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            where["versions"][name] = None
    options = {"rounds": arguments.rounds, "calls": arguments.calls, "idle_s": arguments.idle_s}
    rows = []
    for T in arguments.lengths:
        for H in arguments.head_dims:
            for causal in (False, True):
                N = arguments.width // H
                row = {"B": max(1, arguments.tokens // T), "T": T, "N": N, "K": N // arguments.group, "H": H}
                rows.append(row | {"causal": causal})
    # All are compiled before the first is timed: nothing else runs then.
    prepared = [prepare(row) for row in rows]
    print("compiled", file=sys.stderr, flush=True)
    for row, (timed, missing) in zip(rows, prepared):
        for line in (*missing, *measure(row, timed, **options)):
            print(json.dumps({**line, **options, **where}), flush=True)


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()


if __name__ == "__main__":
    main()
