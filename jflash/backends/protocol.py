"""What a backend is: a record of functions. Backends do not know each other, and nobody else knows their insides."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jflash.hardware import Hardware
from jflash.masks.mask import Mask, MaskStructure
from jflash.numerics.online_softmax import Attended
from jflash.problem import Problem, terms_of
from jflash.scores import WHOLE, Dropout, ScoreFunction, ScoreTerms, StreamedDropout

RESIDUAL_NAMES = ("jflash_out", "jflash_lse")
"""Names of out and lse for policies of `jax.checkpoint`; saving them spares the second forward pass."""


def name_residuals(attended: Attended) -> Attended:
    """Gives out and lse their published names. What is returned and what is saved must both be this named value."""
    named = (None if array is None else checkpoint_name(array, name) for array, name in zip(attended, RESIDUAL_NAMES))
    return Attended(*named)


class Operands(NamedTuple):
    """The arrays of one call; the problem says the rest.

    Attributes:
      q: (B, T, N, H); k: (B, S, K, H); v: (B, S, K, Hv).
      terms: what else the logits are made of; None for nothing.
      mask: after `bind`, so that every array in it has a leading axis of size 1 or B.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K Hv"]
    terms: ScoreTerms | None
    mask: Mask

    @property
    def bias(self) -> Float[Array, "#B #N #T #S"] | None:
        """Each axis 1 or that of (B, N, T, S); or None."""
        return self.terms and self.terms.bias

    @property
    def functions(self) -> tuple[ScoreFunction, ...]:
        """The steps from logit to logit after the softcap."""
        return self.terms.functions if self.terms else ()

    @property
    def sinks(self) -> Float[Array, "#B N"] | None:
        """A logit per head of a key without a value; or None."""
        return self.terms and self.terms.sinks

    @property
    def dropout(self) -> Dropout | StreamedDropout | None:
        """Which weights are dropped; or None."""
        return self.terms and self.terms.dropout


def flatten(operands: Operands) -> tuple[tuple[Array, ...], tuple[str, ...], Callable[..., Operands]]:
    """The arrays of the operands, a letter for each axis of each of them, and the function that puts them back."""
    arrays, tree = jax.tree.flatten(operands)
    term_axes = operands.terms.axes() if operands.terms else ()
    axes = ("BTNH", "BSKH", "BSKD", *term_axes, *(value.axes for value in operands.mask.values()))
    return tuple(arrays), axes, lambda *arrays: jax.tree.unflatten(tree, arrays)


class Gradients(NamedTuple):
    """What a backward pass gives.

    Attributes:
      q, k, v: cotangents, in the shapes and dtypes of the operands.
      values: of each array of the logits that is `Problem.learned`, in the order of `logit_arrays`, the cotangent in
        float32; its axes are those of `gradient_axes`.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K Hv"]
    values: tuple[Float[Array, "..."], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of attention.

    Attributes:
      name: as in `backend="xla"`.
      supports: None, or a sentence that says why this problem cannot run on this hardware, with the offending number.
      default_tiles: the tiles for a problem; None where the backend has none.
      forward: (problem, tiles, operands) to out, in `problem.out_dtype`, and lse; lse is None where the backend has
        none, which only a backend without `backward` may do, and only where `problem.lse` does not ask for it.
      backward: (problem, tiles, operands, attended, cotangents) to the cotangents of q, k, v, from what `forward` gave
        and the cotangents of that; that of lse is None where nobody has one. None where JAX differentiates `forward`
        itself.
      tiles_type: the type of `tiles=` that it takes; None where it takes none.
      notes: what a user should know of how it computes a problem that it takes; `explain` tells.
      tuned_kernels: the fields of the tiles that a tuning table may set for a problem, each a record for one kernel, of
        numbers and booleans, with `operand_bytes(H, Hv)`, what its operands take of shared memory.
      candidate_tiles: (problem, hardware, tiles, kernel) to the tiles next to these in that field that fit, what
        `jflash tune` tries.
    """

    name: str
    supports: Callable[[Problem, Hardware], str | None]
    forward: Callable[[Problem, Any, Operands], Attended]
    backward: Callable[[Problem, Any, Operands, Attended, Attended], Gradients] | None = None
    default_tiles: Callable[[Problem, Hardware], Any] = lambda problem, hardware: None
    tiles_type: type | None = None
    notes: Callable[[Problem], tuple[str, ...]] = lambda problem: ()
    tuned_kernels: Callable[[Problem], tuple[str, ...]] = lambda problem: ()
    candidate_tiles: Callable[[Problem, Hardware, Any, str], tuple[Any, ...]] = (
        lambda problem, hardware, tiles, kernel: ()
    )


def problem_of(problem: Problem, operands: Operands) -> Problem:
    """The problem that these operands pose, where they differ from `problem` in batch and heads only.

    One device's part of a partitioned call and a call folded by `jax.vmap` are such problems.
    """
    B, T, N, H = operands.q.shape
    _, S, K, Hv = operands.v.shape
    return dataclasses.replace(
        problem,
        B=B, T=T, S=S, N=N, K=K, H=H, Hv=Hv,
        mask=MaskStructure.of(operands.mask),
        **terms_of(operands.terms),
    )  # fmt: skip


def logit_arrays(operands: Operands) -> list[tuple[Array, str]]:
    """What logits are made of besides q and k, as arrays with their axes: the bias, then those of the functions."""
    of_bias = [] if operands.bias is None else [(operands.bias, "BNTS")]
    return of_bias + [leaf for function in operands.functions for leaf in function.leaves()]


def learned_flags(problem: Problem, operands: Operands) -> tuple[bool, ...]:
    """`Problem.learned` of the `logit_arrays`."""
    count = len(logit_arrays(operands))
    return problem.learned[:count] or (False,) * count


def learned_arrays(problem: Problem, operands: Operands) -> list[tuple[Array, str]]:
    """The `logit_arrays` that are `Problem.learned`."""
    flags = learned_flags(problem, operands)
    return [leaf for leaf, is_learned in zip(logit_arrays(operands), flags) if is_learned]


def with_learned_arrays(problem: Problem, operands: Operands, arrays: list[Array]) -> Operands:
    """The operands with others in the places of their `learned_arrays`."""
    if not arrays:
        return operands
    own = operands.terms.bias, operands.terms.functions
    leaves, tree = jax.tree.flatten(own)
    rest = iter(arrays)
    flags = learned_flags(problem, operands)
    leaves = [next(rest) if is_learned else leaf for leaf, is_learned in zip(leaves, flags, strict=True)]
    bias, functions = jax.tree.unflatten(tree, leaves)
    return operands._replace(terms=operands.terms._replace(bias=bias, functions=functions))


def gradient_axes(array: Array, axes: str) -> str:
    """A letter for each axis of the cotangent that a kernel gives of one of the `logit_arrays`; a small one has size 1.

    It is that of each batch row and head, also where the array is the same for several of them. But of pairs or
    diagonals such an array would be larger than the cotangent itself: there the kernel sums over its own batch rows and
    heads.
    """
    if axes == "BND":
        # Of the axes of an operation D is another's.
        return "".join(letter if size > 1 else letter.lower() for letter, size in zip("BN", array.shape)) + WHOLE
    is_of_pairs = axes == "BNTS" and min(array.shape[2:]) > 1
    return "".join(
        letter if size > 1 or (letter in "BN" and not is_of_pairs) else letter.lower()
        for letter, size in zip(axes, array.shape)
    )
