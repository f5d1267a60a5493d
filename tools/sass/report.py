"""What ptxas made of the Mosaic GPU kernels in a lowered function: registers, spills, shared memory, order, SASS."""

import concurrent.futures
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
from jaxlib.mlir import ir

from tools.sass.toolchain import SassError, Toolchain, find

# A kernel takes one to three seconds, nearly all of it outside this process.
WORKERS = 2
# The longest of our studies took 3 s on two busy cores (2026-11-30): past this the compiler hangs.
TIMEOUT_S = 300
# That ptxas serialised wgmma: every wgmma is waited for before the next instruction, and the kernel not worth running.
SERIALISED = ("C7512", "C7513", "C7514")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel as ptxas compiled it.

    Attributes:
        name: of the kernel, as `kernel_name=` gave it.
        registers: how many are used by a thread: the highest in the SASS plus one. To hold against setmaxnreg.
        launch_registers: what each thread has at launch, 65536 by the number of threads; setmaxnreg changes it.
        spill_store_bytes, spill_load_bytes: of the local memory that registers were spilled to.
        dynamic_smem_bytes: shared memory of a launch.
        instructions: how many, in the SASS.
        warnings: what ptxas warned of; C7512 to C7514 say that it serialised wgmma.
        order: tensor-core, wait and softmax instructions in program order, as `mma x8 wait1 exp x136`; see `order_of`.
        sass: as nvdisasm prints it.
        ptx: what ptxas was given.
    """

    name: str
    registers: int
    launch_registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    dynamic_smem_bytes: int
    instructions: int
    warnings: tuple[str, ...]
    order: str
    sass: str = dataclasses.field(repr=False)
    ptx: str = dataclasses.field(repr=False)

    @property
    def spill_bytes(self) -> int:
        return max(self.spill_store_bytes, self.spill_load_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A kernel to compile, and what must hold of it.

    Attributes:
        name: of the config, unique in its list.
        function: what to lower; all Mosaic GPU kernels in it must hold what is asked.
        arguments: shapes and dtypes, as `jax.ShapeDtypeStruct`.
        max_registers: the setmaxnreg of the warpgroups that compute.
        max_spill_bytes: what may spill.
        order: a regular expression that `Compiled.order` must contain, such as the overlap of a loop body, where a
            kernel has matmuls at all.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    max_registers: int = 255
    max_spill_bytes: int = 0
    order: str | None = None

    def lower(self) -> jax.stages.Lowered:
        return jax.jit(self.function).trace(*self.arguments).lower(lowering_platforms=("cuda",))

    def faults(self, kernel: Compiled) -> list[str]:
        """Why the kernel does not hold what is asked: nothing more may spill, no wgmma be serialised."""
        faults = []
        if kernel.spill_bytes > self.max_spill_bytes:
            faults.append(f"spills {kernel.spill_store_bytes} B, loads {kernel.spill_load_bytes} B")
        faults.extend(warning for warning in kernel.warnings if any(code in warning for code in SERIALISED))
        if kernel.registers > self.max_registers:
            faults.append(f"uses {kernel.registers} registers of {self.max_registers}")
        if self.order is not None and "mma" in kernel.order and not re.search(self.order, kernel.order):
            faults.append(f"not in the order {self.order!r}: {kernel.order}")
        return faults


def compile_lowered(
    lowered: jax.stages.Lowered, compute_capability: int = 90, toolchain: Toolchain | None = None
) -> list[Compiled]:
    """Compiles every Mosaic GPU kernel of a function that was lowered for CUDA, without a GPU.

    Args:
        lowered: `jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",))`.
        compute_capability: 90 for Hopper (sm_90a), 100 for Blackwell (sm_100a).
        toolchain: where the compiler is; by default as `find` finds it.

    Returns:
        A record for each kernel, in the order of the calls.

    Raises:
        SassError: the toolchain is absent or out of date, there is no kernel, or one does not compile.
    """
    toolchain = toolchain or find()
    modules = _mosaic_modules(lowered)
    if not modules:
        raise SassError("the lowered function holds no Mosaic GPU kernel: was it lowered for cuda?")
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(lambda module: _compile(module, compute_capability, toolchain), modules))


def _mosaic_modules(lowered: jax.stages.Lowered) -> list[bytes]:
    modules = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target.startswith("mosaic_gpu"):
                config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
                modules.append(ir.StringAttr(config["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    return modules


# Ends without tearing down: the plugin's threads would wait for a driver that there is not.
_CHILD = """
import ctypes, os, sys
compile = ctypes.CDLL(sys.argv[1]).MosaicGpuCompile
compile.restype, compile.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
module = open(sys.argv[2], "rb").read()
os._exit(0 if compile(module, len(module)) else 1)
"""


def _compile(module: bytes, compute_capability: int, toolchain: Toolchain) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="jflash-sass-") as folder:
        source, image = pathlib.Path(folder, "module.bc"), pathlib.Path(folder, "kernel.cubin")
        source.write_bytes(module)
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(toolchain.fake_cuda),
            "TMPDIR": folder,
            "FAKE_CUDA_CC": str(compute_capability),
            "FAKE_CUDA_IMAGE": str(image),
            "MOSAIC_GPU_CUDA_ROOT": str(toolchain.cuda_root),
            "MOSAIC_GPU_RUNTIME_LIB_PATH": str(toolchain.runtime),
            # Not MOSAIC_GPU_DUMP_TO: it also writes 80 MB of passes, and leaves folders in /tmp.
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
        }
        # In this folder, which decides where the compiler finds ptxas: `Toolchain.cuda_root`.
        done = _run([sys.executable, "-c", _CHILD, toolchain.plugin, source], cwd=toolchain.root, env=environment)
        name = match[1] if (match := re.search(r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", done.stdout)) else "a kernel"
        if done.returncode or not image.exists():
            log = "\n".join(line for line in done.stdout.splitlines() if "ptxas" in line)
            raise SassError(
                f"{name} does not compile for compute capability {compute_capability}"
                f" (exit code {done.returncode}):\n{log}\n{done.stderr.strip()[-3000:]}"
            )
        listing = _run([toolchain.cuda_root / "bin/nvdisasm", "-ndf", "-c", image])
        if listing.returncode:
            raise SassError(f"{name}: nvdisasm failed ({listing.returncode}):\n{listing.stderr.strip()}")
        return _parse(name, said=done.stdout, launch=done.stderr, sass=listing.stdout)


def _run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, **options)
    except subprocess.TimeoutExpired as error:
        raise SassError(f"{command[0]} took over {TIMEOUT_S} s") from error


def _parse(name: str, *, said: str, launch: str, sass: str) -> Compiled:
    """`said` is the PTX, then what ptxas prints; `launch` what the fake driver prints."""
    ptx, separator, log = said.partition("\nptxas ")
    log = (separator + log).strip()

    def number(pattern: str, text: str) -> int:
        found = re.findall(pattern, text)
        if len(found) != 1:
            raise SassError(f"{name}: expected one match of {pattern!r} and found {len(found)} in:\n{text.strip()}")
        return int(found[0])

    # Nothing sets it for a kernel without shared memory.
    dynamic_smem_bytes = number(r"dynamic_smem_bytes=(\d+)", launch) if "dynamic_smem_bytes" in launch else 0
    lines = instructions_of(sass)
    registers = [int(number) for line in lines for number in re.findall(r"\bR(\d+)\b", line)]
    return Compiled(
        name=name,
        registers=max(registers, default=-1) + 1,
        launch_registers=number(r"Used (\d+) registers", log),
        spill_store_bytes=number(r"stack frame, (\d+) bytes spill stores", log),
        spill_load_bytes=number(r"stack frame, .* (\d+) bytes spill loads", log),
        dynamic_smem_bytes=dynamic_smem_bytes,
        instructions=len(lines),
        warnings=tuple(line.strip() for line in log.splitlines() if re.search("warning|Performance Loss", line)),
        order=order_of(lines),
        sass=sass,
        ptx=ptx,
    )


def instructions_of(sass: str) -> list[str]:
    """The instructions of a listing, without their addresses."""
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", sass)


# The first that matches names the instruction.
_KINDS = {
    "mma.T": r"[HIQ]GMMA\S*.*tnspB",
    "mma": r"[HIQ]GMMA",
    "wait": r"DEPBAR\.LE gsb0, 0x(\w+)",
    "exp": r"MUFU\.EX2|FMNMX",
    "cvt": r"F2FP",
    "mbar": r"SYNCS\S*TRYWAIT",
    "bar": r"BAR\.(?:SYNC|ARV)",
    "spill": r"\b(?:LDL|STL)\b",
}


def order_of(instructions: list[str]) -> str:
    """The instructions on which overlap depends, in program order, equal ones in a row as one.

    mma: wgmma; mma.T: with a transposed B (P V of the forward); wait1: until at most one group of wgmmas runs; exp:
    MUFU.EX2 and maxima; cvt: conversion to 16 bits; mbar: wait on an mbarrier; bar: named barrier; spill: local memory.
    """
    groups: list[tuple[str, int]] = []
    for instruction in instructions:
        for kind, pattern in _KINDS.items():
            if match := re.search(pattern, instruction):
                kind += match[1] if kind == "wait" else ""
                if groups and groups[-1][0] == kind:
                    groups[-1] = kind, groups[-1][1] + 1
                else:
                    groups.append((kind, 1))
                break
    return " ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in groups)
