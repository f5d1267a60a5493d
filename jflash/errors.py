"""The errors of jflash: each names what was wrong, what was found, what is wanted and what to do."""

import contextlib
from collections.abc import Iterator, Mapping

LAYOUT = (
    "Layout is (batch, length, heads, head_dim): q (B, T, N, H), k (B, S, K, H), v (B, S, K, Hv), "
    "or the same without B."
)


class ArgumentError(ValueError):
    """An argument of a public call is not what the call takes.

    Attributes:
      argument: the name of the argument at fault.
    """

    def __init__(self, argument: str, *, found: object, wanted: str, hint: str = ""):
        self.argument = argument
        self._parts = {"found": found, "wanted": wanted, "hint": hint}
        super().__init__(f"`{argument}`: found {found}, wanted {wanted}." + (f" {hint}" if hint else ""))

    def named(self, argument: str) -> "ArgumentError":
        """The same error of an argument of another name."""
        return type(self)(argument, **self._parts)


class ShapeError(ArgumentError):
    """An array has the wrong rank or the wrong size along an axis; the message ends with the layout."""

    def __init__(self, argument: str, *, found: object, wanted: str, hint: str = ""):
        super().__init__(argument, found=found, wanted=wanted, hint=f"{hint} {LAYOUT}".strip())
        self._parts["hint"] = hint


class DtypeError(ArgumentError):
    """An array has a dtype that the call does not take, or dtypes are mixed."""


@contextlib.contextmanager
def naming(**names: str) -> Iterator[None]:
    """Errors raised inside name the argument as the caller knows it: `naming(left="window")`."""
    try:
        yield
    except ArgumentError as error:
        if error.argument not in names:
            raise
        raise error.named(names[error.argument]) from error


class UnsupportedError(ValueError):
    """No backend that may be used can do what was asked.

    Attributes:
      reasons: for each backend that refused, the reason.
    """

    def __init__(self, reasons: Mapping[str, str], *, hint: str = ""):
        self.reasons = dict(reasons)
        lines = [f"  {backend}: {reason}" for backend, reason in self.reasons.items()]
        head = "this call is not supported:" if len(lines) == 1 else "no backend supports this call:"
        super().__init__("\n".join([head, *lines] + ([hint] if hint else [])))
