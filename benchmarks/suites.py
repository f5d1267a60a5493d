"""The rows that are measured, as data: for `kernel_times.py` and, in a process without JAX, `torch_times.py`."""

import argparse
from collections.abc import Iterator

from records import Row


def _grid() -> Iterator[Row]:
    for T in (16384, 4096, 1024):
        for H in (64, 128, 256):
            for causal in (False, True):
                yield Row(suite="grid", B=16384 // T, T=T, N=2048 // H, H=H, causal=causal)


SUITES: dict[str, list[Row]] = {
    "grid": list(_grid()),
    "gqa": [Row(suite="gqa", B=16384 // T, T=T, N=32, K=8, H=128, causal=True) for T in (8192, 16384)],
    "mla": [
        Row(suite="mla", B=2, T=T, N=16, H=192, Hv=128, causal=causal) for T in (4096, 8192) for causal in (True, False)
    ],
    "short": [Row(suite="short", B=32, T=T, N=16, H=64, causal=True) for T in (128, 256, 512)],
    "cross": [Row(suite="cross", B=1, T=512, S=65536, N=8, H=128)],
    "window": [Row(suite="window", B=1, T=T, N=16, H=128, causal=True, window=1023) for T in (16384, 65536)],
    "deterministic": [
        Row(suite="deterministic", B=2, T=8192, N=16, H=128, causal=True, deterministic=deterministic)
        for deterministic in (False, True)
    ],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What says which rows, and how often and how rested they are timed: the same for all scripts that time kernels."""
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=["grid"])
    parser.add_argument("--lengths", type=int, nargs="+", help="only these T")
    parser.add_argument("--head-dims", type=int, nargs="+", help="only these H")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--idle-s", type=float, default=0.5)
    parser.add_argument("--commit", default=None, help="where the checkout does not say it itself")


def chosen(arguments: argparse.Namespace) -> list[Row]:
    """The rows that the arguments ask for."""
    return [
        row
        for suite in arguments.suites
        for row in SUITES[suite]
        if (arguments.lengths is None or row.T in arguments.lengths)
        and (arguments.head_dims is None or row.H in arguments.head_dims)
    ]
