"""The scripts that read records: what they print of records made up here, and their exit codes; the training step."""

import argparse
import contextlib
import importlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from helpers import count, random_case

import jflash
from jflash.masks import Causal, Full, SlidingWindow, TileMap

ROOT = pathlib.Path(__file__).parents[1]

with pytest.MonkeyPatch.context() as patch:
    # As Python does for a script: the modules beside it can be imported.
    patch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    report, compare, first_call, torch_times, peers, suites = map(
        importlib.import_module, ("report", "compare", "first_call", "torch_times", "peers", "suites")
    )
    training_step, training_report = map(importlib.import_module, ("training_step", "training_report"))
    flexible_report, flexible_times = map(importlib.import_module, ("flexible_report", "flexible_times"))

WHERE = {
    "kind": "kernel_times",
    "device": "NVIDIA H200",
    "driver": "580.1",
    "versions": {"jflash": "0.1", "jax": "0.11.2", "tokamax": None},
    "commit": "abc123",
    "date": "2026-12-01T10:00:00+00:00",
    "rounds": 3,
    "calls": 6,
    "idle_s": 0.5,
    "load_s": 0.0,
}
# Every dimension is another number.
CROSS = {"suite": "cross", "B": 3, "T": 512, "S": 4096, "N": 8, "K": 2, "H": 192, "Hv": 128, "causal": False}
CROSS |= {"window": None, "deterministic": False}
GRID = CROSS | {"suite": "grid", "S": 512, "K": 8, "Hv": 192, "causal": True}
GQA = CROSS | {"suite": "gqa", "S": 512, "Hv": 192, "causal": True}
WINDOW = GRID | {"suite": "window", "window": 1023, "deterministic": True}


def rates(row: dict, implementation: str, forward: float, backward: float, **others: object) -> dict:
    tflops = {"forward_tflops": forward, "backward_tflops": backward}
    return WHERE | row | {"implementation": implementation} | tflops | others


def refusal(row: dict, implementation: str, reason: str) -> dict:
    return WHERE | row | {"implementation": implementation, "not_run": reason}


RECORD = [
    {"kind": "tests", "passed": 1},
    rates(GRID, "jflash", 600.0, 300.0),
    rates(GRID, "cudnn", 400.0, 400.0),
    rates(GRID, "flash_attn3_jax", 300.0, 240.0),
    refusal(GRID, "tokamax", "ModuleNotFoundError: No module named 'tokamax'"),
    rates(GQA, "jflash", 500.0, 450.0),
    rates(GQA, "cudnn", 625.0, 250.0),
    rates(GQA, "flash_attn3_jax", 250.0, 360.0),
    refusal(GQA, "tokamax", "ModuleNotFoundError: No module named 'tokamax'"),
    rates(CROSS, "jflash", 333.0, 222.0),
    refusal(CROSS, "cudnn", "ValueError: not\n  this | row"),
    refusal(CROSS, "tokamax", "ModuleNotFoundError: No module named 'tokamax'"),
    rates(WINDOW, "jflash", 110.0, 120.0),
    rates(WINDOW, "cudnn", 100.0, 150.0),
    refusal(WINDOW, "tokamax", "ModuleNotFoundError: No module named 'tokamax'"),
]


@pytest.fixture
def write(tmp_path):
    """Writes a record and returns its file."""

    def write(lines: list[dict], name: str = "record.jsonl") -> pathlib.Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return file

    return write


def run(main, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a script."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments]) or 0
        except SystemExit as error:
            code = error.code
    return code, out.getvalue(), err.getvalue()


# report.py ------------------------------------------------------------------------------------------------------------


def test_report_of_every_row(write):
    code, out, _ = run(report.main, write(RECORD))
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("|")] == [
        "| suite | B | T × S | N/K | H/Hv | mask | forward jflash | forward cudnn | forward flash_attn3_jax "
        "| forward ratio | backward jflash | backward cudnn | backward flash_attn3_jax | backward ratio |",
        "| --- | ---: | ---: | ---: | ---: | --- |" + " ---: |" * 8,
        "| grid | 3 | 512 | 8/8 | 192/192 | causal | 600.0 | 400.0 | 300.0 | 1.500 | 300.0 | 400.0 | 240.0 | 0.750 |",
        "| gqa | 3 | 512 | 8/2 | 192/192 | causal | 500.0 | 625.0 | 250.0 | 0.800 | 450.0 | 250.0 | 360.0 | 1.250 |",
        "| cross | 3 | 512 × 4096 | 8/2 | 192/128 | full | 333.0 | – | – | – | 222.0 | – | – | – |",
        "| window | 3 | 512 | 8/8 | 192/192 | window 1023, deterministic "
        "| 110.0 | 100.0 | – | 1.100 | 120.0 | 150.0 | – | 0.800 |",
    ]


def test_report_geometric_means(write):
    _, out, _ = run(report.main, write(RECORD))
    # Cube roots of 1.5 * 0.8 * 1.1 = 1.32 and of 0.75 * 1.25 * 0.8 = 0.75; the row without a peer has no part in them.
    assert "- forward: geometric mean of the ratios 1.097, 1 of 3 rows below 1" in out
    assert "- backward: geometric mean of the ratios 0.909, 2 of 3 rows below 1" in out


def test_report_says_who_did_not_run_and_why(write):
    _, out, _ = run(report.main, write(RECORD))
    cross = "cross B=3 T=512 S=4096 N=8 K=2 H=192 Hv=128 full"
    window = "window B=3 T=512 S=512 N=8 K=8 H=192 Hv=192 window 1023, deterministic"
    assert out.splitlines()[-3:] == [
        f"- cudnn did not run on {cross}: ValueError: not this | row",
        f"- flash_attn3_jax did not run on {cross}; {window}: not in the record",
        "- tokamax did not run on any row: ModuleNotFoundError: No module named 'tokamax'",
    ]


def test_report_names_each_run_once(write):
    later = WINDOW | {"date": "2026-12-02T10:00:00+00:00", "commit": "def456"}
    _, out, _ = run(report.main, write([*RECORD[:12], rates(later, "jflash", 110.0, 120.0)]))
    assert [line for line in out.splitlines() if "driver" in line] == [
        "- NVIDIA H200, driver 580.1; jflash 0.1, jax 0.11.2; commit abc123; 2026-12-01T10:00:00+00:00"
        " (cross, gqa, grid)",
        "- NVIDIA H200, driver 580.1; jflash 0.1, jax 0.11.2; commit def456; 2026-12-02T10:00:00+00:00 (window)",
    ]


def test_report_of_sustained_rates_is_a_table_of_its_own(write):
    loaded = [
        rates(GQA, name, 500.0, 400.0, forward_sustained_tflops=forward, backward_sustained_tflops=backward)
        for name, forward, backward in (("jflash", 420.0, 210.0), ("cudnn", 400.0, 300.0))
    ]
    assert "Under load" not in run(report.main, write(RECORD))[1]
    _, out, _ = run(report.main, write(loaded))
    assert "| 420.0 | 400.0 | 1.050 | 210.0 | 300.0 | 0.700 |" in out.partition("## Under load")[2]
    assert "| 500.0 | 500.0 | 1.000 | 400.0 | 400.0 | 1.000 |" in out.partition("## Under load")[0]


def test_report_without_any_peer(write):
    code, out, _ = run(report.main, write([rates(CROSS, "jflash", 333.0, 222.0)]))
    assert code == 0
    assert "| 333.0 | – | 222.0 | – |" in out
    assert "- forward: no row has both jflash and a peer" in out


def test_report_of_the_first_records():
    """Their lines have fewer fields; the numbers are those of the file."""
    _, out, _ = run(report.main, ROOT / "benchmarks/results/2026-11-30-h200-kernels.jsonl")
    assert "| grid | 1 | 16384 | 8/8 | 256/256 | causal | 835.1 | 658.7 | 737.0 | 1.133 |" in out


def test_plot_draws_every_bar(write, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: figures.append(figure) or savefig(figure, file))
    # Nothing is full at H=64, and no peer ran at the longer length.
    longer = rates(GRID | {"T": 2048, "S": 2048}, "jflash", 610.0, 310.0)
    full = [
        rates(GRID | {"causal": False}, name, forward, backward)
        for name, forward, backward in (("jflash", 620.0, 320.0), ("cudnn", 420.0, 220.0))
    ]
    narrow = rates(GRID | {"H": 64, "Hv": 64}, "cudnn", 90.0, 80.0)
    code, _, err = run(report.main, write([longer, *RECORD, *full, narrow]), "--plot", tmp_path / "times.png")
    assert code == 0, err
    assert (tmp_path / "times.png").stat().st_size > 0
    (figure,) = figures
    # The bars of jflash by length, then those of cudnn, then those of flash_attn3_jax; 0 is no bar.
    assert {axes.get_title(): [bar.get_height() for bar in axes.patches] for axes in figure.axes} == {
        "forward, full, H=64": [],
        "forward, causal, H=64": [0, 90, 0],
        "backward, full, H=64": [],
        "backward, causal, H=64": [0, 80, 0],
        "forward, full, H=192": [620, 420, 0],
        "forward, causal, H=192": [600, 610, 400, 0, 300, 0],
        "backward, full, H=192": [320, 220, 0],
        "backward, causal, H=192": [300, 310, 400, 0, 240, 0],
    }
    causal = next(axes for axes in figure.axes if axes.get_title() == "forward, causal, H=192")
    assert [label.get_text() for label in causal.get_xticklabels()] == ["512", "2,048"]
    assert [text.get_text() for text in causal.texts] == ["600", "610", "400", "", "300", ""]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["jflash", "cudnn", "flash_attn3_jax"]
    colours = [handle.get_facecolor() for handle in legend.get_patches()]
    assert colours == [bar.get_facecolor() for bar in causal.patches[::2]]
    assert len(set(colours)) == 3


@pytest.mark.parametrize(
    ("lines", "picture", "words"),
    [
        (RECORD[4:], "times.png", "found rows of ['cross', 'gqa', 'window'], wanted some of 'grid'"),
        (RECORD, "missing/times.png", "there is no folder"),
        (RECORD, "times.word", "times.word"),
    ],
)
def test_plot_that_cannot_be_drawn(write, tmp_path, lines, picture, words):
    code, out, err = run(report.main, write(lines), "--plot", tmp_path / picture)
    assert (code, out) == (2, "")
    assert words in err
    assert not (tmp_path / picture).exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([RECORD[0]], "found lines of kind ['tests'], wanted some of kind 'kernel_times'"),
        ([*RECORD, RECORD[1]], "record.jsonl:16: found jflash on grid B=3"),
        ([{name: value for name, value in RECORD[1].items() if name != "N"}], "record.jsonl:1: found no field 'N'"),
        ([{name: value for name, value in RECORD[1].items() if name != "backward_tflops"}], "rates of ['forward']"),
        ([rates(GRID, "jflash", 0.0, 300.0)], "forward_tflops is 0.0, not above 0"),
        ([[]], "wanted an object of kernel_times.py"),
    ],
)
def test_report_of_what_is_no_record(write, lines, words):
    code, out, err = run(report.main, write(lines))
    assert (code, out) == (2, "")
    assert words in err


def torch_line(row: dict, implementation: str = "flash_attention_4", **others: object) -> dict:
    versions = {"torch": "2.12", "flash-attn-4": "4.0.0"}
    return rates(row, implementation, 610.0, 350.0, **{"versions": versions, "date": "2026-12-01T11:00", **others})


def test_report_of_two_processes_is_one_table(write):
    own = CROSS | {"suite": "other"}
    torch_lines = [torch_line(GRID), torch_line(own)]
    code, out, err = run(report.main, write(RECORD, "jax"), write(torch_lines, "torch"))
    assert code == 0, err
    # FlashAttention-4 is the best peer of the forward pass, cuDNN that of the backward pass.
    assert "| 600.0 | 400.0 | 300.0 | 610.0 | 0.984 | 300.0 | 400.0 | 240.0 | 350.0 | 0.750 |" in out
    assert "| other | 3 | 512 × 4096 | 8/2 | 192/128 | full | – | – | – | 610.0 | – | – | – | – | 350.0 | – |" in out
    assert [line for line in out.splitlines() if "driver" in line] == [
        "- NVIDIA H200, driver 580.1; jflash 0.1, jax 0.11.2; commit abc123; 2026-12-01T10:00:00+00:00"
        " (cross, gqa, grid, window)",
        "- NVIDIA H200, driver 580.1; torch 2.12, flash-attn-4 4.0.0; commit abc123; 2026-12-01T11:00 (grid, other)",
    ]
    assert f"- jflash did not run on {report.Row(**own)}: not in the record" in out


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"device": "NVIDIA H100"}, "torch: found device NVIDIA H100, wanted NVIDIA H200, as in "),
        ({"driver": "570.1"}, "found driver 570.1, wanted 580.1"),
        ({"idle_s": 0.1}, "found idle_s 0.1, wanted 0.5"),
        ({"calls": 9}, "found calls 9, wanted 6"),
        (
            {"implementation": "cudnn"},
            "found cudnn on grid B=3 T=512 S=512 N=8 K=8 H=192 Hv=192 causal, wanted it in one",
        ),
    ],
)
def test_report_refuses_processes_that_are_not_of_one_measurement(write, changed, words):
    line = torch_line(GRID) | changed
    code, out, err = run(report.main, write(RECORD, "jax"), write([line], "torch"))
    assert (code, out) == (2, "")
    assert words in err


# torch_times.py -------------------------------------------------------------------------------------------------------


class Event:
    """What torch's profiler gives for a launch, a copy, or a call on the host."""

    def __init__(self, name, start, end, device_type="CUDA"):
        self.name, self.device_type = name, device_type
        self.time_range = types.SimpleNamespace(start=start, end=end)


def test_kernels_of_a_profile():
    events = [
        Event("second", 50.0, 70.0),
        Event("Memset (Device)", 0.0, 9.0),
        Event("aten::mm", 0.0, 99.0, "CPU"),
        Event("first", 10.0, 40.0),
        Event("Memcpy DtoD (Device -> Device)", 41.0, 49.0),
    ]
    profile = types.SimpleNamespace(events=lambda: events)
    assert torch_times.kernels_of(profile, "CUDA") == [("first", 10.0, 30.0), ("second", 50.0, 20.0)]


def launches(*names: str) -> list:
    return [torch_times.Kernel(name, 100.0 * i, 250.0 * (i + 1)) for i, name in enumerate(names)]


def test_times_of_calls_are_sums_over_their_kernels():
    assert torch_times.times_of_calls(launches(*"abab"), 2) == [0.75, 1.75]
    assert torch_times.times_of_calls(launches("a"), 1) == [0.25]


@pytest.mark.parametrize(
    ("names", "words"), [("", "0 kernels"), ("abc", "3 kernels are no whole"), ("abba", "are not the same")]
)
def test_calls_that_are_not_alike_have_no_times(names, words):
    with pytest.raises(ValueError, match=words):
        torch_times.times_of_calls(launches(*names), 2)


def test_torch_times_names_what_does_not_run_or_differs(monkeypatch):
    row = report.Row(**GRID)
    wanted = {"out": [np.zeros(3).view(Tensor)] * 2}

    class Timed:
        def __init__(self, attention, row, arrays):
            self.results = (attention(row, *arrays).view(Tensor),)
            self.is_warm = False

        def warm_up(self):
            self.is_warm = True

    def absent(row, *arrays):
        raise ModuleNotFoundError("No module named\n'flash_attn'")

    peers = {
        "right": lambda row, x: np.zeros((3, 3, 8)), "wrong": lambda row, x: np.full((3, 3, 8), 0.25), "absent": absent
    }  # fmt: skip
    monkeypatch.setattr(torch_times, "IMPLEMENTATIONS", peers)
    monkeypatch.setattr(torch_times, "Timed", Timed)
    monkeypatch.setattr(torch_times, "inputs", lambda row: (0,))
    heads = []
    monkeypatch.setattr(torch_times, "reference", lambda row, arrays, own: heads.append(own) or wanted)
    timed, lines = torch_times.prepare(row, list(peers))
    assert heads == [[(0, 0), (2, 7)]]
    assert list(timed) == ["right"] and timed["right"].is_warm and not hasattr(timed["right"], "results")
    assert {line["implementation"]: line["not_run"] for line in lines} == {
        "wrong": "its out differs from attention in float32 by 0.25, more than 0.05",
        "absent": "ModuleNotFoundError: No module named 'flash_attn'",
    }
    assert lines[0]["suite"] == "grid" and lines[0]["H"] == 192


def test_rows_are_chosen_by_suite_length_and_head_dim():
    rows = [row for suite in suites.SUITES.values() for row in suite]
    assert len(set(rows)) == len(rows) == 32
    parser = argparse.ArgumentParser()
    suites.add_arguments(parser)
    assert len(suites.chosen(parser.parse_args([]))) == 18
    given = ["--suites", "short", "grid", "--lengths", "512", "1024", "--head-dims", "64"]
    chosen = suites.chosen(parser.parse_args(given))
    assert [(row.suite, row.T, row.causal) for row in chosen] == [
        ("short", 512, True), ("grid", 1024, False), ("grid", 1024, True)
    ]  # fmt: skip


def test_torch_times_writes_what_a_report_reads(write):
    """With a clock made up here, in turns; what cannot be told apart is named."""
    turns = []

    class Timed:
        def __init__(self, name, ms):
            self.name, self.ms = name, ms

        def times_ms(self, which, *, calls, idle_s):
            turns.append((which, self.name))
            if self.ms is None:
                raise ValueError("3 kernels are no whole number")
            # The second half of a turn, when the clock is lower, does not count.
            return [self.ms] * ((calls + 1) // 2) + [9 * self.ms] * (calls // 2)

    row = report.Row(**GRID)
    timed = {"flash_attention_4": Timed("flash_attention_4", 0.5), "torch_cudnn": Timed("torch_cudnn", None)}
    lines = torch_times.measure(row, timed, rounds=2, calls=5, idle_s=0.5)
    assert turns[:4] == [
        ("forward", "flash_attention_4"), ("forward", "torch_cudnn"), ("backward", "flash_attention_4"),
        ("forward", "flash_attention_4"),
    ]  # fmt: skip
    assert lines[0]["forward_ms"] == 0.5 and len(lines[0]["samples_ms"]["backward"]) == 2
    operations = 2 * 3 * 8 * 512 * 256 * (192 + 192)
    assert lines[0]["forward_tflops"] == round(operations / 0.5e9, 1)
    assert lines[0]["backward_tflops"] == round(2.5 * operations / 0.5e9, 1)
    assert lines[1]["not_run"] == "forward: 3 kernels are no whole number"
    code, out, err = run(report.main, write([WHERE | line for line in lines]))
    assert code == 0, err
    assert "torch_cudnn did not run on any row: forward: 3 kernels" in out


class Tensor(np.ndarray):
    """As much of a tensor as the reference of torch_times.py needs."""

    device = "cuda"

    def float(self):
        return self.astype(np.float64)

    def abs(self):
        return np.abs(self)

    def masked_fill(self, mask, value):
        return np.where(mask, value, self).view(Tensor)

    def sum(self, axis, keepdim):
        return super().sum(axis, keepdims=keepdim)


TORCH = types.SimpleNamespace(
    zeros_like=np.zeros_like, cat=lambda parts: np.concatenate(parts).view(Tensor), inf=np.inf, bool=np.bool_,
    arange=lambda *ends, device: np.arange(*ends), ones=lambda *shape, dtype, device: np.ones(shape, dtype),
    softmax=lambda x, axis: jax.nn.softmax(np.asarray(x), axis).__array__().view(Tensor),
)  # fmt: skip


@pytest.mark.parametrize(
    ("row", "mask"),
    [
        ({"S": 13, "K": 6}, Full()),
        ({"S": 9, "K": 6, "causal": True}, Causal()),
        ({"S": 9, "K": 2, "causal": True, "window": 3}, SlidingWindow(3, 0)),
    ],
    ids=["cross", "causal", "window_group"],
)
def test_torch_times_compares_with_attention(row, mask, monkeypatch):
    """With numpy for torch: out and gradients of two heads are those of `reference`, and what differs is named."""
    monkeypatch.setitem(sys.modules, "torch", TORCH)
    monkeypatch.setattr(torch_times, "_QUERIES", 4)
    row = report.Row(**{"suite": "", "B": 2, "T": 9, "N": 6, "H": 4, "Hv": 5} | row)
    case = random_case(B=2, T=9, S=row.S, N=6, K=row.K, H=4, Hv=5, dtype=np.float64)
    arrays = tuple(np.asarray(array).view(Tensor) for array in case[:4])
    heads = [(0, 0), (1, 5)]
    with jax.enable_x64(True):
        attend = lambda q, k, v: jflash.flash_attention(q, k, v, mask=mask, backend="reference")  # noqa: E731
        out, pull = jax.vjp(attend, *case[:3])
        results = tuple(np.asarray(array).view(Tensor) for array in (out, *pull(np.asarray(case.d_out))))
    found = torch_times.reference(row, arrays, heads)
    assert set(found) == ({"out", "dq", "dk", "dv"} if row.K == 6 else {"out", "dq"})
    for name, result in zip(("out", "dq", "dk", "dv"), results):
        for own, (b, n) in zip(found.get(name, ()), heads):
            np.testing.assert_allclose(own, result[b, :, n], atol=1e-6)
    assert torch_times.difference(row, found, results, heads) is None
    spoiled = results[0], results[1].copy(), *results[2:]
    spoiled[1][1, 4, 5, 2] = np.nan
    assert "its dq differs from attention in float32 by nan" in torch_times.difference(row, found, spoiled, heads)


# compare.py -----------------------------------------------------------------------------------------------------------


def test_compare_sorts_by_ratio(write):
    old = write([rates(GRID, "jflash", 600.0, 300.0), rates(GRID, "cudnn", 400.0, 200.0)], "old")
    new = write([rates(GRID, "jflash", 660.0, 294.0), rates(GRID, "cudnn", 360.0, 240.0)], "new")
    code, out, _ = run(compare.main, old, new)
    row = "grid B=3 T=512 S=512 N=8 K=8 H=192 Hv=192 causal"
    assert [line for line in out.splitlines() if line.startswith("|")][2:] == [
        f"| 0.900 | 400.0 | 360.0 | forward | cudnn | {row} |",
        f"| 0.980 | 300.0 | 294.0 | backward | jflash | {row} |",
        f"| 1.100 | 600.0 | 660.0 | forward | jflash | {row} |",
        f"| 1.200 | 200.0 | 240.0 | backward | cudnn | {row} |",
    ]
    # That a peer lost more is no failure.
    assert code == 0
    assert out.splitlines()[-1] == "PASSED: jflash lost more than 3.0% in none of 2 rates."
    assert "differs" not in out
    assert "only in" not in out


@pytest.mark.parametrize(
    ("backward", "options", "expected"),
    [(292, (), 0), (290, (), 1), (290, ("--tolerance", 0.04), 0), (292, ("--tolerance", 0.02), 1)],
)
def test_compare_exit_code(write, backward, options, expected):
    old = write([rates(GRID, "jflash", 600.0, 300.0)], "old")
    new = write([rates(GRID, "jflash", 900.0, backward)], "new")
    code, out, _ = run(compare.main, old, new, *options)
    assert code == expected
    assert ("FAILED" in out) == bool(expected)


def test_compare_counts_sustained_rates(write):
    old = write([rates(GRID, "jflash", 600.0, 300.0, forward_sustained_tflops=500.0)], "old")
    new = write([rates(GRID, "jflash", 600.0, 300.0, forward_sustained_tflops=400.0)], "new")
    code, out, _ = run(compare.main, old, new)
    assert code == 1
    assert "| 0.800 | 500.0 | 400.0 | forward sustained | jflash |" in out


def test_compare_says_what_differs(write):
    versions = WHERE["versions"] | {"jax": "0.11.3", "tokamax": "0.0.17"}
    changed = {"device": "NVIDIA H100", "versions": versions, "commit": "def456"}
    old, new = write([RECORD[1]], "old"), write([RECORD[1] | changed], "new")
    _, out, _ = run(compare.main, old, new)
    assert [line for line in out.splitlines() if "differs" in line] == [
        "- device differs: NVIDIA H200 → NVIDIA H100",
        "- jax version differs: 0.11.2 → 0.11.3",
        "- tokamax version differs: none → 0.0.17",
    ]


def test_compare_names_what_is_in_one_alone(write):
    old = write([RECORD[1], RECORD[2], rates(WINDOW, "jflash", 1.0, 1.0)], "old")
    new = write([RECORD[1], refusal(GRID, "cudnn", "ValueError: no"), rates(CROSS, "jflash", 1.0, 1.0)], "new")
    code, out, _ = run(compare.main, old, new)
    assert code == 0
    assert [line for line in out.splitlines() if "only in" in line] == [
        "- only in old: cudnn on grid B=3 T=512 S=512 N=8 K=8 H=192 Hv=192 causal (there: ValueError: no)",
        "- only in old: jflash on window B=3 T=512 S=512 N=8 K=8 H=192 Hv=192 window 1023, deterministic",
        "- only in new: jflash on cross B=3 T=512 S=4096 N=8 K=2 H=192 Hv=128 full",
    ]


def test_compare_of_nothing_in_common_fails(write):
    old, new = write([RECORD[1]], "old"), write([rates(WINDOW, "jflash", 110.0, 120.0)], "new")
    code, out, _ = run(compare.main, old, new)
    assert code == 1
    assert "FAILED: the records share no row of jflash." in out


@pytest.mark.parametrize("tolerance", [-0.1, 3])
def test_compare_refuses_a_tolerance_that_is_no_share(write, tolerance):
    file = write(RECORD)
    code, _, err = run(compare.main, file, file, "--tolerance", tolerance)
    assert code == 2
    assert f"found {float(tolerance)}, wanted a share" in err


# first_call.py --------------------------------------------------------------------------------------------------------


def test_first_call_of_fresh_processes():
    sizes = ("--T", 48, "--N", 2, "--H", 16)
    only = ("--implementations", "jflash", "--processes", 1, "--commit", "abc123")
    code, out, err = run(first_call.main, *sizes, *only)
    assert code == 0, err
    cold, warm = map(json.loads, out.splitlines())
    assert [line["cache"] for line in (cold, warm)] == ["cold", "warm"]
    for line in (cold, warm):
        assert (line["kind"], line["implementation"], line["commit"]) == ("first_call", "jflash", "abc123")
        assert [line[name] for name in ("B", "T", "N", "H", "causal")] == [1, 48, 2, 16, True]
        assert line["platform"] == "cpu" and line["driver"] is None and line["versions"]["jax"] and line["date"]
        seconds = [line[f"{part}_s"] for part in first_call.PARTS]
        assert all(part > 0 for part in seconds)
        assert line["beyond_jax_s"] == pytest.approx(sum(seconds[2:]), abs=0.005)
    # The cache spares the compiler alone.
    assert warm["compile_s"] < cold["compile_s"] / 2


def test_first_call_of_what_is_not_there():
    """As the process that is measured says it; there is no cuDNN on the CPU."""
    row = first_call.Row(suite="", B=1, T=48, N=2, H=16, causal=True)
    assert peers.cudnn is first_call.IMPLEMENTATIONS["cudnn"](row)
    assert "cuDNN" in first_call._child("cudnn", row)


@pytest.mark.parametrize(
    ("code", "told"), [("import sys; sys.exit('lost\\n the device')", "the device"), ("1 / 0", "Zero")]
)
def test_first_call_of_a_process_that_dies(code, told, monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(code)
    monkeypatch.setattr(first_call, "__file__", str(script))
    (line,) = first_call.lines_of("jflash", processes=3, arguments=[])
    assert told in line["not_run"]


# training_step.py and training_report.py ------------------------------------------------------------------------------

TINY = {"T": 24, "layers": 1, "features": 16, "hidden_features": 24, "N": 4, "K": 2, "H": 8, "steps": 8}


def line_of(name: str, **changes: object) -> dict:
    with jax.numpy_dtype_promotion("standard"):  # for Flax's norms in 16 bits
        case = training_step.Case(implementation=name, **TINY | changes)
        return json.loads(json.dumps(training_step.line_of(case, backend="auto", commit="abc123")))


@pytest.mark.slow
def test_training_step_is_the_same_on_both_sides():
    ours, plain = line_of("jflash"), line_of("jax_xla", remat="none")
    assert ours.keys() - plain.keys() == {"backend"}
    assert ours["parameters"] == 256 * 16 + 2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 24 + 3 * 16
    assert len(ours["losses"]) == len(ours["samples_ms"]) == 8
    # The first is of the same numbers in another order of summation; then training goes its way, in 16 bits.
    assert abs(ours["losses"][0] - plain["losses"][0]) < 0.005
    assert max(abs(one - other) for one, other in zip(ours["losses"], plain["losses"])) < 0.02
    assert len(set(ours["losses"])) == 8
    assert (ours["commit"], ours["peak_bytes"], ours["driver"]) == ("abc123", None, None)
    assert ours["compiled_bytes"] > 3 * 4 * ours["parameters"]


def test_training_step_says_why_it_did_not_run(monkeypatch):
    # Which JAX says where there is no GPU.
    assert "cuDNN is not detected" in line_of("jax_cudnn")["not_run"]
    monkeypatch.setattr(training_step, "device_bytes", lambda: 2**17)
    assert re.fullmatch(
        r"OutOfMemory: it needs 0.000\d+ GiB of memory, the device has 0.0001221", line_of("jflash")["not_run"]
    )
    monkeypatch.setattr(training_step, "measure", lambda *case, **backend: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        line_of("jflash")


@pytest.mark.parametrize("T", [8192, pytest.param(32768, marks=pytest.mark.slow)])
@pytest.mark.parametrize("remat", ["attention", pytest.param("none", marks=pytest.mark.slow)])
def test_training_step_lowers_to_the_kernels_of_an_h200(T, remat):
    """At its real sizes: a forward and a backward kernel for each of five blocks, with `remat` too."""
    case = training_step.Case(implementation="jflash", T=T, remat=remat)
    with jflash.use_options(hardware="h200"), jax.numpy_dtype_promotion("standard"):
        training = training_step.training_of(case, backend="mosaic_gpu")
        tokens = jax.ShapeDtypeStruct((1, T + 1), np.int32)
        traced = training.step.trace(jax.eval_shape(training.initial), tokens)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert training.parameters == 1_091_612_672
    assert "jflash_forward_sm90" in text and "jflash_backward_sm90" in text
    # Each stands in its partition rule.
    assert count(traced.jaxpr.jaxpr, lambda equation: equation.primitive.name == "custom_partitioning") == 10


@pytest.mark.slow
def test_training_step_from_the_shell(tmp_path):
    """A process for each implementation, each with its line; from them the table and the picture."""
    command = [sys.executable, "benchmarks/training_step.py", "--platform=cpu", "--lengths", str(TINY["T"])]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items() if name != "T"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    names = [json.loads(line)["implementation"] for line in found.stdout.splitlines()]
    assert names == ["jflash", "jax_cudnn", "jax_xla"]
    (tmp_path / "record.jsonl").write_text(found.stdout)
    code, out, err = run(training_report.main, tmp_path / "record.jsonl", "--plot", tmp_path / "losses.png")
    assert code == 0, err
    assert "| 1 × 24 | attention | jax_xla |" in out
    assert "- jax_cudnn did not run on 1 × 24, attention: RuntimeError: cuDNN" in out
    assert (tmp_path / "losses.png").stat().st_size > 0


STEP = WHERE | {"kind": "training_step", "B": 2, "T": 8192, "remat": "attention", "layers": 5, "features": 4096}
STEP |= {"hidden_features": 14336, "N": 32, "K": 8, "H": 128, "steps": 3, "dtype": "bfloat16"}


def measured(name: str, step_ms: float, losses: list[float], **others: object) -> dict:
    of_step = {"step_ms": step_ms, "tokens_per_s": 1234, "tflops": 450.6, "peak_bytes": 3 * 2**29, "losses": losses}
    return STEP | {"implementation": name} | of_step | others


TRAINING = [
    measured("jflash", 200.0, [5.5, 5.25, 4.0]),
    measured("jax_cudnn", 230.0, [5.5, 5.2525, 3.99], date="2026-12-01T10:00:30+00:00"),
    STEP | {"implementation": "jax_xla", "not_run": "OutOfMemory: it needs\n 150.0 GiB"},
    measured("jax_xla", 400.0, [5.0, 4.0, 3.0], T=16384),
]


def test_training_report(write):
    code, out, _ = run(training_report.main, write([RECORD[0], *TRAINING]))
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith(("| 2", "- "))] == [
        "- NVIDIA H200, driver 580.1; jflash 0.1, jax 0.11.2; commit abc123; 2026-12-01",
        "| 2 × 8192 | attention | jflash | 200.0 | – | 1234 | 450.6 | 1.5 | 5.500 → 4.000 | – |",
        "| 2 × 8192 | attention | jax_cudnn | 230.0 | 1.15 | 1234 | 450.6 | 1.5 | 5.500 → 3.990 | 0.0100 |",
        "| 2 × 16384 | attention | jax_xla | 400.0 | – | 1234 | 450.6 | 1.5 | 5.000 → 3.000 | – |",
        "- jax_xla did not run on 2 × 8192, attention: OutOfMemory: it needs 150.0 GiB",
    ]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([RECORD[0]], "found no line of kind 'training_step'"),
        ([*TRAINING, TRAINING[1]], "record.jsonl:5: found jax_cudnn a second time"),
        ([{name: value for name, value in TRAINING[0].items() if name != "K"}], "record.jsonl:1: found"),
        ([{name: value for name, value in TRAINING[0].items() if name != "losses"}], "no fields ['losses']"),
        ([[]], "wanted an object of training_step.py"),
    ],
)
def test_training_report_of_what_is_no_record(write, lines, words):
    code, out, err = run(training_report.main, write(lines))
    assert (code, out) == (2, "")
    assert words in err


def test_training_step_refuses_too_few_steps():
    code, _, err = run(training_step.main, "--steps", 3)
    assert code == 2
    assert "--steps: found 3, wanted more than the first 3" in err


# flexible_times.py and flexible_report.py -----------------------------------------------------------------------------


def flexible(case: str, T: int, implementation: str, forward_ms: float, backward_ms: float) -> dict:
    # One TFLOP in each.
    rates = {"forward_tflops": 1e3 / forward_ms, "backward_tflops": 1e3 / backward_ms}
    times = {"forward_ms": forward_ms, "backward_ms": backward_ms}
    return {"kind": "flexible_times", "case": case, "T": T, "implementation": implementation, **times, **rates}


FLEXIBLE = [
    {"kind": "tests", "passed": 1},
    flexible("window", 64, "jflash", 2.0, 5.0),
    flexible("window", 128, "jflash", 4.0, 10.0),
    flexible("window", 64, "flex_attention", 4.0, 4.0),
    flexible("window", 128, "flex_attention", 2.0, 20.0),
    flexible("bias", 64, "jflash", 8.0, 1.0),
    {"kind": "flexible_times", "case": "bias", "T": 64, "implementation": "flex_attention", "not_run": "OSError: no"},
    flexible("softcap", 64, "jflash", 1.0, 1.0),
    flexible("softcap", 64, "flex_attention", 8.0, 10.0),
]


def test_flexible_report(write):
    code, out, _ = run(flexible_report.main, write(FLEXIBLE))
    assert code == 0
    table, rest = out.split("\n\n")
    assert table.splitlines()[2:] == [
        "| window | 64 | 500 | 250 | 2.00 | 200 | 250 | 0.80 |",
        "| window | 128 | 250 | 500 | 0.50 | 100 | 50 | 2.00 |",
        "| bias | 64 | 125 | – | – | 1000 | – | – |",
        "| softcap | 64 | 1000 | 125 | 8.00 | 1000 | 100 | 10.00 |",
    ]
    # Cube roots of 2 * 0.5 * 8 = 8 and of 0.8 * 2 * 10 = 16, the sixth root of 128.
    assert rest.splitlines()[1:] == [
        "- forward: geometric mean of the ratios 2.00, 1 of 3 below 1",
        "- backward: geometric mean of the ratios 2.52, 1 of 3 below 1",
        "- both: geometric mean of the ratios 2.24, 2 of 6 below 1",
        "- flex_attention did not run on bias T=64: OSError: no",
    ]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (FLEXIBLE[:1], "found no line of kind 'flexible_times'"),
        ([*FLEXIBLE, FLEXIBLE[1]], "found jflash on window T=64 a second time"),
    ],
)
def test_flexible_report_of_what_is_no_record(write, lines, words):
    code, out, err = run(flexible_report.main, write(lines))
    assert (code, out) == (2, "")
    assert words in err


def test_both_sides_of_a_flexible_case_have_the_same_mask():
    """A block of FlexAttention is loaded, masked or full as the tile of that size here; and so many pairs attend."""
    masked = [case for case in flexible_times.cases(shrink=16) if case.mask_mod is not None]
    assert len(masked) == len(list(flexible_times.cases())) - 1
    for case in masked:
        arguments, T = case.jflash(), case.T
        mask = Causal() if arguments.get("causal") else arguments["mask"]
        kinds = TileMap(mask=mask.bind(B=1, N=1, T=T, S=T), T=T, S=T, block_q=128, block_k=128).kinds()[0, 0]
        counts = np.concatenate(flexible_times.allowed_in_blocks(case.mask_mod(lambda array: array), T, np.arange))
        assert ((counts > 0).astype(int) + (counts == 128**2) == kinds).all(), case.name
        # Half of the diagonal, or of the corner that a window does not reach, is left out of what is counted.
        assert counts.sum() == pytest.approx(case.pairs, rel=0.06), case.name
