"""ptxas makes of the kernels what their tiles count on: no spills, no serialised wgmma, registers within setmaxnreg.

Of full and causal attention also the order of instructions in which matmuls and softmax overlap.

`python -m tools.sass show tests/backends/test_sass.py` prints the numbers, with `--order` the schedules.
"""

import dataclasses
import functools
import re

import numpy as np
import pytest

from jflash import hardware
from jflash.backends import mosaic_gpu
from jflash.backends.mosaic_gpu.primitives import chunks
from jflash.backends.mosaic_gpu.sm90.backward import NARROW
from jflash.backends.mosaic_gpu.tiles import HopperTiles
from jflash.masks import (
    Causal,
    Chunked,
    Dense,
    Dilated,
    Full,
    KeyRange,
    Lengths,
    Mask,
    PrefixLM,
    Segments,
    SlidingWindow,
    Tree,
)
from jflash.problem import Problem
from jflash.scores import streamed
from jflash.testing.problems import backward_shapes, operand_shapes, pose
from jflash.testing.workloads import Workload
from jflash.tuning.table import DATA, read
from jflash.tuning.workloads import Call
from tools.sass import Config, compile_lowered

H200 = hardware.named("h200")
HEADS = ((64, 64), (128, 128), (64, 128), (128, 64), (192, 128), (256, 256), (80, 80))
# Head dims whose order of instructions was measured, or is that of measured ones.
MEASURED = ((64, 64), (128, 128), (192, 128), (256, 256))
# An odd length takes another form of shared memory, `Pieces`; a group another loop in the backward kernels; at short
# lengths blocks of the forward kernel share the rows of tiles; where there are few rows, it splits their keys.
SIZES = {
    "even": {"B": 1, "T": 4096, "N": 16, "K": 16},
    "group": {"B": 1, "T": 4096, "N": 32, "K": 8},
    "odd": {"B": 1, "T": 1001, "N": 16, "K": 16},
    "short": {"B": 32, "T": 512, "N": 16, "K": 16},
    "few": {"B": 1, "T": 4096, "N": 4, "K": 4},
}


def masks(T: int) -> dict[str, Mask]:
    """One of each kind; what they hold is not compiled."""
    ids = np.zeros((1, T), np.int32)
    half = np.array([T // 2], np.int32)
    return {
        "full": Full(),
        "causal": Causal(),
        "window": SlidingWindow(255, 100),
        "segments_causal": Segments(ids, padding_id=0) & Causal(),
        "lengths": Lengths(q=half, kv=half),
        "or": Causal() | Lengths(kv=half),
        "prefix": PrefixLM(half),
        "chunked_causal": Chunked(96) & Causal(),
        "key_range": KeyRange(ids, ids),
        "tree": Tree(np.full((1, T), -1)),
        "not_dilated": ~Dilated(3),
        "dense": Dense(np.ones((1, 1, T, T), bool)),
    }


def distance_and_value(s, b, n, q, k, slope, value):
    return s + slope[n] * (q - k).astype(s.dtype) + value[b, k]


def table_of_diagonals(s, b, n, q, k, table):
    return s + table[n, q - k + 4095]


def table_of_pairs(s, b, n, q, k, table):
    return s * table[q, k]


def table_of_queries(s, b, n, q, k, table):
    return s * table[n, q]


# What else makes logits of products; the rest of each is what all heads share.
TERMS = {
    "bias": {"bias": (1, 16, 4096, 4096)},
    "bias_16_bits": {"bias": (1, 1, 4096, 4096), "bias_dtype": "bfloat16"},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": (16,), "sinks": (16,)},
    "score": {
        "score_fn": distance_and_value,
        "score_args": (np.zeros(16, np.float32), np.zeros((1, 4096), np.float32)),
    },
    "diagonals": {"score_fn": table_of_diagonals, "score_args": (np.zeros((16, 8191), np.float32),)},
    "pairs": {"score_fn": table_of_pairs, "score_args": (np.zeros((4096, 4096), np.float32),)},
    "queries": {"score_fn": table_of_queries, "score_args": (np.zeros((16, 4096), np.float32),)},
}


# The overlap of matmuls and softmax, in the order of the instructions in a loop body (`Compiled.order`). What runs at
# once is what has been issued and not yet been waited for: after "wait1" the last group of matmuls still runs.
#
# Forward: S of this tile and P V of the last one are issued before either is waited for. The wait leaves P V running
# (one group, or one for each of its pieces), and so many maxima and exponentials follow before P V is waited for too: a
# thread has half a row of a tile, each element once in a maximum and once in an exponential. Where the tiles pin that
# wait, all of them are there; elsewhere at least the maxima. Without it the tensor cores idle through each softmax.
_FORWARD = r"mma x\d+ mma\.T x\d+ wait[1-9] exp x{} (?:mbar )?wait0"
# Backward: dP is issued before S is waited for, and exponentials start while dP runs; the wait for it comes after.
_SOFTMAX_IN_DP = r"mma x\d+ mbar mma x\d+ wait[1-9] exp x(?:[4-9]|1\d) .*?wait0 "
# ... dV is issued before the warpgroups meet to exchange dS ("bar"), so that it runs meanwhile; dQ and dK are issued
# together, and as soon as dV is done its dO is free, and dQ leaves for memory while dK runs: two waits that are not for
# all, and after them the barrier before the store.
_NARROW = _SOFTMAX_IN_DP + r".*?mma\.T x\d+ bar mma\.T x\d+ wait[2-9] wait[1-9] bar"
# ... where each warpgroup has half of the columns, P goes through shared memory as dS does: all three are issued then.
_WIDE = _SOFTMAX_IN_DP + r".*?mma\.T x\d+ wait[2-9] wait[1-9](?: x\d)? bar"
# ... and in flight dV, dQ and dK of the step before are issued after S and dP of this one. All exponentials come while
# they run: nothing else is awaited before the barrier that pins the wait for dV.
_WIDE_IN_FLIGHT = (
    r"mma x\d+ mbar mma x\d+ mbar bar mbar mma\.T x\d+ wait[4-9] exp(?: x\d+)? wait[3-9] (?:(?:exp|cvt)(?: x\d+)? )+"
    r"mbar wait[2-9] wait[1-9](?: x\d)? bar"
)


# Of these ptxas 13.0 sinks half of the exponentials behind the pinned wait, though the PTX has them before it. They are
# faster so than in a fixed order without a counter (0.772 for 0.781 ms at T=4096), and than with a vote of the warp
# that pins them (0.766 for 0.780; H200, docs/decisions.md, 2026-11-30). With grouped heads that was not measured.
_SUNK = {"forward_128_128_full_even", "forward_128_128_full_group"}


def at_least(number: int) -> str:
    """A regular expression of the whole numbers from this one."""
    digits = str(number)
    larger = (
        digits[:i] + f"[{int(digit) + 1}-9]" + r"\d" * (len(digits) - i - 1)
        for i, digit in enumerate(digits)
        if digit < "9"
    )
    return f"(?:{'|'.join((digits, *larger))}|{r'\d' * len(digits)}\\d+)"


def overlap(kernel: str, tiles: HopperTiles, problem: Problem, *, is_pinned: bool) -> str:
    """The order that keeps the overlap of the kernels of a pass; the two of deterministic gradients share the first."""
    if kernel == "forward":
        maxima = exponentials = tiles.forward.block_k // 2
        return _FORWARD.format(at_least(maxima + exponentials * is_pinned))
    if kernel == "deterministic":
        return _SOFTMAX_IN_DP
    if max(problem.H, problem.Hv) <= NARROW and tiles.backward.block_k == 128:
        return _NARROW
    wide = _WIDE_IN_FLIGHT if tiles.backward.dk_in_flight else _WIDE
    # Where the warpgroups have parts of unlike size, each has instructions of its own.
    return wide if chunks(problem.H) % 2 == chunks(problem.Hv) % 2 == 0 else f"{wide}.*?{wide}"


def configs(H: int, Hv: int, mask: str, size: str, terms: str = "") -> list[Config]:
    """Of the kernels that these dims, this mask and these lengths have: forward, backward, and dkv with dq."""
    sizes, more = SIZES[size], TERMS.get(terms, {})
    workload = Workload(name="", dtype="bfloat16", H=H, Hv=Hv, mask=masks(sizes["T"])[mask], **sizes, **more)
    problem, _ = pose(workload)
    deterministic, _ = pose(workload, deterministic=True)
    if workload.bias is not None:
        # The kernel for its cotangent runs where somebody asks for that.
        problem, deterministic = (dataclasses.replace(each, learned=(True,)) for each in (problem, deterministic))
    learned = problem, deterministic
    if terms in ("diagonals", "pairs", "queries"):
        # As well, of the array beside the numbers of batch rows and heads. Out is of 16 bits where nobody asks.
        learned = tuple(dataclasses.replace(each, learned=(True, False, False)) for each in (problem, deterministic))
    tiles = mosaic_gpu.default_tiles(problem, H200)
    own = operand_shapes(problem)
    functions = tuple(
        streamed(function, T=problem.T, S=problem.S, dtype=np.dtype("float32")) for function in own.functions
    )
    operands = (own._replace(terms=own.terms._replace(functions=functions)),)
    forward = functools.partial(mosaic_gpu.forward, problem, tiles)
    arguments = *operands, *backward_shapes(learned[0])
    backward, in_two = (functools.partial(mosaic_gpu.backward, each, tiles) for each in learned)
    name = f"{H}_{Hv}_{mask}_{size}" + (f"_{terms}" if terms else "")
    # 64 Ki registers over the threads of a block: three warpgroups that compute get 160 each.
    few = 160 if tiles.forward.warpgroups == 3 else 240
    passes = {
        "forward": {"function": forward, "arguments": operands, "max_registers": few},
        "backward": {"function": backward, "arguments": arguments, "max_registers": 240},
        "deterministic": {"function": in_two, "arguments": arguments, "max_registers": 240},
    }
    is_pinned = tiles.forward.pin_wait and f"forward_{name}" not in _SUNK
    is_measured = (H, Hv) in MEASURED and mask in ("full", "causal") and not terms
    # Of a step with a hundred instructions more than that of plain attention, two registers spilled are nothing. Beside
    # what has a number for each pair some more are at H=256, outside of the loop and by the warpgroup that loads.
    # Beside arguments on tiles three or four addresses are stored before the loop, and loaded once a step (H=128). One
    # that is a factor is needed again for dS, and part of it spilled until then (docs/decisions.md, 2026-11-30).
    is_full = H == 256 and (terms == "bias" or (mask, size) == ("dense", "odd"))
    return [
        Config(
            name=f"{kernel}_{name}",
            max_spill_bytes=24 if is_full else {"": 0, "diagonals": 28, "pairs": 128}.get(terms, 8),
            order=overlap(kernel, tiles, problem, is_pinned=is_pinned) if is_measured else None,
            **own,
        )
        for kernel, own in passes.items()
    ]


CASES = [(H, Hv, mask, size, "") for size in SIZES for mask in masks(1) for H, Hv in HEADS]
CASES += [(H, H, "causal", "even", terms) for H in (64, 128, 256) for terms in TERMS]
CONFIGS: list[Config] = [config for case in CASES for config in configs(*case)]


def tuned_configs() -> list[Config]:
    """One for each entry of the shipped tables."""
    found = []
    for file in sorted(DATA.glob("*.json")):
        for key, entry in read(file, mosaic_gpu.BACKEND, H200).entries.items():
            call = Call(**entry.measured["call"])
            problem, _ = pose(call.workload, deterministic=key.kernel == "backward_dq")
            tiles = dataclasses.replace(mosaic_gpu.default_tiles(problem, H200), **{key.kernel: entry.tiles})
            kernel = {"backward_dq": "deterministic"}.get(key.kernel, key.kernel)
            is_forward = kernel == "forward"
            found.append(
                Config(
                    name=f"{file.stem}_{key.kernel}_{call}".replace(" ", "_"),
                    function=functools.partial(
                        mosaic_gpu.forward if is_forward else mosaic_gpu.backward, problem, tiles
                    ),
                    arguments=(operand_shapes(problem), *(() if is_forward else backward_shapes(problem))),
                    max_registers=160 if is_forward and tiles.forward.warpgroups == 3 else 240,
                    # Whether a pinned wait holds has been measured with the rest.
                    order=overlap(kernel, tiles, problem, is_pinned=False),
                )
            )
    return found


def in_flight_configs() -> list[Config]:
    """Of the backward kernel for wide heads with a step in flight, where that fits; no default has it."""
    found = []
    for H, Hv in ((192, 128), (128, 256)):
        for mask, size in (("full", "even"), ("causal", "group"), ("segments_causal", "odd")):
            workload = Workload(
                name="", dtype="bfloat16", H=H, Hv=Hv, mask=masks(SIZES[size]["T"])[mask], **SIZES[size]
            )
            problem, _ = pose(workload)
            tiles = mosaic_gpu.default_tiles(problem, H200)
            own = dataclasses.replace(tiles.backward, dk_in_flight=True, q_stages=3)
            tiles = dataclasses.replace(tiles, backward=own)
            found.append(
                Config(
                    name=f"in_flight_{H}_{Hv}_{mask}_{size}",
                    function=functools.partial(mosaic_gpu.backward, problem, tiles),
                    arguments=(operand_shapes(problem), *backward_shapes(problem)),
                    max_registers=240,
                    order=overlap("backward", tiles, problem, is_pinned=False),
                )
            )
    return found


TUNED = tuned_configs()
IN_FLIGHT = in_flight_configs()
CONFIGS += TUNED + IN_FLIGHT


def is_for_ci(H: int, Hv: int, mask: str, size: str, terms: str) -> bool:
    """A fifth of those without terms: every two of head dims, mask and size meet."""
    if terms:
        return True
    number = HEADS.index((H, Hv)) + list(masks(1)).index(mask)
    return number % len(SIZES) == list(SIZES).index(size)


@pytest.mark.sass
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=config.name, marks=() if is_for_ci(*case) else pytest.mark.slow)
        for case in CASES
        for config in configs(*case)
    ]
    + [pytest.param(config, id=config.name) for config in TUNED + IN_FLIGHT],
)
def test_kernel(config):
    """Those marked slow are for whoever changes a kernel: `pytest -m sass`, twenty minutes on two cores."""
    for kernel in compile_lowered(config.lower()):
        assert not config.faults(kernel), kernel
        # What may spill has been looked at above, and anything else that ptxas warns of is a fault.
        assert all("Registers are spilled" in warning for warning in kernel.warnings), kernel


@pytest.mark.parametrize("number", [7, 64, 99, 128])
def test_at_least(number):
    assert [i for i in range(2000) if re.fullmatch(at_least(number), str(i))] == list(range(number, 2000))


# Of each the order of the kernel as it is, then some that wait for all matmuls where one is meant to go on (ptxas 13).
ORDERS = {
    "forward_128_128_causal_even": (
        "mma x8 mma.T x8 wait1 exp x134 mbar wait0 exp x3 cvt x32 mbar mma.T x8 wait0",
        "mma x8 mma.T x8 wait0 exp x137 mbar wait0 cvt x32 mbar mma.T x8 wait0",
        "mma x8 mma.T x8 wait1 exp x70 wait0 exp x67 cvt x32 mbar mma.T x8 wait0",
    ),
    "backward_128_128_full_even": (
        "mma x8 mbar mma x8 wait1 exp x4 cvt exp wait0 exp cvt x3 mma.T x4 bar mma.T x12 wait2 wait1 bar wait0",
        "mma x8 mbar mma x8 wait0 exp x5 wait0 cvt x2 exp cvt mma.T x4 bar mma.T x12 wait2 wait1 bar wait0",
        "mma x8 mbar mma x8 wait1 exp x4 cvt exp wait0 exp cvt x3 bar mma.T x16 wait2 wait1 bar wait0",
    ),
    "backward_256_256_causal_even": (
        "mma x16 mbar mma x16 wait1 exp x4 cvt exp wait0 exp mbar bar mbar mma.T x12 wait2 wait1 bar x4 wait0",
        "mma x16 mbar mma x16 wait1 exp x4 cvt exp wait0 exp mbar bar mbar mma.T x12 wait0 wait1 bar x4 wait0",
    ),
    "deterministic_128_128_causal_even": (
        "mma x8 mbar mma x8 wait1 exp x12 wait0 exp cvt exp mma.T x8 wait0",
        "mma x8 mbar mma x8 wait0 exp x9 wait0 exp x2 cvt exp mma.T x8 wait0",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_without_overlap_is_a_fault(name):
    (config,) = (config for config in CONFIGS if config.name == name)
    with_overlap, *others = ORDERS[name]
    assert re.search(config.order, with_overlap)
    assert not any(re.search(config.order, order) for order in others)
