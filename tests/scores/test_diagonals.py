"""A number for each diagonal, or query, beside a kernel: which sums its cotangent takes part in, as in test_bias.py."""

import functools

import jax
import jax.numpy as jnp
import pytest
from cotangents import MASK, B, N, S, T, assert_all_close, draw, operands
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jflash import flash_attention

pytestmark = pytest.mark.usefixtures("toy")


def of_all(s, b, n, q, k, table):
    return s + table[q - k + S - 1]


def of_heads(s, b, n, q, k, table):
    return s + jnp.tanh(s) * table[n, abs(q - k) % 5]


def of_rows(s, b, n, q, k, table):
    return s * (1 + table[b, jnp.where(k > q, 1, 0)])


def of_each(s, b, n, q, k, table):
    return s + table[b, n, q - k + S - 1] / (2 + s * s)


def of_queries(s, b, n, q, k, table):
    return s * table[n, q]


# For each the shape of the table.
TABLES = {of_all: (T + S - 1,), of_heads: (N, 5), of_rows: (B, 2), of_each: (B, N, T + S - 1), of_queries: (N, T)}


def run(q, k, v, d_out, table, *, fn, backend, bias=None):
    """Out and all cotangents."""

    def call(q, k, v, table):
        return flash_attention(q, k, v, mask=MASK, bias=bias, score_fn=fn, score_args=(table,), backend=backend)

    out, pull = jax.vjp(call, q, k, v, table)
    return out, *pull(d_out)


def cases(every, fast):
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in every]


@pytest.mark.parametrize("fn", TABLES)
def test_cotangents(fn):
    arguments = *operands(), draw(*TABLES[fn], seed=5)
    found, wanted = (run(*arguments, fn=fn, backend=backend) for backend in ("toy", "reference"))
    assert_all_close(found, wanted)


@pytest.mark.parametrize(
    "fn, is_mapped",
    cases(
        [(of_all, True), (of_heads, True), (of_heads, False), (of_each, True), (of_queries, False), (of_queries, True)],
        fast=[(of_heads, False)],
    ),
)
def test_each_mapped_call_has_its_own_cotangent(fn, is_mapped):
    """Twice mapped, beside a bias that keeps its batch axis of 1: sums over the rows of a call stay in it."""
    arguments = operands(2, 3)
    table, bias = draw(*((2, 3) * is_mapped), *TABLES[fn], seed=5), draw(1, N, T, S, seed=6)

    def mapped(backend):
        axes = (0, 0, 0, 0, 0 if is_mapped else None)
        own = functools.partial(run, fn=fn, backend=backend, bias=bias)
        return jax.vmap(jax.vmap(own, axes), axes)(*arguments, table)

    assert_all_close(mapped("toy"), mapped("reference"))


@pytest.mark.parametrize(
    "fn, kind",
    cases(
        [*((fn, AxisType.Auto) for fn in TABLES), *((fn, AxisType.Explicit) for fn in (of_all, of_heads))],
        fast=[(of_heads, AxisType.Auto), (of_queries, AxisType.Auto), (of_all, AxisType.Explicit)],
    ),
)
def test_devices_that_share_a_table_add_up_its_cotangent(fn, kind):
    arguments = *operands(), draw(*TABLES[fn], seed=5)
    wanted = run(*arguments, fn=fn, backend="reference")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    heads = NamedSharding(mesh, P("data", None, "model", None))
    with jax.set_mesh(mesh):
        *placed, table = arguments
        placed = [jax.device_put(x, heads) for x in placed]
        found = jax.jit(functools.partial(run, fn=fn, backend="toy"))(*placed, table)
    assert_all_close(found, wanted)
