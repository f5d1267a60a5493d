"""Two backends in one: a traced call may be lowered for another platform than it was planned for, or for several."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jaxtyping import Array

from jflash.backends.protocol import (
    Backend,
    Gradients,
    Operands,
    gradient_axes,
    learned_arrays,
    with_learned_arrays,
)
from jflash.numerics.online_softmax import Attended
from jflash.numerics.varying import like
from jflash.problem import Problem


# Cached, so that one pair is one record: a call of the same problem and backend is not traced again.
@functools.lru_cache(maxsize=256)
def per_platform(own: Backend, platform: str, other: Backend, other_tiles: Any) -> Backend:
    """The backend that is `own` in programs lowered for `platform`, and `other` in those for every other platform.

    Both are traced, one is lowered. `other` is one that JAX differentiates. Where `own` has a `backward`, so has the
    pair, from the same residuals: the choice is made inside the one `custom_vjp`, which keeps its residuals and their
    names, and around each kernel anew, inside the partition rule. `other` then computes its forward pass a second time.
    """

    def forward(problem: Problem, tiles: Any, operands: Operands) -> Attended:
        def run(backend: Backend, tiles: Any, operands: Operands) -> Attended:
            attended = backend.forward(problem, tiles, operands)
            # One of them may have none, and both must give the same.
            return attended if own.backward is not None or problem.lse else attended._replace(lse=None)

        runs = functools.partial(run, own, tiles), functools.partial(run, other, other_tiles)
        # JAX differentiates and batches its own choice. It lowers both for each of several platforms, though, which a
        # kernel does not allow: a `jax.export` for two platforms at once needs `own` to have a backward.
        if own.backward is None:
            return jax.lax.platform_dependent(operands, default=runs[1], **{platform: runs[0]})
        return _choose(*runs, operands, platform=platform)

    def backward(
        problem: Problem, tiles: Any, operands: Operands, attended: Attended, cotangents: Attended
    ) -> Gradients:
        def run_own(*arguments: Any) -> Gradients:
            return own.backward(problem, tiles, *arguments)

        def run_other(operands: Operands, attended: Attended, cotangents: Attended) -> Gradients:
            def call(q: Array, k: Array, v: Array, learned: list[Array]) -> Attended:
                own = with_learned_arrays(problem, operands._replace(q=q, k=k, v=v), learned)
                return other.forward(problem, other_tiles, own)

            # As a kernel's, gradients are one device's share, and summed outside where the devices share an operand.
            # So are those of arrays that batch rows or heads share, and they are no narrower than float32.
            def for_each_head(x: Array, axes: str) -> Array:
                sizes = {"B": problem.B, "N": problem.N}
                shape = [sizes.get(letter, size) for letter, size in zip(gradient_axes(x, axes), x.shape)]
                return jnp.broadcast_to(x.astype(jnp.promote_types(x.dtype, jnp.float32)), shape)

            learned = [for_each_head(*leaf) for leaf in learned_arrays(problem, operands)]
            arrays = like((*operands[:3], learned), (operands, attended, cotangents))
            own, pull = jax.vjp(call, *arrays)
            d_lse = jnp.zeros_like(own.lse) if cotangents.lse is None else cotangents.lse
            *gradients, d_learned = pull(Attended(cotangents.out.astype(problem.out_dtype), d_lse))
            return Gradients(*gradients, tuple(d_learned))

        return _choose(run_own, run_other, operands, attended, cotangents, platform=platform)

    return Backend(
        name=own.name, supports=own.supports, forward=forward, backward=None if own.backward is None else backward
    )


def _choose(own: Callable, other: Callable, *arguments: Any, platform: str) -> Any:
    """`jax.lax.platform_dependent` without derivative and batching, that lowers each for its own platforms alone.

    JAX's (0.11.2) lowers every branch for all platforms of the program, and Pallas says "Only interpret mode is
    supported on CPU backend", though that branch would not run there.
    """
    leaves, tree = jax.tree.flatten(arguments)

    def traced(function: Callable) -> tuple[ClosedJaxpr, Any]:
        def flat(*leaves: Array) -> Any:
            return function(*jax.tree.unflatten(tree, leaves))

        return jax.make_jaxpr(flat, return_shape=True)(*leaves)

    (own_jaxpr, result), (other_jaxpr, _) = traced(own), traced(other)
    found, wanted = ([str(aval) for aval in jaxpr.out_avals] for jaxpr in (other_jaxpr, own_jaxpr))
    assert found == wanted, f"the backends give other types, {found} instead of {wanted}"
    results = _choice.bind(*leaves, branches=(own_jaxpr, other_jaxpr), platform=platform)
    return jax.tree.unflatten(jax.tree.structure(result), results)


_choice = Primitive("jflash_choice")
_choice.multiple_results = True
_choice.def_abstract_eval(lambda *avals, branches, platform: branches[0].out_avals)


@_choice.def_impl
def _run_at_once(*arrays: Array, **parameters: Any) -> list[Array]:
    # Only under `jax.disable_jit`, as all else happens inside a jitted call.
    with jax.disable_jit(False):
        return jax.jit(lambda *arrays: _choice.bind(*arrays, **parameters))(*arrays)


def _lower(lowered_for: str | None, context: mlir.LoweringRuleContext, *operands, branches, platform):
    """Lowers one of the two. JAX asks for each platform of the program; None is those without a rule of their own."""
    module = context.module_context
    if lowered_for is not None and len(module.platforms) > 1:
        # Below here the program is for this platform alone; what JAX keeps of functions lowered before may not be.
        caches = {"lowering_cache": {}, "cached_primitive_lowerings": {}}
        context = context.replace(module_context=module.replace(platforms=(lowered_for,), **caches))
    own, other = branches
    function = jaxpr_as_fun(own if lowered_for == platform else other)
    return mlir.lower_fun(function, multiple_results=True)(context, *operands)


for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(_choice, functools.partial(_lower, _platform), platform=_platform)
mlir.register_lowering(_choice, functools.partial(_lower, None))
