"""The xla backend is O(n): temporary memory grows at most linearly, and the compiled program holds no T x S array."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import flash_attention
from jflash.backends.xla import XlaTiles
from jflash.masks import Causal, Full, Segments, SlidingWindow

LENGTHS = (2048, 4096, 8192, 16384)


def compiled(T, mask, dtype="float32", **arguments):
    """Forward and backward at this length, compiled and not run."""
    shape = jax.ShapeDtypeStruct((1, T, 4, 64), dtype)
    key_shape = jax.ShapeDtypeStruct((1, T, 2, 64), dtype)

    def loss(q, k, v, ids):
        masks = mask if ids is None else Segments(ids) & mask
        return (flash_attention(q, k, v, mask=masks, backend="xla", **arguments) ** 2).astype(jnp.float32).sum()

    ids = jax.ShapeDtypeStruct((1, T), jnp.int32) if arguments.pop("with_ids", False) else None
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(shape, key_shape, key_shape, ids).compile()


@pytest.mark.parametrize("with_ids", [False, True], ids=["static", "documents"])
@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(255, 0)], ids=repr)
def test_temporary_memory_is_linear(mask, with_ids):
    temporary = [compiled(T, mask, with_ids=with_ids).memory_analysis().temp_size_in_bytes for T in LENGTHS]
    growth = np.diff(temporary)
    # From one length to the next the growth doubles where it is linear, and quadruples where it is quadratic.
    assert all(later <= 2.2 * earlier for earlier, later in itertools.pairwise(growth)), temporary
    # And it is not linear with a hidden large factor: one float32 matrix of logits at the longest would take this.
    assert temporary[-1] < 4 * LENGTHS[-1] ** 2 / 4, temporary


def array_sizes(text: str) -> dict[str, int]:
    """Number of elements of every array type in the text of a compiled program."""
    found = {match.group(0): match.group(1) for match in re.finditer(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]*)\]", text)}
    return {name: int(np.prod([int(size) for size in sizes.split(",") if size])) for name, sizes in found.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_array_has_a_query_axis_and_a_key_axis(dtype):
    T = LENGTHS[-1]
    sizes = array_sizes(compiled(T, Causal(), dtype).as_text())
    assert sizes, "the program's text holds no array types: the pattern is out of date"
    assert max(sizes.values()) < T * T / 8, max(sizes, key=sizes.get)
    dense = jax.jit(lambda q, k: jnp.einsum("btnh,bsnh->bnts", q, k))
    dense = dense.lower(*[jax.ShapeDtypeStruct((1, 512, 2, 8), dtype)] * 2)
    assert max(array_sizes(dense.compile().as_text()).values()) >= 512 * 512, "the check cannot see a T x S array"


@pytest.mark.parametrize(
    "letters, dtype", [("TS", "float32"), ("NTS", "bfloat16"), ("S", "bfloat16"), ("BT", "float32")]
)
def test_a_bias_gradient_needs_no_array_larger_than_itself(letters, dtype):
    """What the bias is shared by, batch rows, heads, queries or keys, is summed tile by tile."""
    sizes = {"B": 4, "N": 2, "T": 1024, "S": 1024}
    block, H = 128, 16
    bias = jax.ShapeDtypeStruct([size if axis in letters else 1 for axis, size in sizes.items()], dtype)
    q = jax.ShapeDtypeStruct((sizes["B"], sizes["T"], sizes["N"], H), dtype)

    def loss(q, k, v, bias):
        tiles = XlaTiles(block_q=block, block_k=block)
        return flash_attention(q, k, v, bias=bias, backend="xla", tiles=tiles).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, 3)).lower(q, q, q, bias).compile().as_text()
    tile = sizes["B"] * sizes["N"] * block * block
    largest = max(np.prod(bias.shape), np.prod(q.shape), tile)
    assert largest < np.prod(list(sizes.values())) / 3
    found = array_sizes(text)
    assert max(found.values()) <= largest, max(found, key=found.get)


def matmuls(text: str) -> int:
    return len(re.findall(r"= \S+ dot\(", text))


def test_the_backward_pass_recomputes_the_logits_once():
    """2 matmuls forward, 5 backward: the logits again, then dv, dp, dq and dk (FlashAttention-2, algorithm 2)."""
    shape = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.float32)

    def loss(q, k, v):
        return (flash_attention(q, k, v, backend="xla") ** 2).sum()

    forward = jax.jit(loss).lower(shape, shape, shape).compile().as_text()
    both = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile().as_text()
    assert matmuls(forward) == 2
    assert matmuls(both) == 7


def test_a_window_visits_few_tiles():
    """The steps of the loop over keys are those of the window, not those of the length."""
    T = 8192
    shape = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)
    text = jax.jit(lambda *x: flash_attention(*x, window=(511, 0), backend="xla")).lower(shape, shape, shape).as_text()
    # The carried blocks of keys: (visited columns, batch, head, block_k, H).
    assert re.search(r"tensor<2x1x1x512x16xf32>", text)
    jaxpr = str(jax.make_jaxpr(lambda *x: flash_attention(*x, window=(511, 0), backend="xla"))(shape, shape, shape))
    assert "length=2" in jaxpr and "length=16" in jaxpr
