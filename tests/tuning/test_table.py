"""Tuning tables: which problems an entry is for, what is refused of a file, and that a plan takes what a table has."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import jflash
from jflash import hardware, masks
from jflash.backends import mosaic_gpu
from jflash.backends.mosaic_gpu import candidates, primitives
from jflash.backends.mosaic_gpu.tiles import BackwardTiles, DqTiles, ForwardTiles
from jflash.errors import ArgumentError
from jflash.testing.problems import pose
from jflash.testing.workloads import Workload
from jflash.tuning import table as tables
from jflash.tuning.key import Key
from jflash.tuning.table import Entry, Table, device_name, read, tiles_of

H200, H100 = hardware.named("h200"), hardware.named("h100")
BACKEND = mosaic_gpu.BACKEND


def problem_of(*, deterministic=False, **changed):
    sizes = {"name": "", "B": 3, "T": 1500, "S": 700, "N": 10, "K": 5, "H": 64, "Hv": 128, "dtype": "bfloat16"}
    problem, _ = pose(Workload(**sizes | changed), deterministic=deterministic)
    return problem


KEY = Key(
    kernel="forward", H=64, Hv=128, group=2, mask="full", T=2048, S=1024, keys=1024, heads=32, aligned=False
)  # fmt: skip


# Keys -----------------------------------------------------------------------------------------------------------------


def test_the_key_of_a_problem():
    assert Key.of(problem_of(), "forward") == KEY


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ({"T": 1504, "S": 704}, {"aligned": True}),
        ({"T": 2048, "S": 1024}, {"aligned": True}),
        ({"T": 2049}, {"T": 4096}),
        ({"T": 1024}, {"T": 1024}),
        ({"B": 4}, {"heads": 64}),
        ({"N": 5}, {"group": 1, "heads": 16}),
        ({"H": 80, "Hv": 0}, {"H": 80, "Hv": 80}),
        ({"T": 700, "mask": masks.Causal()}, {"T": 1024, "mask": "band"}),
        # Queries of a tile see the keys of two: 63 + 99 + 1, rounded to whole tiles, is 3 of them.
        ({"mask": masks.SlidingWindow(99, 0)}, {"mask": "band", "keys": 256}),
        ({"mask": masks.SlidingWindow(9, 0)}, {"mask": "band", "keys": 128}),
        ({"mask": masks.Causal() & masks.SlidingWindow(9, None)}, {"mask": "band", "keys": 128}),
        # Every query sees all keys.
        ({"mask": masks.SlidingWindow(1500, 700)}, {}),
        ({"S": 9}, {"S": 16, "keys": 16}),
    ],
    ids=str,
)
def test_what_a_key_tells_apart(changed, fields):
    assert Key.of(problem_of(**changed), "forward") == dataclasses.replace(KEY, **fields)


@pytest.mark.parametrize(
    "changed",
    [
        {"mask": masks.Lengths(kv=np.full(3, 7, np.int32))},
        {"mask": masks.Causal() | masks.SlidingWindow(3, 3)},
        {"mask": masks.Segments(np.zeros((3, 700), np.int32)), "T": 700},
        {"softcap": 30.0},
        {"alibi_slopes": (10,), "T": 700, "mask": masks.Causal()},
        {"sinks": (10,)},
        {"bias": (1, 1, 1, 700)},
        {"T": 0},
    ],
    ids=str,
)
def test_problems_without_a_key(changed):
    assert Key.of(problem_of(**changed), "forward") is None


# Files ----------------------------------------------------------------------------------------------------------------

TILES = ForwardTiles(warpgroups=2, block_k=64, stages=4, head_group=8)
MEASURED = {"ms": 1.0}


@pytest.fixture
def write(tmp_path):
    """Writes a table of one entry with some changes, and returns its file."""

    def write(*, key=KEY, tiles=TILES, entries=1, head=None, of_key=None, of_tiles=None, of_entry=None):
        as_json = lambda record, more: {**dataclasses.asdict(record), **(more or {})}  # noqa: E731
        entry = {"key": as_json(key, of_key), "tiles": as_json(tiles, of_tiles), "measured": MEASURED}
        content = {"format": 1, "device": "h200", "backend": "mosaic_gpu"}
        content |= {"entries": [{**entry, **(of_entry or {})}] * entries, **(head or {})}
        file = tmp_path / "own.json"
        file.write_text(json.dumps(content))
        return file

    yield write
    read.cache_clear()
    tables._tiles_of.cache_clear()


def test_what_is_written_is_read(tmp_path):
    dq = dataclasses.replace(KEY, kernel="backward_dq"), DqTiles(block_k=64, head_group=2)
    entries = [Entry(key=key, tiles=tiles, measured=MEASURED) for key, tiles in (dq, (KEY, TILES))]
    table = Table(file=tmp_path / "t.json", device="h200", backend="mosaic_gpu", entries={}).with_entries(entries)
    table.write()
    assert read(tmp_path / "t.json", BACKEND, H200) == table
    lines = (tmp_path / "t.json").read_text().splitlines()
    assert len(lines) == 4 and '"backward_dq"' in lines[1] and '"forward"' in lines[2]
    shorter = table.with_entries([], without=[KEY])
    assert set(shorter.entries) == {dq[0]} and len(table.entries) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "t.json"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"head": {"format": 2}}, "found format 2 and backend mosaic_gpu in {file}, wanted format 1 and backend mosai"),
        ({"head": {"backend": "xla"}}, "backend xla in {file}"),
        ({"head": {"author": "me"}}, "author"),
        ({"of_entry": {"note": "x"}}, "note"),
        ({"of_key": {"D": 3}}, "['D'] of Key in {file}, entry 0, wanted the fields of a key"),
        ({"of_key": {"mask": "odd"}}, "mask='odd' of Key"),
        ({"of_key": {"T": "2048"}}, "T='2048' of Key"),
        ({"of_key": {"kernel": "sideways"}}, "kernel='sideways'"),
        ({"of_key": {"kernel": "backward"}}, "of BackwardTiles"),
        ({"of_tiles": {"speed": 9}}, "['speed'] of ForwardTiles in {file}, entry 0"),
        ({"of_tiles": {"stages": True}}, "stages=True of ForwardTiles"),
        ({"of_tiles": {"stages": 9}}, "`tiles`: found stages=9, wanted one of 1, 2, 3, 4."),
        ({"of_tiles": {"splits": 3, "blocks": 132}}, "splits=3, blocks=132"),
        ({"of_tiles": {"block_k": 256}}, "425984 bytes of shared memory in {file}, entry 0 (H=64 Hv=128"),
        ({"entries": 2}, "found a second entry in {file}, entry 1"),
    ],
    ids=str,
)
def test_a_file_that_is_no_table_is_refused(write, changed, words):
    file = write(**changed)
    with pytest.raises(ArgumentError, match=re.escape(words.format(file=file))) as raised:
        read(file, BACKEND, H200)
    assert raised.value.argument == "tuning_table"


@pytest.mark.parametrize(("text", "words"), [(None, "no file"), ("{", "no JSON"), ("[]", "found list in")])
def test_what_is_no_json_is_refused(tmp_path, text, words):
    file = tmp_path / "t.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ArgumentError, match=f"{words}.*{file}"):
        read(file, BACKEND, H200)


@pytest.mark.parametrize(("H", "Hv"), [(64, 64), (72, 200), (256, 256)])
@pytest.mark.parametrize(
    ("kernel", "record"),
    [("forward", TILES), ("backward", BackwardTiles(block_q=64)), ("backward_dq", DqTiles(block_k=128, v_stages=3))],
)
def test_operands_are_less_than_all_that_a_kernel_takes(kernel, record, H, Hv, monkeypatch):
    """What is refused when a file is read would be refused when the kernel is traced."""
    problem = problem_of(H=H, Hv=Hv, T=512, S=512, deterministic=kernel == "backward_dq")
    tiles = dataclasses.replace(mosaic_gpu.default_tiles(problem, H200), **{kernel: record})
    taken, count = [], primitives.smem_bytes
    monkeypatch.setattr(primitives, "named", lambda name: dataclasses.replace(H200, smem_bytes_per_block=2**30))
    monkeypatch.setattr(primitives, "smem_bytes", lambda *a, **k: taken.append(count(*a, **k)) or taken[-1])
    candidates.trace(problem, tiles, kernel)
    # Of a backward pass the first kernel is that for what accumulators start at.
    assert 0 <= taken[kernel != "forward"] - record.operand_bytes(H, Hv) <= 80 * 1024


# Plans ----------------------------------------------------------------------------------------------------------------


def explained(problem_sizes=None, **arguments):
    p = problem_of(**problem_sizes or {})
    shapes = (p.B, p.T, p.N, p.H), (p.B, p.S, p.K, p.H), (p.B, p.S, p.K, p.Hv)
    q, k, v = (jax.ShapeDtypeStruct(shape, p.dtype) for shape in shapes)
    return jflash.explain(q, k, v, **{"hardware": "h200"} | arguments)


def test_without_an_entry_it_is_the_formula(write):
    with jflash.use_options(tuning_table=str(write())):
        told = explained({"B": 7})
    assert told.plan.tiles == mosaic_gpu.default_tiles(told.problem, H200)
    assert told.tiles_from == {"forward": "the formula", "backward": "the formula"}
    assert "tiles     forward: the formula; backward: the formula\n" in str(told)


def test_an_entry_sets_its_kernel_alone(write):
    with jflash.use_options(tuning_table=str(write())):
        told = explained()
    formula = mosaic_gpu.default_tiles(told.problem, H200)
    assert formula.forward != TILES
    assert told.plan.tiles == dataclasses.replace(formula, forward=TILES)
    assert (
        told.tiles_from["forward"]
        == "own.json, H=64 Hv=128 group=2 full T<=2048 S<=1024 keys<=1024 heads<=32 odd lengths"
    )
    assert told.tiles_from["backward"] == "the formula"
    # Outside of the option, it is as it was.
    assert explained().plan.tiles == formula


def test_another_device_does_not_take_it(write):
    with jflash.use_options(tuning_table=str(write())):
        assert explained(hardware="h100").tiles_from["forward"] == "the formula"


def test_tiles_of_the_caller_come_first(write):
    own = mosaic_gpu.default_tiles(problem_of(), H200)
    with jflash.use_options(tuning_table=str(write())):
        told = explained(tiles=own, backend="mosaic_gpu")
    assert told.plan.tiles == own and told.tiles_from == {} and "the formula" not in str(told)


def test_the_table_of_a_caller_comes_before_the_shipped_one(write, tmp_path, monkeypatch):
    shipped = tmp_path / "data"
    shipped.mkdir()
    monkeypatch.setattr(tables, "DATA", shipped)
    both = dataclasses.replace(TILES, stages=2), dataclasses.replace(KEY, kernel="backward"), BackwardTiles(block_q=64)
    forward = Entry(key=KEY, tiles=both[0], measured=MEASURED)
    backward = Entry(key=both[1], tiles=dataclasses.replace(both[2], head_group=16), measured=MEASURED)
    table = Table(file=shipped / "h200.json", device="h200", backend="mosaic_gpu", entries={})
    table.with_entries([forward, backward]).write()
    assert explained().plan.tiles.forward == both[0]
    with jflash.use_options(tuning_table=str(write())):
        told = explained()
    assert told.plan.tiles.forward == TILES and told.plan.tiles.backward.head_group == 16
    assert told.tiles_from["backward"].startswith("h200.json, ")


def test_a_table_that_is_named_and_not_there_is_an_error(tmp_path):
    with jflash.use_options(tuning_table=str(tmp_path / "t.json")), pytest.raises(ArgumentError, match="no file"):
        explained()


def test_deterministic_gradients_have_tiles_of_their_own():
    assert tiles_of(BACKEND, problem_of(deterministic=True), H200).sources.keys() == {"forward", "backward_dq"}


def test_the_environment_names_a_table():
    from jflash.options import from_environment

    assert from_environment({"JFLASH_TUNING_TABLE": "t.json"}).tuning_table == "t.json"


def test_devices_have_the_names_that_cuda_gives_them():
    full = dataclasses.replace(H200, name="NVIDIA H200")
    assert device_name(full) == device_name(H200) == "h200"
    assert device_name(dataclasses.replace(H100, name="NVIDIA H100 80GB HBM3")) == "h100_80gb_hbm3"
