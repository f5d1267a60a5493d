"""tools/sass: what it reads out of a listing, and what it says of kernels that compile, spill, or do not compile."""

import functools
import os
import stat

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tools.sass import Config, SassError, compile_lowered
from tools.sass.report import instructions_of, order_of
from tools.sass.toolchain import find, install

TILE = 128

LISTING = """
        .headerflags    @"EF_CUDA_SM90"
.L_x_7:
        /*09a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR48+0x29060], R6 ;
        /*0a00*/              @!P1 BRA `(.L_x_7) ;
        /*0a10*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8].reuse, R24, !UPT ;
        /*0a20*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0a30*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR12].tnspB, R88, gsb0 ;
        /*0a40*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0a50*/                   FMNMX R5, R24, R25, !PT ;
        /*0a60*/                   MUFU.EX2 R6, R5 ;
        /*0a70*/                   STL [R1+0x4], R6 ;
        /*0a80*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0a90*/                   F2FP.BF16.F32.PACK_AB R4, R5, R6 ;
        /*0aa0*/                   BAR.SYNC.DEFER_BLOCKING R0, 0x100 ;
"""


def test_order_of_a_listing():
    lines = instructions_of(LISTING)
    assert len(lines) == 12
    assert order_of(lines) == "mbar mma x2 mma.T wait1 exp x2 spill wait0 cvt bar"


def test_install_without_a_c_compiler_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SassError, match="no `cc` on the path"):
        install(tmp_path / "sass")


def test_a_missing_compiler_is_an_error(tmp_path):
    with pytest.raises(SassError, match=r"make sass-tools.*ptxas"):
        find(tmp_path)


def lower(function, *shapes, dtype=jnp.bfloat16):
    arguments = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return Config(name="", function=function, arguments=arguments).lower()


def matmul(a, b, *, registers=232, hold=0):
    """One warpgroup; with `hold` it keeps about half as many products in registers, 64 of each thread for each."""

    def body(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, barrier):
        plgpu.set_max_registers(registers, action="increase")
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        products = [pl.run_scoped(multiply, plgpu.ACC((64, TILE), jnp.float32)) for _ in range(1 + hold)]
        # The first is needed with the last.
        out_smem[...] = functools.reduce(jnp.add, map(jnp.multiply, products, reversed(products)))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, TILE), jnp.float32),
        scratch_types=[
            plgpu.SMEM((64, TILE), jnp.bfloat16, transforms=transforms),
            plgpu.SMEM((TILE, TILE), jnp.bfloat16, transforms=transforms),
            plgpu.SMEM((64, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        kernel_name="matmul",
    )(a, b)


SHAPES = (64, TILE), (TILE, TILE)


@pytest.mark.sass
def test_a_kernel_that_compiles():
    (kernel,) = compile_lowered(lower(matmul, *SHAPES))
    assert kernel.name == "matmul"
    assert 64 <= kernel.registers <= 128
    assert kernel.spill_bytes == 0
    assert not kernel.warnings
    # The three arrays take 80 KiB; Mosaic GPU adds the barrier and what alignment needs.
    assert 80 * 1024 < kernel.dynamic_smem_bytes < 84 * 1024
    assert "mma.T x8" in kernel.order
    assert kernel.instructions == len(instructions_of(kernel.sass)) > 100
    assert "sm_90a" in kernel.ptx
    assert not Config(name="", function=matmul, arguments=()).faults(kernel)


@pytest.mark.sass
def test_a_kernel_that_spills():
    (kernel,) = compile_lowered(lower(functools.partial(matmul, hold=6), *SHAPES))
    assert min(kernel.spill_store_bytes, kernel.spill_load_bytes) > 0
    assert "spill" in kernel.order
    faults = Config(name="", function=matmul, arguments=()).faults(kernel)
    assert str(kernel.spill_store_bytes) in faults[0]
    # wgmma cannot run on while its registers are spilled.
    assert any("C7512" in fault for fault in faults[1:]), kernel.warnings


@pytest.mark.sass
def test_a_kernel_that_does_not_compile():
    """ptxas refuses more registers than there are; lowering does not."""
    with pytest.raises(SassError, match=r"matmul does not compile for compute capability 90(.|\n)*setmaxnreg"):
        compile_lowered(lower(functools.partial(matmul, registers=264), *SHAPES))


@pytest.mark.sass
def test_several_kernels_keep_their_order():
    kernels = compile_lowered(lower(lambda a, b: (matmul(a, b), matmul(a, b, hold=1)), *SHAPES))
    assert kernels[0].registers < kernels[1].registers


@pytest.mark.sass
def test_a_kernel_without_shared_memory():
    def body(out_gmem):
        out_gmem[...] = jnp.zeros((128,), jnp.float32)

    (kernel,) = compile_lowered(lower(plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))))
    assert kernel.instructions > 0
    assert kernel.dynamic_smem_bytes < 1024


@pytest.mark.sass
def test_a_function_without_kernels():
    with pytest.raises(SassError, match="no Mosaic GPU kernel"):
        compile_lowered(lower(jnp.sin, (8,)))


@pytest.mark.sass
def test_only_the_installed_ptxas_compiles(tmp_path, monkeypatch):
    """XLA takes one on PATH before one that came with a wheel."""
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(other.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (kernel,) = compile_lowered(lower(matmul, *SHAPES))
    assert kernel.registers
