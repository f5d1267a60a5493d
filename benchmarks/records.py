"""The rows that `kernel_times.py` and `torch_times.py` measure, and what they wrote, for the scripts that read it."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# Sustained rates are in a record only where `--load-s` was given.
RATES = ("forward", "backward", "forward_sustained", "backward_sustained")
# What makes a ratio of two lines one of the same measurement, in whatever processes they were measured.
_SAME = ("device", "driver", "rounds", "calls", "idle_s")
_CIRCUMSTANCES = ("device", "driver", "versions", "commit", "date", "rounds", "calls", "idle_s", "load_s")


class RecordError(Exception):
    """A file is no record, or says two things of one row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One problem, with the fields of a line that tell it from the others.

    S, K and Hv are by default T, N and H. `window` is how many keys before its own a query sees, with `causal` alone.
    """

    suite: str
    B: int
    T: int
    N: int
    H: int
    S: int = 0
    K: int = 0
    Hv: int = 0
    causal: bool = False
    window: int | None = None
    deterministic: bool = False

    def __post_init__(self):
        for name, like in (("S", "T"), ("K", "N"), ("Hv", "H")):
            object.__setattr__(self, name, getattr(self, name) or getattr(self, like))

    @property
    def operations(self) -> float:
        """Floating-point operations of the forward pass."""
        keys = self.S / 2 if self.causal else self.S
        if self.window is not None:
            keys = self.window + 1
        return 2.0 * self.B * self.N * self.T * keys * (self.H + self.Hv)

    @property
    def lengths(self) -> str:
        return str(self.T) if self.S == self.T else f"{self.T} × {self.S}"

    @property
    def mask(self) -> str:
        """The mask, and with it the mode of the backward pass where that is not the usual one."""
        name = f"window {self.window}" if self.window is not None else "causal" if self.causal else "full"
        return f"{name}, deterministic" if self.deterministic else name

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={getattr(self, name)}" for name in ("B", "T", "S", "N", "K", "H", "Hv"))
        return f"{self.suite} {sizes} {self.mask}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """What is known of one implementation on one row.

    Attributes:
      tflops: those of `RATES` that were measured; empty where it did not run.
      not_run: why it did not run, else empty.
      where: the circumstances of its run.
    """

    tflops: Mapping[str, float]
    not_run: str
    where: Mapping[str, Any]


# The lines of each row by implementation, in the order of the file.
type Record = dict[Row, dict[str, Line]]


def read(file: pathlib.Path) -> Record:
    """Reads a record; lines of other kinds are passed over.

    Raises:
      RecordError: a line is none of ours, or two are of one row and implementation: a ratio is of one run, and nothing
        says which of two is meant.
      OSError: the file cannot be read.
    """
    record: Record = {}
    kinds = set()
    for number, text in enumerate(file.read_text().splitlines(), 1):
        place = f"{file}:{number}"
        try:
            fields = json.loads(text)
            kinds.add(fields["kind"])
            if fields["kind"] != "kernel_times":
                continue
            row, name, line = _parse(fields)
        except KeyError as error:
            raise RecordError(f"{place}: found no field {error}") from error
        except (TypeError, ValueError) as error:
            raise RecordError(f"{place}: found {text[:60]!r}, wanted an object of kernel_times.py: {error}") from error
        if name in record.setdefault(row, {}):
            raise RecordError(f"{place}: found {name} on {row} a second time, wanted every run in a file of its own")
        record[row][name] = line
    if not record:
        raise RecordError(f"{file}: found lines of kind {sorted(kinds)}, wanted some of kind 'kernel_times'")
    return record


def read_together(files: Sequence[pathlib.Path]) -> Record:
    """One record of several files: of the JAX process and of the PyTorch process, say.

    Raises:
      RecordError: as `read`, or of two files that are not of the same device, driver and way of timing, or that have
        the same implementation on the same row.
    """
    together = read(files[0])
    before = _settings(together)
    for file in files[1:]:
        other = read(file)
        for name, values in _settings(other).items():
            if values != before[name]:
                was, now = (" and ".join(sorted(map(str, found))) for found in (before[name], values))
                raise RecordError(f"{file}: found {name} {now}, wanted {was}, as in {files[0]}: no ratio is of both")
        for row, lines in other.items():
            own = together.setdefault(row, {})
            for name, line in lines.items():
                if name in own:
                    raise RecordError(f"{file}: found {name} on {row}, wanted it in one of the files alone")
                own[name] = line
    return together


def _settings(record: Record) -> dict[str, set[Any]]:
    return {name: {line.where[name] for lines in record.values() for line in lines.values()} for name in _SAME}


def _parse(fields: dict[str, Any]) -> tuple[Row, str, Line]:
    # The lines of 2026-11-30 are of the grid alone, and have no more fields than that needs.
    of_grid = {"suite": "grid", "S": fields["T"], "Hv": fields["H"], "window": None, "deterministic": False}
    fields = of_grid | {"load_s": 0.0} | fields
    row = Row(**{field.name: fields[field.name] for field in dataclasses.fields(Row)})
    not_run = " ".join(fields.get("not_run", "").split())
    tflops = {rate: fields[f"{rate}_tflops"] for rate in RATES if f"{rate}_tflops" in fields}
    if not not_run and not {"forward", "backward"} <= tflops.keys():
        raise ValueError(f"rates of {list(tflops)}, not of forward and backward, and no reason in 'not_run'")
    for rate, value in tflops.items():
        if not value > 0:
            raise ValueError(f"{rate}_tflops is {value}, not above 0")
    where = {name: fields[name] for name in _CIRCUMSTANCES}
    return row, fields["implementation"], Line(tflops=tflops, not_run=not_run, where=where)


def runs(record: Record) -> list[tuple[Mapping[str, Any], set[str]]]:
    """The circumstances of each run, with the suites that were measured in it."""
    found: list[tuple[Mapping[str, Any], set[str]]] = []
    for row, lines in record.items():
        for line in lines.values():
            suites = next((suites for where, suites in found if where == line.where), None)
            if suites is None:
                found.append((line.where, {row.suite}))
            else:
                suites.add(row.suite)
    return found


def describe(where: Mapping[str, Any]) -> str:
    """The circumstances of a run in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version is not None)
    return f"{where['device']}, driver {where['driver']}; {versions}; commit {where['commit']}; {where['date']}"
