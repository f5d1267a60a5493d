"""What Pallas Mosaic GPU lacks, or says at greater length: shared memory that TMA and WGMMA both read, a vote."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from jflash.errors import ArgumentError
from jflash.hardware import named

WGMMA = plgpu.Layout.WGMMA
BY_ROW = WGMMA.reduce(1)
"""The layout of one value for each row of a WGMMA accumulator."""
BY_COLUMN = WGMMA.reduce(0)
"""The layout of one value for each column of a WGMMA accumulator."""
_SPLAT = plgpu.Layout.WG_SPLAT

LOG2_E = math.log2(math.e)
WARPGROUP_ROWS = 64
"""Rows of the one shape of WGMMA, and so of a warpgroup's part of a tile."""
CHUNK = 64
"""Columns of a chunk: 128 bytes of 16 bits, the widest swizzle."""
PART_COLUMNS = 32
"""Columns of a tile whose logits the forward kernel makes of products at a time."""
_SWIZZLE_BYTES = 128
TILE_ROWS = 8
"""Rows of a tile of shared memory."""

# Registers of a thread, by warpgroups that compute: 64 Ki of them over all threads of a block.
COMPUTE_REGISTERS = {1: 240, 2: 240, 3: 160}
LOAD_REGISTERS = {1: 24, 2: 24, 3: 32}

# A named barrier: Mosaic uses the first ones, bar.sync 0 to 4 (jax 0.11.2).
_SYNC_BARRIER = 5


# As Mosaic counts shared memory (JAX 0.11.2): each array starts at a multiple of this, barriers follow at the end.
_SMEM_ALIGNMENT = 1024
_BARRIER_BYTES = 8
_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


def chunks(columns: int) -> int:
    """Chunks that hold so many columns, the last one filled up with zeros."""
    return -(-columns // CHUNK)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How shared memory holds the columns of a tile: `count` pieces of `width` columns, one after the other.

    One piece where the sizes allow it. Otherwise chunks, each a matmul of its own: slower where the head is wide
    (docs/decisions.md, 2026-11-30).
    """

    count: int
    width: int
    is_tiled: bool

    @classmethod
    def of(cls, columns: int, *lengths: int) -> "Pieces":
        """Of so many columns of arrays of these lengths."""
        if columns % CHUNK == 0 and all(length % TILE_ROWS == 0 for length in lengths):
            return cls(1, columns, True)
        return cls(chunks(columns), CHUNK, False)

    @property
    def chunks(self) -> int:
        return self.count * self.width // CHUNK

    def refs(self, ref: Any, *index: Any, zero: Any = 0) -> list[Any]:
        """Each piece of a reference (pieces, rows, width), with the same index into its rows; `zero` as of `opaque`."""
        return [ref.at[(zero + piece, *index)] for piece in range(self.count)]

    def part(self, ref: Any, first: Any, count: int, *, zero: Any = 0) -> list[Any]:
        """So many chunks of a reference (pieces, rows, width), from `first` on: a part of its one piece, or pieces."""
        if self.is_tiled and count > 0:
            return [ref.at[zero, :, pl.ds(first * CHUNK, count * CHUNK)]]
        return [ref.at[first + piece + zero] for piece in range(count)]


def i32(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def slot_of(i: Any, stages: int) -> jax.Array:
    """Where the i-th tile lies among so many stages."""
    return lax.rem(i32(i), i32(stages))


def see_releases(free: Any, *, stages: int, count: Any, first: Any = 0) -> None:
    """Waits for the last release of each slot of a ring after `count` uses, so that no barrier is left in mid-phase.

    `first` is the number of the first of its barriers.
    """

    @pl.loop(count - lax.min(i32(stages), count), count)
    def _(i):
        plgpu.barrier_wait(free.at[first + slot_of(i, stages)])


def opaque(*indices: Any) -> tuple[jax.Array, ...]:
    """The indices, unknown to the compiler from here on.

    Inside a loop it keeps LLVM from computing the addresses of all matmuls before the loop, 64 bits each, which do not
    fit the registers: a kernel that uses every one of them spills tens to hundreds of bytes without it.
    """
    return lax.optimization_barrier(tuple(i32(index) for index in indices))


def smem_pieces(leading: tuple[int, ...], rows: int, pieces: Pieces, dtype: np.dtype) -> tuple[Any, Any]:
    """Shared memory (*leading, pieces, rows, width), as references for TMA and for WGMMA to put into one `RefUnion`.

    WGMMA wants tiles of 8 rows by 128 bytes. TMA can write them, but not of an array whose length is no multiple of 8,
    or whose columns are more than a tile and no multiple of it: Mosaic would tile the array too. In a single chunk the
    tiles are its rows as they follow each other, so there TMA takes the untiled shape, and it fills what is past the
    end of an axis with zeros, and clips stores there. Neither a ragged length nor an odd head dim needs a padded copy.
    """
    shape = (*leading, pieces.count, rows, pieces.width)
    for_wgmma = smem_tiles(shape, dtype)
    untiled = plgpu.SMEM(shape, dtype, transforms=for_wgmma.transforms[1:])
    return for_wgmma if pieces.is_tiled else untiled, for_wgmma


def smem_tiles(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Shared memory of shape (..., rows, columns) for WGMMA, and for TMA of arrays whose sizes fit the tiles."""
    swizzle_bytes = min(_SWIZZLE_BYTES, shape[-1] * dtype.itemsize)
    tiling = plgpu.TilingTransform((TILE_ROWS, swizzle_bytes // dtype.itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle_bytes)))


def smem_bytes(scratch_types: Any, *, reduces: bool) -> int:
    """Shared memory of a block of threads; reductions within a warpgroup take some too."""
    total = _COMPILER_PARAMS.reduction_scratch_bytes if reduces else 0
    for scratch in jax.tree.leaves(scratch_types):
        if isinstance(scratch, plgpu.Barrier):
            total += int(np.prod(scratch.num_barriers)) * _BARRIER_BYTES
        else:
            size = math.prod(scratch.shape) * np.dtype(scratch.dtype).itemsize
            total += -(-size // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT
    return total


def hopper_kernel(
    body: Callable[..., None],
    *,
    tiles: Any,
    scratch_types: Any,
    warpgroups: int,
    blocks: int,
    reduces: bool,
    **options: Any,
) -> Callable[..., Any]:
    """`plgpu.kernel` with so many blocks of threads, of so many warpgroups that compute and one that loads.

    Where `warpgroups` is 0, that one computes too.

    Raises:
      ArgumentError: the scratch memory that these tiles need is more than a block can have.
    """
    needed, most = smem_bytes(scratch_types, reduces=reduces), named("h200").smem_bytes_per_block
    if needed > most:
        raise ArgumentError("tiles", found=f"{tiles}, {needed} bytes of shared memory", wanted=f"at most {most} bytes")
    return plgpu.kernel(
        body,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        compiler_params=_COMPILER_PARAMS,
        **options,
    )


def from_zeros(kernel: Callable[[Any], Sequence[jax.Array]], zeros: jax.Array, out_types: Sequence[Any]) -> Any:
    """What a kernel makes of a reference that begins with these zeros, and then its results.

    A state inside of this function, and not `jax.new_ref`: custom_partitioning refuses that (JAX 0.11.2).
    """

    def run(refs):
        for ref, result in zip(refs[1:], kernel(refs[0])):
            ref[...] = result

    return pl.run_state(run)((zeros, *(jnp.zeros(x.shape, x.dtype) for x in out_types)))


def load_pieces(source: Any, pieces: Sequence[Any], barrier: Any, *, b: Any, row: Any, rows: int, head: Any) -> None:
    """TMA of rows of one head of a (B, length, heads, columns) array; each piece arrives at `barrier` once."""
    for index, piece in enumerate(pieces):
        columns = _columns(index, piece.shape[-1], source.shape[-1], row)
        plgpu.copy_gmem_to_smem(source.at[b, pl.ds(row, rows), head, columns], piece, barrier)


def store_pieces(pieces: Sequence[Any], destination: Any, *, b: Any, row: Any, rows: int, head: Any) -> None:
    """The opposite of `load_pieces`; `commit_smem` comes before it."""
    for index, piece in enumerate(pieces):
        columns = _columns(index, piece.shape[-1], destination.shape[-1], row)
        plgpu.copy_smem_to_gmem(piece, destination.at[b, pl.ds(row, rows), head, columns])


def end_stores() -> None:
    """At the end of a block of threads: TMA has read what it stores, and writes it before the kernel ends."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _columns(index: int, width: int, size: int, dynamic: Any) -> Any:
    """The columns of a piece. Past the end their start is made dynamic: Pallas refuses a static slice there."""
    start = index * width
    return pl.ds(start if start + width <= size else dynamic * 0 + start, width)


def load_global(ref: Any, start: Any, size: int, *, layout: Any) -> jax.Array:
    """A part of a vector in global memory, straight into registers; not clipped at the end of the array."""
    return plgpu.load(ref.at[pl.ds(start, size)], layout=layout, optimized=False)


def along_rows(x: Any, shape: tuple[int, int]) -> jax.Array:
    """A value for each row, over all columns of a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: Any, shape: tuple[int, int]) -> jax.Array:
    """A value for each column, over all rows of a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def row_ids(shape: tuple[int, int]) -> jax.Array:
    """The row of each element of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)


@plgpu.inline_mgpu()
def _wait_reads_and_fence(_):
    nvvm.cp_async_bulk_wait_group(0, read=True)
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


@plgpu.inline_mgpu()
def _sync_two_warpgroups(_):
    mgpu_utils.inline_ptx(f"bar.sync {_SYNC_BARRIER}, 256;", has_side_effects=True)


def exchange(barrier: Any, *, inline_ptx: bool) -> None:
    """Two warpgroups see each other's stores to shared memory, by WGMMA too; the reads of their TMA stores are over.

    `barrier` is an mbarrier with two arrivals, for where `inline_ptx` is off: the named barrier took 3 % off the
    backward pass at H=128 (H200, 2026-11-29, study).
    """
    if inline_ptx:
        _wait_reads_and_fence()
        _sync_two_warpgroups()
    else:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT))
def _count_up(_, counter, slot, first):
    mgpu_utils.inline_ptx(
        "{ .reg .pred p; .reg .u32 thread, count; mov.u32 thread, %tid.x; and.b32 thread, thread, 127;"
        " setp.eq.u32 p, thread, 0; @p atom.global.add.u32 count, [$0], 1; @p add.u32 count, count, $2;"
        " @p st.shared.u32 [$1], count; }",
        mgpu_utils.memref_ptr(counter),
        mgpu_utils.memref_ptr(slot),
        first.registers.item(),
        has_side_effects=True,
    )


def count_up(counter: Any, slot: Any, *, first: int) -> None:
    """Takes the next number of a counter in global memory, from `first` on, to shared memory, by one thread."""
    _count_up(counter, slot, i32(first))


@plgpu.inline_mgpu(arg_types=(BY_ROW,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, _SPLAT))
def _any_positive_in_warp(_, x):
    first, *rest = x.registers.flat
    for register in rest:
        first = arith.maximumf(first, register)
    if isinstance(first.type, ir.VectorType):
        first = vector.extract(first, dynamic_position=[], static_position=[0])
    vote = mgpu_utils.inline_ptx(
        "{ .reg .pred p; setp.gt.f32 p, $1, 0f00000000; vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }",
        first,
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
        convergent=True,
    )
    return mgpu.FragmentedArray.splat(vote, (), is_signed=True)


def any_row(holds: Any, *, inline_ptx: bool) -> jax.Array:
    """Whether some row of this warp holds, or of this warpgroup where `inline_ptx` is off; one boolean.

    Pallas takes it to be the same in the whole warpgroup, and it is not: a branch on it must hold no barrier and no
    WGMMA.
    """
    marks = jnp.where(holds, jnp.float32(1), jnp.float32(0))
    return _any_positive_in_warp(marks) != 0 if inline_ptx else marks.max() > 0
