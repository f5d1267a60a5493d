"""A mask that is a function of the caller's, of indices and of arrays that it names."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jflash.errors import ArgumentError, ShapeError
from jflash.masks.arrays import canonical, refuse_captured, reshaped, shown
from jflash.masks.mask import Interval, Mask, Value, is_traced, kind_of, pattern


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The axes of an array: all of them, how many of the last it must have, and which may have size 1."""

    all: str
    fewest: int
    broadcast: str = "B"

    def last(self, count: int) -> str:
        return self.all[len(self.all) - count :]

    def bound(self, name: str, array: Any, sizes: dict[str, int]) -> Any:
        """The array with all its axes.

        Raises:
          ShapeError: it does not fit the sizes.
        """
        missing = len(self.all) - array.ndim
        allowed = [(sizes[axis], 1) if axis in self.broadcast else (sizes[axis],) for axis in self.last(array.ndim)]
        is_right = self.fewest <= array.ndim <= len(self.all)
        if not is_right or any(size not in wanted for size, wanted in zip(array.shape, allowed)):
            letters = ", ".join(f"{axis}={sizes[axis]}" for axis in self.all)
            wanted = f"the last {self.fewest} to {len(self.all)} axes of ({letters})"
            raise ShapeError(name, found=f"shape {array.shape}", wanted=wanted)
        return reshaped(array, (1,) * missing + array.shape)


# The fields of arrays, in the order of their values.
_AXES = {
    "per_query": _Axes("BT", 1),
    "per_key": _Axes("BS", 1),
    "per_head": _Axes("BN", 1),
    "per_batch": _Axes("B", 0),
    "per_pair": _Axes("BNTS", 2, broadcast="BNTS"),
}


@pattern
class MaskFn(Mask):
    """The pairs for which a function is True: `fn(b, n, q, k, *values)`, of the indices and of values at them.

    `fn` is traced with arrays of indices that broadcast against each other, and must compute elementwise, with `&` and
    `|` rather than `and` and `or`. It is part of the compiled program: pass the same function object again, since one
    that is made anew each time compiles each time. Arrays belong into the arguments below, where they may be traced and
    change without compiling; they come after the indices, in the order of the arguments.

    Tiles that are empty are found by evaluating all pairs once for each call, in no array of all pairs, and are then
    skipped as those of any other mask. A pattern says the same without evaluating anything: prefer one where it fits.

    Args:
      fn: the function, to booleans.
      per_query: arrays (T,) or (B, T).
      per_key: arrays (S,) or (B, S).
      per_head: arrays (N,) or (B, N).
      per_batch: arrays () or (B,).
      per_pair: arrays of rank 2 to 4, broadcastable to (B, N, T, S).

    Raises:
      ArgumentError: `fn` is no function to booleans or captures a traced array, or an array has another shape.

    Source: the mask functions of FlexAttention (arXiv:2412.05496), with arrays as arguments.

    Example:
      >>> near = lambda b, n, q, k, reach: abs(q - k) <= reach
      >>> print(MaskFn(near, per_query=(np.array([0, 1, 3]),)).draw(3, 4))
      #...
      ###.
      ####
    """

    has_function: ClassVar[bool] = True
    fn: Callable[..., Any]
    per_query: tuple[Any, ...] = ()
    per_key: tuple[Any, ...] = ()
    per_head: tuple[Any, ...] = ()
    per_batch: tuple[Any, ...] = ()
    per_pair: tuple[Any, ...] = ()
    # The indices of batch rows and heads, where `fn` uses them: devices of a mesh have a part of them.
    b: Any = None
    n: Any = None

    def __post_init__(self):
        if not callable(self.fn):
            raise ArgumentError("fn", found=type(self.fn).__name__, wanted="a function of (b, n, q, k, *values)")
        refuse_captured("fn", self.fn, wanted="traced arrays as arguments, per_query=(...,) and the like")
        for name in _AXES:
            arrays = getattr(self, name)
            if not isinstance(arrays, tuple | list):
                raise ArgumentError(name, found=type(arrays).__name__, wanted="a tuple of arrays")
            object.__setattr__(self, name, tuple(map(canonical, arrays)))

    def _each(self) -> Iterator[tuple[str, Any]]:
        return ((name, array) for name in _AXES for array in getattr(self, name))

    def values(self) -> tuple[Value, ...]:
        own = [Value(array, _AXES[name].last(array.ndim)) for name, array in self._each()]
        indices = [Value(array, axes) for array, axes in ((self.b, "B"), (self.n, "BN")) if array is not None]
        return (*own, *indices)

    def evaluate(self, q, k, *values):
        values = list(values)
        n = values.pop() if self.n is not None else 0
        b = values.pop() if self.b is not None else 0
        return self._pairs(b, n, q, k, *values)

    def allowed(self, q, k, *, b=0, n=0):
        if self.b is not None or self.n is not None:
            return super().allowed(q, k, b=b, n=n)
        # Before `bind`: the indices are those asked for.
        indices = {"B": b, "N": n, "T": q, "S": k}
        return self._pairs(b, n, q, k, *(value.at(indices) for value in self.values()))

    def _pairs(self, b, n, q, k, *values):
        # Of the shape of all pairs, also where the function does not look at the queries or the keys.
        return self.fn(b, n, q, k, *values) & ((q == q) & (k == k))

    def tile_kind(self, queries: Interval, keys: Interval, *bounds: Interval) -> Any:
        # Arrays, so that with the same function and sizes the compiled program is found again.
        tiles, longest = zip(*(_ends_and_longest(*map(np.asarray, ends)) for ends in (queries, keys)))
        if is_traced(*jax.tree.leaves(self)):
            return _kinds(self, *tiles, longest)
        with jax.ensure_compile_time_eval():  # Known when tracing.
            return np.asarray(_kinds(self, *tiles, longest))

    def bind(self, *, B: int, N: int, T: int, S: int) -> "MaskFn":
        arrays: dict[str, list[Any]] = {name: [] for name in _AXES}
        for name, array in self._each():
            arrays[name].append(_AXES[name].bound(name, array, {"B": B, "N": N, "T": T, "S": S}))
        uses_b, uses_n = _uses_batch_and_head(self.fn, tuple(np.dtype(x.dtype) for _, x in self._each()))
        # Arrays, and not counted where the function runs: a device of a mesh has a part of the rows and heads.
        b = np.arange(B, dtype=np.int32) if uses_b else None
        n = np.arange(N, dtype=np.int32)[None] if uses_n else None
        return MaskFn(self.fn, **{name: tuple(found) for name, found in arrays.items()}, b=b, n=n)

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        fields = [(field, ", ".join(map(shown, arrays))) for field in _AXES if (arrays := getattr(self, field))]
        return f"MaskFn({', '.join([name, *(f'{field}=({arrays},)' for field, arrays in fields)])})"


def _ends_and_longest(first: np.ndarray, last: np.ndarray) -> tuple[Interval, int]:
    """The ends of tiles, without the last ones where all tiles are of one length, and the largest length."""
    lengths = last - first + 1
    return Interval(first, None if (lengths == lengths.max()).all() else last), int(lengths.max())


@functools.partial(jax.jit, static_argnames="longest")
def _kinds(mask: MaskFn, queries: Interval, keys: Interval, longest: tuple[int, int]) -> Any:
    """The kind of each tile, from all of its pairs; the ends of tiles have axes B, N, query tiles, key tiles."""
    sizes = dict.fromkeys("BN", 1)
    for value in mask.values():
        sizes |= {axis: max(sizes[axis], size) for axis, size in zip(value.axes, value.array.shape) if axis in sizes}
    rows, heads = np.ix_(*(np.arange(size, dtype=np.int32) for size in sizes.values()))
    b, n = rows[..., None, None, None, None], heads[..., None, None, None, None]

    def indices(tiles: Interval, inside: np.ndarray) -> Any:
        index = tiles.first[..., None, None] + inside
        # Past the end of a tile its last pair is evaluated again, which changes no kind.
        return index if tiles.last is None else jnp.minimum(index, tiles.last[..., None, None])

    # With two more axes, inside a tile.
    inside = np.ix_(*(np.arange(size, dtype=np.int32) for size in longest))
    pairs = mask.allowed(*map(indices, (queries, keys), inside), b=b, n=n)

    def join(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
        return a[0] | b[0], a[1] & b[1]

    # One reduction to both: XLA evaluates the function inside of it, where two would have an array of all pairs.
    some, every = lax.reduce((pairs, pairs), (np.False_, np.True_), join, (pairs.ndim - 2, pairs.ndim - 1))
    return kind_of(full=every, empty=~some)


@functools.lru_cache(maxsize=1024)
def _uses_batch_and_head(fn: Callable[..., Any], dtypes: tuple[np.dtype, ...]) -> tuple[bool, bool]:
    """Whether the function looks at b and at n: a mask that does not is the same for all, and smaller."""
    scalars = [jax.ShapeDtypeStruct((), np.int32)] * 4 + [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
    jaxpr = jax.make_jaxpr(fn)(*scalars).jaxpr
    found = [str(var.aval.dtype) for var in jaxpr.outvars]
    if found != ["bool"]:
        raise ArgumentError("fn", found=f"a function to {', '.join(found) or 'nothing'}", wanted="one to booleans")
    used = {id(var) for equation in jaxpr.eqns for var in equation.invars} | {id(var) for var in jaxpr.outvars}
    return id(jaxpr.invars[0]) in used, id(jaxpr.invars[1]) in used
