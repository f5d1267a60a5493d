"""`jflash tune`: the fastest tiles of the kernels for some calls on this device, into a tuning table."""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from jflash.backends import registry
from jflash.backends.protocol import Backend
from jflash.cli.explain import given_sizes, reasons, sizes_of, window_of
from jflash.cli.measurement import circumstances, describe, finite_json
from jflash.errors import ArgumentError
from jflash.hardware import Hardware, present
from jflash.plan import check_backend_name, explain_plan
from jflash.testing.problems import pose
from jflash.tuning.key import Key
from jflash.tuning.runner import Runner
from jflash.tuning.search import Kernel, Outcome, Tried, TuningError, search
from jflash.tuning.table import Entry, Table, device_name, kernel_types, read
from jflash.tuning.workloads import Call, shipped

_TURNS = 5
# Below it a gain is not worth an entry: two runs of the same program differ by as much.
_LEAST_GAIN = 0.01

_LEGEND = f"""\
ms     median kernel time; a winner's slowest turn is faster than the fastest of the formula's tiles, and its median by
       {_LEAST_GAIN:.0%} or more; every candidate is within the error rule, or named with the reason
"""
_HEADER = f"{'kernel':<12} {'formula ms':>10} {'best ms':>10} {'gain':>6}  tiles that differ"


def calls_of(sizes: Sequence[str], *, causal: bool, window: str | None, is_shipped: bool) -> list[Call]:
    """The call of these sizes and mask, or of the calls of the shipped tables those that have these sizes.

    Raises:
      ArgumentError: a size or a window that means nothing, or sizes that no shipped call has.
    """
    if not is_shipped:
        return [Call(**sizes_of(sizes), causal=causal, window=None if window is None else window_of(window))]
    if causal or window is not None:
        raise ArgumentError("--shipped", found="a mask beside it", wanted="sizes alone: its calls have masks")
    wanted = given_sizes(sizes)
    found = [call for call in shipped() if all(getattr(call, letter) == size for letter, size in wanted.items())]
    if not found:
        raise ArgumentError("sizes", found=f"{' '.join(sizes)}, which no shipped call has", wanted="others, or none")
    return found


def tune(
    calls: Sequence[Call],
    *,
    backend: str = "mosaic_gpu",
    kernels: Sequence[str] = ("forward", "backward"),
    minutes: float | None = None,
    table_file: pathlib.Path | None = None,
    table: TextIO,
    lines: TextIO | None = None,
) -> int:
    """Searches the tiles of these kernels for each call; returns the exit code: 1 where nothing could be searched.

    After each search the entry of a winner is in the table file, so that nothing is lost if a later one is ended; where
    there is none, an entry that was there is taken out.

    Args:
      minutes: after so many no further candidate is tried; None is no limit.
      table_file: the tuning table to put winners into, made where there is none; None keeps none.

    Raises:
      ArgumentError: an unknown backend, or one without tiles to tune, an unknown kernel, or a file that is no table of
        this device.
    """
    own = _backend(backend, kernels)
    if minutes is not None and not minutes > 0:
        raise ArgumentError("--minutes", found=minutes, wanted="more than 0")
    hardware = present()
    tuning_table = None if table_file is None else _table(table_file, own, hardware)
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    where = circumstances()
    print(f"{describe(where)}\n\n{_LEGEND}\n{_HEADER}", file=table, flush=True)
    searched = 0
    for number, call in enumerate(calls, 1):
        print(call, file=table, flush=True)
        ready = None
        for kernel in kernels:
            if time.monotonic() > deadline:
                print(f"time is up after {number - 1} of {len(calls)} calls", file=table)
                return 0 if searched else 1
            problem, _ = pose(call.workload, deterministic=kernel == "backward_dq")
            explanation = explain_plan(problem, hardware, backend=backend)
            key = Key.of(problem, kernel)
            if explanation.plan is None or key is None:
                why = reasons(explanation) if explanation.plan is None else "tables have no entries for such a mask"
                print(f"  {kernel:<12} {why}", file=table, flush=True)
                continue
            ready = ready or Runner(call.workload, own)
            formula = own.default_tiles(problem, hardware)
            outcome = _search(ready.kernel(kernel, formula), own, problem, hardware, formula, kernel, deadline)
            print(_row(outcome, kernel), file=table, flush=True)
            if lines is not None:
                record = {**_record(call, kernel, outcome), **where}
                print(json.dumps(finite_json(record)), file=lines, flush=True)
            if isinstance(outcome, TuningError):
                continue
            searched += 1
            if tuning_table is not None and (outcome.winner or outcome.is_complete):
                tuning_table = _stored(tuning_table, key, kernel, outcome, {"call": dataclasses.asdict(call)} | where)
    return 0 if searched else 1


def _backend(name: str, kernels: Sequence[str]) -> Backend:
    check_backend_name(name)
    backend = None if name == "auto" else registry.get(name)
    if backend is None or backend.tiles_type is None or not kernel_types(backend):
        raise ArgumentError("backend", found=repr(name), wanted="a backend whose tiles a table may hold: mosaic_gpu")
    for kernel in kernels:
        if kernel not in kernel_types(backend):
            raise ArgumentError("--kernels", found=repr(kernel), wanted=f"of {', '.join(kernel_types(backend))}")
    return backend


def _table(file: pathlib.Path, backend: Backend, hardware: Hardware) -> Table:
    device = device_name(hardware)
    if not file.exists():
        table = Table(file=file, device=device, backend=backend.name, entries={})
        table.write()
        return table
    table = read(file, backend, hardware)
    if table.device != device:
        raise ArgumentError("--table", found=f"{file}, of {table.device}", wanted=f"a table of this device, {device}")
    return table


def _search(
    tried: Kernel, backend: Backend, problem: Any, hardware: Hardware, formula: Any, kernel: str, deadline: float
) -> Outcome | TuningError:
    def say(text: str) -> None:
        print(f"{kernel}: {text}", file=sys.stderr, flush=True)

    try:
        return search(
            formula,
            lambda tiles: backend.candidate_tiles(problem, hardware, tiles, kernel),
            tried,
            turns=_TURNS,
            least_gain=_LEAST_GAIN,
            is_time_up=lambda: time.monotonic() > deadline,
            say=say,
            describe=lambda tiles: _difference(getattr(tiles, kernel), getattr(formula, kernel)),
        )
    except TuningError as error:
        return error


def _stored(table: Table, key: Key, kernel: str, outcome: Outcome, where: dict[str, Any]) -> Table:
    """The table with the winner, or without an entry where the formula is not beaten; written."""
    if outcome.winner is None:
        table = table.with_entries([], without=[key])
    else:
        times = {"ms": outcome.winner.ms, "formula_ms": outcome.formula.ms}
        own, formula = (getattr(tried.tiles, kernel) for tried in (outcome.winner, outcome.formula))
        found = {**times, "formula": dataclasses.asdict(formula), **where}
        table = table.with_entries([Entry(key=key, tiles=own, measured=found)])
    table.write()
    return table


def _row(outcome: Outcome | TuningError, kernel: str) -> str:
    if isinstance(outcome, TuningError):
        return f"  {kernel:<12} {outcome}"
    rejected = sum(bool(tried.rejected) for tried in outcome.tried)
    notes = [f"{rejected} of {len(outcome.tried)} rejected"] if rejected else []
    notes += [] if outcome.is_complete else ["time was up before all were tried"]
    formula, winner = outcome.formula, outcome.winner
    best = f"{formula.ms:>10.4f} {winner.ms:>10.4f}" if winner else f"{formula.ms:>10.4f} {'–':>10}"
    changes = _difference(getattr(winner.tiles, kernel), getattr(formula.tiles, kernel)) if winner else "none is faster"
    return f"  {kernel:<10} {best} {outcome.gain:>6.1%}  {changes}" + (f" ({'; '.join(notes)})" if notes else "")


def _difference(own: Any, formula: Any) -> str:
    before = dataclasses.asdict(formula)
    changed = {name: value for name, value in dataclasses.asdict(own).items() if value != before[name]}
    return ", ".join(f"{name}={value} (formula {before[name]})" for name, value in changed.items())


def _record(call: Call, kernel: str, outcome: Outcome | TuningError) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": "tune", "kernel": kernel, "call": dataclasses.asdict(call)}
    if isinstance(outcome, TuningError):
        return record | {"failed": str(outcome)}
    return record | {
        "formula": _described(outcome.formula, kernel),
        "winner": outcome.winner and _described(outcome.winner, kernel),
        "gain": outcome.gain,
        "is_complete": outcome.is_complete,
        "tried": [_described(tried, kernel) for tried in outcome.tried],
    }


def _described(tried: Tried, kernel: str) -> dict[str, Any]:
    tiles = dataclasses.asdict(getattr(tried.tiles, kernel))
    return {"tiles": tiles, "ms": tried.ms, "turns_ms": tried.turns_ms, "rejected": tried.rejected or None}
