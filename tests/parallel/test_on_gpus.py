"""The Hopper kernels over all GPUs that are there: each computes its batch rows or heads, and nothing is gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash.masks import Causal, Segments

B, T, N, K, H = 4, 700, 8, 4, 64


def operands():
    keys = jax.random.split(jax.random.key(3), 4)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))


def results(q, k, v, d_out, ids):
    """out, dq, dk, dv; deterministic, so that equal bits are wanted."""
    attention = functools.partial(
        jflash.flash_attention, mask=Causal() & Segments(ids), deterministic=True, backend="mosaic_gpu"
    )
    out, pull = jax.vjp(attention, q, k, v)
    return out, *pull(d_out)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P("devices"), P(None, None, "devices")], ids=["batch", "heads"])
def test_the_bits_of_one_device(spec, kind):
    devices = jax.devices("gpu")
    mesh = jax.make_mesh((len(devices),), ("devices",), devices=devices, axis_types=(kind,))
    ids = jnp.asarray(np.sort(np.random.default_rng(4).integers(0, 5, (B, T)), 1))
    own = *operands(), ids
    wanted = jax.jit(results)(*own)
    with jax.set_mesh(mesh):
        placements = *(NamedSharding(mesh, spec),) * 4, NamedSharding(mesh, P(*spec[:1]))
        placed = jax.device_put(own, placements)
        run = jax.jit(results).lower(*placed).compile()
        found = run(*placed)
    assert not [name for name in ("all-gather", "all-reduce", "all-to-all") if name in run.as_text()]
    for name, one, many in zip(("out", "dq", "dk", "dv"), wanted, found):
        assert many.sharding.is_equivalent_to(placements[0], many.ndim), name
        np.testing.assert_array_equal(np.asarray(one), np.asarray(many), err_msg=name)


@pytest.mark.gpu
def test_shard_map_over_batch_rows():
    devices = jax.devices("gpu")
    mesh = jax.make_mesh((len(devices),), ("devices",), devices=devices, axis_types=(AxisType.Auto,))
    ids = jnp.zeros((B, T), jnp.int32)
    own = *operands(), ids
    split = jax.shard_map(results, mesh=mesh, in_specs=(P("devices"),) * 5, out_specs=(P("devices"),) * 4)
    for name, one, many in zip(("out", "dq", "dk", "dv"), jax.jit(results)(*own), jax.jit(split)(*own)):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(many), err_msg=name)
