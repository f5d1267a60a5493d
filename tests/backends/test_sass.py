"""ptxas makes of the kernels what their tiles count on: no spills, no serialised wgmma, registers within setmaxnreg.

`python -m tools.sass show tests/backends/test_sass.py` prints the numbers, with `--order` the schedules.
"""

import dataclasses
import functools

import numpy as np
import pytest

from jflash import hardware
from jflash.backends import mosaic_gpu
from jflash.masks import (
    Causal,
    Chunked,
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
from jflash.scores import streamed
from jflash.testing.problems import backward_shapes, operand_shapes, pose
from jflash.testing.workloads import Workload
from jflash.tuning.table import DATA, read
from jflash.tuning.workloads import Call
from tools.sass import Config, compile_lowered

H200 = hardware.named("h200")
HEADS = ((64, 64), (128, 128), (64, 128), (128, 64), (192, 128), (256, 256), (80, 80))
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
    }


def distance_and_value(s, b, n, q, k, slope, value):
    return s + slope[n] * (q - k).astype(s.dtype) + value[b, k]


# What else makes logits of products.
TERMS = {
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": (16,), "sinks": (16,)},
    "score": {
        "score_fn": distance_and_value,
        "score_args": (np.zeros(16, np.float32), np.zeros((1, 4096), np.float32)),
    },
}


def configs(H: int, Hv: int, mask: str, size: str, terms: str = "") -> list[Config]:
    """Of the kernels that these dims, this mask and these lengths have: forward, backward, and dkv with dq."""
    sizes, more = SIZES[size], TERMS.get(terms, {})
    workload = Workload(name="", dtype="bfloat16", H=H, Hv=Hv, mask=masks(sizes["T"])[mask], **sizes, **more)
    problem, _ = pose(workload)
    deterministic, _ = pose(workload, deterministic=True)
    tiles = mosaic_gpu.default_tiles(problem, H200)
    own = operand_shapes(problem)
    functions = tuple(
        streamed(function, T=problem.T, S=problem.S, dtype=np.dtype("float32")) for function in own.functions
    )
    operands = (own._replace(terms=own.terms._replace(functions=functions)),)
    forward = functools.partial(mosaic_gpu.forward, problem, tiles)
    arguments = *operands, *backward_shapes(problem)
    backward, in_two = (functools.partial(mosaic_gpu.backward, each, tiles) for each in (problem, deterministic))
    name = f"{H}_{Hv}_{mask}_{size}" + (f"_{terms}" if terms else "")
    # 64 Ki registers over the threads of a block: three warpgroups that compute get 160 each.
    few = 160 if tiles.forward.warpgroups == 3 else 240
    # Of a step with a hundred instructions more than that of plain attention, two registers spilled are nothing.
    common = {"max_spill_bytes": 8 if terms else 0}
    return [
        Config(name=f"forward_{name}", function=forward, arguments=operands, max_registers=few, **common),
        Config(name=f"backward_{name}", function=backward, arguments=arguments, max_registers=240, **common),
        Config(name=f"deterministic_{name}", function=in_two, arguments=arguments, max_registers=240, **common),
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
            is_forward = key.kernel == "forward"
            found.append(
                Config(
                    name=f"{file.stem}_{key.kernel}_{call}".replace(" ", "_"),
                    function=functools.partial(
                        mosaic_gpu.forward if is_forward else mosaic_gpu.backward, problem, tiles
                    ),
                    arguments=(operand_shapes(problem), *(() if is_forward else backward_shapes(problem))),
                    max_registers=160 if is_forward and tiles.forward.warpgroups == 3 else 240,
                )
            )
    return found


TUNED = tuned_configs()
CONFIGS += TUNED


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
    + [pytest.param(config, id=config.name) for config in TUNED],
)
def test_kernel(config):
    """Those marked slow are for whoever changes a kernel: `pytest -m sass`, twenty minutes on two cores."""
    for kernel in compile_lowered(config.lower()):
        assert not config.faults(kernel), kernel
        # What may spill has been looked at above, and anything else that ptxas warns of is a fault.
        assert all("Registers are spilled" in warning for warning in kernel.warnings), kernel
