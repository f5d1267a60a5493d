"""The picture of `jflash check`: memory by length, and errors against their bounds."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jflash.api import flash_attention
from jflash.cli.measurement import Call, OutOfMemory, Program, device_name, forward_backward
from jflash.errors import UnsupportedError

if TYPE_CHECKING:
    from jflash.cli.check import Checked

_LENGTHS = (1024, 4096, 16384)
_N, _K, _H, _DTYPE = 4, 2, 128, "bfloat16"
# Told apart also without colours and by those who see few: dark against light, circles against squares.
_OURS, _PLAIN, _TEXT = "#1b5e9e", "#e3963e", "0.25"


class MissingMatplotlib(Exception):
    """The picture needs a package that is not installed."""


def prepare(file: pathlib.Path) -> None:
    """Finds out whether the picture can be drawn and written.

    Raises:
      MissingMatplotlib, OSError: it cannot.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingMatplotlib('--plot needs matplotlib: pip install "jflash[bench]"') from error
    if not file.parent.is_dir():
        raise FileNotFoundError(f"--plot: there is no folder {file.parent}")
    kinds = sorted(matplotlib.figure.Figure().canvas.get_supported_filetypes())
    if file.suffix.removeprefix(".") not in kinds:
        raise OSError(f"--plot: the name {file.name} ends in none of {', '.join(kinds)}")


def memory_by_length(backend: str) -> dict[str, dict[int, int]]:
    """Bytes of temporary memory of forward and backward by length, of jflash and of jax.nn. Compiles, and runs nothing.

    A length is left out where a backend refuses it or the compiler runs out of memory.
    """
    calls: dict[str, Call] = {
        "jflash": lambda q, k, v: flash_attention(q, k, v, causal=True, backend=backend),
        "jax.nn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
    }
    curves: dict[str, dict[int, int]] = {name: {} for name in calls}
    for name, call in calls.items():
        for length in _LENGTHS:
            q, k = (jax.ShapeDtypeStruct((1, length, heads, _H), _DTYPE) for heads in (_N, _K))
            try:
                curves[name][length] = Program(forward_backward(call), q, q, k, k, tuned=False).temporary_bytes
            except (OutOfMemory, UnsupportedError):
                continue
    return curves


def draw(
    file: pathlib.Path, found: Sequence["Checked"], curves: Mapping[str, Mapping[int, int]], where: Mapping[str, Any]
) -> None:
    """Draws the picture into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=150, layout="constrained")
    versions = where["versions"]
    title = f"jflash {versions['jflash']} on {device_name(where)}, JAX {versions['jax']}, {where['date'][:10]}"
    figure.suptitle(title, fontsize=13)
    left, right = figure.subplots(1, 2)
    _draw_memory(left, curves)
    _draw_errors(right, [one for one in found if one.plan is not None])
    figure.savefig(file)


def _draw_memory(axes, curves: Mapping[str, Mapping[int, int]]) -> None:
    # Numbers stand where no line runs: above on the left of the upper curve, below on the right of the lower one.
    styles = {
        "jflash": (_OURS, "o-", "jflash", {"xytext": (4, -9), "ha": "left", "va": "top"}),
        "jax.nn": (_PLAIN, "s--", "jax.nn.dot_product_attention", {"xytext": (-6, 6), "ha": "right", "va": "bottom"}),
    }
    for name, curve in curves.items():
        colour, line, label, place = styles[name]
        mebibytes = [size / 2**20 for size in curve.values()]
        axes.plot(list(curve), mebibytes, line, color=colour, markersize=7, linewidth=2, label=label)
        for length, size in zip(curve, mebibytes):
            axes.annotate(_size(size), (length, size), textcoords="offset points", color=colour, **place)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.margins(x=0.18, y=0.12)
    axes.set_xticks(_LENGTHS, [f"{length:,}" for length in _LENGTHS])
    axes.minorticks_off()
    axes.set_xlabel("length T = S (tokens)")
    axes.set_ylabel("temporary memory (MiB)")
    axes.grid(True, color="0.9")
    _head(axes, f"Memory of forward + backward (B=1, N={_N}, K={_K}, H={_H}, {_DTYPE}, causal)")


def _size(mebibytes: float) -> str:
    return f"{mebibytes / 1024:.3g} GiB" if mebibytes >= 1000 else f"{mebibytes:.3g} MiB"


def _draw_errors(axes, found: Sequence["Checked"]) -> None:
    worst = [one.worst for one in found]
    series = (
        (-0.19, _OURS, "jflash", [row.ratio for row in worst]),
        (0.19, _PLAIN, "dense attention in the same precision", [row.plain_ratio for row in worst]),
    )
    # The bar of a broken result, which may be NaN or far off, ends at the edge; its number tells how far off it is.
    edge = 1.05 if all(row.within for row in worst) else 1.5
    for shift, colour, label, ratios in series:
        positions = [row + shift for row in range(len(ratios))]
        ends = [min(ratio, edge) for ratio in ratios]
        axes.barh(positions, ends, height=0.36, color=colour, label=label)
        for position, end, ratio in zip(positions, ends, ratios):
            axes.text(end + 0.01, position, f"{ratio:.2f}", va="center", fontsize=9, color=_TEXT)
    names = [f"{one.workload.name}\n{row.name} {row.statistic}, {one.workload.dtype}" for one, row in zip(found, worst)]
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.axvline(1, color=_TEXT, linewidth=1.5, linestyle=":")
    axes.annotate(
        "bound", (1, 0.5), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points",
        rotation=90, va="center", fontsize=9, color=_TEXT,
    )  # fmt: skip
    axes.set_xlim(0, 1.1 * edge)
    axes.set_xlabel("error against float64 / bound")
    axes.grid(True, axis="x", color="0.9")
    axes.set_axisbelow(True)
    _head(axes, "Worst error of each workload, forward and backward")


def _head(axes, title: str) -> None:
    """A title, and between it and the frame the legend, where it hides nothing."""
    axes.set_title(title, fontsize=11, pad=28)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=10)
