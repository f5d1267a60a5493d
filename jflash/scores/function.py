"""A step from logit to logit: a function of the logit, of indices and of arrays, the caller's or a built-in one."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var
from jaxtyping import Array, Bool, Float

from jflash.errors import ArgumentError, DtypeError
from jflash.masks.arrays import canonical, is_array, refuse_captured, shown

WHOLE = "."
"""The letter of an axis that is nobody's: the function gets the array whole, and indexes it."""

# Puts what an array by axes, "BN" or "BNT" say, has at the pairs of the logits where it broadcasts against them.
type Place = Callable[[Array, str], Array]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays", "b", "n"], meta_fields=["fn", "axes", "is_total"]
)
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ScoreFunction:
    """`fn(s, b, n, q, k, *args)`: another logit in place of `s`, elementwise.

    The function and the axes are part of the compiled program, the arrays are not.

    Attributes:
      fn: takes the logits and indices of batch row, head, query and key, all broadcastable against each other.
      arrays: what it takes besides; floating ones have a gradient, and the dtype of the logits.
      axes: for each array a letter for each axis. With "B", "BN", or these and "T" for queries, "S" for keys, "D" for
        diagonals, `fn` gets its values at the indices, otherwise, with `WHOLE` for each axis, the array.
      is_total: `fn` and its derivatives are finite at every pair, whether that attends or not.
      b: (B,), n: (1, N), the indices: arrays, since a device of a mesh has a part of the rows and heads.
    """

    fn: Callable[..., Any]
    arrays: tuple[Any, ...]
    axes: tuple[str, ...]
    is_total: bool
    b: Any
    n: Any

    def leaves(self) -> Iterator[tuple[Any, str]]:
        """Every array with its axes, in the order of the pytree's leaves."""
        yield from zip(self.arrays, self.axes)
        yield from ((self.b, "B"), (self.n, "BN"))

    def apply(self, s: Float[Array, "..."], q: Any, k: Any, *, allowed: Bool[Array, "..."] | None, place: Place) -> Any:
        """The logits after this step. `s` must be finite where `allowed` is False, and what comes out there is garbage.

        No derivative of a pair that is not allowed is NaN or infinite.
        """
        b, n = place(self.b, "B"), place(self.n, "BN")
        args = [place(array, axes) if "B" in axes else array for array, axes in zip(self.arrays, self.axes)]
        if allowed is not None and not self.is_total:
            (b, n, q, k), args = self._at_allowed_pairs(jnp.broadcast_to(allowed, s.shape), (b, n, q, k), args)
        return jnp.broadcast_to(self.fn(s, b, n, q, k, *args), s.shape)

    def _at_allowed_pairs(self, allowed: Array, indices: tuple[Any, ...], args: list[Any]) -> tuple[tuple, list[Any]]:
        """The indices, those of an allowed pair standing for each pair that is not; and args likewise.

        A function may be NaN, or have a derivative that is, where the mask hides it: `log(q - k)` under a causal mask.
        Replacing the value afterwards does not help, since the cotangent of an argument sums 0 times that. So the
        function is only run at pairs that attend.
        """
        first = jnp.argmax(allowed)

        def here(x: Any) -> Array:
            x = jnp.broadcast_to(x, allowed.shape)
            return jnp.where(allowed, x, x.reshape(-1)[first])

        # Where no pair is allowed there is none to stand in: then nothing is differentiated.
        some = allowed.any()
        args = [here(array) if "B" in axes else array for array, axes in zip(args, self.axes)]
        args = [jnp.where(some, x, jax.lax.stop_gradient(x)) if is_float(x) else x for x in args]
        return tuple(map(here, indices)), args

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"{name}({', '.join(map(shown, self.arrays))})"


def score_function(fn: Any, args: Any, *, B: int, N: int, dtype: np.dtype) -> ScoreFunction:
    """A function of the caller's, which gets its arrays whole.

    Args:
      fn, args: `score_fn` and `score_args` of `flash_attention`.
      dtype: of the logits.

    Raises:
      ArgumentError: `fn` is no elementwise function to one logit, or captures a traced array.
      DtypeError: an argument is wider than the logits, or neither floating point nor whole numbers nor booleans.
    """
    if not callable(fn):
        raise ArgumentError("score_fn", found=type(fn).__name__, wanted="a function of (s, b, n, q, k, *score_args)")
    refuse_captured("score_fn", fn, wanted="traced arrays as arguments, in score_args=(...,)")
    if not isinstance(args, tuple):
        raise ArgumentError("score_args", found=type(args).__name__, wanted="a tuple of arrays")
    arrays = tuple(_argument(arg, dtype) for arg in args)
    try:
        is_total = _is_total(fn, dtype, tuple((tuple(x.shape), np.dtype(x.dtype)) for x in arrays))
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        hint = "It is part of the compiled program, found again by its hash."
        raise ArgumentError(
            "score_fn", found="a function without a hash", wanted="one with a hash", hint=hint
        ) from error
    return ScoreFunction(
        fn=fn, arrays=arrays, axes=tuple(WHOLE * x.ndim for x in arrays), is_total=is_total, **indices(B=B, N=N)
    )


def refuse_args(args: Any) -> None:
    """Refuses `score_args` of a call that has no `score_fn`.

    Raises:
      ArgumentError: there are some.
    """
    if not isinstance(args, tuple) or args:
        raise ArgumentError("score_args", found=f"{args!r} without a function", wanted="a `score_fn` to take them")


def at_pairs(array: Array, axes: str, *, q: Array, k: Array, S: int) -> Array:
    """What an array has at pairs: its last axes by the letters after "BN" become two, of queries and of keys.

    Args:
      axes: of the array, after those for B and N: "", "T", "S", "D" or "TS". Entry q - k + S - 1 along D belongs to the
        diagonal of q and k.
      q, k: (rows, 1) and (1, columns).
    """
    index = {"T": q, "S": k, "D": q - k + (S - 1)}
    return array[(..., *(index[letter] for letter in axes))] if axes else array[..., None, None]


def indices(*, B: int, N: int) -> dict[str, np.ndarray]:
    """The indices of all batch rows and heads, as fields of a `ScoreFunction`."""
    return {"b": np.arange(B, dtype=np.int32), "n": np.arange(N, dtype=np.int32)[None]}


def cast(array: Any, dtype: np.dtype) -> Any:
    """The array in another dtype, a `jax.ShapeDtypeStruct` too."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, dtype)
    return array if array.dtype == dtype else jnp.asarray(array, dtype)


def floating(name: str, array: Any, dtype: np.dtype) -> Any:
    """An array of floating point numbers in the dtype of the logits.

    Raises:
      DtypeError: it is none, or wider than the logits.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise DtypeError(name, found=f"dtype {array.dtype}", wanted="floating point")
    if np.dtype(array.dtype).itemsize > dtype.itemsize:
        wanted = f"at most {dtype}, in which the logits are computed"
        raise DtypeError(name, found=f"dtype {array.dtype}", wanted=wanted, hint="Cast on the caller's side.")
    return cast(array, dtype)


def _argument(arg: Any, dtype: np.dtype) -> Any:
    if isinstance(arg, float):
        return np.asarray(arg, dtype)
    if not is_array(arg) and not isinstance(arg, int):
        raise ArgumentError("score_args", found=type(arg).__name__, wanted="arrays or numbers")
    if isinstance(arg, int) or jnp.issubdtype(arg.dtype, jnp.integer) or arg.dtype == np.bool_:
        return canonical(arg)
    return floating("score_args", arg, dtype)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


# Primitives on floating point numbers that are finite wherever their operands are, their derivatives too: sums and
# products of logits stay far below the largest float32. Others, `log` or `exp` or a division, are taken to have poles.
_TOTAL = frozenset(
    "abs add add_any broadcast_in_dim clamp concatenate convert_element_type copy cos custom_jvp_call dynamic_slice "
    "expand_dims gather jit logistic max min mul neg reshape select_n sign sin slice square squeeze stop_gradient sub "
    "tanh transpose".split()
)


@functools.lru_cache(maxsize=1024)
def _is_total(fn: Callable[..., Any], dtype: np.dtype, args: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> bool:
    """Whether the function is finite at every pair; see `_TOTAL`. It is traced once, and checked there.

    Raises:
      ArgumentError: it does not give one logit for each.
    """
    # Sizes that tell the axes apart, and that no array of the caller's is likely to have.
    shape = (11, 13, 17, 19)
    index = [
        jax.ShapeDtypeStruct(tuple(size if axis == own else 1 for axis, size in enumerate(shape)), np.int32)
        for own in range(4)
    ]
    structs = [jax.ShapeDtypeStruct(*arg) for arg in args]
    jaxpr = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(shape, dtype), *index, *structs)
    found = ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in jaxpr.out_avals) or "nothing"
    if [aval.dtype for aval in jaxpr.out_avals] != [dtype] or not _fits(jaxpr.out_avals[0].shape, shape):
        wanted = f"one to {dtype}, elementwise: {dtype}{list(shape)} from logits of that shape"
        hint = "A sum over one of these axes, or an index that is an array of its own, is not elementwise."
        raise ArgumentError("score_fn", found=f"a function to {found}", wanted=wanted, hint=hint)
    return _is_total_in(jaxpr.jaxpr)


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array of one shape broadcasts to another."""
    return len(found) <= len(shape) and all(a in (1, b) for a, b in zip(found[::-1], shape[::-1]))


def _is_total_in(jaxpr: Any) -> bool:
    """Whether all is total that floating point results are made of; what becomes an index or a choice need not be."""
    relevant = {var for var in jaxpr.outvars if isinstance(var, Var) and is_float(var.aval)}
    for equation in reversed(jaxpr.eqns):
        if relevant.isdisjoint(equation.outvars):
            continue
        if not _is_total_equation(equation):
            return False
        relevant |= {var for var in equation.invars if isinstance(var, Var) and is_float(var.aval)}
    return True


def _is_total_equation(equation: Any) -> bool:
    name, parameters = equation.primitive.name, equation.params
    if name == "div":
        divisor = equation.invars[1]
        return isinstance(divisor, Literal) and divisor.val != 0
    if name == "integer_pow":
        return parameters["y"] >= 0
    inner = (getattr(parameter, "jaxpr", parameter) for parameter in parameters.values())
    return name in _TOTAL and all(_is_total_in(jaxpr) for jaxpr in inner if hasattr(jaxpr, "eqns"))
