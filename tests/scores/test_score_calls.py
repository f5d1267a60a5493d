"""Score functions, ALiBi and sinks: what the door refuses, when it compiles, and JAX's transformations around it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_backend
from helpers import assert_close, count, tolerance
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash import flash_attention, flash_attention_with_lse
from jflash.backends import registry
from jflash.backends.xla import XlaTiles
from jflash.masks import Causal, Lengths, SlidingWindow

B, T, S, N, K, H, Hv = 4, 7, 9, 8, 4, 5, 6
TILES = {"xla": XlaTiles(block_q=4, block_k=5), "reference": None, "toy": None}
MASK = SlidingWindow(6, 2, offset=np.array([3, -2, 1, 0]))


def draw(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def operands():
    return draw(B, T, N, H), draw(B, S, K, H, seed=1), draw(B, S, K, Hv, seed=2)


def everything(s, b, n, q, k, slope, table, values, marked):
    """It uses each index, and arrays by head, by difference, by batch row and key, and whole numbers."""
    s = s * slope[n] + table[q - k + S] + values[b, k]
    return jnp.where(marked[q] == b, s + n.astype(s.dtype), s)


def arguments():
    return draw(N, seed=3), draw(T + S, seed=4), draw(B, S, seed=5), jnp.arange(T, dtype=np.int32) % B


def attend(q, k, v, slopes, sinks, args, *, backend, mask=MASK):
    return tuple(
        flash_attention_with_lse(
            q, k, v, mask=mask, softcap=4.0, alibi_slopes=slopes, sinks=sinks, score_fn=everything,
            score_args=(*args, arguments()[3]), backend=backend, tiles=TILES[backend],
        )
    )  # fmt: skip


def primals():
    return (*operands(), draw(N, seed=6), draw(B, N, seed=7), arguments()[:3])


def scalar(*primals, backend, mask=MASK):
    out, lse = attend(*primals, backend=backend, mask=mask)
    return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum() + jnp.sin(lse).sum()


def assert_trees_close(found, wanted, factor=4):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(one, other, atol=factor * tolerance(np.float32, np.asarray(other)))


@functools.cache
def wanted():
    return jax.value_and_grad(functools.partial(scalar, backend="reference"), range(6))(*primals())


# Transformations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_on_a_mesh(kind):
    """Each device has part of the batch rows and heads, and knows which; arguments are whole on all of them."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    q, k, v, *rest = primals()
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model", None))) for x in (q, k, v)]
        call = jax.jit(jax.value_and_grad(functools.partial(scalar_sharded, backend="xla"), range(6)))
        found = call(*placed, *rest)
    assert found[1][0].sharding.is_equivalent_to(placed[0].sharding, 4)
    assert_trees_close(found, wanted())


def scalar_sharded(*primals, backend):
    """`scalar`, with weights that do not come in one row: on an explicit mesh that would be an ambiguous reshape."""
    out, lse = attend(*primals, backend=backend)
    weight = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    spec = jax.typeof(out).sharding.spec
    if any(spec):
        weight = jax.sharding.reshard(weight, spec)
    return (out * weight).sum() + jnp.sin(lse).sum()


def test_vmap_of_gradients():
    """Mapped arguments and mapped operands; b counts within each mapped call."""
    q, k, v, slopes, sinks, args = primals()
    mapped = jnp.stack([q, q[::-1] * 0.7]), jnp.stack([sinks, -sinks]), tuple(jnp.stack([x, x * 2]) for x in args)

    def call(q, sinks, args, backend):
        return jax.grad(functools.partial(scalar, backend=backend), range(6))(q, k, v, slopes, sinks, args)

    found = jax.vmap(functools.partial(call, backend="xla"))(*mapped)
    for index in range(2):
        one, other, own = jax.tree.map(lambda x, index=index: x[index], mapped)
        wanted = call(one, other, own, backend="reference")
        assert_trees_close(jax.tree.map(lambda x, index=index: x[index], found), wanted, factor=8)


def test_forward_mode_second_order_and_checkpoint():
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), primals())
        tangents = jax.tree.map(lambda x: jnp.cos(3 * x), wide)

        def directional(backend, remat):
            call = functools.partial(scalar, backend=backend)
            call = jax.checkpoint(call) if remat else call
            return lambda *primals: jax.jvp(call, primals, tangents)[1]

        found = jax.jit(jax.value_and_grad(directional("xla", True), range(6)))(*wide)
        other = jax.jit(jax.value_and_grad(directional("reference", False), range(6)))(*wide)
    for one, right in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-9, atol=1e-11)


def by_head_and_key(s, b, n, q, k, slope, values, marked):
    """What the toy kernel takes: values per head, and per batch row and key, and whole numbers per query."""
    s = s * slope[n] + values[b, k] * slope[n]
    return s + jnp.where(marked[q] == b, n, 0).astype(s.dtype) / 8


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit], ids=["vmap", "auto", "explicit"])
def test_score_functions_of_a_kernel(kind):
    """The kernel gets streams, of the batch rows and heads of its device; whole arrays have the gradients."""
    mask = SlidingWindow(6, 2, offset=1)
    q, k, v, slopes, _, (slope, _, values) = primals()
    d_out = draw(B, T, N, Hv, seed=9)

    def run(q, k, v, slopes, slope, values, d_out, backend):
        def call(q, k, v, slopes, slope, values):
            return flash_attention(
                q, k, v, mask=mask, softcap=4.0, alibi_slopes=slopes, score_fn=by_head_and_key,
                score_args=(slope, values, arguments()[3]), backend=backend,
            )  # fmt: skip

        out, pull = jax.vjp(call, q, k, v, slopes, slope, values)
        return out, *pull(d_out)

    operands = (q, k, v, slopes, slope, values, d_out)
    wanted = run(*operands, "reference")
    with registry.registered(toy_backend.BACKEND):
        if kind is None:
            found = jax.vmap(functools.partial(run, backend="toy"))(*(jnp.stack([x, x]) for x in operands))
            found = [x[1] for x in found]
        else:
            mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
            heads = NamedSharding(mesh, P("data", None, "model", None))
            with jax.set_mesh(mesh):
                q, k, v, d_out = (jax.device_put(x, heads) for x in (q, k, v, d_out))
                found = jax.jit(functools.partial(run, backend="toy"))(q, k, v, slopes, slope, values, d_out)
    assert_trees_close(found, wanted)


def poles_that_nobody_sees(s, b, n, q, k, rate, values):
    """Infinite at the keys that the mask hides, where `values` is 0."""
    return s + rate[n] * jnp.log(values[b, k])


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit], ids=["vmap", "auto", "explicit"])
def test_poles_outside_of_a_kernel_have_no_gradient(kind):
    """What is computed outside is so for all keys; by xla the function is run at pairs that attend alone."""
    lengths = np.array([S - 3, 2, S, 0], np.int32)
    q, k, v = operands()
    rate = draw(N, seed=3)
    values = jnp.where(np.arange(S) < lengths[:, None], jnp.abs(draw(B, S, seed=4)) + 0.5, 0)
    d_out = draw(B, T, N, Hv, seed=9)

    def run(q, k, v, rate, values, d_out, backend):
        def call(*operands):
            *qkv, rate, values = operands
            terms = {"score_fn": poles_that_nobody_sees, "score_args": (rate, values)}
            return flash_attention(*qkv, mask=Lengths(kv=lengths), backend=backend, **terms)

        out, pull = jax.vjp(call, q, k, v, rate, values)
        return out, *pull(d_out)

    wanted = run(q, k, v, rate, values, d_out, "xla")
    assert all(np.isfinite(x).all() for x in wanted)
    with registry.registered(toy_backend.BACKEND):
        if kind is None:
            found = jax.vmap(functools.partial(run, backend="toy"))(*(x[None] for x in (q, k, v, rate, values, d_out)))
            found = [x[0] for x in found]
        else:
            mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
            heads = NamedSharding(mesh, P("data", None, "model", None))
            with jax.set_mesh(mesh):
                q, k, v, d_out = (jax.device_put(x, heads) for x in (q, k, v, d_out))
                found = jax.jit(functools.partial(run, backend="toy"))(q, k, v, rate, values, d_out)
    assert_trees_close(found, wanted)


@pytest.mark.parametrize(
    "shape, kind",
    [((B, N), None), ((N,), AxisType.Auto), ((N,), AxisType.Explicit)],
    ids=["one_device", "auto", "explicit"],
)
def test_sinks_of_a_kernel(shape, kind):
    """A kernel gives out and lse with the sinks in them; their gradient is made of lse and delta outside of it."""
    q, k, v = operands()
    sinks, d_out, d_lse = draw(*shape, seed=8), draw(B, T, N, Hv, seed=9), draw(B, N, T, seed=10)

    def run(q, k, v, sinks, d_out, d_lse, backend):
        call = functools.partial(flash_attention_with_lse, mask=MASK, backend=backend)
        found, pull = jax.vjp(lambda *x: tuple(call(*x[:3], sinks=x[3])), q, k, v, sinks)
        return *found, *pull((d_out, d_lse))

    wanted = run(q, k, v, sinks, d_out, d_lse, "reference")
    with registry.registered(toy_backend.BACKEND):
        if kind is None:
            found = jax.vmap(functools.partial(run, backend="toy"))(*(x[None] for x in (q, k, v, sinks, d_out, d_lse)))
            found = [x[0] for x in found]
        else:
            mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
            heads = NamedSharding(mesh, P("data", None, "model", None))
            with jax.set_mesh(mesh):
                placed = [jax.device_put(x, heads) for x in (q, k, v, d_out)]
                d_lse = jax.device_put(d_lse, NamedSharding(mesh, P("data", "model", None)))
                found = jax.jit(functools.partial(run, backend="toy"))(*placed[:3], sinks, placed[3], d_lse)
    assert_trees_close(found, wanted)


def test_a_policy_that_saves_the_published_names_runs_the_forward_once():
    """Sinks are added to what is saved, and dropout is drawn again."""

    def step(q, policy):
        def block(q):
            out, lse = attend(jnp.tanh(q), *primals()[1:], backend="xla")
            return out.sum() + lse.sum()

        return jax.grad(jax.checkpoint(block, policy=policy))(q)

    def passes(policy):
        def is_forward(equation):
            return equation.primitive.name == "custom_jvp_call" and count(equation.params["call_jaxpr"], is_scan) > 0

        return count(jax.make_jaxpr(functools.partial(step, policy=policy))(operands()[0]).jaxpr, is_forward)

    is_scan = lambda equation: equation.primitive.name == "scan"  # noqa: E731
    assert passes(jax.checkpoint_policies.save_only_these_names(*jflash.RESIDUAL_NAMES)) == 1
    assert passes(jax.checkpoint_policies.nothing_saveable) == 2


# Tracing --------------------------------------------------------------------------------------------------------------


def test_a_function_object_passed_twice_is_traced_once():
    traces = []

    def fn(s, b, n, q, k, slope):
        traces.append(1)
        return s * slope[n]

    q, k, v = operands()
    call = functools.partial(flash_attention, q, k, v, score_fn=fn, backend="xla")
    first = call(score_args=(draw(N),))
    count = len(traces)
    second = call(score_args=(draw(N, seed=1),))
    assert len(traces) == count and not np.array_equal(first, second)
    # One that is made anew is another one.
    flash_attention(q, k, v, score_fn=lambda *x: fn(*x), score_args=(draw(N),), backend="xla")
    assert len(traces) > count


def test_slopes_sinks_and_offsets_do_not_compile_again(caplog):
    q, k, v = operands()
    with jax.log_compiles(True):
        for seed in range(3):
            mask = Causal(offset=jnp.int32(seed))
            flash_attention(q, k, v, mask=mask, alibi_slopes=draw(N, seed=seed), sinks=draw(N, seed=seed + 9))
    compiled = [record for record in caplog.records if "Compiling jit(_attend)" in record.getMessage()]
    assert len(compiled) == 1


# What is refused ------------------------------------------------------------------------------------------------------


def to_booleans(s, b, n, q, k):
    return q >= k


def to_a_sum(s, b, n, q, k):
    return s.sum(-1)


@dataclasses.dataclass
class WithoutHash:
    """A function whose class compares by value."""

    factor: float

    def __call__(self, s, b, n, q, k):
        return s * self.factor


def too_wide(s, b, n, q, k):
    return s[None]


def to_two(s, b, n, q, k):
    return s, s


REFUSED = [
    ({"sinks": 1.0}, "sinks", "float", r"\(N,\) or \(B, N\)"),
    ({"sinks": np.ones(K, np.float32)}, "sinks", r"shape \(4,\)", "N=8"),
    ({"sinks": np.ones(N, np.int32)}, "sinks", "dtype int32", "floating point"),
    ({"sinks": np.ones(N)}, "sinks", "dtype float64", "at most float32"),
    ({"alibi_slopes": np.ones((2, N), np.float32)}, "alibi_slopes", r"shape \(2, 8\)", "B=4, N=8"),
    (
        {"alibi_slopes": np.ones(N, np.float32), "mask": Causal(offset=2), "window": (3, 0)},
        "alibi_slopes",
        "a mask of several diagonals, with the offsets 2 and 0",
        "one diagonal.*the same offset",
    ),
    ({"score_fn": 3}, "score_fn", "int", "a function of"),
    ({"score_fn": to_booleans}, "score_fn", r"a function to bool\[1, 1, 17, 19\]", "to float32, elementwise"),
    ({"score_fn": to_a_sum}, "score_fn", r"a function to float32\[11, 13, 17\]", "elementwise"),
    ({"score_fn": too_wide}, "score_fn", r"a function to float32\[1, 11, 13, 17, 19\]", "elementwise"),
    ({"score_fn": to_two}, "score_fn", "a function to float32.*, float32", "elementwise"),
    ({"score_fn": WithoutHash(2.0)}, "score_fn", "a function without a hash", "one with a hash"),
    ({"score_args": (1.0,)}, "score_args", r"\(1.0,\) without a function", "a `score_fn`"),
    ({"score_fn": everything, "score_args": [1.0]}, "score_args", "list", "a tuple"),
    ({"score_fn": everything, "score_args": ("x",)}, "score_args", "str", "arrays or numbers"),
    ({"score_fn": everything, "score_args": (np.ones(3),)}, "score_args", "dtype float64", "at most float32"),
]


@pytest.mark.parametrize("wrong, argument, found, wanted", REFUSED)
def test_bad_arguments_are_named(wrong, argument, found, wanted):
    with pytest.raises(jflash.ArgumentError, match=rf"(?s)^`{argument}`: found {found}.*, wanted .*{wanted}") as caught:
        flash_attention(*operands(), **wrong)
    assert caught.value.argument == argument


def test_a_captured_traced_array_is_refused():
    q, k, v = operands()

    @jax.jit
    def call(slope):
        return flash_attention(q, k, v, score_fn=lambda s, b, n, q, k: s * slope[n])

    with pytest.raises(jflash.ArgumentError, match=r"`score_fn`: found a function that captures.*score_args=\(...,\)"):
        call(draw(N))


def test_same_offsets_are_one_diagonal():
    q, k, v = operands()
    offset = np.array([3, -2, 1, 0])
    slopes = draw(N)
    one = flash_attention(q, k, v, mask=SlidingWindow(6, 0, offset=offset), alibi_slopes=slopes)
    two = flash_attention(
        q, k, v, mask=Causal(offset=offset.copy()) & SlidingWindow(6, None, offset=offset), alibi_slopes=slopes
    )
    assert_close(one, two, atol=tolerance(np.float32, np.asarray(two)))


def test_explain_shows_them_and_why_kernels_do_not_run():
    q, k, v = (jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16"),) * 3
    slopes = jax.ShapeDtypeStruct((4,), "float32")
    others = (((130,), "float32"), ((2, 64), "float32"), ((64,), "int32"))
    score_args = (slopes, *(jax.ShapeDtypeStruct(*other) for other in others))
    explanation = jflash.explain(
        q, k, v, alibi_slopes=slopes, sinks=slopes, score_fn=everything, hardware="h200",
        score_args=score_args,
    )  # fmt: skip
    text = str(explanation)
    assert "score=alibi(float32[1, 4], int32[1])" in text and "sinks=float32[1, 4]" in text
    assert "score=everything(float32[4], float32[130], float32[2, 64], int32[64])" in text
    assert explanation.plan.backend == "mosaic_gpu"
    assert "runs no score function" in explanation.refusals["cudnn"]

    def sums(s, b, n, q, k, table):
        return s + table[q + k]

    explanation = jflash.explain(
        q, k, v, score_fn=sums, score_args=(jax.ShapeDtypeStruct((128,), "float32"),), hardware="h200"
    )
    assert explanation.plan.backend == "xla"
    assert "an array of all pairs" in explanation.refusals["mosaic_gpu"] and "sums" in str(explanation)
    only_sinks = jflash.explain(q, k, v, sinks=slopes, hardware="h200")
    assert only_sinks.plan.backend == "mosaic_gpu" and "sinks" in only_sinks.refusals["cudnn"]


# Packed sequences -----------------------------------------------------------------------------------------------------


def test_packed_sequences():
    """ALiBi counts in each sequence from its end; indices of a function count all packed tokens."""
    queries, keys = np.array([0, 3, 3, 7]), np.array([0, 4, 6, 9])
    q, k, v = (x[0] for x in operands())
    slopes, sinks, table = draw(N, seed=1), draw(N, seed=2), draw(S, seed=3)

    def add(s, b, n, q, k, table, start):
        return s + table[k + start]

    found = jflash.flash_attention_varlen(
        q, k, v, queries, keys, causal=True, softcap=3.0, alibi_slopes=slopes, sinks=sinks, score_fn=add,
        score_args=(table, 0), backend="xla", tiles=TILES["xla"],
    )  # fmt: skip
    for index in (0, 2):
        rows, columns = (slice(*ends[index : index + 2]) for ends in (queries, keys))
        mask = Causal(offset=int(columns.stop - columns.start - (rows.stop - rows.start)))
        wanted = flash_attention(
            q[rows], k[columns], v[columns], mask=mask, softcap=3.0, alibi_slopes=slopes, sinks=sinks, score_fn=add,
            score_args=(table, columns.start), backend="reference",
        )  # fmt: skip
        assert_close(found[rows], wanted, atol=4 * tolerance(np.float32, np.asarray(wanted)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_xla_has_gradients_of_arguments_that_16_bits_of_out_would_spoil(dtype):
    """Against the same numbers in float32: rounded, out would shift all of a query's logits, and a slope sums them."""
    arrays = [x.astype(dtype) for x in (*operands(), draw(B, T, N, Hv, seed=3))]
    slopes, sinks = draw(N, seed=4), draw(N, seed=5)

    def gradients(q, k, v, d_out):
        def call(slopes, sinks):
            options = {"alibi_slopes": slopes, "sinks": sinks, "backend": "xla", "tiles": TILES["xla"]}
            return flash_attention(q, k, v, mask=Lengths(kv=np.array([9, 3, 7, 8])), **options)

        return jax.vjp(call, slopes, sinks)[1](d_out)

    found, right = gradients(*arrays), gradients(*(x.astype(np.float32) for x in arrays))
    for one, other in zip(found, right):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * float(jnp.abs(other).max()))
