"""A record of `kernel_times.py` as a Markdown table: `python benchmarks/report.py lines.jsonl > report.md`.

With more files, as that of `torch_times.py`, it is one table of all; they must be of the same device, driver and way of
timing. Of each row it holds jflash against the fastest peer of that row and pass, by TFLOP/s: above 1 jflash is faster.
With `--plot` it also draws the suite "grid" by length, as papers on attention do.
"""

import argparse
import pathlib
import statistics
from collections.abc import Iterator, Sequence

from records import Line, Record, RecordError, Row, describe, read_together, runs

from jflash.cli.plot import MissingMatplotlib, prepare

_TABLES = {"": ("forward", "backward"), "under load": ("forward_sustained", "backward_sustained")}
_NONE = "–"


def ratio(lines: dict[str, Line], rate: str) -> float | None:
    """jflash against the best peer; None where one of the two was not measured."""
    tflops = {name: line.tflops[rate] for name, line in lines.items() if rate in line.tflops}
    ours = tflops.pop("jflash", None)
    return None if ours is None or not tflops else ours / max(tflops.values())


def implementations(record: Record) -> list[str]:
    """Those that a row has a line of, jflash first."""
    return list(dict.fromkeys(["jflash", *(name for lines in record.values() for name in lines)]))


def report(record: Record) -> Iterator[str]:
    """The lines of the report."""
    yield "# Kernel times"
    yield ""
    for where, suites in runs(record):
        yield f"- {describe(where)} ({', '.join(sorted(suites))})"
    yield ""
    yield "Numbers are TFLOP/s; ratios are jflash / the best peer of the row and pass."
    for title, rates in _TABLES.items():
        if any(rate in line.tflops for lines in record.values() for line in lines.values() for rate in rates):
            yield ""
            yield from _table(record, title, rates)
            yield ""
            for rate in rates:
                yield _mean(record, rate)
    yield ""
    yield from _not_run(record)


def _table(record: Record, title: str, rates: Sequence[str]) -> Iterator[str]:
    if title:
        yield f"## {title.capitalize()}"
        yield ""
    names = [name for name in implementations(record) if any(_ran(lines, name) for lines in record.values())]
    header = ["suite", "B", "T × S", "N/K", "H/Hv", "mask"]
    for rate in rates:
        which = rate.removesuffix("_sustained")
        header += [*(f"{which} {name}" for name in names), f"{which} ratio"]
    yield _cells(header)
    yield _cells(["---", "---:", "---:", "---:", "---:", "---", *["---:"] * (len(header) - 6)])
    for row, lines in record.items():
        cells = [row.suite, str(row.B), row.lengths, f"{row.N}/{row.K}", f"{row.H}/{row.Hv}", row.mask]
        for rate in rates:
            for name in names:
                has = name in lines and rate in lines[name].tflops
                cells.append(f"{lines[name].tflops[rate]:.1f}" if has else _NONE)
            found = ratio(lines, rate)
            cells.append(_NONE if found is None else f"{found:.3f}")
        yield _cells(cells)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ran(lines: dict[str, Line], name: str) -> bool:
    return name in lines and bool(lines[name].tflops)


def _mean(record: Record, rate: str) -> str:
    ratios = [found for lines in record.values() if (found := ratio(lines, rate)) is not None]
    name = rate.replace("_", " ")
    if not ratios:
        return f"- {name}: no row has both jflash and a peer"
    slower = sum(found < 1 for found in ratios)
    mean = statistics.geometric_mean(ratios)
    return f"- {name}: geometric mean of the ratios {mean:.3f}, {slower} of {len(ratios)} rows below 1"


def _not_run(record: Record) -> Iterator[str]:
    """Every implementation that is missing on some row, with the reasons, each with its rows."""
    for name in implementations(record):
        rows: dict[str, list[Row]] = {}
        for row, lines in record.items():
            if not _ran(lines, name):
                rows.setdefault(lines[name].not_run if name in lines else "not in the record", []).append(row)
        for reason, missing in rows.items():
            where = "any row" if len(missing) == len(record) else "; ".join(map(str, missing))
            yield f"- {name} did not run on {where}: {reason}"


# The picture ----------------------------------------------------------------------------------------------------------


def draw(file: pathlib.Path, record: Record) -> None:
    """Draws the suite "grid": a line of panels for each head dim, in it forward and backward, full and causal."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    grid = {row: lines for row, lines in record.items() if row.suite == "grid"}
    names = [name for name in implementations(grid) if any(_ran(lines, name) for lines in grid.values())]
    # From dark to light: told apart also without colours.
    shades = matplotlib.colormaps["cividis"].resampled(max(2, len(names)))
    colours = {name: shades(number) for number, name in enumerate(names)}
    head_dims = sorted({row.H for row in grid})
    columns = [(rate, causal) for rate in _TABLES[""] for causal in sorted({row.causal for row in grid})]
    figure = Figure(figsize=(4 * len(columns), 1.5 + 3 * len(head_dims)), dpi=150, layout="constrained")
    figure.suptitle("\n".join(describe(where) for where, _ in runs(grid)), fontsize=9)
    panels = figure.subplots(len(head_dims), len(columns), sharey=True, squeeze=False)
    for H, line in zip(head_dims, panels):
        for (rate, causal), axes in zip(columns, line):
            by_length = {row.T: lines for row, lines in grid.items() if (row.H, row.causal) == (H, causal)}
            _draw_panel(axes, dict(sorted(by_length.items())), rate, colours)
            axes.set_title(f"{rate}, {'causal' if causal else 'full'}, H={H}", fontsize=11)
        line[0].set_ylabel("TFLOP/s")
    # Of its own patches: a panel may have no bar to take a colour from.
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names))
    figure.savefig(file)


def _draw_panel(axes, by_length: dict[int, dict[str, Line]], rate: str, colours: dict[str, tuple]) -> None:
    width = 0.85 / len(colours)
    for number, (name, colour) in enumerate(colours.items()):
        tflops = [lines[name].tflops.get(rate, 0) if name in lines else 0 for lines in by_length.values()]
        positions = [group + (number - (len(colours) - 1) / 2) * width for group in range(len(by_length))]
        bars = axes.bar(positions, tflops, width=width, color=colour)
        axes.bar_label(bars, [f"{value:.0f}" if value else "" for value in tflops], fontsize=7, padding=1)
    axes.set_xticks(range(len(by_length)), [f"{length:,}" for length in by_length])
    axes.set_xlabel("length T = S (tokens)")
    axes.grid(True, axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.margins(y=0.1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=pathlib.Path, nargs="+")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    try:
        record = read_together(options.record)
        if options.plot is not None:
            prepare(options.plot)
            suites = {row.suite for row, lines in record.items() if any(_ran(lines, name) for name in lines)}
            if "grid" not in suites:
                raise RecordError(f"--plot: found rows of {sorted(suites)}, wanted some of 'grid'")
            draw(options.plot, record)
    except (RecordError, MissingMatplotlib, OSError) as error:
        parser.error(str(error))
    print("\n".join(report(record)))


if __name__ == "__main__":
    main()
