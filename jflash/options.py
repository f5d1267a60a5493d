"""Options that no argument of a call carries: from the environment once, or for the length of a `with` block.

| option | environment | meaning |
|---|---|---|
| `hardware` | `JFLASH_HARDWARE` | plan traced calls for this device (`"h200"`, ...) instead of the present one |
| `strict` | `JFLASH_STRICT` | `backend="auto"` raises where it would warn and take `xla`, all kernels refusing |
| `tuning_table` | `JFLASH_TUNING_TABLE` | a file of `jflash tune`, which comes before the shipped table |

A call on concrete arrays is planned for the device that holds them, since it runs there and now. A traced call may be
lowered for another platform than it was planned for, or for several: a backend asked for by name is then lowered all
the same, and "auto" decides per platform, between what it planned for `hardware` and `xla` everywhere else. Planned for
a CPU, which is so where no GPU is present and none is told, it is `xla` on CUDA too.

Options are read when a call is planned, inside `jax.jit` when it is traced: a compiled function keeps the plan it has.
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping

from jflash.errors import ArgumentError

_PREFIX = "JFLASH_"
_BOOLEANS = {"0": False, "false": False, "1": True, "true": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """One setting of all options; the fields are described at the top of this module."""

    hardware: str | None = None
    strict: bool = False
    tuning_table: str | None = None


def from_environment(environment: Mapping[str, str]) -> Options:
    """Reads the `JFLASH_*` variables.

    Raises:
      ArgumentError: a variable with the prefix that is no option, or a value that is not of its kind.
    """
    known = {_PREFIX + field.name.upper(): field.name for field in dataclasses.fields(Options)}
    given = {name: text for name, text in environment.items() if name.startswith(_PREFIX)}
    for name in given.keys() - known.keys():
        raise ArgumentError(name, found="an unknown variable", wanted=f"one of {', '.join(known)}")
    values: dict[str, object] = {}
    for name, text in given.items():
        field = known[name]
        if field == "strict":
            if text.lower() not in _BOOLEANS:
                raise ArgumentError(name, found=repr(text), wanted=f"one of {', '.join(_BOOLEANS)}")
            values[field] = _BOOLEANS[text.lower()]
        else:
            values[field] = text
    return Options(**values)


@functools.cache
def _environment_options() -> Options:
    return from_environment(os.environ)


_override: contextvars.ContextVar[Options | None] = contextvars.ContextVar("jflash_options", default=None)


def current_options() -> Options:
    """The options in force here."""
    return _override.get() or _environment_options()


@contextlib.contextmanager
def use_options(
    *, hardware: str | None = None, strict: bool | None = None, tuning_table: str | None = None
) -> Iterator[Options]:
    """Changes options for the length of a `with` block; an option left at None keeps its value.

    Example:
      >>> import jflash
      >>> with jflash.use_options(strict=True) as options:
      ...     options.strict
      True
    """
    given = {"hardware": hardware, "strict": strict, "tuning_table": tuning_table}
    changes = {name: value for name, value in given.items() if value is not None}
    options = dataclasses.replace(current_options(), **changes)
    token = _override.set(options)
    try:
        yield options
    finally:
        _override.reset(token)
