"""`jflash bench`: the backends and `jax.nn.dot_product_attention` side by side, in one process on one device."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import jax

from jflash.api import explain
from jflash.backends import registry
from jflash.cli.explain import reasons
from jflash.cli.measurement import (
    Call,
    Cost,
    OutOfMemory,
    circumstances,
    cost_of,
    describe,
    finite_json,
    same_precision,
)
from jflash.errors import ArgumentError
from jflash.masks import Causal, Full
from jflash.plan import check_backend_name
from jflash.testing.budget import attention_of
from jflash.testing.inputs import random_inputs
from jflash.testing.workloads import Workload

# Matmuls of the backward pass against those of the forward pass, as papers on attention count: 5 to 2.
_BACKWARD_SHARE = 2.5
_IDLE_S = 0.2

_LEGEND = """\
TFLOP/s  2 * B * N * T * S * (H + Hv) operations forward, halved for causal; backward 2.5 times that
time     median, the device idle for 0.2 s before each sample
"""
_HEADER = (
    f"{'':<20}{'forward':<18}  forward + backward\n"
    f"  {'implementation':<16}  {'ms':>8} {'TFLOP/s':>9}  {'ms':>8} {'TFLOP/s':>9}"
)


def bench(
    *,
    backends: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    head_dim: int | None = None,
    dtype: str | None = None,
    causal: bool = False,
    table: TextIO,
    lines: TextIO | None = None,
) -> None:
    """Times every implementation on a grid fit for the platform; arguments replace parts of the grid.

    Raises:
      ArgumentError: an unknown backend, or a size that is none.
    """
    backends = registry.names() if backends is None else backends
    for name in backends:
        check_backend_name(name)
    where = circumstances()
    workloads = _grid(where["platform"], lengths=lengths, head_dim=head_dim, dtype=dtype, causal=causal)
    print(f"{describe(where)}\n\n{_LEGEND}\n{_HEADER}", file=table, flush=True)
    for workload in workloads:
        w = workload
        print(f"B={w.B} T={w.T} N={w.N} K={w.K} H={w.H} {w.dtype} {w.mask}", file=table, flush=True)
        for name, details, cost in _costs(workload, backends):
            print(_row(workload, name, cost), file=table, flush=True)
            if lines is not None:
                record = {"kind": "bench", "implementation": name, **details, **_record(workload, cost), **where}
                print(json.dumps(finite_json(record)), file=lines, flush=True)


def _grid(
    platform: str, *, lengths: Sequence[int] | None, head_dim: int | None, dtype: str | None, causal: bool
) -> list[Workload]:
    is_large = platform == "gpu"
    H = head_dim or (128 if is_large else 64)
    for name, size in (("--head-dim", H), *(("--lengths", T) for T in lengths or ())):
        if size < 1:
            raise ArgumentError(name, found=size, wanted="at least 1")
    if is_large:
        # The same number of tokens, and of channels of all heads together, at each length and head dim.
        lengths, tokens, N, dtype = lengths or (1024, 4096, 16384), 16384, max(1, 2048 // H), dtype or "bfloat16"
    else:
        lengths, tokens, N, dtype = lengths or (512, 1024, 2048), 1, 4, dtype or "float32"
    mask = Causal() if causal else Full()
    return [Workload(name=f"T{T}", B=max(1, tokens // T), T=T, N=N, K=N, H=H, dtype=dtype, mask=mask) for T in lengths]


def _costs(workload: Workload, backends: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], Cost | str]]:
    """For each implementation its name, what to record of it, and its cost or the reason why it does not run."""
    with jax.enable_x64(workload.dtype == "float64" or jax.config.jax_enable_x64), same_precision(workload.dtype):
        inputs = random_inputs(workload)
        for name in backends:
            explanation = explain(inputs.q, inputs.k, inputs.v, mask=workload.mask, backend=name)
            if explanation.plan is None:
                yield (
                    f"jflash {name}",
                    {"tiles": None},
                    reasons(explanation),
                )
                continue
            ours = attention_of(workload, backend=name, lse=False)
            details = {"tiles": explanation.plan.tiles and repr(explanation.plan.tiles)}
            yield f"jflash {name}", details, _cost(lambda q, k, v, ours=ours: ours(q, k, v, None, {})[0], inputs)
        for implementation in ("xla", "cudnn"):
            peer = functools.partial(
                jax.nn.dot_product_attention, is_causal=isinstance(workload.mask, Causal), implementation=implementation
            )
            try:
                cost = _cost(peer, inputs)
            except (NotImplementedError, RuntimeError, ValueError) as error:
                cost = str(error).strip().splitlines()[0]
            yield f"jax.nn {implementation}", {}, cost


def _cost(call: Call, inputs) -> Cost | str:
    try:
        return cost_of(call, inputs, idle_s=_IDLE_S)
    except OutOfMemory as error:
        return str(error)


def _tflops(workload: Workload, cost: Cost) -> tuple[float, float]:
    flops = workload.flops / (2 if isinstance(workload.mask, Causal) else 1)
    return flops / cost.forward_ms / 1e9, flops * (1 + _BACKWARD_SHARE) / cost.forward_backward_ms / 1e9


def _row(workload: Workload, name: str, cost: Cost | str) -> str:
    if isinstance(cost, str):
        return f"  {name:<16}  does not run: {cost}"
    forward, both = _tflops(workload, cost)
    return f"  {name:<16}  {cost.forward_ms:>8.4g} {forward:>9.3g}  {cost.forward_backward_ms:>8.4g} {both:>9.3g}"


def _record(workload: Workload, cost: Cost | str) -> dict[str, Any]:
    w = workload
    dims = {name: getattr(w, name) for name in ("B", "T", "S", "N", "K", "H", "Hv", "dtype")} | {"mask": repr(w.mask)}
    if isinstance(cost, str):
        return dims | {"refusal": cost}
    forward, both = _tflops(workload, cost)
    rates = {"forward_tflops": forward, "forward_backward_tflops": both}
    return dims | dataclasses.asdict(cost) | rates | {"refusal": None}
