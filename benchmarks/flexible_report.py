"""jflash beside FlexAttention, from lines of `flexible_times.py`: `python benchmarks/flexible_report.py lines.jsonl`.

Ratios are times of FlexAttention / times of jflash: above 1 jflash is faster.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from records import RecordError

_SIDES = ("jflash", "flex_attention")
_PASSES = ("forward", "backward")


type Cases = dict[tuple[str, int], dict[str, dict[str, Any]]]


def by_case(lines: Iterable[str]) -> Cases:
    """The lines of each case and length, by implementation; those of other kinds are passed over.

    Raises:
      RecordError: there are none, or a second one of a case, length and implementation: nothing says which is meant.
    """
    found: Cases = {}
    for line in filter(None, map(str.strip, lines)):
        fields = json.loads(line)
        if fields.get("kind") != "flexible_times":
            continue
        sides = found.setdefault((fields["case"], fields["T"]), {})
        if fields["implementation"] in sides:
            place = f"{fields['implementation']} on {fields['case']} T={fields['T']}"
            raise RecordError(f"found {place} a second time, wanted every run in a file of its own")
        sides[fields["implementation"]] = fields
    if not found:
        raise RecordError("found no line of kind 'flexible_times'")
    return found


def report(cases: Cases) -> Iterator[str]:
    """The lines of the report."""
    header = ["case", "T", *(f"{which} {side}" for which in _PASSES for side in (*_SIDES, "ratio"))]
    yield _cells(header)
    yield _cells(["---", *["---:"] * (len(header) - 1)])
    ratios: dict[str, list[float]] = {which: [] for which in _PASSES}
    missing = []
    for (case, T), sides in cases.items():
        cells = [case, str(T)]
        for which in _PASSES:
            ms = [sides.get(side, {}).get(f"{which}_ms") for side in _SIDES]
            cells += ["–" if own is None else f"{sides[side][f'{which}_tflops']:.0f}" for side, own in zip(_SIDES, ms)]
            if None in ms:
                cells.append("–")
            else:
                ratios[which].append(ms[1] / ms[0])
                cells.append(f"{ratios[which][-1]:.2f}")
        yield _cells(cells)
        for side in _SIDES:
            reason = sides[side].get("not_run") if side in sides else "not in the record"
            if reason:
                missing.append(f"- {side} did not run on {case} T={T}: {reason}")
    yield ""
    yield "Numbers are TFLOP/s of the pairs that attend; ratios are times of FlexAttention / times of jflash."
    for which in (*_PASSES, "both"):
        found = [ratio for own, of in ratios.items() if which in (own, "both") for ratio in of]
        if found:
            slower = sum(ratio < 1 for ratio in found)
            mean = statistics.geometric_mean(found)
            yield f"- {which}: geometric mean of the ratios {mean:.2f}, {slower} of {len(found)} below 1"
    yield from missing


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    try:
        cases = by_case(parser.parse_args(argv).file.read_text().splitlines())
    except (OSError, ValueError, RecordError) as error:
        parser.error(str(error))
    print("\n".join(report(cases)))


if __name__ == "__main__":
    main()
