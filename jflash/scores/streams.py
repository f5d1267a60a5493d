"""A score or mask function cut in two: what stays inside a kernel, and what is computed outside and streamed to it.

A kernel cannot index arrays of the caller's by what it likes. It can load a number for a head, for each row, column or
diagonal of a tile, and do arithmetic. So whatever of the function does not depend on the logit, nor on query and key
both, is computed outside, for all that it is the same for, whatever indexing it does: `slope[n]` is a stream per head,
`table[q - k + T]` one per diagonal, `values[b, k] * slope[n]` one per key. What remains is arithmetic on the logit, the
indices and the streams.

The outer function is plain JAX: from cotangents of the streams, which a kernel sums, its transpose makes those of the
arguments. It is evaluated at every head, row, column and diagonal, so a function with poles there (`is_total` of
`ScoreFunction` is False) would let 0 times NaN into them.
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
from jflash.scores.function import ScoreFunction


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
      step: `inner` as a `ScoreFunction` calls it, with (s, b, n, q, k, *streams).

    Example:
      >>> add = lambda s, b, n, q, k, slope: s - slope[n] * abs(q - k).astype(s.dtype)
      >>> cut = streams_of(add, (np.ones(4, np.float32),), B=2, N=4, T=8, S=8, dtype=np.dtype("float32"))
      >>> [(stream.axes, stream.shape) for stream in cut.streams]
      [('BN', (1, 4))]
    """

    streams: tuple[Stream, ...]
    inner: Callable[..., Array]
    outer: Callable[..., tuple[Array, ...]]
    step: Callable[..., Array]

    @property
    def per_pair(self) -> tuple[str, ...]:
        """Why some streams have a number for each pair; empty where none has."""
        return tuple(stream.reason for stream in self.streams if stream.reason)


def streams_of(
    fn: Callable[..., Any], args: Sequence[Any], *, B: int, N: int, T: int, S: int, dtype: np.dtype | None
) -> Streams:
    """Cuts a function in two. The same function with arrays of the same shapes gives the same record, traced once.

    Args:
      fn: `score_fn` of `flash_attention`, or the function of a `MaskFn`.
      args: what it takes after the indices; `jax.ShapeDtypeStruct` will do.
      dtype: of the logit; None for a function of indices alone.

    Raises:
      ArgumentError: the function does with the logit what is no arithmetic, index an array by it say.
    """
    structs = (jax.ShapeDtypeStruct(np.shape(arg), jax.dtypes.canonicalize_dtype(arg.dtype)) for arg in args)
    return _streams_of(fn, tuple(structs), (("B", B), ("N", N), ("T", T), ("S", S)), dtype)


def streamed(function: ScoreFunction, *, T: int, S: int, dtype: np.dtype) -> ScoreFunction:
    """The same step for a kernel: a function that indexes nothing, and arrays by axes in place of whole ones.

    Differentiate through this: the cotangents of whole arrays are made here from those of the streams.

    Args:
      function: of all batch rows and heads of a call, with arrays or `jax.ShapeDtypeStruct`.
      dtype: of the logits.

    Raises:
      ArgumentError: as of `streams_of`.
    """
    if all("B" in axes for axes in function.axes):
        return function
    sizes = tuple(tuple(array.shape) for array in function.arrays)
    fn = _of_whole_arrays(function.fn, function.axes, sizes)
    B, N = function.b.shape[0], function.n.shape[1]
    cut = streams_of(fn, function.arrays, B=B, N=N, T=T, S=S, dtype=dtype)
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in function.arrays):
        arrays = tuple(jax.ShapeDtypeStruct(stream.shape, stream.dtype) for stream in cut.streams)
    else:
        arrays = cut.outer(*function.arrays)
    axes = tuple(stream.axes for stream in cut.streams)
    return dataclasses.replace(function, fn=cut.step, arrays=arrays, axes=axes)


@functools.lru_cache(maxsize=256)
def _of_whole_arrays(
    fn: Callable[..., Any], axes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
) -> Callable[..., Any]:
    """The function with all of its arrays whole, of one that gets the values of some of them."""
    if not any("B" in own for own in axes):
        return fn

    @functools.wraps(fn)
    def of_whole(s: Any, b: Any, n: Any, q: Any, k: Any, *arrays: Any) -> Any:
        index = {"B": b, "N": n, "T": q, "S": k}
        values = (
            array[tuple(index[letter] if size > 1 else 0 for letter, size in zip(own, shape))] if "B" in own else array
            for array, own, shape in zip(arrays, axes, shapes)
        )
        return fn(s, b, n, q, k, *values)

    return of_whole


# Cached, so that `inner` is one function object: it is part of what is compiled.
@functools.lru_cache(maxsize=256)
def _streams_of(
    fn: Callable[..., Any],
    structs: tuple[jax.ShapeDtypeStruct, ...],
    lengths: tuple[tuple[str, int], ...],
    dtype: np.dtype | None,
) -> Streams:
    names = [*(["s"] if dtype is not None else []), *INDICES, *("arrays" for _ in structs)]
    scalars = [jax.ShapeDtypeStruct((), dtype if name == "s" else np.int32) for name in names if name != "arrays"]
    inputs, (result,) = expression_of(fn, [*scalars, *structs], names)
    cuts: dict[Part, str] = {}
    _cut(result, cuts)
    sizes = dict(lengths)
    streams = tuple(_describe(part, reason, sizes) for part, reason in cuts.items())
    own = {name: part for name, part in zip(names, inputs) if name != "arrays"}
    of_arrays = inputs[len(own) :]

    def inner(*values: Any) -> Array:
        given = [own[name] for name in ("s", "q", "k") if name in own]
        known = dict(zip((*given, *cuts), values, strict=True))
        return _evaluate(result, known, _on_arrays)

    def outer(*args: Any) -> tuple[Array, ...]:
        def at(part: Part, *indices: Array) -> Array:
            known = dict(zip((own[name] for name in INDICES), indices)) | dict(zip(of_arrays, args, strict=True))
            return _evaluate(part, known, lambda operation, *values: operation.run(*values))

        return tuple(_over_axes(functools.partial(at, part), stream, sizes) for part, stream in zip(cuts, streams))

    @functools.wraps(fn)
    def step(s: Any, b: Any, n: Any, q: Any, k: Any, *values: Any) -> Array:
        return inner(s, q, k, *values)

    return Streams(streams=streams, inner=inner, outer=outer, step=step)


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


def _over_axes(at: Callable[..., Array], stream: Stream, sizes: Mapping[str, int]) -> Array:
    """The array of a stream, from the function of (b, n, q, k) that it is at one pair."""
    index = {letter: jnp.arange(size, dtype=np.int32) for letter, size in zip(stream.axes, stream.shape)}
    if "D" in index:
        # Of q and k it depends on q - k alone, so k = 0 stands for all.
        index["T"] = index.pop("D") - (sizes["S"] - 1)
    arguments = [index.get(letter, jnp.zeros(1, np.int32)) for letter in "BNTS"]
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
