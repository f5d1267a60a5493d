"""The command line: what it prints, what it writes, and its exit codes."""

import contextlib
import dataclasses
import io
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import __version__
from jflash.backends import registry
from jflash.cli import main
from jflash.cli.measurement import OutOfMemory, Program
from jflash.masks import Causal, SlidingWindow
from jflash.testing import budget
from jflash.testing.inputs import random_inputs
from jflash.testing.workloads import Workload, check_workloads

FLOAT32 = Workload(name="small", B=1, T=24, N=4, K=2, H=8, mask=Causal())
MLA = Workload(name="small_mla", B=2, T=16, S=20, N=2, K=2, H=12, Hv=8, dtype="bfloat16")


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code
    return code, out.getvalue(), err.getvalue()


def records(text: str) -> list[dict]:
    """JSON lines, refusing the numbers that JSON does not have."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture(scope="module", autouse=True)
def small():
    """Small workloads, no waiting between samples, and the promotion of dtypes that `jax.nn` needs in 16 bits."""
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr("jflash.cli.check.check_workloads", lambda large: (FLOAT32, MLA))
        patch.setattr("jflash.cli.plot._LENGTHS", (64, 128))
        for command in ("check", "bench"):
            patch.setattr(f"jflash.cli.{command}._IDLE_S", 0.0)
        yield


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """One run of `jflash check` with all that it writes."""
    folder = tmp_path_factory.mktemp("check")
    code, out, err = run("check", "--json", folder / "check.jsonl", "--plot", folder / "check.png", "--seed", 3)
    assert code == 0, err
    return out, err, records((folder / "check.jsonl").read_text("utf-8")), folder / "check.png"


def test_check_prints_a_row_for_each_workload_and_a_verdict(checked):
    out, _, _, _ = checked
    for name in ("small", "small_mla"):
        (row,) = (line for line in out.splitlines() if line.startswith(f"{name} "))
        assert "xla" in row
    assert "* small_mla: jax.nn refuses Hv != H" in out
    assert "* small:" not in out
    assert "ABOVE" not in out
    assert out.rstrip().endswith("PASSED: 2 of 2 workloads within all their bounds.")


def test_check_tells_what_is_running(checked):
    _, err, _, _ = checked
    assert err.splitlines()[:2] == ["running small (1 of 2) ...", "running small_mla (2 of 2) ..."]


def test_check_records(checked):
    _, _, (small, mla), _ = checked
    assert (small["kind"], small["workload"], small["seed"]) == ("check", "small", 3)
    assert [small[name] for name in ("B", "T", "S", "N", "K", "H", "Hv", "dtype")] == [1, 24, 24, 4, 2, 8, 8, "float32"]
    assert (mla["S"], mla["Hv"], mla["dtype"]) == (20, 8, "bfloat16")
    assert (small["backend"], small["mask"], small["refusal"]) == ("xla", "Causal(offset=0)", None)
    assert small["tiles"] == "XlaTiles(block_q=24, block_k=24)"
    assert small["platform"] == "cpu" and small["device"] and small["cores"] >= 1 and small["date"].endswith("+00:00")
    assert small["versions"].keys() == {"jflash", "jax", "jaxlib", "python"}
    assert small["versions"]["jflash"] == __version__
    for record in (small, mla):
        assert record["within"] is True
        found = {(row["name"], row["statistic"]) for row in record["errors"]}
        assert found == {(name, kind) for name in ("out", "lse", "dq", "dk", "dv") for kind in ("max", "mean")}
        assert all(row["within"] and 0 <= row["error"] <= row["bound"] for row in record["errors"])
        for who in ("ours", "jax_nn"):
            assert record[who]["forward_ms"] > 0
            assert record[who]["forward_backward_ms"] > 0
            # At least q, k, v and the cotangent of out go in, and out and three gradients come out.
            assert record[who]["memory_bytes"] > 2 * 4 * 2 * 16 * 2 * 8
    assert small["jax_nn_note"] is None and "Hv" in mla["jax_nn_note"]


def test_check_draws_a_picture(checked):
    import matplotlib.image

    _, _, _, picture = checked
    assert picture.read_bytes().startswith(b"\x89PNG")
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert pixels.shape[0] > 400 and pixels.shape[1] > 800
    # Frames, text and bars: much is white, and much is not, in both halves.
    for half in np.split(pixels, 2, axis=1):
        assert 0.02 < np.mean(half.min(-1) < 0.9) < 0.6


@pytest.fixture
def no_peer(monkeypatch):
    """Saves the time of compiling what jflash is compared with."""
    monkeypatch.setattr("jflash.cli.check.peer_of", lambda workload: "not compared here")


@contextlib.contextmanager
def broken_backend(name, spoil):
    """A backend of this name: `xla`, with its output changed."""
    xla = registry.get("xla")

    def forward(problem, tiles, operands):
        attended = xla.forward(problem, tiles, operands)
        return attended._replace(out=spoil(attended.out))

    with registry.registered(dataclasses.replace(xla, name=name, forward=forward)):
        yield


# Each with a name of its own: a call is traced once for a plan, and a plan knows a backend by its name.
@pytest.mark.parametrize(
    ("name", "spoil"),
    [("off_by_1%", lambda out: out * 1.01), ("nan", lambda out: out.at[0, 0, 0, 0].set(jnp.nan))],
    ids=["off_by_1%", "nan"],
)
def test_a_broken_bound_is_exit_code_1(name, spoil, no_peer):
    with broken_backend(name, spoil):
        code, out, err = run("check", "--backend", name, "--workload", "small", "--json")
    assert code == 1
    # With JSON on standard output the table is on standard error.
    (record,) = records(out)
    assert (record["backend"], record["within"]) == (name, False)
    (row,) = (row for row in record["errors"] if (row["name"], row["statistic"]) == ("out", "max"))
    assert not row["within"]
    assert row["error"] is None if name == "nan" else row["error"] > row["bound"]
    assert "out max: " in err and " ABOVE " in err
    assert "* small: not compared here" in err
    assert "FAILED: 1 of 1 workloads above their bounds (small)." in err


def test_a_refusal_is_shown_with_its_reason(no_peer):
    def supports(problem, hardware):
        return f"head dim {problem.H} is not 8" if problem.H != 8 else None

    picky = dataclasses.replace(registry.get("xla"), name="picky", supports=supports)
    with registry.registered(picky):
        code, out, _ = run("check", "--backend", "picky")
        assert code == 0
        assert "refused: head dim 12 is not 8" in out
        assert "PASSED: 1 of 1 workloads within all their bounds, 1 refused." in out

        code, out, _ = run("check", "--backend", "picky", "--workload", "small_mla")
        assert code == 1
        assert "FAILED: nothing ran" in out


def test_a_backend_without_lse_is_checked_by_its_output(no_peer):
    def supports(problem, hardware):
        return "it has no lse" if problem.lse else None

    def forward(problem, tiles, operands):
        return xla.forward(problem, tiles, operands)._replace(lse=None)

    xla = registry.get("xla")
    with registry.registered(dataclasses.replace(xla, name="lseless", supports=supports, forward=forward)):
        code, out, err = run("check", "--backend", "lseless", "--workload", "small", "--json")
    assert code == 0, err
    (record,) = records(out)
    assert record["backend"] == "lseless" and record["within"]
    assert {error["name"] for error in record["errors"]} == {"out", "dq", "dk", "dv"}


def test_explain_for_a_device_that_is_not_here():
    code, out, _ = run(
        "explain", "T=4096", "N=32", "K=8", "H=128", "--causal", "--window", "1023,none", "--hardware", "h200"
    )
    assert code == 0
    assert "B=1 T=4096 S=4096 N=32 K=8 H=128 Hv=128 bfloat16" in out
    assert "SlidingWindow(1023, None" in out
    assert "h200 (compute capability 9.0" in out
    assert "runs      " in out
    assert 'not       reference: runs only where asked for by name, "auto" never takes it' in out


def test_explain_in_float64():
    code, out, _ = run(
        "explain", "B=2", "T=8", "S=9", "N=2", "H=4", "Hv=6", "--dtype", "float64", "--backend", "reference"
    )
    assert code == 0
    assert "B=2 T=8 S=9 N=2 K=2 H=4 Hv=6 float64" in out
    assert "runs      reference" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "required: COMMAND"),
        ("frobnicate", "'frobnicate'"),
        ("check --frobnicate", "--frobnicate"),
        ("check --backend nope", "'nope', wanted \"auto\" or one of "),
        ("check --workload nope", "'nope', wanted one of small, small_mla"),
        ("check --seed one", "'one'"),
        ("check --plot {folder}/missing/check.png", "missing"),
        ("check --plot {folder}/check.word", "check.word"),
        ("check --json {folder}/missing/check.jsonl", "missing"),
        ("explain T=8 H=4", "no N, wanted at least T, N and H"),
        ("explain T=8 N=2 D=4", "'D=4', wanted LETTER=SIZE"),
        ("explain T=8 N=2 H=4.5", "'H=4.5'"),
        ("explain T=8 N=3 K=2 H=4", "K=2"),
        ("explain T=8 S=9 N=2 H=4 --causal", "T=8, S=9"),
        ("explain T=8 N=2 H=4 --window 3", "'3', wanted LEFT,RIGHT"),
        ("explain T=8 N=2 H=4 --window=-1,0", "-1"),
        ("explain T=8 N=2 H=4 --hardware abacus", "'abacus', wanted one of cpu"),
        ("explain T=8 N=2 H=4 --dtype int8", "int8"),
        ("bench --backends nope", "'nope'"),
        ("bench --lengths 0", "`--lengths`: found 0"),
    ],
)
def test_wrong_arguments_are_exit_code_2_and_one_line(arguments, told, tmp_path):
    code, out, err = run(*arguments.format(folder=tmp_path).split())
    assert code == 2
    assert out == ""
    assert err.startswith("jflash") and err.count("\n") == 1 and err.endswith("\n")
    assert told in err


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("check", "--plot", tmp_path / "check.png")
    assert (code, out) == (2, "")
    assert err == 'jflash check: --plot needs matplotlib: pip install "jflash[bench]"\n'


def test_bench_times_all_implementations_and_hides_no_refusal():
    code, out, err = run("bench", "--lengths", 16, "--head-dim", 8, "--causal", "--json")
    assert code == 0
    found = {record["implementation"]: record for record in records(out)}
    assert found.keys() == {*(f"jflash {name}" for name in registry.names()), "jax.nn xla", "jax.nn cudnn"}
    for name in ("jflash xla", "jflash reference", "jax.nn xla"):
        record = found[name]
        assert record["refusal"] is None and record["device"] and record["versions"]["jax"] and record["date"]
        operations = 2 * 1 * 4 * 16 * 16 * (8 + 8) / 2
        assert math.isclose(record["forward_tflops"], operations / record["forward_ms"] / 1e9)
        assert math.isclose(record["forward_backward_tflops"], 3.5 * operations / record["forward_backward_ms"] / 1e9)
    assert found["jflash xla"]["tiles"] == "XlaTiles(block_q=16, block_k=16)"
    assert "cuDNN" in found["jax.nn cudnn"]["refusal"]
    assert "compute capability 8.0" in found["jflash cudnn"]["refusal"]
    assert "jax.nn cudnn      does not run: " in err


def test_what_does_not_fit_is_not_run(monkeypatch):
    monkeypatch.setattr("jflash.cli.measurement.device_bytes", lambda: 2**20)
    program = Program(lambda x: x + 1, jnp.zeros(2**18))
    with pytest.raises(OutOfMemory, match=r"needs 0\.0 GiB of memory, the device has 0\.0 GiB"):
        program.time_ms(jnp.zeros(2**18), idle_s=0)


@pytest.mark.parametrize("large", [False, True])
def test_the_workloads_of_check(large):
    workloads = check_workloads(large=large)
    assert len({workload.name for workload in workloads}) == len(workloads)
    for w in workloads:
        w.mask.bind(B=w.B, N=w.N, T=w.T, S=w.S)
    dims = [(w.H, w.Hv) for w in workloads]
    assert (192, 128) in dims and (128, 128) in dims
    assert any(w.N > w.K and isinstance(w.mask, Causal) for w in workloads)
    assert any(isinstance(w.mask, SlidingWindow) for w in workloads)


def test_truth_and_plain_in_pieces_are_those_of_the_whole(monkeypatch):
    # A large workload is compared with float64 a piece at a time, so that no matrix of all its pairs is held.
    mask = Causal(offset=np.array([4, -2], np.int32))
    workload = dataclasses.replace(MLA, N=4, bias=(1, 4, 1, 20), mask=mask)
    inputs = random_inputs(workload)
    whole = budget.truth_of(workload, inputs), budget.plain_of(workload, inputs)
    monkeypatch.setattr(budget, "_PIECE_PAIRS", 250)
    truth, plain = budget.truth_of(workload, inputs), budget.plain_of(workload, inputs)
    assert truth.keys() == plain.keys() == whole[0].keys()
    for name in truth:
        np.testing.assert_allclose(truth[name], whole[0][name], rtol=1e-12, atol=1e-12)
        # The sums are in another order and may round to the other neighbour, in the last of the 8 bits of bfloat16.
        np.testing.assert_allclose(plain[name], whole[1][name], rtol=2**-7, atol=1e-5)
