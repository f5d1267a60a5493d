"""What `jflash tune` tries: the tiles next to others that a kernel is written for and that fit a multiprocessor."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jflash.backends.mosaic_gpu.primitives import CHUNK, COMPUTE_REGISTERS, WARPGROUP_ROWS, chunks
from jflash.backends.mosaic_gpu.sm90.backward import NARROW, backward
from jflash.backends.mosaic_gpu.sm90.forward import forward
from jflash.backends.mosaic_gpu.tiles import HEAD_GROUPS, BackwardTiles, DqTiles, ForwardTiles, HopperTiles
from jflash.backends.protocol import Operands
from jflash.errors import ArgumentError
from jflash.hardware import Hardware
from jflash.numerics.online_softmax import Attended
from jflash.problem import Problem

# What of the registers of a thread accumulators may take: the default tiles of all kernels come to it at some head dim,
# 192 of 240 or 128 of 160, and just do not spill (ptxas 13.0).
_ACCUMULATORS = 0.8
# Without those that cannot be fast: a single warpgroup reads K and V for 64 queries, a single stage waits for them.
_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "forward": {
        "warpgroups": (2, 3), "block_k": (64, 128, 192, 256), "stages": (2, 3, 4), "pin_wait": (False, True),
        "counted": (False, True),
    },
    "backward": {
        "block_q": (64, 128), "block_k": (64, 128), "q_stages": (1, 2, 3), "do_stages": (1, 2),
        "dk_in_flight": (False, True),
    },
    "backward_dq": {"block_k": (64, 128), "k_stages": (1, 2, 3, 4), "v_stages": (1, 2, 3, 4)},
}  # fmt: skip
# Fields that share what a block of threads has of memory and registers, so that where one grows another may have to
# shrink; and those of which one is nothing without the other.
_PAIRS = {
    "forward": (("warpgroups", "block_k"), ("block_k", "stages"), ("warpgroups", "stages"), ("blocks", "counted")),
    "backward": (
        ("block_q", "q_stages"), ("block_q", "dk_in_flight"), ("block_k", "q_stages"), ("block_k", "block_q"),
        ("q_stages", "dk_in_flight"), ("q_stages", "do_stages"),
    ),
    "backward_dq": (("block_k", "k_stages"), ("k_stages", "v_stages")),
}  # fmt: skip


def tuned_kernels(problem: Problem) -> tuple[str, ...]:
    """The fields of `HopperTiles` that matter to a problem, but for the tiles of dk and dv without dq."""
    return ("forward", "backward_dq") if problem.deterministic else ("forward", "backward")


def candidate_tiles(problem: Problem, hardware: Hardware, tiles: HopperTiles, kernel: str) -> tuple[HopperTiles, ...]:
    """The tiles that differ from these in one field of a kernel, or in two that share memory, and fit."""
    own, found = getattr(tiles, kernel), {}
    for changes in _changes(own, kernel, hardware):
        try:
            changed = dataclasses.replace(own, **changes)
        except ArgumentError:
            continue  # The record says which values do not go together.
        candidate = dataclasses.replace(tiles, **{kernel: changed})
        if changed != own and candidate not in found and fits(problem, candidate, kernel):
            found[candidate] = None
    return tuple(found)


def fits(problem: Problem, tiles: HopperTiles, kernel: str) -> bool:
    """Whether a kernel takes these tiles: its accumulators fit the registers, and all that it has, shared memory.

    It is traced to know that: what a kernel needs is written there, and nowhere a second time.
    """
    if _accumulators(problem, getattr(tiles, kernel)) > _ACCUMULATORS * _registers(getattr(tiles, kernel)):
        return False
    try:
        trace(problem, tiles, kernel)
    except ArgumentError as error:
        if error.argument != "tiles":
            raise
        return False
    return True


def trace(problem: Problem, tiles: HopperTiles, kernel: str) -> None:
    """Traces the pass that a kernel belongs to.

    Raises:
      ArgumentError: of the tiles, where the kernel does not take them.
    """
    p = problem
    sizes = (p.B, p.T, p.N, p.H), (p.B, p.S, p.K, p.H), (p.B, p.S, p.K, p.Hv), (p.B, p.T, p.N, p.Hv)
    q, k, v, out = (jax.ShapeDtypeStruct(size, p.dtype) for size in sizes)
    attended = Attended(out, jax.ShapeDtypeStruct((p.B, p.N, p.T), np.float32))
    operands = Operands(q, k, v, None, p.mask.mask)
    if kernel == "forward":
        jax.eval_shape(functools.partial(forward, p, tiles), operands)
    else:
        jax.eval_shape(functools.partial(backward, p, tiles), operands, attended, Attended(out, None))


def _changes(own: Any, kernel: str, hardware: Hardware) -> Iterator[dict[str, Any]]:
    values = _VALUES[kernel] | {"head_group": _next_head_groups(own.head_group)}
    if kernel == "forward":
        values["blocks"] = (None, hardware.sm_count) if hardware.sm_count else (None,)
        values["splits"] = tuple(sorted({max(1, own.splits - 1), own.splits + 1, 2 * own.splits}))
    for name, found in values.items():
        yield from ({name: value} for value in found)
    for names in _PAIRS[kernel]:
        yield from (dict(zip(names, pair)) for pair in itertools.product(*(values[name] for name in names)))


def _next_head_groups(group: int) -> tuple[int, ...]:
    at = HEAD_GROUPS.index(group)
    return HEAD_GROUPS[max(at - 2, 0) : at + 3]


def _registers(own: Any) -> int:
    """Those of a thread that computes."""
    return COMPUTE_REGISTERS[getattr(own, "warpgroups", 2)]


def _accumulators(problem: Problem, own: Any) -> float:
    """Registers of a thread for the tiles that it computes; each of its warpgroup's has 64 rows on 128 threads."""
    H, Hv = (CHUNK * chunks(size) for size in (problem.H, problem.Hv))
    match own:
        case ForwardTiles():
            # O, S, and P in 16 bits.
            return Hv / 2 + own.block_k / 2 + own.block_k / 4
        case DqTiles():
            # dQ, S and dP.
            return H / 2 + own.block_k
        case BackwardTiles() if max(H, Hv) > NARROW or own.block_k == CHUNK:
            # Half of the columns of dK and of dV, and of the queries of S and dP; beside these, of the columns of dQ.
            return H / 4 + Hv / 4 + own.block_q / 2 + own.dk_in_flight * H / 4 * own.block_q / WARPGROUP_ROWS
        case BackwardTiles():
            # dK, dV, S and dP, transposed.
            return H / 2 + Hv / 2 + own.block_q
