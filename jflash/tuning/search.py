"""The search for the best tiles of one kernel: every candidate is checked, then timed in turns with the formula's."""

import copy
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

# The fastest after two turns, which are timed beside the formula until the winner is known.
_FINALISTS = 3


class TuningError(Exception):
    """The tiles of the formula do not run, are wrong or cannot be timed: there is nothing to compare with."""


class Kernel(NamedTuple):
    """How a search tries tiles; a test puts its own functions here.

    Attributes:
      compile: tiles to a program that has them; raises where they do not compile.
      fault: what is wrong with the results of a program, or None.
      time_ms: the kernel time of one turn of a program.
    """

    compile: Callable[[Any], Any]
    fault: Callable[[Any], str | None]
    time_ms: Callable[[Any], float]


@dataclasses.dataclass(kw_only=True)
class Tried:
    """What was found of some tiles.

    Attributes:
      turns_ms: the time of each turn.
      rejected: why they cannot win, whatever they take; empty otherwise.
    """

    tiles: Any
    turns_ms: list[float] = dataclasses.field(default_factory=list)
    rejected: str = ""

    @property
    def ms(self) -> float | None:
        return statistics.median(self.turns_ms) if self.turns_ms else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a search.

    Attributes:
      formula: the tiles of the formula, with the turns of the last comparison.
      winner: tiles that beat them by more than the noise, or None.
      tried: all others, with the turns in which they took part.
      is_complete: every candidate was timed; otherwise time was up before.
    """

    formula: Tried
    winner: Tried | None
    tried: tuple[Tried, ...]
    is_complete: bool

    @property
    def gain(self) -> float:
        """By what part of its time the formula is slower than the winner; 0 without one."""
        return self.formula.ms / self.winner.ms - 1 if self.winner else 0.0


def search(
    formula: Any,
    candidates: Callable[[Any], Iterable[Any]],
    kernel: Kernel,
    *,
    turns: int,
    least_gain: float,
    steps: int = 2,
    is_time_up: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
    describe: Callable[[Any], str] = str,
) -> Outcome:
    """Tries the candidates next to the formula, then those next to the winner, until nothing is faster.

    Tiles that do not compile, give a wrong result or cannot be timed are kept with the reason and never win. Of the
    others the fastest in two turns meet the formula's in `turns` more; they take turns, so that heat and clocks are the
    same for all.

    Args:
      formula: tiles to beat.
      candidates: tiles to those next to them; asked for the formula's and for each winner.
      turns: how often each finalist is timed.
      least_gain: by what part the median must be shorter, besides that no turn overlaps.
      steps: how often candidates are asked for.
      is_time_up: asked before each candidate and each turn; what was found before counts.
      say: told what happens, a line each.
      describe: what tiles are called there.

    Raises:
      TuningError: the tiles of the formula do not run.
    """
    base, compiled, tried = Tried(tiles=formula), {}, {}
    if not _prepare(base, kernel, compiled) or not _take_turn([base], kernel, compiled):
        raise TuningError(f"the tiles of the formula: {base.rejected}")
    best: Tried | None = None
    proof = base, best
    is_complete = True
    for _ in range(steps):
        around = candidates((best or base).tiles)
        fresh = list(dict.fromkeys(tiles for tiles in around if tiles != formula and tiles not in tried))
        ready = []
        for number, tiles in enumerate(fresh, 1):
            if is_time_up():
                is_complete = False
                break
            tried[tiles] = own = Tried(tiles=tiles)
            say(f"candidate {number} of {len(fresh)}: {describe(tiles)}")
            if _prepare(own, kernel, compiled) and _take_turn([own], kernel, compiled):
                ready.append(own)
            if own.rejected:
                say(f"rejected: {own.rejected}")
        _take_turn(ready, kernel, compiled)
        finalists = sorted(_timed(ready), key=lambda own: own.ms)[:_FINALISTS]
        if not finalists:
            break
        contenders = [base, *([best] if best else []), *finalists]
        for own in contenders:
            own.turns_ms.clear()
        for turn in range(turns):
            if is_time_up():
                return Outcome(formula=proof[0], winner=proof[1], tried=tuple(tried.values()), is_complete=False)
            _take_turn(contenders, kernel, compiled)
            say(f"final turn {turn + 1} of {turns}")
        faster = [own for own in _timed(contenders[1:]) if beats(own, base, least_gain=least_gain)]
        before, best = best, min(faster, key=lambda own: own.ms, default=None)
        # As they are now: a later step times both anew.
        proof = copy.deepcopy((base, best))
        if best is before or not is_complete:
            break
    return Outcome(formula=proof[0], winner=proof[1], tried=tuple(tried.values()), is_complete=is_complete)


def beats(one: Tried, other: Tried, *, least_gain: float) -> bool:
    """Whether it is faster by more than the noise: its slowest turn than the other's fastest, its median by a gain."""
    return max(one.turns_ms) < min(other.turns_ms) and one.ms * (1 + least_gain) <= other.ms


def _timed(tried: Sequence[Tried]) -> list[Tried]:
    return [own for own in tried if own.turns_ms and not own.rejected]


def _prepare(own: Tried, kernel: Kernel, compiled: dict[Any, Any]) -> bool:
    """Compiles tiles and checks their result; False, with the reason, where they do not pass."""
    try:
        program = kernel.compile(own.tiles)
        own.rejected = kernel.fault(program) or ""
    except Exception as error:  # The compiler and the device have errors of many kinds; each is kept with its tiles.
        own.rejected = _reason(error)
    if own.rejected:
        return False
    compiled[own.tiles] = program
    return True


def _take_turn(contenders: Sequence[Tried], kernel: Kernel, compiled: dict[Any, Any]) -> bool:
    """Times each once; False where some could not be timed, and are rejected."""
    for own in contenders:
        if own.rejected:
            continue
        try:
            own.turns_ms.append(kernel.time_ms(compiled[own.tiles]))
        except Exception as error:  # As above; a profiler may also fail on some programs.
            own.rejected = _reason(error)
    return not any(own.rejected for own in contenders)


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
