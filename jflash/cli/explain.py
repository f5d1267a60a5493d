"""`jflash explain`: which backend and tiles a call would get, from its sizes alone."""

from collections.abc import Sequence
from typing import Any

import jax

from jflash.api import explain as explain_call
from jflash.errors import ArgumentError
from jflash.plan import Explanation

_LETTERS = ("B", "T", "S", "N", "K", "H", "Hv")


def explain(
    sizes: Sequence[str], *, dtype: str, causal: bool, window: str | None, hardware: str | None, backend: str
) -> Explanation:
    """The explanation for sizes such as `["T=4096", "N=32", "H=128"]`.

    Raises:
      ArgumentError: a size, a name or a window that means nothing.
    """
    size = sizes_of(sizes)

    def array(length: str, heads: str, dim: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size["B"], size[length], size[heads], size[dim]), dtype)

    with jax.enable_x64(dtype == "float64" or jax.config.jax_enable_x64):
        return explain_call(
            array("T", "N", "H"), array("S", "K", "H"), array("S", "K", "Hv"),
            causal=causal, window=None if window is None else window_of(window), hardware=hardware, backend=backend,
        )  # fmt: skip


def reasons(explanation: Explanation) -> str:
    """Why nothing runs: the reason of each backend that was asked."""
    return "; ".join(explanation.refusals[name] for name in explanation.order)


def given_sizes(texts: Sequence[str]) -> dict[str, int]:
    """The sizes in texts such as "T=4096"."""
    size: dict[str, int] = {}
    for text in texts:
        letter, _, number = text.partition("=")
        if letter not in _LETTERS or not number.isdecimal():
            raise ArgumentError("sizes", found=repr(text), wanted=f"LETTER=SIZE with a letter of {', '.join(_LETTERS)}")
        size[letter] = int(number)
    return size


def sizes_of(texts: Sequence[str]) -> dict[str, int]:
    """All sizes of a call; B is 1, S as T, K as N and Hv as H where they are not given."""
    size = given_sizes(texts)
    missing = [letter for letter in ("T", "N", "H") if letter not in size]
    if missing:
        wanted = "at least T, N and H, as in T=4096 N=32 H=128"
        raise ArgumentError("sizes", found=f"no {', '.join(missing)}", wanted=wanted)
    return {"B": 1, "S": size["T"], "K": size["N"], "Hv": size["H"]} | size


def window_of(text: str) -> tuple[int | None, int | None]:
    """The distances of a text such as "1023,none"."""

    def distance(part: str) -> Any:
        return None if part.strip().lower() == "none" else int(part)

    try:
        left, right = map(distance, text.split(","))
    except ValueError:
        raise ArgumentError("window", found=repr(text), wanted='LEFT,RIGHT, each a number or "none"') from None
    return left, right
