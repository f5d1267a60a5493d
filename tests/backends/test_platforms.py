"""One traced call on several platforms: what "auto" planned for one of them, and `xla` on the others."""

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
from jflash.backends import reference, registry
from jflash.backends.protocol import Gradients
from jflash.masks import Causal, Full, Lengths, SlidingWindow
from jflash.numerics.online_softmax import Attended
from jflash.numerics.varying import like

B, T, S, N, K, H, Hv = 4, 13, 18, 8, 4, 5, 6
MASK = SlidingWindow(6, 2, offset=jnp.array([3, -2, 1, 0]))


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def operands(K=K):
    return draw(B, T, N, H, seed=1), draw(B, S, K, H, seed=2), draw(B, S, K, Hv, seed=3)


def scalar(q, k, v, mask=MASK, **arguments):
    """A loss with cotangents that differ everywhere, of out and of lse; queries without keys count nothing."""
    out, lse = jflash.flash_attention_with_lse(q, k, v, mask=mask, **arguments)
    weight = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    lse_weight = jnp.sin(jnp.arange(lse.size, dtype=lse.dtype)).reshape(lse.shape)
    return (out * weight).sum() + jnp.where(lse == -jnp.inf, 0, lse * lse_weight).sum()


def value_and_gradients(*arrays, **arguments):
    return jax.value_and_grad(functools.partial(scalar, **arguments), (0, 1, 2))(*arrays)


def assert_close(found, wanted, factor=64):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        bound = factor * np.finfo(np.float32).eps * max(1.0, np.abs(other[np.isfinite(other)]).max(initial=0))
        np.testing.assert_allclose(one, other, rtol=0, atol=bound, equal_nan=False)


def only_for_cuda(kernel):
    """A kernel that cannot be lowered for anything else, as those of Mosaic GPU."""

    def restricted(problem, tiles, *arguments):
        return jax.lax.platform_dependent(*arguments, cuda=functools.partial(kernel, problem, tiles))

    return restricted


TOY = toy_backend.BACKEND
CUDA_ONLY = dataclasses.replace(
    TOY, name="cuda_only", forward=only_for_cuda(TOY.forward), backward=only_for_cuda(TOY.backward)
)


@pytest.fixture(params=["here", "elsewhere"])
def where(request):
    """The kernel is planned for the CPU and lowered here, or planned for CUDA, and `xla` is lowered in its place."""
    if request.param == "here":
        with registry.registered(TOY, auto_on=("cpu",)):
            yield request.param
    else:
        with registry.registered(CUDA_ONLY, auto_on=("cuda",)), jflash.use_options(hardware="h200"):
            yield request.param


# Which of the two is lowered -----------------------------------------------------------------------------------------


def marked(name):
    """The toy kernel with an operation in each pass that no other backend has, to be found in lowered programs."""

    def forward(problem, tiles, operands):
        out, lse = TOY.forward(problem, tiles, operands)
        return Attended(jnp.sinh(out), lse)

    def backward(problem, tiles, operands, *statistics):
        return jax.tree.map(jnp.cosh, TOY.backward(problem, tiles, operands, *statistics))

    return dataclasses.replace(TOY, name=name, forward=forward, backward=backward)


def without_backward(backend):
    """The same kernel as one that JAX differentiates, as `cudnn` is: without an lse too."""

    def forward(problem, tiles, operands):
        return Attended(jnp.sinh(reference.BACKEND.forward(problem, tiles, operands).out), None)

    return dataclasses.replace(backend, forward=forward, backward=None)


def lowered(function, *platforms):
    return jax.jit(function).trace(*operands()).lower(lowering_platforms=platforms).as_text()


def marks(text):
    return {mark for mark in ("sinh", "cosh") if f"chlo.{mark}" in text}


def out_and_gradients(*arrays, **arguments):
    out, pull = jax.vjp(functools.partial(jflash.flash_attention, **arguments), *arrays)
    return out, *pull(out)


@pytest.mark.parametrize("planned", ["cpu", "cuda"])
def test_auto_decides_per_lowering_platform(planned):
    other = {"cpu": "cuda", "cuda": "cpu"}[planned]
    with (
        registry.registered(marked(f"marked_{planned}"), auto_on=(planned,)),
        jflash.use_options(hardware={"cuda": "h200", "cpu": "cpu"}[planned]),
    ):
        assert marks(lowered(lambda *x: jflash.flash_attention(*x), planned)) == {"sinh"}
        assert marks(lowered(lambda *x: jflash.flash_attention(*x), other)) == set()
        assert marks(lowered(lambda *x: out_and_gradients(*x), planned)) == {"sinh", "cosh"}
        assert marks(lowered(lambda *x: out_and_gradients(*x), other)) == set()
        both = lowered(lambda *x: out_and_gradients(*x), "cpu", "cuda")
        assert marks(both) == {"sinh", "cosh"} and "stablehlo.case" in both
        # A backend by name is lowered for whatever is asked for.
        explicit = functools.partial(out_and_gradients, backend=f"marked_{planned}")
        assert marks(lowered(lambda *x: explicit(*x), other)) == {"sinh", "cosh"}


def test_auto_decides_for_a_backend_without_backward():
    kernel = without_backward(marked("plain"))
    with registry.registered(kernel, auto_on=("cuda",)), jflash.use_options(hardware="h200"):
        assert marks(lowered(lambda *x: out_and_gradients(*x), "cuda")) == {"sinh", "cosh"}
        assert marks(lowered(lambda *x: out_and_gradients(*x), "cpu")) == set()
        found = jax.jit(lambda *x: out_and_gradients(*x))(*operands())
        vmapped = jax.jit(jax.vmap(lambda *x: out_and_gradients(*x)))(*(jnp.stack([x, -x]) for x in operands()))
    wanted = out_and_gradients(*operands(), backend="reference")
    assert_close(found, wanted)
    assert_close([x[0] for x in vmapped], wanted)


def test_a_kernel_by_name_is_not_replaced():
    with registry.registered(CUDA_ONLY), jflash.use_options(hardware="h200"):
        lowered(functools.partial(jflash.flash_attention, backend="cuda_only"), "cuda")
        with pytest.raises(NotImplementedError, match=r"(?i)platform"):
            lowered(functools.partial(jflash.flash_attention, backend="cuda_only"), "cpu")


def test_a_plan_says_what_runs_elsewhere(where):
    plan = jflash.explain(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands())).plan
    assert (plan.backend, plan.elsewhere.backend) == ({"here": "toy", "elsewhere": "cuda_only"}[where], "xla")
    assert plan.elsewhere.tiles is not None and plan.elsewhere.elsewhere is None
    for backend in ("xla", plan.backend):
        assert jflash.explain(*operands(), backend=backend).plan is None or (
            jflash.explain(*operands(), backend=backend).plan.elsewhere is None
        )


def test_export_for_two_platforms(where):
    call = jax.jit(lambda *arrays: value_and_gradients(*arrays))
    exported = jax.export.export(call, platforms=("cpu", "cuda"))(*operands())
    again = jax.export.deserialize(exported.serialize())
    assert set(again.platforms) == {"cpu", "cuda"}
    assert_close(again.call(*operands()), value_and_gradients(*operands(), backend="reference"))


# Transformations of the choice ---------------------------------------------------------------------------------------


def test_jit_and_gradients_of_out_and_lse(where):
    wanted = value_and_gradients(*operands(), backend="reference")
    assert_close(jax.jit(value_and_gradients)(*operands()), wanted)
    assert_close(value_and_gradients(*operands()), wanted)


def test_dead_queries_with_garbage_in_their_cotangents(where):
    q, k, v = operands()
    mask = Lengths(q=np.array([3, 0, 13, 5]), kv=np.array([3, 18, 0, 9]))
    dead = np.arange(T) >= np.array([3, 0, 0, 5])[:, None]

    def gradients(filling, **arguments):
        attend = functools.partial(jflash.flash_attention_with_lse, mask=mask, **arguments)
        attended, pull = jax.vjp(lambda *x: tuple(attend(*x)), q, k, v)
        d_out = jnp.where(dead[..., None, None], filling, jnp.cos(attended[0]))
        d_lse = jnp.where(dead[:, None], filling, jnp.ones((B, N, T)))
        return pull((d_out, d_lse))

    assert_close(gradients(jnp.nan), gradients(0.0, backend="reference"))


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 2, 1)])
def test_vmap_of_gradients(where, mapped):
    copies = [jnp.stack([x, -x], axis) if axis is not None else x for x, axis in zip(operands(), mapped)]
    found = jax.jit(jax.vmap(lambda *x: value_and_gradients(*x), mapped))(*copies)
    for index in range(2):
        one = [jnp.take(x, index, axis) if axis is not None else x for x, axis in zip(copies, mapped)]
        wanted = value_and_gradients(*one, backend="reference")
        assert_close(jax.tree.map(lambda x, index=index: x[index], found), wanted)


def test_scan_and_checkpoint(where):
    q, k, v = draw(2, T, N, H, seed=4), draw(2, T, N, H, seed=5), draw(2, T, N, H, seed=6)
    policy = jax.checkpoint_policies.save_only_these_names(*jflash.RESIDUAL_NAMES)

    def loss(q, **arguments):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, scale):
            return x + jflash.flash_attention(x * scale, k, v, causal=True, **arguments), None

        return jnp.sin(jax.lax.scan(layer, q, jnp.array([1.0, 0.5]))[0]).sum()

    assert_close(jax.jit(jax.grad(lambda q: loss(q)))(q), jax.grad(functools.partial(loss, backend="reference"))(q))


def test_the_policy_of_saved_names_runs_the_forward_once(where):
    """Case B60, with the choice around the kernel. Without the policy it runs again, so the count can tell."""

    def forward_passes(policy) -> int:
        block = lambda *x: jnp.sin(jflash.flash_attention(*x, mask=MASK)).sum()  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(block, policy=policy), (0, 1, 2)))(*operands())
        return count(jaxpr.jaxpr, lambda equation: "toy_forward" in str(equation.params.get("name", "")))

    saved = forward_passes(jax.checkpoint_policies.save_only_these_names(*jflash.RESIDUAL_NAMES))
    nothing = forward_passes(jax.checkpoint_policies.nothing_saveable)
    assert (saved, nothing) == (1, 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_batch_and_heads_split_over_eight_devices(where, kind, kv_heads):
    """The partition rule is around both: no operand is gathered, also where `xla` stands in for the kernel."""
    arrays = operands(K=kv_heads)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    heads = "model" if kv_heads % 4 == 0 else None
    specs = (P("data", None, "model", None), P("data", None, heads, None), P("data", None, heads, None))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]
        compiled = jax.jit(lambda *x: value_and_gradients(*x)).lower(*placed).compile()
        found = compiled(*placed)
    assert_close(found, value_and_gradients(*arrays, backend="reference"))
    assert found[1][0].sharding.is_equivalent_to(placed[0].sharding, 4)
    assert "all-gather" not in compiled.as_text() and "all-to-all" not in compiled.as_text()


def test_inside_shard_map(where):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    q, k, v = operands()
    k, v = k[:1], v[:1]

    def loss(q, k, v):
        local = lambda q, k, v: scalar(q, k, v, Full())[None]  # noqa: E731
        # Interpreted kernels do not pass JAX's own check of types.
        specs = {"in_specs": (P("data"), P(), P()), "out_specs": P("data"), "check_vma": False}
        return jax.shard_map(local, mesh=mesh, **specs)(q, k, v).sum()

    def wanted(q, k, v):
        return sum(scalar(q[b : b + 1], k, v, Full(), backend="reference") for b in range(B))

    assert_close(jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v), jax.grad(wanted, (0, 1, 2))(q, k, v), factor=128)


def dense_backward(problem, tiles, operands, attended, cotangents):
    """The backward pass of the reference as a kernel's: from the statistics, one device's share of each gradient."""
    own = like(operands[:3], (operands, attended, cotangents))
    _, pull = jax.vjp(lambda q, k, v: reference.BACKEND.forward(problem, None, operands._replace(q=q, k=k, v=v)), *own)
    d_lse = jnp.zeros_like(attended.lse) if cotangents.lse is None else cotangents.lse
    return Gradients(*pull(Attended(cotangents.out, d_lse)))


@pytest.mark.parametrize("planned", ["cpu", "cuda"])
def test_types_inside_shard_map_with_its_default_checks(planned):
    """Both must give the same types: each device's share of the gradient of an operand that the devices share."""
    dense = dataclasses.replace(reference.BACKEND, name=f"dense_{planned}", backward=dense_backward)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    q, k, v = operands()
    k, v = k[:1], v[:1]

    def loss(q, k, v):
        local = lambda q, k, v: scalar(q, k, v, Causal(offset=5))[None]  # noqa: E731
        return jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))(q, k, v).sum()

    def wanted(q, k, v):
        return sum(scalar(q[b : b + 1], k, v, Causal(offset=5), backend="reference") for b in range(B))

    told = {"cuda": "h200", "cpu": "cpu"}[planned]
    with registry.registered(dense, auto_on=(planned,)), jflash.use_options(hardware=told):
        found = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    assert_close(found, jax.grad(wanted, (0, 1, 2))(q, k, v), factor=128)


def test_the_second_call_traces_nothing(where):
    q, k, v = operands()
    toy_backend.launches.clear()
    gradients = lambda q: jax.grad(lambda q: jflash.flash_attention(q, k, v, mask=SlidingWindow(7, 3)).sum())(q)  # noqa: E731
    gradients(q)
    first = toy_backend.launches.total()
    assert first > 0
    gradients(q + 1)
    assert toy_backend.launches.total() == first
