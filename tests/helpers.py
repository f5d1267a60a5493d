"""What several test files share: random operands, both passes of one call, their float64 truth, and the comparison."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jflash
from jflash.masks import Dense, Mask


class Case(NamedTuple):
    """The arrays of one call and the cotangents of its results."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    d_lse: Any
    bias: Any = None

    def astype(self, dtype: Any) -> "Case":
        """The same numbers in another dtype; the cotangent of lse and the bias keep theirs but for float64."""
        wide = dtype == np.float64
        q, k, v, d_out = (np.asarray(array).astype(dtype) for array in self[:4])
        d_lse, bias = (array if array is None or not wide else np.asarray(array).astype(dtype) for array in self[4:])
        return Case(q, k, v, d_out, d_lse, bias)


def random_case(
    seed: int = 0,
    *,
    B: int,
    T: int,
    S: int,
    N: int,
    K: int,
    H: int,
    Hv: int,
    dtype: Any = np.float32,
    bias: tuple[int, ...] | None = None,
) -> Case:
    """Normal random numbers for everything, cotangents too: a uniform cotangent cannot see a permutation."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    q, k, v, d_out = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, Hv), normal(B, T, N, Hv)
    return Case(q, k, v, d_out, normal(B, N, T), None if bias is None else normal(*bias)).astype(dtype)


class Passes(NamedTuple):
    """Both passes of one call, as numpy arrays."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None


@functools.partial(jax.jit, static_argnums=2)
def _passes(case: Case, mask: Mask | None, arguments: tuple[tuple[str, Any], ...]) -> tuple:
    def call(q, k, v, bias):
        return jflash.flash_attention_with_lse(q, k, v, bias=bias, mask=mask, **dict(arguments))

    attended, pull_back = jax.vjp(call, case.q, case.k, case.v, case.bias)
    return (*attended, *pull_back(jflash.Attended(case.d_out, case.d_lse)))


def passes(case: Case, *, mask: Mask | None = None, **arguments: Any) -> Passes:
    """Out, lse and all gradients; `arguments` are the static ones of the call."""
    return Passes(
        *(None if array is None else np.asarray(array) for array in _passes(case, mask, tuple(arguments.items())))
    )


@functools.partial(jax.jit, static_argnums=2)
def _forward(case: Case, mask: Mask | None, arguments: tuple[tuple[str, Any], ...]) -> jflash.Attended:
    return jflash.flash_attention_with_lse(case.q, case.k, case.v, bias=case.bias, mask=mask, **dict(arguments))


def forward(case: Case, *, mask: Mask | None = None, **arguments: Any) -> jflash.Attended:
    """Out and lse alone, as numpy arrays: a test whose point is the value need not compile the gradients."""
    return jflash.Attended(*map(np.asarray, _forward(case, mask, tuple(arguments.items()))))


def truth(case: Case, *, allowed: np.ndarray | None = None, **arguments: Any) -> Passes:
    """The same from the reference in float64, with the mask written out as an array of booleans up to (B, N, T, S)."""
    mask = None if allowed is None else Dense(np.asarray(allowed))
    with jax.enable_x64(True):
        return passes(case.astype(np.float64), mask=mask, backend="reference", **arguments)


def tolerance(dtype: Any, wanted: np.ndarray) -> float:
    """The term of the error rule that needs no yardstick: c * eps * max|truth|, where c is 1, or 16 from 32 bits on."""
    scale = np.abs(wanted, where=np.isfinite(wanted), out=np.zeros(wanted.shape)).max(initial=0)
    return (1 if np.dtype(dtype).itemsize == 2 else 16) * float(jnp.finfo(dtype).eps) * scale


def assert_close(found: Any, wanted: Any, *, atol: float, name: str = "") -> None:
    """Same shape, infinities at the same places, no NaN on either side, and all else within `atol`."""
    found, wanted = np.asarray(found).astype(np.float64), np.asarray(wanted).astype(np.float64)
    assert found.shape == wanted.shape, f"{name}: shape {found.shape}, wanted {wanted.shape}"
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, equal_nan=False, err_msg=name)


def assert_right(found: Passes, wanted: Passes) -> None:
    """Every part of `found` is within the tolerance of its own dtype of the float64 truth."""
    for name, one, other in zip(Passes._fields, found, wanted, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            # A float32 bias has a float32 gradient, but with 16-bit inputs out was rounded on the way to it.
            dtype = found.out.dtype if name == "dbias" and found.out.dtype.itemsize < one.dtype.itemsize else one.dtype
            assert_close(one, other, atol=tolerance(dtype, other), name=name)


def assert_same_bits(found: Passes, wanted: Passes) -> None:
    """Every part is bit for bit the same, and none of it NaN."""
    for name, one, other in zip(Passes._fields, found, wanted, strict=True):
        if one is not None:
            assert not np.isnan(one).any(), f"{name} has NaN"
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            assert one.tobytes() == other.tobytes(), f"{name} differs in its bits"


def drawn(picture: str) -> np.ndarray:
    """A mask drawn by hand: a row for each query, `#` where it sees the key."""
    return np.array([[character == "#" for character in row] for row in picture.split()])


def count(jaxpr: Any, found: Callable[[Any], bool]) -> int:
    """How many equations of a jaxpr satisfy `found`, in all that is nested in it."""
    total = 0
    for equation in jaxpr.eqns:
        total += bool(found(equation))
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                total += count(inner, found) if hasattr(inner, "eqns") else 0
    return total
