"""JAX's transformations of the public calls: with backends that JAX differentiates, with a kernel under custom_vjp."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_backend
from helpers import count
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash import UnsupportedError, flash_attention, flash_attention_with_lse
from jflash.backends import registry
from jflash.backends.xla import XlaTiles
from jflash.masks import Causal, Lengths, MaskFn, Segments, SlidingWindow

B, T, S, N, K, H, Hv = 4, 13, 18, 8, 4, 5, 6
MASK = SlidingWindow(6, 2, offset=jnp.array([3, -2, 1, 0]))
TILES = {"xla": XlaTiles(block_q=4, block_k=5), "reference": None, "toy": None}

differentiable_by_jax = pytest.mark.parametrize("backend", ["xla", "reference"])
every_path = pytest.mark.parametrize("backend", ["xla", "reference", "toy"])


@pytest.fixture(autouse=True)
def toy():
    with registry.registered(toy_backend.BACKEND):
        yield


def draw(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def operands(**sizes):
    size = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H, "Hv": Hv} | sizes
    return (
        draw(size["B"], size["T"], size["N"], size["H"], seed=1),
        draw(size["B"], size["S"], size["K"], size["H"], seed=2),
        draw(size["B"], size["S"], size["K"], size["Hv"], seed=3),
    )


def attend(q, k, v, mask=MASK, *, backend):
    return tuple(flash_attention_with_lse(q, k, v, mask=mask, backend=backend, tiles=TILES[backend]))


def scalar(q, k, v, mask=MASK, *, backend):
    """A loss with cotangents that differ everywhere, of out and of lse; queries without keys count nothing."""
    out, lse = attend(q, k, v, mask, backend=backend)
    weight = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    lse_weight = jnp.sin(jnp.arange(lse.size, dtype=lse.dtype)).reshape(lse.shape)
    return (out * weight).sum() + jnp.where(lse == -jnp.inf, 0, lse * lse_weight).sum()


def value_and_gradients(*arguments, backend):
    return jax.value_and_grad(functools.partial(scalar, backend=backend), (0, 1, 2))(*arguments)


def assert_close(found, wanted, factor=32):
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        finite = other[np.isfinite(other)]
        bound = factor * np.finfo(np.float32).eps * max(1.0, np.abs(finite).max(initial=0))
        np.testing.assert_allclose(one, other, rtol=0, atol=bound, equal_nan=False)


# One device ----------------------------------------------------------------------------------------------------------


@every_path
def test_jit_equals_eager_and_reference(backend):
    eager = value_and_gradients(*operands(), backend=backend)
    jitted = jax.jit(functools.partial(value_and_gradients, backend=backend))(*operands())
    assert_close(eager, jitted)
    assert_close(jitted, value_and_gradients(*operands(), backend="reference"))


@every_path
@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (0, 2, 1)])
def test_vmap_of_gradients_with_partial_axes(backend, mapped):
    """A cotangent may arrive unmapped where the operand is mapped, and the other way round (case B56)."""
    copies = [jnp.stack([x, x[::-1] * 0.7, -x], axis or 0) for x, axis in zip(operands(), mapped)]
    arguments = [copy if axis is not None else x for copy, x, axis in zip(copies, operands(), mapped)]
    call = functools.partial(value_and_gradients, backend=backend)
    found = jax.vmap(call, in_axes=mapped)(*arguments)
    for index in range(3):
        one = [jnp.take(x, index, axis) if axis is not None else x for x, axis in zip(arguments, mapped)]
        wanted = value_and_gradients(*one, backend="reference")
        assert_close(jax.tree.map(lambda x, index=index: x[index], found), wanted)


@every_path
def test_gradient_of_vmap_and_nested_vmap(backend):
    q, k, v = (jnp.stack([jnp.stack([x, -x]), jnp.stack([x * 0.5, x + 1])]) for x in operands(B=2))
    masks = Segments(
        jnp.arange(2 * 2 * 2 * T).reshape(2, 2, 2, T) % 3, jnp.arange(2 * 2 * 2 * S).reshape(2, 2, 2, S) % 3
    )

    def loss(q, k, v, masks, backend):
        return jax.vmap(jax.vmap(functools.partial(scalar, backend=backend)))(q, k, v, masks).sum()

    found = jax.grad(loss, (0, 1, 2))(q, k, v, masks, backend)
    for i, j in np.ndindex(2, 2):
        mask = jax.tree.map(lambda ids, i=i, j=j: ids[i, j], masks)
        wanted = value_and_gradients(q[i, j], k[i, j], v[i, j], mask, backend="reference")[1]
        assert_close([x[i, j] for x in found], wanted)


@every_path
def test_vmap_over_the_mask_alone(backend):
    q, k, v = operands()
    offsets = jnp.array([[0, 1, 2, 3], [5, -1, 0, 9]])
    found = jax.vmap(lambda offset: attend(q, k, v, Causal(offset), backend=backend))(offsets)
    for index in range(2):
        assert_close([x[index] for x in found], attend(q, k, v, Causal(offsets[index]), backend="reference"))


@every_path
def test_unbatched_vmap_is_the_batched_call(backend):
    """Users write attention for one sequence and vmap it (case B58)."""
    q, k, v = operands()
    call = functools.partial(flash_attention, mask=Causal(offset=2), backend=backend)
    assert_close(jax.vmap(call)(q, k, v), call(q, k, v))


@every_path
def test_jacrev(backend):
    q, k, v = operands(B=1, T=2, S=3, N=2, K=1, H=3, Hv=2)
    found = jax.jacrev(functools.partial(flash_attention, backend=backend))(q, k, v)
    wanted = jax.jacrev(functools.partial(flash_attention, backend="reference"))(q, k, v)
    assert_close(found, wanted)


def numerical_tangent(call, primals, tangents, eps=1e-3):
    """Central difference in float64."""
    ahead, behind = (call(*(x + sign * eps * d for x, d in zip(primals, tangents))) for sign in (1, -1))
    return (ahead - behind) / (2 * eps)


@differentiable_by_jax
def test_forward_mode_and_second_order_against_differences(backend):
    """jvp, jacfwd, grad of grad and Hessian-vector products (case B59), each against differences of float64 values."""
    with jax.enable_x64(True):
        primals = tuple(jnp.asarray(np.asarray(x), jnp.float64) for x in operands(B=4, T=5, S=7, N=2, K=1))
        tangents = tuple(jnp.cos(x * 3) for x in primals)
        call = functools.partial(scalar, backend=backend)

        value, tangent = jax.jvp(call, primals, tangents)
        np.testing.assert_allclose(tangent, numerical_tangent(call, primals, tangents), rtol=1e-5)
        jacobian = jax.jacfwd(call, (0, 1, 2))(*primals)
        np.testing.assert_allclose(sum((j * d).sum() for j, d in zip(jacobian, tangents)), tangent, rtol=1e-10)

        def directional(*primals):
            gradients = jax.grad(call, (0, 1, 2))(*primals)
            return sum((g * d).sum() for g, d in zip(gradients, tangents))

        second = numerical_tangent(directional, primals, tangents)
        forward_over_reverse = jax.jvp(directional, primals, tangents)[1]
        reverse_over_reverse = sum((g * d).sum() for g, d in zip(jax.grad(directional, (0, 1, 2))(*primals), tangents))
        reverse_over_forward = jax.grad(lambda *p: jax.jvp(call, p, tangents)[1], (0, 1, 2))(*primals)
        np.testing.assert_allclose(forward_over_reverse, second, rtol=1e-5)
        np.testing.assert_allclose(reverse_over_reverse, forward_over_reverse, rtol=1e-9)
        np.testing.assert_allclose(
            sum((g * d).sum() for g, d in zip(reverse_over_forward, tangents)), forward_over_reverse, rtol=1e-9
        )
        assert value.dtype == jnp.float64


def test_third_order_on_xla_equals_reference():
    with jax.enable_x64(True):
        primals = [jnp.asarray(np.asarray(x), jnp.float64) for x in operands(B=4, T=3, S=4, N=2, K=1, H=2, Hv=2)]

        def third(backend):
            call = functools.partial(scalar, backend=backend)

            def first(q):
                return jax.jvp(lambda q: call(q, *primals[1:]), (q,), (jnp.sin(q),))[1]

            def second(q):
                return jax.jvp(first, (q,), (jnp.cos(q),))[1]

            return jax.grad(second)(primals[0])

        np.testing.assert_allclose(third("xla"), third("reference"), rtol=1e-9, atol=1e-12)


@differentiable_by_jax
def test_derivatives_of_bias_and_softcap_in_forward_mode(backend):
    q, k, v = operands()
    bias = draw(1, N, T, S, seed=9)
    call = functools.partial(flash_attention, mask=MASK, softcap=2.0, backend=backend, tiles=TILES[backend])
    forward = jax.jvp(lambda q, bias: call(q, k, v, bias=bias), (q, bias), (jnp.sin(q), jnp.cos(bias)))[1]
    _, pull = jax.vjp(lambda q, bias: call(q, k, v, bias=bias), q, bias)
    weight = draw(B, T, N, Hv, seed=10)
    dq, dbias = pull(weight)
    np.testing.assert_allclose(
        (forward * weight).sum(), (dq * jnp.sin(q)).sum() + (dbias * jnp.cos(bias)).sum(), rtol=2e-4
    )


def test_forward_mode_of_a_kernel_is_refused_by_jax_and_not_wrong():
    q, k, v = operands()
    with pytest.raises(Exception, match=r"(?i)forward-mode|jvp"):
        jax.block_until_ready(jax.jvp(lambda q: flash_attention(q, k, v, backend="toy"), (q,), (q,)))


@every_path
def test_scan_and_while_loop_bodies(backend):
    q, k, v = operands(S=T, Hv=H, K=N)

    @jax.jit
    def scanned(q):
        def layer(x, scale):
            out = flash_attention(x * scale, k, v, causal=True, backend=backend)
            return x + out, out.sum()

        return jax.lax.scan(layer, q, jnp.array([1.0, 0.5, 2.0]))

    def unrolled(q):
        sums = []
        for scale in (1.0, 0.5, 2.0):
            out = flash_attention(q * scale, k, v, causal=True, backend="reference")
            sums.append(out.sum())
            q = q + out
        return q, jnp.stack(sums)

    assert_close(scanned(q), unrolled(q), factor=128)
    assert_close(jax.grad(lambda q: scanned(q)[0].sum())(q), jax.grad(lambda q: unrolled(q)[0].sum())(q), factor=512)

    def step(state):
        step, x = state
        # The mask's offset is a value of the loop: nothing may want it as a Python int (case B61).
        return step + 1, flash_attention(x, k, v, mask=Causal(offset=step), backend=backend)

    found = jax.jit(lambda x: jax.lax.while_loop(lambda state: state[0] < 3, step, (0, x)))(q)[1]
    wanted = q
    for offset in range(3):
        wanted = flash_attention(wanted, k, v, mask=Causal(offset=offset), backend="reference")
    assert_close(found, wanted)


@every_path
def test_masks_made_inside_jit(backend):
    q, k, v = operands()

    @jax.jit
    def call(q, k, v, lengths):
        ids = jnp.cumsum(jnp.ones((B, T), jnp.int32), 1) // 4
        mask = Lengths(kv=lengths + 1) & Segments(ids, jnp.zeros((B, S), jnp.int32) + jnp.arange(S) // 4)
        return attend(q, k, v, mask, backend=backend)

    lengths = jnp.array([3, 0, 17, 9])
    ids, key_ids = np.arange(1, T + 1) // 4, np.arange(S) // 4
    wanted = attend(q, k, v, Lengths(kv=lengths + 1) & Segments(ids, key_ids), backend="reference")
    assert_close(call(q, k, v, lengths), wanted)


@every_path
def test_x64_mode_changes_nothing_for_float32(backend):
    wanted = value_and_gradients(*operands(), Lengths(kv=np.array([3, 18, 0, 9])), backend=backend)
    with jax.enable_x64(True):
        found = value_and_gradients(*operands(), Lengths(kv=np.array([3, 18, 0, 9], np.int64)), backend=backend)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found[1]))
    assert_close(found, wanted)


@every_path
def test_donated_operands(backend):
    q, k, v = operands(S=T, Hv=H, K=N)
    wanted = flash_attention(q, k, v, backend="reference")
    found = jax.jit(functools.partial(flash_attention, backend=backend), donate_argnums=0)(q + 0, k, v)
    assert_close(found, wanted)


# What is saved and what is run again ---------------------------------------------------------------------------------


def forward_passes(backend, policy) -> int:
    """How often the forward pass stands in the jaxpr of a training step under `jax.checkpoint`."""
    q, k, v = operands()

    def step(q, k, v):
        block = lambda q, k, v: jnp.sin(flash_attention(jnp.tanh(q), k, v, mask=MASK, backend=backend)).sum()  # noqa: E731
        return jax.grad(jax.checkpoint(block, policy=policy), (0, 1, 2))(q, k, v)

    def is_forward(equation) -> bool:
        if backend == "toy":
            return "toy_forward" in str(equation.params.get("name", ""))
        # The loop over tiles, inside the function whose derivative the rule states.
        is_stated = equation.primitive.name == "custom_jvp_call"
        return is_stated and count(equation.params["call_jaxpr"], lambda inner: inner.primitive.name == "scan") > 0

    return count(jax.make_jaxpr(step)(q, k, v).jaxpr, is_forward)


@pytest.mark.parametrize("backend", ["xla", "toy"])
def test_a_policy_that_saves_the_published_names_runs_the_forward_once(backend):
    """Case B60. Without the policy it runs again, so the count can tell."""
    assert forward_passes(backend, jax.checkpoint_policies.save_only_these_names(*jflash.RESIDUAL_NAMES)) == 1
    assert forward_passes(backend, jax.checkpoint_policies.nothing_saveable) == 2


@every_path
def test_checkpoint_changes_no_gradient(backend):
    policy = jax.checkpoint_policies.save_only_these_names(*jflash.RESIDUAL_NAMES)
    call = functools.partial(scalar, backend=backend)
    found = jax.jit(jax.grad(jax.checkpoint(call, policy=policy), (0, 1, 2)))(*operands())
    assert_close(found, jax.grad(call, (0, 1, 2))(*operands()))


def test_a_kernel_may_hold_constants():
    """The lists of a static TileMap are such arrays, and what JAX partitions may not hold any."""

    def forward(problem, tiles, operands):
        out, lse = toy_backend.BACKEND.forward(problem, tiles, operands)
        return jflash.Attended(out * np.arange(Hv, dtype=np.float32), lse)

    with registry.registered(dataclasses.replace(toy_backend.BACKEND, name="constant", forward=forward)):
        found = flash_attention(*operands(), backend="constant")
    assert_close(found, np.asarray(flash_attention(*operands(), backend="reference")) * np.arange(Hv))


# Several devices -----------------------------------------------------------------------------------------------------


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def sharded(mesh, *arrays, kv_heads):
    heads = "model" if kv_heads % 4 == 0 else None
    specs = (P("data", None, "model", None), P("data", None, heads, None), P("data", None, heads, None))
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]


def collectives(text: str, name: str) -> int:
    return text.count(f" {name}(") + text.count(f" {name}-start(")


@every_path
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_batch_and_heads_split_over_eight_devices(backend, kind, kv_heads):
    """Cases B67, B68, B70: right, split as q is, and no operand gathered; shared heads' cotangents are summed."""
    arrays = operands(K=kv_heads)
    wanted = value_and_gradients(*arrays, backend="reference")
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        placed = sharded(mesh, *arrays, kv_heads=kv_heads)
        call = jax.jit(
            lambda q, k, v: (*attend(q, k, v, backend=backend), *value_and_gradients(q, k, v, backend=backend)[1])
        )
        compiled = call.lower(*placed).compile()
        out, lse, *gradients = compiled(*placed)
    assert_close(gradients, wanted[1])
    assert_close([out, lse], attend(*arrays, backend="reference"))
    assert out.sharding.is_equivalent_to(placed[0].sharding, 4)
    assert gradients[0].sharding.is_equivalent_to(placed[0].sharding, 4)
    text = compiled.as_text()
    is_gathered_by_jax = backend != "toy" and kind == AxisType.Auto and kv_heads in (1, 2)
    if not is_gathered_by_jax and backend != "reference":
        assert collectives(text, "all-gather") == 0
        assert collectives(text, "all-to-all") == 0
    if backend != "reference":
        assert (collectives(text, "all-reduce") > 0) == (kv_heads < 4)


def _by_head(b, n, q, k, low, stride):
    return (q >= k) & ((k + b) % (n + 2) != 1) & (k >= low) | (q - k == stride)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_function_knows_its_batch_row_and_head_on_every_device(kind):
    q, k, v = operands(K=4)
    B, _, N, _ = q.shape
    values = {"per_query": (np.arange(q.shape[1]) // 9,), "per_head": (np.arange(B * N).reshape(B, N),)}
    mask = MaskFn(_by_head, **values)
    wanted = flash_attention(q, k, v, mask=mask, backend="reference")
    with jax.set_mesh(mesh := mesh_of(kind)):
        placed = sharded(mesh, q, k, v, kv_heads=4)
        found = jax.jit(lambda q, k, v: flash_attention(q, k, v, mask=mask, backend="xla"))(*placed)
    assert_close(found, wanted)


@pytest.mark.parametrize("backend", ["xla", "toy"])
def test_types_on_an_explicit_mesh(backend):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        q, k, v = sharded(mesh, *operands(), kv_heads=K)
        out, lse = attend(q, k, v, backend=backend)
        assert jax.typeof(out).sharding.spec == P("data", None, "model", None)
        assert jax.typeof(lse).sharding.spec == P("data", "model", None)


def test_a_split_that_cannot_be_is_refused_on_an_explicit_mesh():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        q, k, v = operands(T=16)
        along_length = jax.device_put(q, NamedSharding(mesh, P(None, "model", None, None)))
        with pytest.raises(UnsupportedError, match=r"length T over mesh axes \('model',\).*batch B or the heads N"):
            flash_attention(along_length, k, v)
        q, k, v = operands(N=12, K=3)
        three_on_four = jax.device_put(q, NamedSharding(mesh, P(None, None, "model", None)))
        with pytest.raises(UnsupportedError, match=r"K=3 .*4 devices"):
            flash_attention(three_on_four, k, v)


@every_path
def test_explicit_mesh_without_a_split_and_unbatched(backend):
    mesh = mesh_of(AxisType.Explicit)
    arrays = operands()
    with jax.set_mesh(mesh):
        replicated = [jax.device_put(x, NamedSharding(mesh, P())) for x in arrays]
        assert_close(attend(*replicated, backend=backend), attend(*arrays, backend="reference"))
        q, k, v = (x[0] for x in arrays)
        split = [jax.device_put(x, NamedSharding(mesh, P(None, "model", None))) for x in (q, k, v)]
        found = flash_attention(*split, mask=Causal(), backend=backend)
    assert_close(found, flash_attention(q, k, v, mask=Causal(), backend="reference"))


def test_heads_that_do_not_divide_are_still_right_under_jit():
    """XLA may ask a kernel for a split that its heads do not allow: all devices then compute all heads (case B70)."""
    arrays = operands(N=12, K=3)
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        q = jax.device_put(arrays[0], NamedSharding(mesh, P("data", None, "model", None)))
        found = jax.jit(lambda *x: attend(*x, backend="toy"))(q, *arrays[1:])
    assert_close(found, attend(*arrays, backend="reference"))


@differentiable_by_jax
def test_inside_shard_map_with_its_default_checks(backend):
    mesh = mesh_of(AxisType.Auto)
    arrays = operands()
    mask = Lengths(kv=jnp.array([3, 18, 0, 9]))

    def local(q, k, v, mask):
        return (*attend(q, k, v, mask, backend=backend), *value_and_gradients(q, k, v, mask, backend=backend)[1])

    heads = P("data", None, "model", None)
    specs = (heads, heads, heads, P("data"))
    out_specs = (heads, P("data", "model", None), heads, heads, heads)
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs))(*arrays, mask)
    for data, model in np.ndindex(2, 4):
        rows, q_heads, kv_heads = (
            slice(2 * data, 2 * data + 2),
            slice(2 * model, 2 * model + 2),
            slice(model, model + 1),
        )
        own = arrays[0][rows, :, q_heads], arrays[1][rows, :, kv_heads], arrays[2][rows, :, kv_heads]
        own_mask = jax.tree.map(lambda x, rows=rows: x[rows], mask)
        wanted = (
            *attend(*own, own_mask, backend="reference"),
            *value_and_gradients(*own, own_mask, backend="reference")[1],
        )
        part = [found[0][rows, :, q_heads], found[1][rows, q_heads], found[2][rows, :, q_heads]]
        part += [found[3][rows, :, kv_heads], found[4][rows, :, kv_heads]]
        assert_close(part, wanted)


@pytest.mark.parametrize("backend", ["xla", "toy"])
def test_operands_that_all_devices_share_inside_shard_map(backend):
    """q differs between devices and k, v do not: the gradients of k and v are sums over the devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    q, k, v = operands()
    k, v = k[:1], v[:1]
    mask = SlidingWindow(6, 2)
    # Interpreted kernels do not pass JAX's own check inside shard_map; compiled ones and the other backends do.
    check = backend != "toy"

    def loss(q, k, v):
        local = lambda q, k, v: scalar(q, k, v, mask, backend=backend)[None]  # noqa: E731
        spec = P("data")
        return jax.shard_map(local, mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec, check_vma=check)(
            q, k, v
        ).sum()

    def wanted(q, k, v):
        return sum(scalar(q[b : b + 1], k, v, mask, backend="reference") for b in range(B))

    assert_close(jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v), jax.grad(wanted, (0, 1, 2))(q, k, v), factor=64)


@every_path
def test_pmap(backend):
    arrays = [x.reshape(4, 1, *x.shape[1:]) for x in operands()]
    mask = Causal(offset=2)
    call = jax.pmap(functools.partial(value_and_gradients, backend=backend), devices=jax.devices("cpu")[:4])
    found = call(*arrays, jax.tree.map(lambda x: x, mask))
    for device in range(4):
        one = value_and_gradients(*(x[device] for x in arrays), mask, backend="reference")
        assert_close(jax.tree.map(lambda x, device=device: x[device], found), one)


# Tracing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [jax.grad, jax.jacfwd], ids=["reverse_over_reverse", "forward_over_reverse"])
def test_a_second_derivative_of_a_kernel_names_the_backend_that_has_one(outer):
    q = jnp.ones((1, 8, 2, 8))

    def inner(q):
        return jax.grad(lambda q: flash_attention(q, q, q, backend="toy").sum())(q).sum()

    with pytest.raises(UnsupportedError, match='backend="xla"'):
        outer(inner)(q)


def test_the_second_call_of_a_kernel_traces_nothing():
    q, k, v = operands()
    call = functools.partial(
        flash_attention, mask=Segments(jnp.zeros(T, jnp.int32), jnp.zeros(S, jnp.int32)), backend="toy"
    )
    toy_backend.launches.clear()
    call(q, k, v)
    first = toy_backend.launches.total()
    assert first > 0
    call(q + 1, k, v)
    flash_attention(q, k, v, mask=Segments(jnp.ones(T, jnp.int32), jnp.ones(S, jnp.int32)), backend="toy")
    assert toy_backend.launches.total() == first
    flash_attention(q, k, v, mask=SlidingWindow(11, 3), backend="toy")
    assert toy_backend.launches.total() > first


@differentiable_by_jax
def test_export_round_trip(backend):
    """Case B64: forward and gradients, serialised, read back and run."""
    q, k, v = operands()
    exported = jax.export.export(jax.jit(functools.partial(value_and_gradients, backend=backend)))(q, k, v)
    again = jax.export.deserialize(exported.serialize())
    assert_close(again.call(q, k, v), value_and_gradients(q, k, v, backend="reference"))
