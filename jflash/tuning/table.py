"""Tuning tables: the tiles that a search found faster than the formula of a backend, by device and `Key`.

A table is a JSON file:

    {"format": 1, "device": "h200", "backend": "mosaic_gpu", "entries": [
      {"key": {"kernel": "forward", "H": 128, ...}, "tiles": {"warpgroups": 2, ...}, "measured": {...}}]}

`key` has the fields of `Key`, `tiles` all fields of the record of that kernel, `measured` the call, times and versions
of the search. The package ships one for each device in `data/`; the option `tuning_table` names one more, which comes
first. A problem without an entry gets the tiles of the formula, `Backend.default_tiles`. Files are read once in a
process, and nothing is ever tuned on the way: the same versions give the same tiles everywhere.
"""

import dataclasses
import functools
import json
import pathlib
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jflash.backends.protocol import Backend
from jflash.errors import ArgumentError
from jflash.hardware import Hardware
from jflash.options import current_options
from jflash.problem import Problem
from jflash.tuning.key import Key

FORMAT = 1
FORMULA = "the formula"
DATA = pathlib.Path(__file__).parent / "data"
_HEAD = ("format", "device", "backend", "entries")
_OPTION = "tuning_table"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The tiles of one kernel for one class of problems.

    Attributes:
      tiles: the record of the kernel, such as `ForwardTiles`.
      measured: JSON of how it was found: workload, times, device, versions, date.
    """

    key: Key
    tiles: Any
    measured: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The entries of one file.

    Attributes:
      file: where it was read from.
      device: as `device_name` gives it; the tiles are for no other.
      backend: the name of the backend whose tiles they are.
    """

    file: pathlib.Path
    device: str
    backend: str
    entries: Mapping[Key, Entry]

    def with_entries(self, entries: Iterable[Entry], *, without: Iterable[Key] = ()) -> "Table":
        """The table with these entries in place of those of the same keys, and without some."""
        kept = {key: entry for key, entry in self.entries.items() if key not in set(without)}
        return dataclasses.replace(self, entries=kept | {entry.key: entry for entry in entries})

    def write(self) -> None:
        """Writes the file, an entry a line, sorted, so that a difference of two versions can be read."""
        lines = sorted(
            json.dumps(
                {"key": dataclasses.asdict(e.key), "tiles": dataclasses.asdict(e.tiles), "measured": dict(e.measured)}
            )
            for e in self.entries.values()
        )
        head = json.dumps({"format": FORMAT, "device": self.device, "backend": self.backend})[:-1]
        body = "[]" if not lines else "[\n" + ",\n".join(lines) + "\n]"
        # In one step: who reads at the same time, or is ended now, finds a whole file.
        unfinished = self.file.with_name(self.file.name + ".part")
        unfinished.write_text(f'{head}, "entries": {body}}}\n', encoding="utf-8")
        unfinished.replace(self.file)


class Chosen(NamedTuple):
    """Tiles, and for each tuned kernel where they are from: `FORMULA`, or a file and the key of its entry."""

    tiles: Any
    sources: Mapping[str, str]


def device_name(hardware: Hardware) -> str:
    """The device as tables name it: "h200" for the name "h200" and for "NVIDIA H200", as CUDA calls it."""
    return hardware.name.lower().removeprefix("nvidia ").replace(" ", "_")


def kernel_types(backend: Backend) -> dict[str, type]:
    """The record of each kernel whose tiles a table may hold."""
    hints = typing.get_type_hints(backend.tiles_type)
    return {kernel: kind for kernel, kind in hints.items() if dataclasses.is_dataclass(kind)}


def tiles_of(backend: Backend, problem: Problem, hardware: Hardware) -> Chosen:
    """The tiles that a call gets: of the formula, each kernel's replaced where a table has an entry for the problem.

    Raises:
      ArgumentError: a table is not as the top of this module says.
    """
    return _tiles_of(backend, problem, hardware, current_options().tuning_table)


# Remembered, since every eager call is planned anew.
@functools.lru_cache(maxsize=1024)
def _tiles_of(backend: Backend, problem: Problem, hardware: Hardware, user_table: str | None) -> Chosen:
    tiles, sources = backend.default_tiles(problem, hardware), {}
    files = [pathlib.Path(user_table)] if user_table is not None else []
    files.append(DATA / f"{device_name(hardware)}.json")
    kernels = backend.tuned_kernels(problem)
    # A file that is named must be there; a device need not have one.
    tables = [read(file, backend, hardware) for file in files if kernels and (file.parent != DATA or file.exists())]
    for kernel in kernels:
        sources[kernel] = FORMULA
        key = Key.of(problem, kernel)
        for table in tables:
            if table.device == device_name(hardware) and key in table.entries:
                tiles = dataclasses.replace(tiles, **{kernel: table.entries[key].tiles})
                sources[kernel] = f"{table.file.name}, {describe(key)}"
                break
    return Chosen(tiles, sources)


def describe(key: Key) -> str:
    """A key in a few words."""
    sizes = " ".join(f"{name}<={getattr(key, name)}" for name in ("T", "S", "keys", "heads"))
    return f"H={key.H} Hv={key.Hv} group={key.group} {key.mask} {sizes}" + ("" if key.aligned else " odd lengths")


@functools.lru_cache(maxsize=64)
def read(file: pathlib.Path, backend: Backend, hardware: Hardware) -> Table:
    """Reads a table.

    Raises:
      ArgumentError: no table of this backend, or an entry with unknown or missing fields, or tiles that the kernel is
        not written for, or whose operands alone, where the table is for this hardware, do not fit its shared memory. It
        names the file and the entry. All that a kernel needs is known when it is traced, and in the tests.
    """

    def refuse(found: object, wanted: str, place: str = "") -> ArgumentError:
        return ArgumentError(_OPTION, found=f"{found} in {file}{place}", wanted=wanted)

    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise refuse(f"no file ({error.strerror})", "the file of a tuning table") from error
    except ValueError as error:
        raise refuse(f"no JSON ({error})", "the JSON of a tuning table") from error
    if not isinstance(content, dict) or set(content) != set(_HEAD):
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise refuse(found, f"an object with {', '.join(_HEAD)}")
    if content["format"] != FORMAT or content["backend"] != backend.name:
        wanted = f"format {FORMAT} and backend {backend.name}"
        raise refuse(f"format {content['format']} and backend {content['backend']}", wanted)
    entries: dict[Key, Entry] = {}
    for number, fields in enumerate(content["entries"]):
        try:
            entry = _entry(fields, backend)
        except TypeError as error:
            raise refuse(error, "the fields of a key, and of the tiles of its kernel", f", entry {number}") from error
        except ArgumentError as error:
            raise refuse(error, "tiles that fit the kernel", f", entry {number}") from error
        needed, most = entry.tiles.operand_bytes(entry.key.H, entry.key.Hv), hardware.smem_bytes_per_block
        if content["device"] == device_name(hardware) and needed > most:
            found = f"{entry.tiles}, {needed} bytes of shared memory"
            raise refuse(found, f"at most {most} bytes", f", entry {number} ({describe(entry.key)})")
        if entry.key in entries:
            raise refuse("a second entry", "one for each key", f", entry {number} ({describe(entry.key)})")
        entries[entry.key] = entry
    return Table(file=file, device=content["device"], backend=content["backend"], entries=entries)


def _entry(fields: Any, backend: Backend) -> Entry:
    if not isinstance(fields, dict) or set(fields) != {"key", "tiles", "measured"}:
        raise TypeError(f"fields {sorted(fields) if isinstance(fields, dict) else fields}")
    key = Key(**_checked(fields["key"], Key))
    kinds = kernel_types(backend)
    if key.kernel not in kinds:
        raise TypeError(f"kernel={key.kernel!r}")
    kind = kinds[key.kernel]
    return Entry(key=key, tiles=kind(**_checked(fields["tiles"], kind)), measured=fields["measured"])


def _checked(values: Any, kind: type) -> dict[str, Any]:
    """The values, all fields of a record there, and of the types that it says."""
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict) or set(values) != set(hints):
        raise TypeError(f"{sorted(set(values) ^ set(hints))} of {kind.__name__}")
    for name, hint in hints.items():
        value = values[name]
        if typing.get_origin(hint) is typing.Literal:
            fits = value in typing.get_args(hint)
        else:
            # A boolean is an int in Python, and no number of stages.
            fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
        if not fits:
            raise TypeError(f"{name}={value!r} of {kind.__name__}")
    return values
