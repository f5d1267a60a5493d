"""Tile sizes of the Hopper kernels."""

import dataclasses
import functools
import heapq
from typing import Any

import numpy as np

from jflash.backends.mosaic_gpu.primitives import CHUNK, WARPGROUP_ROWS, chunks
from jflash.backends.mosaic_gpu.terms import axes_of_arguments, is_plain
from jflash.backends.mosaic_gpu.tile_values import squeezed
from jflash.errors import ArgumentError
from jflash.hardware import Hardware
from jflash.masks.tile_map import TileMap
from jflash.problem import Problem

HEAD_GROUPS = (1, 2, 4, 8, 16, 32, 64)
# Keys up to which a row of tiles is short, so that blocks share the rows in a fixed order: at head dims up to 64 and
# over that. With a counter no block ends long after the others, but an even fixed order is faster for short rows: 0.145
# and not 0.150 ms at H=128, T=1024, causal.
_SHORT_NARROW, _SHORT = 512, 1280
# What heads that run side by side have of K and V at most, in the forward kernel with a block for each row, with blocks
# that count at head dims up to 64 and over that; and of queries in the backward kernel (docs/decisions.md, 2026-11-30).
_ROW_CACHE_BYTES, _COUNTED_NARROW_CACHE_BYTES, _COUNTED_CACHE_BYTES = 16 * 2**20, 64 * 2**20, 32 * 2**20
_BACKWARD_TOKENS = 16384
# How long rows of lists are is not known when tracing: as long as packed documents, which most lists are of.
_LISTED_TOKENS = 2048
_ITEM_BYTES = 2  # of q, k and v
# What tiles may take of shared memory: 3 to 4 KiB more are barriers, statistics, sums and indices.
_TILE_BYTES = 224 * 2**10


def _columns(size: int) -> int:
    """Columns of the chunks that hold a row of so many."""
    return CHUNK * chunks(size)


def _check(**found: tuple[object, tuple]) -> None:
    for name, (value, allowed) in found.items():
        if value not in allowed:
            wanted = "one of " + ", ".join(map(repr, allowed))
            raise ArgumentError("tiles", found=f"{name}={value!r}", wanted=wanted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardTiles:
    """How the forward kernel cuts its work. Each field changes the speed and never the result.

    Attributes:
      warpgroups: warpgroups that compute, of 64 queries each.
      block_k: keys of a tile.
      stages: tiles of K, and of V, that shared memory holds.
      pin_wait: keeps the compiler from waiting for P V before the exponentials of the next tile.
      head_group: heads whose tiles run side by side, so that long tiles come first and K and V stay in the L2 cache.
      blocks: blocks of threads that share all rows of tiles, each loading its next row while it computes; None is one
        for each row.
      counted: these blocks take the next row of tiles from a counter, each when it has loaded its last one; otherwise
        every `blocks`-th.
      splits: parts of the keys of a row of tiles, each for a block of threads; their results are merged afterwards.

    Raises:
      ArgumentError: a value that the kernel is not written for.
    """

    warpgroups: int
    block_k: int
    stages: int = 2
    pin_wait: bool = True
    head_group: int = 1
    blocks: int | None = None
    counted: bool = False
    splits: int = 1

    def __post_init__(self):
        _check(
            warpgroups=(self.warpgroups, (1, 2, 3)),
            block_k=(self.block_k, (64, 128, 192, 256)),
            stages=(self.stages, (1, 2, 3, 4)),
            head_group=(self.head_group, HEAD_GROUPS),
        )
        if self.blocks is not None and self.blocks < 1:
            raise ArgumentError("tiles", found=f"blocks={self.blocks}", wanted="None or at least 1")
        if self.counted and self.blocks is None:
            raise ArgumentError("tiles", found="counted=True with blocks=None", wanted="blocks with it")
        if self.splits < 1 or (self.splits > 1 and self.blocks is not None):
            wanted = "splits of at least 1, and more than 1 only with blocks=None"
            raise ArgumentError("tiles", found=f"splits={self.splits}, blocks={self.blocks}", wanted=wanted)

    @property
    def block_q(self) -> int:
        """Queries of a block of threads."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def q_stages(self) -> int:
        """Tiles of Q that shared memory holds for each warpgroup: a second one for the next row of tiles."""
        return 1 if self.blocks is None else 2

    def operand_bytes(self, H: int, Hv: int) -> int:
        """Shared memory of Q, K and V."""
        H, Hv = _columns(H), _columns(Hv)
        return _ITEM_BYTES * (self.q_stages * self.block_q * max(H, Hv) + self.stages * self.block_k * (H + Hv))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardTiles:
    """How the backward kernel cuts its work.

    Attributes:
      block_q: queries of a step.
      block_k: keys of a block of threads. With 64 the warpgroups split the columns of dK and dV instead of the keys.
      q_stages, do_stages: tiles of Q, and of dO, that shared memory holds.
      dk_in_flight: dK of a step is awaited in the next one. With `block_k=64` dV and dQ are too: P and dS of a step
        are computed meanwhile, which takes a third tile of Q and a second one of dO.
      head_group: key/value heads whose tiles run side by side, so that long tiles come first.

    Raises:
      ArgumentError: a value that the kernel is not written for.
    """

    block_q: int
    block_k: int = 128
    q_stages: int = 2
    do_stages: int = 2
    dk_in_flight: bool = False
    head_group: int = 1

    def __post_init__(self):
        _check(
            block_q=(self.block_q, (64, 128)),
            block_k=(self.block_k, (64, 128)),
            q_stages=(self.q_stages, (1, 2, 3)),
            do_stages=(self.do_stages, (1, 2)),
            head_group=(self.head_group, HEAD_GROUPS),
        )
        if self.dk_in_flight and self.q_stages == 1:
            # The slot of a step's Q is free in the next step, which would wait for its own Q there forever.
            raise ArgumentError("tiles", found="dk_in_flight=True with q_stages=1", wanted="q_stages=2 with it")

    def operand_bytes(self, H: int, Hv: int) -> int:
        """Shared memory of K, V, Q and dO."""
        q_rows, do_rows = (stages * self.block_q for stages in (self.q_stages, self.do_stages))
        return _ITEM_BYTES * ((self.block_k + q_rows) * _columns(H) + (self.block_k + do_rows) * _columns(Hv))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DqTiles:
    """How the kernel that computes dq alone cuts its work. Each field changes the speed and never the result.

    Attributes:
      block_k: keys of a step.
      k_stages, v_stages: tiles of K, and of V, that shared memory holds.
      head_group: as in `ForwardTiles`.

    Raises:
      ArgumentError: a value that the kernel is not written for.
    """

    block_k: int
    k_stages: int = 2
    v_stages: int = 2
    head_group: int = 1

    def __post_init__(self):
        _check(
            block_k=(self.block_k, (64, 128)),
            k_stages=(self.k_stages, (1, 2, 3, 4)),
            v_stages=(self.v_stages, (1, 2, 3, 4)),
            head_group=(self.head_group, HEAD_GROUPS),
        )

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute: a third would leave 160 registers to each thread."""
        return 2

    @property
    def block_q(self) -> int:
        """Queries of a block of threads."""
        return self.warpgroups * WARPGROUP_ROWS

    def operand_bytes(self, H: int, Hv: int) -> int:
        """Shared memory of Q, dO, K and V."""
        k_rows, v_rows = (self.block_q + stages * self.block_k for stages in (self.k_stages, self.v_stages))
        return _ITEM_BYTES * (k_rows * _columns(H) + v_rows * _columns(Hv))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperTiles:
    """Tile sizes of `backend="mosaic_gpu"` on Hopper.

    Attributes:
      forward, backward: of each kernel.
      backward_dq: of the one that computes dq where gradients must be deterministic.
      inline_ptx: a named barrier and votes of a warp; off, an mbarrier and votes of a warpgroup do the same more
        slowly, and the kernels run in Pallas' interpretation of GPU kernels.
    """

    forward: ForwardTiles
    backward: BackwardTiles
    backward_dq: DqTiles
    inline_ptx: bool = True

    def __str__(self) -> str:
        forward, backward = (f"{tiles.block_q} x {tiles.block_k}" for tiles in (self.forward, self.backward))
        splits = f" in {self.forward.splits} splits of the keys" if self.forward.splits > 1 else ""
        return f"tiles of queries x keys: {forward} forward{splits}, {backward} backward"


# Remembered, since every eager call is planned anew, and what a mask without arrays covers takes work to know.
@functools.lru_cache(maxsize=1024)
def default_tiles(problem: Problem, hardware: Hardware) -> HopperTiles:
    """The tiles that did best on an H200 among those tried (docs/decisions.md)."""
    block, mask = WARPGROUP_ROWS, problem.mask.mask
    tile_map = TileMap(mask=mask, T=problem.T, S=problem.S, block_q=block, block_k=block)
    masked, has_lists = not tile_map.is_all_full, tile_map.form == "lists"
    H, Hv = _columns(problem.H), _columns(problem.Hv)
    key_values = sum("S" in value.axes for value in mask.values())
    pair_bytes = bytes_of_pairs(problem)
    plain = is_plain(problem) and not problem.has_bias_of_pairs
    head_group = _head_group(problem, H + Hv, _ROW_CACHE_BYTES, most=16 if H + Hv <= 2 * 64 else 4) if masked else 1
    traits = {"masked": masked, "plain": plain, "has_lists": has_lists, "key_values": key_values}
    forward = _forward_tiles(H, Hv, **traits, head_group=head_group)
    shared = _shared_forward_tiles(problem, forward, H, masked=masked, sm_count=hardware.sm_count)
    if shared is None:
        forward = dataclasses.replace(forward, splits=_splits(problem, forward, hardware.sm_count))
    backward = _backward_tiles(H, Hv, few_registers=has_lists or not plain)
    if masked:
        together = _power_of_two(_BACKWARD_TOKENS // _longest_row_tokens(problem, backward))
        backward = dataclasses.replace(backward, head_group=together)
    tiles = HopperTiles(
        forward=shared or forward,
        backward=backward,
        backward_dq=_dq_tiles(H, Hv, plain=plain, head_group=head_group),
    )
    return _beside_pairs(tiles, H, Hv, pair_bytes) if pair_bytes else tiles


def _head_group(problem: Problem, columns: int, cache_bytes: int, *, most: int) -> int:
    """Heads side by side where rows of tiles are of unlike length.

    With few, the last heads' longest tiles end long after all others; with many, K and V do not stay in the L2 cache.
    """
    bytes_of_head = problem.S * columns * problem.dtype.itemsize // problem.group
    return min(max(_power_of_two(cache_bytes // max(bytes_of_head, 1)), 2), most)


def _power_of_two(most: int) -> int:
    """The largest head group up to `most`."""
    return max(group for group in HEAD_GROUPS if group <= max(most, 1))


def _steps(problem: Problem, own: Any, *, transpose: bool = False) -> np.ndarray | None:
    """The tiles that each row of tiles visits, at least 1; None where arrays say that."""
    mask, sizes = problem.mask.mask, {"T": problem.T, "S": problem.S, "block_q": own.block_q, "block_k": own.block_k}
    tile_map = TileMap(mask=mask, transpose=transpose, **sizes)
    if tile_map.form == "lists" or problem.mask.arrays:
        return None
    run = tile_map.run(np.arange(tile_map.rows, dtype=np.int32))
    return np.maximum(np.broadcast_to(run.stop - run.start, (tile_map.rows,)), 1)


def _longest_row_tokens(problem: Problem, own: BackwardTiles) -> int:
    """About how many queries of a head the longest row of tiles of the backward kernel visits."""
    steps = _steps(problem, own, transpose=True)
    if steps is not None:
        return int(steps.max()) * own.block_q
    return max(problem.T if problem.mask.mask.has_spans else min(problem.T, _LISTED_TOKENS), 1)


def _shared_forward_tiles(
    problem: Problem, tiles: ForwardTiles, H: int, *, masked: bool, sm_count: int
) -> ForwardTiles | None:
    """Tiles for as many blocks as multiprocessors, where these are faster than a block for each row of tiles.

    Args:
      tiles: those with a block for each row.
    """
    # At H=256 there is no room for a second Q.
    if problem.H != problem.Hv or H > 128 or not sm_count:
        return None
    # With the keys that `_beside_pairs` leaves.
    smallest = dataclasses.replace(tiles, blocks=sm_count, block_k=64)
    if _bytes_beside_pairs(smallest, H, H, bytes_of_pairs(problem)) >= _TILE_BYTES:
        return None
    heads, is_long = problem.B * problem.N, problem.T > (1024 if masked else 512)
    if tiles.warpgroups == 3 and not is_long:
        # A row of 192 queries wastes more of a short one.
        tiles = dataclasses.replace(tiles, warpgroups=2, block_k=128, stages=2)
    tiles = dataclasses.replace(tiles, blocks=sm_count)
    rows = heads * -(-problem.T // tiles.block_q)
    steps = _steps(problem, tiles)
    if steps is not None and steps.max() * tiles.block_k <= (_SHORT_NARROW if H <= 64 else _SHORT):
        head_group = _even_head_group(steps, heads=heads, blocks=sm_count)
        return dataclasses.replace(tiles, head_group=head_group) if rows > sm_count else None
    if rows <= 2 * sm_count:
        return None  # Their keys may be split.
    head_group = 1
    if masked and (steps is not None or problem.mask.mask.has_spans):
        cache_bytes = _COUNTED_NARROW_CACHE_BYTES if H <= 64 else _COUNTED_CACHE_BYTES
        head_group = _head_group(problem, 2 * H, cache_bytes, most=16)
    elif masked:
        head_group = 16
    return dataclasses.replace(tiles, counted=True, head_group=head_group)


def _even_head_group(steps: np.ndarray, *, heads: int, blocks: int) -> int:
    """The head group with which the block that has most to do has least: blocks take every `blocks`-th row of tiles.

    Args:
      steps: of each row of tiles of a head.
    """
    rows = len(steps)

    def most_steps(group: int) -> float:
        # As `visits.head_and_row` places them; a test holds the two together.
        place = np.arange(heads * rows)
        row = rows - 1 - place // group % rows
        return np.bincount(place % blocks, weights=steps[row]).max()

    return min((group for group in HEAD_GROUPS if heads % group == 0), key=most_steps)


def _splits(problem: Problem, tiles: ForwardTiles, sm_count: int) -> int:
    """Into how many parts to split the keys of each row of tiles, where there are too few rows for all multiprocessors.

    Where arrays say which keys a row sees, as those of a cache, every key is taken to be seen.
    """
    heads = problem.B * problem.N
    rows = heads * -(-problem.T // tiles.block_q)
    if not sm_count or rows > 2 * sm_count:
        return 1
    steps = _steps(problem, tiles)
    if steps is None:
        steps = np.full(rows // heads, -(-problem.S // tiles.block_k))

    def time_in_steps(splits: int) -> float:
        """When the last block ends: each takes the longest of the rows that are left, as soon as there is room."""
        is_split = splits > 1
        # On an H200, 2026-11-30: a block takes 1.5 to 3 steps besides its own, the merge 6 and the traffic of float32.
        block = 3.0 if is_split else 1.5
        merge = 6.0 + 2.6 * splits * rows * problem.Hv / (tiles.block_k * (problem.H + problem.Hv))
        ends = [0.0] * sm_count
        for own in np.repeat(np.sort(steps)[::-1], heads * splits):
            heapq.heapreplace(ends, ends[0] + own / splits + block)
        return max(ends) + merge * is_split

    most = int(min(steps.max(), max(1, 4 * sm_count // rows)))
    return min(range(1, most + 1), key=time_in_steps)


def _forward_tiles(
    H: int, Hv: int, *, masked: bool, plain: bool, has_lists: bool, key_values: int, head_group: int
) -> ForwardTiles:
    if max(H, Hv) <= 64 and plain:
        # With a list of tiles, 128 keys leave a thread no register of its 160: 12 bytes of spills with JAX 0.12.0.1.
        block_k, stages = (64, 3) if has_lists else (128, 2)
        return ForwardTiles(warpgroups=3, block_k=block_k, stages=stages, pin_wait=masked, head_group=head_group)
    # With 192 columns of V, accumulators for a tile of 128 keys would take 208 of the 240 registers. With 192 of Q and
    # two values for each key, as of `Tree`, or other logits than q · k, 8 to 12 bytes are spilled.
    widest_qk = 192 if key_values < 2 and plain else 128
    block_k = 128 if Hv <= 128 and H <= widest_qk else 64
    return ForwardTiles(warpgroups=2, block_k=block_k, head_group=head_group)


def _backward_tiles(H: int, Hv: int, *, few_registers: bool) -> BackwardTiles:
    # With a list of tiles, 128 queries would need 240 registers and up to 20 bytes of spills (ptxas 13.0), with other
    # logits than q · k up to 700.
    if max(H, Hv) <= 64 and not few_registers:
        return BackwardTiles(block_q=128, dk_in_flight=True)
    if max(H, Hv) <= 128:
        return BackwardTiles(block_q=64)
    # Where shared memory has no room for both, as at 256, a second Q serves better than a second dO, whose slot is free
    # after the first of the three matmuls that follow the softmax, that of Q after the last.
    tiles = BackwardTiles(block_q=64, block_k=64)
    fits = tiles.operand_bytes(H, Hv) + _exchanged_bytes(tiles, H) <= _TILE_BYTES
    return tiles if fits else dataclasses.replace(tiles, do_stages=1)


def dq_chunks(H: int) -> int:
    """Chunks of dQ in float32 that a fused backward kernel holds in shared memory, until they are added.

    One for each warpgroup, but of three all, so that the warpgroup that computes two stores them one after the other.
    Of four, at Hv=256, there would be no room for that.
    """
    return 3 if chunks(H) == 3 else 2


def _exchanged_bytes(tiles: BackwardTiles, H: int) -> int:
    """Shared memory of P and dS, or the two slots of dS, in 16 bits, and of dQ in 32."""
    return 2 * _ITEM_BYTES * tiles.block_q * tiles.block_k + dq_chunks(H) * 4 * WARPGROUP_ROWS * CHUNK


def _dq_tiles(H: int, Hv: int, *, plain: bool, head_group: int) -> DqTiles:
    """The largest that fit; ptxas 13.0 compiles them without spills for every mask, with at most 219 registers."""
    # Accumulators of dq, S and dP for 128 keys and more than 128 columns of dq would not fit the registers, nor at 128
    # would what makes other logits than q · k (480 bytes of spills). With more than 448 columns, Q, dO and two stages
    # of K and of V would not fit the 227 KiB of shared memory. V gives way: its slot is free as soon as dP is there,
    # that of K only after dQ.
    return DqTiles(
        block_k=128 if max(H, Hv) <= (128 if plain else 64) else 64,
        v_stages=2 if H + Hv <= 448 else 1,
        head_group=head_group,
    )


# What each pair of query and key has in shared memory -----------------------------------------------------------------


def bytes_of_pairs(problem: Problem) -> int:
    """What a pair takes of a tile in shared memory: that of a bias, two bytes of a mask with booleans for each, and
    four of each array that functions have for diagonals or pairs.
    """
    of_bias = problem.bias[1].itemsize if problem.has_bias_of_pairs else 0
    return of_bias + 2 * has_booleans_of_pairs(problem) + 4 * len(axes_of_arguments(problem))


def has_booleans_of_pairs(problem: Problem) -> bool:
    """Whether the mask holds a boolean for each pair of query and key, not just for each of the one or the other."""
    return any(squeezed(value).axes == "BNTS" for value in problem.mask.mask.values())


def _beside_pairs(tiles: HopperTiles, H: int, Hv: int, pair_bytes: int) -> HopperTiles:
    """The tiles, smaller or with fewer stages where shared memory must hold those of pairs besides."""

    def fitting(own: Any, *changes: dict[str, int]) -> Any:
        candidates = [own, *(dataclasses.replace(own, **change) for change in changes)]
        fits = (tiles for tiles in candidates if _bytes_beside_pairs(tiles, H, Hv, pair_bytes) < _TILE_BYTES)
        return next(fits, candidates[-1])

    return dataclasses.replace(
        tiles,
        forward=fitting(tiles.forward, {"block_k": 64}, {"block_k": 64, "stages": 1}),
        backward=fitting(tiles.backward, {"do_stages": 1}, {"q_stages": 1, "do_stages": 1}),
        backward_dq=fitting(tiles.backward_dq, {"v_stages": 1}, {"k_stages": 1, "v_stages": 1}),
    )


def _bytes_beside_pairs(tiles: Any, H: int, Hv: int, pair_bytes: int) -> int:
    """Shared memory of the tiles of a kernel, and of those of pairs."""
    rest = _exchanged_bytes(tiles, H) if isinstance(tiles, BackwardTiles) else 0
    return tiles.operand_bytes(H, Hv) + tiles.block_q * tiles.block_k * pair_bytes + rest


def fits_pairs(problem: Problem) -> bool:
    """Whether the kernels have room for what the problem has for each pair.

    Least room have that for the cotangents of what is there for each, and with many bytes for each the fused backward
    kernel where a block of threads has 128 keys.
    """
    H, Hv, pair_bytes = _columns(problem.H), _columns(problem.Hv), bytes_of_pairs(problem)
    rows = 2 * WARPGROUP_ROWS
    fused = _backward_tiles(H, Hv, few_registers=True)
    fused = dataclasses.replace(fused, q_stages=1, do_stages=1)
    sums = _ITEM_BYTES * (rows + 64) * (H + Hv) + rows * 64 * pair_bytes
    return sums <= _TILE_BYTES and _bytes_beside_pairs(fused, H, Hv, pair_bytes) <= _TILE_BYTES
