"""A number for each pair of query and key, as of a bias: from global memory to the tiles of the kernels by TMA."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jflash.backends.mosaic_gpu.primitives import PART_COLUMNS, TILE_ROWS, WGMMA, i32, see_releases
from jflash.masks.tile_map import TileMap


class PairTiles:
    """An array (B or 1, N or 1, T, S) on tiles, each warpgroup with its own part of them in shared memory.

    The warpgroup that loads brings the part of the next step as soon as that of the present one has been read. Without
    an array nothing is done.

    Args:
      name: of the scratch memory.
      array: of floating numbers of 16 or 32 bits, or whole ones of 32; or None.
      tile_map: of the kernel.
      warpgroups: those that compute, which split the rows of a tile, or its columns.
      split: "T" where these split the queries of a tile, "S" for its keys.
    """

    def __init__(self, name: str, array: jax.Array | None, tile_map: TileMap, *, warpgroups: int, split: str):
        self._array, self._is_transposed, self._warpgroups = array, tile_map.transpose, warpgroups
        self._name, self._full, self._free = name, f"{name}_full", f"{name}_free"
        part = {"T": tile_map.block_q, "S": tile_map.block_k}
        part[split] //= warpgroups
        self._part = part["T"], part["S"]
        # From the part of one warpgroup to that of the next.
        self._offset = tuple(size if axis == split else 0 for axis, size in part.items())

    def __bool__(self) -> bool:
        return self._array is not None

    @property
    def count(self) -> int:
        """How many operands there are."""
        return int(bool(self))

    def operands(self) -> tuple[jax.Array, ...]:
        """The array, filled up where Mosaic cannot cut its lengths into tiles; what is past them is masked."""
        if not self:
            return ()
        padding = [(0, -size % multiple) for size, multiple in zip(self._array.shape[2:], (TILE_ROWS, PART_COLUMNS))]
        return (jnp.pad(self._array, [(0, 0), (0, 0), *padding]) if any(map(any, padding)) else self._array,)

    def scratch(self) -> dict[str, Any]:
        """Scratch types, by name."""
        if not self:
            return {}
        dtype, barrier = np.dtype(self._array.dtype), plgpu.Barrier(num_barriers=self._warpgroups)
        # A tile has the columns that the forward kernel reads at a time, and a swizzle as wide.
        tiling = plgpu.TilingTransform((TILE_ROWS, PART_COLUMNS))
        tiles = tiling, plgpu.SwizzleTransform(PART_COLUMNS * dtype.itemsize)
        memory = plgpu.SMEM((self._warpgroups, *self._part), dtype, transforms=tiles)
        return {self._name: memory, self._full: barrier, self._free: barrier}

    # The warpgroup that loads -----------------------------------------------------------------------------------------

    def load(self, refs: Sequence[Any], s: Any, step: Any, *, b: Any, n: Any, q_at: Any, k_at: Any) -> None:
        """Every warpgroup's part for a step, by its number, once that of the step before has been read.

        Args:
          refs: the last of them are the operands, in global memory; `s` holds the scratch memory by its names.
          b, n, q_at, k_at: batch row, query head, first query and first key of the tile.
        """
        if not self:
            return
        memory, full, free = (getattr(s, name) for name in (self._name, self._full, self._free))
        index = tuple(at if size > 1 else i32(0) for at, size in zip((b, n), refs[-1].shape))

        # Not unrolled: this warpgroup has few registers.
        @pl.loop(0, self._warpgroups)
        def _(warpgroup):
            starts = (at + warpgroup * offset for at, offset in zip((q_at, k_at), self._offset))
            part = refs[-1].at[(*index, *self._place(*starts))]
            pl.when(step > 0)(lambda: plgpu.barrier_wait(free.at[warpgroup]))
            plgpu.copy_gmem_to_smem(part, memory.at[warpgroup], full.at[warpgroup])

    def _place(self, q_at: Any, k_at: Any) -> tuple[Any, Any]:
        """Where in an operand the part from this query and this key on stands."""
        return pl.ds(q_at, self._part[0]), pl.ds(k_at, self._part[1])

    def see_releases(self, s: Any, steps: Any) -> None:
        """After so many steps: waits until the last part has been read, so that no barrier is left in mid-phase."""
        for warpgroup in range(self._warpgroups if self else 0):
            see_releases(getattr(s, self._free), stages=1, count=steps, first=warpgroup)

    # The warpgroups that compute --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self, s: Any, warpgroup: Any) -> Iterator[None]:
        """Around all reads of a step: the own part is there, and afterwards its place is free for the next step's."""
        if not self:
            yield
            return
        plgpu.barrier_wait(getattr(s, self._full).at[warpgroup])
        yield
        plgpu.commit_smem()  # TMA will write there.
        plgpu.barrier_arrive(getattr(s, self._free).at[warpgroup])

    def part(self, s: Any, warpgroup: Any, columns: slice | None = None) -> jax.Array | None:
        """The own part, floating numbers in float32, transposed where tiles of the kernel are; some columns, or all."""
        if not self:
            return None
        ref = getattr(s, self._name).at[warpgroup]
        if columns is not None:
            ref = ref.at[:, pl.ds(columns.start, columns.stop - columns.start)]
        part = plgpu.load(ref.T if self._is_transposed else ref, layout=WGMMA)
        return part.astype(jnp.float32) if jnp.issubdtype(part.dtype, jnp.floating) else part
