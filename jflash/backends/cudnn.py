"""cuDNN's attention through `jax.nn.dot_product_attention`, for what it does rightly where no kernel of ours runs.

JAX differentiates it: one forward and one backward kernel, O(n) memory. Limits come from `check_is_flash_attention` in
JAX 0.11.2 (jax/_src/cudnn/fused_attention_stablehlo.py) and, where that lets pass what cuDNN then refuses, from
cudnn-frontend 3929da2 (include/cudnn_frontend/node/scaled_dot_product_flash_attention.h). Both passes must be possible,
since nobody knows at the forward pass whether a backward pass follows. What has not been shown to be right is refused.

Under `jax.jit` on a mesh with automatic axes the partition rule is JAX's, which wants q, k and v split alike: its error
is "Query, key and value should have same sharding" where key/value heads are fewer than the devices that split the
heads. On meshes with explicit axes and inside `jax.shard_map` that does not arise.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash.backends.protocol import Backend, Operands, name_residuals
from jflash.hardware import Hardware, of_device
from jflash.masks.mask import Interval, MaskStructure
from jflash.numerics.online_softmax import Attended
from jflash.problem import Problem

_DTYPES = ("bfloat16", "float16")


def _supports(problem: Problem, hardware: Hardware) -> str | None:
    p, capability = problem, hardware.compute_capability
    if capability is None or capability < (8, 0):
        return f"cuDNN's attention needs a CUDA device of compute capability 8.0 or above, the hardware is {hardware}"
    if str(p.dtype) not in _DTYPES:
        return f"cuDNN's attention takes {' and '.join(_DTYPES)}, the inputs are {p.dtype}"
    if p.lse:
        return "cuDNN's attention gives no lse that can be differentiated, and the lse is asked for"
    if p.bias is not None:
        shape, dtype = p.bias
        return f"there is no bias on this way to cuDNN's attention, the bias is {dtype}{list(shape)}"
    if p.softcap is not None:
        return f"cuDNN's attention has no softcap, asked for is softcap={p.softcap:g}"
    if p.functions is not None:
        return f"cuDNN's attention runs no score function, as {p.functions.value[0]} is one"
    if p.sinks is not None:
        return f"there are no sinks on this way to cuDNN's attention, they are {p.sinks[1]}{list(p.sinks[0])}"
    if p.dropout_rate:
        return f"cuDNN draws other random numbers, asked for is dropout_rate={p.dropout_rate:g}"
    if p.deterministic:
        return "nothing promises that cuDNN's gradients are bit-equal between runs, as deterministic=True asks"
    if p.Hv != p.H:
        return f"jax.nn hands values to cuDNN only where Hv equals H, they are Hv={p.Hv} and H={p.H}"
    # The backward pass is the narrower one: 256 on Hopper, 128 elsewhere, on Blackwell too.
    most = 256 if capability[0] == 9 else 128
    if p.H % 8 or p.H > most:
        major, minor = capability
        return f"cuDNN takes head dims that are multiples of 8 up to {most} on {major}.{minor}, the head dim is H={p.H}"
    pattern = {} if p.is_empty else _pattern(p.mask, p.T, p.S)
    if isinstance(pattern, str):
        return pattern
    if p.T % 2 or p.S % 2:
        # JAX puts an empty bias where there is none, and then wants what a bias needs (seen on an H200).
        return f"JAX hands cuDNN only even lengths where a backward pass may follow, they are T={p.T} and S={p.S}"
    here = _gpu_here()
    if here is None or here.compute_capability != capability:
        # Not cuDNN's doing: JAX asks for its version, and for the capability of the device, while it traces the call.
        return f"JAX traces cuDNN's attention only where such a GPU is, and here is {here or 'none'}"
    return None


def _gpu_here() -> Hardware | None:
    """The first GPU of this process, by which JAX judges the calls that it traces."""
    return of_device(jax.local_devices()[0]) if jax.default_backend() == "gpu" else None


@functools.lru_cache(maxsize=256)
def _pattern(structure: MaskStructure, T: int, S: int) -> dict[str, Any] | str:
    """The arguments of jax.nn that say which pairs attend, found by the keys that each query sees; or why none do."""
    mask = structure.mask
    if structure.arrays:
        return (
            f"the mask {mask} holds arrays: what padding holds must have no influence and queries without keys must "
            "give 0, and of cuDNN's lengths and biases neither has been shown"
        )
    if not mask.has_spans:
        return f"cuDNN sees an interval of keys for each query, and the mask {mask} does not say that it has one"
    query = np.arange(T)
    hull = mask.key_span(Interval(query, query)).hull
    first = np.broadcast_to(np.maximum(hull.first, 0), (T,))
    last = np.broadcast_to(np.minimum(hull.last, S - 1), (T,))
    if (first > last).any():
        return f"query {np.argmax(first > last)} sees no key: cuDNN does not promise 0 for it"
    if (first == 0).all() and (last == S - 1).all():
        return {}
    if T != S:
        # The keys past the last query would be dead, and whether cuDNN reads what they hold is not known.
        return f"cuDNN's masks are used only where T equals S, they are T={T} and S={S}"
    left = int((query - first).max())
    wrong = (last != query) | (first != np.maximum(query - left, 0))
    if wrong.any():
        q = int(np.argmax(wrong))
        return (
            f"query {q} sees the keys {first[q]} to {last[q]}: cuDNN is used for all keys, for those up to the query, "
            "or for a window that ends at the query"
        )
    # Together with is_causal alone: jax.nn leaves out the right end of a window without it (jax-ml/jax#39576).
    window = {} if left == T - 1 else {"local_window_size": (left, 0)}
    return {"is_causal": True, **window}


def _forward(problem: Problem, tiles: None, operands: Operands) -> Attended:
    q, k, v = (_mapped_axis_first(array) for array in operands[:3])
    pattern = _pattern(problem.mask, problem.T, problem.S)
    out = jax.nn.dot_product_attention(q, k, v, scale=problem.scale, implementation="cudnn", **pattern)
    return name_residuals(Attended(_mapped_axis_first(out), None))


def _mapped_axis_first(x: Array) -> Array:
    """x itself; what `jax.vmap` maps of it, or of its cotangent, lies along the first axis.

    JAX 0.11.2 has a rule for no other: "Currently only support batch_dim in [0, None]".
    """
    return jnp.squeeze(jnp.expand_dims(x, 0), 0)


BACKEND = Backend(name="cudnn", supports=_supports, forward=_forward)
