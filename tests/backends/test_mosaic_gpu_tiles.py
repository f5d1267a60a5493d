"""Default tiles of the Hopper kernels, and in which order their blocks of threads take the rows of tiles."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jflash import hardware
from jflash.backends import mosaic_gpu
from jflash.backends.mosaic_gpu.candidates import trace
from jflash.backends.mosaic_gpu.support import notes
from jflash.backends.mosaic_gpu.tiles import HEAD_GROUPS, ForwardTiles
from jflash.backends.mosaic_gpu.visits import head_and_row
from jflash.errors import ArgumentError
from jflash.masks import Causal, Full, Lengths, Mask, Segments, SlidingWindow
from jflash.masks.tile_map import TileMap
from jflash.testing.problems import pose
from jflash.testing.workloads import Workload

H200 = hardware.named("h200")


def forward_tiles(**sizes) -> ForwardTiles:
    sizes = {"name": "", "dtype": "bfloat16", "B": 16, "T": 1024, "N": 16, "K": 2, "H": 64, "mask": Causal()} | sizes
    problem, _ = pose(Workload(**sizes))
    return mosaic_gpu.default_tiles(problem, H200).forward


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("heads", [1, 2, 3, 12, 16])
@pytest.mark.parametrize("head_group", HEAD_GROUPS)
def test_every_row_of_every_head_is_taken_once(rows, heads, head_group):
    places = jnp.arange(rows * heads)
    found = [head_and_row(place, rows=rows, heads=heads, head_group=head_group) for place in places]
    assert sorted((int(head), int(row)) for head, row in found) == list(np.ndindex(heads, rows))
    assert int(found[0][1]) == rows - 1, "the longest row comes first"


@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 128, "B": 32},
        {"T": 512},
        {"T": 512, "mask": Full()},
        {"T": 1024, "H": 128},
        {"T": 1024, "H": 128, "mask": Full()},
        {"T": 1001, "H": 128, "mask": SlidingWindow(100, 0)},
        {"T": 333, "H": 40},
        {"T": 16384, "B": 1, "H": 128, "mask": SlidingWindow(1023, 0)},
    ],
    ids=str,
)
def test_blocks_share_short_rows_evenly(sizes):
    tiles = forward_tiles(**sizes)
    assert tiles.blocks == H200.sm_count and not tiles.counted
    w = {"B": 16, "N": 16, "mask": Causal()} | sizes
    tile_map = TileMap(mask=w["mask"], T=w["T"], S=w["T"], block_q=tiles.block_q, block_k=tiles.block_k)
    run = tile_map.run(np.arange(tile_map.rows))
    steps = np.broadcast_to(run.stop - run.start, (tile_map.rows,))
    heads = w["B"] * w["N"]
    _, row = head_and_row(
        jnp.arange(heads * tile_map.rows), rows=tile_map.rows, heads=heads, head_group=tiles.head_group
    )
    taken = np.bincount(np.arange(row.size) % tiles.blocks, weights=steps[np.asarray(row)])
    # A block has at most its share, the row that it has more than others, and little for unlike rows.
    assert taken.max() <= 1.1 * taken.mean() + steps.max()


@pytest.mark.parametrize(
    ("sizes", "head_group"),
    [
        ({"T": 1024}, 16),
        ({"T": 1024, "mask": Full()}, 1),
        ({"T": 4096, "B": 4}, 16),
        ({"T": 16384, "B": 1, "N": 32}, 16),
        ({"T": 16384, "B": 1, "H": 128, "K": 16}, 4),
        ({"T": 8192, "B": 2, "H": 128, "N": 32, "K": 32}, 8),
        ({"T": 4096, "B": 4, "H": 128}, 16),
        ({"T": 4096, "B": 4, "H": 128, "mask": Full()}, 1),
        ({"mask": Lengths(kv=np.full(16, 7, np.int32))}, 16),
        ({"T": 32768, "B": 1, "H": 128, "mask": Segments(np.zeros((1, 32768), np.int32)) & Causal()}, 16),
        ({"mask": Causal() | SlidingWindow(3, 3)}, 16),
        ({"T": 4096, "B": 1, "H": 128, "mask": Full(), "bias": (1, 16, 4096, 4096)}, 1),
    ],
    ids=str,
)
def test_blocks_count_rows_that_are_long_or_of_unknown_length(sizes, head_group):
    """As measured on an H200 (docs/decisions.md, 2026-11-30), and what follows for its like."""
    tiles = forward_tiles(**sizes)
    assert (tiles.counted, tiles.blocks, tiles.head_group) == (True, H200.sm_count, head_group)


@pytest.mark.parametrize("sizes", [{"H": 256}, {"H": 64, "Hv": 128}, {"B": 1, "N": 8}], ids=str)
def test_elsewhere_each_row_has_a_block(sizes):
    assert forward_tiles(**sizes).blocks is None


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(70, 9)], ids=str)
def test_without_a_count_of_multiprocessors_each_row_has_a_block(mask: Mask):
    unknown = hardware.Hardware(name="unknown", platform="cuda", compute_capability=(9, 0), smem_bytes_per_block=232448)
    problem, _ = pose(Workload(name="", dtype="bfloat16", B=16, T=256, N=16, K=2, H=64, mask=mask))
    assert mosaic_gpu.default_tiles(problem, unknown).forward.blocks is None


def test_no_blocks_are_refused():
    with pytest.raises(ArgumentError, match="`tiles`: found blocks=0, wanted None or at least 1"):
        ForwardTiles(warpgroups=2, block_k=128, blocks=0)
    with pytest.raises(ArgumentError, match="found counted=True with blocks=None, wanted blocks with it"):
        ForwardTiles(warpgroups=2, block_k=128, counted=True)


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ({"B": 1, "T": 512, "S": 65536, "N": 8, "H": 128, "mask": Full()}, 4),
        ({"B": 1, "T": 1, "S": 8192, "N": 32, "H": 128, "mask": Lengths(kv=np.full(1, 7, np.int32))}, 4),
        ({"B": 1, "T": 4096, "N": 4, "H": 128}, 2),
        # Rows of 8 steps in 64 blocks, and 512 blocks: a merge would take longer than it saves.
        ({"B": 1, "T": 1024, "N": 8, "H": 128}, 1),
        ({"B": 16, "T": 1, "S": 8192, "N": 32, "H": 128, "mask": Full()}, 1),
    ],
    ids=str,
)
def test_keys_of_few_rows_are_split(sizes, splits):
    """As measured on an H200 (docs/decisions.md, 2026-11-30)."""
    tiles = forward_tiles(**sizes)
    assert tiles.splits == splits and (tiles.blocks is None or splits == 1)


# At T=1024 and H=256 a forward row is short and too wide to share blocks; more heads than four were not measured there.
@pytest.mark.parametrize(
    ("T", "H"), [(T, H) for T in (1024, 4096, 16384, 131072) for H in (64, 128, 256) if (T, H) != (1024, 256)]
)
def test_no_tile_ends_long_after_all_others(T, H):
    """When the last heads begin, their longest tile takes no longer than all that is left, spread over the device."""
    workload = {"name": "", "dtype": "bfloat16", "B": 16384 // T or 1, "T": T, "N": 2048 // H, "K": 2048 // H, "H": H}
    problem, _ = pose(Workload(**workload, mask=Causal()))
    tiles = mosaic_gpu.default_tiles(problem, H200)
    for own in (tiles.forward, tiles.backward):
        if getattr(own, "blocks", None) is not None:
            continue
        transpose = own is tiles.backward
        tile_map = TileMap(mask=Causal(), T=T, S=T, block_q=own.block_q, block_k=own.block_k, transpose=transpose)
        run = tile_map.run(np.arange(tile_map.rows))
        steps = run.stop - run.start
        assert own.head_group * steps.sum() / H200.sm_count >= 0.4 * steps.max(), own


@pytest.mark.parametrize(
    ("H", "Hv"), [pair for pair in itertools.product((64, 128, 192, 256), repeat=2) if max(pair) > 128]
)
def test_the_backward_kernel_for_wide_heads_has_the_stages_that_fit(H, Hv):
    problem, _ = pose(Workload(name="", dtype="bfloat16", B=1, T=256, N=2, K=2, H=H, Hv=Hv, mask=Causal()))
    tiles = mosaic_gpu.default_tiles(problem, H200)
    trace(problem, tiles, "backward")
    assert tiles.backward.q_stages == 2 and not tiles.backward.dk_in_flight
    if tiles.backward.do_stages == 1:
        more = dataclasses.replace(tiles, backward=dataclasses.replace(tiles.backward, do_stages=2))
        with pytest.raises(ArgumentError, match="bytes of shared memory, wanted at most 232448 bytes"):
            trace(problem, more, "backward")


@pytest.mark.parametrize(
    ("H", "Hv", "found"),
    [
        (192, 64, []),
        (192, 136, ["Hv=136 takes the time of 192 columns"]),
        (40, 200, ["H=40 takes the time of 64 columns", "Hv=200 takes the time of 256 columns"]),
    ],
)
def test_what_is_filled_up_is_told(H, Hv, found):
    problem, _ = pose(Workload(name="", dtype="bfloat16", B=1, T=256, N=2, K=2, H=H, Hv=Hv))
    assert [note.split(":")[0] for note in notes(problem)] == found
