"""In which dtype and at which precision the portable backends compute."""

import jax
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
