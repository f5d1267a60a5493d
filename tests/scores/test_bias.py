"""A bias beside a kernel: which sums its cotangent takes part in, of batch rows, heads, mapped calls and devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_backend
from cotangents import MASK, B, N, S, T, assert_all_close, draw, operands
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jflash import flash_attention

pytestmark = pytest.mark.usefixtures("toy")

SHAPES = [(B, N, T, S), (1, N, T, S), (B, 1, T, S), (1, 1, T, S), (1, N, 1, S), (B, 1, 1, S), (1, N, 1, 1)]
SHAPES += [(1, 1, T, 1)]


def run(q, k, v, d_out, bias, *, backend):
    """Out and all cotangents."""

    def call(q, k, v, bias):
        return flash_attention(q, k, v, mask=MASK, bias=bias, softcap=4.0, backend=backend)

    out, pull = jax.vjp(call, q, k, v, bias)
    return out, *pull(d_out)


@pytest.mark.parametrize(
    "shape, dtype",
    [*((shape, np.float32) for shape in SHAPES), ((1, N, T, S), jnp.bfloat16), (SHAPES[5], jnp.bfloat16)],
)
def test_cotangents(shape, dtype):
    arguments = *operands(), draw(*shape, seed=5, dtype=dtype)
    found, wanted = (run(*arguments, backend=backend) for backend in ("toy", "reference"))
    if dtype == jnp.bfloat16:  # The same sums in another order may be rounded to neighbours.
        np.testing.assert_allclose(
            np.asarray(found[-1], np.float32), np.asarray(wanted[-1], np.float32), rtol=2**-7, atol=2**-9
        )
        found, wanted = found[:-1], wanted[:-1]
    assert_all_close(found, wanted)


@pytest.mark.parametrize(
    "shape, is_mapped", [((B, N, T, S), True), ((1, N, T, S), True), ((1, N, T, S), False), ((B, 1, 1, S), False)]
)
def test_each_mapped_call_has_its_own_cotangent(shape, is_mapped):
    """Twice mapped: the sum over the batch rows of a call must not reach into the next."""
    arguments = operands(2, 3)
    bias = draw(*((2, 3) * is_mapped), *shape, seed=5)

    def mapped(backend):
        axes = (0, 0, 0, 0, 0 if is_mapped else None)
        return jax.vmap(jax.vmap(functools.partial(run, backend=backend), axes), axes)(*arguments, bias)

    assert_all_close(mapped("toy"), mapped("reference"))


@pytest.mark.parametrize(
    "shape, kind",
    [
        *((shape, AxisType.Auto) for shape in (*SHAPES[1:5], *SHAPES[6:])),
        *((SHAPES[i], AxisType.Explicit) for i in (1, 3)),
    ],
)
def test_devices_that_share_a_bias_add_up_its_cotangent(shape, kind):
    arguments = *operands(), draw(*shape, seed=5)
    wanted = run(*arguments, backend="reference")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    heads = NamedSharding(mesh, P("data", None, "model", None))
    with jax.set_mesh(mesh):
        *placed, bias = arguments
        placed = [jax.device_put(x, heads) for x in placed]
        found = jax.jit(functools.partial(run, backend="toy"))(*placed, bias)
    assert_all_close(found, wanted)


def test_no_cotangent_is_computed_where_nobody_asks(monkeypatch):
    """The shape of a result of the backward kernel tells: there is one of all pairs, or none."""
    results = []
    call = toy_backend._call

    def seen(name, kernel, problem, operands, extra, extra_axes, shapes):
        results.append([axes for _, axes in shapes])
        return call(name, kernel, problem, operands, extra, extra_axes, shapes)

    monkeypatch.setattr(toy_backend, "_call", seen)
    q, k, v, _ = operands()
    bias = draw(1, N, T, S, seed=5)
    for argnums, is_asked in (((0, 1, 2), False), ((3,), True)):
        results.clear()
        jax.grad(lambda *x: flash_attention(*x[:3], bias=x[3], backend="toy").sum(), argnums)(q, k, v, bias)
        assert any("BNTS" in axes for axes in results) == is_asked
