"""Plan: which backend runs a problem, with which tiles, and why."""

import dataclasses
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from jflash.backends import registry
from jflash.backends.protocol import Backend
from jflash.errors import ArgumentError, UnsupportedError
from jflash.hardware import Hardware, named
from jflash.options import current_options
from jflash.problem import Problem
from jflash.tuning.table import tiles_of


class FallbackWarning(UserWarning):
    """`backend="auto"` takes `xla`, since each backend that the platform has of its own refuses, for the reasons given.

    The option `strict` turns it into an error. A fall from one kernel to the next is no warning; `explain` tells of it.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How one problem is computed. Hashable.

    Attributes:
      backend: name of the backend.
      tiles: its block sizes, of the type that it takes; None where it takes none.
      elsewhere: what runs where a traced call of "auto" is lowered for another platform than that of the hardware; None
        where that is the same.
    """

    backend: str
    tiles: Any
    elsewhere: "Plan | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a problem is computed as it is. `print` it.

    Attributes:
      problem: the problem.
      hardware: the device planned for.
      order: the backends in the order in which they were asked.
      plan: what runs; None where every backend that may be used refuses.
      refusals: for each other backend, why it does not run.
      notes: what to know of how the chosen backend computes the problem.
      tiles_from: for each of its kernels that tables may have tiles for, where these are from; empty where the caller
        gave tiles.
    """

    problem: Problem
    hardware: Hardware
    order: tuple[str, ...]
    plan: Plan | None
    refusals: dict[str, str]
    notes: tuple[str, ...] = ()
    tiles_from: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"problem   {self.problem}", f"hardware  {self.hardware}"]
        if self.plan is None:
            lines.append("runs      nothing: every backend that may be used refuses")
        else:
            tiles = "" if self.plan.tiles is None else f" with {self.plan.tiles}"
            lines.append(f"runs      {self.plan.backend}{tiles}")
        if self.tiles_from:
            lines.append("tiles     " + "; ".join(f"{kernel}: {source}" for kernel, source in self.tiles_from.items()))
        lines += [f"note      {note}" for note in self.notes]
        lines += [f"not       {name}: {reason}" for name, reason in self.refusals.items()]
        return "\n".join(lines)


def explain_plan(problem: Problem, hardware: Hardware, *, backend: str = "auto", tiles: Any = None) -> Explanation:
    """What would run, and for each other backend the reason why not. Raises nothing but for an unknown backend."""
    order = _order(hardware, backend)
    plan, refusals = _first_that_can(order, problem, hardware, tiles, backend)
    for name in (*order, *registry.names()):
        if name in refusals or (plan is not None and name == plan.backend):
            continue
        reason = _refusal(registry.get(name), problem, hardware, tiles)
        if name in order:
            moot = f"{plan.backend} comes before it on {hardware.platform}"
        elif backend == "auto":
            moot = 'runs only where asked for by name, "auto" never takes it'
        else:
            moot = "another was asked for"
        refusals[name] = reason or moot
    told: dict[str, Any] = {}
    if plan is not None:
        chosen = registry.get(plan.backend)
        told["notes"] = chosen.notes(problem)
        told["tiles_from"] = {} if tiles is not None else tiles_of(chosen, problem, hardware).sources
    return Explanation(problem=problem, hardware=hardware, order=order, plan=plan, refusals=refusals, **told)


def choose(problem: Problem, hardware: Hardware, *, backend: str = "auto", tiles: Any = None) -> Plan:
    """The plan of a problem on a hardware. An explicit backend runs or raises; "auto" goes to the next.

    It warns where it goes past all that the platform has of its own.

    Raises:
      UnsupportedError: the backend asked for refuses, or all of "auto" do, or under `strict` "auto" would warn.
    """
    order = _order(hardware, backend)
    plan, refusals = _first_that_can(order, problem, hardware, tiles, backend)
    if plan is None:
        hint = "" if backend == "auto" else 'backend="auto" takes one that can.'
        raise UnsupportedError(refusals, hint=hint)
    if refusals and plan.backend in registry.AUTO_ANYWHERE:
        if current_options().strict:
            raise UnsupportedError(refusals, hint=f"The option `strict` forbids the next backend, {plan.backend}.")
        refused = ", ".join(f"{name} refuses ({reason})" for name, reason in refusals.items())
        message = f"{refused}, {plan.backend} runs instead"
        # Python shows a warning once for each place, which must be one of the caller's.
        warnings.warn(message, FallbackWarning, skip_file_prefixes=(str(pathlib.Path(__file__).parent),))
    return plan


def _order(hardware: Hardware, backend: str) -> tuple[str, ...]:
    return registry.auto_order(hardware.platform) if backend == "auto" else (registry.get(backend).name,)


def _first_that_can(
    order: tuple[str, ...], problem: Problem, hardware: Hardware, tiles: Any, backend: str
) -> tuple[Plan | None, dict[str, str]]:
    """The plan of the first backend that takes the problem, and the refusals before it. Later ones are not loaded."""
    refusals = {}
    for name in order:
        candidate = registry.get(name)
        reason = _refusal(candidate, problem, hardware, tiles)
        if reason is None:
            elsewhere = _elsewhere(problem) if backend == "auto" and name not in registry.AUTO_ANYWHERE else None
            tiles = tiles or tiles_of(candidate, problem, hardware).tiles
            return Plan(backend=name, tiles=tiles, elsewhere=elsewhere), refusals
        refusals[name] = reason
    return None, refusals


def _elsewhere(problem: Problem) -> Plan:
    """The plan for platforms that nothing is known of. It takes every problem."""
    name = registry.AUTO_ANYWHERE[-1]
    # Most often it is a CPU beside the accelerator, and what fits its caches fits others.
    return Plan(backend=name, tiles=tiles_of(registry.get(name), problem, named("cpu")).tiles)


def _refusal(backend: Backend, problem: Problem, hardware: Hardware, tiles: Any) -> str | None:
    if tiles is not None and (backend.tiles_type is None or not isinstance(tiles, backend.tiles_type)):
        takes = "no tiles" if backend.tiles_type is None else f"tiles of type {backend.tiles_type.__name__}"
        return f"it takes {takes}, not {type(tiles).__name__}"
    return backend.supports(problem, hardware)


def check_backend_name(backend: Any) -> None:
    """Raises ArgumentError unless the name is "auto" or that of a backend."""
    if not isinstance(backend, str):
        raise ArgumentError("backend", found=repr(backend), wanted='"auto" or the name of a backend')
    if backend != "auto":
        registry.get(backend)
