"""In which dtype and at which precision the portable backends compute."""

import jax
import jax.numpy as jnp
import numpy as np


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of logits, softmax and accumulators: float64 for float64 inputs, otherwise float32.

    lse has this dtype too.
    """
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def matmul_precision(dtype: np.dtype) -> jax.lax.Precision | None:
    """The precision of matmuls on operands of this input dtype, held in `compute_dtype(dtype)`.

    float32 and float64 inputs are computed at HIGHEST, since JAX's default for float32 is TF32 on GPUs and bfloat16 on
    TPUs, unless `jax.default_matmul_precision` says otherwise. 16-bit inputs are exact in TF32, so the default serves.
    """
    if dtype.itemsize >= 4 and jax.config.jax_default_matmul_precision is None:
        return jax.lax.Precision.HIGHEST
    return None


def like(x: jax.Array, *operands: jax.Array) -> jax.Array:
    """`x`, varying over every mesh axis that one of the operands varies over.

    Inside `jax.shard_map` the start of a scan's carry needs the type that the body gives it; outside this is `x` itself.
    """
    varying = frozenset().union(*(_varying(operand) for operand in operands))
    missing = tuple(varying - _varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def tree_like(tree, operands):
    """`like` for every array of a pytree, with all arrays of another pytree as operands."""
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(operands)]
    return jax.tree.map(lambda x: like(x, *arrays), tree)


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
