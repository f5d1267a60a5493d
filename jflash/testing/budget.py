"""The error rule: what a backend may be off, derived and not chosen.

Against float64, for the result and every gradient, for the maximum and the mean of the absolute error:

    error <= 2 * plain + c * eps(dtype) * scale

`plain` is the error of dense attention in the same precision on the same device: logits and softmax in float32, P and
dS rounded to the input dtype before their matmuls, accumulation in float32; float32 inputs at HIGHEST. `scale` is the
largest |truth| for the maximum and the mean |truth| for the mean. c is 1, but 16 for the maximum of float32 and
float64, where a plain flash loop needs up to 9.6.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash.api import flash_attention, flash_attention_with_lse
from jflash.errors import ArgumentError
from jflash.masks import Dense
from jflash.numerics.dropout import column_word, is_kept, pair_bits, row_words
from jflash.numerics.logits import logits
from jflash.numerics.precision import compute_dtype, matmul_precision
from jflash.scores import score_function
from jflash.testing.inputs import Inputs
from jflash.testing.workloads import DROPOUT_KEY, Workload

_RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias")

type Results = dict[str, np.ndarray]
type Learned = dict[str, Array]
# (q, k, v, bias, learned) to out and lse; None for lse where out is the whole result.
type Attention = Callable[[Array, Array, Array, Array | None, Learned], tuple[Array, Array | None]]
# The same of some of the pairs: with the booleans of the mask, and the first b, n, q and k.
type PartialAttention = Callable[[Array, Array, Array, Array | None, Learned, Array, Array], tuple[Array, Array]]

# Pairs of query and key that truth and plain attention hold at a time: 64 MiB in float64, and the derivative of the
# reference needs about six such arrays. Small workloads are one piece.
_PIECE_PAIRS = 2**23


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The error of one result against its bound.

    Attributes:
      name: "out", "lse", "dq", "dk", "dv", "dbias", or "d" and the name of what else is learned.
      statistic: "max" or "mean".
      error: of the backend; NaN and misplaced infinities count as infinite.
      plain: of plain attention.
      bound: what the rule allows.
    """

    name: str
    statistic: str
    error: float
    plain: float
    bound: float

    @property
    def within(self) -> bool:
        # Where plain attention overflows too, the bound is infinite; the result is wrong all the same.
        return math.isfinite(self.error) and self.error <= self.bound

    @property
    def ratio(self) -> float:
        """The error as a part of its bound."""
        return _part(self.error, self.bound)

    @property
    def plain_ratio(self) -> float:
        """The error of plain attention as a part of the same bound."""
        return _part(self.plain, self.bound)

    def __str__(self) -> str:
        verdict = "within" if self.within else "ABOVE"
        return f"{self.name} {self.statistic}: {self.error:.3g} {verdict} {self.bound:.3g} (plain {self.plain:.3g})"


def forward_and_backward(attention: Attention) -> Callable[..., tuple[Array | None, ...]]:
    """The function of `Inputs` that gives out, lse and every gradient of `attention(q, k, v, bias, learned)`.

    An attention that gives None for lse takes inputs whose d_lse is None.
    """

    def run(q, k, v, bias, d_out, d_lse, learned):
        found, pull = jax.vjp(attention, q, k, v, bias, learned)
        # A NamedTuple's cotangent is one of its own kind.
        cotangent = jax.tree.unflatten(jax.tree.structure(found), jax.tree.leaves((d_out, d_lse)))
        return *found, *pull(cotangent)

    return run


def results_of(arrays: tuple[Array | None, ...]) -> Results:
    """What `forward_and_backward` gave, by name and as float64 on the host."""
    *plain, d_learned = arrays
    named = dict(zip(_RESULTS, plain)) | {f"d{name}": array for name, array in d_learned.items()}
    return {name: np.asarray(array, np.float64) for name, array in named.items() if array is not None}


def compute(attention: Attention, inputs: Inputs) -> Results:
    """Output, lse and every gradient of `attention(q, k, v, bias, learned) -> (out, lse)`."""
    return results_of(jax.jit(forward_and_backward(attention))(*inputs))


def attention_of(workload: Workload, *, lse: bool = True, **arguments) -> Attention:
    """The public call on a workload, with `backend=` or `tiles=` as given; without `lse` it is `flash_attention`."""
    arguments |= {"mask": workload.mask, "softcap": workload.softcap}

    def attention(q, k, v, bias, learned):
        terms = {name: learned[name] for name in ("alibi_slopes", "sinks") if name in learned}
        if workload.score_fn is not None:
            terms |= {"score_fn": workload.score_fn, "score_args": _score_args(workload, learned)}
        terms |= _dropout_of(workload)
        if not lse:
            return flash_attention(q, k, v, bias=bias, **terms, **arguments), None
        return flash_attention_with_lse(q, k, v, bias=bias, **terms, **arguments)

    return attention


def _dropout_of(workload: Workload) -> dict[str, Any]:
    if not workload.dropout_rate:
        return {}
    return {"dropout_rate": workload.dropout_rate, "dropout_key": DROPOUT_KEY}


def _score_args(workload: Workload, learned: Learned) -> tuple[Array, ...]:
    return tuple(learned.get(f"score_arg_{i}", arg) for i, arg in enumerate(workload.score_args))


def truth_of(workload: Workload, inputs: Inputs) -> Results:
    """Results in float64 throughout, from the reference backend.

    Raises:
      ArgumentError: a workload with dropout is too large to be computed in one piece: a pair's number is among all.
    """
    if workload.dropout_rate and len(list(_pieces(workload))) > 1:
        found = f"{workload.B * workload.N * workload.T * workload.S} pairs with dropout"
        raise ArgumentError("workload", found=found, wanted=f"at most {_PIECE_PAIRS}")

    def reference(q, k, v, bias, learned, allowed, first):
        score_fn, score_args = _score_of(workload, learned, first)
        return flash_attention_with_lse(
            q, k, v, mask=Dense(allowed), bias=bias, softcap=workload.softcap, score_fn=score_fn, score_args=score_args,
            sinks=learned.get("sinks"), backend="reference", **_dropout_of(workload),
        )  # fmt: skip

    with jax.enable_x64(True):
        return _dense_results(reference, workload, inputs, np.dtype(np.float64))


def plain_of(workload: Workload, inputs: Inputs) -> Results:
    """Results of plain dense attention in the precision of the workload."""
    attention = functools.partial(_plain_attention, workload)
    sums = _dense_results(attention, workload, inputs, compute_dtype(np.dtype(workload.dtype)))
    q, k, v, bias, *_ = inputs
    # Rounded after the sum over pieces, to the dtype of the operand; lse keeps the dtype computed in.
    operands = {"out": q, "dq": q, "dk": k, "dv": v, "dbias": bias}
    operands |= {f"d{name}": array for name, array in inputs.learned.items()}
    # As JAX rounds: what is beyond the largest float16 is inf, without a warning.
    with np.errstate(over="ignore"):
        sums |= {name: sums[name].astype(operand.dtype) for name, operand in operands.items() if name in sums}
    return {name: result.astype(np.float64) for name, result in sums.items()}


def measure(found: Results, *, truth: Results, plain: Results, dtype: str) -> list[Measured]:
    """Every error with its bound, two for each result."""
    rows = []
    for name, right in truth.items():
        # lse has the dtype computed in, whatever that of the inputs.
        own_dtype = compute_dtype(np.dtype(dtype)) if name == "lse" else np.dtype(dtype)
        eps = float(jnp.finfo(own_dtype).eps)
        is_wide = own_dtype.itemsize >= 4
        size = np.abs(right[np.isfinite(right)])
        for statistic, reduce, c in (("max", np.max, 16 if is_wide else 1), ("mean", np.mean, 1)):
            error, plain_error = (_error(result[name], right, reduce) for result in (found, plain))
            scale = float(reduce(size)) if size.size else 0.0
            row = Measured(
                name=name, statistic=statistic, error=error, plain=plain_error, bound=2 * plain_error + c * eps * scale
            )
            rows.append(row)
    return rows


def _error(found: np.ndarray, right: np.ndarray, reduce: Callable) -> float:
    if found.shape != right.shape:
        return np.inf
    if not right.size:
        return 0.0
    # -inf is a right answer of lse, and only there where the truth has it. NaN is one nowhere.
    same = found == right
    difference = np.abs(np.where(same, 0, found) - np.where(same, 0, right))
    return float(reduce(np.where(np.isnan(difference), np.inf, difference)))


def _part(error: float, bound: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return error / bound if bound else (math.inf if error else 0.0)


def _score_of(workload: Workload, learned: Learned, first: Array) -> tuple[Callable | None, tuple[Array, ...]]:
    """One function for ALiBi and the workload's own, written down once more, and its arrays.

    It is for calls on a part of all pairs, whose indices count from `first`.
    """
    if workload.alibi_slopes is None and workload.score_fn is None:
        return None, ()

    def score(s, b, n, q, k, first, slopes, offset, *args):
        b, n, q, k = (index + start for index, start in zip((b, n, q, k), first))
        if workload.alibi_slopes is not None:
            s = s - slopes[b % len(slopes), n] * jnp.abs(q + offset[b % len(offset)] - k).astype(s.dtype)
        return s if workload.score_fn is None else workload.score_fn(s, b, n, q, k, *args)

    slopes = jnp.atleast_2d(learned.get("alibi_slopes", 0.0))
    offset = jnp.atleast_1d(jnp.asarray((*workload.mask.offsets(), 0)[0], np.int32))
    return score, (first, slopes, offset, *_score_args(workload, learned))


def _dense_results(attention: PartialAttention, workload: Workload, inputs: Inputs, dtype: np.dtype) -> Results:
    """Results of `attention` on inputs held in `dtype`, a piece of all pairs at a time.

    What several pieces contribute to is summed in `dtype`. Inputs without d_lse have results without lse.
    """
    w = workload
    is_with_lse = inputs.d_lse is not None
    if not is_with_lse:
        inputs = inputs._replace(d_lse=np.zeros((w.B, w.N, w.T), dtype))
    mask = w.mask.bind(B=w.B, N=w.N, T=w.T, S=w.S)
    wide = jax.tree.map(lambda array: np.asarray(array, dtype), inputs)

    # Each piece runs for milliseconds: XLA on a GPU would spend minutes on measuring candidates for its matmuls.
    @functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
    def run(q, k, v, bias, d_out, d_lse, learned, allowed, first):
        found, pull = jax.vjp(lambda *operands: tuple(attention(*operands, allowed, first)), q, k, v, bias, learned)
        *gradients, d_learned = pull((d_out, d_lse))
        return *found, *gradients, *d_learned.values()

    *arrays, learned = wide
    q, k, v, bias, d_out, d_lse = arrays
    likes = {"out": d_out, "lse": d_lse, "dq": q, "dk": k, "dv": v, "dbias": bias}
    likes |= {f"d{name}": array for name, array in sorted(learned.items())}
    totals = {name: np.zeros_like(like) for name, like in likes.items() if like is not None}
    input_axes = ("BTNH", "BSKH", "BSKH", "BNTS", "BTNH", "BNT")
    # Arrays without axes that are cut are whole in every piece.
    learned_axes = {name: "BN"[2 - array.ndim :] if name == "sinks" else "" for name, array in sorted(learned.items())}
    axes_of = dict(zip(("out", "lse", "dq", "dk", "dv", "dbias"), ("BTNH", "BNT", *input_axes)))
    axes_of |= {f"d{name}": axes for name, axes in learned_axes.items()}
    for piece in _pieces(w):
        b, n, t, s = np.ix_(*(np.arange(size)[piece[axis]] for axis, size in zip("BNTS", (w.B, w.N, w.T, w.S))))
        own = [None if array is None else array[_cut(array, axes, piece)] for array, axes in zip(arrays, input_axes)]
        own_learned = {name: array[_cut(array, learned_axes[name], piece)] for name, array in learned.items()}
        first = np.array([index.flat[0] for index in (b, n, t, s)], np.int32)
        results = run(*own, own_learned, np.asarray(mask.allowed(t, s, b=b, n=n)), first)
        given = (result for result in results if result is not None)
        for (name, total), result in zip(totals.items(), given, strict=True):
            total[_cut(total, axes_of[name], piece)] += np.asarray(result)
    return totals if is_with_lse else {name: total for name, total in totals.items() if name != "lse"}


def _pieces(workload: Workload) -> Iterator[dict[str, slice]]:
    """Parts of all pairs of query and key: for each axis that is cut, by its letter, a slice of it."""
    w = workload
    if w.B * w.N * w.T * w.S <= _PIECE_PAIRS:
        yield {axis: slice(None) for axis in "BNKTS"}
        return
    group = w.N // w.K
    rows = max(1, _PIECE_PAIRS // (group * w.S))
    for b, k, t in itertools.product(range(w.B), range(w.K), range(0, w.T, rows)):
        heads = slice(k * group, (k + 1) * group)
        yield {"B": slice(b, b + 1), "N": heads, "K": slice(k, k + 1), "T": slice(t, t + rows), "S": slice(None)}


def _cut(array: np.ndarray, axes: str, piece: dict[str, slice]) -> tuple[slice, ...]:
    """The index of a piece of an array, whose axes of size 1 broadcast."""
    return tuple(piece.get(axis, slice(None)) if size > 1 else slice(None) for axis, size in zip(axes, array.shape))


def _plain_attention(
    workload: Workload,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    learned: Learned,
    allowed: Array,
    first: Array,
) -> tuple[Array, Array]:
    """Out and lse, in the dtype computed in. The operands have it too, but hold numbers of `workload.dtype`."""
    w, dtype = workload, np.dtype(workload.dtype)
    precision = matmul_precision(dtype)
    k, v = (jnp.repeat(array, w.N // w.K, axis=2) for array in (k, v))

    qk = jnp.einsum("btnh,bsnh->bnts", q, k, precision=precision)
    qk = _round_cotangent(qk, dtype)
    steps = _plain_steps(w, learned, first)
    score = logits(qk, scale=w.H**-0.5, bias=bias, cap=w.softcap, steps=steps, allowed=allowed)
    sink = jnp.atleast_2d(learned.get("sinks", -jnp.inf)).astype(score.dtype)[..., None, None]
    top = jax.lax.stop_gradient(jnp.maximum(score.max(-1, keepdims=True), sink))
    top = jnp.where(top == -jnp.inf, 0, top)
    weight = jnp.exp(score - top)
    total = weight.sum(-1, keepdims=True) + jnp.exp(sink - top)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    p = _round_value(_dropped(w, weight / total, first), dtype)
    out = jnp.einsum("bnts,bsnd->btnd", p, v, precision=precision)
    lse = jnp.where(dead, -jnp.inf, top + jnp.log(total))[..., 0]
    return out, lse


def _dropped(workload: Workload, p: Array, first: Array) -> Array:
    """The weights after dropout."""
    if not workload.dropout_rate:
        return p
    b, n, q, k = (index + start for index, start in zip(np.ix_(*map(np.arange, p.shape)), first))
    bits = pair_bits(row_words(jnp.asarray(DROPOUT_KEY), b, n, q), column_word(k))
    return jnp.where(is_kept(bits, workload.dropout_rate), p / (1 - workload.dropout_rate), 0)


def _plain_steps(workload: Workload, learned: Learned, first: Array) -> Callable[..., Array] | None:
    score_fn, score_args = _score_of(workload, learned, first)
    if score_fn is None:
        return None

    def steps(s: Array, counts: Array | None) -> Array:
        B, N, T, S = s.shape
        function = score_function(score_fn, score_args, B=B, N=N, dtype=s.dtype)
        t, keys = jnp.ix_(jnp.arange(T, dtype=np.int32), jnp.arange(S, dtype=np.int32))
        place = lambda array, axes: array.reshape(*array.shape, *(1,) * (4 - len(axes)))  # noqa: E731
        return function.apply(s, t, keys, allowed=counts, place=place)

    return steps


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _round_value(x: Array, dtype) -> Array:
    """x rounded to `dtype`; the derivative is that of x itself."""
    return x.astype(dtype).astype(x.dtype)


_round_value.defvjp(lambda x, dtype: (_round_value(x, dtype), None), lambda dtype, _, d_x: (d_x,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _round_cotangent(x: Array, dtype) -> Array:
    """x itself; its cotangent is rounded to `dtype`."""
    return x


_round_cotangent.defvjp(lambda x, dtype: (x, None), lambda dtype, _, d_x: (d_x.astype(dtype).astype(d_x.dtype),))
