"""Functions of the caller's inside the Hopper kernels: what they are on tiles, and that CUDA code is made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash.backends.mosaic_gpu.elementwise import Elementwise, value_and_derivatives

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int32)

FUNCTIONS = {
    "abs": lambda s, b, n, q, k: abs(s),
    "clamp": lambda s, b, n, q, k: lax.clamp(-1.0, s, 1.0),
    "compare": lambda s, b, n, q, k: jnp.where((s >= 0.1) | (s < -1), s, s * 2),
    "copy": lambda s, b, n, q, k: jnp.array(s, copy=True),
    "divide": lambda s, b, n, q, k: s / (1 + abs(s)),
    "divide_by_a_number": lambda s, b, n, q, k: s / 3,
    "exp": lambda s, b, n, q, k: jnp.exp(s) + jnp.exp2(s),
    "floor_divide": lambda s, b, n, q, k: jnp.where(q // 7 == k // 7, s, 0),
    "int_to_bool": lambda s, b, n, q, k: jnp.where((q - k).astype(bool), s, 0),
    "log": lambda s, b, n, q, k: jnp.log(1 + s * s),
    "logic": lambda s, b, n, q, k: jnp.where(((q > k) | (q == 3)) & (k != 2) ^ (q <= 9), s, 0),
    "max": lambda s, b, n, q, k: jnp.maximum(s, 0.1) - jnp.minimum(q, k).astype(s.dtype),
    "mod": lambda s, b, n, q, k: jnp.where((q - k) % 5 == 0, s, 0),
    "not": lambda s, b, n, q, k: jnp.where(~(q > k), s, 0),
    "power": lambda s, b, n, q, k: s**3 - s**-2,
    "relu": lambda s, b, n, q, k: jax.nn.relu(s),
    "root": lambda s, b, n, q, k: jnp.sqrt(1 + s * s) + lax.rsqrt(1 + s * s),
    "round": lambda s, b, n, q, k: s + jnp.round(lax.stop_gradient(s)),
    "shift": lambda s, b, n, q, k: s + (((q << 2) >> 1).astype(jnp.uint32) >> 1).astype(s.dtype),
    "sigmoid": lambda s, b, n, q, k: jax.nn.sigmoid(s),
    "sign": lambda s, b, n, q, k: s + jnp.sign(s) + jnp.sign(q - k).astype(s.dtype),
    "square": lambda s, b, n, q, k: lax.square(s),
    "tanh": lambda s, b, n, q, k: jnp.tanh(s / 30) + jnp.tanh(s),
    "xor": lambda s, b, n, q, k: s + ((q ^ k) | 1).astype(s.dtype),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_tiles_it_is_the_function(name):
    """Value and derivative; in float32, where tanh and the logistic function are made of others."""
    fn = FUNCTIONS[name]
    s = jnp.asarray(np.random.default_rng(0).standard_normal((20, 30)) * 3, FLOAT)
    q, k = (jnp.broadcast_to(x, s.shape) for x in np.ix_(np.arange(20, dtype=INT), np.arange(30, dtype=INT)))

    def of_scalars(s, q, k):
        return fn(s, jnp.int32(0), jnp.int32(1), q, k)

    value, derivative = value_and_derivatives(of_scalars, (FLOAT, INT, INT))(s, q, k)
    wanted, wanted_derivative = jax.jvp(lambda s: of_scalars(s, q, k), (s,), (jnp.ones_like(s),))
    np.testing.assert_allclose(value, wanted, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(derivative, wanted_derivative, rtol=2e-6, atol=2e-6)
    assert value_and_derivatives(of_scalars, (FLOAT, INT, INT)).refusal is None


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_function_traced_first_inside_of_shard_map_is_no_other(kind):
    """JAX sums the cotangents of scalars there, over no axes."""

    def of_scalars(s, q, k):
        return 2 * jnp.tanh(s / 2) * s

    found = []

    def body(x):
        found.append(value_and_derivatives(of_scalars, (FLOAT, INT, INT)))
        return x

    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    value_and_derivatives.cache_clear()
    x = jax.device_put(jnp.ones(4), NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))).trace(x)
    assert found[0].refusal is None
    s = jnp.linspace(-3, 3, 7)
    _, derivative = found[0](s, jnp.zeros(7, INT), jnp.zeros(7, INT))
    wanted = jax.vmap(jax.grad(lambda s: of_scalars(s, 0, 0)))(s)
    np.testing.assert_allclose(derivative, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "name",
    [name if name in ("not", "power") else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS],
)
def test_kernels_with_it_lower(name):
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def attend(q, k, v):
        return jflash.flash_attention(q, k, v, causal=True, score_fn=FUNCTIONS[name], backend="mosaic_gpu")

    with jflash.use_options(hardware="h200"):
        step = jax.jit(lambda q, k, v, d_out: jax.vjp(attend, q, k, v)[1](d_out))
        text = step.trace(x, x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "jflash_backward_sm90" in text


@pytest.mark.parametrize("fn, reason", [(jnp.sin, "operation sin"), (lax.erf, "operation erf")])
def test_what_no_kernel_compiles_is_named(fn, reason):
    assert reason in Elementwise.of(fn, [FLOAT]).refusal


@pytest.mark.parametrize(
    ("fn", "depends"),
    [
        (lambda s, x: s + x, False),
        (lambda s, x: jnp.maximum(s, 1) + 2 * x, False),
        (lambda s, x: s * x, True),
        (lambda s, x: jnp.tanh(s + x), True),
        (lambda s, x: jnp.where(x > 0, s, 2 * s), True),
        (jax.jit(lambda s, x: s * jnp.exp(x)), True),
    ],
    ids=["added", "added_twice", "factor", "softcap", "condition", "jit"],
)
def test_which_derivative_by_the_logit_depends_on_a_value(fn, depends):
    function = value_and_derivatives(fn, (np.dtype(np.float32),) * 2)
    assert function.depends([1], [1]) == depends
    assert function.depends([0], [1])
