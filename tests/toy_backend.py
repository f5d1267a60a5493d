"""A kernel of a few lines, for what is around kernels: custom_vjp, the vmap rule, the partition rule, the registry.

It is dense, one program per batch row and head, but it is a real `pallas_call` (interpreted on the CPU), streams what
the mask declares by axis, and evaluates the mask inside. `launches` counts how often each of its kernels is traced.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jflash.backends.protocol import Backend, Gradients, Operands, gradient_axes, learned_arrays, logit_arrays
from jflash.hardware import Hardware
from jflash.masks.mask import Value
from jflash.numerics.logits import logits
from jflash.numerics.online_softmax import Attended, delta_of
from jflash.numerics.varying import result_struct
from jflash.problem import Problem
from jflash.scores import streamed

launches: collections.Counter[str] = collections.Counter()


def supports(problem: Problem, hardware: Hardware) -> str | None:
    for function in problem.functions.value if problem.functions else ():
        # As kernels get it, from `vjp.kernel_attention`.
        for array, axes in streamed(function, T=problem.T, S=problem.S, dtype=np.dtype(np.float32)).leaves():
            if axes not in ("B", "BN", "BNT", "BNS", "BND"):
                return f"the toy kernel takes no {array.dtype} with axes {axes} of a score function"
    if problem.dropout_rate:
        return "the toy kernel drops nothing out"
    if problem.dtype.itemsize > 4:
        return f"the toy kernel computes in float32, the inputs are {problem.dtype}"
    return None


def _spec(shape, axes, group):
    """One program's block of an array: its own batch row and head, all of the other axes. Size 1 broadcasts."""
    block = tuple(1 if axis in "BNK" else size for axis, size in zip(axes, shape))
    position = {"B": lambda b, n: b, "N": lambda b, n: n, "K": lambda b, n: n // group}

    def index(b, n):
        return tuple(position[a](b, n) if a in position and size > 1 else 0 for a, size in zip(axes, shape))

    return pl.BlockSpec(block, index)


def _call(name, kernel, problem, operands, extra, extra_axes, results):
    launches[name] += 1
    of_mask, of_logits = operands.mask.values(), _values_of_logits(operands)
    values = [_expanded(value, problem) for value in (*of_mask, *of_logits)]
    sinks = jnp.full((1, 1), -jnp.inf) if operands.sinks is None else operands.sinks
    arrays = (*operands[:3], *values, sinks, *extra)
    axes = ("BTNH", "BSKH", "BSKD", *("BNTS" for _ in values), "BN", *extra_axes)
    functions = [(function.fn, len(function.arrays)) for function in operands.functions]
    score = functools.partial(_score, problem, operands.mask, len(of_mask), functions)
    return pl.pallas_call(
        functools.partial(kernel, problem, score, 3 + len(values)),
        grid=(problem.B, problem.N),
        in_specs=[_spec(array.shape, own, problem.group) for array, own in zip(arrays, axes)],
        out_specs=[_spec(shape, own, 1) for shape, own in results],
        out_shape=[result_struct(shape, jnp.float32, arrays) for shape, _ in results],
        interpret=True,
        name=name,
    )(*arrays)


def _expanded(value, problem):
    """The array with axes B, N, T and S, of diagonals too."""
    if value.axes != "BND":
        return value.expanded()
    t, s = np.ogrid[: problem.T, : problem.S]
    return value.array[..., t - s + (problem.S - 1)]


def _along_diagonals(x):
    *leading, T, S = x.shape
    t, s = np.ogrid[:T, :S]
    return jnp.zeros((*leading, T + S - 1), x.dtype).at[..., t - s + (S - 1)].add(x)


def _values_of_logits(operands):
    return [Value(array, axes) for array, axes in logit_arrays(operands)]


def _score(problem, mask, count, functions, refs):
    """q, k and v, the product of q and k, the values of the logits, and the function of both to the logits."""
    q_ref, k_ref, v_ref, *value_refs = refs
    q, k, v = (ref[0, :, 0, :].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref))
    t = jax.lax.broadcasted_iota(jnp.int32, (problem.T, problem.S), 0)
    s = jax.lax.broadcasted_iota(jnp.int32, (problem.T, problem.S), 1)
    allowed = mask.evaluate(t, s, *(ref[0, 0] for ref in value_refs[:count]))
    q = jnp.where(allowed.any(1)[:, None], q, 0)
    live_key = allowed.any(0)[:, None]
    k, v = jnp.where(live_key, k, 0), jnp.where(live_key, v, 0)

    def of(qk, *values):
        bias, values = (None, values) if problem.bias is None else (values[0], values[1:])

        def steps(score, _):
            rest = values
            for fn, arrays in functions:
                (*own, b, n), rest = rest[: arrays + 2], rest[arrays + 2 :]
                score = fn(score, b, n, t, s, *own)
            return score

        steps = steps if functions else None
        return logits(qk, scale=problem.scale, bias=bias, cap=problem.softcap, steps=steps, allowed=allowed)

    values = [ref[0, 0] for ref in value_refs[count:]]
    values = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in values]
    return q, k, v, jnp.dot(q, k.T, precision="highest"), values, of


def _forward_kernel(problem, score, count, *refs):
    _, _, v, qk, values, of = score(refs[:count])
    sink_ref, out_ref, lse_ref = refs[count:]
    logit, sink = of(qk, *values), sink_ref[0, 0]
    top = jnp.maximum(logit.max(1), sink)
    top = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.exp(logit - top[:, None])
    total = p.sum(1) + jnp.exp(sink - top)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    out_ref[0, :, 0, :] = jnp.dot(p / total[:, None], v, precision="highest")
    lse_ref[0, 0, :] = jnp.where(dead, -jnp.inf, top + jnp.log(total))


def _backward_kernel(learned, problem, score, count, *refs):
    q, k, v, qk, values, of = score(refs[:count])
    _, lse_ref, d_out_ref, delta_ref, dq_ref, dk_ref, dv_ref, *d_value_refs = refs[count:]
    logit, pull = jax.vjp(of, qk, *values)
    lse = lse_ref[0, 0, :]
    dead = (logit == -jnp.inf).all(1)
    p = jnp.exp(logit - jnp.where(dead, 0, lse)[:, None])
    d_out = jnp.where(dead[:, None], 0, d_out_ref[0, :, 0, :].astype(jnp.float32))
    delta = jnp.where(dead, 0, delta_ref[0, 0, :])
    dp = jnp.dot(d_out, v.T, precision="highest")
    ds, *d_values = pull(p * (dp - delta[:, None]))
    dq_ref[0, :, 0, :] = jnp.dot(ds, k, precision="highest")
    dk_ref[0, :, 0, :] = jnp.dot(ds.T, q, precision="highest")
    dv_ref[0, :, 0, :] = jnp.dot(p.T, d_out, precision="highest")
    for ref, index in zip(d_value_refs, learned, strict=True):
        ref[0, 0] = d_values[index].reshape(ref.shape[2:])


def _forward(problem: Problem, tiles: None, operands: Operands) -> Attended:
    B, T, N, Hv = problem.B, problem.T, problem.N, problem.Hv
    results = [((B, T, N, Hv), "BTND"), ((B, N, T), "BNT")]
    out, lse = _call("toy_forward", _forward_kernel, problem, operands, (), (), results)
    return Attended(out.astype(problem.out_dtype), lse)


def _backward(problem: Problem, tiles: None, operands: Operands, attended: Attended, cotangents: Attended) -> Gradients:
    B, T, S, N, K = problem.B, problem.T, problem.S, problem.N, problem.K
    # Each program writes the share of its query head; the group is summed in float32.
    results = [((B, T, N, problem.H), "BTNH"), ((B, S, N, problem.H), "BSNH"), ((B, S, N, problem.Hv), "BSND")]
    values, wanted = _values_of_logits(operands), learned_arrays(problem, operands)
    learned = [i for i, value in enumerate(values) if any(value.array is array for array, _ in wanted)]
    # Of diagonals that of each pair, which is summed below.
    results += [((B, N, T, S), "BNTS") if axes == "BND" else ((B, N, *array.shape[2:]), axes) for array, axes in wanted]
    kernel = functools.partial(_backward_kernel, learned)
    extra = (attended.lse, cotangents.out, delta_of(attended, cotangents))
    found = _call("toy_backward", kernel, problem, operands, extra, ("BNT", "BTND", "BNT"), results)
    dq, dk, dv, *d_values = found
    dk, dv = (x.reshape(B, S, K, problem.group, -1).sum(3) for x in (dk, dv))
    d_values = [_along_diagonals(x) if axes == "BND" else x for x, (_, axes) in zip(d_values, wanted)]
    letters = (gradient_axes(*leaf) for leaf in wanted)
    shared = ([axis for axis, letter in enumerate(own) if letter in "bn"] for own in letters)
    d_values = [x.sum(axes, keepdims=True) if axes else x for x, axes in zip(d_values, map(tuple, shared))]
    return Gradients(*(x.astype(problem.dtype) for x in (dq, dk, dv)), tuple(d_values))


BACKEND = Backend(name="toy", supports=supports, forward=_forward, backward=_backward)
