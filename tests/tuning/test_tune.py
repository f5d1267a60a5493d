"""`jflash tune` as a whole, on the CPU: kernels in plain JAX, whose tiles say how wrong they are and what they take."""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import hardware
from jflash.backends import registry
from jflash.backends.protocol import Backend, Gradients
from jflash.cli import main
from jflash.cli.tune import calls_of
from jflash.numerics.online_softmax import Attended
from jflash.testing.workloads import Workload
from jflash.tuning.runner import Runner, _first_and_last, _of_heads
from jflash.tuning.search import Kernel
from jflash.tuning.table import read
from jflash.tuning.workloads import Call

ROOT = pathlib.Path(__file__).parents[2]
CALL = Call(B=2, T=24, S=24, N=4, K=2, H=8, Hv=16, causal=True)
SIZES = ("B=2", "T=24", "N=4", "K=2", "H=8", "Hv=16", "--causal")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Attributes: spoils: a head of batch row `row` whose result is wrong, or none; ms: what a turn takes."""

    ms: float
    spoils: int | None = None
    row: int = 0

    def operand_bytes(self, H: int, Hv: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    forward: Part
    backward: Part


FORMULA = Tiles(forward=Part(ms=2.0), backward=Part(ms=2.0))


def spoiled(x, part):
    """x, with a head of its third axis off by 10 %."""
    if part.ms < 0:
        raise ValueError("no such tiles")
    if part.spoils is None:
        return x
    return x.at[part.row, :, part.spoils].multiply(jnp.asarray(1.1, x.dtype))


def forward(problem, tiles, operands):
    out, lse = registry.get("reference").forward(problem, None, operands)
    return Attended(spoiled(out, tiles.forward), lse)


def backward(problem, tiles, operands, attended, cotangents):
    dense = registry.get("reference")
    attend = lambda q, k, v: dense.forward(problem, None, operands._replace(q=q, k=k, v=v))  # noqa: E731
    _, pull = jax.vjp(attend, *operands[:3])
    dq, dk, dv = pull(cotangents)
    return Gradients(dq, spoiled(dk, tiles.backward), dv)


def candidates(problem, hardware, tiles, kernel):
    parts = Part(ms=1.0), Part(ms=0.5, spoils=0), Part(ms=0.25, spoils=1, row=1), Part(ms=-1.0)
    return tuple(dataclasses.replace(tiles, **{kernel: part}) for part in parts)


def backend_of(**changed) -> Backend:
    fields = {
        "name": "toy_tiles", "supports": lambda problem, hardware: None, "forward": forward, "backward": backward,
        "default_tiles": lambda problem, hardware: FORMULA, "tiles_type": Tiles,
        "tuned_kernels": lambda problem: ("forward", "backward"), "candidate_tiles": candidates,
    }  # fmt: skip
    return Backend(**fields | changed)


@functools.cache
def a_runner() -> Runner:
    return Runner(CALL.workload, backend_of(), idle_s=0.0)


class TimedByTiles(Runner):
    """In place of CUPTI: the time that the tiles say. The truth is computed once for all tests."""

    _expected = property(lambda self: a_runner()._expected)

    def kernel(self, kernel, formula):
        own = super().kernel(kernel, formula)
        return Kernel(
            compile=lambda tiles: (own.compile(tiles), getattr(tiles, kernel).ms),
            fault=lambda program: own.fault(program[0]),
            time_ms=lambda program: program[1],
        )


def run(backend, *arguments, monkeypatch):
    """Exit code, standard output and standard error of `jflash tune`."""
    monkeypatch.setattr("jflash.cli.tune.Runner", TimedByTiles)
    out, err = io.StringIO(), io.StringIO()
    with registry.registered(backend), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["tune", "--backend", backend.name, *map(str, arguments)])
        except SystemExit as error:
            code = error.code
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("kernel", "name", "first", "last", "other"),
    [("forward", "out", (0, 0), (1, 3), (0, 2)), ("backward", "dk", (0, 0), (1, 1), (1, 0))],
)
def test_a_runner_finds_what_is_wrong(kernel, name, first, last, other):
    """The first and the last head against float64, each in its operand's own axis; another against the formula's."""
    own = a_runner().kernel(kernel, FORMULA)
    assert own.fault(own.compile(FORMULA)) is None
    for (row, head), told in ((first, f"{name} max: "), (last, f"{name} max: "), (other, f"{name} of some head is ")):
        spoils = dataclasses.replace(FORMULA, **{kernel: Part(ms=1.0, spoils=head, row=row)})
        assert own.fault(own.compile(spoils)).startswith(told)


def test_a_runner_takes_the_first_and_the_last_group_of_heads():
    sizes = {"name": "", "T": 16, "H": 8}
    few = _first_and_last(Workload(**sizes, B=1, N=3, K=1))
    assert few == [(0, slice(0, 3), slice(0, 1))]
    assert _first_and_last(Workload(**sizes, B=2, N=6, K=2)) == [*few, (1, slice(3, 6), slice(1, 2))]
    found = {name: _of_heads(np.zeros((1, 16, 3, 8)), name, few).shape for name in ("q", "out", "dq")}
    assert set(found.values()) == {(1, 16, 3, 8)}
    assert _of_heads(np.zeros((1, 20, 1, 8)), "dk", few).shape == (1, 20, 1, 8)
    assert _of_heads(np.zeros((1, 3, 16)), "lse", few).shape == (1, 3, 16)


def test_what_hangs_ends_the_process():
    source = "import time\nfrom jflash.tuning.runner import ended_if_it_hangs\n"
    source += "with ended_if_it_hangs(60.0): print('ended', flush=True)\n"
    source += "with ended_if_it_hangs(0.2): time.sleep(60)\n"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, timeout=50)
    assert done.returncode == 1 and done.stdout == "ended\n" and "Timeout" in done.stderr


def test_timing_needs_kernels_to_time():
    own = a_runner().kernel("forward", FORMULA)
    with pytest.raises(Exception, match=r"(?i)cupti"):
        own.time_ms(own.compile(FORMULA))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """One run of the command with all that it writes."""
    folder = tmp_path_factory.mktemp("tune")
    file, record = folder / "own.json", folder / "tune.jsonl"
    backend = backend_of()
    with pytest.MonkeyPatch.context() as patch:
        code, out, err = run(backend, *SIZES, "--table", file, "--json", record, monkeypatch=patch)
    assert code == 0, err
    return backend, out, err, [json.loads(line) for line in record.read_text().splitlines()], file


def test_tune_tells_what_won_and_keeps_it(tuned):
    backend, out, err, records, file = tuned
    assert "B=2 T=24 S=24 N=4 K=2 H=8 Hv=16 causal\n" in out
    for kernel in ("forward", "backward"):
        (row,) = (line for line in out.splitlines() if line.startswith(f"  {kernel} "))
        # Wrong heads at a quarter and half of the time, and tiles that do not compile, do not win.
        assert row.split()[1:4] == ["2.0000", "1.0000", "100.0%"]
        assert "ms=1.0 (formula 2.0)" in row and "rejected" in row
        assert f"{kernel}: candidate 1 of 4: ms=1.0 (formula 2.0)\n" in err and f"{kernel}: final turn 5 of 5" in err
    assert [record["kernel"] for record in records] == ["forward", "backward"]
    forward = records[0]
    assert forward["winner"]["ms"] == 1.0 and forward["formula"]["turns_ms"] == [2.0] * 5
    assert forward["gain"] == 1.0 and forward["is_complete"] and forward["device"] and forward["versions"]["jax"]
    reasons = {tried["tiles"]["ms"]: tried["rejected"] for tried in forward["tried"]}
    assert reasons.keys() == {1.0, 0.5, 0.25, -1.0}
    assert reasons[1.0] is None and reasons[-1.0] == "ValueError: no such tiles"
    assert "out max" in reasons[0.5] and "out of some head" in reasons[0.25]

    table = read(file, backend, hardware.present())
    assert table.device == "cpu" and {key.kernel for key in table.entries} == {"forward", "backward"}
    for key, entry in table.entries.items():
        assert entry.tiles == Part(ms=1.0) and key.T == 32 and key.mask == "band"


def test_what_was_measured_is_kept_with_the_entry(tuned):
    *_, file = tuned
    (first, _) = json.loads(file.read_text())["entries"]
    measured = first["measured"]
    assert Call(**measured["call"]) == CALL
    assert (measured["ms"], measured["formula_ms"], measured["formula"]) == (
        1.0,
        2.0,
        {"ms": 2.0, "spoils": None, "row": 0},
    )
    assert measured["device"] and measured["versions"]["jax"] == jax.__version__ and measured["date"]


def test_an_entry_that_no_longer_wins_is_taken_out(tuned, tmp_path, monkeypatch):
    file = shutil.copy(tuned[-1], tmp_path)
    slower = backend_of(candidate_tiles=lambda problem, hardware, tiles, kernel: ())
    code, out, _ = run(slower, *SIZES, "--table", file, "--kernels", "forward", monkeypatch=monkeypatch)
    assert code == 0 and "none is faster" in out
    (left,) = json.loads(pathlib.Path(file).read_text())["entries"]
    assert left["key"]["kernel"] == "backward"


def test_a_formula_that_is_wrong_is_told_and_nothing_is_kept(tmp_path, monkeypatch):
    wrong = dataclasses.replace(FORMULA, forward=Part(ms=2.0, spoils=0))
    backend = backend_of(default_tiles=lambda problem, hardware: wrong)
    file = tmp_path / "t.json"
    code, out, _ = run(backend, *SIZES, "--kernels", "forward", "--table", file, monkeypatch=monkeypatch)
    assert code == 1 and "the tiles of the formula: out max" in out
    assert json.loads(file.read_text())["entries"] == []


def test_a_refusal_is_told(monkeypatch):
    backend = backend_of(supports=lambda problem, hardware: f"H={problem.H} is too odd")
    code, out, _ = run(backend, *SIZES, monkeypatch=monkeypatch)
    assert code == 1 and out.count("H=8 is too odd") == 2


def test_time_that_is_up(monkeypatch):
    code, out, _ = run(backend_of(), *SIZES, "--minutes", 1e-9, monkeypatch=monkeypatch)
    assert code == 1 and "time is up after 0 of 1 calls" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("T=8 N=2 H=4 --backend xla", "'xla', wanted a backend whose tiles a table may hold"),
        ("T=8 N=2 H=4 --backend auto", "'auto', wanted a backend whose tiles"),
        ("T=8 N=2 H=4 --kernels sideways", "`--kernels`: found 'sideways', wanted of forward, backward, backward_dq"),
        ("T=8 N=2 H=4 --minutes 0", "`--minutes`: found 0.0"),
        ("T=8 N=2", "no H"),
        ("", "found no T, N, H"),
        ("--shipped --causal", "`--shipped`: found a mask beside it"),
        ("--shipped H=65", "found H=65, which no shipped call has"),
        ("T=8 N=2 H=4 --window 3", "'3', wanted LEFT,RIGHT"),
        ("T=8 N=2 H=4 --table {folder}/missing/t.json", "missing"),
        ("T=8 N=2 H=4 --table {folder}/other.json", "of h200, wanted a table of this device, cpu"),
    ],
)
def test_wrong_arguments_are_exit_code_2_and_one_line(arguments, told, tmp_path):
    (tmp_path / "other.json").write_text('{"format": 1, "device": "h200", "backend": "mosaic_gpu", "entries": []}')
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["tune", *arguments.format(folder=tmp_path).split()])
    assert (code, out.getvalue()) == (2, "")
    assert err.getvalue().count("\n") == 1 and told in err.getvalue()


def test_which_calls_are_tuned():
    def calls(*sizes, causal=False, window=None, is_shipped=False):
        return calls_of(sizes, causal=causal, window=window, is_shipped=is_shipped)

    assert len(calls(is_shipped=True)) == 28
    few = calls("H=64", "T=1024", is_shipped=True)
    assert [(call.H, call.T, call.causal) for call in few] == [(64, 1024, False), (64, 1024, True)]
    (own,) = calls("T=9", "N=4", "K=2", "H=8", causal=True, window="3,none")
    assert own == Call(B=1, T=9, S=9, N=4, K=2, H=8, Hv=8, causal=True, window=(3, None))
    assert str(own.workload.mask) == "(Causal(offset=0) & SlidingWindow(3, None, offset=0))"
