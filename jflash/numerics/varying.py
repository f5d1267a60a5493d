"""Over which axes of a mesh an array varies: inside `jax.shard_map` that is part of its type, and types must agree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import ManualAxisType


def like(tree: Any, operands: Any) -> Any:
    """Every array of `tree`, varying over each axis that an array of `operands` varies over.

    The start of a scan's carry needs the type that the body gives it. Outside `jax.shard_map` it is `tree` itself.
    """
    varying = _varying(operands)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(varying - _varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def result_struct(shape: tuple[int, ...], dtype: Any, operands: Any) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result, varying over each axis that an array of `operands` varies over."""
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype), manual_axis_type=ManualAxisType(varying=_varying(operands)))


def sum_to(cotangent: jax.Array, operand: jax.Array) -> jax.Array:
    """The cotangent of an operand that is the same on all devices along some axes: the sum of theirs."""
    extra = tuple(_varying(cotangent) - _varying(operand))
    return jax.lax.psum(cotangent, extra) if extra else cotangent


def _varying(tree: Any) -> frozenset[str]:
    types = (jax.typeof(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree))
    return frozenset().union(*(of_leaf.manual_axis_type.varying for of_leaf in types))
