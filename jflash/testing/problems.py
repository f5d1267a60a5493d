"""A workload as a backend's functions see it, below the public calls: for tests and tools of kernels alone."""

import jax
import numpy as np

from jflash.backends.protocol import Operands
from jflash.masks import Mask
from jflash.masks.mask import MaskStructure
from jflash.problem import Problem
from jflash.testing.workloads import Workload


def pose(workload: Workload, *, deterministic: bool = False) -> tuple[Problem, Mask]:
    """The problem of a workload, and its mask after `bind`."""
    w = workload
    mask = w.mask.bind(B=w.B, N=w.N, T=w.T, S=w.S)
    bias = None if w.bias is None else (w.bias, np.dtype(w.bias_dtype))
    problem = Problem(
        B=w.B, T=w.T, S=w.S, N=w.N, K=w.K, H=w.H, Hv=w.Hv, dtype=np.dtype(w.dtype), scale=w.H**-0.5,
        softcap=w.softcap, mask=MaskStructure.of(mask), bias=bias, deterministic=deterministic, lse=True,
    )  # fmt: skip
    return problem, mask


def operand_shapes(problem: Problem) -> Operands:
    """Shapes and dtypes of the operands, for tracing without numbers."""
    p = problem

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, p.dtype)

    bias = None if p.bias is None else jax.ShapeDtypeStruct(*p.bias)
    return Operands(array(p.B, p.T, p.N, p.H), array(p.B, p.S, p.K, p.H), array(p.B, p.S, p.K, p.Hv), bias, p.mask.mask)


def backward_shapes(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of what `backward` takes after the operands: lse, d_out, delta."""
    p = problem
    row = jax.ShapeDtypeStruct((p.B, p.N, p.T), np.float32)
    return row, jax.ShapeDtypeStruct((p.B, p.T, p.N, p.Hv), p.dtype), row
