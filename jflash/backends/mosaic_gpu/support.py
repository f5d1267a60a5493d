"""What the Hopper kernels take, and for everything else the reason why not."""

import numpy as np

from jflash.backends.mosaic_gpu import terms
from jflash.backends.mosaic_gpu.primitives import CHUNK, PART_COLUMNS, TILE_ROWS, chunks
from jflash.backends.mosaic_gpu.terms import axes_of_arguments
from jflash.backends.mosaic_gpu.tile_values import AXES, DTYPES, squeezed
from jflash.backends.mosaic_gpu.tiles import bytes_of_pairs, fits_pairs, has_booleans_of_pairs
from jflash.backends.mosaic_gpu.visits import function_of
from jflash.hardware import Hardware
from jflash.masks.live import every_key_is_seen, every_query_sees_a_key
from jflash.problem import Problem

_WIDEST_HEAD = 256


def supports(problem: Problem, hardware: Hardware) -> str | None:
    """None, or why the kernels do not take this problem on this hardware."""
    if hardware.compute_capability is None:
        return f"its kernels are for CUDA devices of compute capability 9.0, not for {hardware}"
    if hardware.compute_capability != (9, 0):
        major, minor = hardware.compute_capability
        return f"its kernels are for compute capability 9.0 (H100, H200); {hardware.name} has {major}.{minor}"
    if problem.dtype.itemsize != 2:
        return f"it computes in 16 bits and never narrows; q, k and v are {problem.dtype}"
    for letter, size in (("H", problem.H), ("Hv", problem.Hv)):
        if size % 8:
            return f"TMA copies rows of a multiple of 16 bytes: {letter}={size} is no multiple of 8"
        if size > _WIDEST_HEAD:
            return f"accumulators of {letter}={size} columns do not fit the registers; at most {_WIDEST_HEAD}"
    if problem.scale <= 0:
        return (
            f"its online softmax takes the maximum of q·k itself, which needs a positive scale, not {problem.scale:g}"
        )
    return terms.refusal(problem) or _refused_values(problem)


def notes(problem: Problem) -> tuple[str, ...]:
    """Where the kernels compute more than the problem has, or copy what it has."""
    found = []
    mask, lengths = problem.mask.mask, {"T": problem.T, "S": problem.S}
    if not (every_key_is_seen(mask, **lengths) and every_query_sees_a_key(mask, **lengths)):
        found.append(
            f"{mask} may hide a key or a query from all others: each call looks for them and copies v, and for the "
            "backward pass q, k, v and d_out, with zeros there (jflash/masks/README.md, What is known of the diagonal)"
        )
    for letter, size in (("H", problem.H), ("Hv", problem.Hv)):
        if size % CHUNK:
            columns = CHUNK * chunks(size)
            found.append(f"{letter}={size} takes the time of {columns} columns: zeros in shared memory fill them up")
    if has_booleans_of_pairs(problem):
        found.append("the mask's booleans for each pair are copied into 16 bits")
    arguments = axes_of_arguments(problem)
    if "BND" in arguments:
        found.append("what score functions have for each diagonal is copied into bands of 64 rows by T + S")
    has_pairs = problem.has_bias_of_pairs or has_booleans_of_pairs(problem) or "BNTS" in arguments
    if has_pairs and (problem.T % TILE_ROWS or problem.S % PART_COLUMNS):
        found.append(
            f"what is there for each pair is copied, up to multiples of {TILE_ROWS} queries and {PART_COLUMNS}"
            f" keys from T={problem.T}, S={problem.S}"
        )
    return tuple(found)


def _refused_values(problem: Problem) -> str | None:
    mask = problem.mask.mask
    values = [squeezed(value) for value in mask.values()]
    for value in values:
        if value.axes not in AXES | {"BNTS"}:
            return f"its kernels take mask values per batch row, head, query, key or pair, not along {value.axes}"
        if value.axes == "BNTS" and value.array.dtype != np.bool_:
            return f"its kernels take booleans of a mask for each pair, not {value.array.dtype}"
        if np.dtype(value.array.dtype) not in DTYPES:
            return f"its kernels take mask values that are float32, int32 or booleans, not {value.array.dtype}"
    if sum(value.axes == "BNTS" for value in values) > 1:
        return f"its kernels take one array with a boolean for each pair, and {mask} has several: combine them"
    if not fits_pairs(problem):
        found = f"{bytes_of_pairs(problem)} bytes for each pair of query and key"
        beside = f"H={problem.H}, Hv={problem.Hv}"
        return f"shared memory has no room for {found}, of bias, mask and score functions, beside {beside}"
    reason = function_of(mask).refusal if mask.has_function else None
    return reason and f"{reason}, of {mask}"
