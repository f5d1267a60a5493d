"""What a compiled program costs, and the circumstances under which that was found."""

import contextlib
import dataclasses
import datetime
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib
import numpy as np
from jaxtyping import Array

from jflash import __version__
from jflash.testing.inputs import Inputs

type Call = Callable[..., Array]

_GIB = 2**30
_MOST_SAMPLES, _FEWEST_SAMPLES = 5, 3
# What the samples of one program should last together: a slow one is sampled fewer times.
_SECONDS = 1.0
# What a sample should last at least, since the clock and the launch of a call take microseconds.
_SAMPLE_SECONDS = 0.01
_MOST_CALLS = 10


class OutOfMemory(Exception):
    """A program needs more memory than the device has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What attention costs.

    Attributes:
      forward_ms: median time of the result alone.
      forward_backward_ms: median time of the result and the gradients of q, k and v.
      memory_bytes: arguments, results and temporaries of the latter, as compiled.
    """

    forward_ms: float
    forward_backward_ms: float
    memory_bytes: int


class Program:
    """A compiled function. Compiling needs shapes only: arguments may be `jax.ShapeDtypeStruct`.

    A program that is not `tuned` is compiled without measuring candidates for its matmuls: for those that never run.
    """

    def __init__(self, function: Callable, *arguments: Any, tuned: bool = True):
        options = {} if tuned else {"xla_gpu_autotune_level": 0}
        with memory_errors():
            self._compiled = jax.jit(function).lower(*arguments).compile(compiler_options=options)
        sizes = self._compiled.memory_analysis()
        self.temporary_bytes = sizes.temp_size_in_bytes
        self.memory_bytes = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes

    def __call__(self, *arguments: Any) -> Any:
        with memory_errors():
            return self._compiled(*arguments)

    def time_ms(self, *arguments: Any, idle_s: float) -> float:
        """The median time of a call, the device being idle for the same time before each sample.

        Without the idle time a program would be slowed by the heat of the one before it.
        """
        if self.memory_bytes > device_bytes():
            needed, there = self.memory_bytes / _GIB, device_bytes() / _GIB
            raise OutOfMemory(f"it needs {needed:.1f} GiB of memory, the device has {there:.1f} GiB")

        def sample_s(calls: int) -> float:
            time.sleep(idle_s)
            started = time.perf_counter()
            for _ in range(calls):
                result = self._compiled(*arguments)
            jax.block_until_ready(result)
            return (time.perf_counter() - started) / calls

        with memory_errors():
            sample_s(1)
            once = sample_s(1)
            calls = min(_MOST_CALLS, math.ceil(_SAMPLE_SECONDS / max(once, 1e-9)))
            samples = min(_MOST_SAMPLES, max(_FEWEST_SAMPLES, int(_SECONDS / max(once, 1e-9))))
            return 1e3 * statistics.median(sample_s(calls) for _ in range(samples))


def forward_backward(attention: Call) -> Callable[..., tuple[Array, ...]]:
    """The function of (d_out, q, k, v, ...) that gives out and the gradients of q, k and v."""

    def run(d_out: Array, q: Array, k: Array, v: Array, *others: Any) -> tuple[Array, ...]:
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, *others), q, k, v)
        return out, *pull(d_out)

    return run


def cost_of(attention: Call, inputs: Inputs, *others: Any, idle_s: float) -> Cost:
    """The cost of `attention(q, k, v, *others)`.

    Raises:
      OutOfMemory: the device cannot hold it.
    """
    arguments = (inputs.q, inputs.k, inputs.v, *others)
    both = Program(forward_backward(attention), inputs.d_out, *arguments)
    return Cost(
        forward_ms=Program(attention, *arguments).time_ms(*arguments, idle_s=idle_s),
        forward_backward_ms=both.time_ms(inputs.d_out, *arguments, idle_s=idle_s),
        memory_bytes=both.memory_bytes,
    )


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turns what JAX raises when memory runs out into OutOfMemory, and leaves its other errors alone."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(str(error).splitlines()[0]) from error


def device_bytes() -> int:
    """The memory of the device; that of the machine where JAX knows of none."""
    statistics_of_device = jax.local_devices()[0].memory_stats() or {}
    return statistics_of_device.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def same_precision(dtype: str) -> contextlib.AbstractContextManager:
    """In it `jax.nn` computes float32 at the precision that jflash has by default; 16-bit inputs are left alone."""
    return jax.default_matmul_precision("highest") if np.dtype(dtype).itemsize >= 4 else contextlib.nullcontext()


def circumstances() -> dict[str, Any]:
    """Device, versions and date, for every record that is kept."""
    device = jax.local_devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cores": os.cpu_count(),
        "versions": {
            "jflash": __version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe(where: dict[str, Any]) -> str:
    """The circumstances in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return f"{device_name(where)}; {versions}; {where['date']}"


def device_name(where: dict[str, Any]) -> str:
    """The device as people call it."""
    return f"CPU ({where['cores']} cores)" if where["platform"] == "cpu" else where["device"]


def finite_json(value: Any) -> Any:
    """`value` with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {name: finite_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
