"""`jflash check`: real workloads against float64, with time and memory beside `jax.nn.dot_product_attention`."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from jflash.api import explain
from jflash.cli import plot
from jflash.cli.explain import reasons
from jflash.cli.measurement import (
    Cost,
    OutOfMemory,
    Program,
    circumstances,
    cost_of,
    describe,
    finite_json,
    same_precision,
)
from jflash.cli.peers import peer_of
from jflash.errors import ArgumentError
from jflash.plan import Plan, check_backend_name
from jflash.testing.budget import (
    Measured,
    attention_of,
    forward_and_backward,
    measure,
    plain_of,
    results_of,
    truth_of,
)
from jflash.testing.inputs import Inputs, random_inputs
from jflash.testing.workloads import Workload, check_workloads

_IDLE_S = 0.05

_LEGEND = """\
error    largest absolute error against float64, of the output and of the gradient that is worst against its bound;
         plain: that of dense attention in the same precision
bound    2 * plain + c * eps * scale, for the largest and the mean error of out, lse, dq, dk, dv; worst: error / bound
time     median, ours with the lse and its cotangent if the backend has one, jax.nn has none; speed: time of
         jax.nn.dot_product_attention / ours, so above 1 is faster than it
memory   of forward + backward as compiled: arguments + results + temporaries
"""
_HEADER = (
    "                            error / bound  error of out     error of gradient   forward        with backward  "
    "memory (MiB)\n"
    "workload         backend    worst          ours    plain       ours    plain        ms speed       ms speed   "
    "  ours  jax.nn"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found of one workload.

    Attributes:
      plan: what ran; None where the backend refused.
      refusal: why it did not run, else empty.
      rows: every error with its bound.
      ours, peer: costs; None where there are none.
      note: what a reader must know of the peer.
    """

    workload: Workload
    plan: Plan | None
    refusal: str = ""
    rows: tuple[Measured, ...] = ()
    ours: Cost | None = None
    peer: Cost | None = None
    note: str = ""

    @property
    def broken(self) -> tuple[Measured, ...]:
        return tuple(row for row in self.rows if not row.within)

    @property
    def worst(self) -> Measured:
        """The error that is largest against its bound."""
        return max(self.rows, key=lambda row: row.ratio)

    def largest(self, *names: str) -> Measured:
        """The largest error of the result, among these, that is worst against its bound."""
        return max(
            (row for row in self.rows if row.statistic == "max" and row.name in names), key=lambda row: row.ratio
        )


def check(
    *,
    backend: str = "auto",
    names: Sequence[str] | None = None,
    seed: int = 0,
    plot_file: pathlib.Path | None = None,
    table: TextIO,
    lines: TextIO | None = None,
) -> int:
    """Checks the workloads of these names, or all, and returns the exit code: 1 if a bound is broken, or nothing ran.

    Raises:
      ArgumentError: there is no such backend or workload.
      MissingMatplotlib, OSError: the picture cannot be drawn or written, said before anything runs.
    """
    check_backend_name(backend)
    where = circumstances()
    workloads = _chosen(check_workloads(large=where["platform"] == "gpu"), names)
    if plot_file is not None:
        plot.prepare(plot_file)
    print(f"{describe(where)}\n\n{_LEGEND}\n{_HEADER}", file=table, flush=True)
    progress = _Progress(sys.stderr)
    found = []
    for number, workload in enumerate(workloads, 1):
        progress.running(f"{workload.name} ({number} of {len(workloads)})")
        found.append(_check_one(workload, backend, seed))
        progress.clear()
        print(_row(found[-1]), file=table, flush=True)
        if lines is not None:
            print(json.dumps(finite_json(_record(found[-1]) | {"seed": seed} | where)), file=lines, flush=True)
    for text in _footnotes(found):
        print(text, file=table)
    if plot_file is not None:
        progress.running("the picture: memory by length, compiled and not run")
        plot.draw(plot_file, found, plot.memory_by_length(backend), where)
        progress.clear()
        print(f"\nThe picture is in {plot_file}.", file=table)
    verdict, exit_code = _verdict(found)
    print(f"\n{verdict}", file=table, flush=True)
    return exit_code


def _chosen(workloads: tuple[Workload, ...], names: Sequence[str] | None) -> tuple[Workload, ...]:
    known = [workload.name for workload in workloads]
    for name in names or ():
        if name not in known:
            raise ArgumentError("--workload", found=repr(name), wanted=f"one of {', '.join(known)}")
    return tuple(workload for workload in workloads if names is None or workload.name in names)


def _check_one(workload: Workload, backend: str, seed: int) -> Checked:
    inputs = random_inputs(workload, seed=seed)
    arguments = {"mask": workload.mask, "bias": inputs.bias, "softcap": workload.softcap, "backend": backend}
    explanation, with_lse = (explain(inputs.q, inputs.k, inputs.v, lse=lse, **arguments) for lse in (False, True))
    if explanation.plan is None:
        return Checked(workload=workload, plan=None, refusal=reasons(explanation))
    # What runs is what `flash_attention` gets. Where that has no lse, another backend's would not be its own.
    has_lse = with_lse.plan == explanation.plan
    inputs = inputs if has_lse else inputs._replace(d_lse=None)
    ours = attention_of(workload, backend=backend, lse=has_lse)
    try:
        # One program for the errors and for the time with backward: compiling takes most of the time of a check.
        both = Program(forward_and_backward(ours), *inputs)
        results = results_of(both(*inputs))
        operands = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.learned)
        cost = Cost(
            forward_ms=Program(ours, *operands).time_ms(*operands, idle_s=_IDLE_S),
            forward_backward_ms=both.time_ms(*inputs, idle_s=_IDLE_S),
            memory_bytes=both.memory_bytes,
        )
    except OutOfMemory as error:
        return Checked(workload=workload, plan=None, refusal=str(error))
    truth, plain = truth_of(workload, inputs), plain_of(workload, inputs)
    rows = measure(results, truth=truth, plain=plain, dtype=workload.dtype)
    peer, note = _peer_cost(workload, inputs)
    return Checked(workload=workload, plan=explanation.plan, rows=tuple(rows), ours=cost, peer=peer, note=note)


def _peer_cost(workload: Workload, inputs: Inputs) -> tuple[Cost | None, str]:
    peer = peer_of(workload)
    if isinstance(peer, str):
        return None, peer
    try:
        with same_precision(workload.dtype):
            return cost_of(peer.call, inputs, *peer.others, idle_s=_IDLE_S), peer.note
    except OutOfMemory as error:
        return None, f"jax.nn does not run: {error}"


# The table ------------------------------------------------------------------------------------------------------------


def _row(found: Checked) -> str:
    name = f"{found.workload.name:<16.16}"
    if found.plan is None:
        return f"{name} refused: {found.refusal}"
    worst, out, gradient = found.worst, found.largest("out"), found.largest("dq", "dk", "dv", "dbias")
    cells = [
        f"{name} {found.plan.backend:<10.10} {worst.ratio:>4.2f} {worst.name + ' ' + worst.statistic:<8}",
        f"{out.error:>7.1e} {out.plain:>7.1e}",
        f"{gradient.name:<2} {gradient.error:>7.1e} {gradient.plain:>7.1e}",
    ]
    ours, peer = found.ours, found.peer
    mark = "*" if found.note else " "
    for attribute in ("forward_ms", "forward_backward_ms"):
        own = getattr(ours, attribute)
        speed = "–" if peer is None else f"{getattr(peer, attribute) / own:.2f}"
        cells.append(f"{_digits(own):>6} {speed + mark:>6}")
    memory = "–" if peer is None else _digits(peer.memory_bytes / 2**20)
    cells.append(f"{_digits(ours.memory_bytes / 2**20):>6} {memory + mark:>7}")
    broken = [f"{'':<16} {row}" for row in found.broken]
    return "\n".join(["  ".join(cells).rstrip(), *broken])


def _digits(number: float) -> str:
    """Three digits, or all those before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:#.3g}"


def _footnotes(found: Sequence[Checked]) -> list[str]:
    return [f"* {one.workload.name}: {one.note}" for one in found if one.note]


def _verdict(found: Sequence[Checked]) -> tuple[str, int]:
    ran = [one for one in found if one.plan is not None]
    broken = [one.workload.name for one in ran if one.broken]
    refused = f", {len(found) - len(ran)} refused" if len(ran) < len(found) else ""
    if not ran:
        return "FAILED: nothing ran, every workload was refused.", 1
    if broken:
        return f"FAILED: {len(broken)} of {len(ran)} workloads above their bounds ({', '.join(broken)}){refused}.", 1
    return f"PASSED: {len(ran)} of {len(ran)} workloads within all their bounds{refused}.", 0


def _record(found: Checked) -> dict[str, Any]:
    w = found.workload
    return {
        "kind": "check",
        "workload": w.name,
        **{name: getattr(w, name) for name in ("B", "T", "S", "N", "K", "H", "Hv", "dtype", "softcap")},
        "mask": repr(w.mask),
        "bias": w.bias,
        "backend": found.plan and found.plan.backend,
        "tiles": found.plan and (found.plan.tiles and repr(found.plan.tiles)),
        "refusal": found.refusal or None,
        "within": None if found.plan is None else not found.broken,
        "errors": [dataclasses.asdict(row) | {"within": row.within} for row in found.rows],
        "ours": found.ours and dataclasses.asdict(found.ours),
        "jax_nn": found.peer and dataclasses.asdict(found.peer),
        "jax_nn_note": found.note or None,
    }


class _Progress:
    """Says what is running: in a terminal on one line that goes away, elsewhere on a line each."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._is_terminal = stream.isatty()

    def running(self, what: str) -> None:
        print(f"running {what} ...", end="" if self._is_terminal else "\n", file=self._stream, flush=True)

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=self._stream, flush=True)
