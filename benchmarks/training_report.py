"""A record of `training_step.py` as a Markdown table: `python benchmarks/training_report.py lines.jsonl > report.md`.

Of each length and policy it holds every implementation against jflash: its time, and how far its loss was from that of
jflash at any step. With `--plot` it also draws the losses.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from records import RecordError, describe

from jflash.cli.plot import MissingMatplotlib, prepare

_GIB = 2**30
_WHERE = ("device", "driver", "versions", "commit", "date")
# What tells two measurements of one implementation apart.
_SIZES = ("T", "B", "remat", "layers", "features", "hidden_features", "N", "K", "H", "steps", "dtype")

# The lines of each problem by implementation, in the order of the file.
type Record = dict[tuple[Any, ...], dict[str, dict[str, Any]]]


def read(file: pathlib.Path) -> Record:
    """Reads a record; lines of other kinds are passed over.

    Raises:
      RecordError: a line is none of ours, or two are of one problem and implementation.
      OSError: the file cannot be read.
    """
    record: Record = {}
    for number, text in enumerate(file.read_text().splitlines(), 1):
        place = f"{file}:{number}"
        try:
            line = json.loads(text)
            if line["kind"] != "training_step":
                continue
            name, problem = line["implementation"], tuple(line[size] for size in _SIZES)
            missing = {*_WHERE, *(() if "not_run" in line else ("step_ms", "losses", "peak_bytes"))} - line.keys()
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{place}: found {text[:60]!r}, wanted an object of training_step.py: {error}") from error
        if missing:
            raise RecordError(f"{place}: found no fields {sorted(missing)}")
        if name in record.setdefault(problem, {}):
            raise RecordError(f"{place}: found {name} a second time, wanted every run in a file of its own")
        record[problem][name] = line
    if not record:
        raise RecordError(f"{file}: found no line of kind 'training_step'")
    return record


def report(record: Record) -> Iterator[str]:
    """The lines of the report."""
    yield "# A training step"
    yield ""
    lines = [line for by_name in record.values() for line in by_name.values()]
    # A process for each line, a few seconds after the one before: of the time the day is enough.
    yield from dict.fromkeys(f"- {describe({**line, 'date': line['date'][:10]})}" for line in lines)
    yield ""
    yield (
        "Times are of a whole step, and the ratio is that to the step with jflash. The last column is the largest "
        "difference of the loss from that with jflash, at any step."
    )
    yield ""
    header = ["tokens", "remat", "implementation", "step (ms)", "ratio", "tokens/s", "TFLOP/s", "peak (GiB)"]
    yield _cells([*header, "loss, first → last", "difference"])
    yield _cells(["---:", "---", "---", *["---:"] * 7])
    for by_name in record.values():
        yield from (_row(line, by_name.get("jflash", {})) for line in by_name.values() if "not_run" not in line)
    yield ""
    for line in lines:
        if "not_run" in line:
            reason = " ".join(line["not_run"].split())
            yield f"- {line['implementation']} did not run on {line['B']} × {line['T']}, {line['remat']}: {reason}"


def _row(line: dict[str, Any], ours: dict[str, Any]) -> str:
    ratio = difference = "–"
    if "losses" in ours and line is not ours:
        ratio = f"{line['step_ms'] / ours['step_ms']:.2f}"
        difference = f"{max(abs(one - other) for one, other in zip(line['losses'], ours['losses'])):.4f}"
    peak = "–" if line["peak_bytes"] is None else f"{line['peak_bytes'] / _GIB:.1f}"
    times = [f"{line['step_ms']:.1f}", ratio, str(line["tokens_per_s"]), str(line["tflops"]), peak]
    losses = f"{line['losses'][0]:.3f} → {line['losses'][-1]:.3f}"
    return _cells([f"{line['B']} × {line['T']}", line["remat"], line["implementation"], *times, losses, difference])


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(file: pathlib.Path, record: Record) -> None:
    """Draws the loss at each step, a panel for each length and policy, the curves on top of each other."""
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for by_name in record.values() for name in by_name))
    shades = matplotlib.colormaps["cividis"].resampled(max(2, len(names)))
    figure = Figure(figsize=(4.5 * len(record), 3.5), dpi=150, layout="constrained")
    for axes, by_name in zip(figure.subplots(1, len(record), squeeze=False)[0], record.values()):
        ran = [line for line in by_name.values() if "losses" in line]
        for line in ran:
            number = names.index(line["implementation"])
            # From broad to thin, so that each is seen where they are the same.
            style = {"linewidth": 5 - 4 * number / len(names), "color": shades(number)}
            axes.plot(range(1, len(line["losses"]) + 1), line["losses"], label=line["implementation"], **style)
        first = next(iter(by_name.values()))
        axes.set(
            title=f"{first['B']} × {first['T']} tokens, remat {first['remat']}", xlabel="step", ylabel="loss (nats)"
        )
        if ran:
            axes.legend(frameon=False)
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    try:
        record = read(options.record)
        if options.plot is not None:
            prepare(options.plot)
            draw(options.plot, record)
    except (RecordError, MissingMatplotlib, OSError) as error:
        parser.error(str(error))
    print("\n".join(report(record)))


if __name__ == "__main__":
    main()
