"""Which dtype and which precision the portable backends compute in (cases B97, B98)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import flash_attention
from jflash.numerics.precision import compute_dtype, matmul_precision


def test_nothing_is_narrowed():
    wanted = {"bfloat16": "float32", "float16": "float32", "float32": "float32", "float64": "float64"}
    assert {name: compute_dtype(np.dtype(jnp.dtype(name))).name for name in wanted} == wanted


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_float32_is_multiplied_at_highest_unless_told_otherwise(backend):
    """Read off the program that goes to the compiler, since a CPU computes float32 exactly at any setting."""
    shape = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)

    def program(dtype="float32"):
        shapes = [jax.ShapeDtypeStruct(shape.shape, dtype)] * 3
        loss = lambda q, k, v: flash_attention(q, k, v, backend=backend).astype(jnp.float32).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).as_text()

    text = program()
    assert text.count("dot_general") == text.count("precision = [HIGHEST, HIGHEST]") > 4
    assert "HIGHEST" not in program("bfloat16")
    with jax.default_matmul_precision("tensorfloat32"):
        assert matmul_precision(np.dtype("float32")) is None
        assert "HIGHEST, HIGHEST" not in program()
