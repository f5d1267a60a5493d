"""A score or mask function cut in two: what stays inside a kernel, and what is computed outside and streamed to it.

A kernel cannot index arrays of the caller's by what it likes. It can load a number for a head, for each row, column or
diagonal of a tile, and do arithmetic. So whatever of the function does not depend on the logit, nor on query and key
both, is computed outside, for all that it is the same for, whatever indexing it does: `slope[n]` is a stream per head,
`table[q - k + T]` one per diagonal, `values[b, k] * slope[n]` one per key. What remains is arithmetic on the logit, the
indices and the streams.

The outer function is plain JAX: from cotangents of the streams, which a kernel sums, its transpose makes those of the
arguments. It is evaluated at every head, row, column and diagonal, also where the mask hides all of their pairs. There
the cotangent is 0, and the derivative infinite where a function has a pole (`is_total` of `ScoreFunction` is False): 0
times that is NaN. So the derivative of such a function is taken at entries whose cotangent is not 0.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash.errors import ArgumentError
from jflash.scores.expression import INDICES, SHAPES, Part, Place, expression_of
from jflash.scores.function import ScoreFunction, is_float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """An array that a kernel reads beside its tiles.

    Attributes:
      axes: "BN", "BNT", "BNS", "BND" or "BNTS". Entry q - k + S - 1 along D belongs to the diagonal of q and k.
      shape: an axis has size 1 where the stream does not depend on it.
      dtype: of its numbers.
      reason: of a stream for each pair, why it cannot be less; otherwise empty.
    """

    axes: str
    shape: tuple[int, ...]
    dtype: np.dtype
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Streams:
    """A function of (s, b, n, q, k, *args), or of (b, n, q, k, *args), cut in two.

    Attributes:
      streams: what comes from outside.
      inner: the function of (s, q, k, *streams), or of (q, k, *streams): arithmetic alone, on arrays that broadcast.
      outer: the function of args to the arrays of the streams, differentiable.
      outer_where_used: the same, whose derivative by an entry with a cotangent of 0 is 0, whatever it would be.
      step: `inner` as a `ScoreFunction` calls it, with (s, b, n, q, k, *streams).

    Example:
      >>> from jflash.scores.streams import streams_of
      >>> add = lambda s, b, n, q, k, slope: s - slope[n] * abs(q - k).astype(s.dtype)
      >>> cut = streams_of(add, (np.ones(4, np.float32),), B=2, N=4, T=8, S=8, dtype=np.dtype("float32"))
      >>> [(stream.axes, stream.shape) for stream in cut.streams]
      [('BN', (1, 4))]
    """

    streams: tuple[Stream, ...]
    inner: Callable[..., Array]
    outer: Callable[..., tuple[Array, ...]]
    outer_where_used: Callable[..., tuple[Array, ...]]
    step: Callable[..., Array]

    @property
    def per_pair(self) -> tuple[str, ...]:
        """Why some streams have a number for each pair; empty where none has."""
        return tuple(stream.reason for stream in self.streams if stream.reason)


def streams_of(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    B: int,
    N: int,
    T: int,
    S: int,
    dtype: np.dtype | None,
    axes: Sequence[str] | None = None,
) -> Streams:
    """Cuts a function in two. The same function with arrays of the same shapes gives the same record, traced once.

    Args:
      fn: `score_fn` of `flash_attention`, or the function of a `MaskFn`.
      args: what it takes after the indices; `jax.ShapeDtypeStruct` will do.
      dtype: of the logit; None for a function of indices alone.
      axes: "B" or "BN" for each of the args of which the function gets its value for batch row and head; any other
        letters, and None for all, for those that it gets whole.

    Raises:
      ArgumentError: the function does with the logit what is no arithmetic, index an array by it say.
    """
    structs = tuple(jax.ShapeDtypeStruct(np.shape(arg), jax.dtypes.canonicalize_dtype(arg.dtype)) for arg in args)
    axes = tuple("" for _ in args) if axes is None else tuple(axes)
    return _streams_of(fn, structs, axes, (("B", B), ("N", N), ("T", T), ("S", S)), dtype)


def streamed(function: ScoreFunction, *, T: int, S: int, dtype: np.dtype) -> ScoreFunction:
    """The same step for a kernel: a function that indexes nothing, and arrays by axes in place of whole ones.

    Differentiate through this: the cotangents of whole arrays are made here from those of the streams.

    Args:
      function: with arrays or `jax.ShapeDtypeStruct`; of a whole call, or of one device's batch rows and heads.
      dtype: of the logits.

    Raises:
      ArgumentError: as of `streams_of`.
    """
    if all("B" in axes for axes in function.axes):
        return function
    sizes = {"B": function.b.shape[0], "N": function.n.shape[1], "T": T, "S": S}
    cut = streams_of(function.fn, function.arrays, axes=function.axes, dtype=dtype, **sizes)
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in function.arrays):
        arrays = tuple(jax.ShapeDtypeStruct(stream.shape, stream.dtype) for stream in cut.streams)
    else:
        outer = cut.outer if function.is_total else cut.outer_where_used
        arrays = outer(*function.arrays, b=function.b, n=function.n)
    axes = tuple(stream.axes for stream in cut.streams)
    return dataclasses.replace(function, fn=cut.step, arrays=arrays, axes=axes)


# Cached, so that `inner` is one function object: it is part of what is compiled.
@functools.lru_cache(maxsize=256)
def _streams_of(
    fn: Callable[..., Any],
    structs: tuple[jax.ShapeDtypeStruct, ...],
    axes: tuple[str, ...],
    lengths: tuple[tuple[str, int], ...],
    dtype: np.dtype | None,
) -> Streams:
    sizes, given = dict(lengths), ("s", *INDICES) if dtype is not None else INDICES
    scalars = [jax.ShapeDtypeStruct((), dtype if name == "s" else np.int32) for name in given]
    at_one_pair = [jax.ShapeDtypeStruct((), x.dtype) if "B" in own else x for x, own in zip(structs, axes)]
    depends = [{name} for name in given] + [_depends(x.shape, own) for x, own in zip(structs, axes)]
    inputs, (result,) = expression_of(fn, [*scalars, *at_one_pair], depends)
    own, of_arrays = dict(zip(given, inputs)), inputs[len(given) :]
    cuts: dict[Part, str] = {}
    _cut(result, cuts)
    streams = tuple(_describe(part, reason, sizes) for part, reason in cuts.items())

    def inner(*values: Any) -> Array:
        known = dict(zip((*(own[name] for name in ("s", "q", "k") if name in own), *cuts), values, strict=True))
        return _evaluate(result, known, _on_arrays)

    def outer(*args: Any, b: Any = None, n: Any = None, used: Sequence[Array] | None = None) -> tuple[Array, ...]:
        # A device of a mesh has some of the batch rows and heads, whose numbers these are.
        b = jnp.arange(sizes["B"], dtype=np.int32) if b is None else jnp.asarray(b)
        n = jnp.arange(sizes["N"], dtype=np.int32)[None] if n is None else jnp.asarray(n)

        def at(part: Part, args: Sequence[Any], row: Array, head: Array, q: Array, k: Array) -> Array:
            known = dict(zip((own[name] for name in INDICES), (b[row], n[0, head], q, k)))
            known |= {x: _at(arg, letters, row, head) for x, arg, letters in zip(of_arrays, args, axes, strict=True)}
            return _evaluate(part, known, lambda operation, *values: operation.run(*values))

        def stream_of(part: Part, stream: Stream, used: Array | None) -> Array:
            # Where nothing has a cotangent there is no entry to stand in: then nothing is differentiated.
            own_args = args if used is None else [_differentiated_if(used.any(), x) for x in args]
            return _over_axes(functools.partial(at, part, own_args), stream, sizes, used)

        used = (None,) * len(streams) if used is None else used
        return tuple(map(stream_of, cuts, streams, used))

    @functools.wraps(fn)
    def step(s: Any, b: Any, n: Any, q: Any, k: Any, *values: Any) -> Array:
        return inner(s, q, k, *values)

    return Streams(streams=streams, inner=inner, outer=outer, outer_where_used=_where_used(outer), step=step)


def _where_used(outer: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """`outer`, differentiated at entries with a cotangent, which also stand in for those without one."""

    @jax.custom_vjp
    def guarded(args: tuple, b: Any, n: Any) -> tuple[Array, ...]:
        return outer(*args, b=b, n=n)

    def forward(*operands: Any) -> tuple[tuple[Array, ...], tuple]:
        return guarded(*operands), operands

    def backward(operands: tuple, cotangents: tuple[Array, ...]) -> tuple:
        args, b, n = operands
        # Streams of whole numbers have none.
        used = [None if x.dtype == jax.dtypes.float0 else x != 0 for x in cotangents]
        _, pull = jax.vjp(lambda *args: outer(*args, b=b, n=n, used=used), *args)
        return pull(cotangents), None, None

    guarded.defvjp(forward, backward)
    return lambda *args, b=None, n=None: guarded(args, b, n)


def _differentiated_if(condition: Array, x: Any) -> Any:
    """`x`, whose cotangent is 0 where the condition does not hold."""
    return jnp.where(condition, x, jax.lax.stop_gradient(x)) if is_float(x) else x


def _depends(shape: tuple[int, ...], axes: str) -> set[str]:
    """On what an argument depends for the function."""
    along = {index for index, letter, size in zip("bn", "BN", shape) if letter in axes and size > 1}
    return {"arrays"} | (along if "B" in axes else set())


def _at(array: Any, axes: str, row: Any, head: Any) -> Any:
    """What the function gets of an argument, for the batch row and head of these places."""
    if "B" not in axes:
        return array
    return array[tuple(place if size > 1 else 0 for place, size in zip((row, head), array.shape))]


def _cut(part: Part, cuts: dict[Part, str]) -> None:
    """Adds to `cuts` what a kernel must get of a part, each with the reason why it is for each pair, or with none."""
    if part in cuts or (part.operation is None and not part.depends - {"s", "q", "k"}) or part.is_plain:
        return
    is_hard = part.operation is not None and part.operation.bind is None
    if "s" in part.depends:
        if is_hard:
            found = f"a function that does `{part.operation.name}` with the logit"
            raise ArgumentError("score_fn", found=found, wanted="arithmetic on the logit")
    elif part.place in (Place.NOWHERE, Place.QUERY, Place.KEY) or (part.place is Place.DIAGONAL and part.is_crossed):
        cuts[part] = ""
        return
    elif is_hard:
        cuts[part] = _why_for_each_pair(part)
        return
    for operand in part.operands:
        _cut(operand, cuts)


def _why_for_each_pair(part: Part) -> str:
    while part.operation.name in SHAPES:
        part = part.operands[0]
    arrays = ", ".join(f"{x.aval.dtype}{list(x.aval.shape)}" for x in part.operands if x.aval.shape)
    return f"`{part.operation.name}` of {arrays or 'numbers'} depends on query and key otherwise than by q - k"


def _describe(part: Part, reason: str, sizes: Mapping[str, int]) -> Stream:
    axes = "BN" + part.place.value
    along = {"b": "B", "n": "N"}
    shape = [sizes[letter] if index in part.depends else 1 for index, letter in along.items()]
    shape += [sizes["T"] + sizes["S"] - 1 if letter == "D" else sizes[letter] for letter in part.place.value]
    return Stream(axes=axes, shape=tuple(shape), dtype=np.dtype(part.aval.dtype), reason=reason)


def _over_axes(at: Callable[..., Array], stream: Stream, sizes: Mapping[str, int], used: Array | None) -> Array:
    """The array of a stream, from the function of (row, head, q, k) that it is at one pair.

    With `used`, an entry that is not used is that of the first which is.
    """
    index = {letter: jnp.arange(size, dtype=np.int32) for letter, size in zip(stream.axes, stream.shape)}
    if "D" in index:
        # Of q and k it depends on q - k alone, so k = 0 stands for all.
        index["T"] = index.pop("D") - (sizes["S"] - 1)
    arguments = [index.get(letter, jnp.zeros(1, np.int32)) for letter in "BNTS"]
    if used is not None:
        entries = [x.reshape(-1) for x in jnp.broadcast_arrays(*jnp.ix_(*arguments))]
        used = used.reshape(-1)
        return jax.vmap(at)(*(jnp.where(used, x, x[jnp.argmax(used)]) for x in entries)).reshape(stream.shape)
    for axis in reversed(range(4)):
        at = jax.vmap(at, in_axes=[0 if axis == own else None for own in range(4)])
    return at(*arguments).reshape(stream.shape)


def _evaluate(part: Part, known: dict[Part, Any], apply: Callable[..., Sequence[Any]]) -> Any:
    """The value of a part; `known` holds those of some parts, and gets those of all that it needs."""
    if part in known:
        return known[part]
    if part.operation is None:
        return part.value
    values = [_evaluate(operand, known, apply) for operand in part.operands]
    known[part] = apply(part.operation, *values)[part.output]
    return known[part]


def _on_arrays(operation: Any, *values: Any) -> Sequence[Any]:
    # Arithmetic primitives take operands of one shape; those of a kernel have it already.
    shape = np.broadcast_shapes(*map(np.shape, values))
    return operation.bind(*(value if np.shape(value) == shape else jnp.broadcast_to(value, shape) for value in values))
