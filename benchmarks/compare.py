"""Two records of `kernel_times.py` held against each other: `python benchmarks/compare.py OLD NEW`.

Exits 1 where jflash lost more than the tolerance on some row and pass, or where the records share no row of jflash.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence

from records import RATES, Record, RecordError, Row, describe, read, runs

# What changes the numbers, and is not what a comparison is made for.
_SETTINGS = ("device", "driver", "rounds", "calls", "idle_s", "load_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One rate of one implementation on one row, before and after."""

    row: Row
    implementation: str
    rate: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        return self.new / self.old


def changes(old: Record, new: Record) -> list[Change]:
    """What both records measured, the largest loss first."""
    found = [
        Change(row=row, implementation=name, rate=rate, old=line.tflops[rate], new=new[row][name].tflops[rate])
        for row, lines in old.items()
        for name, line in lines.items()
        if name in new.get(row, {})
        for rate in RATES
        if rate in line.tflops and rate in new[row][name].tflops
    ]
    return sorted(found, key=lambda change: change.ratio)


def differences(old: Record, new: Record) -> Iterator[str]:
    """Devices, versions and settings that are not the same in both."""
    before, after = _circumstances(old), _circumstances(new)
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            was, now = (" and ".join(sorted(found.get(name, {"none"}))) for found in (before, after))
            yield f"- {name} differs: {was} → {now}"


def _circumstances(record: Record) -> dict[str, set[str]]:
    """The values of each, as text: a record of several runs may have several."""
    found: dict[str, set[str]] = {}
    for where, _ in runs(record):
        values = {name: where[name] for name in _SETTINGS} | {
            f"{name} version": v for name, v in where["versions"].items()
        }
        for name, value in values.items():
            found.setdefault(name, set()).add("none" if value is None else str(value))
    return found


def only_in(one: Record, other: Record) -> Iterator[str]:
    """What one record measured and the other did not, with the reason where that has one."""
    for row, lines in one.items():
        for name, line in lines.items():
            twin = other.get(row, {}).get(name)
            if line.tflops and (twin is None or not twin.tflops):
                yield f"{name} on {row}" + (f" (there: {twin.not_run})" if twin is not None else "")


def verdict(found: Sequence[Change], tolerance: float) -> tuple[str, int]:
    """The last line, and the exit code."""
    ours = [change for change in found if change.implementation == "jflash"]
    lost = [change for change in ours if change.ratio < 1 - tolerance]
    if not ours:
        return "FAILED: the records share no row of jflash.", 1
    if lost:
        return f"FAILED: jflash lost more than {tolerance:.1%} in {len(lost)} of {len(ours)} rates.", 1
    return f"PASSED: jflash lost more than {tolerance:.1%} in none of {len(ours)} rates.", 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--tolerance", type=float, default=0.03, help="the share that jflash may lose (default 0.03)")
    options = parser.parse_args(arguments)
    if not 0 <= options.tolerance < 1:
        parser.error(f"--tolerance: found {options.tolerance}, wanted a share from 0 to below 1")
    try:
        old, new = read(options.old), read(options.new)
    except (RecordError, OSError) as error:
        parser.error(str(error))
    for name, record in (("old", old), ("new", new)):
        for where, _ in runs(record):
            print(f"- {name}: {describe(where)}")
    for text in differences(old, new):
        print(text)
    print("\n| new/old | old TFLOP/s | new TFLOP/s | pass | implementation | row |\n|---:|---:|---:|---|---|---|")
    found = changes(old, new)
    for change in found:
        numbers = f"{change.ratio:.3f} | {change.old:.1f} | {change.new:.1f}"
        print(f"| {numbers} | {change.rate.replace('_', ' ')} | {change.implementation} | {change.row} |")
    print()
    for name, texts in (("old", only_in(old, new)), ("new", only_in(new, old))):
        for text in texts:
            print(f"- only in {name}: {text}")
    text, exit_code = verdict(found, options.tolerance)
    print(f"\n{text}")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
