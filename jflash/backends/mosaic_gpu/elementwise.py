"""Functions of the caller's inside a kernel: traced on scalars, then evaluated on tiles, operation by operation."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from jflash.backends.mosaic_gpu.primitives import LOG2_E

# What Mosaic GPU compiles elementwise (JAX 0.11.2) at full precision; its sine and cosine are only right near 0. What
# it lacks, or has at less precision, stands in `_replaced`.
_KNOWN = frozenset(
    "abs add add_any and clamp convert_element_type div eq exp exp2 ge gt integer_pow le log logistic lt max min "
    "mul ne neg not one_minus_square or rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sqrt square sub tanh xor".split()
)
# Functions within the function, and the parameter that holds each.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
_NO_MESH = jax.sharding.AbstractMesh((), ())
_DTYPES = frozenset(np.dtype(dtype) for dtype in (np.bool_, np.int32, np.uint32, np.float32))


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """A function of scalars, to be called with tiles and scalars that broadcast against each other."""

    jaxpr: ClosedJaxpr

    @classmethod
    def of(cls, function: Callable[..., Any], dtypes: Sequence[np.dtype]) -> "Elementwise":
        """The function of arguments of these dtypes; its result is a scalar or a tuple of scalars."""
        return cls(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes)))

    @property
    def refusal(self) -> str | None:
        """Why a kernel cannot compile it, or None."""
        return _refusal(self.jaxpr)

    def depends(self, results: Sequence[int], arguments: Sequence[int]) -> bool:
        """Whether some of these results may be made of some of these arguments, by their numbers."""
        jaxpr = self.jaxpr.jaxpr
        needed = {jaxpr.outvars[i] for i in results if not isinstance(jaxpr.outvars[i], Literal)}
        for equation in reversed(jaxpr.eqns):
            if not needed.isdisjoint(equation.outvars):
                needed |= {var for var in equation.invars if not isinstance(var, Literal)}
        return not needed.isdisjoint(jaxpr.invars[i] for i in arguments)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        return tuple(_evaluate(self.jaxpr, arguments))


def _refusal(jaxpr: ClosedJaxpr) -> str | None:
    for equation in jaxpr.jaxpr.eqns:
        name = equation.primitive.name
        if name in _CALLS:
            inner = _refusal(_closed(equation.params[_CALLS[name]]))
            if inner is not None:
                return inner
            continue
        if name not in _KNOWN and not _is_copy(equation):
            return f"no kernel compiles the operation {name}"
        for var in (*equation.invars, *equation.outvars):
            if np.dtype(var.aval.dtype) not in _DTYPES:
                return f"no kernel compiles the operation {name} on {var.aval.dtype}"
    return None


def _closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def _evaluate(jaxpr: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    constants = map(np.asarray, jaxpr.consts)
    values = dict(zip((*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars), (*constants, *arguments)))

    def value_of(var: Any) -> Any:
        return np.asarray(var.val, var.aval.dtype) if isinstance(var, Literal) else values[var]

    for equation in jaxpr.jaxpr.eqns:
        found = _apply(equation, [value_of(var) for var in equation.invars])
        values |= zip(equation.outvars, found)
    return [value_of(var) for var in jaxpr.jaxpr.outvars]


def _apply(equation: Any, arguments: list[Any]) -> list[Any]:
    name, parameters = equation.primitive.name, equation.params
    if name in _CALLS:
        return _evaluate(_closed(parameters[_CALLS[name]]), arguments)
    if all(isinstance(x, np.ndarray | np.generic) for x in arguments):
        # Constants of a kernel must be part of its code, and an array of JAX is none. Nor can JAX give one inside of
        # `jax.shard_map` that is on no mesh (0.11.2 and 0.12.0: "assert not hlo_sharding.is_manual()").
        with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(_NO_MESH):
            return [np.asarray(equation.primitive.bind(*map(jnp.asarray, arguments), **parameters))]
    if name == "div" and isinstance(arguments[1], np.ndarray) and np.issubdtype(arguments[1].dtype, np.floating):
        # A division by a number takes ten instructions, a product one.
        return [arguments[0] * np.float32(1 / arguments[1])]
    shape = jnp.broadcast_shapes(*map(np.shape, arguments))
    arguments = [_broadcast(x, shape) for x in arguments]
    replaced = arguments[0] if _is_copy(equation) else _replaced(name, parameters, *arguments)
    return [equation.primitive.bind(*arguments, **parameters) if replaced is None else replaced]


def _is_copy(equation: Any) -> bool:
    # Inside of `jax.shard_map` JAX sums cotangents of scalars over no axes (0.11.2).
    name, parameters = equation.primitive.name, equation.params
    return name in ("copy", "stop_gradient") or (name == "reduce_sum" and not parameters["axes"])


def _replaced(name: str, parameters: dict[str, Any], x: Any, *rest: Any) -> Any | None:
    """The result of an operation that is computed by others, or None."""
    is_bool = x.dtype == np.bool_
    if name == "tanh":
        return _tanh(x)
    if name == "logistic":
        r = lax.rsqrt(1 + jnp.exp2(x * np.float32(-LOG2_E)))
        return r * r
    if name == "add_any":
        return x + rest[0]
    if name == "integer_pow" and parameters["y"] < 0:
        return 1 / lax.integer_pow(x, -parameters["y"])
    if name == "not" and is_bool:
        return x ^ lax.full(x.shape, True, np.bool_)
    if name == "convert_element_type" and parameters["new_dtype"] == np.bool_:
        return x if is_bool else x != 0
    return None


def _broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(x, np.ndarray | np.generic):
        return lax.full(shape, x[()], x.dtype)
    return x if x.shape == shape else lax.broadcast_in_dim(x, shape, ())


def _tanh(x: Any) -> Any:
    """1 - 2 / (1 + exp(2x)), within 2^-22: the hardware's own is 2^-11 off, which at a softcap of 30 is 0.015.

    The division is a square of 1 / sqrt, which is one instruction.
    """
    r = lax.rsqrt(1 + jnp.exp2(x * np.float32(2 * LOG2_E)))
    return 1 - 2 * r * r


@functools.lru_cache(maxsize=256)
def value_and_derivatives(function: Callable[..., Any], dtypes: tuple[np.dtype, ...]) -> Elementwise:
    """The function to (value, its derivative by each floating argument)."""

    def run(*arguments: Any) -> tuple[Any, ...]:
        is_float = [jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes]

        def of_floats(*floats: Any) -> Any:
            rest = iter(floats)
            return function(*(next(rest) if own else x for own, x in zip(is_float, arguments)))

        value, pull = jax.vjp(of_floats, *(x for own, x in zip(is_float, arguments) if own))
        return value, *pull(jnp.ones((), value.dtype))

    return Elementwise.of(run, dtypes)
