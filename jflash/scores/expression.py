"""A function of pairs as a graph of its parts, and on which of the indices each part depends.

The function is traced at one pair, with scalars for the logit and the indices. So a part is what JAX computes for one
pair, and its place says for which pairs it is the same.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

INDICES = ("b", "n", "q", "k")


class Place(enum.Enum):
    """Along what of the tile of a batch row and head a part differs. The value is its axis letter."""

    NOWHERE = ""
    QUERY = "T"
    KEY = "S"
    DIAGONAL = "D"
    """By q - k alone."""
    PAIR = "TS"


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A value of the function.

    Attributes:
      aval: its shape and dtype at one pair.
      depends: on which of "s", "b", "n", "q", "k" and "arrays" it depends; arrays are arguments, and captured ones.
      slope: (i, j) where it is i * q + j * k and something of neither; None where that is not known.
      is_diagonal: of q and k it depends on q - k alone.
      is_arithmetic: it is made of inputs by nothing but arithmetic on scalars.
      is_crossed: in its making something else than arithmetic takes what depends on q and k both.
      operation: what makes it; None for inputs.
      operands: of the operation.
      value: where it is known, of a number or a captured array.
    """

    aval: Any
    depends: frozenset[str] = frozenset()
    slope: tuple[int, int] | None = (0, 0)
    is_diagonal: bool = True
    is_arithmetic: bool = True
    is_crossed: bool = False
    operation: "Operation | None" = None
    operands: tuple["Part", ...] = ()
    output: int = 0
    value: Any = None

    @property
    def place(self) -> Place:
        along = self.depends & {"q", "k"}
        if len(along) == 2:
            return Place.DIAGONAL if self.is_diagonal else Place.PAIR
        return {"q": Place.QUERY, "k": Place.KEY}[next(iter(along))] if along else Place.NOWHERE

    @property
    def number(self) -> Any:
        """The value as a Python number, where it is a known one."""
        return None if self.value is None or np.ndim(self.value) else np.asarray(self.value).item()

    @property
    def is_plain(self) -> bool:
        """It is arithmetic on q, k and numbers, which costs a kernel less than to load it."""
        return self.is_arithmetic and self.depends <= {"q", "k"}


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One equation of a jaxpr.

    Attributes:
      name: of its primitive.
      run: from its operands to its results, at one pair.
      bind: the same on arrays of any one shape; None where it is no arithmetic on scalars.
    """

    name: str
    run: Callable[..., Sequence[Any]]
    bind: Callable[..., Sequence[Any]] | None


def expression_of(
    fn: Callable[..., Any], structs: Sequence[Any], depends: Sequence[set[str]]
) -> tuple[list[Part], list[Part]]:
    """The inputs and the results of a function, as parts.

    Args:
      structs: shapes and dtypes of what it takes, for one pair.
      depends: for each of those on which of "s", `INDICES` and "arrays" it depends; q and k are themselves.
    """
    closed = jax.make_jaxpr(fn)(*structs)
    inputs = [_input(var.aval, frozenset(own)) for var, own in zip(closed.jaxpr.invars, depends)]
    return inputs, _parts(closed.jaxpr, [*map(_constant, closed.consts), *inputs], {})


def _input(aval: Any, depends: frozenset[str]) -> Part:
    slope = None if "s" in depends else (int("q" in depends), int("k" in depends))
    return Part(aval, depends, slope, is_diagonal=not depends & {"q", "k"})


def _constant(value: Any) -> Part:
    is_number = np.ndim(value) == 0
    return Part(jax.typeof(value), frozenset() if is_number else frozenset({"arrays"}), value=value)


# Calls whose contents can stand in their place. Functions with derivatives of their own are not among them.
_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"}


def _parts(jaxpr: Jaxpr, inputs: Sequence[Part], made: dict[Any, list[Part]]) -> list[Part]:
    """The results of a jaxpr, whose constants and inputs are these; `made` has the results of equations met before."""
    known: dict[Var, Part] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs))

    def read(atom: Any) -> Part:
        return Part(atom.aval, value=atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands = tuple(map(read, equation.invars))
        name = equation.primitive.name
        if name in _CALLS:
            inner = equation.params[_CALLS[name]]
            consts = map(_constant, getattr(inner, "consts", ()))
            results = _parts(getattr(inner, "jaxpr", inner), [*consts, *operands], made)
        else:
            # What a function says twice is one part, and one stream.
            key = _key(equation, operands)
            results = made[key] if key in made else _apply(equation, operands)
            made |= {} if key is None else {key: results}
        known |= zip(equation.outvars, results)
    return list(map(read, jaxpr.outvars))


def _key(equation: Any, operands: tuple[Part, ...]) -> Any:
    """What two equations have in common that compute the same; None where that cannot be told."""
    of = (x if x.number is None else (x.number, x.aval.dtype) for x in operands)
    key = equation.primitive, tuple(sorted(equation.params.items())), tuple(of)
    try:
        hash(key)
    except TypeError:  # There are parameters without a hash.
        return None
    return key


def _apply(equation: Any, operands: tuple[Part, ...]) -> list[Part]:
    def run(*values: Any) -> Sequence[Any]:
        # As JAX evaluates an equation (0.11.2 and 0.12.0): a rule of its own is made of its jaxpr anew each time.
        results = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
        return results if equation.primitive.multiple_results else (results,)

    name = equation.primitive.name
    bind = _on_arrays(equation, run) if _is_arithmetic(equation) else None
    operation = Operation(name, run, bind)
    slope = _slope(name, equation, operands)
    depends = frozenset().union(*(operand.depends for operand in operands))
    if slope is not None:
        depends -= {index for index, factor in zip("qk", slope) if not factor}
    is_diagonal = slope[0] == -slope[1] if slope is not None else all(operand.is_diagonal for operand in operands)
    if name in _COMPARISONS:
        is_diagonal |= _has_diagonal_difference(operands)
    is_crossed = bind is None and {"q", "k"} <= depends
    made = {
        "depends": depends,
        "slope": slope,
        "is_diagonal": is_diagonal,
        "is_arithmetic": bind is not None and all(operand.is_arithmetic for operand in operands),
        "is_crossed": is_crossed or any(operand.is_crossed for operand in operands),
        "operation": operation,
        "operands": operands,
    }
    return [Part(var.aval, output=output, **made) for output, var in enumerate(equation.outvars)]


def _slope(name: str, equation: Any, operands: tuple[Part, ...]) -> tuple[int, int] | None:
    """How a result changes with q and k, where it is linear in them, exactly."""
    slopes = [operand.slope for operand in operands]
    if all(slope == (0, 0) for slope in slopes):
        return 0, 0
    if None in slopes or not all(map(_is_exact, (*operands, *equation.outvars))):
        return None
    match name, operands:
        case "add", _:
            return tuple(map(sum, zip(*slopes)))
        case "sub", _:
            return tuple(a - b for a, b in zip(*slopes))
        case "neg", _:
            return tuple(-a for a in slopes[0])
        case (("convert_element_type" | "copy" | "squeeze" | "reshape" | "broadcast_in_dim"), _):
            return slopes[0]
        case "mul", (one, other):
            factor, of = (one.number, other) if one.number is not None else (other.number, one)
            return tuple(int(factor) * a for a in of.slope) if factor is not None else None
    return None


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def _has_diagonal_difference(operands: tuple[Part, ...]) -> bool:
    """Whether the difference of two operands changes with q - k alone: then so does what a comparison of them says."""
    one, other = (operand.slope for operand in operands)
    if one is None or other is None or not all(map(_is_exact, operands)):
        return False
    return one[0] - other[0] == other[1] - one[1]


def _is_exact(x: Part | Var) -> bool:
    """Whether sums of it are exact: whole numbers are, below 2^24 also as floats, and others round."""
    if np.dtype(x.aval.dtype).itemsize < 4:
        return False
    if jnp.issubdtype(x.aval.dtype, jnp.integer) or not isinstance(x, Part) or x.slope != (0, 0):
        return True
    return x.number is not None and float(x.number).is_integer()


_ARITHMETIC = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh div eq erf "
    "erf_inv exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter "
    "not or population_count pow rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign "
    "sin sinh sqrt square sub tan tanh xor".split()
)
# What only changes the shape, and is nothing at all on scalars.
SHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"})
_WITH_RULE = frozenset({"custom_jvp_call", "custom_vjp_call"})


def _is_arithmetic(equation: Any) -> bool:
    """Whether an equation is arithmetic on scalars."""
    if any(atom.aval.shape for atom in (*equation.invars, *equation.outvars)):
        return False
    name = equation.primitive.name
    if name in _WITH_RULE or name in _CALLS:
        inner = equation.params[_CALLS.get(name, "call_jaxpr")]
        return all(map(_is_arithmetic, getattr(inner, "jaxpr", inner).eqns))
    return name in _ARITHMETIC or name in SHAPES


def _on_arrays(equation: Any, run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    name = equation.primitive.name
    if name in SHAPES:
        return lambda x: (x,)
    if name in _WITH_RULE:
        # Only JAX can carry such a rule over to arrays.
        return lambda *xs: functools.reduce(lambda f, _: jax.vmap(f), range(np.ndim(xs[0])), run)(*xs)
    return run
