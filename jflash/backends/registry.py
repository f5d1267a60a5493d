"""Which backends there are, and in which order `backend="auto"` tries them."""

import contextlib
import importlib
from collections.abc import Iterator

from jflash.backends.protocol import Backend
from jflash.errors import ArgumentError

# Modules are imported at the first use of their backend, so that `import jflash` loads no GPU code.
_MODULES = {
    "mosaic_gpu": "jflash.backends.mosaic_gpu",
    "cudnn": "jflash.backends.cudnn",
    "xla": "jflash.backends.xla",
    "reference": "jflash.backends.reference",
}

# The order of "auto" on each lowering platform. On CUDA our kernels come first, and `cudnn` where none of them takes
# the call: many times faster than a scan. `xla` is everywhere the last: it takes every problem. `reference` is in no
# order: its memory grows with T x S, which nobody should get unasked.
_AUTO: dict[str, tuple[str, ...]] = {"cuda": ("mosaic_gpu", "cudnn")}
AUTO_ANYWHERE = ("xla",)

_registered: dict[str, Backend] = {}


def names() -> tuple[str, ...]:
    """The names that `backend=` takes, besides "auto"."""
    return (*_registered, *_MODULES)


def get(name: str) -> Backend:
    """The backend of this name.

    Raises:
      ArgumentError: there is none.
    """
    if name in _registered:
        return _registered[name]
    if name not in _MODULES:
        raise ArgumentError("backend", found=repr(name), wanted=f'"auto" or one of {", ".join(map(repr, names()))}')
    return importlib.import_module(_MODULES[name]).BACKEND


def auto_order(platform: str) -> tuple[str, ...]:
    """The names that "auto" tries on this platform, in order."""
    return (*_AUTO.get(platform, ()), *AUTO_ANYWHERE)


@contextlib.contextmanager
def registered(backend: Backend, *, auto_on: tuple[str, ...] = ()) -> Iterator[None]:
    """Adds a backend from outside for the length of a `with` block, in front of "auto" on some platforms.

    Raises:
      ArgumentError: the name is taken.
    """
    if backend.name in (*names(), "auto"):
        raise ArgumentError("backend", found=repr(backend.name), wanted="a name that is not taken")
    before = dict(_AUTO)
    _registered[backend.name] = backend
    for platform in auto_on:
        _AUTO[platform] = (backend.name, *_AUTO.get(platform, ()))
    try:
        yield
    finally:
        del _registered[backend.name]
        _AUTO.clear()
        _AUTO.update(before)
