"""The arguments of each command, and the exit code: 0, 1 where something is wrong with jflash, 2 with the arguments."""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn, TextIO

from jflash import __version__
from jflash.cli.bench import bench
from jflash.cli.check import check
from jflash.cli.explain import explain
from jflash.cli.plot import MissingMatplotlib
from jflash.cli.tune import calls_of, tune
from jflash.errors import ArgumentError
from jflash.problem import DTYPES

_DTYPES = [str(dtype) for dtype in DTYPES]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage that argparse prints before it."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; `arguments` None means those of the process. Returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return given.run(given)
    except (ArgumentError, MissingMatplotlib, OSError) as error:
        print(f"jflash {given.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jflash", description="Exact attention in O(n) memory for JAX.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = _add(commands, "check", _check, "run real workloads forward and backward, and compare them with float64")
    command.add_argument("--backend", default="auto", help='the backend to check; "auto" takes the best for the device')
    command.add_argument("--workload", nargs="+", metavar="NAME", help="only these workloads")
    command.add_argument("--seed", type=int, default=0, help="of the random inputs")
    _add_json(command)
    command.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw memory and errors (needs matplotlib)")

    command = _add(commands, "explain", _explain, "say which backend would run a call, and why no other")
    _add_call(command, sizes="+")
    command.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    command.add_argument("--hardware", metavar="NAME", help="the device to plan for, h200 say; else the present one")
    command.add_argument("--backend", default="auto")

    command = _add(commands, "bench", _bench, "time the backends and jax.nn.dot_product_attention side by side")
    command.add_argument("--backends", nargs="+", metavar="NAME", help="only these backends of jflash")
    command.add_argument("--lengths", nargs="+", type=int, metavar="T")
    command.add_argument("--head-dim", type=int, metavar="H")
    command.add_argument("--dtype", choices=_DTYPES)
    command.add_argument("--causal", action="store_true")
    _add_json(command)

    command = _add(
        commands, "tune", _tune, "search the fastest tiles of the kernels on this device, for a tuning table"
    )
    _add_call(command, sizes="*")
    command.add_argument(
        "--shipped", action="store_true", help="the calls of the shipped tables; with sizes, those that have them"
    )
    command.add_argument("--backend", default="mosaic_gpu")
    command.add_argument(
        "--kernels", nargs="+", metavar="NAME", default=["forward", "backward"],
        help="of mosaic_gpu: forward, backward, backward_dq (that of deterministic gradients)",
    )  # fmt: skip
    command.add_argument("--minutes", type=float, metavar="M", help="try no further candidate after so many")
    command.add_argument("--table", type=pathlib.Path, metavar="FILE", help="the tuning table to put winners into")
    _add_json(command)
    return parser


def _add_call(command: argparse.ArgumentParser, *, sizes: str) -> None:
    text = "T, N and H, as in T=4096 N=32 H=128; and B (1), S (as T), K (as N) and Hv (as H) where they differ"
    command.add_argument("sizes", nargs=sizes, metavar="LETTER=SIZE", help=text)
    command.add_argument("--causal", action="store_true")
    command.add_argument("--window", metavar="LEFT,RIGHT", help='distances, both ends included; "none" is unlimited')


def _add(commands, name: str, run, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    command.set_defaults(run=run)
    return command


def _add_json(command: argparse.ArgumentParser) -> None:
    text = "write JSON lines, to standard output (and the table to standard error) where no FILE is given"
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)


@contextlib.contextmanager
def _outputs(json_file: str | None) -> Iterator[tuple[TextIO, TextIO | None]]:
    """Where the table goes, and the JSON lines if they are wanted."""
    if json_file is None:
        yield sys.stdout, None
    elif json_file == "-":
        yield sys.stderr, sys.stdout
    else:
        # Opened before anything runs, so that a wrong name is told at once.
        with open(json_file, "w", encoding="utf-8") as lines:
            yield sys.stdout, lines


def _check(given: argparse.Namespace) -> int:
    with _outputs(given.json) as (table, lines):
        return check(
            backend=given.backend, names=given.workload, seed=given.seed, plot_file=given.plot, table=table, lines=lines
        )


def _explain(given: argparse.Namespace) -> int:
    print(
        explain(
            given.sizes, dtype=given.dtype, causal=given.causal, window=given.window, hardware=given.hardware,
            backend=given.backend,
        )
    )  # fmt: skip
    return 0


def _bench(given: argparse.Namespace) -> int:
    with _outputs(given.json) as (table, lines):
        bench(
            backends=given.backends, lengths=given.lengths, head_dim=given.head_dim, dtype=given.dtype,
            causal=given.causal, table=table, lines=lines,
        )  # fmt: skip
    return 0


def _tune(given: argparse.Namespace) -> int:
    calls = calls_of(given.sizes, causal=given.causal, window=given.window, is_shipped=given.shipped)
    with _outputs(given.json) as (table, lines):
        return tune(
            calls, backend=given.backend, kernels=given.kernels, minutes=given.minutes, table_file=given.table,
            table=table, lines=lines,
        )  # fmt: skip
