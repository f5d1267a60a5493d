"""Which rows of tiles a block of threads works on: one, every so many-th, or the next that a counter says."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jflash.backends.mosaic_gpu.primitives import count_up, i32, see_releases, slot_of

# Numbers that shared memory holds: that of the present row, and the next one, which is read while the present one runs.
_SLOTS = 2


class Places:
    """The places of the rows of one kernel, 0 to `count`, and the blocks of threads that take them.

    With a counter the warpgroup that loads takes the next place as soon as it begins with a row, and hands it to the
    others through shared memory; so a block that has had long rows takes fewer of them.

    Args:
      count: rows of all heads.
      blocks: blocks of threads, or None for one for each row.
      counted: whether blocks count; otherwise each takes every `blocks`-th row.
      warpgroups: those that compute.
      inline_ptx: off, blocks that count take every `blocks`-th row too, and all but the counter is as it is with it.

    Attributes:
      blocks: blocks of threads, of which none is without a row.
    """

    def __init__(self, count: int, *, blocks: int | None, counted: bool, warpgroups: int, inline_ptx: bool):
        self._count, self._is_one_each, self._counted = count, blocks is None, counted
        self.blocks = count if blocks is None else min(blocks, count)
        self._warpgroups, self._inline_ptx = warpgroups, inline_ptx

    def scratch(self) -> dict[str, Any]:
        """Scratch types, by name."""
        if not self._counted:
            return {}
        return {
            "places": plgpu.SMEM((_SLOTS,), jnp.int32),
            "place_full": plgpu.Barrier(num_barriers=_SLOTS),
            "place_free": plgpu.Barrier(num_arrivals=self._warpgroups + 1, num_barriers=_SLOTS),
        }

    def each(
        self, body: Callable[[Any, Any, Any], Any], s: Any, *, counter: Any = None, loads: bool = False
    ) -> tuple[Any, Any]:
        """Runs `body` for each row of this block, one after the other.

        Its arguments are the place of the row, how many rows this block had before, and how many steps these took; it
        returns how many it took itself. The result is how many rows and steps there were in all.

        Args:
          s: holds the scratch memory by its names.
          counter: (1,) int32 in global memory, from 0 on; None without.
          loads: whether this is the warpgroup that loads.
        """
        block = lax.axis_index("block")
        if self._is_one_each:
            return i32(1), body(block, i32(0), i32(0))
        if not self._counted:

            def row(i, steps):
                return steps + body(block + i * self.blocks, i, steps)

            rows = lax.div(self._count - 1 - block, i32(self.blocks)) + 1
            return rows, lax.fori_loop(0, rows, row, i32(0))

        def next_row(state):
            place, number, steps = state
            if loads:
                self._find(place, number, s, counter)
            steps += body(place, number, steps)
            slot = slot_of(number, _SLOTS)
            plgpu.barrier_wait(s.place_full.at[slot])
            place = s.places[slot]
            plgpu.barrier_arrive(s.place_free.at[slot])
            return place, number + 1, steps

        first = block, i32(0), i32(0)
        _, rows, steps = lax.while_loop(lambda state: state[0] < self._count, next_row, first)
        if loads:
            see_releases(s.place_free, stages=_SLOTS, count=rows)
        return rows, steps

    def _find(self, place: Any, number: Any, s: Any, counter: Any) -> None:
        """Puts the place after that of the row of this number into shared memory."""
        slot = slot_of(number, _SLOTS)
        pl.when(number >= _SLOTS)(lambda: plgpu.barrier_wait(s.place_free.at[slot]))
        if self._inline_ptx:
            count_up(counter.at[0], s.places.at[slot], first=self.blocks)
        else:
            s.places[slot] = place + self.blocks
        plgpu.barrier_arrive(s.place_full.at[slot])
