"""All that a logit has besides q·k, scale, softcap and mask, as one record of arrays beside q, k and v."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from jflash.errors import ArgumentError, ShapeError
from jflash.masks.arrays import is_array, reshaped
from jflash.scores.dropout import Dropout
from jflash.scores.function import ScoreFunction, floating


class ScoreTerms(NamedTuple):
    """What shapes logits and weights, each None or empty where the call has none.

    Attributes:
      bias: each axis 1 or that of (B, N, T, S).
      functions: the steps after the softcap, in their order.
      sinks: (B or 1, N), a logit per head of a key without a value.
      dropout: of the weights, after the softmax.
    """

    bias: Float[Array, "#B #N #T #S"] | None = None
    functions: tuple[ScoreFunction, ...] = ()
    sinks: Float[Array, "#B N"] | None = None
    dropout: Dropout | None = None

    def axes(self) -> tuple[str, ...]:
        """A letter for each axis of each array, in the order of the leaves; `WHOLE` where each device has all of it."""
        of_bias = () if self.bias is None else ("BNTS",)
        of_sinks = () if self.sinks is None else ("BN",)
        of_functions = (axes for function in self.functions for _, axes in function.leaves())
        of_dropout = () if self.dropout is None else (axes for _, axes in self.dropout.leaves())
        return (*of_bias, *of_functions, *of_sinks, *of_dropout)


def per_head(name: str, array: Any, *, B: int, N: int, dtype: np.dtype) -> Any:
    """One number for each head, (1, N) or (B, N), in the dtype of the logits.

    Raises:
      ShapeError: it is not (N,) or (B, N).
      DtypeError: it is not floating point, or wider than the logits.
    """
    if not is_array(array):
        raise ArgumentError(name, found=type(array).__name__, wanted="an array (N,) or (B, N), a number for each head")
    if array.shape not in ((N,), (1, N), (B, N)):
        raise ShapeError(name, found=f"shape {array.shape}", wanted=f"(N,) or (B, N) with B={B}, N={N}")
    return floating(name, reshaped(array, (1, N) if array.ndim == 1 else array.shape), dtype)
