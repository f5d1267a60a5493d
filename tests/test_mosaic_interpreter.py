"""What tests/mosaic_interpreter.py adds to the interpreter of JAX: small kernels that need it, and faults to find."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpreter import SUPPORTED_JAX, RaceError, interpret, interpreted

TILE = 64
SWIZZLE = plgpu.SwizzleTransform(128)
TILING = plgpu.TilingTransform((8, TILE))
ACC = plgpu.ACC((TILE, TILE), jnp.float32)

# Any fault that is no race is an error of the interpreter, in which XLA wraps the text.
FOUND = (RaceError, jax.errors.JaxRuntimeError)


def test_this_jax_is_known():
    assert jax.__version__ in SUPPORTED_JAX, "try tests/mosaic_interpreter.py with this version, then add it there"


def normal(*shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def smem(*shape, dtype=jnp.bfloat16):
    return plgpu.SMEM(shape, dtype, transforms=(TILING, SWIZZLE))


def kernel(body, shape, dtype=jnp.float32, **options):
    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(shape, dtype), compiler_params=params, **options)


def close(found, wanted, error=0.02):
    wanted = np.asarray(wanted, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=error * np.abs(wanted).max())


def product(a, b):
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64)


def pipelined_matmul(a, b, *, computing=2, stages=2, fault=None):
    """a @ b by a TMA warpgroup that loads and others that compute, as in an attention kernel; with a fault if told."""
    steps = a.shape[1] // TILE

    def body(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, full, free):
        warpgroup = lax.axis_index("warpgroup")
        rows = pl.ds(warpgroup * TILE, TILE)
        out_slot = 0 if fault == "shared slot" else warpgroup

        def compute(acc):
            @pl.loop(0, steps)
            def _(step):
                slot = lax.rem(step, stages)
                if fault != "no wait for the load":
                    plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, a_smem.at[slot, rows], b_smem.at[slot])
                if fault != "release before wgmma is done":
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            return acc[...]

        @pl.when(warpgroup < computing)
        def _():
            out_smem[out_slot] = pl.run_scoped(compute, ACC)
            if fault != "no commit_smem":
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[out_slot], out_gmem.at[rows])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == computing)
        def _():
            @pl.loop(0, steps)
            def _(step):
                slot, k = lax.rem(step, stages), pl.ds(step * TILE, TILE)
                if fault != "no wait for the release":

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                plgpu.copy_gmem_to_smem(a_gmem.at[:, k], a_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(b_gmem.at[k], b_smem.at[slot], full.at[slot])

            if fault == "no wait for the release":
                return

            @pl.loop(steps - min(stages, steps), steps)
            def _(step):
                plgpu.barrier_wait(free.at[lax.rem(step, stages)])

    released = 1 if fault == "wrong num_arrivals" else computing
    return kernel(
        body,
        (a.shape[0], TILE),
        num_threads=computing + 1,
        thread_name="warpgroup",
        scratch_types=[
            smem(stages, a.shape[0], TILE),
            smem(stages, TILE, TILE),
            plgpu.SMEM((computing, TILE, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=released, num_barriers=stages),
        ],
    )(a, b)


# Four warpgroups hang unless XLA has a thread for each: tests/conftest.py.
@pytest.mark.parametrize("computing", [2, 3])
def test_a_pipeline_of_warpgroups_is_right_and_without_race(computing):
    a, b = normal(computing * TILE, 256), normal(256, TILE, seed=1)
    close(interpret(functools.partial(pipelined_matmul, computing=computing), a, b), product(a, b))


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("no commit_smem", "RACE DETECTED"),
        ("shared slot", "RACE DETECTED"),
        ("release before wgmma is done", "RACE DETECTED"),
        ("no wait for the load", "RACE DETECTED"),
        ("no wait for the release", "RACE DETECTED|phase"),
        ("wrong num_arrivals", "arrive|phase|RACE DETECTED"),
    ],
)
def test_a_fault_of_the_pipeline_is_found(fault, wanted):
    a, b = normal(2 * TILE, 256), normal(256, TILE, seed=1)
    with pytest.raises(FOUND, match=wanted):
        interpret(functools.partial(pipelined_matmul, fault=fault), a, b)


def test_a_fault_leaves_no_trace():
    a, b = normal(2 * TILE, 128), normal(128, TILE, seed=1)
    with pytest.raises(RaceError):
        interpret(functools.partial(pipelined_matmul, fault="shared slot"), a, b)
    close(interpret(pipelined_matmul, a, b), product(a, b))


def one_warpgroup(use, *inputs, shape=(TILE, TILE), scratch=()):
    """Loads the inputs, each one tile, and stores what `use(tiles, *scratch)` returns."""

    def body(*refs):
        gmem, out_gmem, tiles = refs[: len(inputs)], refs[len(inputs)], refs[len(inputs) + 1 : 2 * len(inputs) + 1]
        out_smem, barrier, *rest = refs[2 * len(inputs) + 1 :]
        for source, tile in zip(gmem, tiles):
            plgpu.copy_gmem_to_smem(source, tile, barrier)
        plgpu.barrier_wait(barrier)
        out_smem[...] = use(tiles, *rest)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    return kernel(
        body,
        shape,
        scratch_types=[
            *(smem(TILE, TILE) for _ in inputs),
            plgpu.SMEM(shape, jnp.float32),
            plgpu.Barrier(num_arrivals=len(inputs)),
            *scratch,
        ],
    )(*inputs)


def registers_times(tiles):
    a, b = tiles
    left = plgpu.load(a, layout=plgpu.Layout.WGMMA) * 2
    start = plgpu.layout_cast(jnp.ones((TILE, TILE), jnp.float32), plgpu.Layout.WGMMA)
    return pl.run_state(lambda acc: plgpu.wgmma(acc, left, b))(plgpu.ACC.init(start))


def stored_accumulator(tiles):
    a, b = tiles

    def scope(acc):
        acc[...] = plgpu.layout_cast(jnp.ones((TILE, TILE), jnp.float32), plgpu.Layout.WGMMA)
        plgpu.wgmma(acc, a, b)
        once = plgpu.wgmma_accumulator_load(acc, wait_n=0)
        acc[...] = once * 2
        return acc[...]

    return pl.run_scoped(scope, ACC)


@pytest.mark.parametrize(
    ("use", "wanted"),
    [(registers_times, lambda product: 1 + 2 * product), (stored_accumulator, lambda product: 2 + 2 * product)],
)
def test_accumulators(use, wanted):
    a, b = normal(TILE, TILE), normal(TILE, TILE, seed=1)
    close(interpret(functools.partial(one_warpgroup, use), a, b), wanted(product(a, b)))


@pytest.mark.parametrize("commit", [True, False])
def test_wgmma_reads_through_the_async_proxy(commit):
    def use(tiles, stored):
        a, b = tiles
        stored[...] = plgpu.load(a, layout=plgpu.Layout.WGMMA) * 2
        if commit:
            plgpu.commit_smem()

        def scope(acc):
            plgpu.wgmma(acc, stored, b)
            return acc[...]

        return pl.run_scoped(scope, ACC)

    a, b = normal(TILE, TILE), normal(TILE, TILE, seed=1)
    run = functools.partial(one_warpgroup, use, scratch=[smem(TILE, TILE)])
    if commit:
        close(interpret(run, a, b), 2 * product(a, b))
    else:
        with pytest.raises(RaceError, match="read of"):
            interpret(run, a, b)


@pytest.mark.parametrize(("wait", "is_race"), [(0, False), (1, True)])
def test_wgmma_ends_where_it_is_waited_for(wait, is_race):
    def use(tiles):
        a, b = tiles

        def scope(acc):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma(acc, b, b)
            plgpu.wgmma_wait(wait)
            b[...] = jnp.zeros((TILE, TILE), b.dtype)
            return acc[...]

        return pl.run_scoped(scope, ACC)

    a, b = normal(TILE, TILE), normal(TILE, TILE, seed=1)
    if is_race:
        with pytest.raises(RaceError, match="write of"):
            interpret(functools.partial(one_warpgroup, use), a, b)
    else:
        close(interpret(functools.partial(one_warpgroup, use), a, b), product(a, b) + product(b, b))


@pytest.mark.parametrize("how", ["copy", "atomic"])
def test_reductions_of_several_blocks(how):
    """Also with a predicate: the fourth block adds nothing."""

    def body(total_gmem, total_again, smem_ref):
        del total_again
        block = lax.axis_index("block")
        value = plgpu.layout_cast(jnp.ones((TILE, TILE), jnp.float32), plgpu.Layout.WGMMA)
        value = value * (block + 1).astype(jnp.float32)
        if how == "atomic":

            @pl.when(block < 3)
            def _():
                plgpu.atomic_add(total_gmem, value)

            return
        smem_ref[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem_ref, total_gmem, reduction_op="add", predicate=block < 3)
        plgpu.wait_smem_to_gmem(0)

    def f():
        total = jax.new_ref(jnp.ones((TILE, TILE), jnp.float32))
        scratch = [plgpu.SMEM((TILE, TILE), jnp.float32)]
        kernel(body, (8,), grid=(4,), grid_names=("block",), scratch_types=scratch)(total)
        return total[...]

    np.testing.assert_array_equal(interpret(f), np.full((TILE, TILE), 1.0 + 1 + 2 + 3))


@pytest.mark.parametrize(("head_dim", "out_dim"), [(128, 64), (72, 40)])
def test_union_and_tma_of_four_axes_past_the_ends(head_dim, out_dim):
    """q @ k^T of (B, T, N, H): loaded by columns into the untiled member, multiplied from the tiled one."""
    batch, t, heads, chunks = 2, 130, 3, pl.cdiv(head_dim, TILE)
    q, k = normal(batch, t, heads, head_dim), normal(batch, 50, heads, head_dim, seed=1)

    def body(q_gmem, k_gmem, out_gmem, q_union, k_union, out_smem, barrier):
        (q_loaded, q_tiled), (k_loaded, k_tiled) = q_union, k_union
        b, head, block = (lax.axis_index(name) for name in ("b", "head", "block"))
        zero = block * 0  # a slice that is known to leave its axis is refused when it is traced
        rows = pl.ds(block * TILE, TILE)
        for chunk in range(chunks):
            columns = pl.ds(zero + chunk * TILE, TILE)
            plgpu.copy_gmem_to_smem(q_gmem.at[b, rows, head, columns], q_loaded.at[chunk], barrier)
            plgpu.copy_gmem_to_smem(k_gmem.at[b, pl.ds(zero, TILE), head, columns], k_loaded.at[chunk], barrier)
        plgpu.barrier_wait(barrier)

        def scope(acc):
            for chunk in range(chunks):
                plgpu.wgmma(acc, q_tiled.at[chunk], k_tiled.at[chunk].T)
            return acc[...]

        out_smem[...] = pl.run_scoped(scope, ACC).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[b, rows, head, pl.ds(zero, TILE)])
        plgpu.wait_smem_to_gmem(0)

    loaded = plgpu.SMEM((chunks, TILE, TILE), jnp.bfloat16, transforms=(SWIZZLE,))
    union = plgpu.RefUnion(loaded, smem(chunks, TILE, TILE))
    run = kernel(
        body,
        (batch, t, heads, out_dim),
        jnp.bfloat16,
        grid=(batch, heads, pl.cdiv(t, TILE)),
        grid_names=("b", "head", "block"),
        scratch_types=[
            union,
            union,
            plgpu.SMEM((TILE, TILE), jnp.bfloat16, transforms=(SWIZZLE,)),
            plgpu.Barrier(num_arrivals=2 * chunks),
        ],
    )
    k_rows = np.zeros((batch, TILE, heads, head_dim))
    k_rows[:, :50] = k
    wanted = np.einsum("btnh,bsnh->btns", np.asarray(q, np.float64), k_rows)[..., :out_dim]
    close(interpret(run, q, k), wanted)
    jax.jit(run).trace(q, k).lower(lowering_platforms=("cuda",))


def test_members_of_a_union_that_differ_stay_apart():
    """Half of the rows, tiled, is other bytes than the untiled whole: reading it is the error that JAX makes of it."""

    def body(in_gmem, out_gmem, union, barrier):
        whole, half = union
        plgpu.copy_gmem_to_smem(in_gmem, whole, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(half, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    union = plgpu.RefUnion(plgpu.SMEM((128, TILE), jnp.bfloat16), plgpu.SMEM((TILE, TILE), jnp.bfloat16))
    run = kernel(body, (TILE, TILE), jnp.bfloat16, scratch_types=[union, plgpu.Barrier()])
    with pytest.raises(FOUND, match="last written through alias group 0"):
        interpret(run, normal(128, TILE))


def copy_of_a_row(rows, *, start, size=TILE):
    def body(in_gmem, out_gmem, smem_ref, barrier):
        at = lax.axis_index("block") + start
        plgpu.copy_gmem_to_smem(in_gmem.at[0, pl.ds(at, size)], smem_ref, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem_ref, out_gmem.at[pl.ds(at - start, size)])
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((size,), jnp.float32), plgpu.Barrier()]
    return kernel(body, (size,), grid=(1,), grid_names=("block",), scratch_types=scratch)(rows)


def test_a_load_past_the_end_of_a_row_reads_the_next_row():
    rows = jnp.arange(2 * 96, dtype=jnp.float32).reshape(2, 96)
    loaded = interpret(functools.partial(copy_of_a_row, start=64), rows)
    np.testing.assert_array_equal(loaded, np.arange(64, 128))


def test_a_store_past_the_end_of_a_row_is_an_error():
    def body(out_gmem, smem_ref):
        smem_ref[...] = jnp.zeros((TILE,), jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem_ref, out_gmem.at[0, pl.ds(lax.axis_index("block") * TILE, TILE)])
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((TILE,), jnp.float32)]
    run = kernel(body, (2, 96), grid=(2,), grid_names=("block",), scratch_types=scratch)
    with pytest.raises(FOUND, match="one run of bytes"):
        interpret(run)


def test_without_race_detection_numbers_are_the_same():
    a, b = normal(2 * TILE, 128), normal(128, TILE, seed=1)
    with interpreted(detect_races=False):
        found = jax.block_until_ready(jax.jit(pipelined_matmul)(a, b))
    close(found, product(a, b))


DEADLOCK = """
import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpreter import interpret

def body(out_gmem, barrier):
    plgpu.barrier_wait(barrier)  # for which nobody arrives

out_type = jax.ShapeDtypeStruct((8,), "float32")
interpret(plgpu.kernel(body, out_type=out_type, scratch_types=[plgpu.Barrier()]), timeout_s=4)
"""


def test_a_deadlock_ends_the_process_with_its_stacks():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", DEADLOCK], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout (0:00:04)!" in done.stderr
    assert "in wait" in done.stderr
