"""Time to the first forward and backward pass of a fresh process: `python benchmarks/first_call.py > lines.jsonl`.

Each implementation has processes of its own, on B=1, T=4096, N=16, H=128, bfloat16, causal: cold ones, with empty
compilation caches, and one more after the last of them that finds JAX's persistent compilation cache (`warm`). Seconds:

    import_jax     `import jax`
    jax_start      the first trivial program on the device
    import         the implementation, with what it would import when first called
    trace, lower   of one function that gives out and all gradients
    compile        of it
    run            of it, until its results are there

`beyond_jax_s` is the sum from `import` on: what the call adds to JAX's own start. An implementation that does not run
is named with the reason.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from machine import commit_here, driver
from records import Row

PARTS = ("import_jax", "jax_start", "import", "trace", "lower", "compile", "run")
BEYOND_JAX = PARTS[2:]
_TIMEOUT_S = 180
# Every program is kept in the cache; by default only those that took a second to compile.
_KEEP_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


def _jflash(row: Row) -> Callable:
    import jax

    import jflash
    from jflash.backends import registry

    # `import jflash` loads no backend; what a call on this device gets is loaded here.
    x = jax.ShapeDtypeStruct((row.B, row.T, row.N, row.H), "bfloat16")
    registry.get(jflash.explain(x, x, x, causal=row.causal).plan.backend)
    return lambda row, q, k, v: jflash.flash_attention(q, k, v, causal=row.causal)


def _peer(name: str) -> Callable[[Row], Callable]:
    def load(row: Row) -> Callable:
        import peers

        if name == "tokamax":
            peers.import_tokamax()
        return getattr(peers, name)

    return load


IMPLEMENTATIONS = {"jflash": _jflash, **{name: _peer(name) for name in ("cudnn", "tokamax", "xla")}}


def first_call(implementation: str, row: Row) -> dict[str, float]:
    """Seconds of each of `PARTS`, in this process, which must be fresh."""
    seconds, last = {}, time.perf_counter()

    def took(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[part], last = now - last, now

    import jax
    import jax.numpy as jnp

    took("import_jax")
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(8)))
    took("jax_start")
    attention = IMPLEMENTATIONS[implementation](row)
    took("import")
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (row.B, row.T, row.N, row.H), jnp.bfloat16) for key in keys]
    jax.block_until_ready(arrays)
    last = time.perf_counter()  # A user has inputs.

    def forward_backward(q, k, v, d_out):
        out, pull = jax.vjp(lambda q, k, v: attention(row, q, k, v), q, k, v)
        return out, *pull(d_out)

    traced = jax.jit(forward_backward).trace(*arrays)
    took("trace")
    lowered = traced.lower()
    took("lower")
    compiled = lowered.compile()
    took("compile")
    jax.block_until_ready(compiled(*arrays))
    took("run")
    return seconds


def _child(implementation: str, row: Row) -> tuple[dict[str, float], dict] | str:
    """What a process that is measured tells of itself."""
    try:
        seconds = first_call(implementation, row)
    except Exception as error:  # Peers have errors of many kinds; each is named in the record.
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    # After all that is measured: it imports more than an implementation does.
    from jflash.cli.measurement import circumstances

    where = circumstances()
    return seconds, where | {"driver": driver() if where["platform"] == "gpu" else None}


def in_fresh_process(implementation: str, cache: str, arguments: list[str]) -> tuple[dict[str, float], dict] | str:
    """Seconds of each part with the circumstances, or why there are none.

    `cache` is the folder of all compilation caches, and `arguments` are those of this script.
    """
    # The driver's own compiler has a cache too.
    folders = {"JAX_COMPILATION_CACHE_DIR": os.path.join(cache, "jax"), "CUDA_CACHE_PATH": os.path.join(cache, "cuda")}
    # jflash itself need not be installed.
    path = os.pathsep.join([str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **_KEEP_ALL, **folders, "PYTHONPATH": path.rstrip(os.pathsep)}
    command = [sys.executable, __file__, *arguments, "--child", implementation]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"it took over {_TIMEOUT_S} s"
    if done.returncode:
        return " ".join((done.stderr.strip().splitlines() or ["no message"])[-1].split())[:300]
    said = json.loads(done.stdout.splitlines()[-1])
    return said if isinstance(said, str) else tuple(said)


def lines_of(implementation: str, *, processes: int, arguments: list[str]) -> Iterator[dict]:
    """The lines of one implementation: of cold processes, each with its own caches, and of one that finds the last."""
    for number in range(processes):
        with tempfile.TemporaryDirectory(prefix="first-call-") as cache:
            for state in ("cold", "warm") if number == processes - 1 else ("cold",):
                line = {"kind": "first_call", "implementation": implementation, "cache": state}
                found = in_fresh_process(implementation, cache, arguments)
                if isinstance(found, str):
                    yield line | {"not_run": found}
                    return
                seconds, where = found
                line |= {f"{part}_s": round(seconds[part], 3) for part in PARTS}
                yield line | {"beyond_jax_s": round(sum(seconds[part] for part in BEYOND_JAX), 3)} | where


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["jflash", "cudnn", "tokamax"])
    parser.add_argument("--processes", type=int, default=2, help="cold ones of each implementation")
    for name, size in (("T", 4096), ("N", 16), ("H", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--commit", default=None, help="where the checkout does not say it itself")
    parser.add_argument("--child", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    row = Row(suite="first_call", B=1, T=arguments.T, N=arguments.N, H=arguments.H, causal=True)
    if arguments.child:
        print(json.dumps(_child(arguments.child, row)))
        return
    sizes = {name: getattr(arguments, name) for name in ("T", "N", "H")}
    own = [f"--{name}={size}" for name, size in sizes.items()]
    commit = arguments.commit or commit_here()
    for implementation in arguments.implementations:
        for line in lines_of(implementation, processes=arguments.processes, arguments=own):
            print(
                json.dumps({**line, "B": 1, **sizes, "causal": True, "dtype": "bfloat16", "commit": commit}), flush=True
            )


if __name__ == "__main__":
    main()
