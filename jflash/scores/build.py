"""From the arguments of a call to the steps from logit to logit."""

from typing import Any

import numpy as np

from jflash.scores.alibi import linear_bias
from jflash.scores.function import ScoreFunction, refuse_args, score_function


def score_functions(
    slopes: Any, position: Any, score_fn: Any, score_args: Any, *, B: int, N: int, dtype: np.dtype
) -> tuple[ScoreFunction, ...]:
    """The steps in their order, in the dtype of the logits; `position` as of `linear_bias`.

    Raises:
      ArgumentError, ShapeError, DtypeError: an argument is not as `flash_attention` says.
    """
    sizes = {"B": B, "N": N, "dtype": dtype}
    steps = () if slopes is None else (linear_bias(slopes, position, **sizes),)
    if score_fn is not None:
        return (*steps, score_function(score_fn, score_args, **sizes))
    refuse_args(score_args)
    return steps
