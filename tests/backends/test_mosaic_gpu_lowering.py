"""The Hopper kernels lower for CUDA on a machine without a GPU: default tiles, all tiles that fit, on meshes too."""

import collections
import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core as mosaic_core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash import hardware
from jflash.backends import mosaic_gpu
from jflash.backends.mosaic_gpu import primitives
from jflash.backends.mosaic_gpu.tiles import HEAD_GROUPS, BackwardTiles, DqTiles, ForwardTiles
from jflash.backends.protocol import Operands
from jflash.errors import ArgumentError
from jflash.masks import Causal, Chunked, Dense, Segments, packed
from jflash.problem import Problem
from jflash.scores import streamed
from jflash.testing.problems import backward_shapes, operand_shapes, pose
from jflash.testing.workloads import Workload

H200 = hardware.named("h200")
KERNELS = {
    "forward": ("jflash_forward_sm90",),
    "backward": ("jflash_backward_sm90", "jflash_backward_wide_sm90"),
    "deterministic": ("jflash_backward_dq_sm90",),
}


def workload(**changed: Any) -> Workload:
    return Workload(**{"name": "", "B": 2, "T": 256, "N": 4, "K": 2, "H": 64, "dtype": "bfloat16"} | changed)


def streamed_shapes(problem: Problem) -> Operands:
    """The operands as kernels get them, with what score functions index as streams."""
    operands, sizes = operand_shapes(problem), {"T": problem.T, "S": problem.S, "dtype": np.dtype(np.float32)}
    functions = tuple(streamed(function, **sizes) for function in operands.functions)
    return operands._replace(terms=operands.terms._replace(functions=functions))


def lowered(w: Workload, kernel: str, **changed: dict[str, Any]) -> str:
    """A pass of a workload with the default tiles, but for some fields, as `forward={"stages": 1}`."""
    problem, _ = pose(w, deterministic=kernel == "deterministic")
    tiles = mosaic_gpu.default_tiles(problem, H200)
    parts = {name: dataclasses.replace(getattr(tiles, name), **fields) for name, fields in changed.items()}
    tiles = dataclasses.replace(tiles, **parts)
    function = mosaic_gpu.forward if kernel == "forward" else mosaic_gpu.backward
    statistics = () if kernel == "forward" else backward_shapes(problem)
    traced = jax.jit(functools.partial(function, problem, tiles)).trace(operand_shapes(problem), *statistics)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


# Tiles ----------------------------------------------------------------------------------------------------------------


# All head dims that the kernels take, with both forms of `Pieces` and both dtypes.
HEADS = [(H, H) for H in range(8, 257, 8)] + [
    (64, 128),
    (128, 64),
    (192, 128),
    (8, 256),
    (256, 8),
    (136, 72),
    (40, 200),
]
FAST_HEADS = {(8, 8), (72, 72), (128, 128), (256, 256), (192, 192), (192, 128), (40, 200)}


@pytest.mark.parametrize(
    ("H", "Hv"), [pytest.param(*pair, marks=() if pair in FAST_HEADS else pytest.mark.slow) for pair in HEADS]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_default_tiles_lower(kernel, H, Hv):
    is_odd = (H // 8 + Hv // 8) % 3 == 0
    w = workload(T=251 if is_odd else 256, H=H, Hv=Hv, mask=Causal(), dtype="float16" if is_odd else "bfloat16")
    assert any(name in lowered(w, kernel) for name in KERNELS[kernel])


ALLOWED: dict[str, dict[str, tuple]] = {
    "forward": {
        "warpgroups": (1, 2, 3), "block_k": (64, 128, 192, 256), "stages": (1, 2, 3, 4),
        "pin_wait": (False, True), "head_group": HEAD_GROUPS, "blocks": (None, 1, 132), "splits": (1, 3),
        "counted": (False, True),
    },
    "backward": {
        "block_q": (64, 128), "block_k": (64, 128), "q_stages": (1, 2, 3), "do_stages": (1, 2),
        "dk_in_flight": (False, True), "head_group": HEAD_GROUPS,
    },
    "backward_dq": {
        "block_k": (64, 128), "k_stages": (1, 2, 3, 4), "v_stages": (1, 2, 3, 4), "head_group": HEAD_GROUPS,
    },
}  # fmt: skip
KERNEL_OF = {"forward": "forward", "backward": "backward", "backward_dq": "deterministic"}
# Why tiles that a record takes are refused for a problem.
CONSTRAINTS = (
    r"block_q=64 with H over 64",
    r"dk_in_flight=True with q_stages=([12]|3, do_stages=1)",
    r"blocks=\d+ with Hv != H",
    r"splits=3, blocks=\d+",
    r"counted=True with blocks=None",
)


def test_every_field_of_the_tiles_is_tried():
    for name, record in (("forward", ForwardTiles), ("backward", BackwardTiles), ("backward_dq", DqTiles)):
        assert {field.name for field in dataclasses.fields(record)} == set(ALLOWED[name])


def assert_lowers_or_is_refused(w: Workload, tiles: str, changed: dict[str, Any]) -> None:
    """Whatever fits must lower; what is refused must be over the limit, or break a constraint, and say so."""
    kernel = KERNEL_OF[tiles]
    try:
        text = lowered(w, kernel, **{tiles: changed})
    except ArgumentError as error:
        assert error.argument == "tiles"
        size = re.search(r"(\d+) bytes of shared memory, wanted at most 232448 bytes", str(error))
        assert int(size[1]) > 227 * 1024 if size else any(re.search(why, str(error)) for why in CONSTRAINTS), error
    else:
        assert any(name in text for name in KERNELS[kernel])


# Together they have every value of every field that fits at H=64.
TOGETHER = [
    ("forward", {"warpgroups": 1, "block_k": 64, "stages": 4, "pin_wait": True, "head_group": 1}),
    ("forward", {"warpgroups": 2, "block_k": 128, "stages": 3, "pin_wait": False, "head_group": 2, "blocks": 1}),
    ("forward", {"warpgroups": 3, "block_k": 192, "stages": 1, "pin_wait": True, "head_group": 4, "blocks": 132}),
    ("forward", {"warpgroups": 2, "block_k": 128, "stages": 2, "head_group": 2, "blocks": 132, "counted": True}),
    ("forward", {"warpgroups": 1, "block_k": 256, "stages": 2, "pin_wait": False, "head_group": 8, "splits": 3}),
    ("backward", {"block_q": 64, "block_k": 128, "q_stages": 1, "do_stages": 1, "dk_in_flight": False}),
    (
        "backward",
        {"block_q": 128, "block_k": 128, "q_stages": 2, "do_stages": 2, "dk_in_flight": True, "head_group": 4},
    ),
    ("backward", {"block_q": 64, "block_k": 64, "q_stages": 3, "do_stages": 2, "dk_in_flight": True}),
    ("backward_dq", {"block_k": 64, "k_stages": 1, "v_stages": 4, "head_group": 1}),
    ("backward_dq", {"block_k": 128, "k_stages": 2, "v_stages": 1, "head_group": 2}),
    ("backward_dq", {"block_k": 64, "k_stages": 4, "v_stages": 2, "head_group": 4}),
    ("backward_dq", {"block_k": 64, "k_stages": 3, "v_stages": 3, "head_group": 16}),
]


@pytest.mark.parametrize(("tiles", "changed"), TOGETHER)
def test_tiles_that_fit_lower(tiles, changed):
    w = workload(N=16, K=4, mask=Causal())
    assert any(name in lowered(w, KERNEL_OF[tiles], **{tiles: changed}) for name in KERNELS[KERNEL_OF[tiles]])


def one_table(s, b, n, q, k, table):
    return s + table[n, q - k + table.shape[1] // 2]


def two_tables(s, b, n, q, k, table, other):
    return jnp.where(other[abs(q - k)] > k, s * table[n, q - k + table.shape[1] // 2], s)


# What has a number for each pair, in bytes of a pair: a bias, a mask of booleans, both; one or two for each diagonal.
PAIRS = {
    "bias_16_bits": {"bias": (1, 4, 256, 256), "bias_dtype": "bfloat16"},
    "bias": {"bias": (2, 1, 256, 256)},
    "dense": {"mask": Dense(np.ones((1, 4, 256, 256), bool))},
    "dense_and_bias": {"mask": Dense(np.ones((2, 1, 256, 256), bool)), "bias": (1, 1, 256, 256)},
    "diagonals": {"score_fn": two_tables, "score_args": (np.ones((4, 511), np.float32), np.ones(256, np.int32))},
}
FAST_PAIRS = {("bias", 256, 256), ("dense_and_bias", 128, 64), ("dense_and_bias", 256, 256), ("bias_16_bits", 192, 128)}
FAST_PAIRS |= {("diagonals", 128, 128)}


PAIRS_CASES = [
    pytest.param(name, H, Hv, marks=() if (name, H, Hv) in FAST_PAIRS else pytest.mark.slow)
    for name, H, Hv in itertools.product(PAIRS, (64, 128, 192, 256), (64, 128, 192, 256))
]


@pytest.mark.parametrize(("pairs", "H", "Hv"), PAIRS_CASES)
def test_what_has_a_number_for_each_pair_fits_or_is_refused(pairs, H, Hv):
    """With all other terms, and every cotangent asked for: nothing takes more of shared memory."""
    w = workload(H=H, Hv=Hv, softcap=3.0, alibi_slopes=(4,), sinks=(4,), **PAIRS[pairs])
    problem, _ = pose(w)
    reason = mosaic_gpu.BACKEND.supports(problem, H200)
    pair_bytes, columns_refused = {"dense_and_bias": (6, 512), "diagonals": (8, 448)}.get(pairs, (4, 513))
    assert (reason is None) == (H + Hv < columns_refused), reason
    if reason is not None:
        assert f"no room for {pair_bytes} bytes for each pair" in reason
        return
    operands = streamed_shapes(problem)
    is_float = tuple(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(operands.terms))
    tiles = mosaic_gpu.default_tiles(problem, H200)
    for deterministic in (False, True):
        problem = dataclasses.replace(problem, deterministic=deterministic, learned=is_float)
        for function, statistics in ((mosaic_gpu.forward, ()), (mosaic_gpu.backward, backward_shapes(problem))):
            jax.eval_shape(functools.partial(function, problem, tiles), operands, *statistics)


@pytest.mark.parametrize(
    ("H", "Hv"),
    [
        pytest.param(*pair, marks=() if pair == (72, 72) else pytest.mark.slow)
        for pair in [(40, 24), (64, 64), (72, 72), (128, 128), (64, 128), (192, 128), (136, 200), (256, 256)]
    ],
)
def test_a_table_of_diagonals_lowers_with_its_cotangent(H, Hv):
    """No array has a number for each pair: what there is besides grows with T + S."""
    tables = {"score_fn": one_table, "score_args": (np.ones((4, 1445), np.float32),)}
    if H == Hv <= 128:
        tables = {"score_fn": two_tables, "score_args": (np.ones((4, 1445), np.float32), np.ones(723, np.int32))}
    w = workload(T=723, H=H, Hv=Hv, N=4, **tables)
    problem, _ = pose(w)
    assert mosaic_gpu.BACKEND.supports(problem, H200) is None
    operands, tiles = streamed_shapes(problem), mosaic_gpu.default_tiles(problem, H200)
    learned = jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating), operands.terms)
    problem = dataclasses.replace(problem, learned=tuple(jax.tree.leaves(learned)))
    for function, statistics in ((mosaic_gpu.forward, ()), (mosaic_gpu.backward, backward_shapes(problem))):
        traced = jax.jit(functools.partial(function, problem, tiles)).trace(operands, *statistics)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("jflash_backward_diagonals_sm90" in text) == (function is mosaic_gpu.backward)
        assert not re.search(r"tensor<(\d+x)*(723|768|736|728)x(723|768|736|728)x", text)
        # A result for each row of tiles, and one for each distance.
        assert function is mosaic_gpu.forward or "tensor<1x4x22x128x64xf32>" in text


def scaled_by_queries(s, b, n, q, k, x, y):
    return s * x[n, q] + y[q]


@pytest.mark.parametrize(
    ("H", "Hv"),
    [
        pytest.param(*pair, marks=() if pair == (256, 256) else pytest.mark.slow)
        for pair in itertools.product((40, 64, 128, 192, 256), repeat=2)
    ],
)
def test_numbers_for_each_query_lower_with_those_cotangents_that_are_asked_for(H, Hv):
    own = {"score_fn": scaled_by_queries, "score_args": (np.ones((4, 723), np.float32), np.ones(723, np.float32))}
    problem, _ = pose(workload(T=723, H=H, Hv=Hv, bias=(2, 1, 723, 1), bias_dtype="bfloat16", **own))
    assert mosaic_gpu.BACKEND.supports(problem, H200) is None
    operands, tiles = streamed_shapes(problem), mosaic_gpu.default_tiles(problem, H200)
    leaves = len(jax.tree.leaves(operands.terms))
    # Of the bias and the arrays of the function.
    for asked in ((False, False, False), (True, False, True)):
        learned = dataclasses.replace(problem, learned=(*asked, *[False] * (leaves - 3)))
        traced = jax.jit(functools.partial(mosaic_gpu.backward, learned, tiles)).trace(
            operands, *backward_shapes(problem)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 2 + sum(asked)
        assert ("jflash_backward_rows_sm90" in text) == any(asked)
        shapes = [array.shape for array in jax.tree.leaves(traced.out_info.values)]
        assert shapes == [shape for shape, own in zip([(2, 4, 723, 1), (2, 4, 723), (2, 4, 723)], asked) if own]


@pytest.mark.slow
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize(
    ("tiles", "field", "value"),
    [(tiles, field, value) for tiles, fields in ALLOWED.items() for field in fields for value in fields[field]],
)
def test_every_value_of_a_field_lowers_or_is_refused(tiles, field, value, H):
    assert_lowers_or_is_refused(workload(N=16, K=4, H=H, mask=Causal()), tiles, {field: value})


@pytest.mark.parametrize(
    ("H", "tiles", "changed", "why"),
    [
        (
            256,
            "forward",
            {"stages": 4},
            r"ForwardTiles\(.*stages=4.*, 331952 bytes of shared memory, wanted at most 232448",
        ),
        (128, "backward_dq", {"k_stages": 4}, r"DqTiles\(.* bytes of shared memory, wanted at most 232448 bytes"),
        (256, "backward", {"do_stages": 2}, r"BackwardTiles\(.* bytes of shared memory, wanted at most 232448 bytes"),
        (72, "backward", {"block_q": 128, "q_stages": 1}, CONSTRAINTS[0]),
        (64, "backward", {"q_stages": 1, "dk_in_flight": True}, CONSTRAINTS[1]),
        (192, "backward", {"dk_in_flight": True}, CONSTRAINTS[1]),
        (256, "backward", {"dk_in_flight": True, "q_stages": 3, "do_stages": 1}, CONSTRAINTS[1]),
    ],
)
def test_what_does_not_fit_says_which_tiles_and_why(H, tiles, changed, why):
    with pytest.raises(
        ArgumentError, match=f"`tiles`: found .*{why}" if why in CONSTRAINTS else f"`tiles`: found {why}"
    ):
        lowered(workload(H=H, mask=Causal()), KERNEL_OF[tiles], **{tiles: changed})


def test_blocks_that_share_rows_of_tiles_need_equal_head_dims():
    with pytest.raises(ArgumentError, match=f"`tiles`: found {CONSTRAINTS[2]}"):
        lowered(workload(H=64, Hv=128, mask=Causal()), "forward", forward={"blocks": 132})


def sizes_of(w: Workload, kernel: str, tiles: str, changed: dict[str, Any], monkeypatch) -> tuple[int, int] | None:
    """What we and what Mosaic take for the shared memory of the first kernel, that no device would have."""
    ours = []
    count, unlimited = primitives.smem_bytes, dataclasses.replace(H200, smem_bytes_per_block=2**30)
    with monkeypatch.context() as patch, mosaic_core.artificial_shared_memory_limit(0):
        patch.setattr(primitives, "named", lambda name: unlimited)
        patch.setattr(primitives, "smem_bytes", lambda *a, **k: ours.append(count(*a, **k)) or ours[-1])
        with pytest.raises(ValueError) as raised:
            lowered(w, kernel, **{tiles: changed})
    found = re.search(r"exceeds available shared memory: smem_bytes=(\d+)", str(raised.value))
    if found is None:
        assert any(re.search(why, str(raised.value)) for why in CONSTRAINTS), raised.value
        return None
    return ours[0], int(found[1])


@pytest.mark.parametrize(
    ("H", "Hv", "T"),
    [
        (64, 64, 256),
        (192, 128, 251),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((72, 200, 256), (128, 64, 251))),
    ],
)
@pytest.mark.parametrize("tiles", ALLOWED)
def test_shared_memory_is_what_mosaic_takes(tiles, H, Hv, T, monkeypatch):
    """Over every third combination, of those that fit no device too, of the fields that take memory."""
    take_none = ("pin_wait", "head_group", "splits")
    fields = {name: values for name, values in ALLOWED[tiles].items() if name not in take_none}
    w = workload(B=1, T=T, N=1, K=1, H=H, Hv=Hv)
    pairs = [
        sizes_of(w, KERNEL_OF[tiles], tiles, dict(zip(fields, values)), monkeypatch)
        for values in list(itertools.product(*fields.values()))[::3]
    ]
    pairs = [pair for pair in pairs if pair is not None]
    assert pairs and all(ours == mosaic for ours, mosaic in pairs), pairs


# Transformations ------------------------------------------------------------------------------------------------------


def shapes(*sizes: tuple[int, ...], sharding: Any = None) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=sharding) for size in sizes]


SIZES = (4, 256, 8, 64), (4, 256, 4, 64), (4, 256, 4, 64)


def attend(q, k, v, **arguments):
    return jflash.flash_attention(q, k, v, **{"causal": True, "backend": "mosaic_gpu"} | arguments)


def gradients(q, k, v, **arguments):
    return jax.grad(lambda *x: attend(*x, **arguments).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)


def lower(function, arguments, *platforms: str) -> str:
    with jflash.use_options(hardware="h200"):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=platforms or ("cuda",)).as_text()


def assert_both_passes(text: str) -> None:
    assert text.count("custom_call @mosaic_gpu") == 3
    assert all(f"jflash_{name}_sm90" in text for name in ("forward", "backward_start", "backward"))


def test_x64():
    with jax.enable_x64(True):
        assert_both_passes(lower(gradients, shapes(*SIZES)))


def test_more_than_2_to_the_31_elements():
    """Sizes and indices in the kernels are 32 bits; TMA takes one for each axis, so that no product of them is."""
    big = (1, 2**18, 64, 128)
    assert_both_passes(lower(gradients, shapes(big, big, big)))


def test_vmap_of_gradients():
    mapped = shapes(*((3, *size) for size in SIZES))
    assert_both_passes(lower(jax.vmap(gradients), mapped))


def test_auto_lowers_for_both_platforms_from_one_trace():
    text = lower(functools.partial(gradients, backend="auto"), shapes(*SIZES), "cpu", "cuda")
    assert_both_passes(text)
    assert "stablehlo.case" in text


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


SPEC = P("data", None, "model", None)


def test_jit_over_a_mesh_has_the_partition_rule():
    """On automatic axes the kernels are lowered only when the program is partitioned, which needs the devices. And JAX
    cannot lower or export `custom_partitioning` for devices that are not there: "AbstractMesh cannot be used when jaxpr
    contains primitives that require devices", "serialization of host_callbacks" (0.11.2)."""
    text = lower(gradients, shapes(*SIZES, sharding=NamedSharding(mesh_of(AxisType.Auto), SPEC)))
    assert text.count("sdy.sharding_rule") == text.count("@CustomSPMDPartitioning") == 2
    assert "custom_call @mosaic_gpu" not in text


def test_jit_over_an_explicit_mesh():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        assert_both_passes(lower(gradients, shapes(*SIZES, sharding=NamedSharding(mesh, SPEC))))


@pytest.mark.parametrize(
    ("kind", "of_keys", "deterministic"),
    [
        (AxisType.Auto, SPEC, False),
        (AxisType.Auto, P("data"), True),
        (AxisType.Explicit, P(), False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product((AxisType.Auto, AxisType.Explicit), (SPEC, P("data"), P()), (False, True))
        ),
    ],
)
def test_gradients_through_shard_map_with_its_default_checks(kind, of_keys, deterministic):
    """Keys split as the queries, shared by some devices, and shared by all."""
    mesh = mesh_of(kind)
    attention = functools.partial(attend, deterministic=deterministic)

    def loss(q, k, v):
        local = jax.shard_map(attention, mesh=mesh, in_specs=(SPEC, of_keys, of_keys), out_specs=SPEC)
        return local(q, k, v).astype(jnp.float32).sum()

    # What the devices see must be one batch, and key/value heads that divide the query heads.
    B, K = 4 if of_keys else 2, 4 if "model" in of_keys else 2
    keys = [jax.ShapeDtypeStruct((B, 256, K, 64), jnp.bfloat16, sharding=NamedSharding(mesh, of_keys))] * 2
    queries = shapes(SIZES[0], sharding=NamedSharding(mesh, SPEC))
    with jax.set_mesh(mesh):
        text = lower(jax.grad(loss, (0, 1, 2)), [*queries, *keys])
    assert text.count("custom_call @mosaic_gpu") == 3 + deterministic


def table_of_queries(s, b, n, q, k, table):
    return s + table[n, q]


@pytest.mark.parametrize(
    ("score_fn", "kernel", "kind"),
    [
        (one_table, "diagonals", AxisType.Auto),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (one_table, "diagonals", AxisType.Explicit),
                (table_of_queries, "rows", AxisType.Auto),
                (table_of_queries, "rows", AxisType.Explicit),
            )
        ),
    ],
)
def test_the_cotangent_of_a_table_through_shard_map(score_fn, kernel, kind):
    """A table that all devices share, and lists of tiles for each device's batch rows and for each distance."""
    mesh, H = mesh_of(kind), 64

    def attention(q, k, v, table, ids):
        terms = {"score_fn": score_fn, "score_args": (table,), "mask": Segments(ids)}
        return attend(q, k, v, causal=False, **terms)

    def loss(q, k, v, table, ids):
        specs = SPEC, SPEC, SPEC, P(), P("data")
        local = jax.shard_map(attention, mesh=mesh, in_specs=specs, out_specs=SPEC)
        return local(q, k, v, table, ids).astype(jnp.float32).sum()

    arrays = shapes((4, 256, 4, H), (4, 256, 4, H), (4, 256, 4, H), sharding=NamedSharding(mesh, SPEC))
    table = jax.ShapeDtypeStruct((2, 513), jnp.float32, sharding=NamedSharding(mesh, P()))
    ids = jax.ShapeDtypeStruct((4, 256), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        text = lower(jax.grad(loss, (0, 1, 2, 3)), [*arrays, table, ids])
    assert text.count("custom_call @mosaic_gpu") == 4
    assert f"jflash_backward_{kernel}_sm90" in text


@pytest.mark.parametrize("through", ["jit", "vmap", "shard_map"])
def test_the_counter_of_rows_of_tiles(through):
    """Its zero is a part of each call, on each device."""
    sizes = (16, 2048, 16, 64), (16, 2048, 8, 64), (16, 2048, 8, 64)
    call = gradients
    if through == "vmap":
        call, sizes = jax.vmap(gradients), [(2, *size) for size in sizes]
    if through == "shard_map":
        mesh = mesh_of(AxisType.Explicit)
        call = jax.shard_map(gradients, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
        arrays = shapes(*sizes, sharding=NamedSharding(mesh, SPEC))
        with jax.set_mesh(mesh):
            text = lower(call, arrays)
    else:
        text = lower(call, shapes(*sizes))
    assert_both_passes(text)
    assert re.search(r"custom_call @mosaic_gpu.*tensor<1xi32>", text)


def test_lists_of_tiles_and_values_lower_inside_vmap():
    def call(q, k, v, ids):
        return gradients(q, k, v, causal=False, mask=Segments(ids) & Causal())

    ids = jax.ShapeDtypeStruct((3, 4, 256), np.int32)
    assert_both_passes(lower(jax.vmap(call), [*shapes(*((3, *size) for size in SIZES)), ids]))


@pytest.mark.parametrize(
    ("make", "selects"),
    [
        # By heads: of v forward, of k and v backward; of q and d_out backward.
        (lambda ids: Segments(ids, padding_id=0) & Causal(), {2: 3, 4: 2}),
        (lambda ids: Segments(ids) & Causal(), {}),
        (lambda ids: (Segments(ids, ids) & Causal()) | Chunked(7), {}),
        (lambda ids: packed(np.array([0, 100, 256]), np.array([0, 100, 256]), T=256, S=256, causal=True), {}),
    ],
    ids=["padding", "documents", "or", "packed"],
)
def test_no_pass_over_arrays_for_dead_keys_where_there_are_none(make, selects):
    """Of documents without padding it is known when tracing that each query sees itself."""

    def call(q, k, v, ids):
        return gradients(q, k, v, causal=False, mask=make(ids))

    ids, arrays = jnp.zeros((3, 256), jnp.int32), shapes((3, 256, 4, 64), (3, 256, 2, 64), (3, 256, 2, 64))
    notes = jflash.explain(*arrays, mask=make(ids), hardware="h200").notes
    assert any("may hide a key" in note for note in notes) == bool(selects)
    text = lower(call, [*arrays, ids])
    assert_both_passes(text)
    # `jnp.where` is a function, of which selects of one shape share one.
    called = re.findall(r"call @_where.* -> tensor<3x256x(\d)x64xbf16>$", text, re.MULTILINE)
    assert collections.Counter(map(int, called)) == selects
    assert bool(re.search(r"stablehlo\.select .*tensor<3x256x\dx64xbf16>$", text, re.MULTILINE)) == bool(selects)
    # A list of tiles for each pass, and no loop over the tiles of keys.
    assert text.count("call @sort") == 2 and "stablehlo.while" not in text
