"""A workload as a backend's functions see it, below the public calls: for tests and tools of kernels alone."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jflash.backends.protocol import Operands
from jflash.masks import Mask
from jflash.masks.mask import MaskStructure
from jflash.numerics.online_softmax import Attended
from jflash.numerics.precision import compute_dtype
from jflash.problem import Problem, terms_of
from jflash.scores import ScoreTerms, StreamedDropout, dropout_of, per_head, score_functions
from jflash.testing.workloads import DROPOUT_KEY, Workload


def pose(workload: Workload, *, deterministic: bool = False) -> tuple[Problem, Mask]:
    """The problem of a workload, and its mask after `bind`."""
    w = workload
    mask = w.mask.bind(B=w.B, N=w.N, T=w.T, S=w.S)
    terms = terms_with(w, mask, {})
    problem = Problem(
        B=w.B, T=w.T, S=w.S, N=w.N, K=w.K, H=w.H, Hv=w.Hv, dtype=np.dtype(w.dtype), scale=w.H**-0.5,
        softcap=w.softcap, mask=MaskStructure.of(mask), deterministic=deterministic, lse=True, **terms_of(terms),
    )  # fmt: skip
    return problem, mask


def terms_with(workload: Workload, mask: Mask, learned: Mapping[str, Any]) -> ScoreTerms:
    """The terms of a workload, with arrays of these names, as in `Inputs.learned`, or shapes in place of them."""
    w = workload
    heads = {"B": w.B, "N": w.N, "dtype": compute_dtype(np.dtype(w.dtype))}

    def described(name: str, shape: tuple[int, ...] | None, dtype: str = "float32") -> Any:
        return learned.get(name, None if shape is None else jax.ShapeDtypeStruct(shape, dtype))

    slopes, sinks = described("alibi_slopes", w.alibi_slopes), described("sinks", w.sinks)
    args = tuple(learned.get(f"score_arg_{i}", arg) for i, arg in enumerate(w.score_args))
    return ScoreTerms(
        bias=described("bias", w.bias, w.bias_dtype),
        functions=score_functions(slopes, mask, w.score_fn, args, **heads),
        sinks=None if sinks is None else per_head("sinks", sinks, **heads),
        dropout=dropout_of(w.dropout_rate, DROPOUT_KEY, B=w.B, N=w.N),
    )


def operand_shapes(problem: Problem) -> Operands:
    """Shapes and dtypes of the operands, for tracing without numbers."""
    p = problem

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, p.dtype)

    bias, sinks = (None if described is None else jax.ShapeDtypeStruct(*described) for described in (p.bias, p.sinks))
    words = (jax.ShapeDtypeStruct(shape, np.uint32) for shape in ((p.B, p.N, p.T), (p.B, p.N, p.T), (1, p.S)))
    dropout = StreamedDropout(p.dropout_rate, *words) if p.dropout_rate else None
    terms = ScoreTerms(bias, () if p.functions is None else p.functions.value, sinks, dropout)
    q, k, v = array(p.B, p.T, p.N, p.H), array(p.B, p.S, p.K, p.H), array(p.B, p.S, p.K, p.Hv)
    return Operands(q, k, v, terms, p.mask.mask)


def backward_shapes(problem: Problem) -> tuple[Attended, Attended]:
    """Shapes and dtypes of what `backward` takes after the operands, without a cotangent of lse."""
    shape, lse = (problem.B, problem.T, problem.N, problem.Hv), (problem.B, problem.N, problem.T)
    attended = Attended(jax.ShapeDtypeStruct(shape, problem.out_dtype), jax.ShapeDtypeStruct(lse, np.float32))
    return attended, Attended(jax.ShapeDtypeStruct(shape, problem.dtype), None)
