"""What the tests of layers share: value and gradients of a function of parameters and inputs, and the error rule."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jflash.testing.budget import measure


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def split(make: Callable[[], nnx.Module], *, seed: int = 7) -> tuple[Any, Callable]:
    """Random parameters for the layer that `make` makes, and the layer as a function of parameters."""
    graph, parameters = nnx.split(nnx.eval_shape(make))
    return randomised(parameters, seed=seed), lambda parameters: nnx.merge(graph, parameters)


def randomised(parameters: Any, *, seed: int = 7) -> Any:
    """Normal numbers for every parameter: biases start at 0 and scales at 1, where their gradients cannot be seen."""
    leaves, tree = jax.tree.flatten(parameters)
    generator = np.random.default_rng(seed)
    new = [jnp.asarray(generator.standard_normal(leaf.shape) * 0.4, leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(tree, new)


def out_and_gradients(call: Callable, *operands: Any, seed: int = 3) -> dict[str, np.ndarray]:
    """The output of `call(*operands)`, and the gradients of all float operands for a random cotangent, by name."""

    def both(*operands):
        out, pull_back = jax.vjp(call, *operands)
        d_out = jnp.asarray(np.random.default_rng(seed).standard_normal(out.shape), out.dtype)
        return out, pull_back(d_out)

    # Nearly all the time of these tests is that of the compiler, and this takes a third less of it.
    out, gradients = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(*operands)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)}
    return {"out": np.asarray(out)} | {name: np.asarray(leaf) for name, leaf in named.items()}


def widened(tree: Any) -> Any:
    """Every floating array as float64; only under `jax.enable_x64(True)`."""
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64) if is_float(leaf) else leaf, tree)


def assert_within_error_rule(
    ours: Callable, plain: Callable, *operands: Any, exact: Callable | None = None, dtype: str = "float32"
) -> None:
    """`ours` against `exact` in float64, with the error of `plain` in the dtype of the operands as the yardstick.

    Without `exact` the truth is that of `plain`, which then must not compute in float32 whatever it is given.
    """
    found = out_and_gradients(ours, *operands)
    # jax.nn.dot_product_attention does not trace 16-bit or float64 operands under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        yardstick = out_and_gradients(plain, *operands)
        with jax.enable_x64(True):
            truth = out_and_gradients(exact or plain, *widened(operands))
    assert found.keys() == truth.keys() == yardstick.keys()
    # The bias of the keys moves all logits of a query alike, so that its gradient is 0: a sum of terms as large as the
    # gradient of the kernel beside it, which therefore is the scale of its error.
    zero = [name for name, right in truth.items() if np.abs(right).max() < 1e-9]
    assert all(name.endswith("['key']['bias']" + name.partition("['bias']")[2]) for name in zero), zero
    for name in zero:
        scale = np.abs(truth[name.replace("bias", "kernel")]).max()
        bound = 2 * np.abs(yardstick[name]).max() + 16 * float(jnp.finfo(dtype).eps) * scale
        assert np.abs(found[name].astype(np.float64) - truth.pop(name)).max() <= bound, name
    wide = ({name: result.astype(np.float64) for name, result in results.items()} for results in (found, yardstick))
    rows = measure(next(wide), truth=truth, plain=next(wide), dtype=dtype)
    assert len(rows) == 2 * len(truth)
    # The mean of a few errors, of a bias or of the scale of a norm, is as much a matter of chance as the largest of
    # them, and the rule for means counts on many. The largest is judged in every array.
    judged = [row for row in rows if row.statistic == "max" or truth[row.name].size >= 100]
    assert all(row.within for row in judged), "\n".join(map(str, judged))


def next_token_loss(logits: Any, tokens: Any) -> Any:
    """The cross-entropy of each next token."""
    log_probabilities = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1).mean()
